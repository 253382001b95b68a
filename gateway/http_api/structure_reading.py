"""Parsing of requests for structured outputs, in the forms of all APIs and servers.

A request for a structure is fulfilled or refused, never ignored, since that would change the answer. So an unknown
field of a format is also refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.body_reading import current_reading, given, note_ignored, parse_field, with_reading
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.json_objects import compact_json
from pillion.gateway.http_api.structure_fields import FormatBody, ShapeBody, StructureBody
from pillion.gateway.request.validation import MAX_STRUCTURED_BYTES
from pillion.types import StructuredOutputs

# JSON needs at most six bytes per character of a structure.
_MAX_RAW_BYTES = 6 * MAX_STRUCTURED_BYTES
# A structure (None for free text), and the gateway's names of its fields -> the client's.
RequestedStructure = tuple[StructuredOutputs | None, Mapping[str, str]]
_OUTPUTS = "sampling.structured_outputs"
# Field that is itself a constraint -> its name in StructuredOutputs.
_BY_NAME = {
    "json_schema": "json",
    "guided_json": "json",
    "regex": "regex",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "ebnf": "grammar",
    "guided_grammar": "grammar",
}
# Fields with a format, and fields with an object that contains one.
_FORMATS = ("response_format", "format", "output_format", "grammar")
_HOLDERS = ("text", "output_config")
# All fields that may request a structure.
STRUCTURE_FIELDS = (*_FORMATS, *_HOLDERS, "structured_outputs", *_BY_NAME)
_JSON_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
# An object without a type is a schema if it has one of these keywords.
_KEYWORDS = frozenset(
    {"$ref", "$schema", "$defs", "allOf", "anyOf", "oneOf", "const", "enum", "items", "properties", "required"}
)
# Fields of the object in which OpenAI wraps a schema.
_WRAPPING = frozenset({"name", "schema", "strict", "description"})


def read_structure(body: StructureBody) -> RequestedStructure:
    """Parse the structure of the answer, which at most one field may request. Raises ApiError.

    Returns it, and the gateway's names of its fields -> the client's.
    """
    requested = {field: (structure, names) for field, structure, names in _requested(body) if structure is not None}
    if len(requested) > 1:
        first, second = [*requested][:2]
        raise refused(second, f"{first} also requests a structure; send only one")
    return next(iter(requested.values()), (None, {}))


def _requested(body: StructureBody) -> Iterator[tuple[str, StructuredOutputs | None, Mapping[str, str]]]:
    """Yield (field, structure, names of its fields) for each field of a body that may request a structure."""
    formats = {name: getattr(body, name) for name in _FORMATS}
    holders = ((name, getattr(body, name)) for name in _HOLDERS)
    formats |= {f"{name}.format": holder.format for name, holder in holders if holder is not None}
    for field, raw in formats.items():
        _check_size(raw, field)
        if field == "grammar" and raw and bytes(raw)[:1] == b'"':
            text = msgspec.json.decode(raw, type=str)
            yield field, StructuredOutputs(grammar=text) if text else None, {f"{_OUTPUTS}.grammar": field}
        elif given(raw):
            yield field, *_read_format(raw, field)
    if given(body.structured_outputs):
        _check_size(body.structured_outputs, "structured_outputs")
        yield "structured_outputs", _read_shape(body.structured_outputs), {}
    for field, kind in _BY_NAME.items():
        sent = getattr(body, field)
        if isinstance(sent, Raw) and given(sent):
            _check_size(sent, field)
            schema, path = _schema(sent, field)
            yield field, StructuredOutputs(json=schema), {f"{_OUTPUTS}.json": path}
        elif sent and not isinstance(sent, Raw):
            value: Any = tuple(sent) if isinstance(sent, list) else sent
            yield field, StructuredOutputs(**{kind: value}), {f"{_OUTPUTS}.{kind}": field}


def _check_size(raw: Raw, field: str) -> None:
    if len(bytes(raw)) > _MAX_RAW_BYTES:
        raise refused(field, f"more than {_MAX_RAW_BYTES} bytes")


def _read_shape(raw: Raw) -> StructuredOutputs:
    body: ShapeBody = parse_field(raw, ShapeBody, "structured_outputs")
    return StructuredOutputs(
        json=_schema(body.json, "structured_outputs.json")[0] if given(body.json) else None,
        json_object=bool(body.json_object),
        regex=body.regex,
        choice=tuple(body.choice or ()),
        grammar=body.grammar,
        structural_tag=body.structural_tag,
    )


def _read_format(raw: Raw, field: str) -> RequestedStructure:
    """Parse a format: an object with a type, a JSON schema, or the name of a type. Raises ApiError."""
    if bytes(raw)[:1] == b'"':
        name = parse_field(raw, str, field)
        if name.lstrip()[:1] == "{":
            return _json_constraint(raw, field, field)
        if name not in ("", "text", "json", "json_object"):
            raise refused(field, f"{name[:100]!r} is not supported here", "unsupported_value")
        return (StructuredOutputs(json_object=True) if name.startswith("json") else None), {_OUTPUTS: field}
    fields: dict[str, Raw] = parse_field(raw, dict[str, Raw], field)
    if _is_schema(fields):
        return _json_constraint(raw, field, field)
    # Strict, since an unknown field of a format may be another server's constraint.
    form: FormatBody = with_reading(replace(current_reading(), strict=True), parse_field, raw, FormatBody, field)
    match form.type:
        case "text":
            return None, {}
        case "json_object" | "json" | "json_schema":
            return _read_json_format(form, field)
        case "" if given(form.json_schema) or given(form.schema):
            return _read_json_format(form, field)
        case "regex":
            return _read_text(form, {"pattern": form.pattern, "regex": form.regex}, "regex", field)
        case "grammar":
            return _read_text(form, {"grammar": form.grammar}, "grammar", field)
        case "structural_tag":
            return StructuredOutputs(structural_tag=_read_structural_tag(form, field)), {
                f"{_OUTPUTS}.structural_tag": field,
                _OUTPUTS: field,
            }
    if not form.type:
        raise refused(f"{field}.type", "this field is required", "missing_required_parameter")
    raise refused(f"{field}.type", f"{form.type[:100]!r} is not supported here", "unsupported_value")


def _is_schema(fields: Mapping[str, Raw]) -> bool:
    """Return True if an object is itself a JSON schema, as in Ollama's format."""
    kind = bytes(fields.get("type", b""))
    if kind[:1] == b'"':
        return msgspec.json.decode(kind, type=str).lower() in _JSON_TYPES
    return kind[:1] == b"[" or (not kind and not _KEYWORDS.isdisjoint(fields))


