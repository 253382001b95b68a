"""Finds stop strings in a stream of text pieces, wherever the pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through until a stop string is complete; nothing of a stop string is ever let through.

    Text that could still become a stop string is held back: less than the longest of them. The match that is complete
    first wins, and of two that end together the longer one, so the outcome does not depend on where pieces are cut.
    A stop string that ends in text that is only passed counts for nothing; one that begins there and ends later counts.

    Attributes:
        stops: the strings, none of them empty.
        stopped: whether a stop string is complete.
    """

    __slots__ = ("_held", "stopped", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that is certain now. Once ``stopped`` is true it is the last, and later pieces give nothing."""
        if self.stopped:
            return ""
        if not self.stops:
            return piece
        text, held = self._held + piece, len(self._held)
        found: list[tuple[int, int]] = []
        for stop in self.stops:
            # A match ends in the new text: what ended before that was passed.
            start = text.find(stop, max(0, held - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        return self._let_through(text)

    def pass_by(self, piece: str) -> str:
        """The text that is certain now, whatever stop string ends in ``piece``: it is too early for one."""
        return self._let_through(self._held + piece)

    def flush(self) -> str:
        """What was held back and turned out to be no stop string. Call once, at the end."""
        held, self._held = self._held, ""
        return held

    def _let_through(self, text: str) -> str:
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Longest end of ``text`` that is a beginning of ``stop``, and not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
