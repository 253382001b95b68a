"""Products of rows with packed weights (:mod:`pillion.kernels.cpu.products.packing`), with an epilogue on the sums.

    ranges of panels -> for each panel: tiles of rows -> sums (gemm_tiles) -> epilogue -> out

Threads draw ranges of panels. All rows meet a panel, in tiles of even height: the first tile streams it from memory,
the others find it in the cache, and each of them prefetches a part of the panel that this thread works on next, so that
memory and arithmetic are busy at the same time. Weights in few bits have tiles of their own
(:mod:`pillion.kernels.cpu.products.quantized_tiles`).

A row's result has the same bits whatever the other rows are and however many: each output is one chain of additions
over rising inputs (gemm_tiles), and all rows share the epilogue's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr, Vec
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.products.codes import CODE_KINDS, UNIT_INPUTS
from pillion.kernels.cpu.products.gemm_tiles import PANEL_STEP_BYTES, TileArgs, TileKind, multiply_rows
from pillion.kernels.cpu.products.input_rows import ROW_CONSTANTS
from pillion.kernels.cpu.products.packing import INT8_DOTS, TOTALS_BYTES, dots_constants_bytes
from pillion.kernels.cpu.products.quantized_tiles import CodedProduct, CodedRows
from pillion.kernels.cpu.products.tiles import PANEL_COLUMNS

LAYOUT = RecordLayout(
    "gemm",
    pointers=(
        "x",  # [rows, depth] bfloat16 or float32, as the spec says; zeros behind the values up to depth; or int8 codes
        "weights",  # the packed matrix, or the matrices of all groups, one behind the other
        # float32, the sum of each group's inputs of each row, for weights with offsets; of rows of codes ROW_CONSTANTS
        "input_sums",
        "bias",  # float32 [groups, pairs * 32] in the order of the packed columns, if the spec has a bias
        "out",  # [rows, pairs * 32] float32, or gated [rows, pairs * 16] of x's type
        "group_starts",  # int32 [groups + 1]: the rows of x and out that belong to a group; grouped only
    ),
    numbers=(
        "x_stride",  # bytes
        "depth",  # padded
        "pairs",
        "out_stride",  # bytes; rows of out have room for all packed columns
        "num_groups",
        "group_bytes",  # bytes of one group's weights
        "inputs",  # inputs that share a scale, weights in few bits only
        "input_sums_stride",  # bytes
    ),
    reals=("factor",),  # what "add" multiplies its sums by
)

GATED = ("gated_silu", "gated_gelu")
# How many ranges each thread draws where there are panels enough: a range still takes many microseconds, and the last
# ranges end at about the same time.
RANGES_PER_THREAD = 16
GROUP_RANGES_PER_THREAD = 4
# How many work items there are for each thread, where there are rows enough to cut a panel's work into blocks of rows.
ITEMS_PER_THREAD = 2
# gelu(x) by its tanh approximation is x * sigmoid(x * (a + b * x * x)).
_GELU_A = 1.5957691216057308
_GELU_B = 0.0713548162726009


@dataclass(frozen=True, slots=True)
class Gemm(KernelSpec):
    """x times packed weights.

    Attributes:
        weights: kind of the packed weights: "bf16", "fp32", ``INT8_DOTS`` or one of ``CODE_KINDS``.
        rows: type of x: "bf16", which weights of "fp32" do not meet, or "fp32". With ``INT8_DOTS`` it is the type that
            rows had before they became codes.
        epilogue: "store": out = sum + bias. "add": out += factor * (sum + bias). "gated_silu",
            "gated_gelu" (by tanh): out = act(gate) * up, rounded to x's type; the weights are of ``pack_gated``.
        rows_of: the field of the step's record with the number of rows; a grouped product reads group_starts instead.
        bias: whether there is a bias.
        grouped: rows group_starts[e] .. group_starts[e + 1] meet matrix e: the experts of a layer.
        offsets: whether weights in few bits have offsets.
        zeros: whether rows of codes have zero points.
    """

    # All specs share one record; a field that a spec does not use is None or 0.
    layout = LAYOUT

    weights: str
    rows: str
    epilogue: str
    rows_of: str = "num_tokens"
    bias: bool = False
    grouped: bool = False
    offsets: bool = False
    zeros: bool = False

    def expand(self, call: KernelCall) -> Addition | None:
        """What a kind of product adds to the sums before the epilogue, or None."""
        return None

    def emit(self, call: KernelCall) -> None:
        body = _Body(self, call)
        if self.grouped:
            body.emit_groups()
        else:
            body.emit_blocks()


class Addition(Protocol):
    """Emits what is added to the sums of rows."""

    def prefetch(self, panel: Int) -> None:
        """Runs before the sums of a panel are computed."""

    def added(self, row: Int, panel: Int, totals: list[Vec]) -> list[Vec]:
        """The sums of both tiles of a row and a panel, with what is added to them."""


class _Body:
    """Emits one kernel; holds its arguments."""

    def __init__(self, spec: Gemm, call: KernelCall) -> None:
        k, args = call.k, call.args
        self.spec, self.call, self.k = spec, call, k
        self.dots = spec.weights == INT8_DOTS
        self.kind = TileKind(spec.weights, "int8" if self.dots else spec.rows)
        self.x, self.weights, self.out = (args.pointer(name) for name in ("x", "weights", "out"))
        self.x_stride, self.out_stride = args.number("x_stride"), args.number("out_stride")
        self.pairs = args.number("pairs")
        self.steps = args.number("depth") // self.kind.inputs
        self.before_bytes = dots_constants_bytes(spec.offsets) if self.dots else 0
        self.panel_bytes = self.steps * PANEL_STEP_BYTES + self.before_bytes
        self.coded = None
        if spec.weights in CODE_KINDS:
            self.coded = CodedProduct(k, CODE_KINDS[spec.weights], spec.rows == "fp32", spec.offsets)
            self.units, self.group_units = (args.number(name) // UNIT_INPUTS for name in ("depth", "inputs"))
            self.panel_bytes = self.coded.panel_bytes(self.units, self.group_units)
        if spec.epilogue == "add":
            self.factor = args.real("factor")
        self.addition = spec.expand(call)

    def emit_blocks(self) -> None:
        """The plain product. A work item is a panel with a block of the rows: with all rows where panels are enough."""
        k, call, pairs = self.k, self.call, self.pairs
        rows = call.step.number(self.spec.rows_of)
        tiles = self._tiles(rows)
        blocks = k.least(tiles, (call.threads * ITEMS_PER_THREAD + (pairs - 1)) // pairs)
        count = pairs * blocks
        with self._items(count, count // (call.threads * RANGES_PER_THREAD)) as (item, after):
            panel = item // blocks
            block = item - panel * blocks
            cut = _Cut(k.int(0), rows, tiles, tiles * block // blocks, tiles * (block + 1) // blocks)
            weights = self.weights + panel * self.panel_bytes
            self._panel(cut, panel, panel, weights, self.weights + after // blocks * self.panel_bytes)

    def emit_groups(self) -> None:
        """The grouped product. A work item is a panel of a group with all rows of the group, which may have none."""
        k, call, pairs = self.k, self.call, self.pairs
        starts = call.args.pointer("group_starts")
        group_bytes = call.args.number("group_bytes")
        # One group may have all the work, so the length of a range follows from one group's panels.
        chunk = pairs // (call.threads * GROUP_RANGES_PER_THREAD)
        with self._items(pairs * call.args.number("num_groups"), chunk) as (item, after):
            group, next_group = item // pairs, after // pairs
            panel, next_panel = item - group * pairs, after - next_group * pairs
            begin = k.load_int(starts + group * 4, 32)
            rows = k.load_int(starts + group * 4 + 4, 32) - begin
            tiles = self._tiles(rows)
            with k.when(rows > 0):
                weights = self.weights + (group * group_bytes + panel * self.panel_bytes)
                ahead = self.weights + (next_group * group_bytes + next_panel * self.panel_bytes)
                self._panel(_Cut(begin, rows, tiles, k.int(0), tiles), panel, item, weights, ahead)

    def _tiles(self, rows: Int) -> Int:
        """The number of tiles for so many rows."""
        highest = self.kind.tiles(self.k.isa).most if self.coded is None else self.coded.most_rows(self.coded.widens)
        return (rows + (highest - 1)) // highest

    @contextmanager
    def _items(self, count: Int, chunk: Int) -> Iterator[tuple[Int, Int]]:
        """The work items of 0 .. count that this thread draws, ``chunk`` at a time, each with the item after it."""
        k = self.k
        chunk = k.most(chunk, 1)
        # A thread draws its next range before it works on this one, so that it knows which memory to prefetch.
        drawn = k.variable(k.fetch_add(self.call.counter, chunk))
        with k.forever() as behind:
            begin = drawn.value
            k.leave(behind, begin >= count)
            following = k.fetch_add(self.call.counter, chunk)
            drawn.value = following
            end = k.least(begin + chunk, count)
            with k.range(end, begin) as item:
                after = k.select(item + 1 < end, item + 1, following)
                # Behind the last range there is nothing to prefetch: the item itself does no harm.
                yield item, k.select(after < count, after, item)

    def _panel(self, cut: _Cut, panel: Int, column: Int, weights: Ptr, ahead: Ptr) -> None:
        """Some tiles of rows with one panel. ``panel`` is its number in out, ``column`` in the bias."""
        out = self.out + panel * (self._out_bytes() * PANEL_COLUMNS)
        constants = self._constants(column * TOTALS_BYTES)
        if self.addition is not None:
            self.addition.prefetch(panel)
        if self.coded is not None:
            self._coded_panel(self.coded, cut, panel, out, weights, ahead, constants)
            return
        k = self.k
        step_bytes = k.int(PANEL_STEP_BYTES) // (cut.last - cut.first)
        with k.range(cut.last, cut.first) as tile:
            begin, rows = cut.begin(tile), cut.begin(tile + 1) - cut.begin(tile)
            wanted = ahead + (tile - cut.first) * self.steps * step_bytes
            x, sums = self.x + begin * self.x_stride, self.call.scratch
            args = TileArgs(x, self.x_stride, weights + self.before_bytes, self.steps, wanted, step_bytes, sums)
            multiply_rows(k, self.kind, rows, args)
            with k.range(rows) as row:
                mine = sums + row * TOTALS_BYTES
                totals = self._scaled(mine, weights, begin + row) if self.dots else _loaded(k, mine)
                self._finish(begin + row, panel, totals, out, constants)

    def _coded_panel(
        self,
        coded: CodedProduct,
        cut: _Cut,
        panel: Int,
        out: Ptr,
        weights: Ptr,
        ahead: Ptr,
        bias: tuple[Vec, Vec] | None,
    ) -> None:
        args, zero = self.call.args, self.k.int(0)
        begin = cut.begin(cut.first)
        sums, sums_stride = args.pointer("input_sums"), args.number("input_sums_stride")
        rows = CodedRows(
            x=self.x + begin * self.x_stride,
            x_stride=self.x_stride,
            weights=weights,
            weights_stride=zero,
            constants=weights,
            constants_stride=zero,
            input_sums=sums + begin * sums_stride,
            input_sums_stride=sums_stride,
            group_units=self.group_units,
            units=self.units,
            ahead=ahead,
            ahead_stride=zero,
            ahead_step=zero,
            totals=self.call.scratch,
        )

        def finish(row: Int, totals: Ptr) -> None:
            self._finish(begin + row, panel, _loaded(self.k, totals), out, bias)

        coded.multiply(cut.begin(cut.last) - begin, rows, weights, self.call.scratch, finish)

    def _constants(self, offset: Int) -> tuple[Vec, Vec] | None:
        """The bias of a panel's two tiles, where the spec has one."""
        if not self.spec.bias:
            return None
        at = self.call.args.pointer("bias") + offset
        return self.k.load(at), self.k.load(at + VECTOR_BYTES)

    def _scaled(self, sums: Ptr, panel: Ptr, row: Int) -> list[Vec]:
        """What sums of products of codes stand for."""
        k, args = self.k, self.call.args
        about = args.pointer("input_sums") + row * args.number("input_sums_stride")
        scale, shift, zero, sum_ = (about + ROW_CONSTANTS[name] for name in ROW_CONSTANTS)
        found = []
        for half in range(2):
            at = half * VECTOR_BYTES
            total = k.load_quads(sums + at) + k.broadcast_quad(shift)
            if self.spec.zeros:
                total = total - k.broadcast_quad(zero) * k.load_quads(panel + (TOTALS_BYTES + at))
            value = k.real_lanes(total) * k.broadcast(scale) * k.load(panel + at)
            if self.spec.offsets:
                value = k.fma(k.load(panel + (2 * TOTALS_BYTES + at)), k.broadcast(sum_), value)
            found.append(value)
        return found

    def _finish(self, row: Int, panel: Int, totals: list[Vec], outs: Ptr, bias: tuple[Vec, Vec] | None) -> None:
        """The epilogue for one row of a panel; ``outs`` is the panel's place in the first row."""
        k, spec, out = self.k, self.spec, outs + row * self.out_stride
        if bias is not None:
            totals = [total + shift for total, shift in zip(totals, bias, strict=True)]
        if self.addition is not None:
            totals = self.addition.added(row, panel, totals)
        if spec.epilogue in GATED:
            k.store_float(out, _activated(k, spec.epilogue, totals[0]) * totals[1], spec.rows == "bf16")
            return
        for half, total in enumerate(totals):
            place = out + half * VECTOR_BYTES
            k.store(place, k.fma(self.factor, total, k.load(place)) if spec.epilogue == "add" else total)

    def _out_bytes(self) -> int:
        """Bytes of out for each packed column."""
        if self.spec.epilogue not in GATED:
            return 4
        return 2 if self.spec.rows == "fp32" else 1


def _loaded(k: Kernel, sums: Ptr) -> list[Vec]:
    return [k.load(sums + half * VECTOR_BYTES) for half in range(2)]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Tiles first .. last - 1 of the tiles that rows base .. base + rows - 1 are cut into, as evenly as possible."""

    base: Int
    rows: Int
    tiles: Int
    first: Int
    last: Int

    def begin(self, tile: Int) -> Int:
        """The first row of a tile."""
        return self.base + self.rows * tile // self.tiles


def _activated(k: Kernel, epilogue: str, gate: Vec) -> Vec:
    if epilogue == "gated_silu":
        return gate * k.sigmoid(gate)
    return gate * k.sigmoid(gate * k.fma(gate * gate, k.vector(_GELU_B), k.vector(_GELU_A)))
