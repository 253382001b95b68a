"""Builds the grammar pieces for reasoning and tool calls: a format's marks, and the schemas between them. Sans-IO (I9).

reasoning, up to its end | calls                              tool_choice required or named
                         | text with calls                    auto: from a mark on, a call is complete
                         | calls | the requested structure    auto, with structured outputs
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from pillion.errors import InvalidRequest, SchemaViolation
from pillion.gateway.formats.answer_reader import OutputFormat
from pillion.gateway.formats.harmony import ANALYSIS, NAME_PREFIX, HarmonyMark
from pillion.gateway.formats.literal_calls import LITERAL_FORMS, LiteralForm
from pillion.gateway.formats.model_formats import ModelFormats, schema_of
from pillion.gateway.formats.named_calls import DEEPSEEK_SEPARATOR, END_FENCE, FENCE, NAMED_FORMS
from pillion.gateway.formats.reasoning import ReasoningFormat
from pillion.gateway.formats.tool_formats import LIST_FORMATS, OPENAI
from pillion.gateway.formats.xml_calls import MAX_DEPTH, MAX_KEY_CHARS, XML_FORMS, XmlForm, escaped, types_of
from pillion.gateway.grammars.answer_grammar import (
    ANY_TEXT,
    Piece,
    cut_at_tokens,
    expression,
    literal,
    terms,
    too_large,
)
from pillion.gateway.grammars.json_schema import relax, self_contained
from pillion.gateway.grammars.literal_values import (
    KEY,
    MAX_COUNTED_CHARS,
    UNSUPPORTED_WITH_PROPERTIES,
    GemmaValues,
    bound,
    is_plain_key,
    lacks_members,
    members,
    properties_of,
    python_value,
    values_of,
)
from pillion.gateway.grammars.schema_places import pointer
from pillion.gateway.grammars.spelled_lark import spelled
from pillion.gateway.grammars.structured_outputs import plain_json_piece
from pillion.gateway.tokens.chat_template import GRAMMAR, INPUT
from pillion.rules.grammar_limits import MAX_GRAMMAR_BYTES
from pillion.types import Tool, ToolOptions

_LINE = r"/\n?/"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def answer_pieces(
    output_format: OutputFormat | None,
    formats: ModelFormats,
    options: ToolOptions,
    structured: Piece | None,
    left_out: Mapping[int, Sequence[str]] = MappingProxyType({}),
) -> list[Piece]:
    """Return the pieces of an answer's grammar; none if it may be any text.

    Args:
        output_format: what the answer may contain besides content; None: nothing else.
        formats: the model's formats.
        options: the request's tools.
        structured: the piece for the structure of the content; None for any text.
        left_out: per tool number, places in the schema, as JSON pointers, that are not enforced, for tools that are not
            ``strict``.

    Raises InvalidRequest for a ``strict`` tool with a schema that cannot be enforced.
    """
    marks = formats.mark_ids
    around, last = ("", ""), ""
    if output_format is not None and output_format.reasoning is not None:
        around, last = output_format.reasoning.answer, output_format.reasoning.last
    if structured is not None:
        structured = replace(structured, body=_within(around, structured.body, marks))
    body, calls = structured, ""
    if output_format is not None and output_format.tools is not None:
        body, calls = _Calls(formats, options, left_out, output_format.opened, around).piece(structured)
    elif body is not None and formats.in_channels and output_format is not None and output_format.opened is not False:
        body = replace(body, body=f"{_message('final', marks)} ({body.body})")
    if body is None:
        return []
    tail = [Piece(f"({_term(last, marks)})?")] if last else []
    if output_format is None or output_format.reasoning is None or output_format.opened is False:
        return [body, *tail]
    if formats.in_channels:
        return [_channels_piece(output_format.opened, marks), body]
    reasoning = reasoning_piece(output_format.reasoning, output_format.opened, marks)
    form = output_format.tools
    by_token = form is not None and not form.bare and _begins_with_token(form.begin, marks)
    if not calls or not by_token or not _begins_with_token(output_format.reasoning.end, marks):
        return [reasoning, body, *tail]
    # A call may begin within the reasoning, and ends it.
    begin = "" if output_format.opened else _term(output_format.reasoning.begin, marks)
    either = f"({reasoning.body}) ({body.body}) | {begin} {ANY_TEXT} {calls}"
    return [replace(body, body=either, rules=(*reasoning.rules, *body.rules)), *tail]


def _begins_with_token(text: str, marks: Mapping[str, int]) -> bool:
    """Return whether a mark begins with a special token."""
    return any(text.startswith(mark) for mark in marks)


def _within(around: tuple[str, str], body: str, marks: Mapping[str, int]) -> str:
    """Return a rule for content between its format's optional marks."""
    begin, end = around
    if not begin:
        return body
    return f"({_term(begin, marks)} {_LINE})? ({body}) ({_LINE} {_term(end, marks)})?"


