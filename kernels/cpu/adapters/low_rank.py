"""Products with many LoRA adapters at once: the low-rank update of a linear layer's outputs, row by row.

    Shrink: shrunk = A x for each row that has an adapter     AdapterGemm: out = epilogue(W x + B shrunk)

In a layer with a matrix per head, heads share one of A and B, and each head has its part of the other. A row's shrunk
values are then those of its heads, one after the other.

ExpertShrink is Shrink for layers of experts, each of which has its own A and B. Which rows an expert gets is known only
within the step, so there are no runs, and rows are processed one at a time.

Adapters have slots, and a table of records locates the matrices of each slot, so that an adapter of any rank is loaded
or evicted by one change of the table (S-LoRA, Sheng et al. 2023; Punica, Chen et al. 2023). Rows of an adapter form
runs, whose tiles read A once. B needs no separate pass: the product adds B times the shrunk values to the sums of a row
before its epilogue. By then B is in the cache, since it was prefetched when the panel began.

A row's result has the same bits whatever the other rows and adapters are: each shrunk value is a fixed tree of
additions over ascending inputs, and each output continues its chain over ascending ranks. A row without an adapter has
the bits of :class:`pillion.kernels.cpu.products.gemm.Gemm`.

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

# An adapter slot's matrices for one linear layer; all zeros if the slot is empty, or its adapter does not change the
# layer.
SLOT = RecordLayout(
    "slot",
    pointers=(
        # In a layer of experts, each array has the experts' parts, one after the other.
        "a",  # tiles of A; its outputs are the ranks of all (A, B) pairs, pair after pair
        "b",  # a tile of B for each 16 packed outputs of the layer
        # int32 [tiles of B]: byte offset of each tile's first rank in a row of shrunk values; 0 for tiles of zeros,
        # whose outputs no pair changes.
        "first_ranks",
    ),
    numbers=(
        "a_tiles",  # tiles of A of one expert or head
        "b_steps",  # steps of a tile of B
        # Bytes from one head's A, and B, to the next head's; 0 if heads share it.
        "a_stride",
        "b_stride",
    ),
)
# Record of a step's adapters, for all rows and for the sampled rows: each row's slot, or -1; the indices of the rows
# with an adapter, ordered by slot; and the runs of these rows, int32 [runs, RUN_WORDS].
ADAPTED = RecordLayout(
    "adapted",
    pointers=(
        "tokens_slots",
        "tokens_adapted",
        "tokens_runs",
        "samples_slots",
        "samples_adapted",
        "samples_runs",
        "used_slots",  # int32 [U]: the slots that the step uses
    ),
    numbers=("num_tokens_runs", "num_samples_runs", "num_used_slots"),
)
SLOT_BYTES = WORD_BYTES * SLOT.num_words
# Words of a run of rows: its slot, the index of its first row in the list of rows, and its number of rows.
RUN_WORDS = 3
_STEPS_PER_ITERATION = 4
# Bytes of a row per step's vector of weights: one float32, or a pair of bfloat16.
_ROW_STEP_BYTES = 4


def run_rows(isa: Isa) -> int:
    """Return the max rows of a run: their sums stay in registers."""
    return 3 if isa.fp32_tiles.narrow else min(isa.bf16_tiles.wide, 8)


@dataclass(frozen=True, slots=True)
class Shrink(KernelSpec):
    """Product ``shrunk`` [rows, ranks] = A x for the rows of the step's runs. ``x`` and ``shrunk`` have one type.

    Attributes:
        rows: "bf16" or "fp32", the type of x and A. Sums are float32 and are rounded once.
        rows_of: "tokens" or "samples".
        heads: the number of heads; 0 for a product with one matrix.
        x_step: bytes from a head's columns of x to the next head's.
    """

    layout = RecordLayout(
        "shrink",
        pointers=("x", "slots", "shrunk", "adapted"),  # slots: a SLOT per slot; adapted: the step's ADAPTED
        numbers=("x_stride", "depth", "shrunk_stride"),  # depth: inputs with padding
    )

    rows: str
    rows_of: str = "tokens"
    heads: int = 0
    x_step: int = 0

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        slots, step = args.pointer("slots"), RecordView(ADAPTED, k, args.pointer("adapted"))
        runs, count = step.pointer(f"{self.rows_of}_runs"), step.number(f"num_{self.rows_of}_runs")

        def slot_of(run: Int) -> RecordView:
            return RecordView(SLOT, k, slots + k.load_int(runs + run * (4 * RUN_WORDS), 32) * SLOT_BYTES)

        # A work item is one tile of A (or of a head's A) for one run. A slot's number of tiles depends on its rank, so
        # each call adds them up.
        total = k.variable(k.int(0))
        with k.range(count) as run:
            total.value = total.value + self._tiles(slot_of(run))
        first, end = (total.value * (call.thread + number) // call.threads for number in (0, 1))
        before = k.variable(k.int(0))
        with k.range(count) as run:
            slot, begin = slot_of(run), before.value
            tiles = self._tiles(slot)
            with k.range(k.min(end - begin, tiles), k.max(first - begin, 0)) as tile:
                self._multiply(call, step, slot, runs + run * (4 * RUN_WORDS), tile)
            before.value = begin + tiles

    def _tiles(self, slot: RecordView) -> Int:
        tiles = slot.number("a_tiles")
        return tiles * self.heads if self.heads else tiles

    def _multiply(self, call: KernelCall, step: RecordView, slot: RecordView, run: Ptr, tile: Int) -> None:
        k, args = call.k, call.args
        numbers = step.pointer(f"{self.rows_of}_adapted") + k.load_int(run + 4, 32) * 4
        rows = k.load_int(run + 8, 32)
        x, x_stride, out, out_stride = (
            args.pointer("x"), args.number("x_stride"), args.pointer("shrunk"), args.number("shrunk_stride")
        )  # fmt: skip
        size = 2 if self.rows == "bf16" else 4
        row_bytes, out_at, out_bytes = args.number("depth") * size, tile * (TILE_COLUMNS * size), TILE_COLUMNS * size
        steps = row_bytes // _ROW_STEP_BYTES
        a = slot.pointer("a")
        if self.heads:
            head = tile // slot.number("a_tiles")
            tile = tile - head * slot.number("a_tiles")
            x, a = x + head * self.x_step, a + head * slot.number("a_stride")
        a = a + tile * (steps * VECTOR_BYTES)
        inside = k.variable(k.int(1))
        inside.value = k.select(
            k.in_bounds(a, steps * VECTOR_BYTES) & k.in_bounds(numbers, rows * 4), k.int(1), k.int(0)
        )
        with k.range(rows) as number:
            row = k.load_int(numbers + number * 4, 32)
            fits = k.in_bounds(x + row * x_stride, row_bytes) & k.in_bounds(
                out + (row * out_stride + out_at), out_bytes
            )
            inside.value = k.select(fits, inside.value, k.int(0))
        with k.when(inside.value > 0):
            self._call(k, rows, (x, x_stride, numbers, a, steps, out + out_at, out_stride))

    def _call(self, k: Kernel, rows: Int, values: tuple[Any, ...]) -> None:
        for height in k.cases(rows, run_rows(k.isa)):
            _multiply_tile(k, self.rows, height, values)


@dataclass(frozen=True, slots=True)
class ExpertShrink(KernelSpec):
    """Product ``shrunk`` [grouped rows, ranks] = A x of experts, for the grouped rows whose row has an adapter. Also
    writes ``place_slots``, int32 [grouped rows]: the slot of each, or -1.

    Attributes:
        rows, rows_of: those of :class:`Shrink`.
        chosen: experts per row.
    """

    layout = RecordLayout(
        "expert_shrink",
        # experts and places are int32 [rows, chosen]: a row's experts, and its grouped row for each.
        pointers=("x", "slots", "shrunk", "adapted", "experts", "places", "place_slots"),
        # most_tiles: tiles of A of the highest rank.
        numbers=("x_stride", "depth", "shrunk_stride", "most_tiles"),
    )

    rows: str
    rows_of: str
    chosen: int

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        step = RecordView(ADAPTED, k, args.pointer("adapted"))
        row_slots, most = step.pointer(f"{self.rows_of}_slots"), args.number("most_tiles")
        with call.even_share(call.step.number(f"num_{self.rows_of}") * self.chosen * most) as item:
            pair = item // most
            tile, place = item - pair * most, args.pointer("places") + pair * 4
            number = k.load_int(row_slots + pair // self.chosen * 4, 32)
            with k.when(tile < 1):
                k.store_int(args.pointer("place_slots") + k.load_int(place, 32) * 4, number, 32)
            with k.when(number >= 0):
                slot = RecordView(SLOT, k, args.pointer("slots") + number * SLOT_BYTES)
                with k.when(tile < slot.number("a_tiles")):
                    self._multiply(call, slot, pair, place, tile)

    def _multiply(self, call: KernelCall, slot: RecordView, pair: Int, place: Ptr, tile: Int) -> None:
        """Multiply the row whose grouped number is at ``place`` by one tile of its expert's A."""
        k, args = call.k, call.args
        expert = k.load_int(args.pointer("experts") + pair * 4, 32)
        size = 2 if self.rows == "bf16" else 4
        row_bytes, out_bytes = args.number("depth") * size, TILE_COLUMNS * size
        steps = row_bytes // _ROW_STEP_BYTES
        a = slot.pointer("a") + (expert * slot.number("a_tiles") + tile) * (steps * VECTOR_BYTES)
        x, x_stride, out_stride = args.pointer("x"), args.number("x_stride"), args.number("shrunk_stride")
        out, row = args.pointer("shrunk") + tile * out_bytes, k.load_int(place, 32)
        inside = k.in_bounds(x + row * x_stride, row_bytes) & k.in_bounds(out + row * out_stride, out_bytes)
        with k.when(inside & k.in_bounds(a, steps * VECTOR_BYTES)):
            _multiply_tile(k, self.rows, 1, (x, x_stride, place, a, steps, out, out_stride))


