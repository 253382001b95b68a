"""Calls that are JSON objects with a name and arguments, between marks or without any. Sans-IO (I9).

    mark --> {"name": the_name, "arguments": {...}} --> mark             the arguments are given as they come
       '--> anything else: the mark, and what follows it, is content

What stands in an object is read without being given until its name and the beginning of its arguments are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from pillion.gateway.formats.answer_parts import AnswerParts, PendingText, held_back

MAX_NAME_CHARS = 128
NAME = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_NAME_CHARS}}}")
_ARGUMENTS = ("arguments", "parameters")
# What changes how deep a value is, outside of its strings; "<" is none of JSON's, so it is a mark there.
_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')


class JsonScan:
    """Finds the end of a JSON object or list that comes in pieces, by its brackets and strings."""

    __slots__ = ("_depth", "_escaped", "_in_string", "ended")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.ended = False

    def read(self, text: str) -> int:
        """How many characters of ``text`` belong to the value; ``ended`` where it ends, or breaks off at a mark."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at)
            if found is None:
                return len(text)
            at, character = found.end(), found.group()
            if character == "<":
                self.ended = True
                return at - 1
            if character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    self.ended = True
                    return at
        return at


class JsonCalls:
    """Reads a text with calls between ``begin`` and ``end``. ``end`` may be left out."""

    def __init__(self, text: PendingText, parts: AnswerParts, known: frozenset[str], begin: str, end: str = "") -> None:
        self._text = text
        self._parts = parts
        self._known = known
        self._begin = begin
        self._end = end

    def read(self) -> Generator[None, None, None]:
        """Reads the whole text."""
        while (yield from self._content()):
            if not (yield from self._after_mark()):
                # The mark has been taken from the text.
                self._parts.content(self._begin)

    def _content(self) -> Generator[None, None, bool]:
        """Gives content up to the next mark, which it takes; false where the text ends."""
        text, begin = self._text, self._begin
        while True:
            before, mark, behind = text.rest.partition(begin)
            if mark:
                self._parts.content(before)
                text.rest = behind
                return True
            certain = len(text.rest) - (0 if text.ended else held_back(text.rest, (begin,)))
            self._parts.content(text.rest[:certain])
            text.skip(certain)
            if text.ended:
                return False
            yield

    def _after_mark(self) -> Generator[None, None, bool]:
        """Reads what follows a mark; false where that is no call, and nothing has been taken."""
        if not (yield from self._call()):
            return False
        yield from self._skip_end()
        return True

    def _skip_end(self) -> Generator[None, None, None]:
        """Takes the end's mark, if it is there."""
        at = yield from self._text.past_space(0)
        if self._end and at >= 0 and (yield from self._text.has(self._end, at)):
            self._text.skip(at + len(self._end))

    def _call(self, only_known: bool = False) -> Generator[None, None, bool]:
        """Reads one object, and gives it as a call; false where it is none, and nothing has been taken."""
        text, parts = self._text, self._parts
        at = yield from text.past_space(0)
        if at < 0 or text.rest[at] != "{":
            return False
        name, arguments, streamed = "", "", False
        while True:
            key, at = yield from self._key(at + 1)
            if at < 0:
                break
            if key == "name":
                value, at = yield from self._value(at)
                name = _string(value)
                if not NAME.fullmatch(name) or (only_known and name not in self._known):
                    name = ""
                    break
            elif key in _ARGUMENTS and text.rest[at] != "{":
                break
            elif key in _ARGUMENTS and name and not arguments:
                parts.begin(name)
                text.skip(at)
                yield from self._stream()
                streamed, at = True, 0
            elif key in _ARGUMENTS:
                arguments, at = yield from self._value(at)
            else:
                _, at = yield from self._value(at)
            at = -1 if at < 0 else (yield from text.past_space(at))
            if at < 0 or text.rest[at] != ",":
                break
        if not streamed and (at < 0 or not name or text.rest[at] != "}"):
            return False
        if not streamed:
            parts.begin(name)
            parts.arguments(arguments or "{}")
        if at >= 0 and text.rest[at : at + 1] == "}":
            text.skip(at + 1)
        return True

    def _key(self, at: int) -> Generator[None, None, tuple[str, int]]:
        """A key of an object and the place of its value; -1 where there is none."""
        text = self._text
        at = yield from text.past_space(at)
        if at < 0 or text.rest[at] != '"':
            return "", -1
        key, at = yield from self._value(at)
        at = -1 if at < 0 else (yield from text.past_space(at))
        if at < 0 or text.rest[at] != ":":
            return "", -1
        return _string(key), (yield from text.past_space(at + 1))

    def _value(self, at: int) -> Generator[None, None, tuple[str, int]]:
        """The JSON text of the value at ``at`` and the place behind it; -1 where it does not end."""
        text, end = self._text, at
        if text.rest[at] in "{[":
            scan = JsonScan()
            while True:
                end += scan.read(text.rest[end:])
                if scan.ended:
                    return text.rest[at:end], end
                if not (yield from text.reaches(end)):
                    return "", -1
        if text.rest[at] == '"':
            end += 1
            while (yield from text.reaches(end)):
                if text.rest[end] == '"':
                    return text.rest[at : end + 1], end + 1
                end += 2 if text.rest[end] == "\\" else 1
            return "", -1
        while (yield from text.reaches(end)):
            if text.rest[end] in ",}] \t\r\n<":
                return text.rest[at:end], end
            end += 1
        return "", -1

    def _stream(self) -> Generator[None, None, None]:
        """Gives the object that the text begins with as arguments, as it comes, and takes it."""
        scan, text = JsonScan(), self._text
        while True:
            count = scan.read(text.rest)
            self._parts.arguments(text.rest[:count])
            text.skip(count)
            if scan.ended or not (yield from text.reaches(0)):
                return


