"""GEMM of rows with packed weights (:mod:`pillion.kernels.cpu.products.packing`), with an epilogue on the sums.

    ranges of panels -> for each panel: tiles of rows -> sums (gemm_tiles) -> epilogue -> out

Threads draw ranges of panels. All rows are multiplied by a panel, in tiles of even height: the first tile streams it
from memory, the others find it in the cache, and each of them prefetches a part of this thread's next panel, so that
memory and arithmetic overlap. Quantized weights have separate tiles
(:mod:`pillion.kernels.cpu.quantized.quantized_tiles`), and so have many rows in matrix tiles
(:mod:`pillion.kernels.cpu.products.many_rows`).

A row's result has the same bits whatever the other rows and their number: each output is one chain of additions
over ascending inputs (gemm_tiles), and all rows share the epilogue's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from pillion.kernels.cpu.language.byte_codes import LINE_BYTES
from pillion.kernels.cpu.language.emit import LOG2E, VECTOR_BYTES, Int, Kernel, Ptr, Vec
from pillion.kernels.cpu.language.module import SCRATCH_BYTES, KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.products.gemm_tiles import PANEL_STEP_BYTES, TileArgs, TileKind, multiply_rows
from pillion.kernels.cpu.products.many_rows import (
    MAX_PANELS,
    MAX_ROW_TILES,
    SCRATCH_NEEDED,
    SUMS_OFFSET,
    TILED_ROWS,
    Epilogue,
    ManyRows,
    PanelPart,
    PanelRange,
)
from pillion.kernels.cpu.products.packed_weight import PLAIN_TYPES
from pillion.kernels.cpu.products.tiles import PANEL_COLUMNS, TOTALS_BYTES
from pillion.kernels.cpu.quantized.codes import CODE_KINDS, UNIT_INPUTS, in_pairs
from pillion.kernels.cpu.quantized.dot_kinds import DOT_KINDS
from pillion.kernels.cpu.quantized.dot_tiles import DotProduct, DotRows
from pillion.kernels.cpu.quantized.group_matrix_tiles import CodedTiles, DotTiles
from pillion.kernels.cpu.quantized.input_rows import ROW_CONSTANTS
from pillion.kernels.cpu.quantized.quantized_packing import INT8_DOTS, dots_constants_bytes
from pillion.kernels.cpu.quantized.quantized_tiles import CodedProduct, CodedRows
from pillion.kernels.cpu.quantized.rounded_codes import TILE, UNIT_STEPS, RoundedProduct, widen_part

LAYOUT = RecordLayout(
    "gemm",
    pointers=(
        "x",  # [rows, depth], bfloat16 or float32, with zeros after depth, or int8 codes
        "weights",  # the packed matrix, or those of all groups, one after the other
        # float32 per row and group of inputs: the sum of the inputs, for weights with offsets; ROW_CONSTANTS for rows
        # of codes.
        "input_sums",
        "bias",  # float32 [groups, pairs * 32] in the order of packed columns, if there is one
        "out",  # float32 [rows, pairs * 32], or gated [rows, pairs * 16] or activated, both of x's type
        "group_starts",  # int32 [groups + 1]: first row of each group, and the number of rows
    ),
    numbers=(
        "x_stride",  # bytes
        "depth",  # inputs with padding
        "pairs",
        "out_stride",  # bytes; rows of out are allocated for all packed columns
        "num_groups",
        "group_bytes",  # size of one group's weights
        "inputs",  # inputs that share a scale; quantized weights only
        "input_sums_stride",  # bytes
    ),
    reals=(
        "factor",  # of the epilogue "add"
        "alpha",  # alpha and limit: those of "gated_clamped"
        "limit",
        "above",  # above and below: the factors of "act_xielu"
        "below",
    ),
)

GATED = ("gated_silu", "gated_gelu", "gated_clamped")
ACTIVATED = ("act_none", "act_silu", "act_gelu", "act_erf_gelu", "act_relu", "act_relu2", "act_xielu")
# Ranges per thread, if there are enough panels. More let threads end at about the same time; fewer keep a range well
# above the cost of drawing it.
RANGES_PER_THREAD = 16
GROUP_RANGES_PER_THREAD = 4
# Work items per thread, if enough rows allow dividing a panel's work into blocks of rows.
ITEMS_PER_THREAD = 2


@dataclass(frozen=True, slots=True)
class Gemm(KernelSpec):
    """Product of x with packed weights.

    Attributes:
        weights: one of :data:`pillion.kernels.cpu.quantized.matrix_packing.KINDS`.
        rows: type of x: "bf16" (not with weights of "fp32") or "fp32". With ``INT8_DOTS`` and DOT_KINDS, the type of
            the rows before quantization.
        epilogue: "store": out = sum + bias. "add": out += factor * (sum + bias). "gated_silu",
            "gated_gelu" (by tanh): out = act(gate) * up, rounded to x's type; the weights are of ``pack_gated``.
            "gated_clamped" (gpt-oss): the same with (up + 1) * gate * sigmoid(alpha * gate), gate being at most limit,
            and up between -limit and limit. One of ACTIVATED: out = act(sum + bias), rounded to x's type.
        rows_of: the field of the step's record with the number of rows; a grouped product reads group_starts instead.
        bias: whether there is a bias.
        grouped: rows group_starts[e] .. group_starts[e + 1] are multiplied by matrix e: the experts of a layer.
        offsets: whether quantized weights have offsets.
        x_step, out_step: if not 0, all rows are multiplied by each matrix (matrices of heads), and these are the bytes
            from one matrix's columns of x, and of out, to the next one's.
    """

    # One layout for all kernels of products; an unused argument is None or 0.
    layout = LAYOUT

    weights: str
    rows: str
    epilogue: str
    rows_of: str = "num_tokens"
    bias: bool = False
    grouped: bool = False
    offsets: bool = False
    x_step: int = 0
    out_step: int = 0

    def expand(self, call: KernelCall) -> Addition | None:
        """Return what is added to the sums before the epilogue, or None."""
        return None

    def emit(self, call: KernelCall) -> None:
        body = GemmBody(self, call)
        if body.panels.many is not None:
            body.emit_ranges(body.panels.many)
        elif self.x_step:
            body.emit_heads()
        elif self.grouped:
            body.emit_groups()
        else:
            body.emit_blocks()


class Addition(Protocol):
    """Emitter of code that adds to the sums of rows."""

    def prefetch(self, panel: Int) -> None:
        """Emit code that runs before the sums of a panel are computed; ``panel`` counts through the groups."""

    def add_to(self, row: Int, panel: Int, totals: list[Vec]) -> list[Vec]:
        """Return the sums of both tiles of a row and a panel, after the addition."""


class GemmBody:
    """Emitter of one product kernel, with the kernel's arguments."""

    def __init__(self, spec: Gemm, call: KernelCall) -> None:
        k, args = call.k, call.args
        self.spec, self.call, self.k = spec, call, k
        self.x, self.weights, self.out = (args.pointer(name) for name in ("x", "weights", "out"))
        self.x_stride, self.out_stride = args.number("x_stride"), args.number("out_stride")
        self.pairs = args.number("pairs")
        self.panels: Panels
        if spec.weights in PLAIN_TYPES:
            self.panels = Panels(self)
        elif spec.weights == INT8_DOTS:
            self.panels = DotPanels(self)
        elif spec.weights in DOT_KINDS:
            self.panels = GroupDotPanels(self)
        else:
            rounds = k.isa.rounds_codes and spec.rows == "bf16"
            self.panels = RoundedPanels(self) if rounds else CodedPanels(self)
        if spec.epilogue == "add":
            self.factor = args.real("factor")
        if spec.epilogue == "gated_clamped":
            self.alpha, self.limit = args.real("alpha"), args.real("limit")
        if spec.epilogue == "act_xielu":
            self.above, self.below = args.real("above"), args.real("below")
        self.addition = spec.expand(call)
        self.column = call.k.int(0)

    def emit_blocks(self) -> None:
        """Emit the product with one matrix. A work item is a panel times a block of the rows, or times all rows if
        there are enough panels."""
        k, call, pairs = self.k, self.call, self.pairs
        rows = call.step.number(self.spec.rows_of)
        tiles = self._tiles(rows)
        blocks = k.min(tiles, (call.threads * ITEMS_PER_THREAD + (pairs - 1)) // pairs)
        count = pairs * blocks
        with call.items_ahead(count, count // (call.threads * RANGES_PER_THREAD)) as (item, after):
            panel = item // blocks
            block = item - panel * blocks
            cut = RowCut(k.int(0), rows, tiles, tiles * block // blocks, tiles * (block + 1) // blocks)
            weights = self.weights + panel * self.panels.panel_bytes
            self._panel(cut, panel, panel, weights, self.weights + after // blocks * self.panels.panel_bytes)

    def emit_groups(self) -> None:
        """Emit the grouped product. A work item is a panel of a group times all rows of the group, possibly none."""
        k, call, pairs = self.k, self.call, self.pairs
        starts = call.args.pointer("group_starts")
        group_bytes = call.args.number("group_bytes")
        # One group may have all the work, so the size of a range follows from one group's panels.
        chunk = pairs // (call.threads * GROUP_RANGES_PER_THREAD)
        with call.items_ahead(pairs * call.args.number("num_groups"), chunk) as (item, after):
            group, next_group = item // pairs, after // pairs
            panel, next_panel = item - group * pairs, after - next_group * pairs
            begin = k.load_int(starts + group * 4, 32)
            rows = k.load_int(starts + group * 4 + 4, 32) - begin
            tiles = self._tiles(rows)
            with k.when(rows > 0):
                weights = self.weights + (group * group_bytes + panel * self.panels.panel_bytes)
                ahead = self.weights + (next_group * group_bytes + next_panel * self.panels.panel_bytes)
                self._panel(RowCut(begin, rows, tiles, k.int(0), tiles), panel, item, weights, ahead)

    def emit_heads(self) -> None:
        """Emit the product of all rows with the matrix of each head. A work item is a panel of a head's matrix times
        all rows."""
        k, call, pairs, x, out = self.k, self.call, self.pairs, self.x, self.out
        rows, group_bytes = call.step.number(self.spec.rows_of), call.args.number("group_bytes")
        tiles, count = self._tiles(rows), pairs * call.args.number("num_groups")
        with call.items_ahead(count, count // (call.threads * RANGES_PER_THREAD)) as (item, after):
            head, next_head = item // pairs, after // pairs
            panel, next_panel = item - head * pairs, after - next_head * pairs
            weights = self.weights + (head * group_bytes + panel * self.panels.panel_bytes)
            ahead = self.weights + (next_head * group_bytes + next_panel * self.panels.panel_bytes)
            self.x, self.out = x + head * self.spec.x_step, out + head * self.spec.out_step
            self._panel(RowCut(k.int(0), rows, tiles, k.int(0), tiles), panel, item, weights, ahead)

    def emit_ranges(self, many: ManyRows) -> None:
        """Emit any product in matrix tiles. A work item is a range of a matrix's panels times a block of its rows.
        Grouped products do not divide the rows; otherwise, with at most TILED_ROWS rows, an item is a single panel and
        all rows."""
        k, call, spec, x, out = self.k, self.call, self.spec, self.x, self.out
        matrices = call.args.number("num_groups") if spec.grouped or spec.x_step else k.int(1)
        starts = call.args.pointer("group_starts") if spec.grouped else None
        cut = self._range_cut(many, matrices)
        panel_bytes, group_bytes = self.panels.panel_bytes, call.args.number("group_bytes")
        with call.items_ahead(matrices * cut.blocks * cut.ranges, cut.draw) as (item, after):
            matrix, block, first, end = cut.locate(item, self.pairs)
            next_matrix, _, next_first, _ = cut.locate(after, self.pairs)
            ahead = self.weights + (next_matrix * group_bytes + next_first * panel_bytes)
            begin, rows = cut.block(block)
            if starts is not None:
                begin = k.load_int(starts + matrix * 4, 32)
                rows = k.load_int(starts + matrix * 4 + 4, 32) - begin
            self.x, self.out = x + matrix * spec.x_step, out + matrix * spec.out_step
            panels = PanelRange(first, end, self.weights + matrix * group_bytes, panel_bytes, ahead)
            with k.when(rows > 0), k.builder.if_else((rows <= TILED_ROWS).ir) as (few_rows, many_rows):
                with few_rows, k.range(end, first) as panel:
                    weights = panels.weights + panel * panel_bytes
                    following = k.select_ptr(panel + 1 < end, weights + panel_bytes, ahead)
                    single = RowCut(begin, rows, k.int(1), k.int(0), k.int(1))
                    self._panel(single, panel, matrix * self.pairs + panel, weights, following)
                with many_rows:
                    self._multiply_many(many, begin, rows, matrix * self.pairs, panels)

    def _range_cut(self, many: ManyRows, matrices: Int) -> RangeCut:
        """Return the division of each matrix's rows and panels that gives each thread some work items."""
        k, pairs, threads = self.k, self.pairs, self.call.threads
        min_ranges = (pairs + (MAX_PANELS - 1)) // MAX_PANELS
        if self.spec.grouped:
            ranges = k.max(k.min(pairs, threads * GROUP_RANGES_PER_THREAD), min_ranges)
            return RangeCut(k.int(0), k.int(0), k.int(1), ranges, k.int(1))
        rows = self.call.step.number(self.spec.rows_of)
        tiles = (rows + (TILED_ROWS - 1)) // TILED_ROWS
        # Deep products copy the rows for each item, others once per thread, so deep ones have fewer and larger items: 2
        # per thread with at least 8 panels, instead of 4 with at least 2. Each item reads its weights, so it has at
        # least 2 tiles of rows.
        items = threads * k.select(many.deep, k.int(ITEMS_PER_THREAD), k.int(4))
        items = (items + (matrices - 1)) // matrices
        min_panels = k.select(many.deep, k.int(8), k.int(2))
        ranges = k.max(k.min(items, pairs // min_panels), min_ranges)
        blocks = k.min((items + (ranges - 1)) // ranges, tiles // 2)
        blocks = k.max(blocks, (tiles + (MAX_ROW_TILES - 1)) // MAX_ROW_TILES)
        single = tiles < 2
        draw = k.select(single, matrices * pairs // (threads * RANGES_PER_THREAD), k.int(1))
        return RangeCut(rows, tiles, k.select(single, k.int(1), blocks), k.select(single, pairs, ranges), draw)

    def _multiply_many(self, many: ManyRows, begin: Int, rows: Int, first_column: Int, panels: PanelRange) -> None:
        """Multiply many rows by a range of panels; ``first_column`` is the index of panel 0 among all groups'."""
        k = self.k

        def prefetch(panel: Int) -> None:
            if self.addition is not None:
                self.addition.prefetch(first_column + panel)

        def prefetch_rows(first: Int, count: Int, panel: Int) -> None:
            # Into L2: with few inputs, stores that miss it would take up to half of the time. In L1, the lines would be
            # evicted before they are written.
            out, size = self._panel_out(panel), self._out_bytes() * PANEL_COLUMNS
            with k.range(count) as row:
                for line in range(0, size, LINE_BYTES):
                    k.prefetch(out + ((begin + first + row) * self.out_stride + line), near=False)

        def finish(first: Int, count: Int, panel: Int, sums: Ptr) -> None:
            self.column = first_column + panel
            out, constants = self._panel_out(panel), self._constants(self.column * TOTALS_BYTES)
            weights = panels.weights + panel * panels.panel_bytes
            with k.range(count) as row:
                totals = self.panels.totals(sums + row * TOTALS_BYTES, weights, begin + first + row)
                self.finish(begin + first + row, panel, totals, out, constants)

        lines = replace(panels, weights=panels.weights + self.panels.before_bytes)
        epilogue = Epilogue(prefetch, prefetch_rows, finish)
        many.multiply(self.x + begin * self.x_stride, self.x_stride, rows, lines, epilogue)

    def _tiles(self, rows: Int) -> Int:
        """Return the number of tiles for ``rows`` rows."""
        highest = self.panels.max_rows()
        return (rows + (highest - 1)) // highest

    def _panel(self, cut: RowCut, panel: Int, column: Int, weights: Ptr, ahead: Ptr) -> None:
        """Multiply some tiles of rows by one panel. ``panel`` is its index in out, ``column`` its index among the
        panels of all groups, whose biases are consecutive."""
        self.column = column
        constants = self._constants(column * TOTALS_BYTES)
        if self.addition is not None:
            self.addition.prefetch(column)
        self.panels.multiply(cut, panel, self._panel_out(panel), weights, ahead, constants)

    def _panel_out(self, panel: Int) -> Ptr:
        """Return the address of a panel in the first row of out."""
        return self.out + panel * (self._out_bytes() * PANEL_COLUMNS)

    def _constants(self, offset: Int) -> tuple[Vec, Vec] | None:
        """Return the bias of a panel's two tiles, or None."""
        if not self.spec.bias:
            return None
        at = self.call.args.pointer("bias") + offset
        return self.k.load(at), self.k.load(at + VECTOR_BYTES)

    def finish(self, row: Int, panel: Int, totals: list[Vec], first_out: Ptr, bias: tuple[Vec, Vec] | None) -> None:
        """Apply the epilogue to one row of a panel; ``first_out`` is the panel's address in the first row of out."""
        k, spec, out = self.k, self.spec, first_out + row * self.out_stride
        if bias is not None:
            totals = [total + shift for total, shift in zip(totals, bias, strict=True)]
        if self.addition is not None:
            totals = self.addition.add_to(row, self.column, totals)
        if spec.epilogue in GATED:
            k.store_float(out, self._gated(totals[0], totals[1]), spec.rows == "bf16")
            return
        if spec.epilogue in ACTIVATED:
            for half, total in enumerate(totals):
                at = out + half * (self._out_bytes() * PANEL_COLUMNS // 2)
                value = self._xielu(total) if spec.epilogue == "act_xielu" else self._activated(total)
                k.store_float(at, value, spec.rows == "bf16")
            return
        for half, total in enumerate(totals):
            at = out + half * VECTOR_BYTES
            k.store(at, k.fma(self.factor, total, k.load(at)) if spec.epilogue == "add" else total)

    def _gated(self, gate: Vec, up: Vec) -> Vec:
        k = self.k
        if self.spec.epilogue != "gated_clamped":
            return self._activated(gate) * up
        # The comparisons keep a NaN in the second argument.
        gate, lowest = k.minimum(self.limit, gate), self.limit * -1.0
        up = k.maximum(lowest, k.minimum(self.limit, up))
        return (up + 1.0) * (gate * self._sigmoid(gate * self.alpha))

    def _activated(self, gate: Vec) -> Vec:
        return _activated(self.k, self.spec.epilogue, gate, self._sigmoid)

    def _sigmoid(self, x: Vec) -> Vec:
        """Return the sigmoid. In matrix tiles it is only as exact as bfloat16 needs, because a division would take as
        long as 16 inputs; except for integer sums, whose results have the same bits in all kernels."""
        rough = self.panels.many is not None and self.spec.weights != INT8_DOTS
        return self.k.sigmoid_rough(x) if rough else self.k.sigmoid(x)

    def _xielu(self, x: Vec) -> Vec:
        """Return xIELU (arXiv 2411.13010), whose slope at 0 is 0.5: ``above`` times x squared above 0, and ``below``
        times exp(x) - 1 - x elsewhere."""
        k = self.k
        curve = self.below * (k.exp2(k.minimum(x, k.vector(0.0)) * LOG2E) - 1.0 - x)
        return k.fma(k.vector(0.5), x, k.select(x < 0.0, curve, self.above * (x * x)))

    def _out_bytes(self) -> int:
        """Return the bytes of a packed column in ``out``."""
        if self.spec.epilogue not in GATED + ACTIVATED:
            return 4
        element = 4 if self.spec.rows == "fp32" else 2
        return element // 2 if self.spec.epilogue in GATED else element


class Panels:
    """Emitter of products of tiles of rows with panels of plain weights."""

    # Bytes of a panel before its weights.
    before_bytes = 0
    many: ManyRows | None = None

    def __init__(self, body: GemmBody) -> None:
        self.body = body
        self.kind = self.tile_kind()
        self.steps = body.call.args.number("depth") // self.kind.inputs
        self.panel_bytes = self.steps * PANEL_STEP_BYTES + self.before_bytes
        self.sums = body.call.scratch
        if self.kind.in_matrix_tiles(body.k.isa):
            assert SCRATCH_NEEDED <= SCRATCH_BYTES
            self.many = ManyRows(body.k, self.kind, self.steps, body.call.scratch)
            # Products of few rows must not overwrite copies of other rows in scratch memory.
            self.sums = body.call.scratch + SUMS_OFFSET

    def tile_kind(self) -> TileKind:
        return TileKind(self.body.spec.weights, self.body.spec.rows)

    def max_rows(self) -> int:
        return self.kind.tiles(self.body.k.isa).tallest

    def totals(self, sums: Ptr, panel: Ptr, row: Int) -> list[Vec]:
        """Return a row's products with the two halves of a panel, a vector each, from the row's accumulated sums; for
        plain weights, the sums themselves."""
        return loaded(self.body.k, sums)

    def multiply(
        self, cut: RowCut, panel: Int, out: Ptr, weights: Ptr, ahead: Ptr, constants: tuple[Vec, Vec] | None
    ) -> None:
        """Multiply some tiles of rows by one panel, at ``weights``; ``ahead`` is memory to prefetch."""
        k, body = self.body.k, self.body
        step_bytes = k.int(PANEL_STEP_BYTES) // (cut.last - cut.first)
        with k.range(cut.last, cut.first) as tile:
            begin, rows = cut.begin(tile), cut.begin(tile + 1) - cut.begin(tile)
            prefetched = ahead + (tile - cut.first) * self.steps * step_bytes
            x, sums = body.x + begin * body.x_stride, self.sums
            args = TileArgs(x, body.x_stride, weights + self.before_bytes, self.steps, prefetched, step_bytes, sums)
            multiply_rows(k, self.kind, rows, args)
            with k.range(rows) as row:
                totals = self.totals(sums + row * TOTALS_BYTES, weights, begin + row)
                body.finish(begin + row, panel, totals, out, constants)


class DotPanels(Panels):
    """Products of int8 rows with panels of int8 codes, with integer sums."""

    def __init__(self, body: GemmBody) -> None:
        self.before_bytes = dots_constants_bytes(body.spec.offsets)
        super().__init__(body)

    def tile_kind(self) -> TileKind:
        return TileKind(INT8_DOTS, "int8")

    def totals(self, sums: Ptr, panel: Ptr, row: Int) -> list[Vec]:
        k, args, spec = self.body.k, self.body.call.args, self.body.spec
        constants = args.pointer("input_sums") + row * args.number("input_sums_stride")
        scale, shift, sum_ = (constants + ROW_CONSTANTS[name] for name in ROW_CONSTANTS)
        values = []
        for half in range(2):
            at = half * VECTOR_BYTES
            total = k.load_quads(sums + at) + k.broadcast_quad(shift)
            value = k.real_lanes(total) * k.broadcast(scale) * k.load(panel + at)
            if spec.offsets:
                value = k.fma(k.load(panel + (TOTALS_BYTES + at)), k.broadcast(sum_), value)
            values.append(value)
        return values


class CodedPanels(Panels):
    """Products of rows with panels of codes, group by group."""

    def __init__(self, body: GemmBody) -> None:
        spec, args = body.spec, body.call.args
        self.body = body
        self.coded = CodedProduct(body.k, CODE_KINDS[spec.weights], spec.rows == "fp32", spec.offsets)
        self.units, self.group_units = (args.number(name) // UNIT_INPUTS for name in ("depth", "inputs"))
        self.panel_bytes = self.coded.panel_bytes(self.units, self.group_units)

    @property
    def in_tiles(self) -> bool:
        """True if all products run in matrix tiles, however few rows."""
        return self.body.k.isa.matrix_tiles and in_pairs(self.body.k, self.coded.wide_rows)

    def max_rows(self) -> int:
        return TILED_ROWS if self.in_tiles else self.coded.max_rows(self.coded.widens)

    def multiply(
        self, cut: RowCut, panel: Int, out: Ptr, weights: Ptr, ahead: Ptr, constants: tuple[Vec, Vec] | None
    ) -> None:
        body, coded = self.body, self.coded
        args, zero = body.call.args, body.k.int(0)
        begin = cut.begin(cut.first)
        sums, sums_stride = args.pointer("input_sums"), args.number("input_sums_stride")
        rows = CodedRows(
            x=body.x + begin * body.x_stride,
            x_stride=body.x_stride,
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
            totals=body.call.scratch,
        )

        def finish(row: Int, totals: Ptr) -> None:
            body.finish(begin + row, panel, loaded(body.k, totals), out, constants)

        count = cut.begin(cut.last) - begin
        if self.in_tiles:
            CodedTiles.of_rows(coded, rows, weights).multiply(count, finish)
        else:
            coded.multiply(count, rows, weights, body.call.scratch, finish)


class RoundedPanels(CodedPanels):
    """Products of bfloat16 rows with panels of codes, which are rounded to bfloat16 weights."""

    def __init__(self, body: GemmBody) -> None:
        super().__init__(body)
        steps = body.call.args.number("depth") // TILE.inputs
        self.many = ManyRows(body.k, TILE, steps, body.call.scratch, self._widen)
        self.sums = body.call.scratch + SUMS_OFFSET

    def max_rows(self) -> int:
        return TILE.tiles(self.body.k.isa).tallest

    def multiply(
        self, cut: RowCut, panel: Int, out: Ptr, weights: Ptr, ahead: Ptr, constants: tuple[Vec, Vec] | None
    ) -> None:
        k, body, begin = self.body.k, self.body, cut.begin(cut.first)
        rows, x = cut.begin(cut.last) - begin, body.x + begin * body.x_stride
        units = self.units, self.group_units
        RoundedProduct(self.coded, *units, x, body.x_stride, weights, ahead, self.sums).multiply(rows)
        with k.range(rows) as row:
            body.finish(begin + row, panel, loaded(k, self.sums + row * TOTALS_BYTES), out, constants)

    def _widen(self, part: PanelPart) -> None:
        units = self.units, self.group_units
        widen_part(
            self.coded, *units, part.panel, part.ahead, part.wide, part.first // UNIT_STEPS, part.steps // UNIT_STEPS
        )


class GroupDotPanels(Panels):
    """Products of int8 rows with panels of codes, group by group."""

    def __init__(self, body: GemmBody) -> None:
        spec, args = body.spec, body.call.args
        self.body = body
        self.product = DotProduct(body.k, DOT_KINDS[spec.weights], spec.offsets)
        self.units, self.group_units = (args.number(name) // UNIT_INPUTS for name in ("depth", "inputs"))
        self.panel_bytes = self.product.panel_bytes(self.units, self.group_units)

    def max_rows(self) -> int:
        return self.product.max_rows()

    def multiply(
        self, cut: RowCut, panel: Int, out: Ptr, weights: Ptr, ahead: Ptr, constants: tuple[Vec, Vec] | None
    ) -> None:
        body, args, begin = self.body, self.body.call.args, cut.begin(cut.first)
        about, about_stride = args.pointer("input_sums"), args.number("input_sums_stride")
        rows = DotRows(
            x=body.x + begin * body.x_stride,
            x_stride=body.x_stride,
            about=about + begin * about_stride,
            about_stride=about_stride,
            panel=weights,
            group_units=self.group_units,
            units=self.units,
            ahead=ahead,
            ahead_step=body.k.int(0),
            totals=body.call.scratch,
        )

        def finish(row: Int, totals: Ptr) -> None:
            body.finish(begin + row, panel, loaded(body.k, totals), out, constants)

        count = cut.begin(cut.last) - begin
        if not body.k.isa.matrix_tiles:
            self.product.multiply(count, rows, finish)
            return
        with body.k.builder.if_else((count <= self.product.max_rows()).ir) as (few, many):
            with few:
                self.product.multiply(count, rows, finish)
            with many:
                DotTiles(self.product, rows).multiply(count, finish)


def loaded(k: Kernel, sums: Ptr) -> list[Vec]:
    """Load a row's sums for both tiles of a panel."""
    return [k.load(sums + half * VECTOR_BYTES) for half in range(2)]


@dataclass(frozen=True, slots=True)
class RangeCut:
    """The division of each matrix's rows into ``blocks`` of whole tiles, and of its panels into ``ranges``.

    Attributes:
        rows, tiles: number of rows, and of tiles of 32 rows; 0 in grouped products, whose groups differ.
        draw: work items to draw at a time.
    """

    rows: Int
    tiles: Int
    blocks: Int
    ranges: Int
    draw: Int

    def locate(self, item: Int, panels: Int) -> tuple[Int, Int, Int, Int]:
        """Return an item's matrix, block of rows, first panel, and end panel. Items of one block are consecutive."""
        blocks = item // self.ranges
        matrix, number = blocks // self.blocks, item - blocks * self.ranges
        first, end = (panels * index // self.ranges for index in (number, number + 1))
        return matrix, blocks - matrix * self.blocks, first, end

    def block(self, number: Int) -> tuple[Int, Int]:
        """Return the first row of a block, and its number of rows."""
        first, end = (self.tiles * index // self.blocks * TILED_ROWS for index in (number, number + 1))
        return first, first.k.min(end, self.rows) - first


@dataclass(frozen=True, slots=True)
class RowCut:
    """The tiles first .. last - 1 of rows base .. base + rows - 1, which are divided into ``tiles`` as evenly as
    possible."""

    base: Int
    rows: Int
    tiles: Int
    first: Int
    last: Int

    def begin(self, tile: Int) -> Int:
        """Return the first row of a tile."""
        return self.base + self.rows * tile // self.tiles


def _activated(k: Kernel, epilogue: str, gate: Vec, sigmoid: Callable[[Vec], Vec]) -> Vec:
    if epilogue == "act_none":
        return gate
    if epilogue.endswith("silu"):
        return gate * sigmoid(gate)
    if epilogue in ("act_relu", "act_relu2"):
        positive: Vec = k.select(gate < 0.0, k.vector(0.0), gate)
        return positive if epilogue == "act_relu" else positive * positive
    if epilogue == "act_erf_gelu":
        return _erf_gelu(k, gate)
    # gelu(x) in its tanh approximation is x * sigmoid(x * (a + b * x * x)).
    inner = k.fma(gate * gate, k.vector(0.0713548162726009), k.vector(1.5957691216057308))
    return gate * sigmoid(gate * inner)


def _erf_gelu(k: Kernel, x: Vec) -> Vec:
    """Return x * (1 + erf(x / sqrt(2))) / 2.

    1 - erf(z) is about t * (a polynomial of t) * e**(-z * z) for z >= 0, where t = 1 / (1 + p * z), within 1.5e-7
    (Abramowitz and Stegun, 7.1.26).
    """
    distance = k.maximum(x, x * -1.0) * math.sqrt(0.5)
    t = k.vector(1.0) / (distance * 0.3275911 + 1.0)
    curve = k.vector(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        curve = k.fma(curve, t, k.vector(factor))
    tail = x * 0.5 * (curve * t * k.exp2(distance * distance * -LOG2E))
    return k.select(x < 0.0, tail, x - tail)  # type: ignore[no-any-return]
