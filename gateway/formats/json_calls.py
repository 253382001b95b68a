"""Parses tool calls that are JSON objects with a name and arguments, with or without marks. Sans-IO (I9).

    mark --> {"name": the_name, "arguments": {...}} --> mark             the arguments are emitted as they arrive
       '--> anything else: the mark, and what follows it, is content

Nothing of an object is sent to the client until its name and the beginning of its arguments are known. So it is parsed
in a trial (:class:`PendingText`), which ends when the text cannot be a call, or would have to be held for too long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Generator, Mapping
from types import MappingProxyType

from pillion.gateway.formats.answer_parts import AnswerParts, CallReader, Marks, PendingText

MAX_NAME_CHARS = 128
NAME = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_NAME_CHARS}}}")
NOT_NAME = re.compile(r"[^A-Za-z0-9_.:-]")
MARK_START = re.compile("<")
_ARGUMENTS = ("arguments", "parameters")
# Outside of strings: characters that change the nesting depth, and "<", which JSON lacks, so it begins a mark.
_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')
_WORD_END = re.compile(r"[,}\] \t\r\n<]")
_NOT_ID = re.compile(r"[\W_]")


class JsonScan:
    """Scan for the end of a JSON object, list or string that arrives in pieces, by brackets and quotes.

    Attributes:
        ended: whether the end was found.
        in_string: whether the text so far ends within a string.
    """

    __slots__ = ("_depth", "_escaped", "ended", "in_string")

    def __init__(self) -> None:
        self._depth = 0
        self.in_string = self._escaped = False
        self.ended = False

    def read(self, text: str, at: int, end: int) -> int:
        """Scan ``text[at:end]``. Return the index after the value, or of a mark that cuts it off, and set ``ended``;
        return ``end`` if the value continues."""
        while at < end:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            match = (_IN_STRING if self.in_string else _STRUCTURE).search(text, at, end)
            if match is None:
                return end
            at, character = match.end(), match.group()
            if character == "<":
                self.ended = True
                return at - 1
            if character == "\\":
                self._escaped = True
                continue
            if character == '"':
                self.in_string = not self.in_string
            else:
                self._depth += 1 if character in "{[" else -1
            if self._depth <= 0 and not self.in_string:
                self.ended = True
                return at
        return at


class JsonCalls(CallReader):
    """Parser of calls that are JSON objects between ``begin`` and the optional ``end``."""

    _names: tuple[str, ...] = ("name",)

    def __init__(
        self,
        text: PendingText,
        parts: AnswerParts,
        tool_names: Container[str],
        begin: str,
        end: str = "",
        others: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        # End marks by begin mark; some models write ``others`` instead of their template's.
        self._ends = {begin: end, **others}
        super().__init__(text, parts, Marks(*self._ends))
        self._tool_names = tool_names

    def _after(self, mark: str) -> Generator[None, None, bool]:
        if not (yield from self._calls()):
            return False
        yield from self._text.skip_space()
        yield from self._text.accept(self._ends[mark])
        return True

    def _calls(self, only_offered: bool = False) -> Generator[None, None, bool]:
        """Parse the calls between the marks; return False if there is none. ``only_offered``: a call must have the name
        of a tool of the request."""
        return self._call(only_offered)

    def _call(self, only_offered: bool = False, begun: bool = False) -> Generator[None, None, bool]:
        """Parse one JSON object as a call. Return False if it is none; the caller then fails the trial.

        ``only_offered``: it must have the name of a tool of the request. ``begun``: its brace was read already."""
        text, parts = self._text, self._parts
        if not begun and (yield from text.skip_space()) != "{":
            return False
        name = arguments = character = ""
        while character != "}":
            if not begun:
                text.step()
            begun = False
            key, character = yield from self._key()
            if key is None or (key in _ARGUMENTS and character != "{"):
                return False
            if key in _ARGUMENTS and name and not arguments:
                text.commit()
                parts.begin(name)
                yield from self._stream()
                yield from self._rest()
                return True
            value = yield from self._value(character)
            if key in self._names:
                name = _string(value)
                if not NAME.fullmatch(name) or (only_offered and name not in self._tool_names):
                    return False
            elif key in _ARGUMENTS:
                arguments = value
            character = yield from text.skip_space()
            if not character or character not in ",}":
                return False
        # Within text, an object with only a name is not a call.
        if not name or (only_offered and self._parts.has_content and not arguments):
            return False
        text.step()
        text.commit()
        parts.begin(name)
        parts.arguments(arguments or "{}")
        return True

    def _rest(self) -> Generator[None, None, None]:
        """Skip the members after a call's arguments, and the closing brace; without one, they are content."""
        text = self._text
        text.begin_trial()
        while (character := (yield from text.skip_space())) == ",":
            text.step()
            key, begins = yield from self._key()
            if key is None:
                break
            yield from self._value(begins)
        if character == "}":
            text.step()
            text.commit()
        else:
            text.fail_trial(self._parts.content)

    def _key(self) -> Generator[None, None, tuple[str | None, str]]:
        """Read a key of a JSON object and its colon. Return the key, None if there is none, and the next character."""
        text = self._text
        if (character := (yield from text.skip_space())) != '"':
            return None, character
        key = yield from self._value(character)
        if (character := (yield from text.skip_space())) != ":":
            return None, character
        text.step()
        character = yield from text.skip_space()
        return (_string(key) if character else None), character

    def _value(self, character: str) -> Generator[None, None, str]:
        """Read and return the JSON value that begins with ``character``; only its beginning if the text ends within."""
        text = self._text
        if character not in '{["':
            return (yield from text.up_to(_WORD_END))
        scan, read = JsonScan(), []
        while not scan.ended and (yield from text.more()):
            read.append(text.piece(scan.read))
        return "".join(read)

    def _stream(self) -> Generator[None, None, None]:
        """Read the next JSON object, and emit it as the call's arguments as it arrives."""
        scan, text = JsonScan(), self._text
        while not scan.ended and (yield from text.more()):
            self._parts.arguments(text.piece(scan.read))


