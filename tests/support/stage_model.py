"""The stages of one worker in threads of one process, over one pool, with the interface of one backend."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from pillion.engine.adapters.adapter_weights import AdapterWeights
from pillion.engine.backends.backend import PackedAdapter
from pillion.engine.backends.cpu import cpu_model as module
from pillion.engine.backends.cpu.cpu_model import load_cpu_model
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.config_parser import load_config
from pillion.engine.ranks.rank_memory import RankMember, RankMemory
from pillion.engine.stages.cpu_stage import CpuStageBackend, CpuStageRankBackend
from pillion.engine.stages.stage_loading import hidden_bytes
from pillion.engine.stages.stage_rows import StageLink, StageRows
from pillion.engine.stages.stage_shares import StagePlace
from pillion.kernels.cpu.language.isa import choose_isa, host_features
from pillion.kernels.step import StepBatch
from tests.support.kernel_cache import kept_kernels

MAX_TOKENS = 256


class StageGroup:
    """All processes of a worker, each in its own thread: a step passes from one to the next, and the next step may
    follow it."""

    def __init__(self, prepared: PreparedModel, stages: int, ranks: int = 1, kv_cache_dtype: str = "auto") -> None:
        config, isa = load_config(prepared.folder), choose_isa("auto", host_features())
        assert isa is not None
        self.rows = StageRows.create(stages, ranks, MAX_TOKENS, hidden_bytes(config))
        meetings = [RankMemory.create(config, ranks, MAX_TOKENS) for _ in range(stages if ranks > 1 else 0)]
        pairs = [[socket.socketpair() for _ in range(ranks)] for _ in range(stages - 1)]
        self.backends: list[Any] = []
        for process in range(stages * ranks):
            place = StagePlace.of(process, stages, ranks)
            before = pairs[place.stage - 1][place.rank][1] if place.stage else None
            after = pairs[place.stage][place.rank][0] if place.stage < stages - 1 else None
            link, shard = StageLink(place, self.rows, before, after), place.shard(config)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "compile_kernels", kept_kernels)
                model = load_cpu_model(prepared, 16, isa, kv_cache_dtype=kv_cache_dtype, shard=shard)
            if meetings:
                member = RankMember(shard, meetings[place.stage])  # type: ignore[arg-type]
                self.backends.append(CpuStageRankBackend(model, 1, (), None, link, member))
            else:
                self.backends.append(CpuStageBackend(model, 1, (), None, link))
        self.layout, self.vocab_size = self.backends[0].layout, self.backends[0].vocab_size
        self.threads = [ThreadPoolExecutor(1) for _ in self.backends]

    def bind_pool(self, memory: memoryview, num_slots: int) -> None:
        for backend in self.backends:
            backend.bind_pool(memory, num_slots)

    def begin(self, batch: StepBatch) -> list[Future[torch.Tensor]]:
        """Run a step on all processes, after those begun before. No stage returns logits."""
        batch = replace(batch, sample_rows=batch.sample_rows[:0])
        return [
            thread.submit(backend.forward, batch) for thread, backend in zip(self.threads, self.backends, strict=True)
        ]

    def forward(self, batch: StepBatch) -> torch.Tensor:
        *_, last = [future.result() for future in self.begin(batch)]
        return last

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "compile_kernels", kept_kernels)
            for backend in self.backends:
                backend.bind_adapters(max_adapters, max_rank, targets)

    @property
    def adapters(self) -> StageGroup:
        return self

    def pack(self, weights: AdapterWeights) -> list[PackedAdapter]:
        return [backend.adapters.pack(weights) for backend in self.backends]

    def place(self, slot: int, packed: list[PackedAdapter]) -> None:
        for backend, one in zip(self.backends, packed, strict=True):
            backend.adapters.place(slot, one)

    def close(self) -> None:
        for backend in self.backends:
            backend.link.abort()
        for thread in self.threads:
            thread.shutdown()
        for backend in self.backends:
            backend.close()
