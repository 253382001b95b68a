"""Makes the operations of CPU programs that prepare rows for products with matrices in few bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pillion.engine.backends.cpu.cpu_operations import MatrixRows, OperationBuilder
from pillion.engine.backends.cpu.cpu_weights import CpuLinear
from pillion.kernels.cpu.few_bits.few_bit_packing import INT8_DOTS
from pillion.kernels.cpu.few_bits.input_rows import ROW_CONSTANTS_BYTES, CodeInputs, GatherInputs, SumInputs
from pillion.kernels.cpu.runtime.program import Buffer, Operation


def rows_of(builder: OperationBuilder, linear: CpuLinear, x: Buffer) -> MatrixRows:
    """Makes the operations that a matrix needs for its inputs: to reorder them, to round them to codes, and to sum them
    up by groups."""
    operations, sums, row_codes = [], None, linear.row_codes
    if linear.order is not None:
        ordered = builder.buffer(f"ordered{linear.depth}", linear.depth, x.dtype)
        values: dict[str, Any] = {"x": x, "order": linear.order, "out": ordered, "depth": linear.depth}
        values |= {"x_stride": x.stride, "out_stride": ordered.stride}
        operations.append(Operation(GatherInputs(builder.bf16, builder.rows_of), values, builder.when))
        x = ordered
    if row_codes is not None:
        operation = _coded(builder, linear, x)
        x, sums = operation.values["out"], operation.values["constants"]
        operations.append(operation)
    if linear.offsets and sums is None:
        groups = -(-linear.depth // linear.group)
        sums = builder.buffer(f"input_sums{groups}x{x.each}", groups, "float32", x.each)
        values = {"x": x, "sums": sums, "depth": linear.depth, "inputs": linear.group}
        values |= {"x_stride": x.stride, "sums_stride": sums.stride}
        operations.append(Operation(SumInputs(builder.bf16, builder.rows_of, x.each), values, builder.when))
    zeros = linear.kind == INT8_DOTS and row_codes is not None and row_codes.has_zeros
    return MatrixRows(x, sums, zeros, operations)


def _coded(builder: OperationBuilder, linear: CpuLinear, x: Buffer) -> Operation:
    """Makes the operation that rounds ``x`` for the matrix: to codes for a product in integers, else to the numbers
    that they stand for."""
    row_codes, depth, as_codes = linear.row_codes, linear.depth, linear.kind == INT8_DOTS
    assert row_codes is not None
    out = builder.buffer(f"{'codes' if as_codes else 'rounded'}{depth}x{x.each}", depth, x.dtype, x.each)
    constants = None
    if as_codes:
        out = replace(out, dtype="int8")
        constants = builder.buffer(f"row_constants{x.each}", ROW_CONSTANTS_BYTES // 4, "float32", x.each)
    values = {
        "x": x,
        "out": out,
        "constants": constants,
        "depth": depth,
        "x_stride": x.stride,
        "out_stride": out.stride,
        "constants_stride": 0 if constants is None else constants.stride,
        "scale": row_codes.scale,
        "zero": row_codes.zero,
    }
    spec = CodeInputs(row_codes.scheme, x.dtype != "float32", builder.rows_of, x.each, as_codes)
    return Operation(spec, values, builder.when)
