"""Reads calls whose arguments are keys and values in Python's notation or Gemma's, and gives the arguments as JSON.
Sans-IO (I9).

[NAME(key=value, key="text"), NAME()]                          pythonic, llama4_pythonic (between marks, or bare)
<function_calls>NAME(key=value)\\nNAME()</function_calls>       olmo3
<|tool_call>call:NAME{key:<|"|>text<|"|>,key:1}<tool_call|>    gemma4, and functiongemma with other marks

A text is given as it comes, and so is each key. An argument that cannot be read ends the call: its arguments stay an
unfinished object, so that nobody takes them for whole, and what follows is content.
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

# A number or a word is no longer than this.
MAX_WORD_CHARS = 1024
_BEHIND_KEY = re.compile(r"[\s=:,(){}\[\]<]")
_BEHIND_WORD = re.compile(r"[\s,)}\]<]")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_IN_TEXT = re.compile(r"[\\\"']")
# An escape of Python's texts. Two halves of a surrogate pair, as JSON writes them, are one character.
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))",
    re.DOTALL,
)
# The last characters of a text may be the beginning of an escape.
_BEGUN = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?$"
)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LiteralForm:
    """Names the marks and the notation of one format.

    Attributes:
        begin, end: what stands around a call or, with ``listed`` or ``lines``, around several; "" for nothing.
        listed: whether calls are a list in brackets, which an answer may also begin with.
        lines: whether each call has a line of its own.
        head: what stands before a name.
        opened, closed: what stands around the arguments.
        keyed: what stands behind a key.
        comma: what stands between two arguments.
        quote: the mark around a text; "" where texts have Python's quotation marks, and keys within values are texts.
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


# The formats have the names that vLLM gives them.
LITERAL_FORMS: dict[str, LiteralForm] = {
    "pythonic": LiteralForm("", "", listed=True),
    "llama4_pythonic": LiteralForm("<|python_start|>", "<|python_end|>", listed=True),
    "lfm2": LiteralForm("<|tool_call_start|>", "<|tool_call_end|>", listed=True),
    "olmo3": LiteralForm("<function_calls>", "</function_calls>", lines=True),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
}


class _Frame(NamedTuple):
    """Says how an object or a list is written: its last character, whether it has keys, and both in JSON."""

    closed: str
    keyed: str
    json_opened: str
    json_closed: str


_LIST, _TUPLE = _Frame("]", "", "[", "]"), _Frame(")", "", "[", "]")


