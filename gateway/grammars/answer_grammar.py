"""Joins the pieces of an answer into one grammar (I9).

    [piece] [piece] ... --join--> one text, which Submit.grammar carries to the worker

A piece is the right side of a rule in llguidance's variant of Lark, with the rules that it refers to. A grammar that a
client wrote is a grammar of its own within the text, so that none of its names can meet ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.formats.model_formats import MARK
from pillion.rules.grammar_limits import MAX_GRAMMAR_BYTES

# These characters cannot stand in a regular expression of Lark as they are, whether or not a client has escaped them.
_ESCAPED = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_WRITTEN = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
# A client's expression means ASCII's digits, words and white space, as in vLLM and in JSON Schema; to llguidance these
# are Unicode's. The sets may stand in a class, too.
_ASCII_SETS = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]", r"\s": r"[\t-\r ]"}
_ASCII_SETS |= {name.upper(): f"[^{members[1:]}" for name, members in _ASCII_SETS.items()}
# The text that a worker gets consists of several grammars; the one of this name refers to the others.
_ROOT = "answer"


@dataclass(frozen=True, slots=True)
class Piece:
    """Holds a part of an answer's grammar.

    Attributes:
        body: the right side of a rule, in Lark.
        rules: lines, each of which defines a name in ``body``. The names are this piece's alone.
        grammars: whole grammars in Lark by name, each with a rule ``start``; ``body`` refers to one by ``@name``.
        sources: the client's fields of which the piece was made, each with its JSON schema, or with None for other
            notations. A field may be followed by "#" and the JSON pointer of the schema in that of the field.
        left_out: the fields, and the places in their schemas as JSON pointers, to which answers are not held.
    """

    body: str
    rules: tuple[str, ...] = ()
    grammars: dict[str, str] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class JoinedGrammar:
    """Holds a grammar as a worker gets it, and the client's fields from which it was made, which errors name, and the
    places to which answers are not held (see ``Piece``)."""

    text: str
    sources: dict[str, Any]
    left_out: tuple[tuple[str, str], ...] = ()


def join(pieces: Sequence[Piece]) -> JoinedGrammar:
    """Makes the grammar whose answers are the pieces, one after the other. Raises InvalidRequest where the grammar is
    too long for a worker: that of a pattern is longer than the pattern."""
    sources = {name: source for piece in pieces for name, source in piece.sources.items()}
    text = _text(pieces)
    size_bytes = len(text.encode())
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise too_large(sources, size_bytes)
    return JoinedGrammar(text, sources, tuple(place for piece in pieces for place in piece.left_out))


def too_large(sources: Mapping[str, Any], size_bytes: int) -> InvalidRequest:
    """Returns the error for a grammar that is too large, which names the fields of its sources."""
    reason = f"a grammar of {size_bytes} bytes; at most {MAX_GRAMMAR_BYTES}"
    return InvalidRequest.of(*(FieldViolation(field, reason) for field in by_size(sources)))


def by_size(sources: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a grammar's sources, the one with the largest schema first."""
    fields = sorted(sources, key=lambda name: -len(json.dumps(sources[name])))
    return list(dict.fromkeys(name.partition("#")[0] for name in fields))


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
    """Returns ``text`` as a string of Lark, which is written like a string of JSON, except for a character that only
    Lark forbids."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def cut_at_tokens(text: str, ids: Mapping[str, int]) -> list[str]:
    """Cuts a text into special tokens of the model, whose ids ``ids`` has by their texts, at odd places, and what
    stands between them."""
    parts: list[str] = []
    begin = 0
    for found in MARK.finditer(text):
        if found[0] in ids:
            parts += text[begin : found.start()], found[0]
            begin = found.end()
    return [*parts, text[begin:]]


def terms(parts: Sequence[str], ids: Mapping[str, int]) -> str:
    """Returns what :func:`cut_at_tokens` has cut as a grammar writes it: tokens by their ids, anything else by its
    text."""
    return " ".join(f"<[{ids[part]}]>" if n % 2 else literal(part) for n, part in enumerate(parts) if part)


def expression(pattern: str, field: str) -> str:
    """Returns a regular expression between slashes, as Lark writes it. Raises InvalidRequest, which names the client's
    ``field``, "" for an expression that no client wrote."""
    sets = _ASCII_SETS if field else {}
    written = _ESCAPED.sub(lambda found: sets.get(found[0]) or _WRITTEN.get(found[0][-1], found[0]), pattern)
    if _ESCAPED.sub("", pattern).endswith("\\"):
        raise InvalidRequest.of(FieldViolation(field, "it ends within an escape"))
    return f"/{written}/"
