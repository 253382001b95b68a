"""Several ranks of one worker in threads of one process, over one pool, with the interface of one backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pillion.engine.adapters.adapter_weights import AdapterWeights
from pillion.engine.backends.backend import PackedAdapter
from pillion.engine.backends.cpu import cpu_model as module
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.backends.cpu.cpu_model import load_cpu_model
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.ranks.cpu_rank import CpuRankBackend
from pillion.engine.ranks.rank_memory import NAP_NS, RankMember, RankMemory
from pillion.kernels.cpu.language.isa import choose_isa, host_features
from pillion.kernels.step import StepBatch
from tests.support.kernel_cache import kept_kernels

MAX_TOKENS = 1024


class RankGroup:
    """All ranks of a worker. ``backends[0]`` is the one that samples."""

    def __init__(
        self,
        prepared: PreparedModel,
        size: int,
        block_size: int = 16,
        threads: Sequence[int] = (1,),
        kv_cache_dtype: str = "auto",
        checked: bool | None = None,
        max_wait_ms: int = 60_000,
        max_tokens: int = MAX_TOKENS,
        nap_ns: int = NAP_NS,
    ) -> None:
        """Create the ranks. ``threads``: per rank; the last number applies to all further ranks."""
        config, isa = load_config(prepared.folder), choose_isa("auto", host_features())
        assert isa is not None
        self.memory = RankMemory.create(config, size, max_tokens)
        self.members = [
            RankMember(ModelShard.of(config, rank, size), self.memory, max_wait_ms, nap_ns) for rank in range(size)
        ]
        self.backends = []
        for rank, member in enumerate(self.members):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "compile_kernels", kept_kernels)
                model = load_cpu_model(
                    prepared, block_size, isa, kv_cache_dtype=kv_cache_dtype, checked=checked, shard=member.shard
                )
            self.backends.append(CpuRankBackend(model, threads[min(rank, len(threads) - 1)], member=member))
        self.threads = ThreadPoolExecutor(size)

    @property
    def layout(self) -> Any:
        return self.backends[0].layout

    @property
    def vocab_size(self) -> int:
        return self.backends[0].vocab_size

    @property
    def max_adapters(self) -> int:
        return self.backends[0].adapters.max_adapters

    def every(self, call: Callable[[CpuBackend], Any]) -> list[Any]:
        """Call all backends concurrently; raise the first error."""
        futures = [self.threads.submit(call, backend) for backend in self.backends]
        return [future.result() for future in futures]

    def bind_pool(self, memory: memoryview, num_slots: int) -> None:
        self.every(lambda backend: backend.bind_pool(memory, num_slots))

    def forward(self, batch: StepBatch) -> torch.Tensor:
        found: torch.Tensor = self.every(lambda backend: backend.forward(batch))[0]
        self.memory.check_integrity()
        return found

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "compile_kernels", kept_kernels)
            for backend in self.backends:
                backend.bind_adapters(max_adapters, max_rank, targets)

    @property
    def adapters(self) -> RankGroup:
        return self

    def pack(self, weights: AdapterWeights) -> list[PackedAdapter]:
        return [backend.adapters.pack(weights) for backend in self.backends]

    def place(self, slot: int, packed: list[PackedAdapter]) -> None:
        for rank, backend in enumerate(self.backends):
            backend.adapters.place(slot, packed[rank])

    def check_integrity(self) -> None:
        self.memory.check_integrity()
        for backend in self.backends:
            backend.check_integrity()

    def close(self) -> None:
        self.threads.shutdown()
        for backend in self.backends:
            backend.close()
        self.memory.close()
