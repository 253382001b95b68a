"""Products with quantized weights beside bfloat16, torch's linear layers, and a streaming read of the same bytes.

A program is the products of some layers of a model's shape, in a step's order: with one row it reads all weights once.
Runs of all kinds alternate; a figure is the fastest run. On a quiet machine:

    python -m lab.benchmarks.cpu_products --rows 1,4,16,32,256,512
    python -m lab.benchmarks.cpu_products --shapes smollm2 --layers 16 --kinds bf16 --rows 32,256,512
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.table import Table

from lab.benchmarks.cpu_limits import PeakDots, ReadAll
from lab.benchmarks.cpu_steps import PEAK_ROUNDS
from lab.benchmarks.report import show_table
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.byte_codes import LINE_BYTES
from pillion.kernels.cpu.language.isa import Isa, choose_isa, host_features
from pillion.kernels.cpu.products.gemm import Gemm
from pillion.kernels.cpu.products.tiles import PANEL_COLUMNS
from pillion.kernels.cpu.quantized.dot_kinds import DOT_KINDS
from pillion.kernels.cpu.quantized.input_rows import CODE_BIAS, ROW_CONSTANTS_BYTES, CodeInputs
from pillion.kernels.cpu.quantized.matrix_packing import panel_bytes
from pillion.kernels.cpu.quantized.quantized_packing import INT8_DOTS, KINDS
from pillion.kernels.cpu.runtime.compiler import CompiledKernels, compile_kernels
from pillion.kernels.cpu.runtime.program import CpuStepRecord, Operation, Program, Workspace, aligned_bytes
from pillion.kernels.cpu.runtime.thread_pool import ThreadPool

# Outputs and inputs of a layer's products: QKV; attention's output; gate and up; down. "square": one deep matrix.
MODEL_SHAPES = {
    "llama": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "smollm2": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "square": ((4096, 4096),),
}
READ, LINEAR = "a streaming read", "torch's linear layers"
# Kinds of weights, inputs per group, and whether groups have offsets.
CASES = (
    ("bf16", 0, False),
    (INT8_DOTS, 0, False),
    *(
        (f"{codes}_dots_by_group{half}", group, offsets)
        for codes, half, group, offsets in (
            ("int8", "_half", 32, False),
            ("int8", "", 128, False),
            ("int8", "", 16, False),
            ("int4", "_half", 32, False),
            ("int4", "", 128, False),
            ("uint4", "_half", 32, True),
            ("uint4", "", 32, True),
            ("fp4_e2m1", "_half", 32, False),
        )
    ),
    ("int8", 512, False),
    ("int8_half", 32, False),
    ("fp8_e4m3", 128, False),
    ("int4", 128, False),
    ("int4", 128, True),
    ("int4_half", 32, False),
    ("uint4_half", 32, True),
    ("int4", 32, True),
    ("nf4", 64, False),
    ("fp4_e2m1", 16, False),
    ("fp4_e2m1_half", 32, False),
)


def operations(
    spec: Gemm, shape: tuple[int, int], group: int, x: torch.Tensor, out: torch.Tensor
) -> Iterator[Operation]:
    """Yield a product of random weights, preceded by the rounding of its rows for kinds of codes. Scales are neither 0
    nor denormal. ``out``: float32, memory of the results."""
    (columns, depth), rows = shape, len(x)
    pairs = columns // PANEL_COLUMNS
    size = pairs * panel_bytes(spec.weights, depth, group, spec.offsets)
    weights = aligned_bytes(size)
    # Each byte is a code, and any four of them a float32 of about 1.
    weights[:] = np.random.default_rng(0).integers(0x3C, 0x3F, size, np.uint8)
    groups = -(-depth // (group or depth))
    sums = torch.ones(rows, groups)
    if spec.weights == INT8_DOTS or spec.weights in DOT_KINDS:
        # A row of codes has constants in place of other rows' sums of groups.
        sums, codes = torch.ones(rows, groups * ROW_CONSTANTS_BYTES // 4), torch.zeros(x.shape, dtype=torch.int8)
        values: dict[str, Any] = {"x": x, "out": codes, "constants": sums, "depth": depth, "inputs": group or depth}
        strides = {"x_stride": x, "out_stride": codes, "constants_stride": sums}
        values |= {name: each.stride(0) * each.element_size() for name, each in strides.items()}
        yield Operation(rounding(spec), values)
        x = codes
    values = {
        "x": x[:, :depth],
        "weights": weights,
        "input_sums": sums,
        "bias": None,
        "out": out,
        "group_starts": None,
        "x_stride": x.stride(0) * x.element_size(),
        "depth": depth,
        "pairs": pairs,
        "out_stride": out.stride(0) * 4,
        "num_groups": 1,
        "group_bytes": size,
        "inputs": group,
        "input_sums_stride": 4 * sums.stride(0),
        "factor": 1.0,
        "alpha": 0.0,
        "limit": 0.0,
        "above": 0.0,
        "below": 0.0,
    }
    yield Operation(spec, values)


def rounding(spec: Gemm) -> CodeInputs:
    """Return the kernel that rounds a product's rows."""
    bias = CODE_BIAS if spec.weights == INT8_DOTS else DOT_KINDS[spec.weights].bias
    return CodeInputs(spec.rows == "bf16", bias=bias)


