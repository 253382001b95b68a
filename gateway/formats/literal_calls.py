"""Parses calls with keyword arguments in Python's notation or Gemma's, and converts the arguments to JSON. Sans-IO
(I9).

[NAME(key=value, key="text"), NAME()]                          pythonic, llama4_pythonic (between marks, or bare)
<function_calls>NAME(key=value)\\nNAME()</function_calls>       olmo3
<|tool_call>call:NAME{key:<|"|>text<|"|>,key:1}<tool_call|>    gemma4, and functiongemma with other marks

Strings are emitted as they arrive, and so are keys. An argument that cannot be parsed ends the call: its arguments stay
an incomplete object, so that no client takes them for complete, and what follows is content.
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
_BEHIND_KEY = re.compile(r"[\s=:,(){}\[\]<]")
_BEHIND_WORD = re.compile(r"[\s,)}\]<]")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_IN_TEXT = re.compile(r"[\\\"']")
# An escape in Python strings; a surrogate pair, as in JSON, is one character.
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))",
    re.DOTALL,
)
# A possible beginning of an escape at the end of a text.
_BEGUN = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?$"
)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
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
        keyed: text after a key.
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
    """Notation of an object or list: its last character, whether it has keys, and both in JSON."""

    closed: str
    keyed: str
    json_opened: str
    json_closed: str


_LIST, _TUPLE = _Frame("]", "", "[", "]"), _Frame(")", "", "[", "]")


class LiteralCalls(CallReader):
    """Parser of calls in the notation of ``form``."""

    def __init__(self, text: PendingText, parts: AnswerParts, known: Container[str], form: LiteralForm) -> None:
        super().__init__(text, parts, Marks(*filter(None, (form.begin,))))
        self._known = known
        self._form = form
        self._inner = {"[": _LIST, "{": _Frame("}", ":", "{", "}")}
        if not form.quote:
            self._inner["("] = _TUPLE

    def read(self) -> Generator[None, None, None]:
        """Parse the whole answer."""
        if self._form.listed:
            # Without a mark it must begin with a known tool's name.
            self._text.begin_trial()
            if not (yield from self._calls(only_known=True)):
                self._parts.content(self._text.roll_back())
        yield from super().read()

    def _after(self, mark: str) -> Generator[None, None, bool]:
        return self._calls()

    def _calls(self, only_known: bool = False) -> Generator[None, None, bool]:
        """Parse the calls after a mark, and the mark after them. If there is no call, return False; the caller then
        ends the trial."""
        text, form = self._text, self._form
        character = yield from text.past_space()
        if form.listed:
            if character != "[":
                return False
            text.step()
            yield from text.past_space()
        if not (yield from self._call(only_known)):
            return False
        while form.listed or form.lines:
            character = yield from text.past_space()
            text.begin_trial()
            if form.listed and character in ("]", ","):
                text.step()
                if character == "]":
                    text.commit()
                    break
                yield from text.past_space()
            if (form.listed and character != ",") or not (yield from self._call()):
                text.give_up(self._parts.content)
                break
        yield from text.past_space()
        yield from text.has(form.end)
        return True

    def _call(self, only_known: bool = False) -> Generator[None, None, bool]:
        """Parse one call and add it to the answer's calls. If it is not one, return False; the caller then ends the
        trial."""
        text, form = self._text, self._form
        if not (yield from text.has(form.head)):
            return False
        name = yield from text.up_to(NOT_NAME, MAX_NAME_CHARS)
        if not NAME.fullmatch(name) or (only_known and name not in self._known):
            return False
        if not (yield from text.has(form.opened)):
            return False
        text.commit()
        self._parts.begin(name)
        yield from self._arguments()
        return True

    def _arguments(self) -> Generator[None, None, None]:
        """Parse a call's arguments, after the opening bracket, as far as possible."""
        text, give, form = self._text, self._parts.arguments, self._form
        # Stack of open objects and lists, innermost last; the first is the call.
        frames = [_Frame(form.closed, form.keyed, "{", "}")]
        give("{")
        first = True
        while frames:
            frame = frames[-1]
            character = yield from text.past_space()
            text.begin_trial()
            apart = not first and character == ","
            if apart:
                text.step()
                character = yield from text.past_space()
            if character == frame.closed:
                text.step()
                text.commit()
                give(frame.json_closed)
                frames.pop()
                first = False
                continue
            goes_on = bool(character) and (first or apart)
            key = (yield from self._key(frame)) if goes_on and frame.keyed else ""
            if not goes_on or key is None or not (character := (yield from text.past_space())):
                text.give_up(self._parts.content)
                return
            text.commit()
            give(("" if first else ", ") + (f'"{_in_text(key)}": ' if frame.keyed else ""))
            inner = self._inner.get(character)
            first = inner is not None
            if inner is not None:
                text.step()
                give(inner.json_opened)
                frames.append(inner)
            elif not (yield from self._value(character)):
                return

    def _key(self, frame: _Frame) -> Generator[None, None, str | None]:
        """Read a key and the text after it; return None if there is no key."""
        text = self._text
        character = yield from text.past_space()
        if character in ('"', "'") and frame.keyed == ":":
            read: list[str] = []
            text.step()
            if not (yield from self._quoted(character, read.append)):
                return None
            key = str(json.loads(f'"{"".join(read)}"'))
        else:
            key = yield from text.up_to(_BEHIND_KEY, MAX_KEY_CHARS)
            if not key:
                return None
        yield from text.past_space()
        return key if (yield from text.has(frame.keyed)) else None

    def _value(self, character: str) -> Generator[None, None, bool]:
        """Parse a string, number or word that begins with ``character``; return False if it does not end."""
        text, give, quote = self._text, self._parts.arguments, self._form.quote
        if quote and (yield from text.has(quote)):
            give('"')
            ended = bool((yield from text.until(Marks(quote), lambda piece: give(_in_text(piece)))))
        elif character == '"' or (character == "'" and not quote):
            text.step()
            give('"')
            ended = yield from self._quoted(character, give)
        else:
            word = yield from text.up_to(_BEHIND_WORD, MAX_WORD_CHARS)
            whole = bool((yield from text.some()))
            give(_word(word) if whole and word else word)
            return whole and bool(word)
        if ended:
            give('"')
        return ended

    def _quoted(self, quote: str, give: Callable[[str], object]) -> Generator[None, None, bool]:
        """Convert a Python string, after its opening quote, to JSON, and return whether it has ended."""
        scan, text = _TextScan(quote), self._text
        while not scan.ended and (yield from text.some()):
            give(scan.spelled(text.piece(scan.read)))
        give(scan.rest())
        return scan.ended


