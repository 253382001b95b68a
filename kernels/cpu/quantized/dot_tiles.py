"""Products of int8 rows with a panel of codes (:mod:`pillion.kernels.cpu.quantized.dot_kinds`), group by group of
inputs, with integer sums.

    total = 0;  for each group: total = (scale * row's scale) * (sum of code * row's code) + total
                                total = offset * (row's scale * sum of row's codes) + total

A group's sum is exact in any order, and groups are folded in ascending order by two float32 operations. So a row's
result has the same bits in every tile, and on every processor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pillion.kernels.cpu.language.byte_codes import LINE_BYTES
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr, Quads, Vec, int_lanes
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.products.tiles import DEPTH_MULTIPLE, PANEL_COLUMNS, TOTALS_BYTES
from pillion.kernels.cpu.quantized.codes import UNIT_INPUTS
from pillion.kernels.cpu.quantized.dot_kinds import DotKind, unit_codes
from pillion.kernels.cpu.quantized.input_rows import ROW_CONSTANTS, ROW_CONSTANTS_BYTES, remaining_bias

# Units of a group per iteration; a divisor of every group's units.
_UNROLLED = DEPTH_MULTIPLE // UNIT_INPUTS


@dataclass(frozen=True, slots=True)
class DotRows:
    """Arguments of a product, and of a tile's function.

    Attributes:
        x: the first row's codes.
        x_stride: bytes from row to row.
        about: ROW_CONSTANTS of the groups of the first row.
        about_stride: bytes from one row's constants to the next row's.
        panel: constants and codes of the first group.
        group_units: units of a group; the last group may have fewer.
        units: units of all groups.
        ahead: memory to prefetch, for instance the next panel.
        ahead_step: bytes to prefetch per unit.
        totals: float32 [rows, 32], to which the product is added.
    """

    x: Ptr
    x_stride: Int
    about: Ptr
    about_stride: Int
    panel: Ptr
    group_units: Int
    units: Int
    ahead: Ptr
    ahead_step: Int
    totals: Ptr

    @property
    def groups(self) -> Int:
        """The number of groups."""
        return (self.units + (self.group_units - 1)) // self.group_units

    def words(self) -> tuple[Int | Ptr, ...]:
        """Return all values in the order of the attributes."""
        return tuple(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class DotProduct:
    """Product of int8 rows with one kind of codes. ``offsets``: whether groups have offsets."""

    k: Kernel
    kind: DotKind
    offsets: bool

    @property
    def constants_bytes(self) -> int:
        """Bytes of a group's scales and offsets, which precede its codes."""
        return PANEL_COLUMNS * self.kind.constant_bytes * (2 if self.offsets else 1)

    def max_rows(self) -> int:
        return self.k.isa.dot_tiles.tallest

    def panel_bytes(self, units: Int, group_units: Int) -> Int:
        return units * self.kind.unit_bytes + (units + (group_units - 1)) // group_units * self.constants_bytes

    def group_bytes(self, units: Int) -> Int:
        return units * self.kind.unit_bytes + self.constants_bytes

    def constants(self, panel: Ptr, halves: range) -> list[list[Vec]]:
        """Load a group's scales, and its offsets, for some halves of a panel."""
        parts = range(2 if self.offsets else 1)
        return [[self._constants(panel, half + 2 * part) for half in halves] for part in parts]

    def _constants(self, panel: Ptr, number: int) -> Vec:
        k, kind = self.k, self.kind
        at = panel + number * LANES * kind.constant_bytes
        return k.load_half(at) if kind.constant_bytes == 2 else k.load(at)

    def fold(self, constants: list[list[Vec]], about: Ptr, halves: range, sums: list[Quads], totals: Ptr) -> None:
        """Add a row's sums of a group, times the scales of both sides, to the row's totals. ``about``: the group's
        ROW_CONSTANTS."""
        k = self.k
        scales, *offsets = constants
        scale = k.broadcast(about + ROW_CONSTANTS["scale"])
        for at, half in enumerate(halves):
            address = totals + half * VECTOR_BYTES
            total = k.fma(scales[at] * scale, k.real_lanes(sums[at]), k.load(address))
            for offset in offsets:
                total = k.fma(offset[at], k.broadcast(about + ROW_CONSTANTS["sum"]), total)
            k.store(address, total)

    def multiply(self, rows: Int, args: DotRows, finish: Callable[[Int, Ptr], None]) -> None:
        """Multiply ``rows`` rows by a panel, in tiles of even height; call ``finish`` with each row's number and
        totals. Each tile prefetches its share of the memory ahead."""
        k, highest = self.k, self.max_rows()
        tiles = (rows + (highest - 1)) // highest
        step = k.int(self.kind.unit_bytes) // tiles
        with k.range(tiles) as tile:
            first = rows * tile // tiles
            count = rows * (tile + 1) // tiles - first
            tile_args = replace(
                args,
                x=args.x + first * args.x_stride,
                about=args.about + first * args.about_stride,
                ahead=args.ahead + tile * args.units * step,
                ahead_step=step,
            )
            with k.range(count * 2) as half:
                k.store(args.totals + half * VECTOR_BYTES, k.vector(0.0))
            self._tile(count, tile_args)
            with k.range(count) as row:
                finish(first + row, args.totals + row * TOTALS_BYTES)

    def _tile(self, rows: Int, args: DotRows) -> None:
        k, tiles = self.k, self.k.isa.dot_tiles
        inside = k.in_bounds(args.x, (rows - 1) * args.x_stride + args.units * UNIT_INPUTS)
        inside = inside & k.in_bounds(args.about, (rows - 1) * args.about_stride + args.groups * ROW_CONSTANTS_BYTES)
        inside = inside & k.in_bounds(args.panel, self.panel_bytes(args.units, args.group_units))
        with k.when(inside & k.in_bounds(args.totals, rows * TOTALS_BYTES)):
            for height in k.cases(rows, tiles.tallest):
                for halves in (range(2),) if height <= tiles.wide else (range(1), range(1, 2)):
                    self._call_tile(height, halves, args)

    def _call_tile(self, rows: int, halves: range, args: DotRows) -> None:
        def body(inner: Kernel, *params: Any) -> None:
            _DotTile(replace(self, k=inner), rows, halves, DotRows(*params)).write()

        side = "" if len(halves) == 2 else f"_{halves.start}"
        parts = ["gemm_tile", self.kind.name, "offsets" * self.offsets, f"{rows}x{len(halves)}{side}"]
        self.k.call_subroutine("_".join(filter(None, parts)), args.words(), body)


