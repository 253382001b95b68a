"""Reads a model's calls of tools that are written as JSON objects with a name and arguments, with or without marks
around them. Sans-IO (I9).

    mark --> {"name": the_name, "arguments": {...}} --> mark             the arguments are given as they come
       '--> anything else: the mark, and what follows it, is content

Nothing of an object is passed on to the client until its name and the beginning of its arguments are known. So the
reader makes a trial read (:class:`PendingText`), which ends where the text cannot be a call any more, or would have to
be held back for too long.
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
_ARGUMENTS = ("arguments", "parameters")
# Outside of strings, these characters change how deep a JSON value is nested. JSON has no "<", so it is a mark there.
_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')
# A JSON number or word (true, false, null) ends before one of these characters.
_BEHIND_WORD = re.compile(r"[,}\] \t\r\n<]")
_NOT_ID = re.compile(r"[\W_]")


class JsonScan:
    """Finds the end of a JSON object, list or string that comes in pieces, by its brackets and quotation marks.

    Attributes:
        ended: whether the end was found.
        in_string: whether the text that was read ends within a string.
    """

    __slots__ = ("_depth", "_escaped", "ended", "in_string")

    def __init__(self) -> None:
        self._depth = 0
        self.in_string = self._escaped = False
        self.ended = False

    def read(self, text: str, at: int, most: int) -> int:
        """Returns where the value ends in ``text[at:most]``, or breaks off at a mark; it is ``ended`` then. Returns
        ``most`` where it goes on."""
        while at < most:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self.in_string else _STRUCTURE).search(text, at, most)
            if found is None:
                return most
            at, character = found.end(), found.group()
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
    """Reads an answer whose calls are JSON objects between ``begin`` and ``end``. ``end`` may be left out."""

    # An object has a tool's name by one of these keys.
    _names: tuple[str, ...] = ("name",)

    def __init__(
        self,
        text: PendingText,
        parts: AnswerParts,
        known: Container[str],
        begin: str,
        end: str = "",
        others: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        # The end's mark by that of the begin; some models have written others than their templates have.
        self._ends = {begin: end, **others}
        super().__init__(text, parts, Marks(*self._ends))
        self._known = known

    def _after(self, mark: str) -> Generator[None, None, bool]:
        if not (yield from self._calls()):
            return False
        # White space after a call is no content.
        yield from self._text.past_space()
        yield from self._text.has(self._ends[mark])
        return True

    def _calls(self, only_known: bool = False) -> Generator[None, None, bool]:
        """Reads the calls between a mark that begins them and one that ends them."""
        return self._call(only_known)

    def _call(self, only_known: bool = False, begun: bool = False) -> Generator[None, None, bool]:
        """Reads one JSON object, of which the brace may be read already (``begun``), and adds it to the answer's calls.
        Returns False where it is no call, and leaves it to the caller to end the trial read."""
        text, parts = self._text, self._parts
        if not begun and (yield from text.past_space()) != "{":
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
                text.take()
                parts.begin(name)
                yield from self._stream()
                yield from self._rest()
                return True
            value = yield from self._value(character)
            if key in self._names:
                name = _string(value)
                if not NAME.fullmatch(name) or (only_known and name not in self._known):
                    return False
            elif key in _ARGUMENTS:
                arguments = value
            character = yield from text.past_space()
            if not character or character not in ",}":
                return False
        # Amid text, an object with a name alone is no call.
        if not name or (only_known and self._parts.said and not arguments):
            return False
        text.step()
        text.take()
        parts.begin(name)
        parts.arguments(arguments or "{}")
        return True

    def _rest(self) -> Generator[None, None, None]:
        """Reads what a call's object holds after the arguments, which is no part of the call; it is content where the
        object does not end."""
        text = self._text
        text.attempt()
        while (character := (yield from text.past_space())) == ",":
            text.step()
            key, begins = yield from self._key()
            if key is None:
                break
            yield from self._value(begins)
        if character == "}":
            text.step()
            text.take()
        else:
            text.give_up(self._parts.content)

    def _key(self) -> Generator[None, None, tuple[str | None, str]]:
        """Reads a key of a JSON object; returns the key, or None where the object has no further key, and the first
        character of the key's value."""
        text = self._text
        if (character := (yield from text.past_space())) != '"':
            return None, character
        key = yield from self._value(character)
        if (character := (yield from text.past_space())) != ":":
            return None, character
        text.step()
        character = yield from text.past_space()
        return (_string(key) if character else None), character

    def _value(self, character: str) -> Generator[None, None, str]:
        """Returns the JSON text of the value that begins with ``character``, as much of it as has come."""
        text = self._text
        if character not in '{["':
            return (yield from text.up_to(_BEHIND_WORD))
        scan, read = JsonScan(), []
        while not scan.ended and (yield from text.some()):
            read.append(text.piece(scan.read))
        return "".join(read)

    def _stream(self) -> Generator[None, None, None]:
        """Reads the next object, and gives each piece of it, as it comes, as arguments of a call."""
        scan, text = JsonScan(), self._text
        while not scan.ended and (yield from text.some()):
            self._parts.arguments(text.piece(scan.read))