class LiteralCalls(CallReader):
    """Reads an answer whose calls have the notation of ``form``."""

    def __init__(self, text: PendingText, parts: AnswerParts, known: Container[str], form: LiteralForm) -> None:
        super().__init__(text, parts, Marks(*filter(None, (form.begin,))))
        self._known = known
        self._form = form
        self._inner = {"[": _LIST, "{": _Frame("}", ":", "{", "}")}
        if not form.quote:
            self._inner["("] = _TUPLE

    def read(self) -> Generator[None, None, None]:
        """Reads the whole answer."""
        if self._form.listed:
            # Without a mark a list is one of calls only if it begins with a tool's name.
            self._text.attempt()
            if not (yield from self._calls(only_known=True)):
                self._parts.content(self._text.leave())
        yield from super().read()

    def _after(self, mark: str) -> Generator[None, None, bool]:
        return self._calls()

    def _calls(self, only_known: bool = False) -> Generator[None, None, bool]:
        """Reads the calls after a mark, and the mark behind them. Returns False where no call comes, and leaves it to
        the caller to end the trial read."""
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
            text.attempt()
            if form.listed and character in ("]", ","):
                text.step()
                if character == "]":
                    text.take()
                    break
                yield from text.past_space()
            if (form.listed and character != ",") or not (yield from self._call()):
                text.give_up(self._parts.content)
                break
        # White space after calls is no content.
        yield from text.past_space()
        yield from text.has(form.end)
        return True

    def _call(self, only_known: bool = False) -> Generator[None, None, bool]:
        """Reads one call and adds it to the answer's calls. Returns False where it is none, and leaves it to the caller
        to end the trial read."""
        text, form = self._text, self._form
        if not (yield from text.has(form.head)):
            return False
        name = yield from text.up_to(NOT_NAME, MAX_NAME_CHARS)
        if not NAME.fullmatch(name) or (only_known and name not in self._known):
            return False
        if not (yield from text.has(form.opened)):
            return False
        text.take()
        self._parts.begin(name)
        yield from self._arguments()
        return True

    def _arguments(self) -> Generator[None, None, None]:
        """Reads a call's arguments, from behind their first bracket on, as far as they can be read."""
        text, give, form = self._text, self._parts.arguments, self._form
        # These are the call, and the objects and lists that are open, the innermost one last.
        frames = [_Frame(form.closed, form.keyed, "{", "}")]
        give("{")
        first = True
        while frames:
            frame = frames[-1]
            character = yield from text.past_space()
            text.attempt()
            apart = not first and character == ","
            if apart:
                text.step()
                character = yield from text.past_space()
            if character == frame.closed:
                text.step()
                text.take()
                give(frame.json_closed)
                frames.pop()
                first = False
                continue
            goes_on = bool(character) and (first or apart)
            key = (yield from self._key(frame)) if goes_on and frame.keyed else ""
            if not goes_on or key is None or not (character := (yield from text.past_space())):
                text.give_up(self._parts.content)
                return
            text.take()
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
        """Reads a key and what stands behind it; returns None where no key comes."""
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
        """Reads a text, a number or a word, which begins with ``character``; returns False where it does not end."""
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
        """Reads a text of Python's from behind its first quotation mark on, gives it as a text of JSON, and returns
        whether it has ended."""
        scan, text = _TextScan(quote), self._text
        while not scan.ended and (yield from text.some()):
            give(scan.spelled(text.piece(scan.read)))
        give(scan.rest())
        return scan.ended


class _TextScan:
    """Finds the end of a text of Python's that comes in pieces, and spells it as JSON."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._escaped = False
        self._held = ""
        self.ended = False

    def read(self, text: str, at: int, most: int) -> int:
        """Returns where the text ends in ``text[at:most]``, behind its quotation mark; it is ``ended`` then. Returns
        ``most`` where it goes on."""
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
        """Returns the next piece as a part of a text of JSON; half an escape is held."""
        text, self._held = self._held + (piece[:-1] if self.ended else piece), ""
        # An escape has ten characters at most, and a pair of them twelve.
        begun = None if self.ended else _BEGUN.search(text, max(0, len(text) - 12))
        # A backslash behind another one begins nothing.
        if begun is not None and (begun.start() - len(text[: begun.start()].rstrip("\\"))) % 2 == 0:
            text, self._held = text[: begun.start()], text[begun.start() :]
        return _in_text(_ESCAPE.sub(_meant, text))

    def rest(self) -> str:
        """Returns what was held back as the possible beginning of an escape, once no more of the text comes."""
        return _in_text(_ESCAPE.sub(_meant, self._held))


def _meant(found: re.Match[str]) -> str:
    """Returns the character that an escape means; unknown ones stand for themselves, as Python has it."""
    high, low, *codes, other = found.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00))
    for code in filter(None, codes):
        number = int(code, 16)
        return chr(number) if number <= 0x10FFFF else found.group()
    return _SHORT.get(other, other if other in "\\\"'/" else found.group())


def _in_text(text: str) -> str:
    """Writes characters as they stand within a text of JSON."""
    # Half a surrogate pair is no character that can be sent as it is.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(text, ensure_ascii=False)[1:-1])


def _word(word: str) -> str:
    """Writes a word or a number of Python's as JSON; anything else is a text."""
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