@dataclass(frozen=True, slots=True)
class _DotTile:
    """Emitter of the function for one number of rows and some halves of a panel."""

    product: DotProduct
    rows: int
    halves: range
    args: DotRows

    def write(self) -> None:
        k, args, product = self.product.k, self.args, self.product
        stride = product.group_bytes(args.group_units)
        with k.range(args.groups) as group:
            begin, panel = group * args.group_units, args.panel + group * stride
            sums = [[k.variable(start) for _ in self.halves] for start in self._starts(group)]
            with k.range(k.min(args.group_units, args.units - begin), step=_UNROLLED) as first:
                for step in range(_UNROLLED):
                    self._multiply(panel + product.constants_bytes, begin, first + step, sums)
            self._fold(panel, group, sums)

    def _starts(self, group: Int) -> list[Quads]:
        """Return the initial value of each row's sums, which compensates for the bias of stored codes."""
        k, args = self.product.k, self.args
        if not remaining_bias(k, self.product.kind.bias):
            return [Quads(k, int_lanes(0))] * self.rows
        shift = args.about + (group * ROW_CONSTANTS_BYTES + ROW_CONSTANTS["shift"])
        return [k.broadcast_quad(shift + args.about_stride * row) for row in range(self.rows)]

    def _multiply(self, codes: Ptr, begin: Int, unit: Int, sums: list[list[Any]]) -> None:
        """Multiply a unit of a group whose first unit is ``begin``."""
        k, args, kind = self.product.k, self.args, self.product.kind
        self._prefetch((begin + unit) * args.ahead_step)
        weights = unit_codes(k, kind, codes + unit * kind.unit_bytes, self.halves)
        x = args.x + (begin + unit) * UNIT_INPUTS
        for row, totals in enumerate(sums):
            row_codes = k.broadcast_quad(x + args.x_stride * row)
            for total, weight in zip(totals, weights, strict=True):
                total.value = k.dot_codes(total.value, weight, row_codes, small=kind.bits == 4)

    def _fold(self, panel: Ptr, group: Int, sums: list[list[Any]]) -> None:
        """Add a group's sums, times the scales of both sides, to the totals."""
        args, constants = self.args, self.product.constants(panel, self.halves)
        for row, row_sums in enumerate(sums):
            about = args.about + (args.about_stride * row + group * ROW_CONSTANTS_BYTES)
            values = [total.value for total in row_sums]
            self.product.fold(constants, about, self.halves, values, args.totals + row * TOTALS_BYTES)

    def _prefetch(self, offset: Int) -> None:
        size = self.product.kind.unit_bytes * len(self.halves) // 2
        for at in range(0, size, LINE_BYTES):
            self.product.k.prefetch(self.args.ahead + (offset + at), near=False)
