"""Where a step of the CPU kernels spends its time: each kernel run alone, over the record of a whole step.

A product's time stands beside the two limits that were measured in the same run: the operations that the registers
allow, and a streaming read of its weights. A product takes at least the longer one of both; "of the limit" says how
near it is. Times are the least of all rounds, because whatever else runs on the machine only adds to them.

The kernels' times do not add up to the step exactly: alone, a kernel finds in the cache what the kernel before it
would have displaced, and pays once for each run for waking the thread pool.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lab.benchmarks.cpu_steps import CpuStepBench, dots_rate, fastest, kernels_bench, limits_of
from lab.benchmarks.report import save, show_table
from pillion.config import DTYPE_CHOICES, ModelFlags
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.checkpoints.prepare import prepare
from pillion.kernels.cpu.products.gemm import Gemm
from pillion.kernels.cpu.quantized.quantized_packing import INT8_DOTS
from pillion.kernels.cpu.runtime.program import Operation
from pillion.kernels.step import StepBatch

CONTEXT_TOKENS = 264
DECODES = (1, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class PeakRates:
    """What this processor can do at most, each second: operations of products, and those of products of int8 codes, and
    bytes read from memory."""

    operations: float
    read_bytes: float
    int8_operations: float


def label(operation: Operation) -> str:
    """Names a kernel, and of a product also its numbers of outputs and inputs."""
    if not isinstance(operation.spec, Gemm):
        return operation.spec.name
    return f"{operation.spec.name} {operation.values['pairs'] * 32}x{operation.values['depth']}"


def product_work(operations: list[Operation], batch: StepBatch) -> tuple[int, int, int]:
    """Returns the operations of products, those of products of int8 codes, and the bytes of weights that they read."""
    work = int8_work = size = 0
    for operation in operations:
        if isinstance(operation.spec, Gemm):
            values, spec = operation.values, operation.spec
            rows = (len(batch.sample_rows) if spec.rows_of == "num_samples" else batch.num_tokens) * values["x"].each
            mine = 2 * rows * values["pairs"] * 32 * values["depth"]
            work, int8_work = (work, int8_work + mine) if spec.weights == INT8_DOTS else (work + mine, int8_work)
            size += values["group_bytes"] * min(rows, values["num_groups"])
    return work, int8_work, size


def describe(operations: list[Operation], batch: StepBatch, seconds: float, peaks: PeakRates) -> dict[str, Any]:
    """Returns the figures of some operations that took ``seconds``."""
    work, int8_work, size = product_work(operations, batch)
    found: dict[str, Any] = {"ms": seconds * 1000}
    if work or int8_work:
        in_registers = work / peaks.operations + int8_work / peaks.int8_operations
        least = max(in_registers, size / peaks.read_bytes)
        found |= {
            "gops": (work + int8_work) / seconds / 1e9,
            "of_registers": in_registers / seconds,
            "of_read": size / seconds / peaks.read_bytes,
            "of_limit": least / seconds,
        }
    return found


def profile(bench: CpuStepBench, batch: StepBatch, repeats: int, peaks: PeakRates) -> dict[str, Any]:
    """Returns the figures of a step, of each kernel in it, and of all products together."""
    backend: CpuBackend = bench.backend
    step = min(bench.seconds(batch, repeats))
    kinds: dict[str, list[Operation]] = {}
    for operation in backend.model.plan.operations:
        if not operation.when or len(batch.sample_rows):
            kinds.setdefault(label(operation), []).append(operation)
    products = [each for some in kinds.values() for each in some if isinstance(each.spec, Gemm)]
    found = {
        name: describe(some, batch, fastest(backend.again(some), repeats), peaks)
        for name, some in (*kinds.items(), ("all products", products))
    }
    found["whole step"] = {"ms": step * 1000, "beside_products": 1 - found["all products"]["ms"] / (step * 1000)}
    return found


def show(name: str, kernels: dict[str, Any]) -> None:
    """Prints the kernels of one batch."""
    table = Table(title=name)
    table.add_column("kernel", no_wrap=True)
    for heading in ("ms", "G operations/s", "of the registers", "of a streaming read", "of the limit"):
        table.add_column(heading, justify="right")
    for kernel, row in kernels.items():
        shares = [f"{row[key]:.2f}" if key in row else "" for key in ("of_registers", "of_read", "of_limit")]
        table.add_row(kernel, f"{row['ms']:.2f}", f"{row['gops']:.0f}" if "gops" in row else "", *shares)
    show_table(table)
    print(f"{kernels['whole step']['beside_products']:.0%} of the step is not products")


def main() -> None:
    """Measure, print a table for each batch, write results/cpu_profile-KERNELS.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto", choices=DTYPE_CHOICES)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    prepared = prepare(ModelFlags(model=args.model, dtype=args.dtype, quantization=args.quantization), print)
    bench = kernels_bench(prepared, args.threads, args.kernels)
    batches = {f"decode {streams}": bench.decode(streams, CONTEXT_TOKENS) for streams in DECODES}
    batches |= {"prefill 256": bench.chunk(256, 0), "256 behind 768": bench.chunk(256, 768)}
    steps = {}
    for name, batch in batches.items():
        bench.backend.forward(batch)
        peaks = PeakRates(*limits_of(bench.backend, args.threads), dots_rate(bench.backend, args.threads, "int8"))
        steps[name] = profile(bench, batch, args.repeats, peaks)
        show(f"{name}; {bench.backend.model.isa.name}, {prepared.dtype}, {args.threads} threads", steps[name])
        dots = f"{peaks.operations / 1e9:.0f} G operations/s, of int8 {peaks.int8_operations / 1e9:.0f}"
        print(f"registers allow {dots}, memory {peaks.read_bytes / 1e9:.1f} GB/s")
    save(f"cpu_profile-{bench.backend.model.isa.name}", {"dtype": prepared.dtype, "steps": steps})


if __name__ == "__main__":
    main()
