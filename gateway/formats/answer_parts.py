"""Parsed parts of an answer, and the text that is still to be parsed. Sans-IO (I9)."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from pillion.types import ToolCallDelta

# Limit on characters held until their meaning is clear: a call's object before its name and arguments, a parameter's
# text that may be a value, white space after a mark.
MAX_HELD_CHARS = 65_536
# Limit per answer on characters parsed again because they were not a call after all.
MAX_REREAD_CHARS = 8192
_SPACE = " \t\r\n"
_NO_SPACE = re.compile(r"[^ \t\r\n]")


def call_id(answer_id: str, answer: int, number: int, short: bool = False) -> str:
    """Return the id of call ``number`` of an answer. It is deterministic, so that a resumed stream repeats it.

    ``short`` ids have nine letters and digits, the limit of Mistral's templates.
    """
    digest = hashlib.sha256(f"{answer_id}/{answer}/{number}".encode()).hexdigest()
    return digest[:9] if short else f"call_{digest[:24]}"


class Marks:
    """Search for marks in an answer. If two begin at one place, the first one in ``texts`` wins.

    Attributes:
        texts: the marks.
    """

    __slots__ = ("_heads", "_pattern", "texts")

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        longest = max(map(len, texts), default=0)
        # Per number of characters, descending: prefixes of the marks that are longer.
        self._heads = [tuple(mark[:n] for mark in texts if len(mark) > n) for n in range(longest - 1, 0, -1)]

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """Return the first match of a mark in ``text`` from ``at`` on."""
        return self._pattern.search(text, at) if self.texts else None

    def begun(self, text: str, at: int) -> int:
        """Return the length of the suffix of ``text[at:]`` that may be a mark's beginning."""
        for count, heads in zip(range(len(self._heads), 0, -1), self._heads, strict=True):
            if text.endswith(heads, at):
                return count
        return 0


