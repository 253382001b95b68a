"""What some products with weights in few bits need of their rows: another order of the inputs, and sums of groups."""

from __future__ import annotations

from dataclasses import dataclass

from pillion.kernels.cpu.language.emit import VECTOR_BYTES
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout


@dataclass(frozen=True, slots=True)
class GatherInputs(KernelSpec):
    """``out`` [rows, depth] = ``x`` [rows, depth] at the columns ``order``, int32 [depth]; both bfloat16 or float32."""

    layout = RecordLayout("gather_inputs", pointers=("x", "order", "out"), numbers=("depth", "x_stride", "out_stride"))

    bf16: bool
    rows_of: str = "tokens"

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        x, order, out = (args.pointer(field) for field in self.layout.pointers)
        depth, x_stride, out_stride = (args.number(field) for field in self.layout.numbers)
        size = 2 if self.bf16 else 4
        # One row may be all there is, so threads share pieces of rows; a depth is a multiple of 16.
        pieces = depth // LANES
        with call.even_share(call.step.number(f"num_{self.rows_of}") * pieces) as item:
            row = item // pieces
            first = (item - row * pieces) * LANES
            source, target = x + row * x_stride, out + (row * out_stride + first * size)
            for lane in range(LANES):
                place = k.load_int(order + (first + lane) * 4, 32)
                k.store_int(target + lane * size, k.load_int(source + place * size, 8 * size), 8 * size)


@dataclass(frozen=True, slots=True)
class SumInputs(KernelSpec):
    """``sums`` [rows, groups] float32 = the sum of each row's values in each group of ``inputs`` columns.

    ``x`` [rows, depth] is bfloat16 or float32; ``depth`` and ``inputs`` are multiples of 16, and the last group may be
    shorter. There are ``each`` rows for each of ``rows_of``. The tree of additions is fixed.
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
        with call.even_share(call.step.number(f"num_{self.rows_of}") * self.each * groups) as item:
            row = item // groups
            group = item - row * groups
            total = k.variable(k.vector(0.0))
            first, behind = group * inputs // LANES, k.least((group + 1) * inputs, depth) // LANES
            with k.range(behind, first) as vector:
                total.value = total.value + k.load_float(x + (row * x_stride + vector * vector_bytes), self.bf16)
            k.store_first(sums + (row * sums_stride + group * 4), k.sum(total.value))
