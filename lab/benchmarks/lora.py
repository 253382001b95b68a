"""What adapters cost: steps of the CPU kernels with LoRA adapters beside the same steps without them.

Each pair of steps is run in turn, so that what else runs on the machine slows both; the share of the rate that is left
is the median of the rounds' shares. The adapters change every projection. "Enabled" is a backend with slots for
adapters that runs a step without any, beside a backend that has none. Steps are also timed while adapters are read and
packed as a worker does it. Then a whole service is measured (:mod:`lab.benchmarks.lora_service`).
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from rich.table import Table

from lab.benchmarks.cpu_steps import kernels_bench
from lab.benchmarks.lora_service import service
from lab.benchmarks.lora_service import show as show_service
from lab.benchmarks.report import save, show_table
from lab.testbed.plain_model import plain_folder
from lab.testbed.random_adapter import random_adapter_folder
from pillion.config import DTYPE_CHOICES, ModelFlags
from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.engine.adapters.adapter_process import READ_TIMEOUT_S, AdapterProcess
from pillion.engine.backends.backend import PackedAdapter, bound_adapters
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.kernels.step import StepBatch

CONTEXT_TOKENS = 264
STREAMS, ADAPTERS = 16, 8
CHUNK_TOKENS = 256
STEPS_BETWEEN_LOADS = 8
BESIDE_A_LOAD = f"p99 of {STREAMS} streams beside a load"


def with_slots(batch: StepBatch, slots: list[int]) -> StepBatch:
    """Returns the step with an adapter's slot for each sequence."""
    return replace(batch, adapters=np.array(slots, np.int32))


