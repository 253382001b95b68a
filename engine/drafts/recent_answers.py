"""Cache of a worker's recent answers, in which the last tokens of a text are looked up: rings of tokens with hash
chains.

    tokens      ... A B C D | ... A B C E | ...         | is the end of an answer
    last        latest index of each hash of MIN_MATCH_TOKENS tokens
    before      per index, the previous one with the same hash: a chain from new to old, as in LZ77

Tenants never draft from each other's answers, because a stream's speed would leak their content: there is one ring per
root, which isolates cached prefixes, too. Rings are evicted as a whole, LRU. The result of a look-up only depends on
the answers and their order.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np
import numpy.typing as npt

from pillion.kernels.step import Int32

Int64 = npt.NDArray[np.int64]

# Tokens per hash, and max matches per look-up.
MIN_MATCH_TOKENS = 3
MAX_MATCHES = 32
# Initial and max ring size; a token takes 12 bytes, and an entry of its hash table 8.
FIRST_RING_TOKENS, MAX_RING_TOKENS = 2**12, 2**18
TABLE_ENTRIES = 2**14
# Max tokens of all rings; with the hash tables of MAX_RINGS some 32 MiB.
MAX_CACHED_TOKENS = 2**20
MAX_RINGS = 128
# Separator after each answer.
END = -1

_NO_INDEX = -1
# Odd multipliers of the hash, one per token; the upper bits of the sum index the table of TABLE_ENTRIES.
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class AnswerRing:
    """Latest answers of one root in a ring buffer. A token's index counts all tokens added before it; it is stored at
    its index modulo the ring's size."""

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self.tokens: Int32 = np.empty(FIRST_RING_TOKENS, dtype=np.int32)
        self._before: Int64 = np.empty(FIRST_RING_TOKENS, dtype=np.int64)
        self._last: Int64 = np.full(TABLE_ENTRIES, _NO_INDEX, dtype=np.int64)
        self._starts: deque[int] = deque()
        self.end = 0

    @property
    def first(self) -> int:
        """First index still in the ring."""
        return max(self.end - len(self.tokens), self._starts[0] if self._starts else 0)

    def add(self, text: Int32) -> None:
        """Store an answer, int32, or as many of its last tokens as fit."""
        text = text[-(MAX_RING_TOKENS - 1) :]
        while self.end + len(text) + 1 > len(self.tokens) < MAX_RING_TOKENS:
            # Tokens stay where they are: the ring has not wrapped yet.
            self.tokens = np.concatenate((self.tokens, np.empty_like(self.tokens)))
            self._before = np.concatenate((self._before, np.empty_like(self._before)))
        self._starts.append(self.end)
        if len(self._starts) > self._max_answers:
            self._starts.popleft()
        indices = np.arange(self.end, self.end + len(text) + 1)
        stored_at = indices % len(self.tokens)
        self.tokens[stored_at] = np.append(text, np.int32(END))
        self._before[stored_at] = _NO_INDEX
        self.end += len(text) + 1
        if len(text) < MIN_MATCH_TOKENS:
            return
        hashes, indices = _hashes(text), indices[MIN_MATCH_TOKENS - 1 : -1]
        # Chain the new indices of each hash in order; the first of them points to the last one known before.
        order = np.argsort(hashes, kind="stable")
        before = self._last[hashes]
        repeated = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
        before[order[repeated + 1]] = indices[order[repeated]]
        self._before[indices % len(self.tokens)] = before
        # For duplicate hashes, NumPy keeps the last assignment.
        self._last[hashes] = indices

    def matches(self, text: Int32) -> Int64:
        """Return the indices of up to MAX_MATCHES tokens that end a run with the hash of the last MIN_MATCH_TOKENS
        tokens of ``text``, newest first."""
        matches: list[int] = []
        if len(text) >= MIN_MATCH_TOKENS:
            # Plain Python: for a single hash, ten times as fast as _hashes.
            run = text[-MIN_MATCH_TOKENS:].tolist()
            mixed = sum(token * factor for token, factor in zip(run, _FACTORS, strict=True))
            first, index = self.first, self._last.item((mixed & 0xFFFFFFFF) >> 18)
            while index >= first and len(matches) < MAX_MATCHES:
                matches.append(index)
                index = int(self._before[index % len(self.tokens)])
        return np.array(matches, dtype=np.int64)


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
        """Return the ring of one root and mark it as used; None if there is none."""
        ring = self._rings.get(root)
        if ring is not None:
            self._rings.move_to_end(root)
        return ring

    @property
    def cached_tokens(self) -> int:
        """Capacity of all rings, in tokens."""
        return sum(len(ring.tokens) for ring in self._rings.values())


def _hashes(text: Int32) -> Int64:
    """Return the hash, below TABLE_ENTRIES, of each run of MIN_MATCH_TOKENS tokens: int64 [len(text) -
    MIN_MATCH_TOKENS + 1]."""
    runs = np.lib.stride_tricks.sliding_window_view(text.astype(np.uint32), MIN_MATCH_TOKENS)
    mixed = (runs * np.array(_FACTORS, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
    hashes: Int64 = (mixed >> np.uint32(18)).astype(np.int64)
    return hashes
