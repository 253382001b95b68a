"""The CPU kernels beside their limits: decode and prefill steps, attention beside a streaming read, host overhead.

Rounds alternate between bfloat16, int8 and int4 weights and torch, so that a drift of the machine's speed meets all of
them; a figure is the median of its rounds' medians, with the least and the greatest one. The limits are measured in the
same rounds: for attention a kernel that reads the same bytes in the same pieces and order, for a single stream's step
the rate at which all threads read its weights, and for a chunk the rate of products in registers.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

from rich.table import Table

from benchmarks.cpu_steps import (
    BLOCK_SIZE,
    CpuStepBench,
    attention_alone,
    fastest,
    kernels_bench,
    limits_of,
    torch_bench,
)
from benchmarks.report import save, show_table, spread
from benchmarks.step import DecodeLoop
from pillion.config import ModelFlags
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.checkpoints.prepare import prepare
from pillion.types import SamplingParams
from testbed.plain_model import plain_folder

CONTEXT_TOKENS = 264
CHUNK_TOKENS = 256
PREFIX_TOKENS = 768
# The CPU engine's targets on two cores with AVX-512 BF16, in ms and tokens/s.
TARGETS = {
    "decode 1": 5.5,
    "decode 16": 10.5,
    "decode 32": 19.0,
    "prefill 256": 4000.0,
    "prefill 256 behind 768": 3300.0,
    "int8 decode 1": 3.5,
}
DECODES = (1, 2, 4, 8, 16, 32)


def cases(bench: CpuStepBench) -> dict[str, tuple[Any, int, float]]:
    """Return by name the batch, the repeats, and the tokens of a rate (0: the figure is a time)."""
    found: dict[str, tuple[Any, int, float]] = {
        f"decode {batch}": (bench.decode(batch, CONTEXT_TOKENS), 15, 0.0) for batch in DECODES
    }
    found["decode 16 at 1024"] = (bench.decode(16, 1024), 9, 0.0)
    found["decode 1 at 8192"] = (bench.decode(1, 8192), 9, 0.0)
    found["prefill 256"] = (bench.chunk(CHUNK_TOKENS, 0), 5, CHUNK_TOKENS)
    found["prefill 256 behind 768"] = (bench.chunk(CHUNK_TOKENS, PREFIX_TOKENS), 5, CHUNK_TOKENS)
    found["prefill 512 behind 512"] = (bench.chunk(512, 512), 5, 512.0)
    return found


def measure_steps(engines: dict[str, CpuStepBench], rounds: int) -> dict[str, dict[str, Any]]:
    """Return the figures of every engine and case: ms, or tokens/s of a prefill."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for number in range(rounds):
        for name, bench in engines.items():
            for case, (batch, repeats, tokens) in cases(bench).items():
                few = repeats if name != "torch" else max(3, repeats // 3)
                middle = statistics.median(bench.seconds(batch, few))
                found[name].setdefault(case, []).append(tokens / middle if tokens else middle * 1000)
        print(f"round {number + 1} of {rounds} done", flush=True)
    return {name: {case: spread(values) for case, values in by_case.items()} for name, by_case in found.items()}


def measure_attention(bench: CpuStepBench, rounds: int) -> list[dict[str, Any]]:
    """Measure the decode attention of all layers beside a streaming read of the same bytes."""
    rows = []
    backend: CpuBackend = bench.backend
    for batch, context in ((16, CONTEXT_TOKENS), (16, 1024), (1, 8192)):
        step = bench.decode(batch, context)
        backend.forward(step)
        run_attention, run_read = attention_alone(backend)
        shares, attends, streams = [], [], []
        for _ in range(rounds * 3):
            attend, stream = fastest(run_attention, 5), fastest(run_read, 5)
            attends.append(attend * 1000)
            streams.append(stream * 1000)
            shares.append(stream / attend)
        rows.append(
            {
                "batch": batch,
                "context": context,
                "attention_ms": spread(attends),
                "stream_ms": spread(streams),
                "share_of_stream": spread(shares),
            }
        )
    return rows


def measure_host(bench: CpuStepBench, batch: int, steps: int) -> dict[str, Any]:
    """Measure the share of a step outside of the kernels: schedule, build, plan, sample, commit."""
    sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=1)
    loop = DecodeLoop(bench.backend, BLOCK_SIZE, batch, CONTEXT_TOKENS, sampling)
    loop.step()
    shares, phases = [], []
    for _ in range(steps):
        times = loop.step()
        inside = bench.backend.kernel_seconds
        shares.append(1 - inside / sum(times.values()))
        phases.append({**{name: value * 1000 for name, value in times.items()}, "kernels": inside * 1000})
    middle = {name: statistics.median(phase[name] for phase in phases) for name in phases[0]}
    return {"batch": batch, "share": spread(shares), "ms": middle}


