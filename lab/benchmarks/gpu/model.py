"""A whole model with random weights behind the engine's own backend, for the sections on steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from lab.benchmarks.gpu.bench import Bench
from lab.benchmarks.gpu.calls import sampled_rows
from lab.benchmarks.gpu.shapes import LlamaShape, Tables, shape_of
from pillion.engine.backends.backend import KVLayout
from pillion.engine.backends.gpu.gpu_backend import GpuBackend, GpuLimits
from pillion.engine.backends.gpu.gpu_model import GpuModel
from pillion.engine.backends.gpu.gpu_weights import GpuWeights, plan_weights
from pillion.engine.models.config_parser import parse_config
from pillion.engine.models.model_shard import whole_model
from pillion.kernels.step import SamplingRows, StepBatch

BLOCK_SIZE = 16
# Steps in flight: the running one and the next.
AHEAD = 2


class TensorPool:
    """A pool in this process's GPU memory, in place of ``pillion.engine.backends.gpu.device_memory.DevicePool``."""

    divided = False

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        # Random, since operands determine a product's power, and so the clock rate.
        self._memory = torch.empty(size_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
        self.address, self.size_bytes = self._memory.data_ptr(), size_bytes

    def close(self) -> None:
        """The memory goes with this object."""


class RandomModel:
    """Random weights with buffers, for backends made and closed one after the other."""

    def __init__(
        self,
        bench: Bench,
        *,
        max_tokens: int,
        max_seqs: int,
        max_model_len: int,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """``config``: content of another model's config.json than Llama's."""
        self.bench, self.shape = bench, shape_of(bench.smoke)
        self.config = parse_config(config or self.shape.config())
        plan = plan_weights(self.config, torch.bfloat16, whole_model(self.config), separate_head=True)
        memory = torch.empty(plan.nbytes, dtype=torch.uint8, device=bench.device)
        self.weights = GpuWeights(self.config, plan, memory, torch.bfloat16)
        self.weights.fill_dummy()
        self.limits = GpuLimits(
            max_tokens=max_tokens, max_seqs=max_seqs, max_samples=max_seqs, max_model_len=max_model_len
        )
        self.model = GpuModel(self.weights, max_model_len, max_tokens, max_tokens, max_samples=max_seqs)
        # A step reads all weights except for most rows of the embedding.
        self.step_bytes = plan.nbytes - plan.places["embedding"].nbytes

    @property
    def layout(self) -> KVLayout:
        config = self.config
        return KVLayout(
            "bench",
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            BLOCK_SIZE,
            "bfloat16",
            planes=config.kv_planes,
            layers=config.kv_places,
        )

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.layout.block_bytes // BLOCK_SIZE

    def backend(self, tokens: int, *, eager: bool = False) -> RunningBackend:
        """Make a backend over a pool of ``tokens`` tokens, and warm it up."""
        slots = -(-tokens // BLOCK_SIZE)
        backend = GpuBackend(self.model, self.layout, self.limits, enforce_eager=eager)
        size = slots * self.layout.block_bytes
        if self.bench.device.type == "cuda":
            backend.bind_pool(TensorPool(size, self.bench.device), slots)
        else:
            backend.bind_pool(memoryview(bytearray(size)), slots)
        backend.warm_up(self.limits.max_tokens)
        return RunningBackend(backend, Tables(slots, BLOCK_SIZE), self.bench)

    def flops(self, tokens: int, *, shape: LlamaShape | None = None) -> float:
        """Return the floating-point operations of a Llama's layers' products."""
        shape = shape or self.shape
        return 2.0 * tokens * shape.layers * sum(a * b for a, b in shape.products.values())


@dataclass(slots=True)
class Pace:
    """Seconds of each of some steps.

    ``landed``: between two landings; ``launch``, ``land``: the host's time; ``device``: between the ends of two steps
    on the device (empty on the CPU).
    """

    landed: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    land: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)

    def after(self, steps: int) -> Pace:
        return Pace(self.landed[steps:], self.launch[steps:], self.land[steps:], self.device[steps:])


class RunningBackend:
    """A backend with its pool."""

    def __init__(self, backend: GpuBackend, tables: Tables, bench: Bench) -> None:
        self.backend, self.tables, self._bench = backend, tables, bench

    def pace(self, batches: list[StepBatch], rows: list[SamplingRows] | None = None) -> Pace:
        """Run the batches in order, each launched before the previous one has landed; return their times."""
        found, out, ends = Pace(), deque[Any](), []
        rows = rows or [sampled_rows(len(batch.sample_rows)) for batch in batches]
        last_s = 0.0
        for batch, sampling in zip(batches, rows, strict=True):
            began_s = time.perf_counter()
            out.append(self.backend.launch(batch, (), sampling))
            found.launch.append(time.perf_counter() - began_s)
            if self._bench.device.type == "cuda":
                ends.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
                ends[-1].record()
            if len(out) == AHEAD:
                last_s = self._land(out, found, last_s)
        while out:
            last_s = self._land(out, found, last_s)
        self._bench.wait()
        found.device = [a.elapsed_time(b) / 1e3 for a, b in pairwise(ends)]
        return found

    def close(self) -> None:
        """Release the graphs and the pool."""
        self.backend.close()

    def _land(self, out: deque[Any], found: Pace, last_s: float) -> float:
        began_s = time.perf_counter()
        out.popleft().wait()
        now_s = time.perf_counter()
        found.land.append(now_s - began_s)
        if last_s:
            found.landed.append(now_s - last_s)
        return now_s
