"""Paged attention straight over the block-major pool: decode, chunks over any prefix, and both in one call.

    queries    [kv_heads][rows][head_dim]    row = token * group + head in the group; heads ``head_stride`` apart
    attended   [tokens][heads][head_dim]     tokens ``out_stride`` apart; head = KV head * group + head in the group
    partials   [kv_heads][partial rows]      (A, m, l) of a row and one partition
    (:mod:`pillion.kernels.cpu.attention.attention_rows`)

A unit of work is an item of the plan and a KV head. For each partition of 512 tokens its rows' scores are computed,
then their softmax, then the product with V; partitions are folded from left to right as in FlashAttention-2 (Dao 2023)
and its split over the context (Flash-Decoding). Partitions begin at multiples of 512 in the sequence and hidden tokens
weigh exactly 0, so a row's bits depend on its query and its context alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pillion.kernels.cpu.attention.attention_rows import (
    AHEAD_GROUPS,
    LOG2E,
    PARTITION_GROUPS,
    SCORE_BYTES,
    TAIL_GROUPS,
    Groups,
    Lines,
    Shape,
    Visibility,
    emit_copy,
    emit_fold,
    emit_result,
    emit_scores,
    emit_softcap,
    emit_weighted,
    emit_weights,
)
from pillion.kernels.cpu.attention.cpu_attention_plan import (
    FIRST,
    ITEM_WORDS,
    LAST,
    PARTIAL,
    PARTITION_TOKENS,
    ROW,
    ROWS,
    SEQUENCE,
    SHIFT,
)
from pillion.kernels.cpu.attention.kv_layout import unpack_pool
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Kernel
from pillion.kernels.cpu.language.isa import LANES, Isa
from pillion.kernels.cpu.language.module import SCRATCH_BYTES, Call
from pillion.kernels.cpu.language.records import Layout
from pillion.kernels.cpu.language.values import Int, Ptr
from pillion.kernels.torch.reference import RaggedBatch, paged_attention

ATTENTION = Layout(
    "attention",
    pointers=("queries", "out", "partials"),
    # In bytes, but for the counts kv_heads and window: head_stride of queries, out_stride of a token's results,
    # partial_stride of a KV head's partials, layer_offset from a slot to the layer's K, value_offset from K to V.
    numbers=(
        "head_stride", "out_stride", "partial_stride", "layer_offset", "slot_bytes", "piece_bytes", "value_offset",
        "kv_heads", "window",
    ),
    reals=("scale", "softcap"),
)  # fmt: skip
MERGE = Layout(
    "attention_merge",
    pointers=("out", "partials"),
    numbers=("out_stride", "partial_stride", "kv_heads", "window"),
)


def row_counts(isa: Isa, group: int) -> tuple[int, int]:
    """Most rows of an item, for one token and for several."""
    narrow = group if group <= isa.attention_sums else -(-group // -(-group // isa.attention_rows))
    return narrow, max(narrow, isa.attention_rows)


def partial_row_bytes(head_dim: int) -> int:
    """Of a row of the partials."""
    return Shape(head_dim, 1, LANES, False).sum_bytes


def reference_attention(
    queries: torch.Tensor,
    packed_pool: torch.Tensor,
    layer: int,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """What the kernels compute. queries [kv_heads, T, group, head_dim] -> attended [T, heads * head_dim]."""
    rows = queries.transpose(0, 1).flatten(1, 2)
    pool = unpack_pool(packed_pool)
    return paged_attention(rows, pool, layer, batch, scale=scale, window=window, softcap=softcap).flatten(1)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where a thread keeps what, in bytes from the start of its scratch, for ``rows`` rows."""

    shape: Shape
    rows: int

    @property
    def places(self) -> int:
        """Of groups, [2 * PARTITION_GROUPS + TAIL_GROUPS] int64 and less than 1,024 bytes."""
        return 0

    @property
    def queries(self) -> int:
        """[rows][head_dim], in bfloat16 or float32; float32 is the longer one."""
        return 1024

    @property
    def scores(self) -> int:
        """[rows] of SCORE_BYTES."""
        return self.queries + self.rows * 4 * self.shape.head_dim

    @property
    def sums(self) -> int:
        """[rows] of sum_bytes: what was folded so far."""
        return self.scores + self.rows * SCORE_BYTES + VECTOR_BYTES

    @property
    def fresh(self) -> int:
        """[rows] of sum_bytes: of a partition that is to be folded."""
        return self.sums + self.rows * self.shape.sum_bytes

    @property
    def end(self) -> int:
        """Of everything."""
        return self.fresh + self.rows * self.shape.sum_bytes