def in_turn(base: Callable[[], Any], other: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Returns the median milliseconds of both, and the median of the rounds' ratios base / other, which is the share of
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


class Loads:
    """Loads adapters from files one after another, as a worker does, while it is told to."""

    def __init__(self, model: LoadedModel, folders: list[pathlib.Path], rank: int) -> None:
        self._process, self._backend = AdapterProcess(model.adapter_reader(rank)), model.backend
        self._files = [(folder, AdapterFiles(folder).digest()) for folder in folders]
        self._thread = ThreadPoolExecutor(1)
        self.seconds: list[float] = []
        self._process.start()

    def one(self) -> PackedAdapter:
        """Loads the next adapter."""
        begin = time.perf_counter()
        folder, digest = self._files[len(self.seconds) % len(self._files)]
        about, data = self._process.run(READ_TIMEOUT_S, "packed", str(folder), digest)
        packed = bound_adapters(self._backend.adapters).take(digest, about, data)
        self.seconds.append(time.perf_counter() - begin)
        return packed

    def begin(self) -> Future[PackedAdapter]:
        """Loads the next adapter on a thread."""
        return self._thread.submit(self.one)

    def close(self) -> None:
        """Ends the process and the thread."""
        self._process.close()
        self._thread.shutdown()


def loading(backend: Any, batch: StepBatch, loads: Loads, rounds: int) -> dict[str, float]:
    """Returns the 99th percentile of a step's milliseconds alone, and while adapters are loaded, which are then placed
    between two steps. Some steps alone, and those beside one load, are run in turn."""
    alone: list[float] = []
    beside: list[float] = []
    placing: list[float] = []
    for _ in range(rounds):
        for _ in range(STEPS_BETWEEN_LOADS):
            begin = time.perf_counter()
            backend.forward(batch)
            alone.append(time.perf_counter() - begin)
        load = loads.begin()
        while not load.done():
            begin = time.perf_counter()
            backend.forward(batch)
            beside.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        bound_adapters(backend.adapters).place(ADAPTERS - 1, load.result())
        placing.append(time.perf_counter() - begin)
        # The first step with an adapter is one beside its load, too.
        backend.forward(batch)
        beside.append(time.perf_counter() - begin)
    (middle, p99), (middle_beside, p99_beside) = (
        [float(np.quantile(times, share)) * 1000 for share in (0.5, 0.99)] for times in (alone, beside)
    )
    return {
        "base_ms": p99,
        "ms": p99_beside,
        "ratio": p99 / p99_beside,
        "ratio_of_middle": middle / middle_beside,
        "steps_beside": float(len(beside)),
        "slot_ms": max(placing) * 1000,
        "load_ms": statistics.median(loads.seconds) * 1000,
    }


def measure(prepared: PreparedModel, args: argparse.Namespace, folder: pathlib.Path) -> dict[str, dict[str, float]]:
    """Returns the figures of each comparison."""
    bare = kernels_bench(prepared, args.threads, args.kernels)
    bench = kernels_bench(prepared, args.threads, args.kernels)
    backend, config = bench.backend, bench.backend.model.config
    backend.bind_adapters(ADAPTERS, args.rank)
    folders = [random_adapter_folder(config, folder / str(seed), seed, args.rank) for seed in range(ADAPTERS)]
    loads = Loads(LoadedModel(prepared, backend), folders, args.rank)
    for slot in range(ADAPTERS):
        packed = loads.one()
        bound_adapters(backend.adapters).place(slot, packed)
    milliseconds = statistics.median(loads.seconds) * 1000
    print(f"an adapter takes {packed.nbytes / 2**20:.1f} MiB, and {milliseconds:.0f} ms to read and pack")
    decode, chunk = bench.decode(STREAMS, CONTEXT_TOKENS), bench.chunk(CHUNK_TOKENS, 0)
    every = [stream % ADAPTERS for stream in range(STREAMS)]
    rounds = args.rounds

    def compare(batch: StepBatch, slots: list[int]) -> dict[str, float]:
        adapted = with_slots(batch, slots)
        return in_turn(lambda: backend.forward(batch), lambda: backend.forward(adapted), rounds)

    found = {
        f"{STREAMS} streams, LoRA enabled": in_turn(
            lambda: bare.backend.forward(decode), lambda: backend.forward(decode), rounds
        ),
        f"{STREAMS} streams over {ADAPTERS} adapters": compare(decode, every),
        f"{STREAMS} streams, all with one adapter": compare(decode, [0] * STREAMS),
        f"{STREAMS} streams, one with an adapter": compare(decode, [0] + [-1] * (STREAMS - 1)),
        "1 stream": compare(bench.decode(1, CONTEXT_TOKENS), [0]),
        f"a chunk of {CHUNK_TOKENS} tokens": compare(chunk, [0]),
        BESIDE_A_LOAD: loading(backend, with_slots(decode, every), loads, rounds),
    }
    loads.close()
    return found


def main() -> None:
    """Measure, print tables, write results/lora-KERNELS.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantized", action="store_true", help="the model in the quantized weights of its file")
    parser.add_argument("--dtype", default="auto", choices=DTYPE_CHOICES)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=("steps", "service"), help="steps alone, or the whole service alone")
    parser.add_argument("--service-rounds", type=int, default=5)
    args = parser.parse_args()
    model = args.model if args.quantized else str(plain_folder(args.model))
    prepared = prepare(ModelFlags(model=model, dtype=args.dtype), print)
    result: dict[str, Any] = {"dtype": prepared.dtype, "rank": args.rank, "threads": args.threads}
    if args.only != "service":
        with tempfile.TemporaryDirectory() as folder:
            result["rows"] = measure(prepared, args, pathlib.Path(folder))
        show(result["rows"], args, prepared)
    if args.only != "steps":
        # Unix sockets need short names.
        with tempfile.TemporaryDirectory(prefix="pil-") as folder:
            rounds = args.service_rounds
            result["service"] = service(model, prepared.dtype, args.rank, ADAPTERS, rounds, pathlib.Path(folder))
        show_service(result["service"])
    save(f"lora-{args.kernels}{'-quantized' * args.quantized}", result)


def show(rows: dict[str, dict[str, float]], args: argparse.Namespace, prepared: PreparedModel) -> None:
    """Prints the figures of steps."""
    table = Table(title=f"adapters of rank {args.rank}; {args.kernels}, {prepared.dtype}, {args.threads} threads")
    for heading in ("", "without, ms", "with, ms", "share of the rate", "by least times"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, row in rows.items():
        least = f"{row['ratio_of_least']:.3f}" if "ratio_of_least" in row else ""
        table.add_row(name, f"{row['base_ms']:.2f}", f"{row['ms']:.2f}", f"{row['ratio']:.3f}", least)
    show_table(table)
    load = rows[BESIDE_A_LOAD]
    print(
        f"an adapter took {load['load_ms']:.0f} ms beside {load['steps_beside'] / args.rounds:.1f} steps, whose median"
        f" kept {load['ratio_of_middle']:.3f} of the rate, and at most {load['slot_ms']:.2f} ms to be placed"
    )


if __name__ == "__main__":
    main()
