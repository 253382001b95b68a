"""Ranks of the fake model: each writes the KV of some positions, so a token is right only if all ranks took part.

As a program (``python -m tests.support.fake_ranks``) it is a rank above 0.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pillion.config import WorkerFlags
from pillion.engine.adapters.adapter_forms import Bytes
from pillion.engine.adapters.adapter_weights import AdapterWeights
from pillion.engine.adapters.plain_adapters import PlainAdapters
from pillion.engine.backends.backend import BackendLost, PackedAdapter
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.ranks import rank_processes
from pillion.engine.ranks.rank_main import LoadedShare, run_rank
from pillion.engine.ranks.rank_processes import RankProcesses
from pillion.engine.ranks.ranked_backend import RankedAheadBackend, RankedBackend
from pillion.errors import ConfigError
from pillion.kernels.step import StepBatch
from tests.support.ahead_backend import AheadBackend
from tests.support.fake_backend import FakeAdapters, FakeBackend, FakeModel, Int64, prepared_model, run

NAP_S = 0.002
LAYER = "layers.0.o"
BLOCK = 4
# Message of a rank that refuses to load; token of which three in a step make one fail.
REFUSED, BROKEN = "refused", 95


class FakeMemory:
    """Memory of ranks with one barrier: a counter per rank after the word that ends all waits."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.fd = descriptor
        self.size = size
        self._words: Int64 = np.frombuffer(mmap.mmap(descriptor, 4096), np.int64)
        self.naps_left = 0

    @classmethod
    def create(cls, size: int) -> FakeMemory:
        descriptor = os.memfd_create("fake-ranks")
        os.ftruncate(descriptor, 4096)
        return cls(descriptor, size)

    def abort(self) -> None:
        self._words[0] = 1

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def meet(self, rank: int, limit_s: float = float("inf")) -> None:
        """Wait for all ranks. Raises BackendLost if they are ended, or one does not arrive within ``limit_s``."""
        words, napped_s = self._words, 0.0
        words[1 + rank] += 1
        while (words[1 : 1 + self.size] < words[1 + rank]).any():
            if words[0] or napped_s > limit_s:
                words[0] = 1
                raise BackendLost("a rank does not come")
            time.sleep(NAP_S)
            napped_s += NAP_S


class ShareAdapters(FakeAdapters):
    """Adapters of which ranks above 0 can pack those of one layer."""

    def pack(self, weights: AdapterWeights) -> PackedAdapter:
        backend = self._backend
        if isinstance(backend, FakeShare) and backend.rank and set(weights.layers) - {LAYER}:
            raise ValueError("this rank cannot pack")
        return super().pack(weights)

    def build(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        return PlainAdapters.build(self, digest, about, data)


class FakeShare(FakeBackend):
    """The share of rank ``rank``: it writes every position of its number, and rank 0 reads all."""

    def __init__(self, rank: int, memory: FakeMemory) -> None:
        super().__init__(BLOCK)
        self.rank, self.memory = rank, memory

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        if self.rank and np.count_nonzero(batch.token_ids == BROKEN) > 2:
            raise ValueError("this rank breaks")
        table, own = pool.numpy().view(np.int64), np.zeros_like(pool.numpy().view(np.int64))
        run(own, replace(batch, sample_rows=batch.sample_rows[:0]))
        mine = own != 0
        mine[:, [column for column in range(BLOCK) if column % self.memory.size != self.rank]] = False
        table[mine] = own[mine]
        self.memory.meet(self.rank, rank_processes.STEP_SILENCE_MS / 1000 if self.rank == 0 else float("inf"))
        if self.rank:
            return torch.zeros(0, self.vocab_size)
        readable = table.copy()
        return super()._run(torch.from_numpy(readable.view(np.uint8)), batch)

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        self.adapters = ShareAdapters(self, max_adapters, max_rank)


class AheadShare(FakeShare, AheadBackend):
    """Rank 0's share on a device that runs ahead."""

    def check_step(self, batch: StepBatch) -> None:  # type: ignore[override]
        """Return True: every batch is supported."""


def fake_ranks(size: int, refused: bool = False, ahead: bool = False) -> LoadedModel:
    """Start ranks of the fake model. The test has set ``rank_processes.MODULE`` to this module. ``ahead``: rank 0's
    device runs ahead."""
    memory = FakeMemory.create(size)
    ranks = RankProcesses(size, "fake", memory)
    order = {"size": size, "log_level": "WARNING", "log_format": "text", "refused": refused}
    with ranks.loading(order, memory.fd):
        own = (AheadShare if ahead else FakeShare)(0, memory)
    backend = RankedAheadBackend(own, ranks) if ahead else RankedBackend(own, ranks)  # type: ignore[arg-type]
    return FakeModel(prepared_model(), backend, ranks=ranks)


def load_ranks(flags: WorkerFlags, threads: int) -> LoadedModel:
    """Return a backend_factory with the flags' number of ranks."""
    return fake_ranks(flags.tensor_parallel_size)


def load_fake_share(order: dict[str, Any], descriptor: int) -> LoadedShare:
    """Load the model in a rank's process."""
    if order["refused"]:
        raise ConfigError(REFUSED)
    memory = FakeMemory(os.dup(descriptor), order["size"])
    return LoadedShare(FakeShare(order["rank"], memory), memory)  # type: ignore[arg-type]


if __name__ == "__main__":
    run_rank(sys.argv[1:], load_fake_share)
