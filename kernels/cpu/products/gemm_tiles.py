"""The inner kernels of products: a few rows times one panel of packed weights (32 outputs), over the whole depth.

A tile's sums stay in registers: 2 vectors per row, or 1 in a narrow tile, which computes half of the panel's outputs. A
processor of few registers reads fewer weights per product with narrow tiles of many rows than with wide tiles of few.
Each output is one chain of additions, in the order of the inputs, whatever the tile: a row's result has the same bits
in every tile. There is one function for every number of rows, so that rows can be divided into tiles of even height
(:mod:`pillion.kernels.cpu.products.gemm`). Finished sums go to memory, so that all epilogues share these functions.

float32 rows may be multiplied by bfloat16 weights, which are widened in registers. That is exact: the sums have the
bits of float32 weights, for half of their memory.

Rows of int8 codes are multiplied by int8 codes. Their sums, also those in memory, are exact 32-bit integers.

With matrix tiles (:mod:`pillion.kernels.cpu.language.matrix_tiles`), all products of bfloat16 rows run there, however
few, and so do those of many rows of codes: a line of a panel is a step of one of its two tiles of outputs. An
instruction always multiplies the same 16 steps of the depth, or those after the last whole 16, so that a sum has the
same bits in tiles of any height.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pillion.kernels.cpu.language.byte_codes import LINE_BYTES
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr, Quads, int_lanes
from pillion.kernels.cpu.language.isa import Isa, TileRows
from pillion.kernels.cpu.language.matrix_tiles import STEP_BYTES, TILE_ROWS, TILE_STEPS, MatrixTiles
from pillion.kernels.cpu.products.tiles import TOTALS_BYTES

# Bytes of a panel per step: a line for each of its two tiles.
PANEL_STEP_BYTES = 128
_STEPS_PER_ITERATION = 2
# In matrix tiles: groups of 16 rows that share the loads of a panel.
ROW_GROUPS = 2


@dataclass(frozen=True, slots=True)
class TileKind:
    """Types of a tile's operands. A step is one input of float32 weights, a pair of bfloat16 weights, or four codes.

    Attributes:
        weights: the kind of the packed weights.
        rows: the type of the rows: "bf16", "fp32" (required by float32 weights), or "int8" (for weights of that kind).
    """

    weights: str
    rows: str

    @property
    def name(self) -> str:
        """Part of the names of the tiles' functions."""
        return f"{self.weights}_{self.rows}"

    @property
    def inputs(self) -> int:
        """Inputs per step."""
        return 4 if self.rows == "int8" else 1 if self.weights == "fp32" else 2

    @property
    def row_step_bytes(self) -> int:
        """Bytes of a row per step."""
        return self.inputs * {"int8": 1, "bf16": 2, "fp32": 4}[self.rows]

    def tiles(self, isa: Isa) -> TileRows:
        """Return the max rows of tiles of this kind."""
        if self.in_matrix_tiles(isa):
            return TileRows(ROW_GROUPS * TILE_ROWS)
        return self.register_tiles(isa)

    def register_tiles(self, isa: Isa) -> TileRows:
        """Return the max rows of tiles with sums in vector registers."""
        return {"int8": isa.int8_tiles, "bf16": isa.bf16_tiles, "fp32": isa.fp32_tiles}[self.rows]

    def in_matrix_tiles(self, isa: Isa) -> bool:
        """Return whether the products run in matrix tiles."""
        return isa.matrix_tiles and self.rows != "fp32"


@dataclass(frozen=True, slots=True)
class TileArgs:
    """The arguments of a tile's function.

    Attributes:
        x: the first row, of the kind's type.
        x_stride: bytes from row to row.
        panel: the weights.
        steps: number of steps in the depth.
        ahead: memory to prefetch, for instance the next panel.
        ahead_step: bytes to prefetch per step.
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
        """Return the arguments of a narrow tile: one half of the panel, and of the memory to prefetch."""
        step = self.ahead_step // 2
        ahead = self.ahead + self.steps * step * number
        panel, sums = (pointer + number * VECTOR_BYTES for pointer in (self.panel, self.sums))
        return TileArgs(self.x, self.x_stride, panel, self.steps, ahead, step, sums)


def multiply_rows(k: Kernel, kind: TileKind, rows: Int, args: TileArgs) -> None:
    """Multiply ``rows`` rows, 1 to ``kind.tiles(isa).tallest``, with a panel."""
    x_bytes = (rows - 1) * args.x_stride + args.steps * kind.row_step_bytes
    inside = k.in_bounds(args.x, x_bytes) & k.in_bounds(args.panel, args.steps * PANEL_STEP_BYTES)
    with k.when(inside & k.in_bounds(args.sums, rows * TOTALS_BYTES)):
        if not kind.in_matrix_tiles(k.isa):
            _call_tiles(k, kind, rows, args)
        elif kind.rows != "int8":
            _call_matrix_tiles(k, kind, rows, args)
        else:
            # Integer sums are the same either way, and few rows take less time in registers.
            with k.builder.if_else((rows <= k.isa.int8_tiles.tallest).ir) as (few, many):
                with few:
                    _call_tiles(k, kind, rows, args)
                with many:
                    _call_matrix_tiles(k, kind, rows, args)


def _call_tiles(k: Kernel, kind: TileKind, rows: Int, args: TileArgs) -> None:
    tiles = kind.register_tiles(k.isa)
    for height in k.cases(rows, tiles.tallest):
        if height <= tiles.wide:
            _call_tile(k, kind, height, 2, args)
        else:
            for number in range(2):
                _call_tile(k, kind, height, 1, args.half(number))


def _call_tile(k: Kernel, kind: TileKind, rows: int, width: int, args: TileArgs) -> None:
    def body(inner: Kernel, *params: Any) -> None:
        _Tile(inner, kind, rows, width, TileArgs(*params)).write()

    values = (args.x, args.x_stride, args.panel, args.steps, args.ahead, args.ahead_step, args.sums)
    k.call_subroutine(f"gemm_tile_{kind.name}_{rows}x{width}", values, body)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Emitter of the function for one number of rows, ``width`` vectors wide."""

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
                    at_row = at * self.kind.row_step_bytes + offset
                    for row, totals in zip(rows, sums, strict=True):
                        for total, weight in zip(totals, weights, strict=True):
                            total.value = self._sum(total.value, row + at_row, weight)
        for number, totals in enumerate(sums):
            for half, total in enumerate(totals):
                k.write(args.sums + (number * TOTALS_BYTES + half * VECTOR_BYTES), total.value.ir, 4)

    def _weights(self, line: Ptr) -> Iterator[tuple[int, list[Any]]]:
        """Yield the weights of a step, in the order of multiplication, each with its offset in a row's step."""
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
        # A tile of one row mostly waits for memory, where the hardware prefetcher alone is faster.
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