class _TextScan:
    """Scan for the end of a Python string that arrives in pieces, and convert it to JSON."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._escaped = False
        self._held = ""
        self.ended = False

    def read(self, text: str, at: int, most: int) -> int:
        """Return the end of the string in ``text[at:most]``, after its quote, and set ``ended``; ``most`` if it goes
        on."""
        while at < most:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = _IN_TEXT.search(text, at, most)
            if found is None:
                return most
            at = found.end()
            self._escaped = found.group() == "\\"
            if found.group() == self._quote:
                self.ended = True
                return at
        return at

    def spelled(self, piece: str) -> str:
        """Return the next piece as part of a JSON string; a partial escape is held back."""
        text, self._held = self._held + (piece[:-1] if self.ended else piece), ""
        begun = None if self.ended else _BEGUN.search(text, max(0, len(text) - 12))
        # A backslash after another one begins nothing.
        if begun is not None and (begun.start() - len(text[: begun.start()].rstrip("\\"))) % 2 == 0:
            text, self._held = text[: begun.start()], text[begun.start() :]
        return _in_text(_ESCAPE.sub(_meant, text))

    def rest(self) -> str:
        """Return the held-back text, which is no escape after all."""
        return _in_text(_ESCAPE.sub(_meant, self._held))


def _meant(found: re.Match[str]) -> str:
    """Return the character of an escape; unknown ones stay as they are, as in Python."""
    high, low, *codes, other = found.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00))
    for code in filter(None, codes):
        number = int(code, 16)
        return chr(number) if number <= 0x10FFFF else found.group()
    return _SHORT.get(other, other if other in "\\\"'/" else found.group())


def _in_text(text: str) -> str:
    """Escape characters for a JSON string."""
    # A lone surrogate cannot be encoded.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(text, ensure_ascii=False)[1:-1])


def _word(word: str) -> str:
    """Convert a Python word or number to JSON; anything else becomes a string."""
    if word in _WORDS or _NUMBER.fullmatch(word):
        return _WORDS.get(word, word)
    for read in (lambda: int(word, 0), lambda: float(word)):
        try:
            number = read()
        except (ValueError, OverflowError):
            continue
        if math.isfinite(number):
            return json.dumps(number)
    return f'"{_in_text(word)}"'
