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
_ARGUMENTS = ("arguments", "parameters")
# Outside of strings, characters that change the nesting depth. JSON has no "<", so it is a mark.
_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')
_BEHIND_WORD = re.compile(r"[,}\] \t\r\n<]")
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

    def read(self, text: str, at: int, most: int) -> int:
        """Return the end of the value in ``text[at:most]``, also at a mark, and set ``ended``; ``most`` if it goes
        on."""
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
    """Parser of calls that are JSON objects between ``begin`` and the optional ``end``."""

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
        # End mark by begin mark; some models write other marks than their templates.
        self._ends = {begin: end, **others}
        super().__init__(text, parts, Marks(*self._ends))
        self._known = known

    def _after(self, mark: str) -> Generator[None, None, bool]:
        if not (yield from self._calls()):
            return False
        yield from self._text.past_space()
        yield from self._text.has(self._ends[mark])
        return True

    def _calls(self, only_known: bool = False) -> Generator[None, None, bool]:
        """Parse the calls between the marks."""
        return self._call(only_known)

    def _call(self, only_known: bool = False, begun: bool = False) -> Generator[None, None, bool]:
        """Parse one JSON object, of which the brace may be read (``begun``), and add it to the answer's calls. If it is
        not a call, return False; the caller then ends the trial."""
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
                text.commit()
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
        # Within text, an object with only a name is not a call.
        if not name or (only_known and self._parts.said and not arguments):
            return False
        text.step()
        text.commit()
        parts.begin(name)
        parts.arguments(arguments or "{}")
        return True

    def _rest(self) -> Generator[None, None, None]:
        """Skip what follows the arguments in a call's object; it is content if the object does not end."""
        text = self._text
        text.begin_trial()
        while (character := (yield from text.past_space())) == ",":
            text.step()
            key, begins = yield from self._key()
            if key is None:
                break
            yield from self._value(begins)
        if character == "}":
            text.step()
            text.commit()
        else:
            text.give_up(self._parts.content)

    def _key(self) -> Generator[None, None, tuple[str | None, str]]:
        """Read a key of a JSON object; return it, or None if there is no further one, and the first character of its
        value."""
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
        """Read the value that begins with ``character``, as far as it arrives."""
        text = self._text
        if character not in '{["':
            return (yield from text.up_to(_BEHIND_WORD))
        scan, read = JsonScan(), []
        while not scan.ended and (yield from text.some()):
            read.append(text.piece(scan.read))
        return "".join(read)

    def _stream(self) -> Generator[None, None, None]:
        """Read the next object, and emit its pieces as a call's arguments as they arrive."""
        scan, text = JsonScan(), self._text
        while not scan.ended and (yield from text.some()):
            self._parts.arguments(text.piece(scan.read))


class LlamaCalls(JsonCalls):
    """Parser of Llama 3: a call's object follows a mark, or is anywhere."""

    def _after(self, mark: str) -> Generator[None, None, bool]:
        # Without a mark it must have a known tool's name, as the answer itself may be JSON.
        bare = mark == "{"
        if not (yield from self._call(only_known=bare, begun=bare)):
            return False
        yield from self._more()
        return True

    def _more(self) -> Generator[None, None, None]:
        """Parse further calls, which Llama 3 writes after semicolons."""
        text = self._text
        while (yield from text.past_space()) == ";":
            text.begin_trial()
            text.step()
            if not (yield from self._call(only_known=True)):
                text.give_up(self._parts.content)
                return


class ListCalls(JsonCalls):
    """Parser of calls in one list of objects after a mark."""

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
            text.begin_trial()
            if not (yield from self._call()):
                text.give_up(self._parts.content)
                break
        return True


class XlamCalls(ListCalls):
    """Parser of Salesforce's xLAM models: a list of calls follows one of several marks, or is the whole answer, maybe
    after its reasoning."""

    def read(self) -> Generator[None, None, None]:
        """Parse the whole answer."""
        self._text.begin_trial()
        if (yield from self._calls(only_known=True)):
            yield from self._text.past_space()
        else:
            self._parts.content(self._text.roll_back())
        yield from super().read()


class ApertusCalls(ListCalls):
    """Parser of Apertus models: each object of the list has one key, the tool's name."""

    def _call(self, only_known: bool = False, begun: bool = False) -> Generator[None, None, bool]:
        text = self._text
        if (yield from text.past_space()) != "{":
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

    def _calls(self, only_known: bool = False) -> Generator[None, None, bool]:
        if (yield from self._text.past_space()) == "{":
            return (yield from self._call())
        return (yield from super()._calls())


class MistralCalls(ListCalls):
    """Parser of Mistral's models: after the mark comes a list of objects or, since their tokenizer v11, a name, an
    optional id, and the arguments."""

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
