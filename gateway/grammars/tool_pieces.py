"""The pieces of reasoning and of calls of tools: the marks of a format, and between them what each schema allows (I9).

reasoning, up to its end | calls                              tool_choice required or named
                         | text, in which calls may stand     auto: from a mark on, a call is whole
                         | calls | the shape that was asked   auto, with a shape of the answer itself
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pillion.gateway.formats.answer_reader import AnswerForm
from pillion.gateway.formats.model_formats import ModelFormats, schema_of
from pillion.gateway.formats.reasoning import ReasoningFormat
from pillion.gateway.formats.xml_calls import (
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    MAX_KEY_CHARS,
    PARAMETER,
    types_of,
)
from pillion.gateway.grammars.answer_grammar import Piece, literal
from pillion.gateway.grammars.shapes import json_piece
from pillion.types import Tool, ToolOptions

# Bounds of a text's length that a grammar counts; it does not hold a text to larger ones.
MAX_COUNTED_CHARS = 1024
_TEXT = "/(?s:.*)/"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def answer_pieces(
    form: AnswerForm | None, formats: ModelFormats, options: ToolOptions, shape: Piece | None, loose: bool = False
) -> list[Piece]:
    """The pieces of an answer; none where it is free.

    Args:
        form: what it may hold besides content.
        options: the tools of the request.
        shape: the piece of the content's shape, if one was asked for.
        loose: whether tools without ``strict`` may be called with any object.

    Raises InvalidRequest for a schema that no call can be held to.
    """
    marks = formats.mark_ids
    body = shape
    if form is not None and form.tools is not None:
        body = _Calls(formats, options, loose).piece(shape)
    if body is None:
        return []
    if form is None or form.reasoning is None or form.opened is False:
        return [body]
    return [reasoning_piece(form.reasoning, form.opened, marks), body]


def reasoning_piece(form: ReasoningFormat, opened: bool | None, marks: Mapping[str, int]) -> Piece:
    """Free text up to the end of the reasoning. An answer that says itself whether it reasons may leave it out."""
    rules: tuple[str, ...] = ()
    thought = f"{_TEXT} {_term(form.end, marks)}"
    if form.end not in marks:
        thought, rules = "thought", (f"thought[lazy]: THOUGHT\nTHOUGHT: {_TEXT} {literal(form.end)}",)
    begin = _term(form.begin, marks)
    space = r"/\n{0,2}/"
    if opened:
        return Piece(f"{thought} {space}", rules)
    return Piece(f"({begin} {thought} {space})?", rules)


@dataclass(frozen=True, slots=True)
class _Calls:
    """Writes the piece of a request's calls."""

    formats: ModelFormats
    options: ToolOptions
    loose: bool

    def piece(self, shape: Piece | None) -> Piece:
        """All calls, or content with calls. ``shape`` is the content's."""
        form = self.formats.tools
        assert form is not None
        choice = self.options.choice or "auto"
        tools = {
            n: tool for n, tool in enumerate(self.options.tools) if choice != "named" or tool.name == self.options.name
        }
        several = self.options.parallel_tool_calls is not False and choice != "named"
        name = self.formats.tool_parser
        writer = _WRITERS[name](self, tools, several)
        rules = tuple(writer.rules)
        if choice in ("required", "named"):
            return Piece(writer.calls, rules, sources=writer.sources)
        if shape is not None:
            sources = writer.sources | shape.sources
            return Piece(f"({writer.calls}) | ({shape.body})", rules + shape.rules, shape.grammars, sources)
        body, more = writer.amid_text()
        return Piece(body, rules + more, sources=writer.sources)

    def term(self, mark: str) -> str:
        """A mark as a grammar names it."""
        return _term(mark, self.formats.mark_ids)

    def schema(self, tool: Tool) -> Mapping[str, Any]:
        """The schema that the arguments of a tool's calls are held to."""
        if tool.strict is False or (self.loose and tool.strict is None):
            return _ANY_OBJECT
        return schema_of(tool) or _ANY_OBJECT


