"""Steps of mixtures of experts with random weights, beside their least bytes and products.

    decodes:  limit = (weights outside experts + chosen experts + KV) / copy bandwidth
    a chunk:  limit = the products of its rows at their own rate, or the same bytes, whichever takes longer

Of E experts, B rows that each choose k evenly touch E x (1 - (1 - k / E)^B) on average, plus shared experts. Beside a
model's steps: the products of its experts alone by ``torch.nn.functional.grouped_mm``, which sorts and combines
nothing.

All weights are bfloat16. Matrices of few bits are measured kernel by kernel.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lab.benchmarks.gpu.bench import Bench, Row
from lab.benchmarks.gpu.mixture_shapes import FURTHER, mixtures_of
from lab.benchmarks.gpu.model import RandomModel, RunningBackend
from lab.benchmarks.gpu.shapes import BatchEntry
from lab.benchmarks.gpu.step import decode_steps
from pillion.engine.models.layer_operations import Experts

# Rows of a decode step with its target (times the limit); a chunk's rows, with the same.
DECODES = {1: "<= 1.7", 8: "<= 1.25", 32: "<= 1.15"}
CHUNK, CHUNK_TARGET = 2048, "<= 1.5"
CONTEXT, STEPS, WARM_STEPS, CHUNKS = 1024, 30, 3, 4
SMOKE_DECODES, SMOKE_CHUNK, SMOKE_CONTEXT = {2: ""}, 8, 20
# Side of square matrices whose product has the device's peak rate.
PRODUCT_SIDE = 8192


def run(bench: Bench) -> None:
    """Measure each mixture's steps."""
    side = 64 if bench.smoke else PRODUCT_SIDE
    rate = bench.product_rate(side, side, side)
    for name, config in mixtures_of(bench.smoke).items():
        bench.attempt(name, lambda name=name, config=config: _measure(bench, name, config, rate))  # type: ignore[misc]
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(bench: Bench, name: str, config: Mapping[str, Any], rate: float) -> None:
    goals = name not in FURTHER
    decodes, chunk, context = (SMOKE_DECODES, SMOKE_CHUNK, SMOKE_CONTEXT) if bench.smoke else (DECODES, CHUNK, CONTEXT)
    steps, warm = (2, 0) if bench.smoke else (STEPS, WARM_STEPS)
    room = max(context + warm + steps, chunk) + 64
    model = RandomModel(bench, max_tokens=chunk, max_seqs=max(decodes), max_model_len=room, config=config)
    mixture = _Touched(model, rate)
    running = model.backend(max(decodes) * room)
    try:
        for rows, target in decodes.items():
            pace = running.pace(decode_steps(running.tables, rows, context, warm + steps)).after(warm)
            limit_s = mixture.bytes_of(rows, context) / bench.bandwidth
            _report(
                bench,
                f"{name}, decode step of {rows}",
                statistics.median(pace.landed),
                limit_s,
                target if goals else "",
            )
            _report_grouped(bench, name, mixture, rows)
        took_s = _chunk_s(running, chunk, 1 if bench.smoke else CHUNKS)
        limit_s = max(mixture.bytes_of(chunk, 0) / bench.bandwidth, mixture.product_s(chunk))
        _report(bench, f"{name}, chunk of {chunk}", took_s, limit_s, CHUNK_TARGET if goals else "")
        _report_grouped(bench, name, mixture, chunk)
    finally:
        running.close()


def _chunk_s(running: RunningBackend, chunk: int, count: int) -> float:
    """Return the median seconds of a prompt of one chunk."""
    step = running.tables.batch([BatchEntry(chunk, 0)])
    pace = running.pace([step] * (count + 2))
    return statistics.median((pace.device or pace.landed)[-count:])


class _Touched:
    """Bytes read and products computed by steps of a mixture, from the plan of its weights."""

    def __init__(self, model: RandomModel, rate: float) -> None:
        self._model, self._rate = model, rate
        layers = model.model.layers.values()
        how = next(each for layer in layers for each in layer.operations if isinstance(each, Experts))
        self._per_token = how.per_token
        places = model.weights.plan.places
        # A layer's experts are one tensor of three dimensions, [experts, outputs, inputs].
        self.stacked = {name: place.shape for name, place in places.items() if len(place.shape) == 3}
        self._expert_bytes = sum(places[name].nbytes for name in self.stacked)
        self.experts = next(iter(self.stacked.values()))[0]
        # Shared experts, at the end of the stacks.
        self._always = self.experts - how.router.shape[0]

    def bytes_of(self, rows: int, context: int) -> float:
        """Return the bytes of weights and KV that a step of ``rows`` rows reads, with even routing."""
        chosen = self.experts - self._always
        touched = self._always + chosen * (1.0 - (1.0 - self._per_token / chosen) ** rows)
        model, share = self._model, touched / self.experts
        return model.step_bytes - (1.0 - share) * self._expert_bytes + rows * context * model.kv_token_bytes

    def product_s(self, rows: int) -> float:
        """Return the seconds of the products of ``rows`` rows at the device's rate, without attention."""
        model = self._model
        others = (model.step_bytes - self._expert_bytes) / 2
        expert = self._expert_bytes / 2 / self.experts
        # Logits are of one row, and the head is a small part of a model.
        return (
            2.0
            * rows
            * (others - model.weights["lm_head"].numel() + (self._per_token + self._always) * expert)
            / self._rate
        )

    def grouped(self, rows: int) -> Callable[[], None]:
        """Return a call that multiplies sorted rows by all layers' experts, with torch's grouped products."""
        pairs, device = rows * (self._per_token + self._always), self._model.bench.device
        chosen = torch.randint(self.experts, (pairs,), device=device)
        ends = torch.bincount(chosen, minlength=self.experts).cumsum(0).int()
        lefts = {width: torch.randn(pairs, width, device=device).bfloat16() for _, _, width in self.stacked.values()}
        weights = [(lefts[shape[2]], self._model.weights[name].transpose(1, 2)) for name, shape in self.stacked.items()]

        def run() -> None:
            for left, weight in weights:
                torch.nn.functional.grouped_mm(left, weight, offs=ends)

        return run


def _report(bench: Bench, name: str, took_s: float, limit_s: float, target: str) -> None:
    more = {"limit_ms": limit_s * 1e3}
    bench.report(Row(name, took_s * 1e3, "ms", took_s / limit_s, "its limit", target, more=more))


def _report_grouped(bench: Bench, name: str, mixture: _Touched, rows: int) -> None:
    def measure() -> None:
        times = bench.time([mixture.grouped(rows)])
        bench.report(Row(f"{name}, experts of {rows} rows by torch", times.median_s * 1e3, "ms"))

    bench.attempt(f"{name}, experts of {rows} rows by torch", measure)