def _channels_piece(opened: bool | None, marks: Mapping[str, int]) -> Piece:
    """Return a piece for messages of reasoning, each up to the beginning of the next message."""
    rest = f"{ANY_TEXT} {_next_message(marks)}"
    every = f"({_message(ANALYSIS, marks)} {rest})*"
    return Piece(f"{rest} {every}" if opened else every)


def _message(channel: str, marks: Mapping[str, int]) -> str:
    """Return a rule for a message's head after ``<|start|>assistant``."""
    return f"{_term(HarmonyMark.CHANNEL, marks)} {literal(channel)} {_term(HarmonyMark.MESSAGE, marks)}"


def _next_message(marks: Mapping[str, int]) -> str:
    """Return a rule for a message's end and the beginning of the next head."""
    return f'{_term(HarmonyMark.END, marks)} {_term(HarmonyMark.START, marks)} "assistant"'


def reasoning_piece(form: ReasoningFormat, opened: bool | None, marks: Mapping[str, int]) -> Piece:
    """Return a piece for the reasoning and its marks: the rest of it if the prompt ends within (``opened``), else
    optional."""
    rules: tuple[str, ...] = ()
    thought = f"{ANY_TEXT} {_term(form.end, marks)}"
    if not _begins_with_token(form.end, marks):
        thought, rules = "thought", (f"thought[lazy]: THOUGHT\nTHOUGHT: {ANY_TEXT} {literal(form.end)}",)
    begin = _term(form.begin, marks)
    space = r"/\n{0,2}/"
    if opened:
        return Piece(f"{thought} {space}", rules)
    return Piece(f"({begin} {thought} {space})?", rules)


@dataclass(frozen=True, slots=True)
class _Calls:
    """Builder of the piece for a request's calls. ``unfollowed`` collects the places in schemas that are not enforced,
    as in ``Piece.left_out``."""

    formats: ModelFormats
    options: ToolOptions
    left_out: Mapping[int, Sequence[str]]
    opened: bool | None
    around: tuple[str, str] = ("", "")
    unfollowed: dict[tuple[str, str], None] = field(default_factory=dict)

    def piece(self, structured: Piece | None) -> tuple[Piece, str]:
        """Return the piece for the answer: only calls if the client requires them, else content with or without calls;
        and the rule for only calls. ``structured``: the piece for the content; None for any text."""
        choice = self.options.choice or "auto"
        allowed = {self.options.name} if choice == "named" else set(self.options.allowed)
        tools = {n: tool for n, tool in enumerate(self.options.tools) if not allowed or tool.name in allowed}
        several = self.options.parallel_tool_calls is not False and choice != "named"
        writer = _WRITERS[self.formats.tool_parser](self, tools, several)
        rules, grammars, unfollowed = tuple(writer.rules), writer.grammars, tuple(self.unfollowed)
        if choice in ("required", "named"):
            return Piece(writer.calls, rules, grammars, writer.sources, unfollowed), writer.calls
        if structured is not None:
            sources, grammars = writer.sources | structured.sources, grammars | structured.grammars
            either = f"({writer.calls}) | ({writer.content(structured.body)})"
            return Piece(either, rules + structured.rules, grammars, sources, unfollowed), writer.calls
        body, more = writer.text_with_calls()
        begin, end = (_term(mark, self.formats.mark_ids) for mark in self.around)
        if self.around[0] and _begins_with_token(self.around[0], self.formats.mark_ids):
            # Free text excludes tokens that are marks.
            body = f"({begin} ({ANY_TEXT} {end})?)? ({body}) ({end})?"
        return Piece(body, rules + more, grammars, writer.sources, unfollowed), writer.calls

    def term(self, mark: str) -> str:
        """Return the term for a mark."""
        return _term(mark, self.formats.mark_ids)

    def schema(self, tool: Tool, number: int) -> Mapping[str, Any]:
        """Return the normalized schema of a tool's arguments. Raises InvalidRequest."""
        if tool.strict is False and self.options.choice not in ("required", "named"):
            return _ANY_OBJECT
        schema: dict[str, Any] = schema_of(tool)
        if tool.strict is not True:
            schema, places = relax(schema, self.left_out.get(number, ()))
            for place in places:
                self.leave_out(number, place)
        given = schema.get("type", "object")
        if "object" not in (given if isinstance(given, list) else [given]):
            self.leave_out(number, "/type", "arguments are an object")
        # Parsers of calls accept only objects, even if the schema has no type.
        return {**schema, **_ANY_OBJECT}

    def leave_out(self, number: int, place: str, reason: str = "") -> None:
        """Exclude ``place``, a JSON pointer in the schema of tool ``number``, from enforcement. Raises InvalidRequest,
        with the ``reason``, if the tool is ``strict``."""
        parameters = f"tools.tools[{number}].parameters"
        if self.options.tools[number].strict is True:
            raise InvalidRequest.of(SchemaViolation(parameters, f"at {place}: {reason}", place))
        self.unfollowed[parameters, place] = None


