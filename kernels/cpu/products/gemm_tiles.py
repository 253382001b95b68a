"""Emits the innermost products: a few rows with one panel of packed weights (32 outputs), over all of its depth.

A tile keeps its sums in registers: 2 vectors for each row, or 1 in a narrow tile, which computes half of the panel's
outputs. A processor of few registers reads fewer weights for each product with narrow tiles of many rows than with wide
tiles of few. Each output is one chain of additions, in the order of the inputs, whatever the tile: so a row's result
has the same bits in every tile. There is one function for every number of rows, so that rows can be cut into tiles of
even height (:mod:`pillion.kernels.cpu.products.gemm`). Finished sums go to memory, so that all epilogues share these
functions.

Rows of float32 may meet weights of bfloat16. Such weights are widened in registers, which is exact: the sums have the
bits that float32 weights would give, for half of their memory.

Rows of int8 codes meet weights of int8 codes. Their sums are integers of 32 bits, which need no rounding; the sums in
memory are such integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pillion.kernels.cpu.language.byte_codes import LINE_BYTES
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr, Quads, int_lanes
from pillion.kernels.cpu.language.isa import Isa, TileRows
from pillion.kernels.cpu.products.tiles import TOTALS_BYTES

# A tile reads this many bytes of a panel in each step.
PANEL_STEP_BYTES = 128
_STEPS_PER_ITERATION = 2


@dataclass(frozen=True, slots=True)
class TileKind:
    """Says what a tile multiplies. A step is one input of float32 weights, a pair of bfloat16 weights, or four codes.

    Attributes:
        weights: the kind of the packed weights.
        rows: the type of the rows: "bf16", or "fp32", which float32 weights need, or "int8", for weights of that kind.
    """

    weights: str
    rows: str

    @property
    def inputs(self) -> int:
        """Returns how many inputs of the matrix one step multiplies."""
        return 4 if self.rows == "int8" else 1 if self.weights == "fp32" else 2

    @property
    def row_step_bytes(self) -> int:
        """Returns how many bytes of a row one step reads."""
        return self.inputs * {"int8": 1, "bf16": 2, "fp32": 4}[self.rows]

    def tiles(self, isa: Isa) -> TileRows:
        """Returns the limits on the rows of such tiles."""
        return {"int8": isa.int8_tiles, "bf16": isa.bf16_tiles, "fp32": isa.fp32_tiles}[self.rows]


@dataclass(frozen=True, slots=True)
class TileArgs:
    """Holds the arguments of a tile's function.

    Attributes:
        x: the first row, of the kind's type.
        x_stride: bytes from row to row.
        panel: the weights.
        steps: number of steps in the depth.
        ahead: memory to prefetch, for instance the next panel.
        ahead_step: bytes to prefetch in each step.
        sums: float32 [rows, 32], the result, or int32 for rows of int8.
    """

    x: Ptr
    x_stride: Int
    panel: Ptr
    steps: Int
    ahead: Ptr
    ahead_step: Int
    sums: Ptr

    def half(self, number: int) -> TileArgs:
        """Returns the arguments of a narrow tile: one half of the panel, and of what is prefetched."""
        step = self.ahead_step // 2
        ahead = self.ahead + self.steps * step * number
        panel, sums = (place + number * VECTOR_BYTES for place in (self.panel, self.sums))
        return TileArgs(self.x, self.x_stride, panel, self.steps, ahead, step, sums)


def multiply_rows(k: Kernel, kind: TileKind, rows: Int, args: TileArgs) -> None:
    """Multiplies ``rows`` rows, 1 to ``kind.tiles(isa).most``, with a panel."""
    tiles = kind.tiles(k.isa)
    x_bytes = (rows - 1) * args.x_stride + args.steps * kind.row_step_bytes
    inside = k.holds(args.x, x_bytes) & k.holds(args.panel, args.steps * PANEL_STEP_BYTES)
    with k.when(inside & k.holds(args.sums, rows * TOTALS_BYTES)):
        for height in k.cases(rows, tiles.most):
            if height <= tiles.wide:
                _call_tile(k, kind, height, 2, args)
            else:
                for number in range(2):
                    _call_tile(k, kind, height, 1, args.half(number))


def _call_tile(k: Kernel, kind: TileKind, rows: int, width: int, args: TileArgs) -> None:
    def body(inner: Kernel, *seen: Any) -> None:
        _Tile(inner, kind, rows, width, TileArgs(*seen)).write()

    values = (args.x, args.x_stride, args.panel, args.steps, args.ahead, args.ahead_step, args.sums)
    k.call_subroutine(f"gemm_tile_{kind.weights}_{kind.rows}_{rows}x{width}", values, body)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Emits the function for one number of rows, ``width`` vectors wide."""

    k: Kernel
    kind: TileKind
    rows: int
    width: int
    args: TileArgs

    def write(self) -> None:
        k, args = self.k, self.args
        zero = Quads(k, int_lanes(0)) if self.kind.rows == "int8" else k.vector(0.0)
        sums = [[k.variable(zero) for _ in range(self.width)] for _ in range(self.rows)]
        rows = [args.x + args.x_stride * row for row in range(self.rows)]
        with k.range(args.steps, step=_STEPS_PER_ITERATION) as first:
            for step in range(_STEPS_PER_ITERATION):
                at = first + step
                line = args.panel + at * PANEL_STEP_BYTES
                self._prefetch(args.ahead + at * args.ahead_step)
                for offset, weights in self._weights(line):
                    place = at * self.kind.row_step_bytes + offset
                    for row, totals in zip(rows, sums, strict=True):
                        for total, weight in zip(totals, weights, strict=True):
                            total.value = self._sum(total.value, row + place, weight)
        for number, totals in enumerate(sums):
            for half, total in enumerate(totals):
                k.write(args.sums + (number * TOTALS_BYTES + half * VECTOR_BYTES), total.value.ir, 4)

    def _weights(self, line: Ptr) -> Iterator[tuple[int, list[Any]]]:
        """Yields the weights of a step, in the order in which they are multiplied, each with its offset in a row's
        step."""
        k = self.k
        halves = [line + number * VECTOR_BYTES for number in range(self.width)]
        if self.kind.weights == "fp32":
            yield 0, [k.load(half) for half in halves]
            return
        if self.kind.rows == "int8":
            yield 0, [k.load_quads(half) for half in halves]
            return
        pairs = [k.load_pairs(half) for half in halves]
        if self.kind.rows == "bf16":
            yield 0, pairs
            return
        yield 0, [k.low(pair) for pair in pairs]
        yield 4, [k.high(pair) for pair in pairs]

    def _prefetch(self, line: Ptr) -> None:
        # A tile of one row mostly waits for memory, and the processor's own prefetcher is faster alone.
        if self.rows == 1:
            return
        for at in range(0, PANEL_STEP_BYTES * self.width // 2, LINE_BYTES):
            self.k.prefetch(line + at, near=False)

    def _sum(self, total: Any, x: Ptr, weight: Any) -> Any:
        k = self.k
        if self.kind.rows == "fp32":
            return k.fma(weight, k.broadcast(x), total)
        if self.kind.rows == "int8":
            return k.dot_codes(total, weight, k.broadcast_quad(x))
        return k.dot(total, weight, k.broadcast_pair(x))
