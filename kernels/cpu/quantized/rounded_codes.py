"""Products of bfloat16 rows with codes as plain weights: scale * code + offset in bfloat16.

    codes of a panel --widened, a block of inputs at a time--> bfloat16 pairs --products of plain weights--> sums

A block is widened once for all rows and multiplied in matrix tiles. It begins at a multiple of an instruction's inputs,
so a row has the bits of its product with plain weights, whatever the number of rows. More than 32 rows are multiplied
by :mod:`pillion.kernels.cpu.products.many_rows`. Fewer rows use smaller blocks in the L1 cache, whose codes are widened
while the processor still adds up the block before.

Weights are truncated from float32 to bfloat16. Rounding to nearest would add half to the time of widening 4 bits, which
determines that of a single row. Instead, scales and offsets are enlarged so that the mean error is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pillion.kernels.cpu.language.byte_codes import LINE_BYTES
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.matrix_tiles import TILE_ROWS, TILE_STEPS, MatrixTiles
from pillion.kernels.cpu.products.gemm_tiles import PANEL_STEP_BYTES, MatrixTile, TileArgs, TileKind
from pillion.kernels.cpu.products.tiles import TOTALS_BYTES
from pillion.kernels.cpu.quantized.codes import UNIT_INPUTS, load_constants, unit_parts
from pillion.kernels.cpu.quantized.quantized_tiles import CodedProduct

TILE = TileKind("bf16", "bf16")
# Units per widened block for few rows: a whole number of instructions.
_BLOCK_UNITS = 16
UNIT_STEPS = UNIT_INPUTS // TILE.inputs
_UNIT_X_BYTES, _UNIT_WIDE_BYTES = UNIT_STEPS * TILE.row_step_bytes, UNIT_STEPS * PANEL_STEP_BYTES
# Factor of scales and offsets. Truncation of log-uniform values loses 2**-8 / (2 ln 2) of them on average.
CUT_FACTOR = 1 + 2**-9 / math.log(2)


@dataclass(frozen=True, slots=True)
class RoundedProduct:
    """Product of up to 32 bfloat16 rows with a panel.

    Attributes:
        coded: the kind of codes.
        units: units of a panel.
        group_units: units of a group; the last group may have fewer.
        x: the first row.
        x_stride: bytes from row to row.
        panel: constants and codes.
        ahead: the panel to prefetch.
        scratch: memory of the thread: sums [rows, 32], then a widened block.
    """

    coded: CodedProduct
    units: Int
    group_units: Int
    x: Ptr
    x_stride: Int
    panel: Ptr
    ahead: Ptr
    scratch: Ptr

    @property
    def k(self) -> Kernel:
        return self.coded.k

    def multiply(self, rows: Int) -> None:
        """Multiply the first ``rows`` rows; leave their sums in scratch memory."""
        k, coded = self.k, self.coded
        wide = self.scratch + TILE.tiles(k.isa).tallest * TOTALS_BYTES
        x_bytes = (rows - 1) * self.x_stride + self.units * _UNIT_X_BYTES
        inside = k.in_bounds(self.x, x_bytes) & k.in_bounds(self.scratch, rows * TOTALS_BYTES)
        inside = inside & k.in_bounds(self.panel, coded.panel_bytes(self.units, self.group_units))
        inside = inside & k.in_bounds(wide, _BLOCK_UNITS * _UNIT_WIDE_BYTES)
        sizes = self.units, self.group_units
        values = (rows, self.x, self.x_stride, self.panel, wide, *sizes, self.ahead, self.scratch)
        for groups, fits in ((1, rows <= TILE_ROWS), (2, rows > TILE_ROWS)):

            def body(inner: Kernel, *params: Any, groups: int = groups) -> None:
                _write_few(replace(coded, k=inner), groups, *params)

            with k.when(inside & fits):
                k.call_subroutine(f"gemm_round_tile_{_name_of(coded)}_{groups}", values, body)


def widen_part(
    coded: CodedProduct, units: Int, group_units: Int, panel: Ptr, ahead: Ptr, wide: Ptr, first: Int, count: Int
) -> None:
    """Widen ``count`` units of a panel from ``first`` on, and prefetch the same bytes of the panel ahead."""
    k = coded.k

    def body(inner: Kernel, *params: Any) -> None:
        _widen_units(replace(coded, k=inner), *params)

    inside = k.in_bounds(panel, coded.panel_bytes(units, group_units)) & k.in_bounds(wide, count * _UNIT_WIDE_BYTES)
    with k.when(inside):
        values = (panel, wide, first, count, group_units, ahead)
        k.call_subroutine(f"gemm_round_{_name_of(coded)}", values, body)


def _name_of(coded: CodedProduct) -> str:
    return coded.kind.name + "_offsets" * coded.offsets


def _write_few(
    coded: CodedProduct,
    groups: int,
    rows: Int,
    x: Ptr,
    x_stride: Int,
    panel: Ptr,
    wide: Ptr,
    units: Int,
    group_units: Int,
    ahead: Ptr,
    sums: Ptr,
) -> None:
    """Emit the function for up to 16 rows (``groups`` 1), or for 17 to 32."""
    k = coded.k
    args = TileArgs(x, x_stride, wide, k.int(0), wide, k.int(0), sums)
    tile = MatrixTile(k, TILE, groups, rows, args, MatrixTiles.of(k))

    def from_unit(unit: Int) -> MatrixTile:
        return replace(tile, args=replace(args, x=x + unit * _UNIT_X_BYTES))

    tile.shape(TILE_STEPS)
    with k.range(units, step=_BLOCK_UNITS) as unit:
        block_units = k.min(units - unit, _BLOCK_UNITS)
        _widen_units(coded, panel, wide, unit, block_units, group_units, ahead)
        with k.range(block_units * UNIT_STEPS // TILE_STEPS) as step:
            from_unit(unit).multiply(step)
    tile.move(tile.tiles.store)
    rest = units * UNIT_STEPS % TILE_STEPS
    with k.when(rest > 0):
        tile.shape(rest)
        tile.move(tile.tiles.load)
        last = (units - 1) // _BLOCK_UNITS * _BLOCK_UNITS
        from_unit(last).multiply((units - last) * UNIT_STEPS // TILE_STEPS)
        tile.move(tile.tiles.store)
    tile.tiles.release()


def _widen_units(
    coded: CodedProduct, panel: Ptr, wide: Ptr, first: Int, units: Int, group_units: Int, ahead: Ptr
) -> None:
    """Store ``units`` units of a panel from ``first`` on as bfloat16 weights, and prefetch the same bytes ``ahead``."""
    k, kind = coded.k, coded.kind
    half_bytes, end = LANES * kind.constant_bytes, first + units
    with k.range((end + (group_units - 1)) // group_units, first // group_units) as group:
        begin, at = group * group_units, group * coded.panel_bytes(group_units, group_units)
        constants = [
            load_constants(k, kind, panel + (at + half * half_bytes)) * CUT_FACTOR
            for half in range(4 if coded.offsets else 2)
        ]
        for line in range(0, coded.constants_bytes, LINE_BYTES):
            k.prefetch(ahead + (at + line), near=False)
        with k.range(k.min(begin + group_units, end), k.max(begin, first)) as unit:
            codes = at + coded.constants_bytes + (unit - begin) * kind.unit_bytes
            for line in range(0, kind.unit_bytes, LINE_BYTES):
                k.prefetch(ahead + (codes + line), near=False)
            target = wide + (unit - first) * _UNIT_WIDE_BYTES
            for step, tiles in enumerate(_floats(coded, panel + codes)):
                for half, values in enumerate(tiles):
                    pair = [_scaled(k, value, constants, half) for value in values]
                    k.write(target + (step * PANEL_STEP_BYTES + half * VECTOR_BYTES), k.cut_pairs(*pair).ir, 4)


def _floats(coded: CodedProduct, unit: Ptr) -> Iterator[Any]:
    """Yield a unit's codes as float32: for each pair of inputs, for each tile of outputs, those of both inputs."""
    k, kind = coded.k, coded.kind
    if kind.bits == 4:
        yield from unit_parts(k, kind, unit, wide_rows=True)
        return
    # For 8-bit codes the look-up of pairs takes fewer instructions.
    for tiles in unit_parts(k, kind, unit, wide_rows=False):
        yield [(k.low(pairs), k.high(pairs)) for (pairs,) in tiles]


def _scaled(k: Kernel, value: Vec, constants: list[Vec], half: int) -> Vec:
    scale, *offset = constants[half::2]
    return k.fma(scale, value, offset[0]) if offset else scale * value
