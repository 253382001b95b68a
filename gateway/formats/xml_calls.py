"""Calls as Qwen3-Coder writes them: a text for each parameter, whose type is the tool's schema's. Sans-IO (I9).

<tool_call> <function=NAME> <parameter=KEY> text </parameter> ... </function> </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

import msgspec

from pillion.gateway.formats.answer_parts import AnswerParts, PendingText, held_back
from pillion.gateway.formats.json_calls import NAME

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_KEY_CHARS = 256

_BEGINS = re.compile(f"{TOOL_CALL}|{FUNCTION}")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


class XmlCalls:
    """Reads a text with such calls. ``schemas`` are the tools' schemas of arguments by name."""

    def __init__(self, text: PendingText, parts: AnswerParts, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._text = text
        self._parts = parts
        self._schemas = schemas

    def read(self) -> Generator[None, None, None]:
        """Reads the whole text."""
        text = self._text
        while True:
            found = _BEGINS.search(text.rest)
            if found is None:
                certain = len(text.rest) - (0 if text.ended else held_back(text.rest, (TOOL_CALL, FUNCTION)))
                self._parts.content(text.rest[:certain])
                text.skip(certain)
                if text.ended:
                    return
                yield
                continue
            self._parts.content(text.rest[: found.start()])
            text.skip(found.start())
            if not (yield from self._call()):
                self._parts.content(found.group())
                text.skip(len(found.group()))

    def _call(self) -> Generator[None, None, bool]:
        """Reads a call, from its mark on; false where it is none, and nothing has been taken."""
        text, at = self._text, 0
        if (yield from text.has(TOOL_CALL)):
            at = yield from text.past_space(len(TOOL_CALL))
        if at < 0 or not (yield from text.has(FUNCTION, at)):
            return False
        name, at = yield from self._word(at + len(FUNCTION), MAX_KEY_CHARS)
        if not NAME.fullmatch(name):
            return False
        text.skip(at)
        self._parts.begin(name)
        schema = self._schemas.get(name, {})
        opened = "{"
        while (yield from self._parameter(schema, opened)):
            opened = ", "
        at = yield from text.past_space(0)
        if at >= 0:
            # What is cut short stays open, so that nobody takes it for whole.
            self._parts.arguments("{}" if opened == "{" else "}")
        for mark in (END_FUNCTION, END_TOOL_CALL):
            if at >= 0 and (yield from text.has(mark, at)):
                text.skip(at + len(mark))
                at = yield from text.past_space(0)
        return True

    def _word(self, at: int, most: int) -> Generator[None, None, tuple[str, int]]:
        """What stands between ``at`` and the next ``>``, and the place behind it; "" where nothing does."""
        end = at
        while (yield from self._text.reaches(end)) and end - at <= most:
            if self._text.rest[end] == ">":
                return self._text.rest[at:end], end + 1
            if self._text.rest[end] in "<\n":
                break
            end += 1
        return "", -1

    def _parameter(self, schema: Mapping[str, Any], opened: str) -> Generator[None, None, bool]:
        """Reads the next parameter; false where there is none, and nothing has been taken."""
        text, parts = self._text, self._parts
        at = yield from text.past_space(0)
        if at < 0 or not (yield from text.has(PARAMETER, at)):
            return False
        key, at = yield from self._word(at + len(PARAMETER), MAX_KEY_CHARS)
        if not key:
            return False
        text.skip(at)
        parts.arguments(f"{opened}{json.dumps(key, ensure_ascii=False)}: ")
        # Models write the text on lines of its own.
        if (yield from text.has("\n")):
            text.skip(1)
        types = types_of(schema, key)
        if types != {"string"}:
            value, whole = yield from self._value(None)
            parts.arguments(typed(value, types) if whole else value)
            return True
        parts.arguments('"')
        _, whole = yield from self._value(parts)
        parts.arguments('"' if whole else "")
        return True

    def _value(self, parts: AnswerParts | None) -> Generator[None, None, tuple[str, bool]]:
        """Reads up to a parameter's end, without the line end before it: the text, and whether the end came. Gives the
        text to ``parts`` as it comes, as that of a JSON string."""
        text, read = self._text, ""
        marks = ("\n" + END_PARAMETER, END_PARAMETER)
        while True:
            before, mark, behind = text.rest.partition(END_PARAMETER)
            piece = before.removesuffix("\n")
            if not mark:
                piece = before[: len(before) - (0 if text.ended else held_back(before, marks))]
                behind = before[len(piece) :]
            text.rest = behind
            if parts is None:
                read += piece
            else:
                parts.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
            if mark or text.ended:
                return read, bool(mark)
            yield


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """The JSON types that a schema of arguments allows a parameter; {"string"} where it does not say."""
    properties = schema.get("properties")
    known = properties.get(key) if isinstance(properties, dict) else None
    found = _types(known) if isinstance(known, dict) else set()
    return found or {"string"}


def _types(schema: Mapping[str, Any]) -> set[str]:
    named = schema.get("type")
    found = {named} if isinstance(named, str) else {one for one in named or () if isinstance(one, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if not found:
        found = {_TYPE_OF.get(type(value), "null") for value in values}
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        for option in options if isinstance(options, list) else ():
            found |= _types(option) if isinstance(option, dict) else set()
    # What a reference means is in another place; its value is most likely an object.
    return found | {"object"} if "$ref" in schema else found


def typed(text: str, types: set[str]) -> str:
    """A parameter's text as JSON of one of ``types``; as a string where it is none."""
    value = _PYTHON.get(text.strip(), text.strip())
    try:
        # Unlike the standard library it reads neither NaN nor an infinity.
        kind = _TYPE_OF.get(type(msgspec.json.decode(value)), "null")
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return value if fits else json.dumps(text, ensure_ascii=False)
