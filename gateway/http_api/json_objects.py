"""Parts of a body that are passed on as JSON text, e.g. a tool's schema, without parsing them into objects."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import repeat
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.request.client_json import is_object
from pillion.gateway.tokens.tokenizer import check_wanted

T = TypeVar("T")

# Accepted without effect; the response header IGNORED_HEADER names the field.
IGNORED = msgspec.Meta(extra={"effect": "none"})
Ignored = Annotated[T, IGNORED]
# Tag of the struct in a union that accepts objects with a missing or unknown tag, which its field sent_type receives.
OTHER = "?"
# Types of fields whose JSON is passed on. A plain Raw field is refused, or parsed later.
AnyJson = Annotated[Raw, msgspec.Meta(extra_json_schema={})]
JsonObject = Annotated[Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
JsonObjects = Annotated[Raw, msgspec.Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})]
JsonSchema = Annotated[Raw, msgspec.Meta(extra_json_schema={"type": ["object", "boolean", "null"]})]
JsonShape = Annotated[Raw, msgspec.Meta(extra_json_schema={"type": ["object", "string", "boolean", "null"]})]
# Key under which a truncated call's arguments, which are not a JSON object, are stored as text.
CUT_SHORT = "INVALID_JSON"

_KINDS: tuple[tuple[type[Any], bytes, str], ...] = (
    (dict, b"{", "a JSON object"),
    (list, b"[", "a JSON list"),
    (str, b'"', "a text"),
    (bool, b"tf", "true or false"),
)


def json_object(raw: Raw, field: str) -> str:
    """Return the text of a JSON object unchanged. Raises ApiError for any other value."""
    return _checked(raw, field, (dict,)).decode()


def valid_arguments(arguments: str) -> str:
    """Return the arguments of an earlier call as a JSON object, "" for none. Anything else, e.g. of a truncated call,
    is wrapped in an object, so that the conversation can continue and the model sees what it wrote."""
    if not arguments or is_object(arguments):
        return arguments
    return "" if arguments.strip() == "null" else json.dumps({CUT_SHORT: arguments}, ensure_ascii=False)


def compact_json(raw: Raw, field: str, *kinds: type[Any]) -> str:
    """Return JSON of one of ``kinds`` as compact text. Raises ApiError for another kind."""
    return msgspec.json.format(_checked(raw, field, kinds), indent=-1).decode()


def _checked(raw: Raw, field: str, kinds: Collection[type[Any]]) -> bytes:
    text = bytes(raw)
    allowed = [kind for kind in _KINDS if kind[0] in kinds]
    if not text or not any(text[:1] in first for _, first, _ in allowed):
        raise refused(field, f"expected {' or '.join(name for _, _, name in allowed)}", "invalid_type")
    try:
        text.decode()
    except UnicodeDecodeError:
        raise refused(field, "not valid UTF-8", "invalid_json") from None
    return text


def arguments_of(raw: Raw) -> str:
    """Return the arguments of an earlier call as JSON text. Clients send an object, its JSON as a string, or anything
    else."""
    text = bytes(raw).decode(errors="replace")
    return valid_arguments(str(msgspec.json.decode(text, type=str)) if text[:1] == '"' else text)


class _TextHolder(msgspec.Struct):
    """Any object of a conversation, with the fields that may contain text. ``type`` is required, so that the number of
    strings in a body bounds the number of these objects."""

    type: str
    text: Raw = Raw()
    refusal: Raw = Raw()
    content: Raw = Raw()
    output: Raw = Raw()
    summary: Raw = Raw()
    source: Raw = Raw()
    data: Raw = Raw()


def text_in(raw: Raw, levels: int = 6) -> str:
    """Return the text of a content part of an unknown type: a string, or the texts within it, to a depth of ``levels``;
    "" for none."""
    first = memoryview(raw)[:1].tobytes() if levels else b""
    try:
        if first == b'"':
            return str(msgspec.json.decode(raw, type=str))
        if first == b"[":
            parts = msgspec.json.decode(raw, type=list[_TextHolder])
            return "\n".join(filter(None, map(_text_of, parts, repeat(levels - 1))))
        return _text_of(msgspec.json.decode(raw, type=_TextHolder), levels - 1) if first == b"{" else ""
    except ValueError:
        return ""


def _text_of(part: _TextHolder, levels: int) -> str:
    check_wanted()
    # In parts of other types, e.g. images, "data" is encoded bytes.
    data = part.data if part.type == "text" else Raw()
    fields = (part.text, part.refusal, part.content, part.output, part.summary, part.source, data)
    return next(filter(None, map(text_in, fields, repeat(levels))), "")
