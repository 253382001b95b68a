"""Cache of a worker's last answers, searched for a text's end: a ring of tokens with hash chains.

    tokens   ... A B C D | ... A B C E | ...         | is the end of an answer
    last        latest place of each hash of MIN_MATCH_TOKENS tokens
    before      previous place with the same hash, per place: a chain from new to old, as in LZ77

Tenants never draft from each other's answers, because a stream's speed would leak their content: there is a ring per
root, by which cached prefixes are isolated, too. Rings are evicted as a whole, LRU. The result of a look-up only
depends on the answers and their order.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np
import numpy.typing as npt

from pillion.kernels.step import Int32

Int64 = npt.NDArray[np.int64]

MIN_MATCH_TOKENS = 3
MAX_PLACES = 32
# Initial and max ring size; a token takes 12 bytes, and a slot of its table 8.
FIRST_RING_TOKENS, MAX_RING_TOKENS = 2**12, 2**18
TABLE_SLOTS = 2**14
# Max tokens of all rings; with the tables of MAX_RINGS some 32 MiB.
MAX_CACHED_TOKENS = 2**20
MAX_RINGS = 128
# Separator after each answer.
END = -1

_NOWHERE = -1
_PLAIN_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_FACTORS = np.array(_PLAIN_FACTORS, dtype=np.uint32)


class AnswerRing:
    """Latest answers of one root in a ring buffer. A token's place is the number of tokens before it, stored at that
    number modulo the ring's size."""

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self.tokens: Int32 = np.empty(FIRST_RING_TOKENS, dtype=np.int32)
        self._before: Int64 = np.empty(FIRST_RING_TOKENS, dtype=np.int64)
        self._last: Int64 = np.full(TABLE_SLOTS, _NOWHERE, dtype=np.int64)
        self._starts: deque[int] = deque()
        self.end = 0

    @property
    def first(self) -> int:
        """First place still in the ring."""
        return max(self.end - len(self.tokens), self._starts[0] if self._starts else 0)

    def add(self, text: Int32) -> None:
        """Store an answer, or the end of it that fits."""
        text = text[-(MAX_RING_TOKENS - 1) :]
        while self.end + len(text) + 1 > len(self.tokens) < MAX_RING_TOKENS:
            # Places are not displaced until the ring wraps for the first time.
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
        if len(text) < MIN_MATCH_TOKENS:
            return
        hashes, places = _hashes(text), places[MIN_MATCH_TOKENS - 1 : -1]
        # Chain new places of equal hash in order; the first of them points to the last known place.
        order = np.argsort(hashes, kind="stable")
        earlier = self._last[hashes]
        again = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
        earlier[order[again + 1]] = places[order[again]]
        self._before[places % len(self.tokens)] = earlier
        # For duplicate hashes, NumPy keeps the last assignment.
        self._last[hashes] = places

    def places(self, text: Int32) -> Int64:
        """Return the latest places whose last tokens equal those of ``text`` (up to hash collisions), newest first."""
        found: list[int] = []
        if len(text) >= MIN_MATCH_TOKENS:
            # _hashes in plain Python: ten times as fast for a single hash.
            run = text[-MIN_MATCH_TOKENS:].tolist()
            mixed = sum(token * factor for token, factor in zip(run, _PLAIN_FACTORS, strict=True))
            first, place = self.first, self._last.item((mixed & 0xFFFFFFFF) >> 18)
            while place >= first and len(found) < MAX_PLACES:
                found.append(place)
                place = int(self._before[place % len(self.tokens)])
        return np.array(found, dtype=np.int64)


class RecentAnswers:
    """Rings of answers of all roots, each of up to ``max_answers``."""

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self._rings: OrderedDict[bytes, AnswerRing] = OrderedDict()

    def add(self, root: bytes, text: Int32) -> None:
        """Store an answer under its root; may evict other roots."""
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
        """Return the answers of one root and mark them as used."""
        ring = self._rings.get(root)
        if ring is not None:
            self._rings.move_to_end(root)
        return ring

    @property
    def cached_tokens(self) -> int:
        """Capacity of all rings, in tokens."""
        return sum(len(ring.tokens) for ring in self._rings.values())


def _hashes(text: Int32) -> Int64:
    """Return the slots of the runs of MIN_MATCH_TOKENS tokens, by last token: int64 [len(text) - MIN_MATCH_TOKENS +
    1]."""
    runs = np.lib.stride_tricks.sliding_window_view(text.astype(np.uint32), MIN_MATCH_TOKENS)
    mixed = (runs * _FACTORS).sum(axis=1, dtype=np.uint32)
    slots: Int64 = (mixed >> np.uint32(18)).astype(np.int64)
    return slots
