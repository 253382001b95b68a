"""Holds the memory of the ranks of one worker on one host: what they exchange in a step, and how they wait.

    rank 0: RankMemory.create --> its descriptor --> ranks 1 ..: RankMemory.open --> steps --> close
                                                     anybody, at any time: abort

It is one memfd without a name, zeroed; pages that nobody has touched take no memory:

    header | words of the waits (kernels/cpu/ranks/rank_sums.py) | partials [2 turns][ranks][rows] | logits [rows]
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.errors import ConfigError, Internal
from pillion.kernels.cpu.ranks.rank_sums import ABORT, ARRIVED, RANK_LINE_BYTES, SLEEPERS, words_bytes

# A rank that waits for another one sleeps this long before it checks whether the ranks shall end.
NAP_NS = 20_000_000
# Rank 0 waits this long for another rank within a step, counted in its own naps, because time in which it was stopped
# itself does not count. After that the ranks end.
MAX_RANK_WAIT_MS = 60_000
# A rank that waits without a limit sleeps this many times.
NEVER = 2**62
_MAGIC = int.from_bytes(b"RANKMEM1", "little")
_PAGE_BYTES = 4096
# There are two turns: nobody reads the partials of a turn any more when they are written again.
TURNS = 2
# These are the words of the memory's header after its magic number.
_FIELDS = ("ranks", "max_tokens", "row_bytes", "logit_bytes")
Bytes = npt.NDArray[np.uint8]


def partial_row_bytes(config: ModelConfig) -> int:
    """Return the bytes of a row of partial sums: float32, whole panels of a product, and an odd number of cache
    lines."""
    return (-(-config.hidden_size // 32) * 2 | 1) * 64


def logit_row_bytes(config: ModelConfig) -> int:
    """Return the bytes of a row of logits: float32, one after the other up to the last vectors."""
    return -(-config.vocab_size // 32) * 32 * 4


class RankMemory:
    """Maps the memory that ``ranks`` ranks share. A step has at most ``max_tokens`` rows."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory, and then owns its descriptor. Raises ConfigError for memory of another kind."""
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        mapped = mmap.mmap(descriptor, size) if size >= _PAGE_BYTES else b"\0" * _PAGE_BYTES
        # The mapping lives as long as the last array over it.
        self._bytes: Bytes = np.frombuffer(mapped, np.uint8)
        magic, *numbers = self._bytes[: 8 * (1 + len(_FIELDS))].view(np.int64).tolist()
        self.ranks, self.max_tokens, self.row_bytes, self.logit_bytes = numbers
        if magic != _MAGIC or min(numbers) < 1 or size != _total(*numbers):
            raise ConfigError("this is no memory of ranks")
        self._words: npt.NDArray[np.int64] = self._bytes[_PAGE_BYTES : _partials_at(self.ranks)].view(np.int64)

    @classmethod
    def create(cls, config: ModelConfig, ranks: int, max_tokens: int) -> RankMemory:
        """Make the memory for steps of up to ``max_tokens`` rows. Raises ConfigError where the system has none."""
        numbers = ranks, max_tokens, partial_row_bytes(config), logit_row_bytes(config)
        try:
            descriptor = os.memfd_create("pillion-ranks", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, _total(*numbers))
            os.pwrite(descriptor, np.array([_MAGIC, *numbers], np.int64).tobytes(), 0)
            return cls(descriptor)
        except OSError as error:
            raise ConfigError(f"no memory for {ranks} ranks: {error.strerror}") from None

    @classmethod
    def open(cls, descriptor: int) -> RankMemory:
        """Map the memory of a descriptor, and then owns that descriptor. Raises ConfigError for memory of another
        kind, whose descriptor stays the caller's."""
        try:
            return cls(descriptor)
        except OSError as error:
            raise ConfigError(f"the memory of ranks cannot be mapped: {error.strerror}") from None

    @property
    def fd(self) -> int:
        """Gives the descriptor of the memory, which is handed on to other ranks."""
        return self._descriptor

    def abort(self) -> None:
        """End every wait of every rank for good, at the latest when its present sleep is over. Any thread may call it
        before close."""
        self._words[ABORT // 8] = 1

    @property
    def aborted(self) -> bool:
        """Says whether the ranks shall end, because the results of steps are worth nothing any more."""
        return bool(self._words[ABORT // 8])

    @property
    def words(self) -> Bytes:
        """Gives the words by which ranks wait for each other."""
        return self._words.view(np.uint8)

    def phase(self, rank: int) -> int:
        """Return the last phase at which a rank has arrived."""
        return int(self._words[self._place(rank, ARRIVED)])

    def sleepers(self, rank: int) -> int:
        """Return how many ranks sleep until this one arrives."""
        return int(self._words[self._place(rank, SLEEPERS)])

    def partials(self, turn: int) -> Bytes:
        """Return the partials of all ranks in a turn, [ranks][max_tokens][row_bytes]."""
        size = self.ranks * self.rank_bytes
        first = _partials_at(self.ranks) + turn * size
        return self._bytes[first : first + size]

    @property
    def rank_bytes(self) -> int:
        """Gives the number of bytes of one rank's partial sums in one of the areas that successive sums use in turn."""
        return int(self.max_tokens * self.row_bytes)

    @property
    def logits(self) -> Bytes:
        """Gives the logits, [max_tokens][logit_bytes]."""
        return self._bytes[len(self._bytes) - self.max_tokens * self.logit_bytes :]

    def check_integrity(self) -> None:
        """Raise Internal unless all ranks have arrived at the same phase and none sleeps. Call it between two steps,
        when the forward pass of every rank has returned; while a rank's pass goes on, it may not have woken up yet."""
        phases = [self.phase(rank) for rank in range(self.ranks)]
        sleepers = [self.sleepers(rank) for rank in range(self.ranks)]
        if not self.aborted and (len(set(phases)) > 1 or any(sleepers)):
            raise Internal(f"ranks are at phases {phases}, {sleepers} others wait for them")

    def close(self) -> None:
        """Close the memory's descriptor; the mapping goes with its last user. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    @staticmethod
    def _place(rank: int, word: int) -> int:
        return ((1 + rank) * RANK_LINE_BYTES + word) // 8


@dataclass(frozen=True, slots=True)
class RankMember:
    """Describes a rank on the CPU: its share of the model, and the memory that it has in common with the others.

    Rank 0 waits ``max_wait_ms`` for another rank before it ends them all, in naps of ``nap_ns`` each.
    """

    shard: ModelShard
    memory: RankMemory
    max_wait_ms: int = MAX_RANK_WAIT_MS
    nap_ns: int = NAP_NS

    @property
    def naps(self) -> int:
        """Gives the number of times that the rank sleeps in one wait before it ends all ranks; only rank 0 ever
        does."""
        return max(1, self.max_wait_ms * 1_000_000 // self.nap_ns) if self.shard.leads else NEVER


def _partials_at(ranks: int) -> int:
    return _PAGE_BYTES + -(-words_bytes(ranks) // _PAGE_BYTES) * _PAGE_BYTES


def _total(ranks: int, max_tokens: int, row_bytes: int, logit_bytes: int) -> int:
    return _partials_at(ranks) + max_tokens * (TURNS * ranks * row_bytes + logit_bytes)