def set_against_limits(backend: CpuBackend, threads: int, steps: dict[str, Any], rounds: int) -> dict[str, float]:
    """Measure the limits of processor and memory, and the shares that prefill and a single stream's step reach."""
    found = [limits_of(backend, threads) for _ in range(rounds)]
    operations, rate = (statistics.median(values) for values in zip(*found, strict=True))
    config = backend.model.config
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * config.head_dim * (heads + config.num_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    products = 2 * layer * config.num_layers * steps["prefill 256"]["median"]
    weights = (layer * config.num_layers + config.hidden_size * config.vocab_size) * 2
    return {
        "peak_operations_per_s": operations,
        "read_bytes_per_s": rate,
        "prefill_share_of_peak": products / operations,
        "decode_1_share_of_read": weights / (steps["decode 1"]["median"] / 1000) / rate,
    }


def show(steps: dict[str, dict[str, Any]], attention: list[dict[str, Any]], host: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table(title="steps: ms, prefill tokens/s; median of rounds (least .. greatest)")
    for heading in ("case", *steps, "target"):
        table.add_column(heading, justify="right")
    for case in next(iter(steps.values())):
        cells = [_cell(by_case[case]) for by_case in steps.values()]
        table.add_row(case, *cells, str(TARGETS.get(case, "")))
    show_table(table)
    table = Table(title="decode attention beside a streaming read of the same bytes, all layers")
    for heading in ("streams", "context", "attention ms", "read ms", "share of the read's rate"):
        table.add_column(heading, justify="right")
    for row in attention:
        cells = [_cell(row[key]) for key in ("attention_ms", "stream_ms", "share_of_stream")]
        table.add_row(str(row["batch"]), str(row["context"]), *cells)
    show_table(table)
    phases = ", ".join(f"{name} {value:.3f}" for name, value in host["ms"].items())
    print(f"outside the kernels at {host['batch']} streams: {_cell(host['share'])}; ms: {phases}")


def _cell(found: dict[str, float]) -> str:
    return f"{found['median']:.4g} ({found['min']:.4g} .. {found['max']:.4g})"


def load(model: str, threads: int) -> dict[str, CpuStepBench]:
    """Return the engines that are measured side by side: plain weights, quantized ones, and torch."""
    folder = str(plain_folder(model))
    prepared = {kind: prepare(ModelFlags(model=folder, quantization=kind), print) for kind in ("none", "int8", "int4")}
    return {
        "bf16": kernels_bench(prepared["none"], threads),
        "int8": kernels_bench(prepared["int8"], threads),
        "int4": kernels_bench(prepared["int4"], threads),
        "torch": torch_bench(prepared["none"], threads),
    }


def main() -> None:
    """Measure, print, write results/cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    engines = load(args.model, args.threads)
    steps = measure_steps(engines, args.rounds)
    attention = measure_attention(engines["bf16"], args.rounds)
    host = measure_host(engines["bf16"], 16, 40)
    limits = set_against_limits(engines["bf16"].backend, args.threads, steps["bf16"], args.rounds)
    show(steps, attention, host)
    print(", ".join(f"{name} {value:.4g}" for name, value in limits.items()))
    save(
        "cpu",
        {
            "model": args.model,
            "threads": args.threads,
            "context_tokens": CONTEXT_TOKENS,
            "rounds": args.rounds,
            "steps": steps,
            "attention": attention,
            "host": host,
            "targets": TARGETS,
            "limits": limits,
        },
    )


if __name__ == "__main__":
    main()
