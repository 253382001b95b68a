"""The innermost products: a few rows with one panel of packed weights (32 outputs), over all of its depth.

A tile keeps its sums in registers: 2 vectors for each row. Each output is one chain of additions, in the order of the
inputs, whatever the number of rows: so a row's result has the same bits in every tile. There is one function for every
number of rows, so that rows can be cut into tiles of even height (:mod:`pillion.kernels.cpu.products.gemm`). Finished
sums go to memory, so that all epilogues share these functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr
from pillion.kernels.cpu.products.packing import TOTALS_BYTES

# A step of a tile is a pair of bfloat16 inputs or one float32: 4 bytes of a row.
ROW_STEP_BYTES = 4
# Bytes of a panel that belong to a step.
PANEL_STEP_BYTES = 128
_LINE_BYTES = 64
_STEPS_PER_ITERATION = 2


@dataclass(frozen=True, slots=True)
class TileArgs:
    """The arguments of a tile's function.

    Attributes:
        x: the first row: bfloat16, or float32 for "fp32" weights.
        x_stride: bytes from row to row.
        panel: the weights.
        steps: number of steps in the depth.
        ahead: memory to prefetch, for instance the next panel.
        ahead_step: bytes to prefetch in each step.
        sums: float32 [rows, 32], the result.
    """

    x: Ptr
    x_stride: Int
    panel: Ptr
    steps: Int
    ahead: Ptr
    ahead_step: Int
    sums: Ptr


def multiply_rows(k: Kernel, kind: str, rows: Int, args: TileArgs) -> None:
    """Multiplies ``rows`` rows, 1 to ``isa.gemm_rows``, with a panel."""
    b = k.builder
    x_bytes = (rows - 1) * args.x_stride + args.steps * ROW_STEP_BYTES
    inside = k.holds(args.x, x_bytes) & k.holds(args.panel, args.steps * PANEL_STEP_BYTES)
    with k.when(inside & k.holds(args.sums, rows * TOTALS_BYTES)):
        behind = b.append_basic_block("behind")
        cases = [b.append_basic_block("rows") for _ in range(k.isa.gemm_rows)]
        choice = b.switch(rows.ir, cases[0])
        for height, block in enumerate(cases, 1):
            if height > 1:
                choice.add_case(height, block)
            b.position_at_end(block)
            _call_tile(k, kind, height, args)
            b.branch(behind)
        b.position_at_end(behind)


def _call_tile(k: Kernel, kind: str, rows: int, args: TileArgs) -> None:
    def body(inner: Kernel, *seen: Any) -> None:
        _Tile(inner, kind, rows, TileArgs(*seen)).write()

    values = (args.x, args.x_stride, args.panel, args.steps, args.ahead, args.ahead_step, args.sums)
    k.call_subroutine(f"gemm_tile_{kind}_{rows}", values, body)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Emits the function for one number of rows."""

    k: Kernel
    kind: str
    rows: int
    args: TileArgs

    def write(self) -> None:
        k, args = self.k, self.args
        sums = [[k.variable(k.vector(0.0)) for _ in range(2)] for _ in range(self.rows)]
        rows = [args.x + args.x_stride * row for row in range(self.rows)]
        with k.range(args.steps, step=_STEPS_PER_ITERATION) as first:
            for step in range(_STEPS_PER_ITERATION):
                at = first + step
                weights = self._weights(args.panel + at * PANEL_STEP_BYTES)
                self._prefetch(args.ahead + at * args.ahead_step)
                for row, totals in zip(rows, sums, strict=True):
                    for total, weight in zip(totals, weights, strict=True):
                        total.value = self._sum(total.value, row + at * ROW_STEP_BYTES, weight)
        for number, pair in enumerate(sums):
            for half, total in enumerate(pair):
                k.store(args.sums + (number * TOTALS_BYTES + half * VECTOR_BYTES), total.value)

    def _weights(self, line: Ptr) -> tuple[Any, Any]:
        k, half = self.k, line + VECTOR_BYTES
        if self.kind == "fp32":
            return k.load(line), k.load(half)
        return k.load_pairs(line), k.load_pairs(half)

    def _prefetch(self, line: Ptr) -> None:
        # With few rows a tile mostly waits for memory, and the processor's own prefetcher is faster alone.
        if 2 * self.rows < self.k.isa.gemm_rows:
            return
        for at in range(0, PANEL_STEP_BYTES, _LINE_BYTES):
            self.k.prefetch(line + at, near=False)

    def _sum(self, total: Any, x: Ptr, weight: Any) -> Any:
        k = self.k
        if self.kind == "fp32":
            return k.fma(weight, k.broadcast(x), total)
        return k.dot(total, weight, k.broadcast_pair(x))
