"""The parts of an answer that became certain, and the text that waits to be read. Sans-IO (I9)."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from pillion.types import ToolCallDelta

# Most characters that are held of one call while it is not known what they are: its object before the name and the
# arguments begin, a parameter whose text may be a value, white space behind a mark.
MAX_HELD_CHARS = 65_536
# Most characters of one answer that are read again because they were no call.
MAX_REREAD_CHARS = 8192
_SPACE = " \t\r\n"
_NO_SPACE = re.compile(r"[^ \t\r\n]")


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
    _held: list[str] = field(default_factory=list)
    _bare: bool = False

    def content(self, text: str) -> None:
        """Adds text of the answer itself."""
        self._add(self._texts, text)

    def think(self, text: str) -> None:
        """Adds reasoning."""
        self._add(self._reasoning, text)

    def mark(self) -> None:
        """Notes that a mark was read: the white space around it is no content."""
        self._held.clear()
        self._bare = True

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

    @property
    def behind_mark(self) -> bool:
        """Whether nothing but white space has come since the last mark."""
        return self._bare

    def end(self, thinking: bool) -> None:
        """Ends the answer: white space behind content that no call follows is content too."""
        if self._held and not (thinking or self.calls):
            self._texts += self._held
        self._held.clear()

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
        text = text.lstrip(_SPACE) if self._bare else text
        kept = text.rstrip(_SPACE)
        if kept:
            self._bare = False
            texts += [*self._held, kept]
            self._held.clear()
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])


class Marks:
    """Texts that mean something in an answer. Of two that begin at one place the first one counts.

    Attributes:
        texts: the marks.
    """

    __slots__ = ("_heads", "_pattern", "texts")

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        longest = max(map(len, texts), default=0)
        # By how many characters of a mark have come, longest first: the beginnings of marks that are longer.
        self._heads = [tuple(mark[:n] for mark in texts if len(mark) > n) for n in range(longest - 1, 0, -1)]

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The first of them in ``text`` from ``at`` on."""
        return self._pattern.search(text, at) if self.texts else None

    def begun(self, text: str, at: int) -> int:
        """How many of the last characters of ``text``, from ``at`` on, may be the beginning of a mark."""
        for count, heads in zip(range(len(self._heads), 0, -1), self._heads, strict=True):
            if text.endswith(heads, at):
                return count
        return 0


class PendingText:
    """The text that has come and is not read yet. Its readers are generators that yield when they need more.

    A reader that may be wrong about what it reads tries it, and takes or leaves what it has read since:

        attempt() --> reads on --> take(): it was right
                                '-> leave(): the text is read again, as something else, or is handed out unread

    An attempt reads no more than MAX_HELD_CHARS. Attempts that fail may have MAX_REREAD_CHARS of one answer read again,
    all of them together; the text of one that goes beyond is handed out, and nothing is looked for in it. So the work
    grows with the text, whatever it is, and what is read depends on nothing but the text.

    Attributes:
        ended: whether no more will come.
    """

    __slots__ = ("_at", "_from", "_may_reread", "_short", "_text", "_was_cut", "ended")

    def __init__(self) -> None:
        self._text = ""
        # The next character, and where the attempt began that goes on.
        self._at = 0
        self._from: int | None = None
        self._may_reread = MAX_REREAD_CHARS
        self.ended = False
        # Whether the text has ended where more was to come, and whether an attempt wanted more than there is.
        self._was_cut = self._short = False

    def push(self, piece: str) -> None:
        """Adds what comes next."""
        text, self._text = self._text, ""
        if self._from is None and self._at:
            text, self._at = text[self._at :], 0
        # No other name holds this string, so CPython makes it longer in place.
        text += piece
        self._text = text

    def cut(self, marks: Marks, least: int) -> None:
        """Notes that the text breaks off here. Drops the beginning of a mark, of ``least`` characters and more, at the
        end of what is not taken yet."""
        self._was_cut = True
        half = marks.begun(self._text, self._at if self._from is None else self._from)
        if half >= least:
            self._text = self._text[:-half]
            self._at = min(self._at, len(self._text))

    def attempt(self) -> None:
        """Begins an attempt here."""
        self._from, self._short = self._at, False

    def take(self) -> None:
        """Ends the attempt: what it has read is taken."""
        self._from = None

    def leave(self) -> str:
        """Ends the attempt, as if it had read nothing. Where too much would be read again, what it has read is taken
        and returned."""
        begin, self._from = self._from or 0, None
        if self._at - begin > self._may_reread:
            return self._text[begin : self._at]
        self._may_reread -= self._at - begin
        self._at = begin
        return ""

    def drop_half(self) -> bool:
        """Ends an attempt that has failed where the text was cut and all that it wanted was more of it. What there is
        of it is dropped: half a call is nobody's text. False where it failed otherwise, and goes on."""
        if not (self._was_cut and self._short):
            return False
        self._at, self._from = len(self._text), None
        return True

    def step(self) -> None:
        """Reads one character that is known."""
        self._at += 1

    def some(self) -> Generator[None, None, bool]:
        """Waits until there is a character to read; false where the text, or all that may be held of it, ends."""
        while self._at >= self._end:
            if self.ended or self._at >= self._most:
                self._short = self.ended and self._at < self._most
                return False
            yield
        return True

    def past_space(self) -> Generator[None, None, str]:
        """Reads white space: the character behind it, which is not read; "" where there is none."""
        while (yield from self.some()):
            found = _NO_SPACE.search(self._text, self._at, self._end)
            if found is not None:
                self._at = found.start()
                return found.group()
            self._at = self._end
        return ""

    def has(self, mark: str) -> Generator[None, None, bool]:
        """Whether ``mark`` comes next, which is read then; it waits no longer than it needs to know."""
        while True:
            come = self._text[self._at : min(self._at + len(mark), self._end)]
            if come == mark:
                self._at += len(mark)
                return True
            if not mark.startswith(come) or self.ended or self._end == self._most:
                self._short = self.ended and mark.startswith(come) and self._end < self._most
                return False
            yield

    def up_to(self, end: re.Pattern[str], most: int = MAX_HELD_CHARS) -> Generator[None, None, str]:
        """Reads the characters before the first one that ``end`` matches, ``most`` of them and no more."""
        read: list[str] = []
        while most and (yield from self.some()):
            until = min(self._end, self._at + most)
            found = end.search(self._text, self._at, until)
            stop = until if found is None else found.start()
            read.append(self._text[self._at : stop])
            most, self._at = most - (stop - self._at), stop
            if found is not None:
                break
        return "".join(read)

    def piece(self, read: Callable[[str, int, int], int]) -> str:
        """Reads what is there, as far as ``read`` goes, which is called with a text, where to begin and its end."""
        begin = self._at
        self._at = read(self._text, begin, self._end)
        return self._text[begin : self._at]

    def until(self, marks: Marks, give: Callable[[str], object]) -> Generator[None, None, str]:
        """Gives all that stands before the next of ``marks``, as it comes, and reads the mark; "" where there is none.
        It is no part of an attempt."""
        while True:
            text, found = self._text, marks.find(self._text, self._at)
            certain = len(text) - (0 if self.ended else marks.begun(text, self._at)) if found is None else found.start()
            if certain > self._at:
                give(text[self._at : certain])
            self._at = certain if found is None else found.end()
            if found is not None:
                return found.group()
            if self.ended:
                return ""
            yield

    @property
    def _most(self) -> int:
        """Where an attempt may read to."""
        return sys.maxsize if self._from is None else self._from + MAX_HELD_CHARS

    @property
    def _end(self) -> int:
        """The end of what may be read now."""
        return min(len(self._text), self._most)
