"""Converts a client's structured outputs to pieces of a grammar. Sans-IO (I9)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pillion.errors import FieldViolation, InvalidRequest, SchemaViolation
from pillion.gateway.grammars.answer_grammar import Piece, expression, literal
from pillion.gateway.grammars.json_schema import MAX_VIOLATIONS, plain, schema_faults, written
from pillion.gateway.grammars.structural_tags import StructuralTag
from pillion.gateway.request.client_json import parsed
from pillion.types import StructuredOutputs

_FIELD = "sampling.structured_outputs"


def structured_piece(structured: StructuredOutputs, token_ids: Mapping[str, int] = MappingProxyType({})) -> Piece:
    """Return the piece for a validated structure; ``token_ids`` has the model's special tokens by text. Raises
    InvalidRequest if the structure cannot be parsed."""
    if structured.json is not None:
        return json_piece(_parsed(structured.json, f"{_FIELD}.json"), f"{_FIELD}.json")
    if structured.json_object:
        return json_piece({"type": "object"}, f"{_FIELD}.json_object")
    if structured.regex is not None:
        return Piece(expression(structured.regex, f"{_FIELD}.regex"), sources={f"{_FIELD}.regex": None})
    if structured.choice:
        # A single terminal, so that llguidance scans all choices at once.
        rule = f"CHOICE: {' | '.join(map(literal, structured.choice))}"
        return Piece("CHOICE", (rule,), sources={f"{_FIELD}.choice": None})
    if structured.grammar is not None:
        return Piece("@client", grammars={"client": structured.grammar}, sources={f"{_FIELD}.grammar": None})
    field = f"{_FIELD}.structural_tag"
    return StructuralTag(field, json_piece, token_ids).piece(_parsed(structured.structural_tag or "", field))


def json_piece(schema: Any, field: str) -> Piece:
    """Return the piece for JSON of ``schema``, from the client's ``field``. Raises InvalidRequest with each place in
    the schema that cannot be enforced."""
    return plain_json_piece(plain(schema), field)


def plain_json_piece(schema: Any, field: str, place: str = "", checked: bool = False) -> Piece:
    """Return the piece for JSON of a normalized schema, which is at ``place``, a JSON pointer, in that of ``field``.
    Raises InvalidRequest like ``json_piece``, unless ``checked``."""
    faults = [
        SchemaViolation(field, f"at {place}{path}: {reason}" if place + path else reason, place + path)
        for path, reason in itertools.islice(() if checked else schema_faults(schema), MAX_VIOLATIONS)
    ]
    if faults:
        raise InvalidRequest.of(*faults)
    whole = written(schema)
    return Piece(
        f"%json {json.dumps(whole, ensure_ascii=False)}", sources={f"{field}#{place}" if place else field: whole}
    )


def _parsed(text: str, field: str) -> Any:
    try:
        return parsed(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.of(FieldViolation(field, f"not JSON: {error}")) from None
