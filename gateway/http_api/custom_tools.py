"""Custom tools, whose input is free text, as functions, and extraction of the input from their calls. Sans-IO (I9).

A custom tool becomes a function with one string argument, ``input``. Clients send and receive the plain text; the model
reads and writes it as arguments.
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
# Whole characters of a JSON string; of a surrogate pair's two escapes, both or none.
_CHARACTERS = re.compile(
    r"(?>(?:[^\"\\]|\\[\"\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*)"
)


class ToolGrammar(msgspec.Struct, forbid_unknown_fields=True):
    """Grammar of a custom tool's input.

    Attributes:
        syntax: "lark" (llguidance's), or "regex", which must match the whole input.
        definition: the grammar.
    """

    syntax: Literal["lark", "regex"]
    definition: str


def custom_tool(name: str, description: str, grammar: ToolGrammar | None) -> Tool:
    """Return a custom tool as a strict function, whose argument is constrained by ``grammar``."""
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        text[GRAMMAR] = {"syntax": grammar.syntax, "definition": grammar.definition}
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return Tool(name=name, description=description, parameters=json.dumps(schema, ensure_ascii=False), strict=True)


def custom_call(call_id: str, name: str, text: str) -> ToolCall:
    """Return an earlier call of a custom tool as a call of its function."""
    return ToolCall(call_id, name, json.dumps({INPUT: text}, ensure_ascii=False))


class CustomCalls:
    """Conversion of the arguments of custom tools' calls to their input, in the deltas of all answers to a request.

    ``names``: names of the custom tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        # (answer, call) -> its input.
        self._inputs: dict[tuple[int, int], InputText] = {}

    def read(self, delta: Delta, answer: int = 0) -> Delta:
        """Return a delta of an answer, with the arguments of custom tools' calls replaced by their input."""
        if not self.names or not delta.tool_calls:
            return delta
        return replace(delta, tool_calls=tuple(self._part(part, answer) for part in delta.tool_calls))

    def has(self, call: int, answer: int = 0) -> bool:
        """Return True if call number ``call`` of an answer is a custom tool's."""
        return (answer, call) in self._inputs

    def _part(self, part: ToolCallDelta, answer: int) -> ToolCallDelta:
        key = (answer, part.index)
        if part.name in self.names and key not in self._inputs:
            self._inputs[key] = InputText()
        text = self._inputs.get(key)
        return part if text is None else replace(part, arguments=text.push(part.arguments))


class InputText:
    """Incremental parser of a custom tool's input out of the JSON arguments of a call."""

    __slots__ = ("_begun", "_pending")

    def __init__(self) -> None:
        self._begun = False
        self._pending = ""

    def push(self, piece: str) -> str:
        """Return the characters of the input that ``piece``, the next part of the arguments, completes."""
        text = self._pending + piece
        if not self._begun:
            head = _HEAD.match(text)
            if head is None:
                self._pending = text
                return ""
            self._begun, text = True, text[head.end() :]
        complete = _CHARACTERS.match(text)
        assert complete is not None
        # Everything from the closing quotation mark on is ignored: _CHARACTERS does not match it.
        self._pending = text[complete.end() :]
        characters: str = json.loads(f'"{complete[0]}"', strict=False)
        # Replace unpaired surrogates, which cannot be encoded.
        return characters.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
