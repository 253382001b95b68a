"""Parses calls that are XML-like elements: a text per parameter, typed by the tool's schema. Sans-IO (I9).

<tool_call> <function=NAME> <parameter=KEY> text </parameter> ... </function> </tool_call>     Qwen3-Coder
<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>text</arg_value> ... </tool_call>            GLM
<invoke name="NAME"> <KEY>text</KEY> <KEY> <item>text</item> ... </KEY> ... </invoke>          MiniMax M3
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pillion.gateway.formats.answer_parts import MAX_HELD_CHARS, AnswerParts, CallReader, Marks, PendingText
from pillion.gateway.formats.json_calls import MARK_START, NAME, JsonScan
from pillion.gateway.grammars.schema_dialects import TYPE_OF

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
MINIMAX = "]<]minimax[>["
MAX_KEY_CHARS = 256
MAX_DEPTH = 32
_KEPT_TYPES = 1024


@dataclass(frozen=True, slots=True)
class XmlForm:
    """Marks of one format of elements.

    Attributes:
        begin, end: marks around a call or, with ``together``, around several.
        function, named, end_function: text before and after a name, and after the parameters; "" for none.
        parameter: text before a parameter's key.
        keyed: texts between the key and the value, maybe with white space between them.
        end_parameter: text after the value.
        lines: whether a parameter's value has its own lines.
        together: whether several calls share one ``begin`` and ``end``.
        typed: whether the value's type is between ``keyed[0]`` and ``keyed[1]``: a JSON type with ``end_head``, else
            whether it is a string, "true" or "false".
        end_head: text after a call's name and further attributes, of which grammars write the call's number; "" if
            there are no attributes. With it, keys are escaped, and there is no white space between elements.
        nested: whether a parameter is an element with its key as name, and with inner elements for lists and objects;
            the name follows ``end_parameter`` too.
    """

    begin: str
    end: str
    function: str
    named: str
    end_function: str
    parameter: str
    keyed: tuple[str, ...]
    end_parameter: str
    lines: bool = False
    together: bool = False
    typed: bool = False
    end_head: str = ""
    nested: bool = False

    @property
    def inner(self) -> tuple[str, ...]:
        """Marks within a call."""
        marks = (self.function, self.named, self.end_function, self.parameter, *self.keyed, self.end_parameter)
        marks += (self.end_head,)
        return tuple(mark for mark in marks if len(mark) > len('">'))

    @property
    def word_end(self) -> re.Pattern[str]:
        """Characters that end a name or a key."""
        return re.compile(rf"[{self.named[:1]}{self.keyed[0][:1]}\n<]")

    @property
    def ends(self) -> tuple[str, ...]:
        """Marks that end a parameter's text. A model may omit the end mark; then the next mark ends the text, on its
        own line if texts have lines."""
        line = "\n" if self.lines else ""
        # With nesting, an end mark begins like an element's mark.
        own = () if self.nested else (line + self.end_parameter, self.end_parameter)
        return (*dict.fromkeys((*own, *self.following)),)

    @property
    def following(self) -> tuple[str, ...]:
        """Marks that end a parameter's text although its end mark is missing: the next parameter's, or the call's
        end."""
        line = "\n" if self.lines else ""
        return (line + self.parameter, line + (self.end_function or self.end))

    def reads_key(self, key: str) -> bool:
        """Return whether a parameter's key can be parsed."""
        word = escaped(key) if self.end_head else key
        if self.nested and word.startswith("/"):
            return False
        return 0 < len(word) <= MAX_KEY_CHARS and not self.word_end.search(word)


_FUNCTION = ("<function=NAME>…</function>", "<parameter=KEY>TEXT</parameter>")


def _form(calls: str, call: str, parameter: str, **more: Any) -> XmlForm:
    """Create a form from examples: the text around calls (…), a call with its NAME and parameters (…), and a parameter
    with its KEY, an optional TYPE, and its TEXT."""
    begin, end = calls.split("…")
    head, end_function = call.split("…")
    function, named = head.split("NAME")
    parameter, keyed, end_parameter = re.split("KEY|TEXT", parameter)
    parts = tuple(re.split(" (?=<)|TYPE", keyed))
    return XmlForm(
        begin, end, function, named, end_function, parameter, parts, end_parameter, typed="TYPE" in keyed, **more
    )