@dataclass(slots=True)
class AnswerParts:
    """Parsed parts of an answer that were not taken yet. White space around calls and marks is not content.

    Attributes:
        answer_id, answer: inputs of the call ids.
        short_ids: whether the ids have nine characters.
        calls: number of calls begun.
        thought: whether there was reasoning, or a mark of it.
        thinking: whether the answer is within its reasoning, or may still begin with it.
        inner: whether content is reasoning until a call begins or a mark ends it.
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
    # White space that is content if more content follows; and whether the next white space is dropped.
    _held: list[str] = field(default_factory=list)
    _bare: bool = False
    # White space before calls, which is content if content follows the calls; None until there are both.
    _gap: str | None = None
    # Marks around the content that are still expected, and text that may begin the next one.
    _before: str = ""
    _behind: Marks | None = None
    _last: str = ""
    _half: str = ""

    def between(self, marks: tuple[str, str], last: str, begun: bool) -> None:
        """Set the marks around the content: the first before all of it, unless it has ``begun``, the second after it.
        ``last`` is a mark at the end of the answer, or ""; if given, either of the others may be missing."""
        begin, end = marks
        self._before, self._last = "" if begun else begin, last
        self._behind = Marks(*filter(None, (end, last))) if end else None

    def content(self, text: str) -> None:
        """Add text to the answer's content, or to its reasoning if that has not ended."""
        if self.inner:
            self.think(text)
            return
        self._add(self._texts, text if self._behind is None else self._between(text, self._behind))

    def _between(self, text: str, behind: Marks) -> str:
        """Return the text up to a possible mark around the content, and after such marks."""
        if self._before:
            begun = self._half + (text if self._half else text.lstrip(_SPACE))
            if not self._half:
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
        """Emit text that looked like the beginning of a mark."""
        if self._half:
            self._behind, text, self._half = None, self._half, ""
            self._add(self._texts, text)

    def think(self, text: str) -> None:
        """Add text to the answer's reasoning."""
        self._add(self._reasoning, text)

    def reasoned(self) -> None:
        """End the reasoning: content is content from now on."""
        self.inner = self.thinking = False
        self.mark()

    def mark(self, between: bool = False) -> None:
        """Record a mark, around which white space is not content. ``between`` means that it separates two texts of one
        kind, which stay separate paragraphs."""
        self._held[:] = ["\n\n"] if between else []
        self._bare = True

    def begin(self, name: str, written_id: str = "") -> None:
        """Start the next tool call, with the model's own id if it wrote one."""
        self._whole()
        if self.inner:
            self.reasoned()
        elif self.said and self._gap is None:
            self._gap = "".join(self._held)
        self.mark()
        made = written_id or call_id(self.answer_id, self.answer, self.calls, self.short_ids)
        self._deltas.append(ToolCallDelta(self.calls, made, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the last call."""
        if text:
            self._deltas.append(ToolCallDelta(self.calls - 1, arguments=text))

    def end(self, cut: bool = False) -> None:
        """End the answer. Trailing white space is content unless calls follow it. In a ``cut`` answer, a partial mark
        is dropped."""
        if not cut:
            self._whole()
        if self._held and not (self._bare or self.thinking or self.calls):
            self._texts += self._held
        self._held.clear()

    def take_content(self) -> str:
        """Return and clear the content."""
        if not self._texts:
            return ""
        texts, self._texts = self._texts, []
        return "".join(texts)

    def take(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Return and clear the reasoning and the calls."""
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
    """Text of an answer that has arrived and is not parsed yet. Its parsers are generators that yield to wait for more.

    A parser that cannot yet decide starts a trial (``begin_trial``), and commits or rolls back later:

        begin_trial() --> parses on --> commit(): it was right
                                    '-> roll_back(): the text is parsed again as something else, or emitted as it is

    A trial reads at most MAX_HELD_CHARS. Failed trials of one answer may have MAX_REREAD_CHARS parsed again in total;
    beyond that, their text is emitted unparsed. So the work is linear in the text, and the result depends only on the
    text, not on its pieces.

    Attributes:
        ended: whether no more will arrive.
    """

    __slots__ = ("_aside", "_at", "_from", "_may_reread", "_short", "_text", "_was_cut", "ended")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._from: int | None = None
        self._may_reread = MAX_REREAD_CHARS
        self._aside: tuple[Marks, Callable[[str], object], Callable[[], None]] | None = None
        self.ended = False
        self._was_cut = self._short = False

    def push(self, piece: str) -> None:
        """Add the next piece of text."""
        text, self._text = self._text, ""
        if self._from is None and self._at:
            text, self._at = text[self._at :], 0
        # CPython extends a string in place if it has no other reference.
        text += piece
        self._text = text

    def cut(self, marks: Marks) -> None:
        """Record that the answer breaks off here, and drop a partial mark at its end."""
        self._was_cut = True
        half = marks.begun(self._text, self._at if self._from is None else self._from)
        if half:
            self._text = self._text[:-half]
            self._at = min(self._at, len(self._text))

    def aside(self, marks: Marks, give: Callable[[str], object], found: Callable[[], None]) -> None:
        """Make ``until`` also look for ``marks`` in the text that it emits to ``give``. The first one is skipped, and
        ``found`` is called."""
        self._aside = marks, give, found

    def unread(self, count: int) -> None:
        """Unread the last ``count`` characters. There must be no trial."""
        self._at -= count

    def begin_trial(self) -> None:
        """Start a trial at the next character."""
        self._from, self._short = self._at, False

    def commit(self) -> None:
        """Commit the trial."""
        self._from = None

    def roll_back(self) -> str:
        """Roll the trial back. If too much would be parsed again, consume its text and return it."""
        begin, self._from = self._from or 0, None
        if self._at - begin > self._may_reread:
            return self._text[begin : self._at]
        self._may_reread -= self._at - begin
        self._at = begin
        return ""

    def give_up(self, give: Callable[[str], None], mark: str = "") -> None:
        """End a failed trial. What it read, after ``mark``, is emitted, unless it is a partial call at the end of a cut
        answer."""
        if not self.drop_half():
            give(mark + self.roll_back())

    def drop_half(self) -> bool:
        """Drop a partial call, if the trial failed only because the answer was cut short. Else return False and leave
        the trial as it is."""
        if not (self._was_cut and self._short):
            return False
        self._at, self._from = len(self._text), None
        return True

    def step(self) -> None:
        """Read one character, which must be there."""
        self._at += 1

    def some(self) -> Generator[None, None, bool]:
        """Wait for a character to read; return False at the end of the text, or of what may be held."""
        while self._at >= self._end:
            if self.ended or self._at >= self._most:
                self._short = self.ended and self._at < self._most
                return False
            yield
        return True

    def past_space(self) -> Generator[None, None, str]:
        """Skip white space, and return the next character without reading it; "" if there is none."""
        while (yield from self.some()):
            found = _NO_SPACE.search(self._text, self._at, self._end)
            if found is not None:
                self._at = found.start()
                return found.group()
            self._at = self._end
        return ""

    def has(self, mark: str) -> Generator[None, None, bool]:
        """Read ``mark`` if it comes next, and return whether it does. Waits for no more text than needed."""
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
        """Read at most ``most`` characters, up to the first match of ``end``."""
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
        """Read the available text as far as ``read(text, begin, end)`` returns."""
        begin = self._at
        self._at = read(self._text, begin, self._end)
        return self._text[begin : self._at]

    def until(self, marks: Marks, give: Callable[[str], object]) -> Generator[None, None, str]:
        """Emit text to ``give`` up to the next of ``marks``, as it arrives; read and return the mark, or "" at the end.
        There must be no trial."""
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
        """End of what a trial may read."""
        return sys.maxsize if self._from is None else self._from + MAX_HELD_CHARS

    @property
    def _end(self) -> int:
        """End of what may be read now."""
        return min(len(self._text), self._most)


class CallReader:
    """Parser of an answer whose calls follow marks; all else is content. Base of the formats' parsers."""

    def __init__(self, text: PendingText, parts: AnswerParts, begins: Marks) -> None:
        self._text = text
        self._parts = parts
        self._begins = begins

    def read(self) -> Generator[None, None, None]:
        """Read the whole answer."""
        while mark := (yield from self._text.until(self._begins, self._parts.content)):
            self._text.begin_trial()
            if not (yield from self._after(mark)):
                self._text.give_up(self._parts.content, mark)

    def _after(self, mark: str) -> Generator[None, None, bool]:
        """Parse what follows a mark. If it is not a call, return False; the caller then ends the trial."""
        raise NotImplementedError
