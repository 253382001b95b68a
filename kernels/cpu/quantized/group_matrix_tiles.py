"""Products of rows with panels of codes in matrix tiles, group by group of inputs.

    total = 0;  for each group: total = scale * (sum of code * x) + total, and with offsets once more

Codes are widened into the scratch once for all rows, several groups at a time. A tile of up to 32 rows then iterates
over these groups: a group's sums are computed in matrix tiles, stored, and folded into the totals. A single tile of
rows widens the codes in its own function, to configure the matrix tiles only once.

Products of int8 rows (:class:`DotTiles`) have the bits of :mod:`pillion.kernels.cpu.quantized.dot_tiles`, since integer
sums are exact. bfloat16 rows (:class:`CodedTiles`) are multiplied by exact codes. A group's sum is one chain over
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
from pillion.kernels.cpu.products.gemm_tiles import PANEL_STEP_BYTES, ROW_GROUPS
from pillion.kernels.cpu.products.many_rows import TILED_ROWS
from pillion.kernels.cpu.products.tiles import TOTALS_BYTES
from pillion.kernels.cpu.quantized.codes import UNIT_INPUTS, load_constants, store_parts, unit_parts
from pillion.kernels.cpu.quantized.dot_kinds import unit_codes
from pillion.kernels.cpu.quantized.dot_tiles import DotProduct, DotRows
from pillion.kernels.cpu.quantized.input_rows import ROW_CONSTANTS, ROW_CONSTANTS_BYTES, remaining_bias
from pillion.kernels.cpu.quantized.quantized_tiles import CodedProduct, CodedRows

# Rows per pass. A thread's scratch has their totals, then a tile's sums, then the widened codes.
_PASS_ROWS = 512

Product = DotProduct | CodedProduct


class GroupTiles(ABC):
    """Emitter of the products of rows with one panel; a subclass per type of rows.

    Attributes:
        product: the kind of codes.
        panel: a product's arguments; ``about`` has the ROW_CONSTANTS of int8 rows, or the sums of each group's inputs.
        unit_steps: steps of a unit.
        parts: bfloat16 numbers that add up to a code, each in a pair of lines per step; 1 for int8 rows.
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
        return self.parts * PANEL_STEP_BYTES

    @property
    def in_place(self) -> bool:
        """True if codes need no widening."""
        return False

    @abstractmethod
    def of(self, k: Kernel) -> GroupTiles:
        """Return the same emitter for the function that ``k`` builds."""

    @abstractmethod
    def widen(self, unit: Ptr, out: Ptr) -> None:
        """Store a unit's steps, [steps][parts][2 halves] lines."""

    @abstractmethod
    def steps(self, units: Int) -> Int:
        """Return the steps per instruction in groups of ``units`` units."""

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
        """Return the number of groups to widen at a time into ``size`` bytes, at least 1."""
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
        with k.builder.if_else((count <= TILED_ROWS).ir) as (few, many):
            with few:
                self._tile(first, k.int(0), count, (k.int(0), whole, panel.group_units), alone=True)
            with many:
                # 16 KiB of widened codes stay in the L1 cache.
                chunk = self.chunk(panel.group_units, 16384)
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
        tiles = (count + (TILED_ROWS - 1)) // TILED_ROWS
        with k.range(tiles) as tile:
            begin = count * tile // tiles
            self._tile(first, begin, count * (tile + 1) // tiles - begin, (group, groups, units), alone=False)

    @property
    def _wide(self) -> Ptr:
        """The widened codes."""
        return self.panel.totals + (_PASS_ROWS + 2 * TILED_ROWS) * TOTALS_BYTES

    def _tile(self, first: Int, begin: Int, rows: Int, groups: tuple[Int, Int, Int], *, alone: bool) -> None:
        """Multiply a tile of rows by ``groups``: the first group, the number of groups, and the units per group.
        ``alone``: the tile is the only one, and widens the codes itself."""
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
        for groups, fits in ((1, args.rows <= TILE_ROWS), (ROW_GROUPS, args.rows > TILE_ROWS)):

            def body(inner: Kernel, *params: Any, groups: int = groups) -> None:
                _GroupTile(self.of(inner), groups, _Groups(*params), MatrixTiles.of(inner)).write(alone)

            with k.when(inside & fits & (args.groups > 0)):
                name = [
                    "gemm_matrix_tile",
                    product.kind.name,
                    "offsets" * product.offsets,
                    "alone" * alone,
                    str(groups),
                ]
                k.call_subroutine("_".join(filter(None, name)), args.words(), body)


class DotTiles(GroupTiles):
    """Products of int8 rows. A step is a unit: four codes."""

    unit_steps, parts, unit_x_bytes, group_about_bytes = 1, 1, UNIT_INPUTS, ROW_CONSTANTS_BYTES
    product: DotProduct

    def of(self, k: Kernel) -> DotTiles:
        return DotTiles(replace(self.product, k=k), self.panel)

    @property
    def in_place(self) -> bool:
        return self.product.kind.bits == 8

    def widen(self, unit: Ptr, out: Ptr) -> None:
        for half, codes in enumerate(unit_codes(self.k, self.product.kind, unit, range(2))):
            self.k.store_quads(out + half * VECTOR_BYTES, codes)

    def steps(self, units: Int) -> Int:
        # A group has at most twice the steps of an instruction, and then an even number.
        steps: Int = self.k.select(units <= TILE_STEPS, units, units // 2)
        return steps

    def add(self, tiles: MatrixTiles, sums: int, rows: int, lines: int) -> None:
        tiles.add_codes(sums, rows, lines)

    def constants(self, panel: Ptr) -> list[list[Vec]]:
        return self.product.constants(panel, range(2))

    def fold(self, constants: list[list[Vec]], about: Ptr, sums: Ptr, totals: Ptr) -> None:
        k = self.k
        values = [k.load_quads(sums + half * VECTOR_BYTES) for half in range(2)]
        if remaining_bias(k, self.product.kind.bias):
            shift = k.broadcast_quad(about + ROW_CONSTANTS["shift"])
            values = [value + shift for value in values]
        self.product.fold(constants, about, range(2), values, totals)


class CodedTiles(GroupTiles):
    """Products of bfloat16 rows. A step is a pair of inputs; a code that bfloat16 does not represent is the sum of two
    bfloat16 numbers."""

    unit_steps, unit_x_bytes, group_about_bytes = 2, 2 * UNIT_INPUTS, 4
    product: CodedProduct

    def __init__(self, product: CodedProduct, panel: DotRows) -> None:
        super().__init__(product, panel)
        self.parts = product.kind.parts

    @classmethod
    def of_rows(cls, product: CodedProduct, rows: CodedRows, panel: Ptr) -> CodedTiles:
        panel_args = DotRows(
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
        return cls(product, panel_args)

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
    """Arguments of a tile's function, for ``rows`` rows, at most 32, and ``groups`` groups of ``units`` units each.
    ``lines`` are the first group's widened codes, or codes to widen, and ``constants`` its constants; ``sums`` is
    scratch for the tile's sums of two groups, followed by the widened codes; ``ahead`` is the panel that a single tile
    prefetches."""

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
        """Return the arguments of ``groups`` groups from ``begin`` on, whose codes are at ``lines``."""
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
    """Emitter of the function for one or two groups of 16 rows. Tiles, in order: the sums of each group of rows and
    half of the panel, the rows of each group, the lines of each half."""

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
        """Widen and multiply the groups chunk by chunk."""
        k, args, products = self.products.k, self.args, self.products
        # Small chunks, 4 KiB of widened codes: the processor overlaps widening with products.
        wide, chunk = args.sums + 2 * TILED_ROWS * TOTALS_BYTES, products.chunk(args.units, 4096)
        with k.range((args.groups + (chunk - 1)) // chunk) as index:
            number = index * chunk
            groups = k.min(chunk, args.groups - number)
            codes, at = args.lines + number * args.lines_stride, number * args.constants_stride
            with k.range(at + groups * args.constants_stride, at, step=LINE_BYTES) as line:
                k.prefetch(args.ahead + line, near=False)
            if products.in_place:
                chunk_args = args.part(products, number, groups, codes, args.lines_stride)
            else:
                products.widen_groups(codes, args.lines_stride, wide, groups, args.units)
                chunk_args = args.part(products, number, groups, wide, args.units * products.wide_bytes)
            self._write_groups(chunk_args, steps)

    def _write_groups(self, args: _Groups, steps: Int) -> None:
        """Multiply the groups; fold a group's sums while the next group is multiplied."""
        k = self.products.k
        self._multiply(args, k.int(0), steps)
        with k.range(args.groups, 1) as group:
            self._multiply(args, group, steps)
            self._fold(args, group - 1)
        self._fold(args, args.groups - 1)

    def _sums(self, group: Int) -> Ptr:
        """Return the address of a group's sums, [rows, 32]."""
        return self.args.sums + (group & 1) * (TILED_ROWS * TOTALS_BYTES)

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
