"""Decode steps of the whole model, launched one ahead as in a worker, beside the bytes that they must read.

    limit = (weights + KV of all streams) / copy bandwidth

With many streams the products take longer than reading their weights, and do not overlap with attention. Then the
second limit, the sum of the kernels' own limits, is the reachable one.

Steps are also measured without each thing that speeds up decodes: dependent launches, and Pillion's own products of few
rows.
"""

from __future__ import annotations

import contextlib
import statistics

import numpy as np

from lab.benchmarks.gpu.bench import Bench, Row
from lab.benchmarks.gpu.model import Pace, RandomModel, RunningBackend
from lab.benchmarks.gpu.search import trying
from lab.benchmarks.gpu.shapes import Tables, decodes
from pillion.kernels.gpu.launch import arch_of
from pillion.kernels.step import StepBatch

TARGET, HOST_TARGET = "<= 1.15", "<= 0.80"
# Steps in which kernels are compiled outside of graphs.
WARM_STEPS = 5
STEPS = 60
# How steps run, and the constants that replace the tuning file's: a kernel's name and its entry.
KINDS: dict[str, dict[str, dict[str, int]]] = {
    "graphs": {},
    "graphs, kernels begin early": {"dependent_launch": {"on": 1}},
    "graphs, products by cuBLAS": {"plain_product_rows": {"rows": 0, "most_mb": 0}},
    "eager": {},
}


def run(bench: Bench) -> None:
    """Measure each number of streams, with CUDA graphs and without."""
    batches, context = ((2,), 20) if bench.smoke else ((1, 32, 256), 1024)
    warm, steps = (0, 2) if bench.smoke else (WARM_STEPS, STEPS)
    bandwidth = bench.bandwidth
    rates = _rates(bench, batches)
    room = context + warm + steps
    # No larger, or graphs of unused sizes would be captured for each kind.
    tokens = 16 if bench.smoke else max(batches)
    model = RandomModel(bench, max_tokens=tokens, max_seqs=max(batches), max_model_len=room + 64)
    bench.report(Row("weights that a step reads", model.step_bytes / 1e9, "GB"))
    for kind, constants in KINDS.items():
        with contextlib.ExitStack() as stack:
            for kernel, use in constants.items():
                stack.enter_context(trying(kernel, arch_of(bench.device), use))
            # The rest of the pool's blocks is spare.
            running = model.backend(max(batches) * (room + 32), eager=kind == "eager")
            for batch in batches:
                name = f"decode step, {batch} x {context}, {kind}"

                def measure(batch: int = batch, name: str = name, running: RunningBackend = running) -> None:
                    pace = running.pace(decode_steps(running.tables, batch, context, warm + steps))
                    size = model.step_bytes + batch * (context + warm + steps / 2) * model.kv_token_bytes
                    parts_s = _kernels_s(model, batch, bandwidth, rates[batch]) + (size - model.step_bytes) / bandwidth
                    _report(bench, name, pace.after(warm), size / bandwidth, parts_s)

                bench.attempt(name, measure)
            running.close()


def _rates(bench: Bench, batches: tuple[int, ...]) -> dict[int, float]:
    """Measure the FLOP/s of products with a layer's largest weights, by number of rows."""
    inputs, outputs = (32, 96) if bench.smoke else (4096, 28672)
    return {batch: bench.product_rate(batch, inputs, outputs) for batch in batches}


def _kernels_s(model: RandomModel, batch: int, bandwidth: float, rate: float) -> float:
    """Return the sum of the products' limits: reading the weights or computing, whichever takes longer."""
    head = 2.0 * batch * model.shape.hidden * model.shape.vocab
    return max(model.step_bytes / bandwidth, (model.flops(batch) + head) / rate)


def decode_steps(tables: Tables, batch: int, context: int, count: int) -> list[StepBatch]:
    """Return ``count`` steps of the same streams, each one token further; tokens after the first are unknown."""
    last = tables.batch(decodes(batch, context + count))
    unknown = -1 - np.arange(batch, dtype=np.int32)
    found = []
    for step in range(count):
        contexts = np.full(batch, context + step, np.int32)
        found.append(
            StepBatch(
                token_ids=unknown if step else last.token_ids,
                positions=contexts - 1,
                query_starts=last.query_starts,
                context_lens=contexts,
                block_tables=last.block_tables,
                sample_rows=last.sample_rows,
            )
        )
    return found


def _report(bench: Bench, name: str, pace: Pace, limit_s: float, parts_s: float) -> None:
    # Without graphs the host is the limit, so no target.
    target, hidden = (TARGET, HOST_TARGET) if name.endswith("graphs") else ("", "")
    step_s, launch_s = statistics.median(pace.landed), statistics.median(pace.launch)
    more = {
        "limit_ms": limit_s * 1e3,
        "over_limit_by_parts": step_s / parts_s,
        "launch_ms": launch_s * 1e3,
        "launch_max_ms": max(pace.launch) * 1e3,
        "land_ms": statistics.median(pace.land) * 1e3,
        "min_ms": min(pace.landed) * 1e3,
        "max_ms": max(pace.landed) * 1e3,
    }
    if pace.device:
        more["device_ms"] = statistics.median(pace.device) * 1e3
    bench.report(Row(name, step_s * 1e3, "ms", step_s / limit_s, "weights and KV at copy bandwidth", target, more=more))
    # Hidden: the host launches a step while the device runs the previous one.
    bench.report(Row(f"{name}: host's part", launch_s * 1e3, "ms", launch_s / step_s, "the step", hidden))
