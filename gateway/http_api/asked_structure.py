"""Reads the structure that an answer must have, in OpenAI's words, vLLM's, SGLang's or llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.body_reading import given, parse_field
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.json_objects import compact_json
from pillion.gateway.http_api.openai_fields import (
    READ_LATER,
    ChatBody,
    CompletionBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    ShapeBody,
    TagFormat,
    TextFormat,
)
from pillion.gateway.request.validation import MAX_STRUCTURED_BYTES
from pillion.types import StructuredOutputs

# JSON needs at most six bytes for each character of a structure.
_MAX_RAW_BYTES = 6 * MAX_STRUCTURED_BYTES
# A structure comes with the client's names of its fields, by the gateway's. None stands for free text.
AskedStructure = tuple[StructuredOutputs | None, Mapping[str, str]]
_SHAPE = "sampling.structured_outputs"
# These fields of other servers ask for a structure, too; each is one of StructuredOutputs'.
_BY_NAME = {"json_schema": "json", "regex": "regex", "grammar": "grammar", "ebnf": "grammar"}


def read_structure(body: CompletionBody | ChatBody) -> AskedStructure:
    """Reads the structure that an answer must have, which at most one field asks for; returns it, and the client's
    names of its fields by the gateway's. Raises ApiError."""
    for name in ("response_format", "structured_outputs", "json_schema"):
        if len(bytes(getattr(body, name))) > _MAX_RAW_BYTES:
            raise refused(name, f"more than {_MAX_RAW_BYTES} bytes")
    asked: dict[str, AskedStructure] = {}
    if given(body.response_format):
        form = _of_format(parse_field(body.response_format, READ_LATER["response_format"], "response_format"))
        if form[0] is not None:
            asked["response_format"] = form
    if given(body.structured_outputs):
        asked["structured_outputs"] = _of_shape(body.structured_outputs), {}
    for name, kind in _BY_NAME.items():
        sent: Any = getattr(body, name)
        if isinstance(sent, Raw):
            sent = _schema(sent, name) if given(sent) else None
        if sent:
            asked[name] = StructuredOutputs(**{kind: sent}), {f"{_SHAPE}.{kind}": name}
    if len(asked) > 1:
        first, second = [*asked][:2]
        raise refused(second, f"{first} asks for a structure already; send one of both")
    return next(iter(asked.values()), (None, {}))


def _schema(raw: Raw, field: str) -> str:
    """Returns a JSON schema, which may have been sent as its text. Raises ApiError."""
    schema = compact_json(raw, field, dict, str, bool)
    return msgspec.json.decode(schema, type=str) if schema.startswith('"') else schema


def _of_shape(raw: Raw) -> StructuredOutputs:
    body: ShapeBody = parse_field(raw, ShapeBody, "structured_outputs")
    return StructuredOutputs(
        json=_schema(body.json, "structured_outputs.json") if given(body.json) else None,
        json_object=bool(body.json_object),
        regex=body.regex,
        choice=tuple(body.choice or ()),
        grammar=body.grammar,
        structural_tag=body.structural_tag,
    )


def _of_format(asked: TextFormat | JsonObjectFormat | JsonSchemaFormat | TagFormat) -> AskedStructure:
    schema, field = Raw(), "response_format.json_schema.schema"
    match asked:
        case TextFormat():
            return None, {}
        case JsonSchemaFormat():
            schema = asked.json_schema.schema
        case JsonObjectFormat():
            schema = asked.schema
            field = "response_format.schema" if given(schema) else field
        case TagFormat():
            return StructuredOutputs(structural_tag=_tag_of(asked)), _format_names(field)
    if not given(schema):
        return StructuredOutputs(json_object=True), _format_names(field)
    return StructuredOutputs(json=compact_json(schema, field, dict, bool)), _format_names(field)


def _tag_of(asked: TagFormat) -> str:
    triggers = Raw() if asked.triggers is None else Raw(msgspec.json.encode(asked.triggers))
    sent = (("structures", asked.structures), ("triggers", triggers), ("format", asked.format))
    parts = [
        f'"{name}":{compact_json(raw, f"response_format.{name}", dict if name == "format" else list)}'
        for name, raw in sent
        if given(raw)
    ]
    return f"{{{','.join(parts)}}}"


def _format_names(schema_field: str) -> Mapping[str, str]:
    """Returns the client's names of the gateway's fields where response_format asks for the structure."""
    names = (f"{_SHAPE}.structural_tag", _SHAPE)
    return {f"{_SHAPE}.json": schema_field, **dict.fromkeys(names, "response_format")}
