"""Joins the pieces of an answer into one grammar. Sans-IO (I9).

    [piece] [piece] ... --join--> one grammar, sent to the worker as Submit.grammar

A piece is the right side of a rule in llguidance's variant of Lark, with the rules that it refers to. A client's
grammar is a separate grammar within the text, so that names cannot collide.
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

# Characters that a Lark regular expression cannot contain unescaped, whether or not the client escaped them.
_ESCAPED = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_WRITTEN = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
# ASCII sets, which a client's expression means as in vLLM and in JSON Schema; llguidance's are Unicode. Valid within a
# class too.
_ASCII_SETS = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]", r"\s": r"[\t-\r ]"}
_ASCII_SETS |= {name.upper(): f"[^{members[1:]}" for name, members in _ASCII_SETS.items()}
_ROOT = "answer"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer's grammar.

    Attributes:
        body: the right side of a rule, in Lark.
        rules: lines, each defining a name in ``body``, unique to this piece.
        grammars: whole Lark grammars by name, each with a rule ``start``; ``body`` refers to one by ``@name``.
        sources: the client's fields of which the piece was made, each with its JSON schema, or None for other
            notations. A field may be followed by "#" and the JSON pointer of the schema in it.
        left_out: fields, with places in their schemas as JSON pointers, that are not enforced.
    """

    body: str
    rules: tuple[str, ...] = ()
    grammars: dict[str, str] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class JoinedGrammar:
    """A grammar for a worker, the client's fields of which it was made, for errors, and places that are not enforced
    (see ``Piece``)."""

    text: str
    sources: dict[str, Any]
    left_out: tuple[tuple[str, str], ...] = ()


def join(pieces: Sequence[Piece]) -> JoinedGrammar:
    """Join pieces into a grammar. Raises InvalidRequest if it is too long for a worker: a pattern's grammar is longer
    than the pattern."""
    sources = {name: source for piece in pieces for name, source in piece.sources.items()}
    text = _text(pieces)
    size_bytes = len(text.encode())
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise too_large(sources, size_bytes)
    return JoinedGrammar(text, sources, tuple(place for piece in pieces for place in piece.left_out))


def too_large(sources: Mapping[str, Any], size_bytes: int) -> InvalidRequest:
    """Create the error for a grammar that is too large, naming the fields of its sources."""
    reason = f"a grammar of {size_bytes} bytes; at most {MAX_GRAMMAR_BYTES}"
    return InvalidRequest.of(*(FieldViolation(field, reason) for field in by_size(sources)))


def by_size(sources: Mapping[str, Any]) -> list[str]:
    """Return the fields of a grammar's sources, the largest schema first."""
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
    """Return ``text`` as a Lark string, which is a JSON string except for a character that only Lark forbids."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def cut_at_tokens(text: str, ids: Mapping[str, int]) -> list[str]:
    """Split a text at special tokens (the keys of ``ids``); these are at odd indices."""
    parts: list[str] = []
    begin = 0
    for found in MARK.finditer(text):
        if found[0] in ids:
            parts += text[begin : found.start()], found[0]
            begin = found.end()
    return [*parts, text[begin:]]


def terms(parts: Sequence[str], ids: Mapping[str, int]) -> str:
    """Return the parts of :func:`cut_at_tokens` in a grammar: tokens by id, others by text."""
    return " ".join(f"<[{ids[part]}]>" if n % 2 else literal(part) for n, part in enumerate(parts) if part)


def expression(pattern: str, field: str) -> str:
    """Return a regular expression in Lark, between slashes. Raises InvalidRequest, which names the client's ``field``;
    "" for an expression of our own."""
    sets = _ASCII_SETS if field else {}
    written = _ESCAPED.sub(lambda found: sets.get(found[0]) or _WRITTEN.get(found[0][-1], found[0]), pattern)
    if _ESCAPED.sub("", pattern).endswith("\\"):
        raise InvalidRequest.of(FieldViolation(field, "it ends within an escape"))
    return f"/{written}/"
