"""Where a step of the CPU kernels spends its time: each kernel run alone, over the record of a whole step.

The kernels' times do not add up to the step exactly: alone, a kernel finds in the cache what the kernel before it
would have displaced, and pays once for each run for waking the thread pool.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

from rich.table import Table

from benchmarks.cpu_steps import kernels_bench
from benchmarks.report import show_table
from pillion.config import ModelFlags
from pillion.engine.backends.batch import StepBatch
from pillion.engine.checkpoints.prepare import prepare


def middle_ms(call: Callable[[], None], repeats: int) -> float:
    """Return the median milliseconds of ``repeats`` runs."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1000


def main() -> None:
    """Print a column for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    flags = ModelFlags(model=args.model, quantization=args.quantization)
    bench = kernels_bench(prepare(flags, print), args.threads, args.kernels)
    backend = bench.backend
    batches: dict[str, StepBatch] = {
        "decode 1": bench.decode(1, 264),
        "decode 16": bench.decode(16, 264),
        "decode 32": bench.decode(32, 264),
        "prefill 256": bench.chunk(256, 0),
        "256 behind 768": bench.chunk(256, 768),
    }
    operations = backend.model.plan.operations
    names = list(dict.fromkeys(operation.spec.name for operation in operations))
    found: dict[str, list[float]] = {name: [] for name in ("whole step", *names)}
    for batch in batches.values():
        found["whole step"].append(statistics.median(bench.seconds(batch, args.repeats)) * 1000)
        for name in names:
            alone = backend.again([operation for operation in operations if operation.spec.name == name])
            found[name].append(middle_ms(alone, args.repeats))
    table = Table(title=f"ms of each kernel, all layers; {args.threads} threads, {backend.model.isa.name}")
    for heading in ("kernel", *batches):
        table.add_column(heading, justify="right")
    for name, row in found.items():
        table.add_row(name, *(f"{value:.2f}" for value in row))
    show_table(table)


if __name__ == "__main__":
    main()