class LlamaCalls(JsonCalls):
    """Reads an answer of Llama 3: one that begins with a call's object, perhaps behind a mark, or is all content."""

    def read(self) -> Generator[None, None, None]:
        """Reads the whole text."""
        # Without a mark, an object is only a call if it names a tool: an answer may be JSON for itself.
        at = yield from self._text.past_space(0)
        if at >= 0 and self._text.rest[at] == "{" and (yield from self._call(only_known=True)):
            yield from self._more()
        yield from super().read()

    def _after_mark(self) -> Generator[None, None, bool]:
        if not (yield from self._call()):
            return False
        yield from self._more()
        return True

    def _more(self) -> Generator[None, None, None]:
        """Reads further calls, which stand behind semicolons."""
        while (at := (yield from self._text.past_space(0))) >= 0 and self._text.rest[at] == ";":
            kept = self._text.rest
            self._text.skip(at + 1)
            if not (yield from self._call(only_known=True)):
                # What has come meanwhile stands behind what was kept.
                self._text.rest = kept[: at + 1] + self._text.rest
                return


class MistralCalls(JsonCalls):
    """Reads an answer of Mistral: behind the mark is a list of objects or, since its tokenizer v11, a name, perhaps an
    id, and the arguments."""

    def _after_mark(self) -> Generator[None, None, bool]:
        text = self._text
        at = yield from text.past_space(0)
        if at < 0:
            return False
        if text.rest[at] == "[":
            return (yield from self._list(at))
        return (yield from self._named(at))

    def _list(self, at: int) -> Generator[None, None, bool]:
        text, called = self._text, self._parts.calls
        kept = text.rest[: at + 1]
        text.skip(at + 1)
        while (yield from self._call()):
            at = yield from text.past_space(0)
            if at < 0 or text.rest[at] not in ",]":
                return True
            ended = text.rest[at] == "]"
            text.skip(at + 1)
            if ended:
                return True
        if self._parts.calls == called:
            text.rest = kept + text.rest
            return False
        return True

    def _named(self, at: int) -> Generator[None, None, bool]:
        text, end = self._text, at
        while (yield from text.reaches(end)) and end - at < MAX_NAME_CHARS and NAME.fullmatch(text.rest[end]):
            end += 1
        name = text.rest[at:end]
        if not name:
            return False
        if (yield from text.has("[CALL_ID]", end)):
            end += len("[CALL_ID]")
            while (yield from text.reaches(end)) and text.rest[end].isalnum():
                end += 1
        if (yield from text.has("[ARGS]", end)):
            end += len("[ARGS]")
        end = yield from text.past_space(end)
        if end < 0 or text.rest[end] != "{":
            return False
        self._parts.begin(name)
        text.skip(end)
        yield from self._stream()
        return True


def _string(value: str) -> str:
    """The text of a JSON string; "" for anything else."""
    try:
        read = json.loads(value)
    except ValueError:
        return ""
    return read if isinstance(read, str) else ""
