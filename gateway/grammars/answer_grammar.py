"""Joins the pieces of an answer's grammar into one grammar. Sans-IO (I9).

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

# Rule for any text.
ANY_TEXT = "/(?s:.*)/"
# Escapes, and characters that a Lark regular expression cannot contain unescaped.
_ESCAPED = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_LARK_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
# A client's \d, \w and \s are ASCII, as in vLLM and JSON Schema; llguidance's are Unicode. Valid within a class too.
_ASCII_SETS = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]", r"\s": r"[\t-\r ]"}
_ASCII_SETS |= {name.upper(): f"[^{members[1:]}" for name, members in _ASCII_SETS.items()}


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer's grammar.

    Attributes:
        body: the right side of a rule, in Lark.
        rules: lines, each defining a name in ``body``, unique to this piece.
        grammars: whole Lark grammars by name, each with a rule ``start``; ``body`` refers to one by ``@name``.
        sources: the JSON schemas of which the piece was made, by the client's field; None for a field in another
            notation. "#" and a JSON pointer after a field name the place of the schema in it.
        left_out: parts of schemas that are not enforced, each as the client's field and a JSON pointer.
    """

    body: str
    rules: tuple[str, ...] = ()
    grammars: dict[str, str] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class JoinedGrammar:
    """A whole grammar, as a worker gets it, with the ``sources`` and ``left_out`` of its pieces (:class:`Piece`)."""

    text: str
    sources: dict[str, Any]
    left_out: tuple[tuple[str, str], ...] = ()


def join(pieces: Sequence[Piece]) -> JoinedGrammar:
    """Join pieces into a grammar. Raises InvalidRequest if it is longer than MAX_GRAMMAR_BYTES."""
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
    """Return the client's fields in a grammar's sources, the largest schema first."""
    fields = sorted(sources, key=lambda name: -len(json.dumps(sources[name])))
    return list(dict.fromkeys(name.partition("#")[0] for name in fields))


def _text(pieces: Sequence[Piece]) -> str:
    start = " ".join(f"({piece.body})" for piece in pieces)
    rules = [rule for piece in pieces for rule in piece.rules]
    text = "\n".join(["%llguidance {}", f"start: {start}", *rules, ""])
    grammars = {name: grammar for piece in pieces for name, grammar in piece.grammars.items()}
    if not grammars:
        return text
    listed = [{"name": name, "lark_grammar": grammar} for name, grammar in ({"answer": text} | grammars).items()]
    return json.dumps({"grammars": listed}, ensure_ascii=False)


def literal(text: str) -> str:
    """Return ``text`` as a Lark string: a JSON string, with DEL escaped too."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def cut_at_tokens(text: str, ids: Mapping[str, int]) -> list[str]:
    """Split a text at special tokens (the keys of ``ids``); these are at odd indices."""
    parts: list[str] = []
    begin = 0
    for match in MARK.finditer(text):
        if match[0] in ids:
            parts += text[begin : match.start()], match[0]
            begin = match.end()
    return [*parts, text[begin:]]


def terms(parts: Sequence[str], ids: Mapping[str, int]) -> str:
    """Return the parts of :func:`cut_at_tokens` in a grammar: tokens by id, others by text."""
    return " ".join(f"<[{ids[part]}]>" if n % 2 else literal(part) for n, part in enumerate(parts) if part)


def expression(pattern: str, field: str) -> str:
    """Return a regular expression in Lark, between slashes. ``field``: the client's field with it, in which sets are
    ASCII and errors are reported (InvalidRequest); "" for an expression of the gateway."""
    sets = _ASCII_SETS if field else {}
    escaped = _ESCAPED.sub(lambda match: sets.get(match[0]) or _LARK_ESCAPES.get(match[0][-1], match[0]), pattern)
    if _ESCAPED.sub("", pattern).endswith("\\"):
        raise InvalidRequest.of(FieldViolation(field, "it ends within an escape"))
    return f"/{escaped}/"
