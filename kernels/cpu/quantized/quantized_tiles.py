"""Products of rows with a panel of codes (:mod:`pillion.kernels.cpu.quantized.codes`), group by group of inputs.

    total = 0;  for each group: total = scale * (chain of code * x) + total;  total = offset * (sum of x) + total

Sums of a group stay in registers, totals in memory. Every output is this fold, and a group's sum is one chain over
ascending inputs, so a row's result has the same bits in every tile. Tiles of few rows unpack codes in registers. So do
tiles of many rows if the processor widens 32 codes by one look-up; elsewhere the panel is widened into the scratch,
several groups at a time, so that it is unpacked only once.

A single row is bound by memory. It processes groups in sequence if their chains are short: the processor begins the
next group during the last additions of this one. Long chains of 4-bit codes would be slower than memory, so several
groups are interleaved. Each tile prefetches its part of the next panel, constants and codes, except for one row of
8-bit codes, where the hardware prefetcher is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pillion.kernels.cpu.language.byte_codes import LINE_BYTES
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES, TileRows
from pillion.kernels.cpu.products.tiles import PANEL_COLUMNS, TOTALS_BYTES
from pillion.kernels.cpu.quantized.codes import (
    UNIT_INPUTS,
    CodeKind,
    Parts,
    in_pairs,
    load_constants,
    load_parts,
    parts_of,
    register_unit,
    store_parts,
    unit_parts,
)
from pillion.kernels.cpu.quantized.quantized_packing import MAX_GROUP_INPUTS

# Max rows per pass over a panel: their totals are in a thread's scratch, before the widened groups.
_PASS_ROWS = 504
# Inputs widened into the scratch at a time: enough to amortize a tile's call, few enough for the L1 cache.
_WIDE_INPUTS = 256
_MAX_WIDE_BYTES = max(MAX_GROUP_INPUTS, _WIDE_INPUTS) * 2 * TOTALS_BYTES
# Further rows by which tiles that unpack bfloat16 are smaller, because their tables need more registers.
_MORE_TABLE_ROWS = {"nf4": 4, "int8_whole": 1}


@dataclass(frozen=True, slots=True)
class CodedRows:
    """The arguments of a product, and of a tile's function.

    Attributes:
        x: the first row.
        x_stride: bytes from row to row.
        weights: the first group's codes, or widened numbers.
        weights_stride: bytes from group to group.
        constants: the first group's scales, and its offsets.
        constants_stride: bytes from group to group.
        input_sums: float32, the sum of each group's inputs of the first row, for products with offsets.
        input_sums_stride: bytes from row to row.
        group_units: units of a group; the last group may have fewer.
        units: units of all groups.
        ahead: memory to prefetch, for instance the next panel.
        ahead_stride: bytes to prefetch per group, with its constants.
        ahead_step: bytes to prefetch per unit.
        totals: float32 [rows, 32], to which the product is added.
    """

    x: Ptr
    x_stride: Int
    weights: Ptr
    weights_stride: Int
    constants: Ptr
    constants_stride: Int
    input_sums: Ptr
    input_sums_stride: Int
    group_units: Int
    units: Int
    ahead: Ptr
    ahead_stride: Int
    ahead_step: Int
    totals: Ptr

    @property
    def groups(self) -> Int:
        """The number of groups."""
        return (self.units + (self.group_units - 1)) // self.group_units

    def half(self, number: int, constant_bytes: int) -> CodedRows:
        """Return the arguments of a narrow tile: one half of the panel."""
        weights, totals = (pointer + number * VECTOR_BYTES for pointer in (self.weights, self.totals))
        return replace(self, weights=weights, totals=totals, constants=self.constants + number * LANES * constant_bytes)

    def words(self) -> tuple[Int | Ptr, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class CodedProduct:
    """Product of rows with one kind of codes. ``wide_rows``: rows are float32; ``offsets``: groups have offsets."""

    k: Kernel
    kind: CodeKind
    wide_rows: bool
    offsets: bool

    @property
    def constants_bytes(self) -> int:
        """Bytes of a group's scales and offsets, which precede its codes."""
        return PANEL_COLUMNS * self.kind.constant_bytes * (2 if self.offsets else 1)

    @property
    def unit_x_bytes(self) -> int:
        """Bytes of a row per unit."""
        return UNIT_INPUTS * (4 if self.wide_rows else 2)

    @property
    def wide_bytes(self) -> int:
        """Bytes of a widened unit."""
        return 4 * VECTOR_BYTES * parts_of(self.k, self.kind, self.wide_rows)

    def max_rows(self, widened: bool) -> int:
        if not widened:
            more = _MORE_TABLE_ROWS.get(self.kind.codes, 0) if in_pairs(self.k, self.wide_rows) else 0
            # 3 rows fewer than tiles of widened weights: tables and temporaries need registers.
            return max(1, self._tile_rows.wide - 3 - more)
        return self._tile_rows.tallest

    @property
    def widens(self) -> bool:
        """True if many rows are multiplied by widened weights. If one look-up yields the bfloat16 of 32 codes, tiles
        that unpack are as fast, and read less memory."""
        return not in_pairs(self.k, self.wide_rows) or self.kind.parts > 1

    @property
    def _tile_rows(self) -> TileRows:
        """Max rows of tiles of widened weights."""
        isa = self.k.isa
        tiles = isa.fp32_tiles if self.wide_rows else isa.bf16_tiles
        # A second bfloat16 part per value needs registers, so tiles have fewer rows.
        return TileRows(tiles.wide - 1) if in_pairs(self.k, self.wide_rows) and self.kind.parts > 1 else tiles

    def panel_bytes(self, units: Int, group_units: Int) -> Int:
        return units * self.kind.unit_bytes + (units + (group_units - 1)) // group_units * self.constants_bytes

    def multiply(
        self, rows: Int, args: CodedRows, panel: Ptr, scratch: Ptr, finish: Callable[[Int, Ptr], None]
    ) -> None:
        """Multiply ``rows`` rows by ``panel``; call ``finish`` with each row's number and totals.

        ``args`` are those of the first row; weights, constants, totals and sizes to prefetch are set here. ``ahead`` is
        another panel of the same size.
        """
        k = self.k
        stride = args.group_units * self.kind.unit_bytes + self.constants_bytes
        fused = replace(
            args,
            weights=panel + self.constants_bytes,
            weights_stride=stride,
            constants=panel,
            constants_stride=stride,
            ahead_stride=stride,
            ahead_step=k.int(self.kind.unit_bytes),
            totals=scratch,
        )
        if not self.widens:
            # Finish the totals of a tile before the next tile, while they are in the L1 cache.
            with self._cut(rows, fused, False) as (first, count, tile_args):
                self._clear(count, scratch)
                self._tiles(count, tile_args, False)
                self._finish(first, count, scratch, finish)
            return
        few = self.max_rows(False)
        with k.range(rows, step=_PASS_ROWS) as first:
            count = k.min(rows - first, _PASS_ROWS)
            pass_args = _rows_from(fused, first)
            self._clear(count, scratch)
            with k.when(count <= few):
                self._multiply_tiles(count, pass_args, False)
            with k.when(count > few):
                self._multiply_widened(count, pass_args, scratch + _PASS_ROWS * TOTALS_BYTES)
            self._finish(first, count, scratch, finish)

    def _clear(self, rows: Int, totals: Ptr) -> None:
        with self.k.range(rows * 2) as half:
            self.k.store(totals + half * VECTOR_BYTES, self.k.vector(0.0))

    def _finish(self, first: Int, rows: Int, totals: Ptr, finish: Callable[[Int, Ptr], None]) -> None:
        with self.k.range(rows) as row:
            finish(first + row, totals + row * TOTALS_BYTES)

    def _multiply_widened(self, rows: Int, args: CodedRows, wide: Ptr) -> None:
        k = self.k
        chunk = k.max(k.int(_WIDE_INPUTS // UNIT_INPUTS) // args.group_units, 1)
        with k.range((args.groups + (chunk - 1)) // chunk) as number:
            group = number * chunk
            unit = group * args.group_units
            codes = args.weights + group * args.weights_stride
            units = k.min(chunk * args.group_units, args.units - unit)
            self._widen(codes, wide, units, args)
            groups = replace(
                args,
                x=args.x + unit * self.unit_x_bytes,
                weights=wide,
                weights_stride=args.group_units * self.wide_bytes,
                constants=args.constants + group * args.constants_stride,
                input_sums=args.input_sums + group * 4,
                units=units,
                ahead=args.ahead + group * args.weights_stride,
            )
            self._multiply_tiles(rows, groups, True)

    def _multiply_tiles(self, rows: Int, args: CodedRows, widened: bool) -> None:
        """Multiply rows tile by tile; their totals are adjacent."""
        with self._cut(rows, args, widened) as (first, count, tile_args):
            self._tiles(count, replace(tile_args, totals=args.totals + first * TOTALS_BYTES), widened)

    @contextmanager
    def _cut(self, rows: Int, args: CodedRows, widened: bool) -> Iterator[tuple[Int, Int, CodedRows]]:
        """Append a loop over tiles of even height; yield a tile's first row, its number of rows and its arguments.
        Each tile prefetches its share of the memory at ``ahead``."""
        k, highest = self.k, self.max_rows(widened)
        tiles = (rows + (highest - 1)) // highest
        stride, step = args.ahead_stride // tiles, args.ahead_step // tiles
        with k.range(tiles) as tile:
            first = rows * tile // tiles
            ahead = args.ahead + tile * args.groups * stride
            tile_args = replace(_rows_from(args, first), ahead=ahead, ahead_stride=stride, ahead_step=step)
            yield first, rows * (tile + 1) // tiles - first, tile_args

    def _widen(self, codes: Ptr, wide: Ptr, units: Int, args: CodedRows) -> None:
        """Widen the groups of codes at ``codes``, ``units`` units in total."""
        k = self.k

        def body(inner: Kernel, codes: Ptr, wide: Ptr, units: Int, group_units: Int, stride: Int) -> None:
            with inner.range((units + (group_units - 1)) // group_units) as group:
                begin = group * group_units
                with inner.range(inner.min(group_units, units - begin)) as unit:
                    at = codes + (group * stride + unit * self.kind.unit_bytes)
                    parts = unit_parts(inner, self.kind, at, self.wide_rows)
                    store_parts(inner, wide + (begin + unit) * self.wide_bytes, parts)

        inside = k.in_bounds(codes, self._codes_bytes(units, args)) & k.in_bounds(wide, _MAX_WIDE_BYTES)
        with k.when(inside):
            name = f"gemm_widen_{self.kind.codes}{'_wide' * self.wide_rows}"
            k.call_subroutine(name, (codes, wide, units, args.group_units, args.weights_stride), body)

    def _codes_bytes(self, units: Int, args: CodedRows) -> Int:
        """Return the bytes from the first group's codes to the end of the last group's."""
        return self.panel_bytes(units, args.group_units) - self.constants_bytes

    def _tiles(self, rows: Int, args: CodedRows, widened: bool) -> None:
        k = self.k
        inside = k.in_bounds(args.x, (rows - 1) * args.x_stride + args.units * self.unit_x_bytes)
        inside = inside & k.in_bounds(args.totals, rows * TOTALS_BYTES)
        if widened:
            inside = inside & k.in_bounds(args.weights, args.units * self.wide_bytes)
        else:
            inside = inside & k.in_bounds(args.weights, self._codes_bytes(args.units, args))
        last = (args.groups - 1) * args.constants_stride
        inside = inside & k.in_bounds(args.constants, last + self.constants_bytes)
        if self.offsets:
            inside = inside & k.in_bounds(args.input_sums, (rows - 1) * args.input_sums_stride + args.groups * 4)
        with k.when(inside):
            for height in k.cases(rows, self.max_rows(widened)):
                if height <= self._tile_rows.wide:
                    self._call_tile(height, 2, args, widened)
                else:
                    for number in range(2):
                        self._call_tile(height, 1, args.half(number, self.kind.constant_bytes), widened)

    def _call_tile(self, rows: int, width: int, args: CodedRows, widened: bool) -> None:
        def body(inner: Kernel, twin: Any, *params: Any) -> None:
            _CodedTile(replace(self, k=inner), rows, width, CodedRows(*params), twin, widened).write()

        parts = [f"gemm_{'wide_' * widened}tile", self.kind.name, "wide" * self.wide_rows, "offsets" * self.offsets]
        self.k.call_subroutine("_".join(filter(None, [*parts, f"{rows}x{width}"])), (args.x, *args.words()), body)


def _rows_from(args: CodedRows, row: Int) -> CodedRows:
    """Return the arguments without the first ``row`` rows."""
    sums = args.input_sums + row * args.input_sums_stride
    return replace(args, x=args.x + row * args.x_stride, input_sums=sums)


@dataclass(frozen=True, slots=True)
class _CodedTile:
    """Emitter of the function for one number of rows, ``width`` vectors wide. The pointer ``twin`` equals x, unknown to
    LLVM.

    A value of a row is multiplied by both tiles of a panel. LLVM would broadcast it once, by a separate instruction,
    which occupies the port that table look-ups need on Zen 4. With a pointer per tile, the broadcast is part of both
    products, for free, which makes tiles that unpack a quarter faster there. Zen 5 starts twice as many products per
    cycle, but no more loads, so the twin is unused if ``Isa.products_load`` is false.
    """

    product: CodedProduct
    rows: int
    width: int
    args: CodedRows
    twin: Ptr
    widened: bool

    def write(self) -> None:
        k, args = self.product.k, self.args
        sides = max(1, min(4, self.product.max_rows(True) // (3 * self.rows)))
        if sides == 1 or self.product.kind.bits == 8:
            self._side_by_side(1)
            return
        # Chains of additions so short that out-of-order execution overlaps groups.
        short = args.group_units <= 8
        with k.builder.if_else(short.ir) as (in_order, side_by_side):
            with in_order:
                self._side_by_side(1)
            with side_by_side:
                self._side_by_side(sides)

    def _side_by_side(self, sides: int) -> None:
        """Multiply the rows by all groups, ``sides`` groups interleaved."""
        k, args = self.product.k, self.args
        done = k.int(0)
        if sides > 1:
            rounds = args.units // args.group_units // sides
            done = rounds * sides
            with k.range(rounds) as number:
                self._groups(number * sides, sides, args.group_units)
        with k.range(args.groups, done) as group:
            self._groups(group, 1, k.min(args.group_units, args.units - group * args.group_units))

    def _groups(self, first: Int, sides: int, units: Int) -> None:
        """Multiply the rows by ``sides`` groups of ``units`` units, interleaved."""
        k, args = self.product.k, self.args
        sums = [
            [[k.variable(k.vector(0.0)) for _ in range(self.width)] for _ in range(self.rows)] for _ in range(sides)
        ]
        begins = [(first + side) * args.group_units for side in range(sides)]
        weights = [args.weights + (first + side) * args.weights_stride for side in range(sides)]
        pairs = in_pairs(k, self.product.wide_rows)
        bases = (args.x, self.twin if pairs and not self.widened and k.isa.products_load else args.x)
        rows = [
            [[base + (args.x_stride * row + begin * self.product.unit_x_bytes) for base in bases]
             for row in range(self.rows)]
            for begin in begins
        ]  # fmt: skip
        ahead = [args.ahead + (first + side) * args.ahead_stride for side in range(sides)]
        with k.range(units) as unit:
            for side in range(sides):
                self._prefetch(ahead[side] + unit * args.ahead_step, self.product.kind.unit_bytes)
                for step, tiles in enumerate(self._unit(weights[side], unit)):
                    at = unit * self.product.unit_x_bytes + step * (self.product.unit_x_bytes // 2)
                    for row, totals in zip(rows[side], sums[side], strict=True):
                        self._add(totals, tiles, [base + at for base in row])
        for line in ahead:
            self._prefetch(line + units * args.ahead_step, self.product.constants_bytes)
        self._fold(first, sums)

    def _unit(self, weights: Ptr, unit: Int) -> Iterator[Sequence[Parts]]:
        product = self.product
        if self.widened:
            parts = parts_of(product.k, product.kind, product.wide_rows)
            return load_parts(product.k, weights + unit * product.wide_bytes, parts, self.width, product.wide_rows)
        return unit_parts(product.k, product.kind, weights + unit * product.kind.unit_bytes, product.wide_rows)

    def _add(self, totals: list[Any], tiles: Sequence[Parts], x: list[Ptr]) -> None:
        """Add the products of a row's pair of inputs at ``x``, one address per tile, with the parts of both."""
        k, wide_rows = self.product.k, self.product.wide_rows
        if in_pairs(k, wide_rows):
            for total, parts, at in zip(totals, tiles, x, strict=False):
                for part in parts:
                    total.value = k.dot(total.value, part, k.broadcast_pair(at))
            return
        if wide_rows:
            values = k.broadcast(x[0]), k.broadcast(x[0] + 4)
        else:
            values = k.low(k.broadcast_pair(x[0])), k.high(k.broadcast_pair(x[0]))
        for number, value in enumerate(values):
            for total, parts in zip(totals, tiles, strict=True):
                total.value = k.fma(parts[number], value, total.value)

    def _fold(self, first: Int, sums: list[list[list[Any]]]) -> None:
        """Add the groups' sums, times their scales, to the totals, and the offsets times the sums of inputs."""
        k, args = self.product.k, self.args
        constants = [args.constants + (first + side) * args.constants_stride for side in range(len(sums))]
        vector_bytes = LANES * self.product.kind.constant_bytes
        unit = register_unit(k, self.product.kind, self.product.wide_rows)
        scales = [[self._constants(at + half * vector_bytes) for half in range(self.width)] for at in constants]
        if unit != 1.0:
            scales = [[scale * (1 / unit) for scale in side] for side in scales]
        for row in range(self.rows):
            inputs = args.input_sums + (args.input_sums_stride * row + first * 4)
            for half in range(self.width):
                address = args.totals + (row * TOTALS_BYTES + half * VECTOR_BYTES)
                total = k.load(address)
                for side, at in enumerate(constants):
                    total = k.fma(scales[side][half], sums[side][row][half].value, total)
                    if self.product.offsets:
                        offset = self._constants(at + (half + 2) * vector_bytes)
                        total = k.fma(offset, k.broadcast(inputs + side * 4), total)
                k.store(address, total)

    def _constants(self, at: Ptr) -> Vec:
        return load_constants(self.product.k, self.product.kind, at)

    def _prefetch(self, line: Ptr, size: int) -> None:
        if self.rows > 1 or self.widened or self.product.kind.bits == 4:
            for at in range(0, size * self.width // 2, LINE_BYTES):
                self.product.k.prefetch(line + at, near=False)
