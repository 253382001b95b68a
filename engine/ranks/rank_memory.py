"""Shared memory of a worker's ranks on one host, for the partial sums and logits of a step, and for waits.

    rank 0: RankMemory.create --> its descriptor --> ranks 1 ..: RankMemory.open --> steps --> close
                                                     any process, at any time: abort

An anonymous memfd, zeroed; untouched pages take no memory:

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

# Max sleep of a waiting rank before it checks again.
NAP_NS = 20_000_000
# Max wait of rank 0 within a step, after which all ranks end. Counted in naps, so that time in which rank 0 itself was
# stopped does not count.
MAX_RANK_WAIT_MS = 60_000
NEVER = 2**62
_MAGIC = int.from_bytes(b"RANKMEM1", "little")
_PAGE_BYTES = 4096
# Number of buffers for partials, used in turn: with two, all ranks have read a buffer before it is overwritten.
TURNS = 2
_FIELDS = ("ranks", "max_tokens", "row_bytes", "logit_bytes")
Bytes = npt.NDArray[np.uint8]


def partial_row_bytes(config: ModelConfig) -> int:
    """Return the bytes of a row of partial sums: float32, whole panels of a product, and an odd number of cache lines
    (against set conflicts)."""
    return (-(-config.hidden_size // 32) * 2 | 1) * 64


def logit_row_bytes(config: ModelConfig) -> int:
    """Return the bytes of a row of logits: float32, padded to whole vectors."""
    return -(-config.vocab_size // 32) * 32 * 4


class RankMemory:
    """Mapping of the memory shared by ``ranks`` ranks, for steps of up to ``max_tokens`` rows."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory of a descriptor, and own the descriptor. Raises ConfigError if it is not a RankMemory."""
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        mapped = mmap.mmap(descriptor, size) if size >= _PAGE_BYTES else b"\0" * _PAGE_BYTES
        self._bytes: Bytes = np.frombuffer(mapped, np.uint8)
        magic, *numbers = self._bytes[: 8 * (1 + len(_FIELDS))].view(np.int64).tolist()
        self.ranks, self.max_tokens, self.row_bytes, self.logit_bytes = numbers
        if magic != _MAGIC or min(numbers) < 1 or size != _total(*numbers):
            raise ConfigError("this is not the memory of ranks")
        self._words: npt.NDArray[np.int64] = self._bytes[_PAGE_BYTES : _partials_at(self.ranks)].view(np.int64)

    @classmethod
    def create(cls, config: ModelConfig, ranks: int, max_tokens: int) -> RankMemory:
        """Create the memory for steps of up to ``max_tokens`` rows. Raises ConfigError on OOM."""
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
        """Map the memory of a descriptor, and own the descriptor. Raises ConfigError, without owning it, if it cannot
        be mapped or is not a RankMemory."""
        try:
            return cls(descriptor)
        except OSError as error:
            raise ConfigError(f"the memory of ranks cannot be mapped: {error.strerror}") from None

    @property
    def fd(self) -> int:
        """Descriptor of the memory, to pass to other ranks."""
        return self._descriptor

    def abort(self) -> None:
        """End all current and future waits of all ranks, at the latest after a nap. Any thread may call it before
        :meth:`close`."""
        self._words[ABORT // 8] = 1

    @property
    def aborted(self) -> bool:
        """True after :meth:`abort`, in any process: results of steps are invalid, and the ranks must end."""
        return bool(self._words[ABORT // 8])

    @property
    def words(self) -> Bytes:
        """Words by which ranks wait for each other."""
        return self._words.view(np.uint8)

    def phase(self, rank: int) -> int:
        """Return the last phase at which a rank has arrived."""
        return int(self._words[self._place(rank, ARRIVED)])

    def sleepers(self, rank: int) -> int:
        """Return the number of ranks sleeping until this one arrives."""
        return int(self._words[self._place(rank, SLEEPERS)])

    def partials(self, turn: int) -> Bytes:
        """Return the partials of all ranks in a turn, [ranks][max_tokens][row_bytes]."""
        size = self.ranks * self.rank_bytes
        first = _partials_at(self.ranks) + turn * size
        return self._bytes[first : first + size]

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank's partial sums in a turn."""
        return int(self.max_tokens * self.row_bytes)

    @property
    def logits(self) -> Bytes:
        """The logits, [max_tokens][logit_bytes]."""
        return self._bytes[len(self._bytes) - self.max_tokens * self.logit_bytes :]

    def check_integrity(self) -> None:
        """Raise Internal unless all ranks have arrived at the same phase and none sleeps. Call it between steps, after
        every rank's forward pass has returned."""
        phases = [self.phase(rank) for rank in range(self.ranks)]
        sleepers = [self.sleepers(rank) for rank in range(self.ranks)]
        if not self.aborted and (len(set(phases)) > 1 or any(sleepers)):
            raise Internal(f"ranks are at phases {phases}, with {sleepers} others waiting for them")

    def close(self) -> None:
        """Close the memory's descriptor; the mapping lives until its last user. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    @staticmethod
    def _place(rank: int, word: int) -> int:
        return ((1 + rank) * RANK_LINE_BYTES + word) // 8


@dataclass(frozen=True, slots=True)
class RankMember:
    """A rank on the CPU: its shard of the model, and the memory of all ranks. Rank 0 waits for another rank up to
    ``max_wait_ms``, in naps of ``nap_ns``, before it ends them all."""

    shard: ModelShard
    memory: RankMemory
    max_wait_ms: int = MAX_RANK_WAIT_MS
    nap_ns: int = NAP_NS

    @property
    def naps(self) -> int:
        """Max naps of one wait before the rank ends all ranks; only rank 0 ever does."""
        return max(1, self.max_wait_ms * 1_000_000 // self.nap_ns) if self.shard.leads else NEVER


def _partials_at(ranks: int) -> int:
    return _PAGE_BYTES + -(-words_bytes(ranks) // _PAGE_BYTES) * _PAGE_BYTES


def _total(ranks: int, max_tokens: int, row_bytes: int, logit_bytes: int) -> int:
    return _partials_at(ranks) + max_tokens * (TURNS * ranks * row_bytes + logit_bytes)