def _multiply_tile(k: Kernel, rows: str, height: int, values: tuple[Any, ...]) -> None:
    """Call the function that multiplies ``height`` rows by a tile of A."""

    def body(inner: Kernel, *params: Any) -> None:
        _write_tile(inner, rows, height, *params)

    k.call_subroutine(f"shrink_tile_{rows}_{height}", values, body)


def _write_tile(
    k: Kernel, kind: str, height: int, x: Ptr, x_stride: Int, numbers: Ptr, a: Ptr, steps: Int, out: Ptr, out_step: Int
) -> None:
    """Emit the function that multiplies ``height`` rows by a tile of A. If there are enough registers, even and odd
    steps have separate sums, to hide the latency of additions."""
    sides = 1 if k.isa.fp32_tiles.narrow else 2
    row_numbers = [k.load_int(numbers + number * 4, 32) for number in range(height)]
    rows = [x + number * x_stride for number in row_numbers]
    sums = [[k.variable(k.vector(0.0)) for _ in range(sides)] for _ in range(height)]
    with k.range(steps, step=_STEPS_PER_ITERATION) as first:
        for number in range(_STEPS_PER_ITERATION):
            at = a + (first + number) * VECTOR_BYTES
            # Few rows are bound by loading A. It is prefetched a page ahead: hardware prefetchers stop at page ends.
            if height <= 4:
                k.prefetch(at + 4096, near=False)
            weights = _weights(k, at, kind)
            for row, totals in zip(rows, sums, strict=True):
                total = totals[number % sides]
                total.value = _sum(k, total.value, row + (first + number) * _ROW_STEP_BYTES, weights, kind)
    for row_number, totals in zip(row_numbers, sums, strict=True):
        total = totals[0].value if sides == 1 else totals[0].value + totals[1].value
        k.store_float(out + row_number * out_step, total, kind == "bf16")


