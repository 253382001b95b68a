"""The kernels beside attention and products: each moves some bytes once, so memory bandwidth is the limit.

A launch of few rows is limited by its latency of some microseconds instead, as its share shows.
"""

from __future__ import annotations

from collections.abc import Callable

from lab.benchmarks.gpu.bench import Bench
from lab.benchmarks.gpu.calls import CASES, KernelCase
from lab.benchmarks.gpu.shapes import shape_of

# Bytes from which on a kernel should reach the copy bandwidth.
LARGE_BYTES = 64 * 2**20
LARGE_TARGET = ">= 0.75"


def run(bench: Bench) -> None:
    """Measure each kernel with each number of rows."""
    shape = shape_of(bench.smoke)
    for kernel, make in CASES.items():
        for rows in make.smoke_rows if bench.smoke else make.rows:
            name = f"{kernel}, {rows} rows"
            bench.attempt(name, _measured(bench, name, lambda make=make, rows=rows: make(bench, shape, rows)))  # type: ignore[misc]


def _measured(bench: Bench, name: str, make: Callable[[], KernelCase]) -> Callable[[], None]:
    def measure() -> None:
        case = make()
        case.verify()
        times = bench.time(case.calls)
        bench.report_bytes(name, times, case.moved_bytes, LARGE_TARGET if case.moved_bytes >= LARGE_BYTES else "")

    return measure
