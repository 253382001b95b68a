"""Joins the pieces of an answer into one grammar (I9).

    [piece] [piece] ... --join--> one text, which Submit.grammar carries to the worker

A piece is what stands to the right of a rule in llguidance's variant of Lark, with the rules that it refers to. What a
client wrote in a grammar's notation is a grammar of its own within the text, so that none of its names can meet ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pillion.errors import FieldViolation, InvalidRequest
from pillion.grammar_limits import MAX_GRAMMAR_BYTES

# What an expression of Lark cannot hold as it is, escaped already or not.
_ESCAPED = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_WRITTEN = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
# The name of the grammar that the others are parts of.
_ROOT = "answer"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer's grammar.

    Attributes:
        body: the right side of a rule, in Lark.
        rules: lines that define what ``body`` names, each for itself. The names are this piece's alone.
        grammars: whole grammars in Lark by name, each with a rule ``start``; ``body`` refers to one by ``@name``.
        sources: the client's fields that it was made of, each with its JSON schema, or with None for other notations.
    """

    body: str
    rules: tuple[str, ...] = ()
    grammars: dict[str, str] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JoinedGrammar:
    """A grammar as a worker gets it, and what it was made of, for errors: see ``Piece.sources``."""

    text: str
    sources: dict[str, Any]


def join(pieces: Sequence[Piece]) -> JoinedGrammar:
    """The grammar whose answers are the pieces, one behind the other. Raises InvalidRequest for one that no worker
    takes: what stands for a pattern is longer than the pattern."""
    sources = {name: source for piece in pieces for name, source in piece.sources.items()}
    text = _text(pieces)
    size_bytes = len(text.encode())
    if size_bytes > MAX_GRAMMAR_BYTES:
        reason = f"a grammar of {size_bytes} bytes; at most {MAX_GRAMMAR_BYTES}"
        raise InvalidRequest.of(*(FieldViolation(field, reason) for field in sources))
    return JoinedGrammar(text, sources)


def _text(pieces: Sequence[Piece]) -> str:
    start = " ".join(f"({piece.body})" for piece in pieces)
    rules = [rule for piece in pieces for rule in piece.rules]
    text = "\n".join(["%llguidance {}", f"start: {start}", *rules, ""])
    grammars = {name: grammar for piece in pieces for name, grammar in piece.grammars.items()}
    if not grammars:
        return text
    listed = [{"name": name, "lark_grammar": grammar} for name, grammar in ({_ROOT: text} | grammars).items()]
    return json.dumps({"grammars": listed}, ensure_ascii=False)


def literal(text: str) -> str:
    """``text`` as a string of Lark: one of JSON, but for a character that only Lark forbids."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def expression(pattern: str, field: str) -> str:
    """A regular expression between slashes, as Lark has it; the client's ``field`` holds it. Raises InvalidRequest."""
    written = _ESCAPED.sub(lambda found: _WRITTEN.get(found[0][-1], found[0]), pattern)
    if _ESCAPED.sub("", pattern).endswith("\\"):
        raise InvalidRequest.of(FieldViolation(field, "it ends within an escape"))
    return f"/{written}/"