def _read_json_format(form: FormatBody, field: str) -> RequestedStructure:
    sent = {"json_schema": form.json_schema, "schema": form.schema, "value": form.value}
    schemas = [name for name, raw in sent.items() if given(raw)]
    if len(schemas) > 1:
        raise refused(f"{field}.{schemas[1]}", f"{schemas[0]} is also set; send only one")
    if schemas:
        return _json_constraint(sent[schemas[0]], f"{field}.{schemas[0]}", field)
    if form.type == "json_schema":
        name = "json_schema" if field == "response_format" else "schema"
        raise refused(f"{field}.{name}", "this field is required", "missing_required_parameter")
    return StructuredOutputs(json_object=True), {_OUTPUTS: field}


def _json_constraint(raw: Raw, path: str, field: str) -> RequestedStructure:
    """Return the constraint for the JSON schema at ``path`` in ``field``. OpenAI's wrapper without a schema means any
    JSON object."""
    schema, path = _schema(raw, path)
    structure = StructuredOutputs(json=schema) if schema else StructuredOutputs(json_object=True)
    return structure, {f"{_OUTPUTS}.json": path, _OUTPUTS: field}


def _schema(raw: Raw, path: str) -> tuple[str, str]:
    """Return a JSON schema as text, and its path. The client may send it as an object or a string, bare or in OpenAI's
    wrapper; "" for a wrapper without a schema. Raises ApiError."""
    if bytes(raw)[:1] == b"{":
        fields = parse_field(raw, dict[str, Raw], path)
        if fields.keys() <= _WRAPPING and not fields.keys().isdisjoint(("name", "schema")):
            if given(fields.get("description", Raw())):
                note_ignored(f"{path}.description")
            raw, path = fields.get("schema", Raw()), f"{path}.schema"
            if not given(raw):
                return "", path
    schema = compact_json(raw, path, dict, str, bool)
    return (msgspec.json.decode(schema, type=str) if schema[:1] == '"' else schema), path


def _read_text(form: FormatBody, named: Mapping[str, str | None], kind: str, field: str) -> RequestedStructure:
    """Return the constraint of one kind that a format has as a string, in exactly one of the fields ``named`` and
    "value". Raises ApiError if none or several are set."""
    texts = {name: text for name, text in named.items() if text is not None}
    if given(form.value):
        texts["value"] = parse_field(form.value, str, f"{field}.value")
    if not texts:
        raise refused(f"{field}.{next(iter(named))}", "this field is required", "missing_required_parameter")
    name, text = texts.popitem()
    if texts:
        raise refused(f"{field}.{name}", f"{next(iter(texts))} is also set; send only one")
    structure: Any = {kind: text}
    return StructuredOutputs(**structure), {f"{_OUTPUTS}.{kind}": f"{field}.{name}", _OUTPUTS: field}


def _read_structural_tag(form: FormatBody, field: str) -> str:
    """Return a structural tag as JSON text."""
    triggers = Raw() if form.triggers is None else Raw(msgspec.json.encode(form.triggers))
    sent = (("structures", form.structures), ("triggers", triggers), ("format", form.format))
    parts = [
        f'"{name}":{compact_json(raw, f"{field}.{name}", dict if name == "format" else list)}'
        for name, raw in sent
        if given(raw)
    ]
    return f"{{{','.join(parts)}}}"