class _Writer:
    """Writes the calls of one format.

    Attributes:
        calls: the right side of a rule: one call, or several where they are allowed.
        rules: the rules that it needs.
        sources: the client's fields that it was made of, as Piece has them.
    """

    def __init__(self, asked: _Calls, tools: Mapping[int, Tool], several: bool) -> None:
        self.asked = asked
        self.several = several
        self.rules: list[str] = []
        self.sources: dict[str, Any] = {}
        for n, tool in tools.items():
            self.rules.append(f"call_{n}: {self.one(tool, n)}")
        self.any = "(" + " | ".join(f"call_{n}" for n in tools) + ")"
        self.calls = self.all()

    def one(self, tool: Tool, number: int) -> str:
        """What a call of ``tool`` is, between the marks."""
        raise NotImplementedError

    def all(self) -> str:
        """The calls of an answer that is nothing else."""
        raise NotImplementedError

    def json(self, schema: Any, number: int, place: str = "") -> str:
        """JSON that fits the schema at ``place`` of the tool's own. Raises InvalidRequest."""
        piece = json_piece(schema, f"tools.tools[{number}].parameters{place}")
        self.sources |= piece.sources
        return piece.body

    def object(self, tool: Tool, number: int, arguments: str) -> str:
        """A call as a JSON object. Raises InvalidRequest."""
        head = f'{{"name": {json.dumps(tool.name)}, "{arguments}": '
        return f'{literal(head)} {self.json(self.asked.schema(tool), number)} "}}"'

    def amid_text(self) -> tuple[str, tuple[str, ...]]:
        """Free text in which calls may stand, and the rules for it."""
        raise NotImplementedError


class _TaggedWriter(_Writer):
    """A mark before each call and one behind it: hermes, generic."""

    def one(self, tool: Tool, number: int) -> str:
        return self.object(tool, number, "arguments")

    def all(self) -> str:
        form = self.asked.formats.tools
        assert form is not None
        self.rules.append(f'call: "\\n" {self.any} "\\n" {self.asked.term(form.end)}')
        begin = self.asked.term(form.begin)
        return f'{begin} call ("\\n" {begin} call)*' if self.several else f"{begin} call"

    def amid_text(self) -> tuple[str, tuple[str, ...]]:
        form = self.asked.formats.tools
        assert form is not None
        return _amid_text(form.begin, "call", self.several, self.asked.formats.mark_ids)


class _XmlWriter(_TaggedWriter):
    """Calls as elements: qwen3_coder."""

    def one(self, tool: Tool, number: int) -> str:
        schema = self.asked.schema(tool)
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        required = schema.get("required")
        needed = required if isinstance(required, list) else []
        parts = []
        for m, key in enumerate(known):
            value = known[key] if isinstance(known[key], dict) else {}
            name = f"parameter_{number}_{m}"
            self.rules += self._parameter(name, key, value, schema, number)
            parts.append(name if key in needed else f"{name}?")
        if not known:
            # Nothing is known of its parameters.
            name = f"parameter_{number}"
            self.rules += _text(name, f'{literal(PARAMETER)} /[^<>\\n]{{1,{MAX_KEY_CHARS}}}/ ">\\n"', {})
            parts.append(f"{name}*")
        return f"{literal(f'{FUNCTION}{tool.name}>{chr(10)}')} {' '.join(parts)} {literal(END_FUNCTION)}"

    def _parameter(
        self, name: str, key: str, schema: Mapping[str, Any], root: Mapping[str, Any], number: int
    ) -> list[str]:
        """The rules of one parameter: a text up to its end, one of some values, or JSON. Raises InvalidRequest."""
        begin, end = literal(f"{PARAMETER}{key}>\n"), literal(f"\n{END_PARAMETER}\n")
        values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
        if isinstance(values, list) and values:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            return [f"{name}: {begin} ({' | '.join(map(literal, texts))}) {end}"]
        if "string" in types_of({"properties": {key: schema}}, key):
            return _text(name, begin, schema)
        shared = {word: root[word] for word in ("$defs", "definitions") if word in root}
        return [f"{name}: {begin} {self.json({**shared, **schema}, number, f'.properties.{key}')} {end}"]