@dataclass(frozen=True, slots=True)
class Unit:
    """An item, seen by a kernel: the words of :mod:`pillion.kernels.cpu.attention.cpu_attention_plan`."""

    sequence: Int
    row: Int
    rows: Int
    shift: Int
    first: Int
    last: Int
    partial: Int

    @staticmethod
    def read(k: Kernel, item: Ptr) -> Unit:
        """From the step's record."""
        places = (SEQUENCE, ROW, ROWS, SHIFT, FIRST, LAST, PARTIAL)
        return Unit(*(k.load_int(item + 4 * place, 32) for place in places))

    def behind(self, group: int, row: Int) -> Int:
        """The first position that a row no longer sees."""
        return (self.row + row) // group + self.shift + 1

    def begin(self, k: Kernel, group: int, window: Int | None) -> Int:
        """The first partition of which any row sees something."""
        if window is None:
            return self.first
        lowest = k.most(self.behind(group, k.int(0)) - window, 0)
        return k.most(self.first, lowest // PARTITION_TOKENS)


@contextmanager
def each_unit(call: Call, kind: str) -> Iterator[tuple[Int, Unit]]:
    """KV head and unit of all that a thread takes of the step's ``kind``, "items" or "merges".

    All of a KV head come before those of the next: chunks find its keys in the cache.
    """
    count, records = call.step.number(f"num_{kind}"), call.step.pointer(kind)
    with call.shared_range(count * call.args.number("kv_heads"), 1) as (index, _):
        yield index // count, Unit.read(call.k, records + (index % count) * (4 * ITEM_WORDS))


@dataclass(frozen=True, slots=True)
class Attention:
    """Attends all items of the step. ``softcap`` and ``window``: whether the layer has one; else the field is unused.

    The scale is positive. Takes nothing but what
    :class:`pillion.kernels.cpu.attention.cpu_attention_plan.AttentionPlanner` planned.
    """

    shape: Shape
    softcap: bool = False
    window: bool = False

    @property
    def name(self) -> str:
        """Names every parameter."""
        return f"attention_{self.shape.name}{'_softcap' * self.softcap}{'_window' * self.window}"

    @property
    def layout(self) -> Layout:
        """Of its record."""
        return ATTENTION

    def emit(self, call: Call) -> None:
        """Writes its instructions."""
        k = call.k
        narrow, wide = row_counts(k.isa, self.shape.group)
        with each_unit(call, "items") as (head, unit):
            with k.when(unit.rows <= narrow):
                _UnitPass(self, call, unit, head, narrow).emit()
            if narrow != wide:
                with k.when(unit.rows > narrow):
                    _UnitPass(self, call, unit, head, wide).emit()


class _UnitPass:
    """Emits one unit with ``rows`` rows: where it has fewer, the last one is computed again, and not stored."""

    def __init__(self, spec: Attention, call: Call, unit: Unit, head: Int, rows: int) -> None:
        self._spec, self._shape, self._call, self._k = spec, spec.shape, call, call.k
        self._unit, self._head, self._row_count = unit, head, rows
        self._lines = Lines(call.k, spec.shape.bf16)
        self._scratch = Scratch(spec.shape, rows)
        assert self._scratch.end <= SCRATCH_BYTES
        self._window = call.args.number("window") if spec.window else None

    def emit(self) -> None:
        k, unit, shape, scratch = self._k, self._unit, self._shape, self._scratch
        self._emit_queries()
        begin = unit.begin(k, shape.group, self._window)
        is_cut = unit.partial >= 0
        sums, fresh = (self._call.scratch + place for place in (scratch.sums, scratch.fresh))
        with k.range(unit.last, begin) as partition:
            # The first partition's sums need no fold, and those of an item that was cut are folded by the merge.
            apart = k.select(is_cut | partition.equals(begin), k.int(0), k.int(scratch.fresh - scratch.sums))
            self._emit_partition(partition, sums + apart)
            with k.when(apart > 0), k.range(unit.rows) as row:
                emit_fold(shape, sums + row * shape.sum_bytes, fresh + row * shape.sum_bytes)
            with k.when(is_cut):
                place = unit.partial + (partition - unit.first) * unit.rows
                partials = self._call.args.pointer("partials") + self._head * self._call.args.number("partial_stride")
                emit_copy(sums, partials + place * shape.sum_bytes, unit.rows * shape.sum_bytes)
        with k.when(unit.partial < 0), k.range(unit.rows) as row:
            out = _result(self._call, shape, self._head, unit.row + row)
            emit_result(shape, sums + row * shape.sum_bytes, out)

    def _emit_queries(self) -> None:
        """Rows into the scratch, in the type that lines are multiplied with."""
        k, shape, unit = self._k, self._shape, self._unit
        args = self._call.args
        queries = args.pointer("queries") + self._head * args.number("head_stride")
        from_bytes = shape.head_dim * shape.element_bytes
        to_bytes = shape.head_dim * (2 if self._lines.bf16_rows else 4)
        target = self._call.scratch + self._scratch.queries
        with k.range(self._row_count) as row:
            source = queries + (unit.row + k.least(row, unit.rows - 1)) * from_bytes
            with k.range(shape.head_dim // LANES) as column:
                value = k.load_float(source + column * (from_bytes * LANES // shape.head_dim), shape.bf16)
                to = target + (row * to_bytes + column * (to_bytes * LANES // shape.head_dim))
                k.store_float(to, value, self._lines.bf16_rows)

    def _emit_partition(self, partition: Int, sums: Ptr) -> None:
        k, shape, unit, scratch, lines = self._k, self._shape, self._unit, self._scratch, self._lines
        begin = partition * PARTITION_GROUPS
        if self._window is not None:
            lowest = k.most(unit.behind(shape.group, k.int(0)) - self._window, 0)
            begin = k.most(begin, lowest // LANES)
        behind = unit.behind(shape.group, unit.rows - 1)
        last = (behind + (LANES - 1)) // LANES
        end = k.least((partition + 1) * PARTITION_GROUPS, last)
        side = side_by_side(k.isa, self._row_count)
        span = Span(begin, end, last)
        groups = emit_groups(self._call, shape, unit.sequence, self._head, span, scratch.places)
        scores = self._call.scratch + scratch.scores
        queries = self._call.scratch + scratch.queries
        emit_scores(lines, shape, groups, queries, scores, self._row_count, side)
        with k.range(unit.rows) as row:
            row_behind = unit.behind(shape.group, row)
            first = None if self._window is None else row_behind - self._window
            row_scores = scores + row * SCORE_BYTES
            factor = self._call.args.real("scale") * LOG2E
            if self._spec.softcap:
                emit_softcap(row_scores, groups.count, self._call.args.real("scale"), self._call.args.real("softcap"))
            maximum = sums + (row * shape.sum_bytes + 4 * shape.head_dim)
            seen = Visibility(first, row_behind)
            scaled = None if self._spec.softcap else factor
            emit_weights(lines, groups, seen, row_scores, scaled, maximum, maximum + VECTOR_BYTES)
        emit_weighted(lines, shape, groups, scores, sums, self._row_count, columns(k.isa, shape, self._row_count))


@dataclass(frozen=True, slots=True)
class AttentionMerge:
    """Folds the partials of the rows that were cut, and stores their results."""

    shape: Shape
    window: bool = False

    @property
    def name(self) -> str:
        """Names every parameter."""
        return f"attention_merge_{self.shape.name}{'_window' * self.window}"

    @property
    def layout(self) -> Layout:
        """Of its record."""
        return MERGE

    def emit(self, call: Call) -> None:
        """Writes its instructions."""
        k, shape = call.k, self.shape
        window = call.args.number("window") if self.window else None
        with each_unit(call, "merges") as (head, unit):
            partials = call.args.pointer("partials") + head * call.args.number("partial_stride")
            begin = unit.begin(k, shape.group, window)
            with k.range(unit.rows) as row:

                def partial(partition: Int, row: Int = row, unit: Unit = unit, base: Ptr = partials) -> Ptr:
                    place = unit.partial + (partition - unit.first) * unit.rows + row
                    return base + place * shape.sum_bytes

                emit_copy(partial(begin), call.scratch, shape.sum_bytes)
                with k.range(unit.last, begin + 1) as partition:
                    emit_fold(shape, call.scratch, partial(partition))
                emit_result(shape, call.scratch, _result(call, shape, head, unit.row + row))


@dataclass(frozen=True, slots=True)
class Span:
    """The groups begin .. end - 1 of a sequence; none from ``last`` on may be looked up."""

    begin: Int
    end: Int
    last: Int


def emit_groups(call: Call, shape: Shape, sequence: Int, head: Int, span: Span, places_at: int) -> Groups:
    """Looks up where groups are. What stands further on in the list is read later, so it is what to ask for ahead."""
    k, args = call.k, call.args
    places = call.scratch + places_at
    table = call.step.pointer("block_tables") + sequence * call.step.number("table_stride") * 4
    per_block = shape.block_size // LANES
    slot_bytes, value_offset = args.number("slot_bytes"), args.number("value_offset")
    count = span.end - span.begin

    def place(group: Int) -> Int:
        slot = k.load_int(table + (group // per_block) * 4, 32)
        return slot * slot_bytes + (group % per_block) * shape.group_bytes

    with k.range(count) as index:
        key = place(span.begin + index)
        k.store_int(places + index * 8, key)
        k.store_int(places + (count + index) * 8, key + value_offset)
    with k.range(TAIL_GROUPS) as index:
        k.store_int(places + (count * 2 + index) * 8, place(k.least(span.end + index, span.last - 1)))
    pool = call.step.pointer("pool") + (args.number("layer_offset") + head * args.number("piece_bytes"))
    return Groups(pool, places, span.begin * LANES, count)


def side_by_side(isa: Isa, rows: int) -> int:
    """Groups whose scores are computed at a time: enough sums in flight to hide the latency of a product."""
    most = min(isa.decode_blocks, AHEAD_GROUPS, max(1, isa.attention_sums // rows))
    return 1 << (most.bit_length() - 1)


def columns(isa: Isa, shape: Shape, rows: int) -> int:
    """Vectors of V's columns whose sums are kept at a time: a divisor of a head's vectors."""
    width = shape.head_dim // LANES
    most = max(1, isa.attention_sums // rows)
    return max(count for count in range(1, width + 1) if width % count == 0 and count <= most)


def _result(call: Call, shape: Shape, head: Int, row: Int) -> Ptr:
    """Where a row's result goes."""
    token = row // shape.group
    place = head * shape.group + row % shape.group
    return (
        call.args.pointer("out")
        + token * call.args.number("out_stride")
        + place * (shape.head_dim * shape.element_bytes)
    )
