"""Collects the parts of an answer whose meaning is certain, and the text that still has to be read. Sans-IO (I9)."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from pillion.types import ToolCallDelta

# This many characters of one call are held of which it is not yet known what they belong to: its object before the name
# and the arguments begin, a parameter whose text may be a value, white space after a mark.
MAX_HELD_CHARS = 65_536
# At most this many characters of one answer are read a second time, because what looked like a call was none.
MAX_REREAD_CHARS = 8192
_SPACE = " \t\r\n"
_NO_SPACE = re.compile(r"[^ \t\r\n]")


def call_id(answer_id: str, answer: int, number: int, short: bool = False) -> str:
    """Returns the id of call ``number`` of an answer: it is always the same, so that a resumed stream repeats it.

    ``short`` ids have nine letters and digits, which is all that Mistral's templates take.
    """
    digest = hashlib.sha256(f"{answer_id}/{answer}/{number}".encode()).hexdigest()
    return digest[:9] if short else f"call_{digest[:24]}"


class Marks:
    """Finds marks in an answer. Where two of them begin at one place, the first one of ``texts`` counts.

    Attributes:
        texts: the marks.
    """

    __slots__ = ("_heads", "_pattern", "texts")

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        longest = max(map(len, texts), default=0)
        # For each number of characters, the largest first, this holds the beginnings of the marks that are longer.
        self._heads = [tuple(mark[:n] for mark in texts if len(mark) > n) for n in range(longest - 1, 0, -1)]

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """Finds the first of the marks in ``text`` from ``at`` on."""
        return self._pattern.search(text, at) if self.texts else None

    def begun(self, text: str, at: int) -> int:
        """Returns how many of the last characters of ``text``, from ``at`` on, may be the beginning of a mark."""
        for count, heads in zip(range(len(self._heads), 0, -1), self._heads, strict=True):
            if text.endswith(heads, at):
                return count
        return 0


@dataclass(slots=True)
class AnswerParts:
    """Holds the parts of an answer that became certain and that nobody has taken yet. White space next to calls and
    marks is no content.

    Attributes:
        answer_id, answer: the ids of calls are made of these.
        short_ids: whether these ids have nine characters.
        calls: number of calls that have begun.
        thought: whether there was reasoning, or a mark of it.
        thinking: whether the answer is within its reasoning, or may still begin with it.
        inner: whether content is reasoning, as long as no call begins and no mark ends it.
        said: whether there was content.
    """

    answer_id: str = ""
    answer: int = 0
    short_ids: bool = False
    calls: int = 0
    thought: bool = False
    thinking: bool = False
    inner: bool = False
    said: bool = False
    _texts: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _deltas: list[ToolCallDelta] = field(default_factory=list)
    # This white space is content if more content follows it; the flag says whether white space that comes next is no
    # content.
    _held: list[str] = field(default_factory=list)
    _bare: bool = False
    # Calls have come behind this white space, which is content if more content follows them; None before there is both.
    _gap: str | None = None
    # These are the marks around the content that are still to come, and text that may begin the next one.
    _before: str = ""
    _behind: Marks | None = None
    _last: str = ""
    _half: str = ""

    def between(self, marks: tuple[str, str], last: str, begun: bool) -> None:
        """Notes that the content may stand between two marks, which are no part of it: the first one before all of the
        content, unless it has ``begun`` already, and the second one behind it. ``last`` is a mark behind all of the
        answer, "" for none; where there is one, the others need not go together."""
        begin, end = marks
        self._before, self._last = "" if begun else begin, last
        self._behind = Marks(*filter(None, (end, last))) if end else None

    def content(self, text: str) -> None:
        """Adds text to the content of the answer, or to its reasoning where it has not ended."""
        if self.inner:
            self.think(text)
            return
        self._add(self._texts, text if self._behind is None else self._between(text, self._behind))

    def _between(self, text: str, behind: Marks) -> str:
        """Returns the text up to where a mark around the content may begin, and behind such marks."""
        if self._before:
            begun = self._half + (text if self._half else text.lstrip(_SPACE))
            if not self._half:
                # White space waits elsewhere, in case content follows it.
                self._add(self._texts, text[: len(text) - len(begun)])
            if self._before.startswith(begun):
                self._half = begun
                return ""
            if begun.startswith(self._before):
                self.mark()
            elif not self._last:
                self._behind, self._half = None, ""
                return begun
            text, self._before, self._half = begun.removeprefix(self._before), "", ""
        text, self._half = self._half + text, ""
        if (found := behind.find(text, 0)) is not None:
            self._behind = Marks(self._last) if self._last not in ("", found.group()) else None
            self._add(self._texts, text[: found.start()])
            self.mark()
            rest = text[found.end() :]
            return rest if self._behind is None else self._between(rest, self._behind)
        if half := behind.begun(text, 0):
            text, self._half = text[:-half], text[-half:]
        return text

    def _whole(self) -> None:
        """Takes text that has begun like a mark around the content for content."""
        if self._half:
            self._behind, text, self._half = None, self._half, ""
            self._add(self._texts, text)

    def think(self, text: str) -> None:
        """Adds text to the answer's reasoning."""
        self._add(self._reasoning, text)

    def reasoned(self) -> None:
        """Notes that the reasoning has ended: content is content from now on."""
        self.inner = self.thinking = False
        self.mark()

    def mark(self, between: bool = False) -> None:
        """Notes that a mark was read: the white space around a mark is no content. ``between`` says that it separates
        two texts of one sort, which stay paragraphs of their own."""
        self._held[:] = ["\n\n"] if between else []
        self._bare = True

    def begin(self, name: str, written_id: str = "") -> None:
        """Begins the next call of a tool, whose id may be one that the model has written."""
        self._whole()
        if self.inner:
            self.reasoned()
        elif self.said and self._gap is None:
            # Text on both sides of a call stays apart.
            self._gap = "".join(self._held)
        self.mark()
        made = written_id or call_id(self.answer_id, self.answer, self.calls, self.short_ids)
        self._deltas.append(ToolCallDelta(self.calls, made, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Adds text to the arguments of the call that began last."""
        if text:
            self._deltas.append(ToolCallDelta(self.calls - 1, arguments=text))

    def end(self, cut: bool = False) -> None:
        """Ends the answer: white space after content that no call follows is content too, and half a mark around the
        content is none where the answer was ``cut``."""
        if not cut:
            self._whole()
        if self._held and not (self._bare or self.thinking or self.calls):
            self._texts += self._held
        self._held.clear()

    def take_content(self) -> str:
        """Returns the content that came since the last call of this method."""
        if not self._texts:
            return ""
        texts, self._texts = self._texts, []
        return "".join(texts)

    def take(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Returns the reasoning and the calls that came since the last call of this method."""
        if not (self._reasoning or self._deltas):
            return "", ()
        taken = "".join(self._reasoning), tuple(self._deltas)
        self._reasoning, self._deltas = [], []
        return taken

    def _add(self, texts: list[str], text: str) -> None:
        if self._bare:
            bare = text.lstrip(_SPACE)
            if self._gap == "" and texts is self._texts:
                self._gap = text[: len(text) - len(bare)]
            text = bare
        kept = text.rstrip(_SPACE)
        if kept:
            self._bare = False
            if texts is self._texts:
                texts += [self._gap] if self._gap else []
                self._gap, self.said = None, True
            texts += [*self._held, kept]
            self._held.clear()
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])


