"""Products of rows with panels of codes in matrix tiles, group by group of inputs.

    total = 0;  for each group: total = scale * (sum of code * x) + total, and with offsets once more

Codes are widened into the scratch once for all rows, some groups at a time. A tile of up to 32 rows then iterates over
these groups: each one's sums are computed in matrix tiles, stored, and folded into the totals. A single tile of rows
widens them itself, since configuring the matrix tiles takes as long as some of its groups.

Rows of int8 (:class:`DotTiles`) have the bits of :mod:`pillion.kernels.cpu.quantized.dot_tiles`, since sums of integers
are exact. Rows of bfloat16 (:class:`CodedTiles`) are multiplied by exact codes. A group's sum is one chain over
ascending inputs, of instructions whose size follows from the group's, so it has the same bits however many rows there
are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pillion.kernels.cpu.language.byte_codes import LINE_BYTES
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr, Vec
from pillion.kernels.cpu.language.matrix_tiles import STEP_BYTES, TILE_ROWS, TILE_STEPS, MatrixTiles
from pillion.kernels.cpu.products.tiles import TOTALS_BYTES
from pillion.kernels.cpu.quantized.codes import UNIT_INPUTS, load_constants, store_parts, unit_parts
from pillion.kernels.cpu.quantized.dot_kinds import unit_codes
from pillion.kernels.cpu.quantized.dot_tiles import DotProduct, DotRows
from pillion.kernels.cpu.quantized.input_rows import ROW_CONSTANTS, ROW_CONSTANTS_BYTES, kept_bias
from pillion.kernels.cpu.quantized.quantized_tiles import CodedProduct, CodedRows

# Rows per pass. Their totals come first in a thread's scratch, then a tile's sums, then the widened codes.
_PASS_ROWS = 512
_ROW_GROUPS = 2
_MAX_ROWS = _ROW_GROUPS * TILE_ROWS
# Bytes that are widened at a time, to stay in the L1 cache: for several tiles of rows, and for a single one, which
# overlaps both kinds of work.
_WIDE_BYTES, _ALONE_BYTES = 16384, 4096
# Bytes of a step of both halves of a panel.
_LINES_BYTES = 2 * LINE_BYTES

Product = DotProduct | CodedProduct


class GroupTiles(ABC):
    """The products of one panel, in a subclass for each type of rows.

    Attributes:
        product: the kind of codes.
        panel: a product's arguments; ``about`` has the ROW_CONSTANTS of int8 rows, or the sums of each group's inputs.
        unit_steps: steps of a unit.
        parts: pairs of lines per step, whose numbers add up to the codes.
        unit_x_bytes, group_about_bytes: bytes of a row per unit, and of its ``about`` per group.
    """

    unit_steps: int
    parts: int
    unit_x_bytes: int
    group_about_bytes: int

    def __init__(self, product: Product, panel: DotRows) -> None:
        self.product, self.panel, self.k = product, panel, product.k

    @property
    def step_bytes(self) -> int:
        return self.parts * _LINES_BYTES

    @property
    def in_place(self) -> bool:
        """True if codes need no widening."""
        return False

    @abstractmethod
    def of(self, k: Kernel) -> GroupTiles:
        """Return the same products in another function."""

    @abstractmethod
    def widen(self, unit: Ptr, out: Ptr) -> None:
        """Store a unit's steps, [steps][parts][2 halves] lines."""

    @abstractmethod
    def steps(self, units: Int) -> Int:
        """Return the steps of an instruction in a group of ``units`` units."""

    @abstractmethod
    def add(self, tiles: MatrixTiles, sums: int, rows: int, lines: int) -> None:
        """Add the products of two tiles."""

    @abstractmethod
    def constants(self, panel: Ptr) -> list[list[Vec]]:
        """Load a group's scales, and its offsets, for both halves of a panel."""

    @abstractmethod
    def fold(self, constants: list[list[Vec]], about: Ptr, sums: Ptr, totals: Ptr) -> None:
        """Add a row's sums of a group to its totals."""

    def group_bytes(self, units: Int) -> Int:
        return units * self.product.kind.unit_bytes + self.product.constants_bytes

    def multiply(self, rows: Int, finish: Callable[[Int, Ptr], None]) -> None:
        """Multiply ``rows`` rows by the panel; call ``finish`` with each row's number and totals."""
        k, totals = self.k, self.panel.totals
        with k.range(rows, step=_PASS_ROWS) as first:
            count = k.min(rows - first, _PASS_ROWS)
            with k.range(count * 2) as half:
                k.store(totals + half * VECTOR_BYTES, k.vector(0.0))
            self._pass(first, count)
            with k.range(count) as row:
                finish(first + row, totals + row * TOTALS_BYTES)

    @property
    def wide_bytes(self) -> int:
        """Bytes of a widened unit."""
        return self.unit_steps * self.step_bytes

    def chunk(self, group_units: Int, size: int) -> Int:
        """Return the groups to widen at a time into ``size`` bytes."""
        return self.k.max(self.k.int(size // self.wide_bytes) // group_units, 1)

    def widen_groups(self, codes: Ptr, stride: Int, wide: Ptr, groups: Int, units: Int) -> None:
        """Widen some groups of codes, ``stride`` bytes apart."""
        with self.k.range(groups) as group, self.k.range(units) as unit:
            at = codes + group * stride + unit * self.product.kind.unit_bytes
            self.widen(at, wide + (group * units + unit) * self.wide_bytes)

    def _pass(self, first: Int, count: Int) -> None:
        k, panel = self.k, self.panel
        whole = panel.units // panel.group_units
        rest = panel.units - whole * panel.group_units
        with k.builder.if_else((count <= _MAX_ROWS).ir) as (few, many):
            with few:
                self._tile(first, k.int(0), count, (k.int(0), whole, panel.group_units), alone=True)
            with many:
                chunk = self.chunk(panel.group_units, _WIDE_BYTES)
                with k.range((whole + (chunk - 1)) // chunk) as number:
                    group = number * chunk
                    self._groups(first, count, group, k.min(chunk, whole - group), panel.group_units)
        with k.when(rest > 0):
            self._groups(first, count, whole, k.int(1), rest)

    def _groups(self, first: Int, count: Int, group: Int, groups: Int, units: Int) -> None:
        k, panel, stride = self.k, self.panel, self.group_bytes(self.panel.group_units)
        with k.when(first < 1), k.range((group + groups) * stride, group * stride, step=LINE_BYTES) as at:
            k.prefetch(panel.ahead + at, near=False)
        if not self.in_place:
            codes = panel.panel + group * stride + self.product.constants_bytes
            self.widen_groups(codes, stride, self._wide, groups, units)
        tiles = (count + (_MAX_ROWS - 1)) // _MAX_ROWS
        with k.range(tiles) as tile:
            begin = count * tile // tiles
            self._tile(first, begin, count * (tile + 1) // tiles - begin, (group, groups, units), alone=False)

    @property
    def _wide(self) -> Ptr:
        """The widened codes."""
        return self.panel.totals + (_PASS_ROWS + 2 * _MAX_ROWS) * TOTALS_BYTES

    def _tile(self, first: Int, begin: Int, rows: Int, groups: tuple[Int, Int, Int], *, alone: bool) -> None:
        """Multiply a tile of rows by some groups: the first one, their number, and their units."""
        panel, product, (group, count, units) = self.panel, self.product, groups
        stride, row = self.group_bytes(panel.group_units), first + begin
        constants = panel.panel + group * stride
        in_place = alone or self.in_place
        self._call(
            _Groups(
                x=panel.x + (row * panel.x_stride + group * panel.group_units * self.unit_x_bytes),
                x_stride=panel.x_stride,
                about=panel.about + (row * panel.about_stride + group * self.group_about_bytes),
                about_stride=panel.about_stride,
                constants=constants,
                constants_stride=stride,
                lines=constants + product.constants_bytes if in_place else self._wide,
                lines_stride=stride if in_place else units * self.wide_bytes,
                groups=count,
                units=units,
                rows=rows,
                totals=panel.totals + begin * TOTALS_BYTES,
                sums=panel.totals + _PASS_ROWS * TOTALS_BYTES,
                ahead=panel.ahead,
            ),
            alone,
        )

    def _call(self, args: _Groups, alone: bool) -> None:
        k, product = self.k, self.product
        inside = k.in_bounds(args.x, (args.rows - 1) * args.x_stride + args.groups * args.units * self.unit_x_bytes)
        if product.offsets or self.group_about_bytes > 4:
            about = (args.rows - 1) * args.about_stride + args.groups * self.group_about_bytes
            inside = inside & k.in_bounds(args.about, about)
        last = (args.groups - 1) * args.constants_stride
        inside = inside & k.in_bounds(args.constants, last + product.constants_bytes)
        line_bytes = args.units * (product.kind.unit_bytes if alone else self.wide_bytes)
        inside = inside & k.in_bounds(args.lines, (args.groups - 1) * args.lines_stride + line_bytes)
        for groups, wanted in ((1, args.rows <= TILE_ROWS), (_ROW_GROUPS, args.rows > TILE_ROWS)):

            def body(inner: Kernel, *seen: Any, groups: int = groups) -> None:
                _GroupTile(self.of(inner), groups, _Groups(*seen), MatrixTiles.of(inner)).write(alone)

            with k.when(inside & wanted & (args.groups > 0)):
                words = [
                    "gemm_matrix_tile",
                    product.kind.name,
                    "offsets" * product.offsets,
                    "alone" * alone,
                    str(groups),
                ]
                k.call_subroutine("_".join(filter(None, words)), args.words(), body)


class DotTiles(GroupTiles):
    """Rows of int8. A step is a unit's four codes."""

    unit_steps, parts, unit_x_bytes, group_about_bytes = 1, 1, UNIT_INPUTS, ROW_CONSTANTS_BYTES
    product: DotProduct

    def of(self, k: Kernel) -> DotTiles:
        return DotTiles(replace(self.product, k=k), self.panel)

    @property
    def in_place(self) -> bool:
        return self.product.kind.bits == 8

    def widen(self, unit: Ptr, out: Ptr) -> None:
        for half, each in enumerate(unit_codes(self.k, self.product.kind, unit, range(2))):
            self.k.store_quads(out + half * VECTOR_BYTES, each)

    def steps(self, units: Int) -> Int:
        # A group has at most twice the steps of an instruction, and an even number if more than one instruction's.
        steps: Int = self.k.select(units <= TILE_STEPS, units, units // 2)
        return steps

    def add(self, tiles: MatrixTiles, sums: int, rows: int, lines: int) -> None:
        tiles.add_codes(sums, rows, lines)

    def constants(self, panel: Ptr) -> list[list[Vec]]:
        return self.product.constants(panel, range(2))

    def fold(self, constants: list[list[Vec]], about: Ptr, sums: Ptr, totals: Ptr) -> None:
        k = self.k
        found = [k.load_quads(sums + half * VECTOR_BYTES) for half in range(2)]
        if kept_bias(k, self.product.kind.bias):
            shift = k.broadcast_quad(about + ROW_CONSTANTS["shift"])
            found = [each + shift for each in found]
        self.product.fold(constants, about, range(2), found, totals)


class CodedTiles(GroupTiles):
    """Rows of bfloat16. A step is a pair of inputs; a code that is no bfloat16 number is the sum of two."""

    unit_steps, unit_x_bytes, group_about_bytes = 2, 2 * UNIT_INPUTS, 4
    product: CodedProduct

    def __init__(self, product: CodedProduct, panel: DotRows) -> None:
        super().__init__(product, panel)
        self.parts = product.kind.parts

    @classmethod
    def of_rows(cls, product: CodedProduct, rows: CodedRows, panel: Ptr) -> CodedTiles:
        mine = DotRows(
            x=rows.x,
            x_stride=rows.x_stride,
            about=rows.input_sums,
            about_stride=rows.input_sums_stride,
            panel=panel,
            group_units=rows.group_units,
            units=rows.units,
            ahead=rows.ahead,
            ahead_step=rows.ahead_step,
            totals=rows.totals,
        )
        return cls(product, mine)

    def of(self, k: Kernel) -> CodedTiles:
        return CodedTiles(replace(self.product, k=k), self.panel)

    def widen(self, unit: Ptr, out: Ptr) -> None:
        store_parts(self.k, out, unit_parts(self.k, self.product.kind, unit, wide_rows=False))

    def steps(self, units: Int) -> Int:
        # Groups are multiples of 16 inputs.
        steps: Int = self.k.select(
            (units % (TILE_STEPS // 2)).equals(0), self.k.int(TILE_STEPS), self.k.int(TILE_STEPS // 2)
        )
        return steps

    def add(self, tiles: MatrixTiles, sums: int, rows: int, lines: int) -> None:
        tiles.add_pairs(sums, rows, lines)

    def constants(self, panel: Ptr) -> list[list[Vec]]:
        size = LINE_BYTES // 4 * self.product.kind.constant_bytes
        return [
            [load_constants(self.k, self.product.kind, panel + (2 * part + half) * size) for half in range(2)]
            for part in range(2 if self.product.offsets else 1)
        ]

    def fold(self, constants: list[list[Vec]], about: Ptr, sums: Ptr, totals: Ptr) -> None:
        k, (scales, *offsets) = self.k, constants
        for half in range(2):
            at = half * VECTOR_BYTES
            total = k.fma(scales[half], k.load(sums + at), k.load(totals + at))
            for offset in offsets:
                total = k.fma(offset[half], k.broadcast(about), total)
            k.store(totals + at, total)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Arguments of a tile's function: ``groups`` groups of ``units`` units each, for ``rows`` rows, at most 32. A
    group's widened codes, or codes to widen, are ``lines``, and its constants are at ``constants``; ``sums`` is scratch
    for two groups of the tile, before the widened codes; ``ahead`` is the panel that a single tile prefetches."""

    x: Ptr
    x_stride: Int
    about: Ptr
    about_stride: Int
    constants: Ptr
    constants_stride: Int
    lines: Ptr
    lines_stride: Int
    groups: Int
    units: Int
    rows: Int
    totals: Ptr
    sums: Ptr
    ahead: Ptr

    def words(self) -> tuple[Int | Ptr, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def part(self, products: GroupTiles, begin: Int, groups: Int, lines: Ptr, lines_stride: Int) -> _Groups:
        """Return the arguments of some groups, from ``begin`` on."""
        return replace(
            self,
            x=self.x + begin * self.units * products.unit_x_bytes,
            about=self.about + begin * products.group_about_bytes,
            constants=self.constants + begin * self.constants_stride,
            lines=lines,
            lines_stride=lines_stride,
            groups=groups,
        )


@dataclass(frozen=True, slots=True)
class _GroupTile:
    """Emitter of the function for one or two groups of 16 rows. Tiles: the sums of each group of rows and half of a
    panel, the rows of each group, and the lines of each half."""

    products: GroupTiles
    row_groups: int
    args: _Groups
    tiles: MatrixTiles

    def write(self, alone: bool) -> None:
        k, args = self.products.k, self.args
        steps = self.products.steps(args.units)
        heights = [k.min(args.rows - TILE_ROWS * group, TILE_ROWS) for group in range(self.row_groups)]
        sums = [height for height in heights for _ in range(2)]
        row_bytes = [VECTOR_BYTES] * len(sums) + [steps * STEP_BYTES] * len(heights) + [VECTOR_BYTES] * 2
        self.tiles.shape([*sums, *heights, steps, steps], row_bytes)
        if alone:
            self._write_chunks(steps)
        else:
            self._write_groups(args, steps)
        self.tiles.release()

    def _write_chunks(self, steps: Int) -> None:
        """Widen some groups, and multiply them, and so on."""
        k, args, products = self.products.k, self.args, self.products
        wide, chunk = args.sums + 2 * _MAX_ROWS * TOTALS_BYTES, products.chunk(args.units, _ALONE_BYTES)
        with k.range((args.groups + (chunk - 1)) // chunk) as index:
            number = index * chunk
            groups = k.min(chunk, args.groups - number)
            codes, at = args.lines + number * args.lines_stride, number * args.constants_stride
            with k.range(at + groups * args.constants_stride, at, step=LINE_BYTES) as line:
                k.prefetch(args.ahead + line, near=False)
            if products.in_place:
                mine = args.part(products, number, groups, codes, args.lines_stride)
            else:
                products.widen_groups(codes, args.lines_stride, wide, groups, args.units)
                mine = args.part(products, number, groups, wide, args.units * products.wide_bytes)
            self._write_groups(mine, steps)

    def _write_groups(self, args: _Groups, steps: Int) -> None:
        """Multiply groups, each while the sums of the one before are folded."""
        k = self.products.k
        self._multiply(args, k.int(0), steps)
        with k.range(args.groups, 1) as group:
            self._multiply(args, group, steps)
            self._fold(args, group - 1)
        self._fold(args, args.groups - 1)

    def _sums(self, group: Int) -> Ptr:
        """Return the address of a group's sums, [rows, 32]."""
        return self.args.sums + (group & 1) * (_MAX_ROWS * TOTALS_BYTES)

    def _fold(self, args: _Groups, group: Int) -> None:
        k, sums = self.products.k, self._sums(group)
        constants = self.products.constants(args.constants + group * args.constants_stride)
        with k.range(args.rows) as row:
            about = args.about + (row * args.about_stride + group * self.products.group_about_bytes)
            self.products.fold(constants, about, sums + row * TOTALS_BYTES, args.totals + row * TOTALS_BYTES)

    def _multiply(self, args: _Groups, group: Int, steps: Int) -> None:
        k, tiles, products = self.products.k, self.tiles, self.products
        first_rows, first_lines = 2 * self.row_groups, 3 * self.row_groups
        for sums in range(first_rows):
            tiles.clear(sums)
        with k.range(args.units * products.unit_steps // steps) as number:
            lines = args.lines + (group * args.lines_stride + number * steps * products.step_bytes)
            x = args.x + (group * args.units * products.unit_x_bytes + number * steps * STEP_BYTES)
            for rows in range(self.row_groups):
                tiles.load(first_rows + rows, x + args.x_stride * (TILE_ROWS * rows), args.x_stride)
            for part in range(products.parts):
                for half in range(2):
                    at = lines + (2 * part + half) * VECTOR_BYTES
                    tiles.load(first_lines + half, at, products.step_bytes)
                for rows in range(self.row_groups):
                    for half in range(2):
                        products.add(tiles, 2 * rows + half, first_rows + rows, first_lines + half)
        for rows in range(self.row_groups):
            for half in range(2):
                place = rows * TILE_ROWS * TOTALS_BYTES + half * VECTOR_BYTES
                tiles.store(2 * rows + half, self._sums(group) + place, TOTALS_BYTES)
