"""Finds the tokens that would complete a bad word of a request after the tokens of its answer so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pillion.kernels.step import Ids


class BadWords:
    """Holds sequences of tokens that an answer never has. Most tokens begin the end of none, so a step mostly looks up
    one token.

    Attributes:
        longest: so many of the answer's last tokens matter.
    """

    __slots__ = ("_after", "_always", "longest")

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self.longest = 0
        self._always: list[int] = []
        # By a sequence's last token but one, these are the tokens before its last one, and that one.
        self._after: defaultdict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        for *before, last in sequences:
            self.longest = max(self.longest, len(before))
            if before:
                self._after[before[-1]].append((tuple(before), last))
            else:
                self._always.append(last)

    def completing(self, answered: Ids) -> list[int]:
        """Returns the tokens that would complete a sequence. ``answered`` are the answer's last tokens, ``longest`` of
        them or as many as it has."""
        ends = self._after.get(int(answered[-1]), ()) if len(answered) else ()
        if not ends:
            return self._always
        tail = tuple(answered.tolist())
        return [*self._always, *(last for before, last in ends if tail[-len(before) :] == before)]
