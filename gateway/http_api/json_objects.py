"""Reads parts of a body that are passed on as JSON text, such as a tool's schema: no objects are made of what is in
them.
"""

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

# A field of the type Ignored[...] is accepted without effect: the answer's header IGNORED_HEADER names it.
IGNORED = msgspec.Meta(extra={"effect": "none"})
Ignored = Annotated[T, IGNORED]
# A struct with this tag takes the objects of its union whose tag is missing or no other struct's. Its field sent_type
# gets the tag that was sent.
OTHER = "?"
# These are the types of fields whose JSON is passed on. The API refuses a Raw field without such a type, or reads it
# later.
AnyJson = Annotated[Raw, msgspec.Meta(extra_json_schema={})]
JsonObject = Annotated[Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
JsonObjects = Annotated[Raw, msgspec.Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})]
JsonSchema = Annotated[Raw, msgspec.Meta(extra_json_schema={"type": ["object", "boolean", "null"]})]
JsonShape = Annotated[Raw, msgspec.Meta(extra_json_schema={"type": ["object", "string", "boolean", "null"]})]
# The arguments of a call that was cut short are no JSON object. They stand as a text in an object, under this name.
CUT_SHORT = "INVALID_JSON"
# The text of a document that a tool has fetched stands so many objects and lists deep.
TOLD_LEVELS = 6

_KINDS: tuple[tuple[type[Any], bytes, str], ...] = (
    (dict, b"{", "a JSON object"),
    (list, b"[", "a JSON list"),
    (str, b'"', "a text"),
    (bool, b"tf", "true or false"),
)


def json_object(raw: Raw, field: str) -> str:
    """Returns the text of a JSON object as it was sent. Raises ApiError for any other value."""
    return _checked(raw, field, (dict,)).decode()


def called_with(arguments: str) -> str:
    """Returns the arguments of an earlier call. Text that is no JSON object, as of a call that was cut short, stands in
    an object: the conversation goes on, and the model sees what it wrote."""
    if not arguments or is_object(arguments):
        return arguments
    return "" if arguments.strip() == "null" else json.dumps({CUT_SHORT: arguments}, ensure_ascii=False)


def compact_json(raw: Raw, field: str, *kinds: type[Any]) -> str:
    """Returns JSON of one of these kinds as text, without the blanks between its parts. Raises ApiError for another
    kind."""
    return msgspec.json.format(_checked(raw, field, kinds), indent=-1).decode()


def _checked(raw: Raw, field: str, kinds: Collection[type[Any]]) -> bytes:
    text = bytes(raw)
    allowed = [kind for kind in _KINDS if kind[0] in kinds]
    if not text or not any(text[:1] in first for _, first, _ in allowed):
        raise refused(field, f"{' or '.join(name for _, _, name in allowed)} is needed", "invalid_type")
    try:
        text.decode()
    except UnicodeDecodeError:
        raise refused(field, "not valid UTF-8", "invalid_json") from None
    return text


def arguments_of(raw: Raw) -> str:
    """Returns the arguments of an earlier call, which came as an object, as the text of one, or as anything else."""
    text = bytes(raw).decode(errors="replace")
    return called_with(str(msgspec.json.decode(text, type=str)) if text[:1] == '"' else text)


class _TextHolder(msgspec.Struct):
    """Holds the fields of any object of a conversation that may have text in them. An object without a type is not
    looked into, so that the number of strings in a body bounds that of these objects."""

    type: str
    text: Raw = Raw()
    refusal: Raw = Raw()
    content: Raw = Raw()
    output: Raw = Raw()
    summary: Raw = Raw()
    source: Raw = Raw()
    data: Raw = Raw()


def text_in(raw: Raw, levels: int = TOLD_LEVELS) -> str:
    """Returns the text of a part of an earlier turn whose type nobody here knows: the text itself, or that of its
    parts, on up to ``levels`` levels; "" where it has none."""
    first = memoryview(raw)[:1].tobytes() if levels else b""
    try:
        if first == b'"':
            return str(msgspec.json.decode(raw, type=str))
        if first == b"[":
            found = msgspec.json.decode(raw, type=list[_TextHolder])
            return "\n".join(filter(None, map(_held_text, found, repeat(levels - 1))))
        return _held_text(msgspec.json.decode(raw, type=_TextHolder), levels - 1) if first == b"{" else ""
    except ValueError:
        return ""


def _held_text(found: _TextHolder, levels: int) -> str:
    check_wanted()
    # What is not text, such as a picture, has its bytes in a field of the same name.
    data = found.data if found.type == "text" else Raw()
    fields = (found.text, found.refusal, found.content, found.output, found.summary, found.source, data)
    return next(filter(None, map(text_in, fields, repeat(levels))), "")
