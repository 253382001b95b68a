"""Reads the shape of an answer that a body asks for, in OpenAI's words or in vLLM's."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Raw

from pillion.gateway.grammars.shapes import MAX_SHAPE_BYTES
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.json_objects import compact_json
from pillion.gateway.http_api.openai_fields import (
    READ_LATER,
    JsonObjectFormat,
    JsonSchemaFormat,
    ShapeBody,
    TagFormat,
    TextFormat,
    given,
    parse_field,
    refuse_unsupported,
)
from pillion.types import StructuredOutputs

# JSON needs at most six bytes for a character.
_MAX_RAW_BYTES = 6 * MAX_SHAPE_BYTES
_SHAPE = "sampling.structured_outputs"
# The client's names of fields, by the gateway's, where response_format is given.
FORMAT_NAMES: Mapping[str, str] = {
    f"{_SHAPE}.json": "response_format.json_schema.schema",
    f"{_SHAPE}.structural_tag": "response_format",
    _SHAPE: "response_format",
}


def read_shape(response_format: Raw, structured_outputs: Raw) -> StructuredOutputs | None:
    """The shape; None for free text. Raises ApiError."""
    for field, raw in (("response_format", response_format), ("structured_outputs", structured_outputs)):
        if len(bytes(raw)) > _MAX_RAW_BYTES:
            raise refused(field, f"more than {_MAX_RAW_BYTES} bytes")
    shape = None
    if given(response_format):
        field = "response_format"
        shape = _of_format(parse_field(response_format, READ_LATER[field], field))
    if not given(structured_outputs):
        return shape
    if shape is not None:
        raise refused("structured_outputs", "response_format asks for a shape already; send one of both")
    body: ShapeBody = parse_field(structured_outputs, ShapeBody, "structured_outputs")
    refuse_unsupported(body, "structured_outputs.")
    schema = compact_json(body.json, "structured_outputs.json", dict, str, bool) if given(body.json) else None
    return StructuredOutputs(
        json=msgspec.json.decode(schema) if schema is not None and schema.startswith('"') else schema,
        json_object=bool(body.json_object),
        regex=body.regex,
        choice=tuple(body.choice or ()),
        grammar=body.grammar,
        structural_tag=body.structural_tag,
    )


def _of_format(asked: TextFormat | JsonObjectFormat | JsonSchemaFormat | TagFormat) -> StructuredOutputs | None:
    match asked:
        case TextFormat():
            return None
        case JsonSchemaFormat(json_schema) if given(json_schema.schema):
            field = "response_format.json_schema.schema"
            return StructuredOutputs(json=compact_json(json_schema.schema, field, dict, bool))
        case TagFormat():
            triggers = Raw() if asked.triggers is None else Raw(msgspec.json.encode(asked.triggers))
            sent = (("structures", asked.structures), ("triggers", triggers), ("format", asked.format))
            parts = [
                f'"{name}":{compact_json(raw, f"response_format.{name}", dict if name == "format" else list)}'
                for name, raw in sent
                if given(raw)
            ]
            return StructuredOutputs(structural_tag=f"{{{','.join(parts)}}}")
    return StructuredOutputs(json_object=True)