def runner(operations: list[Operation], kernels: CompiledKernels, pool: ThreadPool, rows: int) -> Callable[[], None]:
    """Return a call of a program for ``rows`` rows."""
    program, step = Program(operations, kernels, Workspace()), CpuStepRecord()
    step.count("num_tokens", rows)
    return lambda: pool.run(program.entries, step.words)


def linear(shapes: Sequence[tuple[int, int]], layers: int, x: torch.Tensor) -> Callable[[], None]:
    """Return a call of torch's linear layers, with separate weights."""
    weights = [torch.randn(shape).to(x.dtype) for _ in range(layers) for shape in shapes]
    inputs = [x[:, : weight.shape[1]].contiguous() for weight in weights]

    def call() -> None:
        with torch.inference_mode():
            for rows, weight in zip(inputs, weights, strict=True):
                torch.nn.functional.linear(rows, weight)

    return call


def fastest_ms(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Return the milliseconds of each call's fastest run; calls take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], (time.perf_counter() - begin) * 1000)
    return best


def _registers_alone(peak: PeakDots, isa: Isa, kernels: CompiledKernels, pool: ThreadPool, threads: int) -> float:
    """Return the max G operations/s of products that never leave the registers."""
    values = {"sink": np.ones(16 * threads, np.float32), "rounds": PEAK_ROUNDS}
    found = fastest_ms({peak.rows: runner([Operation(peak, values)], kernels, pool, 1)}, 5)[peak.rows]
    return peak.operations(isa) * PEAK_ROUNDS * threads / found / 1e6


def _chosen(kernels: str, codes: str) -> Isa:
    """Return an instruction set with the arithmetic of ``--codes``."""
    isa = choose_isa(kernels, host_features())
    if isa is None:
        raise ConfigError("there are no kernels for this processor")
    if codes == "rounded" and not isa.matrix_tiles:
        raise ConfigError(f"{isa.name} has no matrix tiles, in which codes are rounded")
    return isa if codes == "auto" else replace(isa, rounds_codes=codes == "rounded")


def _show(title: str, found: Mapping[str, float], sizes: Mapping[str, int], work: float, alone: float) -> None:
    """Print a table of each call's milliseconds. ``sizes``: bytes of weights; ``work``: million operations; ``alone``:
    rate of registers in G operations/s."""
    table, rate = Table(title=title), sizes[READ] / found[READ]
    headings = ("weights", "ms", "G operations/s", "share of registers alone", "GB/s", "share of the read's rate")
    for heading in (*headings, "bf16's time / this time"):
        table.add_column(heading, justify="right")
    for name, middle in found.items():
        speed, done = sizes[name] / middle, 0 if name == READ else work / middle
        cells = (
            f"{middle:.3f}",
            f"{done:.0f}",
            f"{done / alone:.2f}",
            f"{speed / 1e6:.1f}",
            f"{speed / rate:.2f}",
            f"{found['bf16'] / middle:.2f}",
        )
        table.add_row(name, *cells)
    show_table(table)


def main() -> None:
    """Print a table per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,16,256")
    parser.add_argument("--shapes", choices=MODEL_SHAPES, default="llama")
    parser.add_argument("--kinds", default="", help="of weights beside bf16, with commas (default: all)")
    parser.add_argument("--row-type", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--codes", choices=("auto", "exact", "rounded"), default="auto", help="auto: as they serve")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    isa = _chosen(args.kernels, args.codes)
    shapes, kinds = MODEL_SHAPES[args.shapes], ["bf16", *filter(None, args.kinds.split(","))]
    cases = [case for case in CASES if not args.kinds or case[0] in kinds]
    specs = {case: Gemm(case[0], args.row_type, "store", offsets=case[2]) for case in cases}
    torch.set_num_threads(args.threads)
    read = ReadAll()
    peaks = [PeakDots(rows) for rows in (args.row_type, "int8")]
    roundings = {rounding(spec) for spec in specs.values() if spec.weights == INT8_DOTS or spec.weights in DOT_KINDS}
    kernels = compile_kernels([*specs.values(), *roundings, read, *peaks], isa)
    pool = ThreadPool(kernels, args.threads)
    assert {kind for kind, _, _ in CASES} <= {"bf16", *KINDS}
    alone = {peak.rows: _registers_alone(peak, isa, kernels, pool, args.threads) for peak in peaks}
    print(", ".join(f"registers alone: {rate:.0f} G operations/s of {rows}" for rows, rate in alone.items()))
    for rows in map(int, args.rows.split(",")):
        dtype = torch.bfloat16 if args.row_type == "bf16" else torch.float32
        # An odd number of cache lines per row, as in a worker's buffers, so that rows do not collide in a cache.
        x = torch.randn(rows, max(depth for _, depth in shapes) + 64 // dtype.itemsize).to(dtype)
        # Layers share buffers, as a worker's do.
        outs = {shape: torch.zeros(rows, shape[0] + LINE_BYTES // 4)[:, : shape[0]] for shape in shapes}
        calls, sizes = {}, {}
        for case, spec in specs.items():
            kind, group, offsets = case
            name = f"{kind}{f', groups of {group}' * bool(group)}{', offsets' * offsets}"
            every = [
                one
                for _ in range(args.layers)
                for shape, out in outs.items()
                for one in operations(spec, shape, group, x, out)
            ]
            calls[name] = runner(every, kernels, pool, rows)
            products = [one for one in every if isinstance(one.spec, Gemm)]
            sizes[name] = sum(product.values["group_bytes"] for product in products)
            if kind == "bf16":
                sink = np.ones(16 * 256, np.float32)
                reads = [
                    Operation(
                        read, {"data": product.values["weights"], "sink": sink, "bytes": product.values["group_bytes"]}
                    )
                    for product in products
                ]
                calls[READ], sizes[READ] = runner(reads, kernels, pool, rows), sizes[name]
                calls[LINEAR], sizes[LINEAR] = linear(shapes, args.layers, x), sizes[name]
        found = fastest_ms(calls, args.repeats)
        work = 2e-6 * args.layers * rows * sum(math.prod(shape) for shape in shapes)
        layers = f"{args.layers} layers of {args.shapes}"
        title = f"{rows} rows of {args.row_type}, {isa.label}, {args.threads} threads, {layers}"
        _show(title, found, sizes, work, alone[args.row_type])
    pool.close()


if __name__ == "__main__":
    main()
