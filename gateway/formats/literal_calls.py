"""Parses calls with keyword arguments in Python's notation or Gemma's, and converts the arguments to JSON. Sans-IO
(I9).

[NAME(key=value, key="text"), NAME()]                          pythonic, llama4_pythonic (between marks, or bare)
<function_calls>NAME(key=value)\\nNAME()</function_calls>       olmo3
<|tool_call>call:NAME{key:<|"|>text<|"|>,key:1}<tool_call|>    gemma4, and functiongemma with other marks

Strings are emitted as they arrive, and so are keys. An argument that cannot be parsed ends the call: its arguments stay
incomplete JSON, so that clients notice, and what follows is content.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Generator
from dataclasses import dataclass
from typing import NamedTuple

from pillion.gateway.formats.answer_parts import AnswerParts, CallReader, Marks, PendingText
from pillion.gateway.formats.json_calls import MAX_NAME_CHARS, NAME, NOT_NAME
from pillion.gateway.formats.xml_calls import MAX_KEY_CHARS

MAX_WORD_CHARS = 1024
_KEY_END = re.compile(r"[\s=:,(){}\[\]<]")
_WORD_END = re.compile(r"[\s,)}\]<]")
_LITERALS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_QUOTE_OR_BACKSLASH = re.compile(r"[\\\"']")
# An escape in Python strings; a surrogate pair, as in JSON, is one character.
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))",
    re.DOTALL,
)
# An incomplete escape at the end of a piece of text.
_PARTIAL_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?$"
)
_SHORT_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LiteralForm:
    """Marks and notation of one format.

    Attributes:
        begin, end: marks around a call or, with ``listed`` or ``lines``, around several; "" for none.
        listed: whether calls are a list in brackets, with which an answer may also begin.
        lines: whether each call has its own line.
        head: text before a name.
        opened, closed: brackets around the arguments.
        keyed: separator after a key.
        comma: text between two arguments.
        quote: mark around strings; "" if they have Python's quotes, and keys within values are strings.
    """

    begin: str
    end: str
    listed: bool = False
    lines: bool = False
    head: str = ""
    opened: str = "("
    closed: str = ")"
    keyed: str = "="
    comma: str = ", "
    quote: str = ""


def _gemma(begin: str, end: str, quote: str) -> LiteralForm:
    return LiteralForm(begin, end, head="call:", opened="{", closed="}", keyed=":", comma=",", quote=quote)


LITERAL_FORMS: dict[str, LiteralForm] = {
    "pythonic": LiteralForm("", "", listed=True),
    "llama4_pythonic": LiteralForm("<|python_start|>", "<|python_end|>", listed=True),
    "lfm2": LiteralForm("<|tool_call_start|>", "<|tool_call_end|>", listed=True),
    "olmo3": LiteralForm("<function_calls>", "</function_calls>", lines=True),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
}


class _Frame(NamedTuple):
    """Notation of an object or list: its closing bracket, the separator after its keys, "" for a list, and its brackets
    in JSON."""

    closed: str
    keyed: str
    json_opened: str
    json_closed: str


_LIST, _TUPLE = _Frame("]", "", "[", "]"), _Frame(")", "", "[", "]")


class LiteralCalls(CallReader):
    """Parser of calls in the notation of ``form``."""

    def __init__(self, text: PendingText, parts: AnswerParts, tool_names: Container[str], form: LiteralForm) -> None:
        super().__init__(text, parts, Marks(*filter(None, (form.begin,))))
        self._tool_names = tool_names
        self._form = form
        self._inner = {"[": _LIST, "{": _Frame("}", ":", "{", "}")}
        if not form.quote:
            self._inner["("] = _TUPLE

    def read(self) -> Generator[None, None, None]:
        """Parse the whole answer."""
        if self._form.listed:
            # Without a mark, only a tool of the request can be called.
            self._text.begin_trial()
            if not (yield from self._calls(only_offered=True)):
                self._parts.content(self._text.roll_back())
        yield from super().read()

    def _after(self, mark: str) -> Generator[None, None, bool]:
        return self._calls()

    def _calls(self, only_offered: bool = False) -> Generator[None, None, bool]:
        """Parse the calls after a mark, and the mark after them. Return False if there is no call; the caller then
        fails the trial. ``only_offered``: a call must have the name of a tool of the request."""
        text, form = self._text, self._form
        character = yield from text.skip_space()
        if form.listed:
            if character != "[":
                return False
            text.step()
            yield from text.skip_space()
        if not (yield from self._call(only_offered)):
            return False
        while form.listed or form.lines:
            character = yield from text.skip_space()
            text.begin_trial()
            if form.listed and character in ("]", ","):
                text.step()
                if character == "]":
                    text.commit()
                    break
                yield from text.skip_space()
            if (form.listed and character != ",") or not (yield from self._call()):
                text.fail_trial(self._parts.content)
                break
        yield from text.skip_space()
        yield from text.accept(form.end)
        return True

    def _call(self, only_offered: bool = False) -> Generator[None, None, bool]:
        """Parse one call. Return False if there is none; the caller then fails the trial. ``only_offered``: it must
        have the name of a tool of the request."""
        text, form = self._text, self._form
        if not (yield from text.accept(form.head)):
            return False
        name = yield from text.up_to(NOT_NAME, MAX_NAME_CHARS)
        if not NAME.fullmatch(name) or (only_offered and name not in self._tool_names):
            return False
        if not (yield from text.accept(form.opened)):
            return False
        text.commit()
        self._parts.begin(name)
        yield from self._arguments()
        return True

    def _arguments(self) -> Generator[None, None, None]:
        """Parse a call's arguments, after the opening bracket, and emit them as JSON, up to the first that cannot be
        parsed."""
        text, emit, form = self._text, self._parts.arguments, self._form
        # Stack of open objects and lists, innermost last; the first is the call.
        frames = [_Frame(form.closed, form.keyed, "{", "}")]
        emit("{")
        first = True
        while frames:
            frame = frames[-1]
            character = yield from text.skip_space()
            text.begin_trial()
            has_comma = not first and character == ","
            if has_comma:
                text.step()
                character = yield from text.skip_space()
            if character == frame.closed:
                text.step()
                text.commit()
                emit(frame.json_closed)
                frames.pop()
                first = False
                continue
            continues = bool(character) and (first or has_comma)
            key = (yield from self._key(frame)) if continues and frame.keyed else ""
            if not continues or key is None or not (character := (yield from text.skip_space())):
                text.fail_trial(self._parts.content)
                return
            text.commit()
            emit(("" if first else ", ") + (f'"{_json_escaped(key)}": ' if frame.keyed else ""))
            inner = self._inner.get(character)
            first = inner is not None
            if inner is not None:
                text.step()
                emit(inner.json_opened)
                frames.append(inner)
            elif not (yield from self._value(character)):
                return

    def _key(self, frame: _Frame) -> Generator[None, None, str | None]:
        """Read a key and its separator; return the key, None if either is missing."""
        text = self._text
        character = yield from text.skip_space()
        if character in ('"', "'") and frame.keyed == ":":
            pieces: list[str] = []
            text.step()
            if not (yield from self._quoted(character, pieces.append)):
                return None
            key = str(json.loads(f'"{"".join(pieces)}"'))
        else:
            key = yield from text.up_to(_KEY_END, MAX_KEY_CHARS)
            if not key:
                return None
        yield from text.skip_space()
        return key if (yield from text.accept(frame.keyed)) else None

    def _value(self, character: str) -> Generator[None, None, bool]:
        """Parse a string, number or word that begins with ``character``; return False if it does not end."""
        text, emit, quote = self._text, self._parts.arguments, self._form.quote
        if quote and (yield from text.accept(quote)):
            emit('"')
            ended = bool((yield from text.until(Marks(quote), lambda piece: emit(_json_escaped(piece)))))
        elif character == '"' or (character == "'" and not quote):
            text.step()
            emit('"')
            ended = yield from self._quoted(character, emit)
        else:
            word = yield from text.up_to(_WORD_END, MAX_WORD_CHARS)
            complete = bool((yield from text.more()))
            emit(_word_to_json(word) if complete and word else word)
            return complete and bool(word)
        if ended:
            emit('"')
        return ended

    def _quoted(self, quote: str, emit: Callable[[str], object]) -> Generator[None, None, bool]:
        """Emit a Python string, after its opening quote, as it is written within a JSON string; return whether it has
        ended."""
        scan, text = _StringScan(quote), self._text
        while not scan.ended and (yield from text.more()):
            emit(scan.to_json(text.piece(scan.read)))
        emit(scan.flush())
        return scan.ended


class _StringScan:
    """Scan for the end of a Python string that arrives in pieces, and convert it to JSON."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._escaped = False
        self._held = ""
        self.ended = False

    def read(self, text: str, at: int, end: int) -> int:
        """Scan ``text[at:end]``. Return the index after the closing quote, and set ``ended``; return ``end`` if the
        string continues."""
        while at < end:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            match = _QUOTE_OR_BACKSLASH.search(text, at, end)
            if match is None:
                return end
            at = match.end()
            self._escaped = match.group() == "\\"
            if match.group() == self._quote:
                self.ended = True
                return at
        return at

    def to_json(self, piece: str) -> str:
        """Return the next piece as it is written within a JSON string; an incomplete escape at its end is held back."""
        text, self._held = self._held + (piece[:-1] if self.ended else piece), ""
        partial = None if self.ended else _PARTIAL_ESCAPE.search(text, max(0, len(text) - 12))
        # An escaped backslash begins no escape.
        if partial is not None and (partial.start() - len(text[: partial.start()].rstrip("\\"))) % 2 == 0:
            text, self._held = text[: partial.start()], text[partial.start() :]
        return _json_escaped(_ESCAPE.sub(_unescaped, text))

    def flush(self) -> str:
        """Return the text held back. Call it at the string's end."""
        return _json_escaped(_ESCAPE.sub(_unescaped, self._held))


def _unescaped(match: re.Match[str]) -> str:
    """Return the character that an escape means; an unknown escape is unchanged, as in Python."""
    high, low, *codes, other = match.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00))
    for code in filter(None, codes):
        number = int(code, 16)
        return chr(number) if number <= 0x10FFFF else match.group()
    return _SHORT_ESCAPES.get(other, other if other in "\\\"'/" else match.group())


def _json_escaped(text: str) -> str:
    """Return ``text`` as it is written within a JSON string."""
    # UTF-8 cannot encode lone surrogates.
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", json.dumps(text, ensure_ascii=False)[1:-1])


def _word_to_json(word: str) -> str:
    """Convert a Python word or number to JSON; anything else becomes a string."""
    if word in _LITERALS or _NUMBER.fullmatch(word):
        return _LITERALS.get(word, word)
    for parse in (lambda: int(word, 0), lambda: float(word)):
        try:
            number = parse()
        except (ValueError, OverflowError):
            continue
        if math.isfinite(number):
            return json.dumps(number)
    return f'"{_json_escaped(word)}"'
