"""Products by plain and quantized matrices, and by adapters: memory-bound with few rows, compute-bound with many.

Pillion's plain products are beside cuBLAS's by the same matrices: ``of_cublas`` is their time over cuBLAS's, which
suggests the rows of an entry ``plain_product_rows`` in the tuning file. Few rows are compared with the copy bandwidth;
``speedup`` is the time of the plain bfloat16 product over theirs. Many rows are compared with the rate of the plain
product of the same shape. Adapters are beside the plain product that they add to: ``of_plain`` is their time over it.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from lab.benchmarks.gpu.bench import Bench, Call, Row, rotations, spread
from lab.benchmarks.gpu.calls import ATOL, RTOL, KernelCase
from lab.benchmarks.gpu.shapes import shape_of
from pillion.engine.adapters.adapter_rows import adapted_runs
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix

if TYPE_CHECKING:
    from pillion.kernels.gpu.products.gpu_packing import PackedMatrix

# Coding, inputs per group (0: one scale per output), and whether there are offsets.
KINDS: dict[str, tuple[str, int, bool]] = {
    "int4 in groups of 128": ("uint4", 128, True),
    "int4 in groups of 32": ("int4", 32, False),
    "nf4 in groups of 64": ("nf4", 64, False),
    "int8": ("int8", 0, False),
    "fp8 in blocks of 128": ("fp8_e4m3", 128, False),
    "mxfp4": ("fp4_e2m1", 32, False),
    "nvfp4": ("fp4_e2m1", 16, False),
}
FEW_ROWS, MANY_ROWS = (1, 16, 64), (512, 2048)
ADAPTERS, ADAPTER_RANK = 8, 16
# Outputs to compare with plain torch.
CHECKED_OUTPUTS = 256


def run(bench: Bench) -> None:
    """Measure a layer's products for each kind of matrix."""
    shapes = shape_of(bench.smoke).products
    few, many = ((2,), (20,)) if bench.smoke else (FEW_ROWS, MANY_ROWS)
    bandwidth = bench.bandwidth
    rates = {(name, rows): bench.product_rate(rows, *shapes[name]) for name in shapes for rows in (*few, *many)}
    for product, (inputs, outputs) in shapes.items():

        def measure_plain(product: str = product, inputs: int = inputs, outputs: int = outputs) -> None:
            for rows in (*few, *many):
                case, cublas = plain_case(bench, inputs, outputs, rows)
                case.verify()
                times, others = bench.time(case.calls), bench.time(cublas)
                share, name = times.median_s / others.median_s, f"plain, {product}, {rows} rows"
                bench.report_bytes(name, times, case.moved_bytes, of_cublas=share, cublas_us=others.median_s * 1e6)

        bench.attempt(f"plain, {product}", measure_plain)
    for kind in KINDS:
        for product, (inputs, outputs) in shapes.items():

            def measure(kind: str = kind, product: str = product, inputs: int = inputs, outputs: int = outputs) -> None:
                for rows in (*few, *many):
                    case, name = product_case(bench, kind, inputs, outputs, rows), f"{kind}, {product}, {rows} rows"
                    case.verify()
                    times = bench.time(case.calls)
                    flops, rate = 2.0 * rows * inputs * outputs, rates[product, rows]
                    if rows in many:
                        bench.report_flops(name, times, flops, rate)
                        continue
                    share = case.moved_bytes / bandwidth / times.median_s
                    more = {**spread(times), "gb_per_s": case.moved_bytes / times.median_s / 1e9}
                    more["speedup"] = flops / rate / times.median_s
                    bench.report(Row(name, times.median_s * 1e6, "us", share, "copy bandwidth", more=more))

            bench.attempt(f"{kind}, {product}", measure)
    for product, (inputs, outputs) in shapes.items():

        def measure_fp8(product: str = product, inputs: int = inputs, outputs: int = outputs) -> None:
            for rows, in_blocks in itertools.product((*few, *many), (False, True)):
                case = fp8_case(bench, inputs, outputs, rows, in_blocks=in_blocks)
                case.verify()
                times, name = bench.time(case.calls), f"fp8 by fp8, {'blocks' if in_blocks else 'outputs'}, {product}"
                if rows in many:
                    flops = 2.0 * rows * inputs * outputs
                    bench.report_flops(f"{name}, {rows} rows", times, flops, rates[product, rows], ">= 1.6")
                else:
                    bench.report_bytes(f"{name}, {rows} rows", times, case.moved_bytes)

        bench.attempt(f"fp8 by fp8, {product}", measure_fp8)
    for product, (inputs, outputs) in shapes.items():

        def measure_adapters(product: str = product, inputs: int = inputs, outputs: int = outputs) -> None:
            for rows in (*few, *many):
                case = adapters_case(bench, inputs, outputs, rows)
                case.verify()
                times = bench.time(case.calls)
                plain_s = 2.0 * rows * inputs * outputs / rates[product, rows]
                share = case.moved_bytes / bandwidth / times.median_s
                more = {**spread(times), "of_plain": times.median_s / plain_s}
                name = f"{ADAPTERS} adapters of rank {ADAPTER_RANK}, {product}, {rows} rows"
                bench.report(Row(name, times.median_s * 1e6, "us", share, "copy bandwidth", more=more))

        bench.attempt(f"adapters, {product}", measure_adapters)


