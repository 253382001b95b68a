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
from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.products.int8 import widen
from pillion.kernels.cpu.products.packing import PANEL_COLUMNS

# A step of a tile is a pair of bfloat16 inputs or one float32: 4 bytes of a row.
ROW_STEP_BYTES = 4
# Bytes of a panel that belong to a step.
PANEL_STEP_BYTES = {"bf16": 128, "fp32": 128, "int8": 64}
SUMS_ROW_BYTES = 4 * PANEL_COLUMNS
_LINE_BYTES = 64
_STEPS_PER_ITERATION = 2
# The tables of int8 weights need the registers of so many rows.
_TABLE_ROWS = 3


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


def most_rows(isa: Isa, kind: str) -> int:
    """The most rows of a tile."""
    return isa.gemm_rows - (_TABLE_ROWS if _looks_up(isa, kind) else 0)


def multiply_rows(k: Kernel, kind: str, rows: Int, args: TileArgs) -> None:
    """Multiplies ``rows`` rows, 1 to :func:`most_rows`, with a panel."""
    b = k.builder
    x_bytes = (rows - 1) * args.x_stride + args.steps * ROW_STEP_BYTES
    inside = k.holds(args.x, x_bytes) & k.holds(args.panel, args.steps * PANEL_STEP_BYTES[kind])
    with k.when(inside & k.holds(args.sums, rows * SUMS_ROW_BYTES)):
        behind = b.append_basic_block("behind")
        cases = [b.append_basic_block("rows") for _ in range(most_rows(k.isa, kind))]
        choice = b.switch(rows.ir, cases[0])
        for height, block in enumerate(cases, 1):
            if height > 1:
                choice.add_case(height, block)
            b.position_at_end(block)
            _call_tile(k, kind, height, args)
            b.branch(behind)
        b.position_at_end(behind)


def _looks_up(isa: Isa, kind: str) -> bool:
    """Whether tables widen the weights (pillion.kernels.cpu.products.int8), which need registers and a port."""
    return kind == "int8" and isa.bf16_dot == "x86"


def _call_tile(k: Kernel, kind: str, rows: int, args: TileArgs) -> None:
    def body(inner: Kernel, twin: Any, *seen: Any) -> None:
        _Tile(inner, kind, rows, TileArgs(*seen), twin).write()

    values = (args.x, args.x, args.x_stride, args.panel, args.steps, args.ahead, args.ahead_step, args.sums)
    k.call_subroutine(f"gemm_tile_{kind}_{rows}", values, body)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Emits the function for one number of rows. ``twin`` equals x, and LLVM cannot know it.

    A value of a row meets both tiles of a panel. LLVM would broadcast it once, by an instruction of its own, which
    occupies the port that table look-ups need. Where each tile has its own pointer, the broadcast becomes part of both
    products, for free: that makes int8 tiles a quarter faster on Zen 4.
    """

    k: Kernel
    kind: str
    rows: int
    args: TileArgs
    twin: Ptr

    def write(self) -> None:
        k, args = self.k, self.args
        sums = [[k.variable(k.vector(0.0)) for _ in range(2)] for _ in range(self.rows)]
        bases = (args.x, self.twin if _looks_up(k.isa, self.kind) else args.x)
        rows = [[base + args.x_stride * row for base in bases] for row in range(self.rows)]
        with k.range(args.steps, step=_STEPS_PER_ITERATION) as first:
            for step in range(_STEPS_PER_ITERATION):
                at = first + step
                weights = self._weights(args.panel + at * PANEL_STEP_BYTES[self.kind])
                self._prefetch(args.ahead + at * args.ahead_step)
                for row, totals in zip(rows, sums, strict=True):
                    for base, total, weight in zip(row, totals, weights, strict=True):
                        total.value = self._sum(total.value, base + at * ROW_STEP_BYTES, weight)
        for number, pair in enumerate(sums):
            for half, total in enumerate(pair):
                k.store(args.sums + (number * SUMS_ROW_BYTES + half * VECTOR_BYTES), total.value)

    def _weights(self, line: Ptr) -> tuple[Any, Any]:
        k, half = self.k, line + VECTOR_BYTES
        if self.kind == "fp32":
            return k.load(line), k.load(half)
        if self.kind == "bf16":
            return k.load_pairs(line), k.load_pairs(half)
        return widen(k, line)

    def _prefetch(self, line: Ptr) -> None:
        # With few rows a tile mostly waits for memory, and the processor's own prefetcher is faster alone. Widening
        # int8 weights is enough work to hide that wait.
        if self.kind != "int8" and 2 * self.rows < self.k.isa.gemm_rows:
            return
        for at in range(0, PANEL_STEP_BYTES[self.kind], _LINE_BYTES):
            self.k.prefetch(line + at, near=False)

    def _sum(self, total: Any, x: Ptr, weight: Any) -> Any:
        k = self.k
        if self.kind == "fp32":
            return k.fma(weight, k.broadcast(x), total)
        return k.dot(total, weight, k.broadcast_pair(x))
