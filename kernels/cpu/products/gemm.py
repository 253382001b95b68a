"""Products of rows with packed weights (:mod:`pillion.kernels.cpu.products.packing`), and what is done to the sums
before they leave.

    takes of panels -> for each panel: tiles of rows -> sums (gemm_tiles) -> epilogue -> out

Threads take panels. A panel is met by all rows, in tiles of even height: the first tile streams it from memory, the
others find it in the cache, and all of them ask for a part of the panel that this thread takes next, so that memory
and arithmetic are busy at the same time. int8 weights are widened in registers, tile by tile; without an instruction
for bfloat16 products that costs too much, so there a panel that meets more than one tile is widened once, to scratch.

A row's result has the same bits whatever the other rows are and however many: each output is one chain of additions
over rising inputs (gemm_tiles), and the epilogue is one piece of code for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import gelu, silu

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Kernel
from pillion.kernels.cpu.language.module import SCRATCH_BYTES, Call
from pillion.kernels.cpu.language.records import Layout
from pillion.kernels.cpu.language.values import Int, Ptr, Vec
from pillion.kernels.cpu.products.gemm_tiles import PANEL_STEP_BYTES, SUMS_ROW_BYTES, TileArgs, most_rows, multiply_rows
from pillion.kernels.cpu.products.int8 import LINE_BYTES, widen
from pillion.kernels.cpu.products.packing import PANEL_COLUMNS, TILE_COLUMNS, PackedWeight, unpack

LAYOUT = Layout(
    "gemm",
    pointers=(
        "x",  # [rows, depth] bfloat16, or float32 with float32 weights; zeros behind the values up to depth
        "weights",  # the packed matrix, or those of all groups behind each other
        "scales",  # float32 [groups, pairs * 32], int8 weights only
        "bias",  # float32 [groups, pairs * 32] in the order of the packed columns, if the spec says so
        "out",  # [rows, pairs * 32] float32, or gated [rows, pairs * 16] of x's type
        "group_starts",  # int32 [groups + 1]: which rows of x and out belong to a group; grouped only
    ),
    numbers=(
        "x_stride",  # bytes
        "depth",  # padded
        "pairs",
        "out_stride",  # bytes; rows of out have room for all packed columns
        "num_groups",
        "group_bytes",  # of one group's weights
    ),
    reals=("factor",),  # of what is added
)

GATED = ("gated_silu", "gated_gelu")
# Of a thread, if there are panels enough: a take has many microseconds, and the last ones end together.
TAKES = 16
TAKES_OF_GROUP = 4
# That a thread should find, where rows are enough to cut panels' work into blocks of rows.
ITEMS = 2
# Of a thread's scratch: first the sums of a tile, behind them a widened panel.
_SUMS_BYTES = 8192
_WIDE_BYTES = SCRATCH_BYTES - _SUMS_BYTES
# gelu(x) is x * sigmoid(x * (a + b * x * x)), by tanh.
_GELU_A = 1.5957691216057308
_GELU_B = 0.0713548162726009


def reference_gemm(
    x: torch.Tensor,
    packed: PackedWeight,
    epilogue: str,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """What one group computes, in float64. x [T, depth]; ``out`` is what is added to. Gated: [T, pairs * 16]."""
    weight = unpack(packed).double()
    if packed.scales is not None:
        weight = weight * packed.scales.double().unsqueeze(-1)
    total = x.double() @ weight.T
    if bias is not None:
        total = total + bias.double()
    if epilogue == "add":
        assert out is not None
        return out.double() + factor * total
    if epilogue in GATED:
        gate, up = total.view(len(total), packed.pairs, 2, TILE_COLUMNS).unbind(-2)
        gated = silu(gate) if epilogue == "gated_silu" else gelu(gate, approximate="tanh")
        return (gated * up).flatten(-2)
    return total


@dataclass(frozen=True, slots=True)
class Gemm:
    """x times packed weights.

    Attributes:
        weights: kind of the packed weights: "bf16", "fp32" or "int8".
        epilogue: "store": out = sum * scale + bias. "add": out += factor * (sum * scale + bias). "gated_silu",
            "gated_gelu" (by tanh): out = act(gate) * up, rounded to x's type; the weights are of ``pack_gated``.
        rows_of: the number of the step's record that says how many rows there are; grouped: group_starts says.
        bias: whether there is one.
        grouped: rows group_starts[e] .. group_starts[e + 1] meet matrix e: the experts of a layer.
    """

    weights: str
    epilogue: str
    rows_of: str = "num_tokens"
    bias: bool = False
    grouped: bool = False

    @property
    def name(self) -> str:
        """Of the kernel."""
        options = ("_bias" if self.bias else "") + ("_grouped" if self.grouped else "")
        return f"gemm_{self.weights}_{self.epilogue}_{self.rows_of}{options}"

    @property
    def layout(self) -> Layout:
        """One for all specs; what a spec does not use is None or 0."""
        return LAYOUT

    def emit(self, call: Call) -> None:
        """Writes its instructions."""
        _Body(self, call).write()


class _Body:
    """The instructions of one kernel."""

    def __init__(self, spec: Gemm, call: Call) -> None:
        k, args = call.k, call.args
        self.spec, self.call, self.k = spec, call, k
        self.x, self.weights, self.out = (args.pointer(name) for name in ("x", "weights", "out"))
        self.x_stride, self.out_stride = args.number("x_stride"), args.number("out_stride")
        self.pairs = args.number("pairs")
        self.steps = args.number("depth") // (1 if spec.weights == "fp32" else 2)
        self.panel_bytes = self.steps * PANEL_STEP_BYTES[spec.weights]
        if spec.epilogue == "add":
            self.factor = args.real("factor")

    def write(self) -> None:
        """All of it."""
        if self.spec.grouped:
            self._groups()
        else:
            self._blocks()

    def _blocks(self) -> None:
        """An item is a panel with a block of the rows: all of them, unless there are fewer panels than threads like."""
        k, call, pairs = self.k, self.call, self.pairs
        rows = call.step.number(self.spec.rows_of)
        tiles = self._tiles(rows)
        blocks = k.least(tiles, (call.threads * ITEMS + (pairs - 1)) // pairs)
        count = pairs * blocks
        with self._items(count, count // (call.threads * TAKES)) as (item, after):
            panel = item // blocks
            block = item - panel * blocks
            cut = _Cut(k.int(0), rows, tiles, tiles * block // blocks, tiles * (block + 1) // blocks)
            weights = self.weights + panel * self.panel_bytes
            self._panel(cut, panel, panel, weights, self.weights + after // blocks * self.panel_bytes)

    def _groups(self) -> None:
        """An item is a panel of a group with all of its rows, which are none for many a group."""
        k, call, pairs = self.k, self.call, self.pairs
        starts = call.args.pointer("group_starts")
        group_bytes = call.args.number("group_bytes")
        # As one group may have all the work, a take is cut from a group's panels.
        chunk = pairs // (call.threads * TAKES_OF_GROUP)
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
        highest = most_rows(self.k.isa, self.spec.weights)
        return (rows + (highest - 1)) // highest

    @contextmanager
    def _items(self, count: Int, chunk: Int) -> Iterator[tuple[Int, Int]]:
        """Items of 0 .. count that this thread takes, ``chunk`` at a time, and the one that it works on after each."""
        k = self.k
        chunk = k.most(chunk, 1)
        # A take is drawn before the one before it is worked on: so it is known what to ask memory for.
        taken = k.variable(k.fetch_add(self.call.counter, chunk))
        with k.forever() as behind:
            begin = taken.value
            k.leave(behind, begin >= count)
            following = k.fetch_add(self.call.counter, chunk)
            taken.value = following
            end = k.least(begin + chunk, count)
            with k.range(end, begin) as item:
                after = k.select(item + 1 < end, item + 1, following)
                # Behind the last take there is nothing to ask for: what is here is as good as anything.
                yield item, k.select(after < count, after, item)

    def _panel(self, cut: _Cut, panel: Int, column: Int, weights: Ptr, ahead: Ptr) -> None:
        """Some tiles of rows with one panel. ``panel`` counts in out, ``column`` in scales and bias."""
        k, kind = self.k, self.spec.weights
        count = cut.last - cut.first
        step_bytes = k.int(PANEL_STEP_BYTES[kind]) // count
        wide = self.call.scratch + _SUMS_BYTES
        widens = kind == "int8" and not k.isa.bf16_dot
        widened = k.int(0)
        if widens:
            fits = self.steps * PANEL_STEP_BYTES["bf16"] <= _WIDE_BYTES
            widened = k.select((count > 1) & fits, k.int(1), widened)
            with k.when(widened > 0), k.range(self.steps) as step:
                for half, pairs in enumerate(widen(k, weights + step * LINE_BYTES)):
                    k.write(wide + step * PANEL_STEP_BYTES["bf16"] + half * VECTOR_BYTES, pairs.ir, 4)
        out = self.out + panel * (self._out_bytes() * PANEL_COLUMNS)
        constants = self._constants(column * SUMS_ROW_BYTES)
        with k.range(cut.last, cut.first) as tile:
            begin = cut.rows * tile // cut.tiles
            rows = cut.rows * (tile + 1) // cut.tiles - begin
            begin = begin + cut.base
            wanted = ahead + (tile - cut.first) * self.steps * step_bytes
            x, sums = self.x + begin * self.x_stride, self.call.scratch
            args = TileArgs(x, self.x_stride, weights, self.steps, wanted, step_bytes, sums)
            with k.when(widened.equals(0)):
                multiply_rows(k, kind, rows, args)
            if widens:
                with k.when(widened > 0):
                    multiply_rows(k, "bf16", rows, replace(args, panel=wide))
            with k.range(rows) as row:
                self._finish(sums + row * SUMS_ROW_BYTES, out + (begin + row) * self.out_stride, constants)

    def _constants(self, offset: Int) -> dict[str, tuple[Vec, Vec]]:
        """Scales and bias of a panel's tiles, of what there is."""
        found = {}
        for name, given in (("scales", self.spec.weights == "int8"), ("bias", self.spec.bias)):
            if given:
                at = self.call.args.pointer(name) + offset
                found[name] = self.k.load(at), self.k.load(at + VECTOR_BYTES)
        return found

    def _finish(self, sums: Ptr, out: Ptr, constants: dict[str, tuple[Vec, Vec]]) -> None:
        """The epilogue for one row of a tile."""
        k, spec = self.k, self.spec
        totals = []
        for half in range(2):
            total = k.load(sums + half * VECTOR_BYTES)
            if "scales" in constants:
                total = total * constants["scales"][half]
            if "bias" in constants:
                total = total + constants["bias"][half]
            totals.append(total)
        if spec.epilogue in GATED:
            k.store_float(out, _activated(k, spec.epilogue, totals[0]) * totals[1], spec.weights != "fp32")
            return
        for half, total in enumerate(totals):
            place = out + half * VECTOR_BYTES
            k.store(place, k.fma(self.factor, total, k.load(place)) if spec.epilogue == "add" else total)

    def _out_bytes(self) -> int:
        """Of out, for each packed column."""
        if self.spec.epilogue not in GATED:
            return 4
        return 2 if self.spec.weights == "fp32" else 1


@dataclass(frozen=True, slots=True)
class _Cut:
    """Tiles first .. last of those that rows base .. base + rows are cut into, as evenly as whole rows allow."""

    base: Int
    rows: Int
    tiles: Int
    first: Int
    last: Int


def _activated(k: Kernel, epilogue: str, gate: Vec) -> Vec:
    if epilogue == "gated_silu":
        return gate * k.sigmoid(gate)
    return gate * k.sigmoid(gate * k.fma(gate * gate, k.vector(_GELU_B), k.vector(_GELU_A)))