@dataclass(frozen=True, slots=True)
class AdapterGemm(Gemm):
    """A :class:`Gemm` that adds B times the shrunk values to the sums of rows with an adapter, before the epilogue."""

    layout = RecordLayout(
        "adapter_gemm",
        # place_slots: slots of grouped rows.
        pointers=(*LAYOUT.pointers, "slots", "shrunk", "adapted", "place_slots"),
        numbers=(*LAYOUT.numbers, "shrunk_stride"),
        reals=LAYOUT.reals,
    )

    def expand(self, call: KernelCall) -> Expand:
        return Expand(self, call)


class Expand:
    """Emitter of the code of :class:`AdapterGemm` that adds the adapters' products to a panel's sums."""

    def __init__(self, spec: AdapterGemm, call: KernelCall) -> None:
        self._k, self._rows, self._by_head = call.k, spec.rows, spec.x_step > 0
        self._pairs = call.args.number("pairs")
        step = RecordView(ADAPTED, call.k, call.args.pointer("adapted"))
        self._slots, self._shrunk = call.args.pointer("slots"), call.args.pointer("shrunk")
        self._shrunk_stride = call.args.number("shrunk_stride")
        rows_of = spec.rows_of.removeprefix("num_")
        self._row_slots = call.args.pointer("place_slots") if spec.grouped else step.pointer(f"{rows_of}_slots")
        self._used, self._num_used = step.pointer("used_slots"), step.number("num_used_slots")

    def _slot(self, number: Int) -> RecordView:
        return RecordView(SLOT, self._k, self._slots + number * SLOT_BYTES)

    def prefetch(self, panel: Int) -> None:
        """Prefetch the tiles of B of ``panel`` of all the step's adapters, which are used once the panel's sums are
        complete."""
        k = self._k
        head, panel = self._locate(panel)
        with k.range(self._num_used) as number:
            slot = self._slot(k.load_int(self._used + number * 4, 32))
            lines = slot.number("b_steps") * 2
            tiles = self._b(slot, head) + panel * lines * VECTOR_BYTES
            with k.range(lines, step=2 * _STEPS_PER_ITERATION) as first:
                for line in range(2 * _STEPS_PER_ITERATION):
                    k.prefetch(tiles + (first + line) * VECTOR_BYTES, near=False)

    def _locate(self, panel: Int) -> tuple[Int | None, Int]:
        """Return the head of ``panel``, an index among the panels of all heads, and its index among the head's."""
        if not self._by_head:
            return None, panel
        head = panel // self._pairs
        return head, panel - head * self._pairs

    def _b(self, slot: RecordView, head: Int | None) -> Ptr:
        return slot.pointer("b") if head is None else slot.pointer("b") + head * slot.number("b_stride")

    def add_to(self, row: Int, panel: Int, totals: list[Vec]) -> list[Vec]:
        """Return the sums of both tiles of ``panel``, plus those of the adapter of ``row``, if it has one."""
        k = self._k
        slot = k.load_int(self._row_slots + row * 4, 32)
        variables = [k.variable(total) for total in totals]
        with k.when(slot >= 0):
            view = self._slot(slot)
            steps = view.number("b_steps")
            with k.when(steps > 0):
                head, panel = self._locate(panel)
                tile, shrunk = panel * 2, self._shrunk + row * self._shrunk_stride
                if head is not None:
                    size = 2 if self._rows == "bf16" else 4
                    shrunk = shrunk + head * (view.number("a_tiles") * (TILE_COLUMNS * size))
                weights = self._b(view, head) + tile * (steps * VECTOR_BYTES)
                first_ranks = view.pointer("first_ranks") + tile * 4
                halves = [
                    (total, shrunk + k.load_int(first_ranks + half * 4, 32), weights + steps * (half * VECTOR_BYTES))
                    for half, total in enumerate(variables)
                ]
                self._add(halves, steps)
        return [total.value for total in variables]

    def _add(self, halves: list[tuple[Any, Ptr, Ptr]], steps: Int) -> None:
        """Add both tiles' products side by side: each half is a sum, the row's shrunk values, and its tile of B."""
        k = self._k
        with k.range(steps, step=_STEPS_PER_ITERATION) as first:
            for number in range(_STEPS_PER_ITERATION):
                step = first + number
                for total, shrunk, tile in halves:
                    weights = _weights(k, tile + step * VECTOR_BYTES, self._rows)
                    total.value = _sum(k, total.value, shrunk + step * _ROW_STEP_BYTES, weights, self._rows)


def _weights(k: Kernel, at: Ptr, rows: str) -> Any:
    return k.load(at) if rows == "fp32" else k.load_pairs(at)


def _sum(k: Kernel, total: Vec, row: Ptr, weights: Any, rows: str) -> Vec:
    return k.fma(weights, k.broadcast(row), total) if rows == "fp32" else k.dot(total, weights, k.broadcast_pair(row))
