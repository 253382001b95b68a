"""Tells models of custom tools, whose input is free text, as functions, and takes the input out of their calls. Sans-IO
(I9).

A model that calls tools writes arguments. So a custom tool is a function with one argument, the text ``input``; its
calls go to a client as that text, and come back from the client as arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

import msgspec

from pillion.gateway.tokens.chat_template import GRAMMAR, INPUT
from pillion.types import Delta, Tool, ToolCall, ToolCallDelta

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# This matches whole characters of a JSON string; of two escapes that are one character, both or none.
_CHARACTERS = re.compile(
    r"(?>(?:[^\"\\]|\\[\"\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*)"
)


class ToolGrammar(msgspec.Struct, forbid_unknown_fields=True):
    """Holds the grammar of a custom tool's input.

    Attributes:
        syntax: "lark", as llguidance reads it, or "regex", which the whole input matches.
        definition: the grammar.
    """

    syntax: Literal["lark", "regex"]
    definition: str


def custom_tool(name: str, description: str, grammar: ToolGrammar | None) -> Tool:
    """Returns a custom tool as a function. Its calls always fit its schema, and its input the ``grammar``."""
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        text[GRAMMAR] = {"syntax": grammar.syntax, "definition": grammar.definition}
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return Tool(name=name, description=description, parameters=json.dumps(schema, ensure_ascii=False), strict=True)


def custom_call(call_id: str, name: str, text: str) -> ToolCall:
    """Returns an earlier call of a custom tool as that of the function."""
    return ToolCall(call_id, name, json.dumps({INPUT: text}, ensure_ascii=False))


class CustomCalls:
    """Turns the arguments of the calls of custom tools into their input, in the deltas of all answers to a request.
    ``names`` are those of the custom tools."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self._inputs: dict[tuple[int, int], InputText] = {}

    def read(self, delta: Delta, answer: int = 0) -> Delta:
        """Returns a delta of an answer with the input of calls of custom tools instead of their arguments."""
        if not self.names or not delta.tool_calls:
            return delta
        return replace(delta, tool_calls=tuple(self._part(part, answer) for part in delta.tool_calls))

    def has(self, call: int, answer: int = 0) -> bool:
        """Returns whether a call of an answer is one of a custom tool."""
        return (answer, call) in self._inputs

    def _part(self, part: ToolCallDelta, answer: int) -> ToolCallDelta:
        place = (answer, part.index)
        if part.name in self.names and place not in self._inputs:
            self._inputs[place] = InputText()
        text = self._inputs.get(place)
        return part if text is None else replace(part, arguments=text.push(part.arguments))


class InputText:
    """Takes the text of the only argument out of a call's arguments, which come piece by piece."""

    __slots__ = ("_begun", "_held")

    def __init__(self) -> None:
        self._begun = False
        self._held = ""

    def push(self, piece: str) -> str:
        """Returns the next characters of the text that are whole."""
        text = self._held + piece
        if not self._begun:
            head = _HEAD.match(text)
            if head is None:
                self._held = text
                return ""
            self._begun, text = True, text[head.end() :]
        found = _CHARACTERS.match(text)
        assert found is not None
        # What follows the text's end is never read: it begins with the quotation mark, which is no character here.
        self._held = text[found.end() :]
        read: str = json.loads(f'"{found[0]}"', strict=False)
        # Half a pair of escapes is no character that can be written.
        return read.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
