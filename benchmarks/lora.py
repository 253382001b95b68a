"""What adapters cost: steps of the CPU kernels with LoRA adapters beside the same steps without them.

Each pair of steps is run in turn, so that what else runs on the machine slows both; the share of the rate that is left
is the median of the rounds' shares. The adapters change every projection. "Enabled" is a backend with places for
adapters that runs a step without any, beside a backend that has none. Steps are also timed while another thread, which
gives way as that of a worker does, packs one adapter after another.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.cpu_steps import CpuStepBench, kernels_bench
from benchmarks.report import save, show_table
from pillion.config import DTYPE_CHOICES, ModelFlags
from pillion.cores import give_way
from pillion.engine.adapters.adapter_weights import AdapterWeights
from pillion.engine.backends.batch import StepBatch
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from testbed.plain_model import plain_folder
from testbed.random_adapter import random_adapter

CONTEXT_TOKENS = 264
STREAMS, ADAPTERS = 16, 8
CHUNK_TOKENS = 256
# Between two adapters that are packed beside steps.
PAUSE_S = 0.02


def with_places(batch: StepBatch, places: list[int]) -> StepBatch:
    """Return the step with an adapter's place for each sequence."""
    return replace(batch, adapters=np.array(places, np.int32))


def in_turn(base: Callable[[], Any], other: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of both, and the median of the rounds' ratios base / other, which is the share of
    the base's rate that is left."""
    base()
    other()
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        begin = time.perf_counter()
        base()
        middle = time.perf_counter()
        other()
        times.append((middle - begin, time.perf_counter() - middle))
    milliseconds = [statistics.median(column) * 1000 for column in zip(*times, strict=True)]
    ratio = statistics.median(first / second for first, second in times)
    least = min(first for first, _ in times) / min(second for _, second in times)
    return {"base_ms": milliseconds[0], "ms": milliseconds[1], "ratio": ratio, "ratio_of_least": least}


def loading(bench: CpuStepBench, batch: StepBatch, weights: AdapterWeights, rounds: int) -> dict[str, float]:
    """Return the 99th percentile of a step's milliseconds alone, and while another thread packs adapters which this one
    then places between steps."""
    alone = bench.seconds(batch, rounds)
    packed: list[Any] = []
    stop = threading.Event()

    def pack() -> None:
        give_way()
        while not stop.is_set():
            packed.append(bench.backend.pack_adapter(weights))
            stop.wait(PAUSE_S)

    thread = threading.Thread(target=pack)
    thread.start()
    beside, placing = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        if packed:
            bench.backend.place_adapter(ADAPTERS - 1, packed.pop())
            placing.append(time.perf_counter() - begin)
        bench.backend.forward(batch)
        beside.append(time.perf_counter() - begin)
    stop.set()
    thread.join()
    p99, p99_beside = (float(np.quantile(times, 0.99)) * 1000 for times in (alone, beside))
    return {
        "base_ms": p99,
        "ms": p99_beside,
        "ratio": p99 / p99_beside,
        "place_ms": max(placing, default=0.0) * 1000,
        "loads": float(len(placing)),
    }


def measure(prepared: PreparedModel, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the figures of each comparison."""
    bare = kernels_bench(prepared, args.threads, args.kernels)
    bench = kernels_bench(prepared, args.threads, args.kernels)
    backend, config = bench.backend, bench.backend.model.config
    backend.bind_adapters(ADAPTERS, args.rank)
    dtype = torch.bfloat16 if prepared.dtype == "bfloat16" else torch.float32
    pack_s = []
    for place in range(ADAPTERS):
        weights = random_adapter(config, place, (args.rank,), dtype)
        begin = time.perf_counter()
        packed = backend.pack_adapter(weights)
        pack_s.append(time.perf_counter() - begin)
        backend.place_adapter(place, packed)
    print(f"an adapter takes {packed.nbytes / 2**20:.1f} MiB and {statistics.median(pack_s) * 1000:.0f} ms to pack")
    decode, chunk = bench.decode(STREAMS, CONTEXT_TOKENS), bench.chunk(CHUNK_TOKENS, 0)
    every = [stream % ADAPTERS for stream in range(STREAMS)]
    rounds = args.rounds

    def compare(batch: StepBatch, places: list[int]) -> dict[str, float]:
        adapted = with_places(batch, places)
        return in_turn(lambda: backend.forward(batch), lambda: backend.forward(adapted), rounds)

    return {
        f"{STREAMS} streams, LoRA enabled": in_turn(
            lambda: bare.backend.forward(decode), lambda: backend.forward(decode), rounds
        ),
        f"{STREAMS} streams over {ADAPTERS} adapters": compare(decode, every),
        f"{STREAMS} streams, all with one adapter": compare(decode, [0] * STREAMS),
        f"{STREAMS} streams, one with an adapter": compare(decode, [0] + [-1] * (STREAMS - 1)),
        "1 stream": compare(bench.decode(1, CONTEXT_TOKENS), [0]),
        f"a chunk of {CHUNK_TOKENS} tokens": compare(chunk, [0]),
        f"p99 of {STREAMS} streams beside a load": loading(bench, with_places(decode, every), weights, 10 * rounds),
    }


def main() -> None:
    """Measure, print a table, write results/lora-KERNELS.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantized", action="store_true", help="the model in the few bits of its file")
    parser.add_argument("--dtype", default="auto", choices=DTYPE_CHOICES)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    model = args.model if args.quantized else str(plain_folder(args.model))
    prepared = prepare(ModelFlags(model=model, dtype=args.dtype), print)
    rows = measure(prepared, args)
    table = Table(title=f"adapters of rank {args.rank}; {args.kernels}, {prepared.dtype}, {args.threads} threads")
    for heading in ("", "without, ms", "with, ms", "share of the rate", "by least times"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, row in rows.items():
        least = f"{row['ratio_of_least']:.3f}" if "ratio_of_least" in row else ""
        table.add_row(name, f"{row['base_ms']:.2f}", f"{row['ms']:.2f}", f"{row['ratio']:.3f}", least)
    show_table(table)
    load = rows[f"p99 of {STREAMS} streams beside a load"]
    print(f"{load['loads']:.0f} adapters were placed in that time, each in at most {load['place_ms']:.2f} ms")
    name = f"lora-{args.kernels}{'-quantized' * args.quantized}"
    save(name, {"dtype": prepared.dtype, "rank": args.rank, "threads": args.threads, "rows": rows})


if __name__ == "__main__":
    main()