class LlamaCalls(JsonCalls):
    """Parser of Llama 3: a call's object follows a mark, or is anywhere."""

    def _after(self, mark: str) -> Generator[None, None, bool]:
        # Without a mark, only a tool of the request can be called: the answer itself may be JSON.
        bare = mark == "{"
        if not (yield from self._call(only_offered=bare, begun=bare)):
            return False
        yield from self._more()
        return True

    def _more(self) -> Generator[None, None, None]:
        """Parse further calls, which Llama 3 writes after semicolons."""
        text = self._text
        while (yield from text.skip_space()) == ";":
            text.begin_trial()
            text.step()
            if not (yield from self._call(only_offered=True)):
                text.fail_trial(self._parts.content)
                return


class ListCalls(JsonCalls):
    """Parser of calls in one list of objects after a mark."""

    def _calls(self, only_offered: bool = False) -> Generator[None, None, bool]:
        text = self._text
        if (yield from text.skip_space()) != "[":
            return False
        text.step()
        if not (yield from self._call(only_offered)):
            return False
        while (character := (yield from text.skip_space())) and character in ",]":
            text.step()
            if character == "]":
                break
            text.begin_trial()
            if not (yield from self._call()):
                text.fail_trial(self._parts.content)
                break
        return True


class XlamCalls(ListCalls):
    """Parser of Salesforce's xLAM models: a list of calls follows one of several marks, or is the whole answer after
    its reasoning."""

    def read(self) -> Generator[None, None, None]:
        """Parse the whole answer."""
        self._text.begin_trial()
        if (yield from self._calls(only_offered=True)):
            yield from self._text.skip_space()
        else:
            self._parts.content(self._text.roll_back())
        yield from super().read()


class ApertusCalls(ListCalls):
    """Parser of Apertus models: each object of the list has one key, the tool's name."""

    def _call(self, only_offered: bool = False, begun: bool = False) -> Generator[None, None, bool]:
        text = self._text
        if (yield from text.skip_space()) != "{":
            return False
        text.step()
        name, character = yield from self._key()
        if name is None or not NAME.fullmatch(name) or character != "{":
            return False
        text.commit()
        self._parts.begin(name)
        yield from self._stream()
        yield from self._rest()
        return True


class CohereCalls(ListCalls):
    """Parser of Cohere's Command models: calls are numbered, with another key for the name. The list may be
    missing."""

    _names = ("tool_name", "name")

    def _calls(self, only_offered: bool = False) -> Generator[None, None, bool]:
        if (yield from self._text.skip_space()) == "{":
            return (yield from self._call())
        return (yield from super()._calls())


class MistralCalls(ListCalls):
    """Parser of Mistral's models: after the mark comes a list of objects or, since their tokenizer v11, a name, an
    optional id, and the arguments."""

    def _after(self, mark: str) -> Generator[None, None, bool]:
        if (yield from self._text.skip_space()) == "[":
            return (yield from self._calls())
        return (yield from self._named())

    def _named(self) -> Generator[None, None, bool]:
        """Parse a name, an optional id and arguments; return False if they are no call."""
        text = self._text
        name = yield from text.up_to(NOT_NAME, MAX_NAME_CHARS)
        if not name:
            return False
        if (yield from text.accept("[CALL_ID]")):
            yield from text.up_to(_NOT_ID)
        yield from text.accept("[ARGS]")
        if (yield from text.skip_space()) != "{":
            return False
        text.commit()
        self._parts.begin(name)
        yield from self._stream()
        return True


def _string(value: str) -> str:
    """Return the value of a JSON string; "" for any other JSON."""
    try:
        read = json.loads(value)
    except ValueError:
        return ""
    return read if isinstance(read, str) else ""