class _LlamaWriter(_Writer):
    """Objects without marks, semicolons between them: llama3_json."""

    def one(self, tool: Tool, number: int) -> str:
        return self.object(tool, number, "parameters")

    def all(self) -> str:
        return f'{self.any} ("; " {self.any})*' if self.several else self.any

    def amid_text(self) -> tuple[str, tuple[str, ...]]:
        # Only an answer that begins with a brace is a call. Empty ones are allowed, as everywhere.
        form = self.asked.formats.tools
        assert form is not None
        text = r"/(\s*[^{\s](?s:.*))?/"
        if form.begin not in self.asked.formats.mark_ids:
            return f"{text} | {self.calls}", ()
        return f"{text} | ({text})? {self.asked.term(form.begin)} {self.calls} | {self.calls}", ()


class _MistralWriter(_Writer):
    """A list behind one mark or, where the tokenizer has a mark for it, a name and arguments behind each."""

    def one(self, tool: Tool, number: int) -> str:
        if "[ARGS]" in self.asked.formats.mark_ids:
            return f"{literal(tool.name)} {self.asked.term('[ARGS]')} {self.json(self.asked.schema(tool), number)}"
        return self.object(tool, number, "arguments")

    def all(self) -> str:
        begin = self.asked.term("[TOOL_CALLS]")
        if "[ARGS]" in self.asked.formats.mark_ids:
            self.rules.append(f"call: {self.any}")
            return f"{begin} call ({begin} call)*" if self.several else f"{begin} call"
        more = f'(", " {self.any})*' if self.several else ""
        self.rules.append(f'call: "[" {self.any} {more} "]"')
        return f"{begin} call"

    def amid_text(self) -> tuple[str, tuple[str, ...]]:
        several = self.several and "[ARGS]" in self.asked.formats.mark_ids
        return _amid_text("[TOOL_CALLS]", "call", several, self.asked.formats.mark_ids)


_WRITERS: Mapping[str, Callable[[_Calls, Mapping[int, Tool], bool], _Writer]] = {
    "hermes": _TaggedWriter,
    "generic": _TaggedWriter,
    "qwen3_coder": _XmlWriter,
    "qwen3_xml": _XmlWriter,
    "llama3_json": _LlamaWriter,
    "mistral": _MistralWriter,
}


def _term(mark: str, ids: Mapping[str, int]) -> str:
    """A mark as a grammar names it: a token by its id, anything else by its text."""
    return f"<[{ids[mark]}]>" if mark in ids else literal(mark)


def _amid_text(begin: str, call: str, several: bool, ids: Mapping[str, int]) -> tuple[str, tuple[str, ...]]:
    """Free text in which ``call`` stands behind each ``begin``; behind a call that has to be the only one, nothing
    does."""
    head, rules = f"TEXT {_term(begin, ids)}", [f"TEXT: {_TEXT}"]
    if begin not in ids:
        head = "text_and_mark"
        rules.append(f"text_and_mark[lazy]: TEXT_AND_MARK\nTEXT_AND_MARK: {_TEXT} {literal(begin)}")
    body = f"({head} {call})* TEXT" if several else f"TEXT | {head} {call}"
    return body, tuple(rules)


def _text(name: str, begin: str, schema: Mapping[str, Any]) -> list[str]:
    """The rules of a parameter that is a text: all up to the first end, of so many characters as the schema allows."""
    least, most = (schema.get(word) for word in ("minLength", "maxLength"))
    low = least if isinstance(least, int) and 0 <= least <= MAX_COUNTED_CHARS else 0
    high = most if isinstance(most, int) and low <= most <= MAX_COUNTED_CHARS else ""
    end = END_PARAMETER.replace("/", "\\/")
    value = f"/(?s:.{{{low},{high}}})\\n{end}/ & ~/(?s:.*){end}(?s:.+)/"
    return [f'{name}: {begin} {name}_text "\\n"', f"{name}_text[lazy]: {name.upper()}", f"{name.upper()}: {value}"]
