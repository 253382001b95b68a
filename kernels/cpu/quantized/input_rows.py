"""Preparation of rows for products with quantized weights: reordering of inputs, sums of groups, rounding to int8."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from pillion.kernels.cpu.language.emit import (
    I32,
    LANE_BYTES,
    VECTOR_BYTES,
    VI,
    Int,
    Kernel,
    KernelVariable,
    Ptr,
    Quads,
    Vec,
)
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.torch.quantized_matrix import MAX_CODE, MAX_SCALED_ROW, MIN_CODE

# Byte offsets in the record of a row's group of codes: its scale, float32; the shift of products' sums that compensates
# for the bias of stored weight codes, int32; the sum of its dequantized codes, float32.
ROW_CONSTANTS = {"scale": 0, "shift": 4, "sum": 8}
ROW_CONSTANTS_BYTES = 12
# Bias of 8-bit codes that are stored unsigned.
CODE_BIAS = 128
# Groups of inputs summed at a time: Kernel.store_sums adds up the lanes of four vectors together.
SUMMED_GROUPS = 4


@dataclass(frozen=True, slots=True)
class GatherInputs(KernelSpec):
    """Reordering of inputs: ``out`` [rows, depth] are the columns ``order``, int32 [depth], of ``x`` [rows, depth];
    both are bfloat16 or float32."""

    layout = RecordLayout("gather_inputs", pointers=("x", "order", "out"), numbers=("depth", "x_stride", "out_stride"))

    bf16: bool
    rows_of: str = "tokens"

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        x, order, out = (args.pointer(field) for field in self.layout.pointers)
        depth, x_stride, out_stride = (args.number(field) for field in self.layout.numbers)
        size = 2 if self.bf16 else 4
        # Work items are parts of rows, since there may be only one row. The depth is a multiple of 16.
        pieces = depth // LANES
        with call.even_share(call.step.number(f"num_{self.rows_of}") * pieces) as item:
            row = item // pieces
            first = (item - row * pieces) * LANES
            source, target = x + row * x_stride, out + (row * out_stride + first * size)
            for lane in range(LANES):
                column = k.load_int(order + (first + lane) * 4, 32)
                k.store_int(target + lane * size, k.load_int(source + column * size, 8 * size), 8 * size)


@dataclass(frozen=True, slots=True)
class SumInputs(KernelSpec):
    """Sums of inputs by group: ``sums`` [rows, groups] float32 is the sum of each row's values in each group of
    ``inputs`` columns.

    ``x`` [rows, depth] is bfloat16 or float32; ``depth`` and ``inputs`` are multiples of 16, and the last group may be
    shorter. There are ``each`` rows for each of ``rows_of``. The tree of additions is fixed. Rows of ``sums`` are
    padded with zeros to a multiple of SUMMED_GROUPS groups.
    """

    layout = RecordLayout("sum_inputs", pointers=("x", "sums"), numbers=("depth", "inputs", "x_stride", "sums_stride"))

    bf16: bool
    rows_of: str = "tokens"
    each: int = 1

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        x, sums = (args.pointer(field) for field in self.layout.pointers)
        depth, inputs, x_stride, sums_stride = (args.number(field) for field in self.layout.numbers)
        groups = (depth + (inputs - 1)) // inputs
        vector_bytes = VECTOR_BYTES // (2 if self.bf16 else 1)
        items = (groups + (SUMMED_GROUPS - 1)) // SUMMED_GROUPS
        with call.even_share(call.step.number(f"num_{self.rows_of}") * self.each * items) as item:
            row = item // items
            group = (item - row * items) * SUMMED_GROUPS
            totals = [k.variable(k.vector(0.0)) for _ in range(SUMMED_GROUPS)]
            for i, total in enumerate(totals):
                first = (group + i) * inputs // LANES
                end = k.min((group + (i + 1)) * inputs, depth) // LANES
                with k.range(end, first) as vector:
                    total.value = total.value + k.load_float(x + (row * x_stride + vector * vector_bytes), self.bf16)
            k.store_sums(sums + (row * sums_stride + group * 4), *(total.value for total in totals))


@dataclass(frozen=True, slots=True)
class CodeInputs(KernelSpec):
    """Quantization of each group of a row to int8, like :func:`pillion.kernels.torch.quantized_matrix.rounded_rows`: x
    is about scale * code.

    ``x`` [rows, depth] is bfloat16 or float32; ``depth``, and the ``inputs`` of a group, are multiples of 16. ``out``
    [rows, depth] is int8, and ``constants`` [rows, groups] are ROW_CONSTANTS, whose shift is for weights stored with
    ``bias``. There are ``each`` rows for each of ``rows_of``. The scale follows from the group's largest magnitude; it
    is not finite if the group is not.
    """

    layout = RecordLayout(
        "code_inputs",
        pointers=("x", "out", "constants"),
        numbers=("depth", "inputs", "x_stride", "out_stride", "constants_stride"),
    )

    bf16: bool
    rows_of: str = "tokens"
    each: int = 1
    bias: int = CODE_BIAS

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        x, out, constants = (args.pointer(field) for field in self.layout.pointers)
        depth, inputs, x_stride, out_stride, constants_stride = (args.number(field) for field in self.layout.numbers)
        size, groups = 2 if self.bf16 else 4, (depth + (inputs - 1)) // inputs
        max_scaled = k.variable(k.vector(MAX_SCALED_ROW))
        with k.when(groups > 1):
            max_scaled.value = k.vector(float(MAX_CODE))
        with call.even_share(call.step.number(f"num_{self.rows_of}") * self.each * groups) as item:
            row = item // groups
            group = item - row * groups
            first = group * inputs
            vectors = k.min(inputs, depth - first) // LANES
            source, target = x + (row * x_stride + first * size), out + (row * out_stride + first)
            scale = self._largest(k, source, vectors) / max_scaled.value
            inverse = k.select(scale > 0.0, k.vector(1.0) / scale, k.vector(0.0))
            total = k.variable(Quads(k, ir.Constant(VI, [0] * LANES)))
            with k.range(vectors) as i:
                value = k.load_float(source + i * (LANES * size), self.bf16)
                # Correctly rounded value / scale (Markstein 1990). The last bit matters: the largest value of a row is
                # always near the midpoint of two codes.
                near = value * inverse
                quotient = k.fma(k.fma(near * -1.0, scale, value), inverse, near)
                code = _bounded(k, k.rounded(quotient))
                whole = k.whole_lanes(code)
                total.value = total.value + whole
                k.write(target + i * LANES, k.builder.trunc(whole.ir, LANE_BYTES), 1)
            at = constants + (row * constants_stride + group * ROW_CONSTANTS_BYTES)
            self._constants(k, at, total, scale)

    def _largest(self, k: Kernel, source: Ptr, vectors: Int) -> Vec:
        """Return the largest magnitude of a group, in all lanes; infinities exceed numbers, and NaN exceeds
        infinities."""
        largest = k.variable(k.vector(0.0))
        with k.range(vectors) as i:
            largest.value = k.maximum_abs(
                largest.value, k.load_float(source + i * (LANES * (2 if self.bf16 else 4)), self.bf16)
            )
        return k.max_abs_lane(largest.value)

    def _constants(self, k: Kernel, at: Ptr, codes: KernelVariable, scale: Vec) -> None:
        """Store a group's constants. ``codes``: partial sums of the group's codes."""
        b, total = k.builder, k.sum_quads(codes.value)
        shift = Quads(k, b.mul(total.ir, ir.Constant(VI, [-remaining_bias(k, self.bias)] * LANES)))
        values: dict[str, Vec | Quads] = {
            "scale": scale,
            "shift": shift,
            "sum": k.real_lanes(total) * scale,
        }
        for name, offset in ROW_CONSTANTS.items():
            k.write(at + offset, b.extract_element(values[name].ir, I32(0)), 4)


def remaining_bias(k: Kernel, bias: int) -> int:
    """Return the part of the stored weight codes' ``bias`` that remains in this processor's products; for SDOT,
    :meth:`Kernel.dot_codes` removes that of int8."""
    return k.code_bias if bias == CODE_BIAS else bias


def _bounded(k: Kernel, value: Vec) -> Vec:
    return k.minimum(k.maximum(value, float(MIN_CODE)), float(MAX_CODE))
