"""Products of many rows of int8 with panels of codes in matrix tiles, bit-identical to
:mod:`pillion.kernels.cpu.quantized.dot_tiles`.

4-bit codes are widened into the scratch once for all rows, some groups at a time. A tile of up to 32 rows then iterates
over these groups: each one's sums are computed in matrix tiles, stored, and folded into the totals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pillion.kernels.cpu.language.byte_codes import LINE_BYTES
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr
from pillion.kernels.cpu.language.matrix_tiles import STEP_BYTES, TILE_ROWS, TILE_STEPS, MatrixTiles
from pillion.kernels.cpu.products.tiles import TOTALS_BYTES
from pillion.kernels.cpu.quantized.codes import UNIT_INPUTS
from pillion.kernels.cpu.quantized.dot_kinds import unit_codes
from pillion.kernels.cpu.quantized.dot_tiles import DotProduct, DotRows
from pillion.kernels.cpu.quantized.input_rows import ROW_CONSTANTS, ROW_CONSTANTS_BYTES, kept_bias

# Rows per pass. Their totals come first in a thread's scratch, then a tile's sums, then the widened codes.
_PASS_ROWS = 512
_ROW_GROUPS = 2
_MAX_ROWS = _ROW_GROUPS * TILE_ROWS
# Units that are widened at a time: their lines, 8 KiB, stay in the L1 cache.
_WIDE_UNITS = 64
_WIDE_UNIT_BYTES = 2 * LINE_BYTES


@dataclass(frozen=True, slots=True)
class MatrixDots:
    """A product in matrix tiles; ``args`` are those of the first row."""

    product: DotProduct
    args: DotRows

    def multiply(self, rows: Int, finish: Callable[[Int, Ptr], None]) -> None:
        """Multiply ``rows`` rows by a panel; call ``finish`` with each row's number and totals."""
        k, totals = self.product.k, self.args.totals
        with k.range(rows, step=_PASS_ROWS) as first:
            count = k.min(rows - first, _PASS_ROWS)
            with k.range(count * 2) as half:
                k.store(totals + half * VECTOR_BYTES, k.vector(0.0))
            self._pass(first, count)
            with k.range(count) as row:
                finish(first + row, totals + row * TOTALS_BYTES)

    def _pass(self, first: Int, count: Int) -> None:
        k, args = self.product.k, self.args
        whole = args.units // args.group_units
        chunk = k.max(k.int(_WIDE_UNITS) // args.group_units, 1)
        with k.range((whole + (chunk - 1)) // chunk) as number:
            group = number * chunk
            self._groups(first, count, group, k.min(chunk, whole - group), args.group_units)
        rest = args.units - whole * args.group_units
        with k.when(rest > 0):
            self._groups(first, count, whole, k.int(1), rest)

    def _groups(self, first: Int, count: Int, group: Int, groups: Int, units: Int) -> None:
        k, args, product = self.product.k, self.args, self.product
        stride = product.group_bytes(args.group_units)
        panel = args.panel + group * stride
        sums = args.totals + _PASS_ROWS * TOTALS_BYTES
        wide = sums + _MAX_ROWS * TOTALS_BYTES
        self._ahead(first, group * stride, groups * stride)
        lines, lines_stride = panel + product.constants_bytes, stride
        if product.kind.bits == 4:
            self._widen(lines, wide, groups, units)
            lines, lines_stride = wide, units * _WIDE_UNIT_BYTES
        unit = group * args.group_units
        tiles = (count + (_MAX_ROWS - 1)) // _MAX_ROWS
        with k.range(tiles) as tile:
            begin = count * tile // tiles
            row = first + begin
            mine = _Groups(
                x=args.x + (row * args.x_stride + unit * UNIT_INPUTS),
                x_stride=args.x_stride,
                about=args.about + (row * args.about_stride + group * ROW_CONSTANTS_BYTES),
                about_stride=args.about_stride,
                panel=panel,
                panel_stride=stride,
                lines=lines,
                lines_stride=lines_stride,
                groups=groups,
                units=units,
                rows=count * (tile + 1) // tiles - begin,
                totals=args.totals + begin * TOTALS_BYTES,
                sums=sums,
            )
            self._call(mine)

    def _ahead(self, first: Int, begin: Int, size: Int) -> None:
        """Prefetch the same part of the next panel, in the first pass."""
        k = self.product.k
        with k.when(first < 1), k.range(begin + size, begin, step=LINE_BYTES) as at:
            k.prefetch(self.args.ahead + at, near=False)

    def _widen(self, codes: Ptr, wide: Ptr, groups: Int, units: Int) -> None:
        k, kind, stride = self.product.k, self.product.kind, self.product.group_bytes(self.args.group_units)
        with k.range(groups) as group, k.range(units) as unit:
            line = wide + (group * units + unit) * _WIDE_UNIT_BYTES
            stored = unit_codes(k, kind, codes + (group * stride + unit * kind.unit_bytes), range(2))
            for half, each in enumerate(stored):
                k.store_quads(line + half * VECTOR_BYTES, each)

    def _call(self, args: _Groups) -> None:
        k, product = self.product.k, self.product
        inside = k.in_bounds(args.x, (args.rows - 1) * args.x_stride + args.groups * args.units * UNIT_INPUTS)
        about = (args.rows - 1) * args.about_stride + args.groups * ROW_CONSTANTS_BYTES
        last = (args.groups - 1) * args.panel_stride
        inside = inside & k.in_bounds(args.about, about) & k.in_bounds(args.panel, last + product.constants_bytes)
        inside = inside & k.in_bounds(args.lines, (args.groups - 1) * args.lines_stride + args.units * _WIDE_UNIT_BYTES)
        for groups, wanted in ((1, args.rows <= TILE_ROWS), (_ROW_GROUPS, args.rows > TILE_ROWS)):

            def body(inner: Kernel, *seen: Any, groups: int = groups) -> None:
                _DotMatrixTile(replace(product, k=inner), groups, _Groups(*seen), MatrixTiles.of(inner)).write()

            with k.when(inside & wanted):
                words = ["gemm_matrix_tile", product.kind.name, "offsets" * product.offsets, str(groups)]
                k.call_subroutine("_".join(filter(None, words)), args.words(), body)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Arguments of a tile's function: ``groups`` groups of ``units`` units each, for ``rows`` rows, at most 32. Codes
    of a group are ``lines``, two per unit, and its constants are at ``panel``; ``sums`` is scratch of the tile."""

    x: Ptr
    x_stride: Int
    about: Ptr
    about_stride: Int
    panel: Ptr
    panel_stride: Int
    lines: Ptr
    lines_stride: Int
    groups: Int
    units: Int
    rows: Int
    totals: Ptr
    sums: Ptr

    def words(self) -> tuple[Int | Ptr, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class _DotMatrixTile:
    """Emitter of the function for one or two groups of 16 rows. Tiles: the sums of each group of rows and half of a
    panel, the rows of each group, and the codes of each half."""

    product: DotProduct
    row_groups: int
    args: _Groups
    tiles: MatrixTiles

    def write(self) -> None:
        k, args = self.product.k, self.args
        # All products have one shape: a group has at most twice the steps of a tile, and an even number if more than
        # one tile's.
        steps = k.select(args.units <= TILE_STEPS, args.units, args.units // 2)
        heights = [k.min(args.rows - TILE_ROWS * group, TILE_ROWS) for group in range(self.row_groups)]
        sums = [height for height in heights for _ in range(2)]
        row_bytes = [VECTOR_BYTES] * len(sums) + [steps * STEP_BYTES] * len(heights) + [VECTOR_BYTES] * 2
        self.tiles.shape([*sums, *heights, steps, steps], row_bytes)
        with k.range(args.groups) as group:
            self._multiply(group, steps)
            constants = self.product.constants(args.panel + group * args.panel_stride, range(2))
            with k.range(args.rows) as row:
                about = args.about + (row * args.about_stride + group * ROW_CONSTANTS_BYTES)
                place = row * TOTALS_BYTES
                found = [k.load_quads(args.sums + (place + half * VECTOR_BYTES)) for half in range(2)]
                if kept_bias(k, self.product.kind.bias):
                    shift = k.broadcast_quad(about + ROW_CONSTANTS["shift"])
                    found = [each + shift for each in found]
                self.product.fold(constants, about, range(2), found, args.totals + place)
        self.tiles.release()

    def _multiply(self, group: Int, steps: Int) -> None:
        k, args, tiles = self.product.k, self.args, self.tiles
        first_rows, first_codes = 2 * self.row_groups, 3 * self.row_groups
        for sums in range(first_rows):
            tiles.clear(sums)
        with k.range(args.units // steps) as part:
            lines = args.lines + (group * args.lines_stride + part * steps * _WIDE_UNIT_BYTES)
            for half in range(2):
                tiles.load(first_codes + half, lines + half * VECTOR_BYTES, _WIDE_UNIT_BYTES)
            for rows in range(self.row_groups):
                x = args.x + (args.x_stride * (TILE_ROWS * rows) + (group * args.units + part * steps) * UNIT_INPUTS)
                tiles.load(first_rows + rows, x, args.x_stride)
                for half in range(2):
                    tiles.add_codes(2 * rows + half, first_rows + rows, first_codes + half)
        for rows in range(self.row_groups):
            for half in range(2):
                at = rows * TILE_ROWS * TOTALS_BYTES + half * VECTOR_BYTES
                tiles.store(2 * rows + half, args.sums + at, TOTALS_BYTES)