class PendingText:
    """Holds the text of an answer that has come and is not read yet. Its readers are generators that yield when they
    need more.

    A reader that is not sure what it reads begins a trial read (``attempt``), and then takes or leaves what it has read
    since:

        attempt() --> reads on --> take(): it was right
                                '-> leave(): the text is read again, as something else, or is handed out unread

    A trial read takes in no more than MAX_HELD_CHARS. Trial reads that fail may have MAX_REREAD_CHARS of one answer
    read again, all of them together; the text of one that goes beyond is handed out, and nothing is looked for in it.
    So the work grows in proportion to the text, and the result depends on nothing but the text.

    Attributes:
        ended: whether no more will come.
    """

    __slots__ = ("_aside", "_at", "_from", "_may_reread", "_short", "_text", "_was_cut", "ended")

    def __init__(self) -> None:
        self._text = ""
        # These are the place of the next character, and the place where the present trial read began.
        self._at = 0
        self._from: int | None = None
        self._may_reread = MAX_REREAD_CHARS
        self._aside: tuple[Marks, Callable[[str], object], Callable[[], None]] | None = None
        self.ended = False
        # These say whether the text has ended where more was to come, and whether a trial read wanted more text than
        # there is.
        self._was_cut = self._short = False

    def push(self, piece: str) -> None:
        """Adds the next piece of text."""
        text, self._text = self._text, ""
        if self._from is None and self._at:
            text, self._at = text[self._at :], 0
        # No other name holds this string, so CPython makes it longer in place.
        text += piece
        self._text = text

    def cut(self, marks: Marks) -> None:
        """Notes that the answer's text breaks off here. Where the text that is not taken yet ends with half a mark,
        that half is dropped."""
        self._was_cut = True
        half = marks.begun(self._text, self._at if self._from is None else self._from)
        if half:
            self._text = self._text[:-half]
            self._at = min(self._at, len(self._text))

    def aside(self, marks: Marks, give: Callable[[str], object], found: Callable[[], None]) -> None:
        """Makes ``until`` look for ``marks``, too, amid the text that it hands to ``give``. The first one is read, and
        ``found`` is called."""
        self._aside = marks, give, found

    def back(self, count: int) -> None:
        """Leaves the last ``count`` characters that were read to be read again. There must be no trial read."""
        self._at -= count

    def attempt(self) -> None:
        """Begins a trial read at the next character."""
        self._from, self._short = self._at, False

    def take(self) -> None:
        """Ends the trial read and takes the text that it has read."""
        self._from = None

    def leave(self) -> str:
        """Ends the trial read as if it had read nothing. Where too much would be read again, its text is taken and
        returned."""
        begin, self._from = self._from or 0, None
        if self._at - begin > self._may_reread:
            return self._text[begin : self._at]
        self._may_reread -= self._at - begin
        self._at = begin
        return ""

    def give_up(self, give: Callable[[str], None], mark: str = "") -> None:
        """Ends a trial read that has failed. What it read, with the ``mark`` before it, is given as text, unless it is
        half a call of an answer that was cut short."""
        if not self.drop_half():
            give(mark + self.leave())

    def drop_half(self) -> bool:
        """Ends a trial read that has failed only because the answer was cut short. Its text is dropped, because half a
        call is of no use. Returns False, and ends nothing, where the trial read failed for another reason."""
        if not (self._was_cut and self._short):
            return False
        self._at, self._from = len(self._text), None
        return True

    def step(self) -> None:
        """Reads one character, which the caller knows to be there."""
        self._at += 1

    def some(self) -> Generator[None, None, bool]:
        """Waits until there is a character to read; returns False if the text, or all that may be held of it, ends."""
        while self._at >= self._end:
            if self.ended or self._at >= self._most:
                self._short = self.ended and self._at < self._most
                return False
            yield
        return True

    def past_space(self) -> Generator[None, None, str]:
        """Reads white space of the answer, and returns the character after it, which stays unread; "" where there is
        none."""
        while (yield from self.some()):
            found = _NO_SPACE.search(self._text, self._at, self._end)
            if found is not None:
                self._at = found.start()
                return found.group()
            self._at = self._end
        return ""

    def has(self, mark: str) -> Generator[None, None, bool]:
        """Returns whether ``mark`` comes next, and then reads it; waits for no more text than it takes to know."""
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
        """Reads the text that is there, as far as ``read`` goes; ``read`` gets a text, where to begin and where to
        end."""
        begin = self._at
        self._at = read(self._text, begin, self._end)
        return self._text[begin : self._at]

    def until(self, marks: Marks, give: Callable[[str], object]) -> Generator[None, None, str]:
        """Gives all text before the next of ``marks`` as it comes, and reads and returns the mark; "" where there is
        none. It must not be called within a trial read."""
        while True:
            text, found = self._text, marks.find(self._text, self._at)
            aside = self._aside if self._aside is not None and self._aside[1] == give else None
            other = aside[0].find(text, self._at) if aside is not None else None
            if aside is not None and other is not None and (found is None or other.start() < found.start()):
                give(text[self._at : other.start()])
                self._at, self._aside = other.end(), None
                aside[2]()
                continue
            begun = 0 if self.ended or found is not None else marks.begun(text, self._at)
            if aside is not None and found is None and not self.ended:
                begun = max(begun, aside[0].begun(text, self._at))
            certain = len(text) - begun if found is None else found.start()
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
        """Gives the place up to which a trial read may go."""
        return sys.maxsize if self._from is None else self._from + MAX_HELD_CHARS

    @property
    def _end(self) -> int:
        """Gives the place up to which the text may be read now."""
        return min(len(self._text), self._most)


class CallReader:
    """Reads an answer whose calls stand behind marks; what is no call is content. The readers of formats extend it."""

    def __init__(self, text: PendingText, parts: AnswerParts, begins: Marks) -> None:
        self._text = text
        self._parts = parts
        self._begins = begins

    def read(self) -> Generator[None, None, None]:
        """Reads the whole answer."""
        while mark := (yield from self._text.until(self._begins, self._parts.content)):
            self._text.attempt()
            if not (yield from self._after(mark)):
                self._text.give_up(self._parts.content, mark)

    def _after(self, mark: str) -> Generator[None, None, bool]:
        """Reads what follows a mark. Returns False where that is no call, and leaves it to the caller to end the trial
        read."""
        raise NotImplementedError