def _call_matrix_tiles(k: Kernel, kind: TileKind, rows: Int, args: TileArgs) -> None:
    """Multiply 1 to 32 rows with a panel in matrix tiles."""
    values = (rows, args.x, args.x_stride, args.panel, args.steps, args.ahead, args.ahead_step, args.sums)
    for groups, fits in ((1, rows <= TILE_ROWS), (ROW_GROUPS, rows > TILE_ROWS)):

        def body(inner: Kernel, rows: Int, *params: Any, groups: int = groups) -> None:
            MatrixTile(inner, kind, groups, rows, TileArgs(*params), MatrixTiles.of(inner)).write()

        with k.when(fits):
            k.call_subroutine(f"gemm_matrix_tile_{kind.name}_{groups}", values, body)


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """Emitter of the function for ``groups`` groups of 16 rows; the last group may have fewer.

    Tiles, in order: the sums of each group and half of the panel, the rows of each group, the weights of each half.
    """

    k: Kernel
    kind: TileKind
    groups: int
    rows: Int
    args: TileArgs
    tiles: MatrixTiles

    def write(self) -> None:
        k, args, tiles = self.k, self.args, self.tiles
        whole = args.steps // TILE_STEPS
        rest = args.steps - whole * TILE_STEPS
        self.shape(TILE_STEPS)
        with k.range(whole) as number:
            self.multiply(number)
        # Tiles of another shape start zeroed, so the sums go through memory.
        self.move(tiles.store)
        with k.when(rest > 0):
            self.shape(rest)
            self.move(tiles.load)
            self.multiply(whole)
            self.move(tiles.store)
        tiles.release()

    def _sums(self, group: int, half: int) -> int:
        return 2 * group + half

    @property
    def _first_rows(self) -> int:
        return 2 * self.groups

    @property
    def _first_weights(self) -> int:
        return 3 * self.groups

    def shape(self, steps: Int | int) -> None:
        """Configure the tiles for ``steps`` steps at a time."""
        heights = [self.k.min(self.rows - TILE_ROWS * group, TILE_ROWS) for group in range(self.groups)]
        sums = [height for height in heights for _ in range(2)]
        row_bytes = [VECTOR_BYTES] * len(sums) + [self.k.int(steps) * STEP_BYTES] * len(heights) + [VECTOR_BYTES] * 2
        self.tiles.shape([*sums, *heights, steps, steps], row_bytes)

    def move(self, move: Callable[[int, Ptr, int], None]) -> None:
        """Load or store all sums."""
        for group in range(self.groups):
            for half in range(2):
                offset = group * TILE_ROWS * TOTALS_BYTES + half * VECTOR_BYTES
                move(self._sums(group, half), self.args.sums + offset, TOTALS_BYTES)

    def multiply(self, number: Int) -> None:
        """Multiply one instruction's steps, from step 16 * ``number`` on."""
        args, tiles = self.args, self.tiles
        add = tiles.add_codes if self.kind.rows == "int8" else tiles.add_pairs
        self._prefetch(number)
        lines = args.panel + number * (TILE_STEPS * PANEL_STEP_BYTES)
        for half in range(2):
            tiles.load(self._first_weights + half, lines + half * VECTOR_BYTES, PANEL_STEP_BYTES)
        for group in range(self.groups):
            x = args.x + (args.x_stride * (TILE_ROWS * group) + number * (TILE_STEPS * STEP_BYTES))
            tiles.load(self._first_rows + group, x, args.x_stride)
            for half in range(2):
                add(self._sums(group, half), self._first_rows + group, self._first_weights + half)

    def _prefetch(self, number: Int) -> None:
        k, size = self.k, self.args.ahead_step * TILE_STEPS
        first = self.args.ahead + number * size
        with k.range(size, step=LINE_BYTES) as at:
            k.prefetch(first + at, near=False)