XML_FORMS: dict[str, XmlForm] = {
    "hy_v3": _form(
        "<tool_calls>…</tool_calls>",
        "<tool_call>NAME<tool_sep>…</tool_call>",
        "<arg_key>KEY</arg_key> <arg_value>TEXT</arg_value>",
        together=True,
    ),
    "step3": _form(
        "<｜tool_calls_begin｜>…<｜tool_calls_end｜>",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">…</steptml:invoke><｜tool_call_end｜>',
        '<steptml:parameter name="KEY">TEXT</steptml:parameter>',
        together=True,
    ),
    "deepseek_v32": _form(
        "<｜DSML｜function_calls>…</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="NAME">…</｜DSML｜invoke>',
        '<｜DSML｜parameter name="KEY" string="TYPE">TEXT</｜DSML｜parameter>',
        together=True,
    ),
    "kimi_k3": _form(
        "<|open|>tools<|sep|>…<|close|>tools<|sep|>",
        '<|open|>call tool="NAME"…<|close|>call<|sep|>',
        '<|open|>argument key="KEY" type="TYPE"<|sep|>TEXT<|close|>argument<|sep|>',
        together=True,
        end_head="<|sep|>",
    ),
    "glm45": _form(f"{TOOL_CALL}…{END_TOOL_CALL}", "NAME…", "<arg_key>KEY</arg_key> <arg_value>TEXT</arg_value>"),
    "minimax_m2": _form(
        "<minimax:tool_call>…</minimax:tool_call>",
        '<invoke name="NAME">…</invoke>',
        '<parameter name="KEY">TEXT</parameter>',
        together=True,
    ),
    "minimax_m3": _form(
        f"{MINIMAX}<tool_call>…{MINIMAX}</tool_call>",
        f'{MINIMAX}<invoke name="NAME">…{MINIMAX}</invoke>',
        f"{MINIMAX}<KEY>TEXT{MINIMAX}</",
        together=True,
        nested=True,
    ),
    "seed_oss": _form("<seed:tool_call>…</seed:tool_call>", *_FUNCTION),
    "qwen3_coder": _form(f"{TOOL_CALL}…{END_TOOL_CALL}", *_FUNCTION, lines=True),
}
_EMPTY = {"string": '""', "array": "[]", "object": "{}", "null": "null"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_NO_STRING = {"boolean", "number", "object", "array", "null"}


class XmlCalls(CallReader):
    """Parser of calls that are XML-like elements. ``schemas``: JSON schemas of the tools' arguments, by name."""

    def __init__(
        self, text: PendingText, parts: AnswerParts, schemas: Mapping[str, Mapping[str, Any]], form: XmlForm
    ) -> None:
        super().__init__(text, parts, Marks(*filter(None, (form.begin, form.function))))
        self._schemas = schemas
        self._form = form
        self._ends_parameter = Marks(*form.ends)
        self._word_end = form.word_end
        # By the schema's id(): a schema may be large, and the same parameter frequent.
        self._types: dict[int, set[str]] = {}

    def _after(self, mark: str) -> Generator[None, None, bool]:
        text, form = self._text, self._form
        if mark == form.begin:
            yield from text.skip_space()
            if not (yield from text.accept(form.function)):
                return False
        name = yield from self._name()
        if not NAME.fullmatch(name):
            return False
        text.commit()
        self._parts.begin(name)
        separator = "{"
        while (yield from self._parameter(name, separator)):
            separator = ", "
        if (yield from text.more()):
            # A truncated call's arguments stay incomplete JSON, so that clients notice.
            self._parts.arguments("{}" if separator == "{" else "}")
        if form.end_function and (yield from text.accept(form.end_function)):
            yield from text.skip_space()
        yield from text.accept(form.end)
        return True

    def _name(self) -> Generator[None, None, str]:
        """Read and return a tool's name, and the mark after it if the format has one; return "" if there is no name."""
        name = yield from self._text.up_to(self._word_end, MAX_KEY_CHARS)
        if self._form.named and not (yield from self._text.accept(self._form.named)):
            return ""
        if self._form.end_head:
            yield from self._text.up_to(MARK_START, MAX_KEY_CHARS)
            return name if (yield from self._text.accept(self._form.end_head)) else ""
        if self._form.named:
            return name
        return name.strip() if (yield from self._text.skip_space()) == "<" else ""

    def _key(self) -> Generator[None, None, tuple[str, str]]:
        """Read a parameter's key and the marks up to its value. Return the key, "" if a mark is missing, and the
        value's type, "" if the format has none."""
        key = yield from self._text.up_to(self._word_end, MAX_KEY_CHARS)
        kind = ""
        for number, mark in enumerate(self._form.keyed):
            if number and self._form.typed:
                kind = yield from self._text.up_to(self._word_end, MAX_KEY_CHARS)
            elif number:
                yield from self._text.skip_space()
            if not (yield from self._text.accept(mark)):
                return "", ""
        return unescaped(key) if self._form.end_head else key, kind

    def _parameter(self, name: str, separator: str) -> Generator[None, None, bool]:
        """Parse the next parameter of the tool ``name``, and emit it after ``separator``; return False if none is
        left."""
        text, parts = self._text, self._parts
        yield from text.skip_space()
        text.begin_trial()
        key, kind = (yield from self._key()) if (yield from text.accept(self._form.parameter)) else ("", "")
        if not key or (self._form.nested and key.startswith("/")):
            text.fail_trial(parts.content)
            return False
        text.commit()
        parts.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        if self._form.lines:
            yield from text.accept("\n")
        schema = _inner(self._schemas.get(name, {}), key)
        if self._form.nested:
            yield from self._element(schema, 1)
            return True
        types = self._types_of(schema)
        # A value that is marked as another type is JSON, even if the schema has no types.
        is_text = kind in ("true", "string")
        types = {"string"} if is_text else types - {"string"} or _NO_STRING if kind else types
        yield from self._value(types)
        return True

    def _value(self, types: set[str]) -> Generator[None, None, None]:
        """Parse a parameter's text, and emit it as JSON of one of ``types``."""
        value = _Value(types, self._parts.arguments)
        mark = yield from self._text.until(self._ends_parameter, value.push)
        while mark and value.in_string:
            value.push(mark)
            mark = yield from self._text.until(self._ends_parameter, value.push)
        if mark in self._form.following:
            self._text.unread(len(mark))
        value.end(whole=bool(mark))

    def _element(self, schema: Mapping[str, Any], depth: int) -> Generator[None, None, None]:
        """Parse an element after its name, a text or inner elements, and emit it as JSON of ``schema``."""
        text, emit, form = self._text, self._parts.arguments, self._form
        types = self._types_of(schema)
        if "string" not in types:
            yield from text.skip_space()
        if closed := (yield from text.accept(form.end_parameter)):
            emit(next((empty for kind, empty in _EMPTY.items() if kind in types), '""'))
        elif depth < MAX_DEPTH and (yield from text.accept(form.parameter)):
            key = yield from self._tag()
            lists, objects = "array" in types, "object" in types
            is_list = lists if lists != objects else key == "item"
            opened = "[" if is_list else "{"
            while key:
                emit(opened if is_list else f"{opened}{json.dumps(key, ensure_ascii=False)}: ")
                yield from self._element(_inner(schema, "" if is_list else key), depth + 1)
                opened = ", "
                yield from text.skip_space()
                closed = yield from text.accept(form.end_parameter)
                key = "" if closed or not (yield from text.accept(form.parameter)) else (yield from self._tag())
            if closed or (yield from text.more()):
                emit(f"{opened.strip(', ')}{']' if is_list else '}'}")
        else:
            yield from self._value(types)
            closed = yield from text.accept(form.end_parameter)
        if closed:
            yield from self._tag()

    def _tag(self) -> Generator[None, None, str]:
        """Read an element's name and the mark after it; return "" if it is missing."""
        name = yield from self._text.up_to(self._word_end, MAX_KEY_CHARS)
        return name if (yield from self._text.accept(self._form.keyed[0])) else ""

    def _types_of(self, schema: Mapping[str, Any]) -> set[str]:
        types = self._types.get(id(schema))
        if types is None:
            types = _types(schema) or {"string"}
            # Not for {}, which may be a temporary object, whose id() is reused.
            if schema and len(self._types) < _KEPT_TYPES:
                self._types[id(schema)] = types
        return types


class _Value:
    """Converter of a parameter's text to JSON of one of ``types``. A string is emitted as it arrives; text of other
    types is held until its end. From MAX_HELD_CHARS on, it is emitted as it arrives too: unchanged if it begins like an
    allowed object or list, else as a string."""

    def __init__(self, types: set[str], emit: Callable[[str], None]) -> None:
        self._types = types
        self._emit = emit
        self._held: list[str] = []
        self._held_chars = 0
        self._convert: Callable[[str], str] | None = None
        # Marks within JSON strings are text; None if the text is not JSON.
        self._scan = None if "string" in types else JsonScan()
        self._begun = False
        if types == {"string"}:
            self._begin("")

    @property
    def in_string(self) -> bool:
        """True if the text so far ends within a JSON string."""
        return self._scan is not None and self._scan.in_string

    def push(self, piece: str) -> None:
        if not self._begun and (first := piece.lstrip()[:1]):
            self._begun = True
            self._scan = self._scan if first in '{["' else None
        if self._scan is not None and self._begun and not self._scan.ended:
            self._scan.read(piece, 0, len(piece))
        if self._convert is not None:
            self._emit(self._convert(piece))
            return
        self._held.append(piece)
        self._held_chars += len(piece)
        if self._held_chars > MAX_HELD_CHARS:
            self._begin("".join(self._held))

    def end(self, whole: bool) -> None:
        """End the value. ``whole``: it is complete, i.e. a mark followed."""
        if self._convert is None:
            text = "".join(self._held)
            self._emit(typed(text, self._types) if whole else text)
        elif whole and self._convert is _in_string:
            self._emit('"')

    def _begin(self, text: str) -> None:
        kind = {"{": "object", "[": "array"}.get(text.lstrip()[:1])
        self._held.clear()
        if kind in self._types:
            self._convert = str
            self._emit(text)
        else:
            self._convert = _in_string
            self._emit('"' + _in_string(text))


def escaped(key: str) -> str:
    """Escape a key as an attribute's value."""
    return key.replace("&", "&amp;").replace('"', "&quot;")


def unescaped(text: str) -> str:
    """Unescape a key of :func:`escaped`."""
    return text.replace("&quot;", '"').replace("&amp;", "&")


def _in_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """Return a parameter's JSON types in a schema of arguments; {"string"} if unspecified."""
    return _types(_inner(schema, key)) or {"string"}


def _inner(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of an object's property, or for "" of a list's items; {} if unspecified."""
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    inner = schema.get("items") if not key else properties.get(key, others) if isinstance(properties, dict) else others
    return inner if isinstance(inner, dict) else {}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema names; "object" for a reference."""
    found: set[str] = set()
    # Iterative, since a client's schema may be deep.
    pending = [schema]
    while pending:
        one = pending.pop()
        named = one.get("type")
        types = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
        values = one["enum"] if isinstance(one.get("enum"), list) else [one["const"]] if "const" in one else []
        found |= types or {TYPE_OF.get(type(value), "null") for value in values}
        if "$ref" in one:
            # References are not followed; most lead to objects.
            found.add("object")
        for word in ("anyOf", "oneOf", "allOf"):
            options = one.get(word)
            pending += [option for option in options if isinstance(option, dict)] if isinstance(options, list) else ()
    return found


def typed(text: str, types: set[str]) -> str:
    """Convert a parameter's text to JSON of one of ``types``, or to a string if it is none of them."""
    value = _PYTHON.get(text.strip(), text.strip())
    try:
        # Unlike json, msgspec refuses NaN and infinities. Contents of objects and lists are validated without building
        # them, which is slow for deep ones.
        read = msgspec.json.decode(value, type=msgspec.Raw if value[:1] in ("{", "[") else Any)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = {"{": "object", "[": "array"}.get(value[:1]) or TYPE_OF.get(type(read), "null")
    fits = kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return value if fits else json.dumps(text, ensure_ascii=False)
