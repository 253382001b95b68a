"""Parsed parts of an answer, and the text that is still to be parsed. Sans-IO (I9)."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from pillion.types import ToolCallDelta

# Max characters buffered until their meaning is clear: a call's object before its name and arguments, a parameter's
# text that may be JSON, white space after a mark.
MAX_HELD_CHARS = 65_536
# Max characters per answer that are parsed again after failed trials (PendingText).
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
    """Marks to search for in text that arrives in pieces. Of marks that begin at the same character, the first wins.

    Attributes:
        texts: the marks.
    """

    __slots__ = ("_pattern", "_prefixes", "texts")

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        longest = max(map(len, texts), default=0)
        # Proper prefixes of the marks, grouped by length in descending order.
        self._prefixes = [tuple(mark[:n] for mark in texts if len(mark) > n) for n in range(longest - 1, 0, -1)]

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """Return the first match of a mark in ``text[at:]``, or None."""
        return self._pattern.search(text, at) if self.texts else None

    def partial_mark(self, text: str, at: int) -> int:
        """Return the length of the longest suffix of ``text[at:]`` that is a proper prefix of a mark; 0 if none is."""
        for count, prefixes in zip(range(len(self._prefixes), 0, -1), self._prefixes, strict=True):
            if text.endswith(prefixes, at):
                return count
        return 0


@dataclass(slots=True)
class AnswerParts:
    """Reasoning, content and tool calls parsed from an answer and not yet returned by :meth:`take` and
    :meth:`take_content`. White space around calls and marks is not content.

    Attributes:
        answer_id, answer: inputs of the call ids.
        short_ids: whether the ids have nine characters.
        calls: number of calls begun.
        has_reasoning: whether there was reasoning, or one of its marks.
        thinking: whether the answer is within its reasoning, or may still begin with it.
        in_reasoning: whether :meth:`content` adds to the reasoning, until a call begins or a mark ends it.
        has_content: whether there was content.
    """

    answer_id: str = ""
    answer: int = 0
    short_ids: bool = False
    calls: int = 0
    has_reasoning: bool = False
    thinking: bool = False
    in_reasoning: bool = False
    has_content: bool = False
    _texts: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _deltas: list[ToolCallDelta] = field(default_factory=list)
    # White space that is content only if more content follows.
    _pending_space: list[str] = field(default_factory=list)
    # True directly after a mark: white space is dropped.
    _after_mark: bool = False
    # White space between content and the first call, which is content if content follows the calls; else None.
    _call_space: str | None = None
    # Marks around the content that are still expected, and text that may begin the next one.
    _begin_mark: str = ""
    _end_marks: Marks | None = None
    _final_mark: str = ""
    _partial_mark: str = ""

    def set_content_marks(self, marks: tuple[str, str], final: str, begun: bool) -> None:
        """Set the optional marks around the content, which are removed from it, and the ``final`` mark at the answer's
        end, "" for none. ``begun``: the prompt already has the first mark. Without a final mark, the end mark counts
        only after the begin mark."""
        begin, end = marks
        self._begin_mark, self._final_mark = "" if begun else begin, final
        self._end_marks = Marks(*filter(None, (end, final))) if end else None

    def content(self, text: str) -> None:
        """Add text to the answer's content, or to its reasoning if ``in_reasoning``."""
        if self.in_reasoning:
            self.think(text)
            return
        self._add(self._texts, text if self._end_marks is None else self._without_marks(text, self._end_marks))

    def _without_marks(self, text: str, end_marks: Marks) -> str:
        """Return the content in ``text`` after the marks around it, which are removed; the content before a mark is
        added to the answer. A suffix that may begin a mark is held back."""
        if self._begin_mark:
            begun = self._partial_mark + (text if self._partial_mark else text.lstrip(_SPACE))
            if not self._partial_mark:
                self._add(self._texts, text[: len(text) - len(begun)])
            if self._begin_mark.startswith(begun):
                self._partial_mark = begun
                return ""
            if begun.startswith(self._begin_mark):
                self.mark()
            elif not self._final_mark:
                self._end_marks, self._partial_mark = None, ""
                return begun
            text, self._begin_mark, self._partial_mark = begun.removeprefix(self._begin_mark), "", ""
        text, self._partial_mark = self._partial_mark + text, ""
        if (match := end_marks.find(text, 0)) is not None:
            self._end_marks = Marks(self._final_mark) if self._final_mark not in ("", match.group()) else None
            self._add(self._texts, text[: match.start()])
            self.mark()
            rest = text[match.end() :]
            return rest if self._end_marks is None else self._without_marks(rest, self._end_marks)
        if partial := end_marks.partial_mark(text, 0):
            text, self._partial_mark = text[:-partial], text[-partial:]
        return text

    def _flush_partial_mark(self) -> None:
        """Add held-back text that did not become a mark to the content."""
        if self._partial_mark:
            self._end_marks, text, self._partial_mark = None, self._partial_mark, ""
            self._add(self._texts, text)

    def think(self, text: str) -> None:
        """Add text to the answer's reasoning."""
        self._add(self._reasoning, text)

    def end_reasoning(self) -> None:
        """End the reasoning; subsequent text is content."""
        self.in_reasoning = self.thinking = False
        self.mark()

    def mark(self, between: bool = False) -> None:
        """Record a mark; white space around it is dropped. ``between``: it separates two texts of the same kind, which
        become separate paragraphs."""
        self._pending_space[:] = ["\n\n"] if between else []
        self._after_mark = True

    def begin(self, name: str, written_id: str = "") -> None:
        """Start the next tool call. ``written_id``: the id that the model wrote, "" to make one."""
        self._flush_partial_mark()
        if self.in_reasoning:
            self.end_reasoning()
        elif self.has_content and self._call_space is None:
            self._call_space = "".join(self._pending_space)
        self.mark()
        tool_call_id = written_id or call_id(self.answer_id, self.answer, self.calls, self.short_ids)
        self._deltas.append(ToolCallDelta(self.calls, tool_call_id, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the last call."""
        if text:
            self._deltas.append(ToolCallDelta(self.calls - 1, arguments=text))

    def end(self, cut: bool = False) -> None:
        """End the answer. Trailing white space is content unless calls follow it. ``cut``: the answer was truncated, so
        a partial mark at its end is dropped."""
        if not cut:
            self._flush_partial_mark()
        if self._pending_space and not (self._after_mark or self.thinking or self.calls):
            self._texts += self._pending_space
        self._pending_space.clear()

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
        parts = "".join(self._reasoning), tuple(self._deltas)
        self._reasoning, self._deltas = [], []
        return parts

    def _add(self, texts: list[str], text: str) -> None:
        """Append ``text`` to ``texts``; trailing white space is held back until more text follows."""
        if self._after_mark:
            stripped = text.lstrip(_SPACE)
            if self._call_space == "" and texts is self._texts:
                self._call_space = text[: len(text) - len(stripped)]
            text = stripped
        body = text.rstrip(_SPACE)
        if body:
            self._after_mark = False
            if texts is self._texts:
                texts += [self._call_space] if self._call_space else []
                self._call_space, self.has_content = None, True
            texts += [*self._pending_space, body]
            self._pending_space.clear()
        if len(body) < len(text):
            self._pending_space.append(text[len(body) :])


class PendingText:
    """Text of an answer that has arrived and is not parsed yet. Its parsers are generators that yield to wait for more.

    A parser that cannot yet decide starts a trial (``begin_trial``), and commits or rolls back later:

        begin_trial() --> parses on --> commit(): the guess was right
                                    '-> roll_back(): the text is parsed again as something else, or emitted as it is

    A trial reads at most MAX_HELD_CHARS. Failed trials of one answer may have MAX_REREAD_CHARS parsed again in total;
    beyond that, their text is emitted unparsed. So the work is linear in the text, and the result does not depend on
    how the text was split into pieces.

    Attributes:
        ended: whether the text is complete.
    """

    __slots__ = ("_at", "_may_reread", "_short", "_text", "_trial_start", "_was_cut", "_watched", "ended")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._trial_start: int | None = None
        self._may_reread = MAX_REREAD_CHARS
        self._watched: tuple[Marks, Callable[[str], object], Callable[[], None]] | None = None
        self.ended = False
        self._was_cut = self._short = False

    def push(self, piece: str) -> None:
        """Add the next piece of text."""
        text, self._text = self._text, ""
        if self._trial_start is None and self._at:
            text, self._at = text[self._at :], 0
        # CPython extends a string in place if it has no other reference.
        text += piece
        self._text = text

    def cut(self, marks: Marks) -> None:
        """Record that the answer was truncated here, and drop a partial mark at its end."""
        self._was_cut = True
        half = marks.partial_mark(self._text, self._at if self._trial_start is None else self._trial_start)
        if half:
            self._text = self._text[:-half]
            self._at = min(self._at, len(self._text))

    def watch(self, marks: Marks, emit: Callable[[str], object], on_mark: Callable[[], None]) -> None:
        """Make :meth:`until` search the text that it passes to ``emit`` for ``marks`` too. Once, at the first one, it
        removes the mark and calls ``on_mark``."""
        self._watched = marks, emit, on_mark

    def unread(self, count: int) -> None:
        """Move back by ``count`` characters. Only outside of trials."""
        self._at -= count

    def begin_trial(self) -> None:
        """Start a trial at the next character."""
        self._trial_start, self._short = self._at, False

    def commit(self) -> None:
        """Commit the trial."""
        self._trial_start = None

    def roll_back(self) -> str:
        """Roll the trial back and return "". If more than the rest of MAX_REREAD_CHARS would be parsed again, consume
        the trial's text and return it instead."""
        begin, self._trial_start = self._trial_start or 0, None
        if self._at - begin > self._may_reread:
            return self._text[begin : self._at]
        self._may_reread -= self._at - begin
        self._at = begin
        return ""

    def fail_trial(self, emit: Callable[[str], None], mark: str = "") -> None:
        """End a failed trial: emit the ``mark`` before it, and roll it back or emit its text too. A partial call at the
        end of a truncated answer is dropped instead."""
        if not self.drop_partial_call():
            emit(mark + self.roll_back())

    def drop_partial_call(self) -> bool:
        """Drop the trial's text and return True, if the trial failed only because the answer was truncated; else return
        False and change nothing."""
        if not (self._was_cut and self._short):
            return False
        self._at, self._trial_start = len(self._text), None
        return True

    def step(self) -> None:
        """Skip one character, which must have arrived."""
        self._at += 1

    def more(self) -> Generator[None, None, bool]:
        """Wait for the next character; return False at the end of the text, or of what a trial may read."""
        while self._at >= self._end:
            if self.ended or self._at >= self._trial_end:
                self._short = self.ended and self._at < self._trial_end
                return False
            yield
        return True

    def skip_space(self) -> Generator[None, None, str]:
        """Skip white space, and return the next character without reading it; "" if there is none."""
        while (yield from self.more()):
            match = _NO_SPACE.search(self._text, self._at, self._end)
            if match is not None:
                self._at = match.start()
                return match.group()
            self._at = self._end
        return ""

    def accept(self, mark: str) -> Generator[None, None, bool]:
        """Read ``mark`` if it comes next, and return whether it does. Waits for no more text than needed."""
        while True:
            available = self._text[self._at : min(self._at + len(mark), self._end)]
            if available == mark:
                self._at += len(mark)
                return True
            if not mark.startswith(available) or self.ended or self._end == self._trial_end:
                self._short = self.ended and mark.startswith(available) and self._end < self._trial_end
                return False
            yield

    def up_to(self, end: re.Pattern[str], max_chars: int = MAX_HELD_CHARS) -> Generator[None, None, str]:
        """Read and return at most ``max_chars`` characters, up to the first match of ``end``."""
        read: list[str] = []
        while max_chars and (yield from self.more()):
            limit = min(self._end, self._at + max_chars)
            match = end.search(self._text, self._at, limit)
            stop = limit if match is None else match.start()
            read.append(self._text[self._at : stop])
            max_chars, self._at = max_chars - (stop - self._at), stop
            if match is not None:
                break
        return "".join(read)

    def piece(self, scan: Callable[[str, int, int], int]) -> str:
        """Read and return the available text up to the index that ``scan(text, begin, end)`` returns."""
        begin = self._at
        self._at = scan(self._text, begin, self._end)
        return self._text[begin : self._at]

    def until(self, marks: Marks, emit: Callable[[str], object]) -> Generator[None, None, str]:
        """Pass text to ``emit`` as it arrives, up to the next of ``marks``; read and return that mark, "" at the end of
        the text. Only outside of trials."""
        while True:
            text, match = self._text, marks.find(self._text, self._at)
            watched = self._watched if self._watched is not None and self._watched[1] == emit else None
            watched_match = watched[0].find(text, self._at) if watched is not None else None
            if (
                watched is not None
                and watched_match is not None
                and (match is None or watched_match.start() < match.start())
            ):
                emit(text[self._at : watched_match.start()])
                self._at, self._watched = watched_match.end(), None
                watched[2]()
                continue
            partial = 0 if self.ended or match is not None else marks.partial_mark(text, self._at)
            if watched is not None and match is None and not self.ended:
                partial = max(partial, watched[0].partial_mark(text, self._at))
            certain = len(text) - partial if match is None else match.start()
            if certain > self._at:
                emit(text[self._at : certain])
            self._at = certain if match is None else match.end()
            if match is not None:
                return match.group()
            if self.ended:
                return ""
            yield

    @property
    def _trial_end(self) -> int:
        """Index of the end of what a trial may read."""
        return sys.maxsize if self._trial_start is None else self._trial_start + MAX_HELD_CHARS

    @property
    def _end(self) -> int:
        """Index of the end of what can be read now."""
        return min(len(self._text), self._trial_end)


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
                self._text.fail_trial(self._parts.content, mark)

    def _after(self, mark: str) -> Generator[None, None, bool]:
        """Parse a call after ``mark``. Return False if it is none; the caller then fails the trial."""
        raise NotImplementedError