def _input_grammar(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return syntax ("lark" or "regex") and text of the grammar of a custom tool's input, from the schema of its
    arguments; None for a function, and if the input may be any text."""
    properties = schema.get("properties")
    value = properties.get(INPUT) if isinstance(properties, dict) and len(properties) == 1 else None
    grammar = value.get(GRAMMAR) if isinstance(value, dict) else None
    if not isinstance(grammar, dict) or grammar.get("syntax") not in ("lark", "regex"):
        return None
    return grammar["syntax"], str(grammar.get("definition"))


class _Writer:
    """Builder of the rules for calls in one format.

    Attributes:
        marks: the format, with its marks.
        calls: the right side of a rule: one call, or several if allowed.
        rules: auxiliary rules of ``calls``.
        grammars, sources: as in Piece.
        arguments_key: key of the arguments if a call is a JSON object.
        only_section: whether all calls follow one mark, even within text.
    """

    arguments_key = "arguments"
    only_section = False

    def __init__(self, builder: _Calls, tools: Mapping[int, Tool], several: bool) -> None:
        assert builder.formats.tools is not None
        self.builder, self.marks = builder, builder.formats.tools
        self.several = several
        self.rules: list[str] = []
        self.sources: dict[str, Any] = {}
        self.json_bytes = 0
        self.grammars: dict[str, str] = {}
        for n, tool in tools.items():
            self.rules.append(f"call_{n}: {self.call_rule(tool, n)}")
        self.any = "(" + " | ".join(f"call_{n}" for n in tools) + ")"
        self.calls = self.calls_rule()

    def call_rule(self, tool: Tool, number: int) -> str:
        """Return the rule for a call of ``tool`` between the marks, by default a JSON object. Raises InvalidRequest."""
        head = f'{{"name": {json.dumps(tool.name)}, "{self.arguments_key}": '
        return f'{literal(head)} {self.arguments(tool, number)} "}}"'

    def calls_rule(self) -> str:
        """Return the rule for an answer of only calls."""
        raise NotImplementedError

    def json(self, schema: Any, number: int, place: str = "", root: Any = None) -> str:
        """Return a rule for JSON of ``schema``, which is at ``place``, a JSON pointer, in ``root``, the tool's schema.
        Raises InvalidRequest."""
        inner = schema if root is None else self_contained(schema, root)
        # Other tools' schemas were checked by relax.
        checked = self.builder.options.tools[number].strict is not True
        piece = plain_json_piece(inner, f"tools.tools[{number}].parameters", place, checked)
        self.sources |= piece.sources
        self.json_bytes += len(piece.body)
        if self.json_bytes > MAX_GRAMMAR_BYTES:
            raise too_large(self.sources, self.json_bytes)
        return piece.body

    def leave_out_unsupported(self, schema: Mapping[str, Any], number: int) -> None:
        """Exclude from enforcement the keywords that a notation of separate arguments does not support: those that
        apply to the object as a whole. Raises InvalidRequest."""
        properties, others = list(properties_of(schema)), schema.get("additionalProperties")
        unsupported = [key for key in UNSUPPORTED_WITH_PROPERTIES if key in schema]
        unsupported += ["additionalProperties"] if others and isinstance(others, dict) and not properties else []
        unsupported += ["required"] if others is False and lacks_members(schema) else []
        for key in unsupported:
            text = f"this model's notation of calls does not support {key!r}"
            self.builder.leave_out(number, pointer([key]), text)

    def client_grammar(self, grammar: str, number: int) -> str:
        """Return a reference to a client's Lark grammar."""
        self.grammars[f"input_{number}"] = grammar
        self.sources[f"tools.tools[{number}].parameters"] = None
        return f"@input_{number}"

    def arguments(self, tool: Tool, number: int) -> str:
        """Return a rule for a call's arguments as a JSON object. Raises InvalidRequest."""
        schema = self.builder.schema(tool, number)
        match _input_grammar(schema):
            case "lark", text:
                inner = self.client_grammar(spelled(text, f"tools.tools[{number}].parameters"), number)
                head, tail = literal(f'{{"{INPUT}": "'), literal('"}')
                return f"{head} {inner} {tail}"
            case "regex", text:
                schema = {**schema, "properties": {INPUT: {"type": "string", "pattern": f"^(?:{text})$"}}}
        return self.json(schema, number)

    def content(self, body: str) -> str:
        """Return the rule for content with the structure ``body`` within an answer."""
        return body

    @property
    def repeats_mark(self) -> bool:
        """True if a further mark may begin more calls."""
        return self.several and not self.only_section

    def repeated(self, one: str, separator: str = "") -> str:
        """Return a rule for ``one``, repeated with ``separator`` if several calls are allowed."""
        return f"{one} ({separator} {one})*" if self.several else one

    def text_with_calls(self) -> tuple[str, tuple[str, ...]]:
        """Return a rule for free text with calls after marks, and auxiliary rules. If only one mark is allowed, the
        answer ends after its calls."""
        ids, begin = self.builder.formats.mark_ids, self.marks.begin
        head, rules = f"TEXT {self.builder.term(begin)}", [f"TEXT: {ANY_TEXT}"]
        if not _begins_with_token(begin, ids):
            head = "text_and_mark"
            rules.append(f"text_and_mark[lazy]: TEXT_AND_MARK\nTEXT_AND_MARK: {ANY_TEXT} {literal(begin)}")
        return f"({head} call)* TEXT" if self.repeats_mark else f"TEXT | {head} call", tuple(rules)

    def bare_calls(self, first: str) -> tuple[str, tuple[str, ...]]:
        """Return the counterpart of :meth:`text_with_calls` for calls without a mark: an answer is calls only if it
        begins with ``first``, the inside of a character class. Empty answers are allowed, as elsewhere."""
        text, begin = rf"/(\s*[^{first}\s](?s:.*))?/", self.marks.begin
        if begin not in self.builder.formats.mark_ids:
            return f"{text} | {self.calls}", ()
        marked = f"{self.builder.term(begin)} {self.calls} {self.builder.term(self.marks.end)}"
        return f"{text} | ({text})? {marked} | {self.calls}", ()


class _TaggedWriter(_Writer):
    """Calls between two marks, as in hermes and generic."""

    def calls_rule(self) -> str:
        self.rules.append(f'call: "\\n" {self.any} "\\n" {self.builder.term(self.marks.end)}')
        return self.repeated(f"{self.builder.term(self.marks.begin)} call", '"\\n"')


class _XmlWriter(_TaggedWriter):
    """Calls as XML-like elements, as in XML_FORMS."""

    @property
    def form(self) -> XmlForm:
        """Marks of the format."""
        return XML_FORMS[self.builder.formats.tool_parser]

    def calls_rule(self) -> str:
        form = self.form
        calls = self.repeated(self.any, self.line) if form.together else self.any
        # A bare name follows the mark at once, and each parameter ends its line.
        line = self.line if form.function else ""
        self.rules.append(f"call: {line} {calls} {line} {self.builder.term(form.end)}")
        call = f"{self.builder.term(form.begin)} call"
        return call if form.together else self.repeated(call, '"\\n"')

    def call_rule(self, tool: Tool, number: int) -> str:
        schema, form = self.builder.schema(tool, number), self.form
        head = self.builder.term(f"{form.function}{tool.name}{form.named}")
        if form.end_head:
            head += f' " index=\\"" /[1-9][0-9]{{0,2}}/ "\\"" {self.builder.term(form.end_head)}'
        head += "" if form.nested else f" {self.line}"
        end = self.builder.term(form.end_function) if form.end_function else ""
        if (grammar := _input_grammar(schema)) is not None:
            return f"{head} {self._head(literal(INPUT))} {self._input(*grammar, number)} {self._after_end(INPUT)} {end}"
        self.leave_out_unsupported(schema, number)
        parts = self._parameters(f"parameter_{number}", schema, schema, number)
        if not parts and schema.get("additionalProperties") is not False:
            name = f"parameter_{number}"
            key = f'/[^<>\\/"\\n][^<>"\\n]{{0,{MAX_KEY_CHARS - 1}}}/'
            behind = f'{key} ">"' if form.nested else self.line
            self.rules += self._text(name, self._head(key), {}, behind)
            parts.append(f"{name}*")
        return f"{head} {' '.join(parts)} {end}"

    def _parameters(
        self, name: str, schema: Mapping[str, Any], root: Mapping[str, Any], number: int, place: str = ""
    ) -> list[str]:
        """Return rules for the parameters in ``schema``, which is at ``place`` in ``root``, the tool's schema. Raises
        InvalidRequest."""
        parts = []
        for m, (key, value, needed) in enumerate(properties_of(schema)):
            inner = place + pointer(("properties", key))
            if not self.form.reads_key(key):
                self.builder.leave_out(number, inner, f"the model cannot write the property {key!r}")
                continue
            one = f"{name}_{m}"
            self.rules += self._parameter(one, key, value, root, number, inner)
            parts.append(one if needed else f"{one}?")
        return parts

    def _after_end(self, key: str) -> str:
        """Return a rule for the text after a parameter's end mark."""
        return literal(f"{key}>") if self.form.nested else self.line

    @property
    def line(self) -> str:
        """Rule for the text between two elements."""
        return "" if self.form.end_head else '"\\n"'

    def _key(self, key: str) -> str:
        return literal(escaped(key) if self.form.end_head else key)

    def _head(self, key: str, types: Iterable[str] = ("string",)) -> str:
        """Return a rule for the text before a parameter's value, which has one of ``types``; ``key`` is the key's
        rule."""
        form = self.form
        if form.typed:
            head, behind = form.keyed
            named = {"number" if one == "integer" else one for one in types}
            kinds = sorted(named) if form.end_head else [str(named == {"string"}).lower()]
            kind = f"({' | '.join(map(literal, kinds))})"
            return f"{self.builder.term(form.parameter)} {key} {literal(head)} {kind} {self.builder.term(behind)}"
        keyed = ' "\\n" '.join(map(self.builder.term, form.keyed))
        return f"{self.builder.term(form.parameter)} {key} {keyed}" + (' "\\n"' if form.lines else "")

    def _tail(self) -> str:
        """Return a rule for the text after a parameter's value."""
        return ('"\\n" ' if self.form.lines else "") + self.builder.term(self.form.end_parameter)

    def _up_to_end(self, name: str, value: str) -> tuple[str, list[str]]:
        """Return a rule for a match of ``value`` and the end mark after it, and auxiliary rules. The value ends at the
        first end mark."""
        line, end = "\\n" if self.form.lines else "", self.form.end_parameter
        if _begins_with_token(end, self.builder.formats.mark_ids):
            return f"/{value}/ {self._tail()}", []
        mark = expression(re.escape(end), "")[1:-1]
        ended = f"/{value}{line}{mark}/ & ~/(?s:.*){mark}(?s:.+)/"
        return name, [f"{name}[lazy]: {name.upper()}", f"{name.upper()}: {ended}"]

    def _input(self, syntax: str, text: str, number: int) -> str:
        """Return a rule for a custom tool's input and the end mark after it."""
        if syntax == "lark":
            return f"{self.client_grammar(text, number)} {self._tail()}"
        field = f"tools.tools[{number}].parameters"
        self.sources[field] = None
        rule, rules = self._up_to_end(f"input_text_{number}", f"(?:{expression(text, field)[1:-1]})")
        self.rules += rules
        return rule

    def _parameter(
        self, name: str, key: str, schema: Mapping[str, Any], root: Mapping[str, Any], number: int, place: str
    ) -> list[str]:
        """Return the rules of one parameter: a text up to its end mark, one of some values, elements of a list or an
        object, or JSON. Raises InvalidRequest."""
        begin, end = self._head(self._key(key)), f"{self._tail()} {self._after_end(key)}"
        types = types_of({"properties": {key: schema}}, key)
        if (values := values_of(schema)) is not None:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            # A text that contains an end mark would end at it.
            texts = [text for text in texts if not any(mark in text for mark in self.form.ends)]
            if not texts:
                word = "enum" if "enum" in schema else "const"
                self.builder.leave_out(number, f"{place}/{word}", "the model cannot write any of these")
                return self._text(name, begin, {}, self._after_end(key))
            # Text that is not JSON is parsed as a string, whatever type the call declares.
            begin = self._head(self._key(key), types - {"string"} or types)
            return [f"{name}: {begin} ({' | '.join(map(literal, texts))}) {end}"]
        if "string" in types:
            return self._text(name, begin, schema, self._after_end(key))
        begin = self._head(self._key(key), types)
        value = self._elements(name, schema, root, number, place)
        return [f"{name}: {begin} {value or self.json(schema, number, place, root)} {end}"]

    def _elements(self, name: str, schema: Mapping[str, Any], root: Mapping[str, Any], number: int, place: str) -> str:
        """Return a rule for a list or object as nested elements; "" if it is written as JSON instead: the format is not
        nested, the type is another, or elements cannot enforce the schema."""
        words = {*schema} - {"title", "description", "default", "examples"}
        if not self.form.nested or name.count("_") > MAX_DEPTH:
            return ""
        if schema.get("type") == "object" and words <= {"type", "properties", "required", "additionalProperties"}:
            open_ended = schema.get("additionalProperties") not in (None, False)
            parts = [] if open_ended else self._parameters(name, schema, root, number, place)
            return f"({' '.join(parts)})" if parts else ""
        items, min_items, max_items = (
            schema.get("items"),
            schema.get("minItems", 0),
            schema.get("maxItems", MAX_COUNTED_CHARS),
        )
        counted = type(min_items) is type(max_items) is int and 0 <= min_items <= max_items <= MAX_COUNTED_CHARS
        if schema.get("type") == "array" and words <= {"type", "items", "minItems", "maxItems"} and counted:
            if not isinstance(items, dict) or not items:
                return ""
            item = f"{name}_item"
            self.rules += self._parameter(item, "item", items, root, number, f"{place}/items")
            return f"{item}{{{min_items},{max_items if 'maxItems' in schema else ''}}}"
        return ""

    def _text(self, name: str, begin: str, schema: Mapping[str, Any], behind: str) -> list[str]:
        """Return the rules of a text parameter: ``begin``, text within the schema's length, the end mark, and
        ``behind``."""
        min_length, max_length = (bound(schema, word, MAX_COUNTED_CHARS) for word in ("minLength", "maxLength"))
        low = min_length or 0
        high = "" if max_length is None or max_length < low else max_length
        rule, rules = self._up_to_end(f"{name}_text", f"(?s:.{{{low},{high}}})")
        return [f"{name}: {begin} {rule} {behind}", *rules]


class _NamedWriter(_TaggedWriter):
    """Calls with a name before their arguments, as in NAMED_FORMS. Nothing follows the section of all calls."""

    only_section = True

    def call_rule(self, tool: Tool, number: int) -> str:
        form, term = NAMED_FORMS[self.builder.formats.tool_parser], self.builder.term
        begin, end, arguments = term(form.begin), term(form.end), self.arguments(tool, number)
        if form.numbered:
            name = f"{literal(f'{NAME_PREFIX}{tool.name}:')} /[0-9]{{1,3}}/"
            return f"{begin} {name} {term(form.separator)} {arguments} {end}"
        if form.fenced:
            head = f'"function" {term(DEEPSEEK_SEPARATOR)} {literal(f"{tool.name}{chr(10)}{FENCE}{chr(10)}")}'
            return f"{begin} {head} {arguments} {literal(f'{chr(10)}{END_FENCE}')} {end}"
        return f"{begin} {literal(tool.name)} {term(form.separator)} {arguments} {end}"

    def calls_rule(self) -> str:
        form = NAMED_FORMS[self.builder.formats.tool_parser]
        calls = self.repeated(self.any, '"\\n"' if form.fenced else "")
        self.rules.append(f"call: {calls} {self.builder.term(form.end_section)}")
        return f"{self.builder.term(form.section)} call"


class _ListWriter(_TaggedWriter):
    """Calls in one list of objects between marks, as in LIST_FORMATS."""

    only_section = True

    def calls_rule(self) -> str:
        end = self.builder.term(self.marks.end) if self.marks.end else ""
        self.rules.append(f'call: "[" {self.repeated(self.any, literal(", "))} "]" {end}')
        return f"{self.builder.term(self.marks.begin)} call"


class _ApertusWriter(_ListWriter):
    """Calls of Apertus: each is an object with one key, the tool's name."""

    def call_rule(self, tool: Tool, number: int) -> str:
        return f'{literal(f"{{{json.dumps(tool.name)}: ")} {self.arguments(tool, number)} "}}"'


class _InternlmWriter(_TaggedWriter):
    """Calls of InternLM, with arguments as ``parameters``."""

    arguments_key = "parameters"


class _CohereWriter(_ListWriter):
    """Calls of Cohere: a list with a line per call, with numbered calls."""

    def call_rule(self, tool: Tool, number: int) -> str:
        head = f', "tool_name": {json.dumps(tool.name)}, "parameters": '
        begin, behind = literal('{"tool_call_id": "'), literal(f'"{head}')
        return f'{begin} /[0-9]{{1,3}}/ {behind} {self.arguments(tool, number)} "}}"'

    def calls_rule(self) -> str:
        line, next_line = literal("[\n    "), literal(",\n    ")
        calls = self.repeated(self.any, next_line)
        self.rules.append(f'call: {line} {calls} "\\n]" {self.builder.term(self.marks.end)}')
        return f"{self.builder.term(self.marks.begin)} call"


class _LiteralWriter(_TaggedWriter):
    """Calls with keyword arguments in Python's notation or Gemma's, as in LITERAL_FORMS."""

    @property
    def form(self) -> LiteralForm:
        """Delimiters of the tool call format."""
        return LITERAL_FORMS[self.builder.formats.tool_parser]

    def call_rule(self, tool: Tool, number: int) -> str:
        schema, form, name = self.builder.schema(tool, number), self.form, f"arguments_{number}"
        head, end = literal(f"{form.head}{tool.name}{form.opened}"), literal(form.closed)
        values = GemmaValues(
            schema,
            f"{name}_value",
            (self.builder.term(form.quote), form.quote),
            form.quote in self.builder.formats.mark_ids,
            lambda inner, place: self.json(inner, number, place),
            self.rules,
            lambda place, reason: self.builder.leave_out(number, place, reason),
        )
        if (grammar := _input_grammar(schema)) is not None:
            return f"{head} {literal(INPUT + form.keyed)} {self._input(*grammar, number, values)} {end}"
        self.leave_out_unsupported(schema, number)
        if form.quote:
            self.json(schema, number)
            return f"{head} {values.pairs(schema, name)} {end}"
        return f"{head} {self._pairs(schema, number, name)} {end}"

    def _pairs(self, schema: Mapping[str, Any], number: int, name: str) -> str:
        """Return a rule for a call's arguments in Python's notation. Raises InvalidRequest."""
        keyed = literal(self.form.keyed)
        known = list(properties_of(schema))
        if not known and schema.get("additionalProperties") is not False:
            pair = f"{KEY} {keyed} {self.json({}, number)}"
            return f"({pair} ({literal(self.form.comma)} {pair})*)?"
        pairs = []
        for key, value, needed in known:
            place = pointer(("properties", key))
            if not is_plain_key(key):
                self.builder.leave_out(number, place, f"the model cannot write the property {key!r}")
                continue

            def rule(inner: Any, place: str = place) -> str:
                return self.json(inner, number, place, schema)

            pairs.append((f"{literal(key)} {keyed} {python_value(value, rule)}", needed))
        return members(name, pairs, self.form.comma, self.rules)

    def _input(self, syntax: str, text: str, number: int, values: GemmaValues) -> str:
        """Return a rule for a custom tool's input."""
        field = f"tools.tools[{number}].parameters"
        if not self.form.quote:
            if syntax == "lark":
                return f"{literal(chr(34))} {self.client_grammar(spelled(text, field), number)} {literal(chr(34))}"
            return self.json({"type": "string", "pattern": f"^(?:{text})$"}, number)
        quote = self.builder.term(self.form.quote)
        if syntax == "lark":
            return f"{quote} {self.client_grammar(text, number)} {quote}"
        self.sources[field] = None
        return f"{quote} {values.up_to_mark(f'(?:{expression(text, field)[1:-1]})')}"

    def calls_rule(self) -> str:
        form, calls = self.form, self.any
        if form.listed:
            calls = f'"[" {self.repeated(calls, literal(", "))} "]"'
        elif form.lines:
            calls = self.repeated(calls, literal("\n"))
        self.rules.append(f"call: {calls} {self.builder.term(form.end) if form.end and not form.listed else ''}")
        if form.listed:
            return "call"
        call = f"{self.builder.term(form.begin)} call"
        return call if form.lines else self.repeated(call)

    @property
    def repeats_mark(self) -> bool:
        return self.several and not self.form.lines

    def text_with_calls(self) -> tuple[str, tuple[str, ...]]:
        return self.bare_calls(r"\[") if self.form.listed else super().text_with_calls()


class _LlamaWriter(_Writer):
    """Calls as JSON objects without marks, separated by semicolons, as in llama3_json."""

    arguments_key = "parameters"

    def calls_rule(self) -> str:
        return self.repeated(self.any, literal("; "))

    def text_with_calls(self) -> tuple[str, tuple[str, ...]]:
        return self.bare_calls("{")


class _MistralWriter(_ListWriter):
    """Calls of Mistral: a list after one mark or, if the tokenizer has a mark for it, a name and arguments after
    each."""

    def call_rule(self, tool: Tool, number: int) -> str:
        if "[ARGS]" in self.builder.formats.mark_ids:
            return f"{literal(tool.name)} {self.builder.term('[ARGS]')} {self.arguments(tool, number)}"
        return super().call_rule(tool, number)

    def calls_rule(self) -> str:
        if "[ARGS]" not in self.builder.formats.mark_ids:
            return super().calls_rule()
        self.rules.append(f"call: {self.any}")
        return self.repeated(f"{self.builder.term(self.marks.begin)} call")

    @property
    def repeats_mark(self) -> bool:
        return self.several and "[ARGS]" in self.builder.formats.mark_ids


class _HarmonyWriter(_Writer):
    """Calls as messages in a channel, as in gpt-oss. A call ends the answer, so there is at most one. An answer whose
    prompt ends within its content (``continue_final_message``) only continues it."""

    def call_rule(self, tool: Tool, number: int) -> str:
        channel, constrain, message = map(
            self.builder.term, (HarmonyMark.CHANNEL, HarmonyMark.CONSTRAIN, HarmonyMark.MESSAGE)
        )
        head = literal(f"commentary to={NAME_PREFIX}{tool.name} ")
        return f'{channel} {head} {constrain} "json" {message} {self.arguments(tool, number)}'

    def calls_rule(self) -> str:
        marks = self.builder.formats.mark_ids
        return f"{ANY_TEXT} {_next_message(marks)} {self.any}" if self.builder.opened is False else self.any

    def content(self, body: str) -> str:
        return body if self.builder.opened is False else f"{_message('final', self.builder.formats.mark_ids)} ({body})"

    def text_with_calls(self) -> tuple[str, tuple[str, ...]]:
        if self.builder.opened is False:
            return f"{ANY_TEXT} | {self.calls}", ()
        marks = self.builder.formats.mark_ids
        # A call may follow messages for the user, which are content, and further reasoning.
        before = f"({_message('commentary', marks)} | {_message(ANALYSIS, marks)}) {ANY_TEXT} {_next_message(marks)}"
        return f"({before})* ({self.content(ANY_TEXT)} | {self.calls})", ()


_WRITERS: Mapping[str, Callable[[_Calls, Mapping[int, Tool], bool], _Writer]] = {
    "hermes": _TaggedWriter,
    "generic": _TaggedWriter,
    "ernie45": _TaggedWriter,
    **dict.fromkeys(XML_FORMS, _XmlWriter),
    **dict.fromkeys(NAMED_FORMS, _NamedWriter),
    **dict.fromkeys(LIST_FORMATS, _ListWriter),
    "cohere_command3": _CohereWriter,
    "apertus": _ApertusWriter,
    "internlm": _InternlmWriter,
    **dict.fromkeys(LITERAL_FORMS, _LiteralWriter),
    "llama3_json": _LlamaWriter,
    "mistral": _MistralWriter,
    OPENAI: _HarmonyWriter,
}


def _term(mark: str, ids: Mapping[str, int]) -> str:
    """Return the term for a mark: its special tokens by id, other text as a string."""
    return terms(cut_at_tokens(mark, ids), ids)
