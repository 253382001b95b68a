"""Reads calls as Qwen3-Coder writes them: a text for each parameter, whose type the tool's schema gives. Sans-IO (I9).

<tool_call> <function=NAME> <parameter=KEY> text </parameter> ... </function> </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

import msgspec

from pillion.gateway.formats.answer_parts import MAX_HELD_CHARS, AnswerParts, Marks, PendingText
from pillion.gateway.formats.json_calls import NAME

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
XML_MARKS = (FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER)
MAX_KEY_CHARS = 256
# The types of this many parameters are remembered for one answer.
_KEPT_TYPES = 1024

_BEGINS = Marks(TOOL_CALL, FUNCTION)
# Models write a parameter's text on lines of its own.
_ENDS_PARAMETER = Marks("\n" + END_PARAMETER, END_PARAMETER)
_BEHIND_WORD = re.compile(r"[>\n<]")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


class XmlCalls:
    """Reads an answer whose calls are XML-like elements. ``schemas`` are the tools' schemas of arguments by name."""

    def __init__(self, text: PendingText, parts: AnswerParts, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._text = text
        self._parts = parts
        self._schemas = schemas
        # Types are kept by tool and parameter, because a schema may be long, and a model may write a parameter often.
        self._types: dict[tuple[str, str], set[str]] = {}

    def read(self) -> Generator[None, None, None]:
        """Reads the whole answer."""
        text, parts = self._text, self._parts
        while mark := (yield from text.until(_BEGINS, parts.content)):
            text.attempt()
            if not (yield from self._call(mark)) and not text.drop_half():
                parts.content(mark + text.leave())

    def _call(self, mark: str) -> Generator[None, None, bool]:
        """Reads a call, from after its mark on, and adds it to the answer's calls. Returns False where it is none, and
        leaves it to the caller to end the trial read."""
        text = self._text
        if mark == TOOL_CALL:
            yield from text.past_space()
            if not (yield from text.has(FUNCTION)):
                return False
        name = yield from self._word()
        if not NAME.fullmatch(name):
            return False
        text.take()
        self._parts.begin(name)
        opened = "{"
        while (yield from self._parameter(name, opened)):
            opened = ", "
        if (yield from text.some()):
            # The arguments of a call that is cut short stay an unfinished object, so that nobody takes them for whole.
            self._parts.arguments("{}" if opened == "{" else "}")
        for end in (END_FUNCTION, END_TOOL_CALL):
            if (yield from text.has(end)):
                yield from text.past_space()
        return True

    def _word(self) -> Generator[None, None, str]:
        """Reads up to and with the next ``>``; returns the text before it, "" where there is none."""
        word = yield from self._text.up_to(_BEHIND_WORD, MAX_KEY_CHARS)
        return word if (yield from self._text.has(">")) else ""

    def _parameter(self, name: str, opened: str) -> Generator[None, None, bool]:
        """Reads the next parameter of the tool ``name``; returns False where there is none."""
        text, parts = self._text, self._parts
        # White space in a call is no content.
        yield from text.past_space()
        text.attempt()
        key = (yield from self._word()) if (yield from text.has(PARAMETER)) else ""
        if not key:
            if not text.drop_half():
                parts.content(text.leave())
            return False
        text.take()
        parts.arguments(f"{opened}{json.dumps(key, ensure_ascii=False)}: ")
        yield from text.has("\n")
        value = _Value(self._types_of(name, key), parts.arguments)
        mark = yield from text.until(_ENDS_PARAMETER, value.push)
        value.end(whole=bool(mark))
        return True

    def _types_of(self, name: str, key: str) -> set[str]:
        known = self._types.get((name, key))
        if known is None:
            known = types_of(self._schemas.get(name, {}), key)
            if len(self._types) < _KEPT_TYPES:
                self._types[name, key] = known
        return known


class _Value:
    """Writes a parameter's text as JSON of one of ``types``. A string is handed on as it comes. Anything else is held
    until its type is known. A text of more than MAX_HELD_CHARS is given as it comes, too: unchanged where it begins
    like an object or a list that ``types`` allow, and as a string otherwise."""

    def __init__(self, types: set[str], give: Callable[[str], None]) -> None:
        self._types = types
        self._give = give
        self._held: list[str] = []
        self._held_chars = 0
        # This function writes the text that comes; it is None while the text is held.
        self._spell: Callable[[str], str] | None = None
        if types == {"string"}:
            self._begin("")

    def push(self, piece: str) -> None:
        if self._spell is not None:
            self._give(self._spell(piece))
            return
        self._held.append(piece)
        self._held_chars += len(piece)
        if self._held_chars > MAX_HELD_CHARS:
            self._begin("".join(self._held))

    def end(self, whole: bool) -> None:
        """Ends the parameter's value. ``whole`` says whether the mark of the parameter's end has come."""
        if self._spell is None:
            text = "".join(self._held)
            self._give(typed(text, self._types) if whole else text)
        elif whole and self._spell is _in_string:
            self._give('"')

    def _begin(self, text: str) -> None:
        kind = {"{": "object", "[": "array"}.get(text.lstrip()[:1])
        self._held.clear()
        if kind in self._types:
            self._spell = str
            self._give(text)
        else:
            self._spell = _in_string
            self._give('"' + _in_string(text))


def _in_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """Returns the JSON types that a schema of arguments allows a parameter; {"string"} where it does not say."""
    properties = schema.get("properties")
    known = properties.get(key) if isinstance(properties, dict) else None
    found = _types(known) if isinstance(known, dict) else set()
    return found or {"string"}


def _types(schema: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    # The loop keeps a stack instead of recursing, because a client's schema may be deep.
    left = [schema]
    while left:
        one = left.pop()
        named = one.get("type")
        types = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
        values = one["enum"] if isinstance(one.get("enum"), list) else [one["const"]] if "const" in one else []
        found |= types or {_TYPE_OF.get(type(value), "null") for value in values}
        if "$ref" in one:
            # A schema's "$ref" points to another place, which is not read; its value is most likely an object.
            found.add("object")
        for word in ("anyOf", "oneOf", "allOf"):
            options = one.get(word)
            left += [option for option in options if isinstance(option, dict)] if isinstance(options, list) else ()
    return found


def typed(text: str, types: set[str]) -> str:
    """Writes a parameter's text as JSON of one of ``types``; as a string where it is none of them."""
    value = _PYTHON.get(text.strip(), text.strip())
    try:
        # Unlike the standard library's parser this one refuses NaN and infinities. What an object or a list holds is
        # checked and not made: a deep one would take long.
        read = msgspec.json.decode(value, type=msgspec.Raw if value[:1] in ("{", "[") else Any)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = {"{": "object", "[": "array"}.get(value[:1]) or _TYPE_OF.get(type(read), "null")
    fits = kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return value if fits else json.dumps(text, ensure_ascii=False)
