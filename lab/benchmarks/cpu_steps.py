"""Batches and timers for steps of a CPU backend without a service."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lab.benchmarks.cpu_limits import PeakDots, ReadAll
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.backends.cpu.cpu_model import load_cpu_model
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import choose_isa, host_features
from pillion.kernels.cpu.language.module import KernelSpec
from pillion.kernels.cpu.runtime.compiler import compile_kernels
from pillion.kernels.cpu.runtime.program import Operation, aligned_bytes
from pillion.kernels.step import StepBatch

BLOCK_SIZE = 16
SLOTS = 1280
PAGE_BYTES = 4096
# bfloat16 fill of the pool, neither denormal nor overflowing.
FILLED_WITH = 0x3C00
SINK_THREADS = 256
PEAK_ROUNDS = 1_000_000


class CpuStepBench:
    """A backend over a filled pool; sequences get blocks in random order."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        pool = aligned_bytes(SLOTS * backend.layout.block_bytes, PAGE_BYTES)
        pool.view(np.uint16)[:] = FILLED_WITH
        backend.bind_pool(pool.data, SLOTS)
        self._order = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)

    def decode(self, batch: int, context: int) -> StepBatch:
        """Return a step of ``batch`` streams at token number ``context``, with all logits."""
        blocks = -(-context // BLOCK_SIZE)
        tables = self._order[np.arange(batch * blocks) % SLOTS].reshape(batch, blocks)
        return StepBatch(
            token_ids=np.full(batch, 5, np.int32),
            positions=np.full(batch, context - 1, np.int32),
            query_starts=np.arange(batch + 1, dtype=np.int32),
            context_lens=np.full(batch, context, np.int32),
            block_tables=tables.copy(),
            sample_rows=np.arange(batch, dtype=np.int32),
        )

    def chunk(self, tokens: int, prefix: int, sample: bool = False) -> StepBatch:
        """Return a step with a chunk of a prompt after ``prefix`` tokens."""
        blocks = -(-(tokens + prefix) // BLOCK_SIZE)
        return StepBatch(
            token_ids=np.full(tokens, 5, np.int32),
            positions=np.arange(prefix, prefix + tokens, dtype=np.int32),
            query_starts=np.array([0, tokens], np.int32),
            context_lens=np.array([tokens + prefix], np.int32),
            block_tables=self._order[:blocks].reshape(1, blocks).copy(),
            sample_rows=np.array([tokens - 1] if sample else [], np.int32),
        )

    def seconds(self, batch: StepBatch, repeats: int) -> list[float]:
        """Return the seconds of ``repeats`` steps, after an untimed one."""
        self.backend.forward(batch)
        found = []
        for _ in range(repeats):
            begin = time.perf_counter()
            self.backend.forward(batch)
            found.append(time.perf_counter() - begin)
        return found


def kernels_bench(
    prepared: PreparedModel,
    threads: int,
    kernels: str = "auto",
    kv_cache_dtype: str = "auto",
) -> CpuStepBench:
    """Return a bench of the CPU kernels. Raises ConfigError if this processor has none."""
    isa = choose_isa(kernels, host_features())
    if isa is None:
        raise ConfigError("there are no kernels for this processor")
    model = load_cpu_model(prepared, BLOCK_SIZE, isa, kv_cache_dtype=kv_cache_dtype)
    specs = [operation.spec for operation in model.plan.operations]
    limits: list[KernelSpec] = [*map(PeakDots, ("bf16", "fp32", "int8")), ReadAll()]
    return CpuStepBench(CpuBackend(replace(model, kernels=compile_kernels([*specs, *limits], isa)), threads))


def limits_of(backend: CpuBackend, threads: int) -> tuple[float, float]:
    """Measure the max operations and bytes per second: products in registers, and a read of the packed weights."""
    sink = np.ones(16 * SINK_THREADS, np.float32)
    data = backend.model.weights.linear("lm_head").data
    size = data.numel() * data.element_size() // 65536 * 65536
    read = backend.again([Operation(ReadAll(), {"data": data, "sink": sink, "bytes": size})])
    rows = {"bfloat16": "bf16", "float32": "fp32"}[backend.model.dtype]
    return dots_rate(backend, threads, rows), size / fastest(read, 5)


def dots_rate(backend: CpuBackend, threads: int, rows: str) -> float:
    """Measure the max operations per second of products in registers, for rows of a type of :class:`PeakDots`."""
    dots, sink = PeakDots(rows), np.ones(16 * SINK_THREADS, np.float32)
    multiply = backend.again([Operation(dots, {"sink": sink, "rounds": PEAK_ROUNDS})])
    return dots.operations(backend.model.isa) * PEAK_ROUNDS * threads / fastest(multiply, 5)


def fastest(call: Callable[[], None], repeats: int) -> float:
    """Return the seconds of the fastest of ``repeats`` runs, after an untimed one."""
    call()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best
