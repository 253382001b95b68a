"""Keeps the last answers of a worker, in which a text's end is looked up: a ring of tokens with chains of equal
beginnings.

    tokens   ... A B C D | ... A B C E | ...         | is the end of an answer
    last        of each hash of LEAST_MATCH_TOKENS tokens the latest place
    before      of each place the one before it with the same hash: a chain from new to old, as in LZ77

A tenant never drafts from the answers of another one, because its stream's speed would tell what they say: there is a
ring for each root, which is where cached prefixes are told apart, too. Rings are forgotten as a whole, the least
recently used first. The result of a look-up depends on the answers and their order alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np
import numpy.typing as npt

from pillion.kernels.step import Int32

Int64 = npt.NDArray[np.int64]

# A look-up finds places of earlier answers where at least this many tokens are those of the text's end.
LEAST_MATCH_TOKENS = 3
# At most this many places of a chain are looked at, the latest first.
MAX_PLACES = 32
# A ring grows up to the second size; a token takes 12 bytes, and a slot of its table 8.
FIRST_RING_TOKENS, MAX_RING_TOKENS = 2**12, 2**18
TABLE_SLOTS = 2**14
# All rings together hold at most this many tokens; with the tables of MAX_RINGS that is some 32 MiB.
MAX_CACHED_TOKENS = 2**20
MAX_RINGS = 128
# In a ring of answers this number stands after each answer.
END = -1

_NOWHERE = -1
_PLAIN_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_FACTORS = np.array(_PLAIN_FACTORS, dtype=np.uint32)


class AnswerRing:
    """Holds the latest answers of one root in a ring buffer. The place of a token is the number of all tokens that came
    before it; the token is stored at that number modulo the ring's size."""

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self.tokens: Int32 = np.empty(FIRST_RING_TOKENS, dtype=np.int32)
        self._before: Int64 = np.empty(FIRST_RING_TOKENS, dtype=np.int64)
        self._last: Int64 = np.full(TABLE_SLOTS, _NOWHERE, dtype=np.int64)
        self._starts: deque[int] = deque()
        self.end = 0

    @property
    def first(self) -> int:
        """Gives the first place that is still in the ring."""
        return max(self.end - len(self.tokens), self._starts[0] if self._starts else 0)

    def add(self, text: Int32) -> None:
        """Remembers an answer, or as much of its end as the ring can hold."""
        text = text[-(MAX_RING_TOKENS - 1) :]
        while self.end + len(text) + 1 > len(self.tokens) < MAX_RING_TOKENS:
            # The ring can grow because places keep their positions until it is full for the first time.
            self.tokens = np.concatenate((self.tokens, np.empty_like(self.tokens)))
            self._before = np.concatenate((self._before, np.empty_like(self._before)))
        self._starts.append(self.end)
        if len(self._starts) > self._max_answers:
            self._starts.popleft()
        places = np.arange(self.end, self.end + len(text) + 1)
        at = places % len(self.tokens)
        self.tokens[at] = np.append(text, np.int32(END))
        self._before[at] = _NOWHERE
        self.end += len(text) + 1
        if len(text) < LEAST_MATCH_TOKENS:
            return
        hashes, places = _hashes(text), places[LEAST_MATCH_TOKENS - 1 : -1]
        # New places with the same hash are chained in order; the first of them points back to the place that was known
        # before.
        order = np.argsort(hashes, kind="stable")
        earlier = self._last[hashes]
        again = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
        earlier[order[again + 1]] = places[order[again]]
        self._before[places % len(self.tokens)] = earlier
        # Where several places have one hash, NumPy keeps the last one.
        self._last[hashes] = places

    def places(self, text: Int32) -> Int64:
        """Returns the latest places whose last tokens equal those of ``text``, as far as hashes tell, from new to
        old."""
        found: list[int] = []
        if len(text) >= LEAST_MATCH_TOKENS:
            # This computes in plain numbers what _hashes does: for a single hash that takes a tenth of the time.
            run = text[-LEAST_MATCH_TOKENS:].tolist()
            mixed = sum(token * factor for token, factor in zip(run, _PLAIN_FACTORS, strict=True))
            first, place = self.first, self._last.item((mixed & 0xFFFFFFFF) >> 18)
            while place >= first and len(found) < MAX_PLACES:
                found.append(place)
                place = int(self._before[place % len(self.tokens)])
        return np.array(found, dtype=np.int64)


class RecentAnswers:
    """Holds the rings of answers of all roots. Each ring has at most ``max_answers``."""

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self._rings: OrderedDict[bytes, AnswerRing] = OrderedDict()

    def add(self, root: bytes, text: Int32) -> None:
        """Remembers an answer under its root; the answers of other roots may be forgotten for it."""
        if not self._max_answers or not len(text):
            return
        ring = self._rings.get(root)
        if ring is None:
            ring = self._rings[root] = AnswerRing(self._max_answers)
        ring.add(text)
        self._rings.move_to_end(root)
        while len(self._rings) > MAX_RINGS or self.cached_tokens > MAX_CACHED_TOKENS:
            self._rings.popitem(last=False)

    def ring(self, root: bytes) -> AnswerRing | None:
        """Returns the answers of one root, which counts as used now."""
        ring = self._rings.get(root)
        if ring is not None:
            self._rings.move_to_end(root)
        return ring

    @property
    def cached_tokens(self) -> int:
        """Gives the number of tokens that all rings have room for."""
        return sum(len(ring.tokens) for ring in self._rings.values())


def _hashes(text: Int32) -> Int64:
    """Returns the slots of the runs of LEAST_MATCH_TOKENS tokens, by their last token: int64 [len(text) -
    LEAST_MATCH_TOKENS + 1]."""
    runs = np.lib.stride_tricks.sliding_window_view(text.astype(np.uint32), LEAST_MATCH_TOKENS)
    mixed = (runs * _FACTORS).sum(axis=1, dtype=np.uint32)
    slots: Int64 = (mixed >> np.uint32(18)).astype(np.int64)
    return slots
