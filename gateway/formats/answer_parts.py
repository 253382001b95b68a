"""The parts of an answer that became certain, and the text that waits to be read. Sans-IO (I9)."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import dataclass, field

from pillion.types import ToolCallDelta

_SPACE = " \t\r\n"


def call_id(request_id: str, answer: int, number: int, short: bool = False) -> str:
    """The id of call ``number`` of an answer: always the same one, so that a resumed stream says it again.

    ``short`` ids have nine letters and digits, which is all that Mistral's templates take.
    """
    digest = hashlib.sha256(f"{request_id}/{answer}/{number}".encode()).hexdigest()
    return digest[:9] if short else f"call_{digest[:24]}"


@dataclass(slots=True)
class AnswerParts:
    """What became certain and was not taken yet. White space next to calls and marks is no content.

    Attributes:
        request_id, answer: what the ids of calls are made of.
        short_ids: whether these ids have nine characters.
        calls: calls that have begun.
        thought: whether there was reasoning, or a mark of it.
    """

    request_id: str = ""
    answer: int = 0
    short_ids: bool = False
    calls: int = 0
    thought: bool = False
    _texts: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _deltas: list[ToolCallDelta] = field(default_factory=list)
    # White space that is content if more content follows it, and whether white space that comes next is none.
    _held: str = ""
    _bare: bool = False

    def content(self, text: str) -> None:
        """Adds text of the answer itself."""
        self._add(self._texts, text)

    def think(self, text: str) -> None:
        """Adds reasoning."""
        self._add(self._reasoning, text)

    def mark(self) -> None:
        """Notes that a mark was read: the white space around it is no content."""
        self._held, self._bare = "", True

    def begin(self, name: str) -> None:
        """Begins the next call."""
        self.mark()
        made = call_id(self.request_id, self.answer, self.calls, self.short_ids)
        self._deltas.append(ToolCallDelta(self.calls, made, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the call that began last."""
        if text:
            self._deltas.append(ToolCallDelta(self.calls - 1, arguments=text))

    def end(self, thinking: bool) -> None:
        """Ends the answer: white space behind content that no call follows is content too."""
        if self._held and not (thinking or self.calls):
            self._texts.append(self._held)
        self._held = ""

    def take_content(self) -> str:
        """The content that came since the last call."""
        if not self._texts:
            return ""
        texts, self._texts = self._texts, []
        return "".join(texts)

    def take(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """The reasoning and the calls that came since the last one."""
        if not (self._reasoning or self._deltas):
            return "", ()
        taken = "".join(self._reasoning), tuple(self._deltas)
        self._reasoning, self._deltas = [], []
        return taken

    def _add(self, texts: list[str], text: str) -> None:
        whole = self._held + text
        if self._bare:
            whole = whole.lstrip(_SPACE)
        kept = whole.rstrip(_SPACE)
        self._held = whole[len(kept) :]
        if kept:
            self._bare = False
            texts.append(kept)


class PendingText:
    """The text that has come and is not read yet. Its readers are generators that yield when they need more.

    Attributes:
        rest: that text.
        ended: whether no more will come.
    """

    __slots__ = ("ended", "rest")

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False

    def skip(self, count: int) -> None:
        """Takes characters off the front."""
        self.rest = self.rest[count:]

    def reaches(self, at: int) -> Generator[None, None, bool]:
        """Waits until there is a character at ``at``; false where the text ends before it."""
        while at >= len(self.rest):
            if self.ended:
                return False
            yield
        return True

    def past_space(self, at: int) -> Generator[None, None, int]:
        """The place of the first character from ``at`` on that is no white space; -1 where there is none."""
        while (yield from self.reaches(at)):
            if self.rest[at] not in _SPACE:
                return at
            at += 1
        return -1

    def has(self, mark: str, at: int = 0) -> Generator[None, None, bool]:
        """Whether ``mark`` stands at ``at``; it waits no longer than it needs to know."""
        for offset, character in enumerate(mark, at):
            if not (yield from self.reaches(offset)) or self.rest[offset] != character:
                return False
        return True


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """How many of the last characters of ``text`` may be the beginning of a mark."""
    for count in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if text.endswith(tuple(mark[:count] for mark in marks if len(mark) > count)):
            return count
    return 0