def random_matrix(kind: str, inputs: int, outputs: int) -> QuantizedMatrix:
    """Make a matrix of random valid codes."""
    coding, group, shifted = KINDS[kind]
    numbers = (~CODINGS[coding].isnan()).nonzero().flatten().to(torch.uint8)
    codes = numbers[torch.randint(len(numbers), (outputs, inputs))]
    group = group or inputs
    scales = torch.rand(outputs, -(-inputs // group)) / 100
    if kind == "int4 in groups of 32":
        scales = scales.bfloat16().float()
    if kind == "mxfp4":
        scales = scales.log2().round().exp2()
    factors = None
    if kind == "nvfp4":
        factors = torch.full((outputs,), 1 / 100 / 448)
        scales = (scales / factors[0]).to(torch.float8_e4m3fn).float() * factors[0]
    return QuantizedMatrix(coding, codes, scales, group, -8 * scales if shifted else None, factors=factors)


@functools.lru_cache(maxsize=2)
def _packed(
    kind: str, inputs: int, outputs: int, device: torch.device, smoke: bool
) -> tuple[QuantizedMatrix, list[PackedMatrix]]:
    """Make a matrix, and packed copies of it on the device to rotate through (packing takes longer than measuring)."""
    from pillion.kernels.gpu.products.gpu_packing import PackedMatrix, pack

    matrix = random_matrix(kind, inputs, outputs)
    packed = pack(matrix, torch.bfloat16)
    read = sum(part.numel() * part.element_size() for part in packed.parts.values())
    return matrix, [
        PackedMatrix(packed.kind, **{name: part.to(device, copy=True) for name, part in packed.parts.items()})
        for _ in range(rotations(read, smoke))
    ]


def product_case(bench: Bench, kind: str, inputs: int, outputs: int, rows: int) -> KernelCase:
    """Make a case of random rows by a matrix and by copies of it."""
    from pillion.kernels.gpu.products.quantized_product import QuantizedGemm

    matrix, copies = _packed(kind, inputs, outputs, bench.device, bench.smoke)
    read = sum(part.numel() * part.element_size() for part in copies[0].parts.values())
    left = torch.randn(rows, inputs, device=bench.device).bfloat16()
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=bench.device)
    product = QuantizedGemm(copies, rows, torch.bfloat16, bench.device)

    def verify() -> None:
        product(left, copies[0], None, out)
        checked = matrix.rows(slice(0, CHECKED_OUTPUTS)).dequantize(torch.bfloat16).to(bench.device)
        wanted = left.float() @ checked.float().T
        # Compare sums of many terms relative to their size.
        torch.testing.assert_close(
            out[:, : len(checked)].float(), wanted, rtol=RTOL, atol=ATOL * float(wanted.abs().max())
        )

    calls = [functools.partial(product, left, copy, None, out) for copy in copies]
    return KernelCase(calls, read + 2.0 * rows * (inputs + outputs), verify)


def fp8_case(bench: Bench, inputs: int, outputs: int, rows: int, *, in_blocks: bool) -> KernelCase:
    """Make a case of random rows, rounded to FP8, by a matrix in FP8 and by copies of it."""
    from pillion.kernels.gpu.products.fp8_product import Fp8Gemm, fp8_matrix

    codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn).view(torch.uint8)
    matrix = QuantizedMatrix("fp8_e4m3", codes, torch.full((outputs, 1), 0.02), inputs)
    if in_blocks:
        matrix = replace(matrix, scales=torch.full((outputs, -(-inputs // 128)), 0.02), group=128)
    found = fp8_matrix(matrix)
    assert found is not None
    copies = [
        replace(found, **{name: part.to(bench.device, copy=True) for name, part in found.parts.items()})
        for _ in range(rotations(codes.numel(), bench.smoke))
    ]
    left = torch.randn(rows, inputs, device=bench.device).bfloat16()
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=bench.device)
    product = Fp8Gemm(copies, rows, torch.bfloat16, bench.device)
    product.compile(copies[0], None)

    def verify() -> None:
        product(left, copies[0], None, out)
        wanted = left.float() @ matrix.rows(slice(0, CHECKED_OUTPUTS)).dequantize(torch.float32).to(bench.device).T
        # Rows are rounded to 4 bits of mantissa.
        assert float((out[:, : wanted.shape[1]].float() - wanted).norm() / wanted.norm()) < 0.06

    calls = [functools.partial(product, left, copy, None, out) for copy in copies]
    return KernelCase(calls, codes.numel() + 2.0 * rows * (inputs + outputs), verify)


def plain_case(bench: Bench, inputs: int, outputs: int, rows: int) -> tuple[KernelCase, list[Call]]:
    """Make a case of random rows by a plain matrix and by copies of it, and the same calls of cuBLAS."""
    from pillion.kernels.gpu.products.dense_gemm import DenseGemm

    size = 2 * inputs * outputs
    copies = [torch.randn(outputs, inputs, device=bench.device).bfloat16() for _ in range(rotations(size, bench.smoke))]
    left = torch.randn(rows, inputs, device=bench.device).bfloat16()
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=bench.device)
    product = DenseGemm(rows, torch.bfloat16, bench.device)

    def verify() -> None:
        product(left, copies[0], None, out)
        wanted = left.float() @ copies[0][:CHECKED_OUTPUTS].float().T
        found = out[:, :CHECKED_OUTPUTS].float()
        torch.testing.assert_close(found, wanted, rtol=RTOL, atol=ATOL * float(wanted.abs().max()))

    calls = [functools.partial(product, left, copy, None, out) for copy in copies]
    cublas: list[Call] = [functools.partial(torch.mm, left, copy.T, out=out) for copy in copies]
    return KernelCase(calls, size + 2.0 * rows * (inputs + outputs), verify), cublas


def adapters_case(bench: Bench, inputs: int, outputs: int, rows: int) -> KernelCase:
    """Make a case of random rows that use the adapters in turn, by layers of one projection."""
    from pillion.kernels.gpu.products.low_rank_product import RUN_ROWS, LayerSlot, RunRecord, add_low_rank

    layer = LayerSlot(0, ADAPTER_RANK * inputs, inputs, outputs, (outputs,), ADAPTER_RANK)
    row_slots = np.arange(rows, dtype=np.int32) % ADAPTERS
    numbers, runs = adapted_runs(row_slots, RUN_ROWS)
    used = min(rows, ADAPTERS)
    read = 2.0 * used * layer.values
    record = RunRecord(torch.from_numpy(runs).to(bench.device), torch.from_numpy(numbers).to(bench.device))
    slots = [
        (torch.randn(ADAPTERS, layer.values, device=bench.device) / ADAPTER_RANK).bfloat16()
        for _ in range(rotations(int(read), bench.smoke))
    ]
    x = (torch.randn(rows, inputs, device=bench.device) / inputs**0.5).bfloat16()
    out = torch.zeros(rows, outputs, dtype=torch.bfloat16, device=bench.device)
    shrunk = torch.zeros(rows, ADAPTER_RANK, dtype=torch.bfloat16, device=bench.device)

    def verify() -> None:
        out.zero_()
        add_low_rank(x, slots[0], layer, record, shrunk, out)
        for row in range(min(rows, ADAPTERS)):
            a = slots[0][row, : layer.b_at].view(ADAPTER_RANK, inputs).float()
            b = slots[0][row, layer.b_at :].view(outputs, ADAPTER_RANK).float()
            wanted = b @ (a @ x[row].float()).bfloat16().float()
            torch.testing.assert_close(out[row].float(), wanted, rtol=RTOL, atol=ATOL * float(wanted.abs().max()))

    calls = [functools.partial(add_low_rank, x, each, layer, record, shrunk, out) for each in slots]
    return KernelCase(calls, read + 2.0 * rows * (inputs + 2 * outputs), verify)
