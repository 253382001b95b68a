"""The shapes that a client may ask for, as pieces of a grammar (I9)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.formats.client_json import parsed
from pillion.gateway.grammars.answer_grammar import Piece, expression, literal
from pillion.gateway.grammars.json_schema import MAX_VIOLATIONS, schema_faults, written
from pillion.gateway.grammars.structural_tags import tag_piece
from pillion.types import StructuredOutputs

# The most that the text of a shape may take; OpenAI allows 120,000 characters of names and values.
MAX_SHAPE_BYTES = 128 * 2**10
MAX_CHOICES = 4096

_FIELD = "sampling.structured_outputs"


def shape_violations(shape: StructuredOutputs) -> Iterator[FieldViolation]:
    """What is wrong with a shape before anything is made of it: that it is one, its size, and that it is text."""
    given = _given(shape)
    if len(given) != 1:
        named = ", ".join(given) or "none"
        yield FieldViolation(_FIELD, f"exactly one shape of an answer can be asked for, not {named}")
        return
    name, value = next(iter(given.items()))
    texts = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
    if len(texts) > MAX_CHOICES:
        yield FieldViolation(f"{_FIELD}.{name}", f"{len(texts)} choices; at most {MAX_CHOICES}")
        return
    try:
        size_bytes = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        yield FieldViolation(f"{_FIELD}.{name}", "not valid Unicode")
        return
    if size_bytes > MAX_SHAPE_BYTES:
        yield FieldViolation(f"{_FIELD}.{name}", f"{size_bytes} bytes; at most {MAX_SHAPE_BYTES}")
    for n, text in enumerate(texts):
        if not text:
            at = f"[{n}]" if name == "choice" else ""
            yield FieldViolation(f"{_FIELD}.{name}{at}", "empty")
            return


def shape_bytes(shape: StructuredOutputs | None) -> int:
    """About how many bytes a shape has."""
    if shape is None:
        return 0
    texts = (shape.json, shape.regex, shape.grammar, shape.structural_tag, *shape.choice)
    return sum(len(text) for text in texts if text)


def shape_piece(shape: StructuredOutputs) -> Piece:
    """The piece of a checked shape. Raises InvalidRequest where its text is not what it should be."""
    if shape.json is not None:
        return json_piece(_parsed(shape.json, f"{_FIELD}.json"), f"{_FIELD}.json")
    if shape.json_object:
        return json_piece({"type": "object"}, f"{_FIELD}.json_object")
    if shape.regex is not None:
        return Piece(expression(shape.regex, f"{_FIELD}.regex"), sources={f"{_FIELD}.regex": None})
    if shape.choice:
        # One terminal, which is read in one go, however many choices there are.
        rule = f"CHOICE: {' | '.join(map(literal, shape.choice))}"
        return Piece("CHOICE", (rule,), sources={f"{_FIELD}.choice": None})
    if shape.grammar is not None:
        return Piece("@client", grammars={"client": shape.grammar}, sources={f"{_FIELD}.grammar": None})
    field = f"{_FIELD}.structural_tag"
    return tag_piece(_parsed(shape.structural_tag or "", field), field, json_piece)


def json_piece(schema: Any, field: str) -> Piece:
    """The piece of JSON that fits the ``schema`` of the client's ``field``. Raises InvalidRequest with each place in it
    that no answer can be held to."""
    faults = [
        FieldViolation(field, f"at {path}: {reason}" if path else reason)
        for path, reason in itertools.islice(schema_faults(schema), MAX_VIOLATIONS)
    ]
    if faults:
        raise InvalidRequest.of(*faults)
    whole = written(schema)
    return Piece(f"%json {json.dumps(whole, ensure_ascii=False)}", sources={field: whole})


def _given(shape: StructuredOutputs) -> dict[str, Any]:
    values = {field.name: getattr(shape, field.name) for field in fields(shape)}
    return {name: value for name, value in values.items() if value is not None and value is not False and value != ()}


def _parsed(text: str, field: str) -> Any:
    try:
        return parsed(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.of(FieldViolation(field, f"not JSON: {error}")) from None
