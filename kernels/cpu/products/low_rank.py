"""Products with many adapters at once: what LoRA adds to the outputs of a linear layer, row by row.

    Shrink: shrunk = A x for each row that has an adapter     AdapterGemm: out = epilogue(W x + B shrunk)

Adapters have places, and a table of records says where the matrices of each place are, so that an adapter of any rank
comes and goes by one change of the table (S-LoRA, Sheng et al. 2023; Punica, Chen et al. 2023). Rows of one adapter are
in runs, whose tiles read A once. B needs no pass of its own: the epilogue of the product adds B's part to the sums of a
row before it activates, adds or stores them, while B waits in the cache, prefetched when the panel began.

A row's result has the same bits whatever the other rows and adapters are: each shrunk value is a fixed tree of
additions over rising inputs, and each output goes on with its chain over rising ranks. A row without an adapter has the
bits that :class:`pillion.kernels.cpu.products.gemm.Gemm` gives it.

Both matrices are in tiles of 16 outputs (:mod:`pillion.kernels.cpu.products.tiles`), of the type of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr, Vec
from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import WORD_BYTES, RecordLayout, RecordView
from pillion.kernels.cpu.products.gemm import LAYOUT, Gemm
from pillion.kernels.cpu.products.tiles import TILE_COLUMNS

# The record of a place for one linear layer. A place without an adapter, or whose adapter leaves the layer as it is,
# has only zeros.
PLACE = RecordLayout(
    "place",
    pointers=(
        "a",  # tiles of A, whose outputs are the ranks of all pairs, one behind the other
        "b",  # tiles of B, a tile for each 16 packed outputs of the layer
        # int32 [tiles of B]: bytes from a row of shrunk to the tile's first rank; 0 for a tile without a pair, which
        # has only zeros.
        "first_ranks",
    ),
    numbers=(
        "a_tiles",
        "b_steps",  # steps of a tile of B
    ),
)
PLACE_BYTES = WORD_BYTES * PLACE.num_words
# A run of rows: its place, its first number in the list of rows, and how many rows it has.
RUN_WORDS = 3
_STEPS_PER_ITERATION = 4
# Bytes of a row that meet a step's vector of weights: one float32, or a pair of bfloat16.
_ROW_STEP_BYTES = 4
# A run of few rows waits for A, which is prefetched so far ahead; the processor's own prefetcher ends at each page.
_FEW_ROWS, _AHEAD_BYTES = 4, 4096


def run_rows(isa: Isa) -> int:
    """The most rows of a run, so many that their sums stay in registers."""
    return 3 if isa.fp32_tiles.narrow else min(isa.bf16_tiles.wide, 8)


@dataclass(frozen=True, slots=True)
class Shrink(KernelSpec):
    """``shrunk`` [rows, ranks] = A x, for the rows of the step's runs; ``x`` and ``shrunk`` are of one type.

    Attributes:
        rows: "bf16" or "fp32", the type of x and A. Sums are float32 and are rounded once.
        rows_of: "tokens" or "samples".
    """

    layout = RecordLayout(
        "shrink",
        pointers=("x", "places", "shrunk"),  # x: rows of a layer; places: a record for each place
        numbers=("x_stride", "depth", "shrunk_stride"),  # depth: padded inputs
    )

    rows: str
    rows_of: str = "tokens"

    def emit(self, call: KernelCall) -> None:
        k, args, step = call.k, call.args, call.step
        places = args.pointer("places")
        runs, count = step.pointer(f"{self.rows_of}_runs"), step.number(f"num_{self.rows_of}_runs")

        def place_of(run: Int) -> RecordView:
            return RecordView(PLACE, k, places + k.load_int(runs + run * (4 * RUN_WORDS), 32) * PLACE_BYTES)

        # Work items are tiles of A with a run. A place has as many as its rank needs, so every call counts them.
        total = k.variable(k.int(0))
        with k.range(count) as run:
            total.value = total.value + place_of(run).number("a_tiles")
        first, behind = (total.value * (call.thread + number) // call.threads for number in (0, 1))
        before = k.variable(k.int(0))
        with k.range(count) as run:
            place, begin = place_of(run), before.value
            tiles = place.number("a_tiles")
            with k.range(k.least(behind - begin, tiles), k.most(first - begin, 0)) as tile:
                self._multiply(call, place, runs + run * (4 * RUN_WORDS), tile)
            before.value = begin + tiles

    def _multiply(self, call: KernelCall, place: RecordView, run: Ptr, tile: Int) -> None:
        """One tile of A with a run of rows."""
        k, args = call.k, call.args
        numbers = call.step.pointer(f"{self.rows_of}_adapted") + k.load_int(run + 4, 32) * 4
        rows = k.load_int(run + 8, 32)
        x, x_stride, out, out_stride = (
            args.pointer("x"), args.number("x_stride"), args.pointer("shrunk"), args.number("shrunk_stride")
        )  # fmt: skip
        size = 2 if self.rows == "bf16" else 4
        row_bytes, out_at, out_bytes = args.number("depth") * size, tile * (TILE_COLUMNS * size), TILE_COLUMNS * size
        steps = row_bytes // _ROW_STEP_BYTES
        a = place.pointer("a") + tile * (steps * VECTOR_BYTES)
        inside = k.variable(k.int(1))
        inside.value = k.select(k.holds(a, steps * VECTOR_BYTES) & k.holds(numbers, rows * 4), k.int(1), k.int(0))
        with k.range(rows) as number:
            row = k.load_int(numbers + number * 4, 32)
            fits = k.holds(x + row * x_stride, row_bytes) & k.holds(out + (row * out_stride + out_at), out_bytes)
            inside.value = k.select(fits, inside.value, k.int(0))
        with k.when(inside.value > 0):
            self._call(k, rows, (x, x_stride, numbers, a, steps, out + out_at, out_stride))

    def _call(self, k: Kernel, rows: Int, values: tuple[Any, ...]) -> None:
        """Calls the function for ``rows`` rows."""
        for height in k.cases(rows, run_rows(k.isa)):

            def body(inner: Kernel, *seen: Any, height: int = height) -> None:
                self._write_tile(inner, height, *seen)

            k.call_subroutine(f"shrink_tile_{self.rows}_{height}", values, body)

    def _write_tile(
        self, k: Kernel, height: int, x: Ptr, x_stride: Int, numbers: Ptr, a: Ptr, steps: Int, out: Ptr, out_stride: Int
    ) -> None:
        """Even and odd steps have sums of their own where registers allow, because each sum waits for the last one."""
        sides = 1 if k.isa.fp32_tiles.narrow else 2
        row_numbers = [k.load_int(numbers + number * 4, 32) for number in range(height)]
        rows = [x + number * x_stride for number in row_numbers]
        sums = [[k.variable(k.vector(0.0)) for _ in range(sides)] for _ in range(height)]
        with k.range(steps, step=_STEPS_PER_ITERATION) as first:
            for number in range(_STEPS_PER_ITERATION):
                at = a + (first + number) * VECTOR_BYTES
                if height <= _FEW_ROWS:
                    k.prefetch(at + _AHEAD_BYTES, near=False)
                weights = _weights(k, at, self.rows)
                for row, totals in zip(rows, sums, strict=True):
                    total = totals[number % sides]
                    total.value = _sum(k, total.value, row + (first + number) * _ROW_STEP_BYTES, weights, self.rows)
        for row_number, totals in zip(row_numbers, sums, strict=True):
            total = totals[0].value if sides == 1 else totals[0].value + totals[1].value
            k.store_float(out + row_number * out_stride, total, self.rows == "bf16")


@dataclass(frozen=True, slots=True)
class AdapterGemm(Gemm):
    """A :class:`Gemm`, not grouped, that adds B shrunk to the sums of rows with an adapter, before the epilogue."""

    layout = RecordLayout(
        "adapter_gemm",
        pointers=(*LAYOUT.pointers, "places", "shrunk"),
        numbers=(*LAYOUT.numbers, "shrunk_stride"),
        reals=LAYOUT.reals,
    )

    def expand(self, call: KernelCall) -> Expand:
        return Expand(self, call)


class Expand:
    """Emits what :class:`AdapterGemm` adds to a panel's sums."""

    def __init__(self, spec: AdapterGemm, call: KernelCall) -> None:
        self._k, self._rows, step = call.k, spec.rows, call.step
        self._places, self._shrunk = call.args.pointer("places"), call.args.pointer("shrunk")
        self._shrunk_stride = call.args.number("shrunk_stride")
        self._row_places = step.pointer(f"{spec.rows_of.removeprefix('num_')}_places")
        self._used, self._num_used = step.pointer("used_places"), step.number("num_used_places")

    def _place(self, number: Int) -> RecordView:
        return RecordView(PLACE, self._k, self._places + number * PLACE_BYTES)

    def prefetch(self, panel: Int) -> None:
        """Asks for the tiles of B of ``panel`` of all adapters of the step: rows meet them when its sums are there."""
        k = self._k
        with k.range(self._num_used) as number:
            place = self._place(k.load_int(self._used + number * 4, 32))
            lines = place.number("b_steps") * 2
            tiles = place.pointer("b") + panel * lines * VECTOR_BYTES
            with k.range(lines, step=2 * _STEPS_PER_ITERATION) as first:
                for line in range(2 * _STEPS_PER_ITERATION):
                    k.prefetch(tiles + (first + line) * VECTOR_BYTES, near=False)

    def added(self, row: Int, panel: Int, totals: list[Vec]) -> list[Vec]:
        """The sums of both tiles of ``panel`` with what the adapter of ``row`` adds."""
        k = self._k
        place = k.load_int(self._row_places + row * 4, 32)
        variables = [k.variable(total) for total in totals]
        with k.when(place >= 0):
            view = self._place(place)
            steps = view.number("b_steps")
            with k.when(steps > 0):
                tile, shrunk = panel * 2, self._shrunk + row * self._shrunk_stride
                weights = view.pointer("b") + tile * (steps * VECTOR_BYTES)
                first_ranks = view.pointer("first_ranks") + tile * 4
                halves = [
                    (total, shrunk + k.load_int(first_ranks + half * 4, 32), weights + steps * (half * VECTOR_BYTES))
                    for half, total in enumerate(variables)
                ]
                self._add(halves, steps)
        return [total.value for total in variables]

    def _add(self, halves: list[tuple[Any, Ptr, Ptr]], steps: Int) -> None:
        """Adds both tiles' products side by side: a sum, its first rank of the row, and its tile of B for each."""
        k = self._k
        with k.range(steps, step=_STEPS_PER_ITERATION) as first:
            for number in range(_STEPS_PER_ITERATION):
                step = first + number
                for total, shrunk, tile in halves:
                    weights = _weights(k, tile + step * VECTOR_BYTES, self._rows)
                    total.value = _sum(k, total.value, shrunk + step * _ROW_STEP_BYTES, weights, self._rows)


def _weights(k: Kernel, at: Ptr, rows: str) -> Any:
    """A step's weights."""
    return k.load(at) if rows == "fp32" else k.load_pairs(at)


def _sum(k: Kernel, total: Vec, row: Ptr, weights: Any, rows: str) -> Vec:
    """``total`` and the products of a step's weights with a row's values."""
    return k.fma(weights, k.broadcast(row), total) if rows == "fp32" else k.dot(total, weights, k.broadcast_pair(row))