class LlamaCalls(JsonCalls):
    """Reads an answer of Llama 3: a call's object stands after a mark, or anywhere."""

    def _after(self, mark: str) -> Generator[None, None, bool]:
        # Without a mark an object is a call only if it names a tool, because the answer itself may be JSON.
        bare = mark == "{"
        if not (yield from self._call(only_known=bare, begun=bare)):
            return False
        yield from self._more()
        return True

    def _more(self) -> Generator[None, None, None]:
        """Reads further calls, which Llama 3 writes after semicolons."""
        text = self._text
        while (yield from text.past_space()) == ";":
            text.attempt()
            text.step()
            if not (yield from self._call(only_known=True)):
                text.give_up(self._parts.content)
                return


class ListCalls(JsonCalls):
    """Reads an answer whose calls are one list of objects after a mark."""

    def _calls(self, only_known: bool = False) -> Generator[None, None, bool]:
        text = self._text
        if (yield from text.past_space()) != "[":
            return False
        text.step()
        if not (yield from self._call(only_known)):
            return False
        while (character := (yield from text.past_space())) and character in ",]":
            text.step()
            if character == "]":
                break
            text.attempt()
            if not (yield from self._call()):
                text.give_up(self._parts.content)
                break
        return True


class XlamCalls(ListCalls):
    """Reads an answer of Salesforce's xLAM models: a list of calls stands after one of several marks, or is the whole
    answer, perhaps behind its reasoning."""

    def read(self) -> Generator[None, None, None]:
        """Reads the whole answer."""
        # Without a mark a list is one of calls only if it names a tool, because the answer itself may be JSON.
        self._text.attempt()
        if (yield from self._calls(only_known=True)):
            yield from self._text.past_space()
        else:
            self._parts.content(self._text.leave())
        yield from super().read()


class ApertusCalls(ListCalls):
    """Reads an answer of an Apertus model: each object of its list has one key, the tool's name."""

    def _call(self, only_known: bool = False, begun: bool = False) -> Generator[None, None, bool]:
        text = self._text
        if (yield from text.past_space()) != "{":
            return False
        text.step()
        name, character = yield from self._key()
        if name is None or not NAME.fullmatch(name) or character != "{":
            return False
        text.take()
        self._parts.begin(name)
        yield from self._stream()
        yield from self._rest()
        return True


class CohereCalls(ListCalls):
    """Reads an answer of Cohere's Command models: the calls of its list have a number of their own, and another key for
    the name. They may come without the list."""

    _names = ("tool_name", "name")

    def _calls(self, only_known: bool = False) -> Generator[None, None, bool]:
        if (yield from self._text.past_space()) == "{":
            return (yield from self._call())
        return (yield from super()._calls())


class MistralCalls(ListCalls):
    """Reads an answer of a model of Mistral's: after the mark comes a list of objects or, since its tokenizer v11, a
    name, perhaps an id, and the arguments."""

    def _after(self, mark: str) -> Generator[None, None, bool]:
        if (yield from self._text.past_space()) == "[":
            return (yield from self._calls())
        return (yield from self._named())

    def _named(self) -> Generator[None, None, bool]:
        text = self._text
        name = yield from text.up_to(NOT_NAME, MAX_NAME_CHARS)
        if not name:
            return False
        if (yield from text.has("[CALL_ID]")):
            yield from text.up_to(_NOT_ID)
        yield from text.has("[ARGS]")
        if (yield from text.past_space()) != "{":
            return False
        text.take()
        self._parts.begin(name)
        yield from self._stream()
        return True


def _string(value: str) -> str:
    """Returns the text of a JSON string; "" for any other value."""
    try:
        read = json.loads(value)
    except ValueError:
        return ""
    return read if isinstance(read, str) else ""
