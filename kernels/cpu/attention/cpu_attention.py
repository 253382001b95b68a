"""Attention directly over the block-major pool: decodes, chunks over any prefix, and both in one call.

    queries    [kv_heads][rows][head_dim]    row = token * group + head in the group; heads ``head_stride`` apart
    attended   [tokens][heads][head_dim]     tokens ``out_stride`` apart; head = KV head * group + head in the group
    partials   [kv_heads][partial rows]      (A, m, l) of a row and one partition
    (:mod:`pillion.kernels.cpu.attention.attention_rows`)

Threads draw work items, each a KV head and an item of the plan. For each partition of 512 tokens the kernel computes
the scores of the item's rows, then their softmax, then the product with V; partitions are folded from left to right as
in FlashAttention-2 (Dao 2023) and its split over the context (Flash-Decoding). Partitions begin at multiples of 512 in
the sequence and masked tokens have weights of exactly 0, so a row's bits depend on its query and its context alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from pillion.kernels.cpu.attention.attention_rows import (
    HIDDEN_SCORE,
    PARTITION_GROUPS,
    SCORE_BYTES,
    SIDE_GROUPS,
    TAIL_GROUPS,
    AttentionShape,
    Groups,
    PoolLines,
    RowTile,
    Visibility,
    Weights,
    emit_fold,
    emit_result,
    emit_scores,
    emit_sink,
    emit_softcap,
    emit_weighted,
    emit_weighted_keys,
    emit_weights,
)
from pillion.kernels.cpu.attention.attention_tiles import (
    MAX_STRIPS,
    STRIP_ROWS,
    QueryTiles,
    emit_tile_weights,
    first_group,
    in_matrix_tiles,
    tiles_bytes,
)
from pillion.kernels.cpu.attention.cpu_attention_plan import ITEM_WORDS, PARTITION_TOKENS, RowCounts
from pillion.kernels.cpu.attention.latent_tiles import LatentTiles, latents_bytes
from pillion.kernels.cpu.attention.token_selection import GROUP_BYTES
from pillion.kernels.cpu.language.emit import LOG2E, VECTOR_BYTES, Int, Kernel, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES, Isa
from pillion.kernels.cpu.language.matrix_tiles import TILE_ROWS, MatrixTiles
from pillion.kernels.cpu.language.module import SCRATCH_BYTES, KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout


def row_counts(isa: Isa, group: int, bf16: bool) -> RowCounts:
    """Return the rows per item, for ``group`` query heads per KV head. ``bf16``: queries are bfloat16, not float32."""
    if in_matrix_tiles(isa, bf16):
        narrow = group if group <= STRIP_ROWS else -(-group // -(-group // STRIP_ROWS))
        return RowCounts(narrow, MAX_STRIPS * STRIP_ROWS, STRIP_ROWS)
    narrow = group if group <= isa.attention_sums else -(-group // -(-group // isa.attention_rows))
    wide = max(narrow, isa.attention_rows)
    return RowCounts(narrow, wide, wide)


class AttentionScratch:
    """Layout of a thread's scratch memory for ``rows`` rows, in bytes from its start.

    Attributes:
        places: offsets of groups in the pool, [2 * PARTITION_GROUPS + TAIL_GROUPS] int64, less than 1,024 bytes.
        queries: queries [rows][head_dim] in bfloat16 or float32, allocated for float32.
        scores: scores, then weights: [rows] of SCORE_BYTES; in matrix tiles those of one strip, between spare lines.
        sums: sums of the partitions folded so far: [rows] of sum_bytes.
        fresh: sums of the next partition to fold: [rows] of sum_bytes.
        tiles: scratch memory of the products in matrix tiles.
        end: total bytes.
    """

    def __init__(self, shape: AttentionShape, rows: int, in_tiles: bool) -> None:
        self.places, self.queries = 0, 1024
        self.scores = self.queries + rows * 4 * shape.head_dim + VECTOR_BYTES
        self.sums = (
            self.scores + (min(rows, STRIP_ROWS) if in_tiles else rows) * SCORE_BYTES + SIDE_GROUPS * VECTOR_BYTES
        )
        self.fresh = self.sums + rows * shape.sum_bytes
        self.tiles = self.fresh + rows * shape.sum_bytes
        size = latents_bytes(shape) if shape.latents else tiles_bytes(shape)
        self.end = self.tiles + (size if in_tiles else 0)


@dataclass(frozen=True, slots=True)
class QueryVectors:
    """Products of an item's ``rows`` query rows in vectors, with the rows of ``tile``. If the item has fewer rows
    than the tile, its last row is repeated, and the repetitions' results are unused.

    Attributes:
        queries: the queries [rows][head_dim], in the type that ``lines`` are multiplied with.
    """

    lines: PoolLines
    shape: AttentionShape
    rows: Int
    tile: RowTile
    queries: Ptr

    def copy_queries(self, source: Ptr) -> None:
        """Copy the queries [rows, head_dim] at ``source``, in the type of the products."""
        k, shape = self.queries.k, self.shape
        from_bytes = shape.head_dim * shape.element_bytes
        to_bytes = shape.head_dim * (2 if self.lines.bf16_rows else 4)
        with k.range(self.tile.rows) as row:
            begin = source + k.min(row, self.rows - 1) * from_bytes
            with k.range(shape.head_dim // LANES) as column:
                value = k.load_float(begin + column * (from_bytes * LANES // shape.head_dim), shape.bf16)
                to = self.queries + (row * to_bytes + column * (to_bytes * LANES // shape.head_dim))
                k.store_float(to, value, self.lines.bf16_rows)

    def emit_scores(self, groups: Groups, scores: Ptr) -> None:
        """Store the scores of all groups."""
        emit_scores(self.lines, self.shape, groups, self.queries, scores, self.tile)

    def weights(self, groups: Groups, scores: Ptr) -> Weights:
        """Return where to store a row's weights, which replace its ``scores``."""
        return Weights(self.lines, scores, self.lines.bf16_rows and not self.shape.latents)

    def emit_sums(self, groups: Groups, weights: Ptr, sums: Ptr) -> None:
        """Store the weighted sums of a partition's values."""
        if self.shape.latents:
            max_sums = self.queries.k.isa.attention_sums
            emit_weighted_keys(self.shape, groups, weights, sums, self.tile.rows, max_sums)
        else:
            emit_weighted(self.lines, self.shape, groups, weights, sums, self.tile)


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window of ``tokens`` tokens, or with ``chunked`` the tokens since the last multiple of ``tokens``."""

    tokens: Int
    chunked: bool

    @staticmethod
    def of(spec: Attention | AttentionMerge, call: KernelCall) -> Window | None:
        """Return the window of a kernel's layer, or None."""
        return Window(call.args.number("window"), spec.chunked) if spec.window else None

    def first(self, end: Int) -> Int:
        """Return the first token visible to the query of token ``end`` - 1; may be negative."""
        return (end - 1) // self.tokens * self.tokens if self.chunked else end - self.tokens


@dataclass(frozen=True, slots=True)
class AttentionItem:
    """An item or a merge in a kernel's code. Its fields are the words of
    :mod:`pillion.kernels.cpu.attention.cpu_attention_plan`, in their order."""

    sequence: Int
    row: Int
    rows: Int
    shift: Int
    first: Int
    last: Int
    partial: Int

    @staticmethod
    def read(k: Kernel, item: Ptr) -> AttentionItem:
        return AttentionItem(*(k.load_int(item + 4 * word, 32) for word in range(len(fields(AttentionItem)))))

    def visible_end(self, group: int, row: Int) -> Int:
        """Return the number of tokens up to a row's own one. ``group``: query heads per KV head."""
        return (self.row + row) // group + self.shift + 1

    def begin(self, k: Kernel, group: int, window: Window | None) -> Int:
        """Return the first partition that has a token visible to any of the rows."""
        if window is None:
            return self.first
        lowest = k.max(window.first(self.visible_end(group, k.int(0))), 0)
        return k.max(self.first, lowest // PARTITION_TOKENS)


def step_field(name: str, plan: int) -> str:
    """Return the name of a plan's field in the step's record, for plan 0 or 1."""
    return f"{name}_2" if plan else name


@contextmanager
def each_attention_item(call: KernelCall, kind: str, plan: int) -> Iterator[tuple[Int, AttentionItem]]:
    """Append a loop over what a thread draws of the step's ``kind``, "items" or "merges"; yield a KV head and an item.

    All items of a KV head come before those of the next head, so that chunks of a prompt find its keys in the cache.
    """
    count, records = call.step.number(step_field(f"num_{kind}", plan)), call.step.pointer(step_field(kind, plan))
    with call.shared_range(count * call.args.number("kv_heads"), 1) as (index, _):
        yield index // count, AttentionItem.read(call.k, records + (index % count) * (4 * ITEM_WORDS))


@dataclass(frozen=True, slots=True)
class Attention(KernelSpec):
    """Attention of all items of the step.

    ``softcap`` and ``window``: whether the layer has one; if not, the field of the record is unused. ``sinks``: whether
    it has a score per head, float32 [heads], that counts in a row's softmax and has no value. ``chunked`` is that of
    :class:`Window`. ``plan``: the step's plan for this layer's number of KV heads. ``sparse``: a row attends only to
    the tokens of its ``selected`` bits (:mod:`pillion.kernels.cpu.attention.token_selection`).

    The scale must be positive, and the items those of
    :class:`pillion.kernels.cpu.attention.cpu_attention_plan.CpuAttentionPlanner`.
    """

    layout = RecordLayout(
        "attention",
        pointers=("queries", "out", "partials", "sinks", "selected"),
        # kv_heads and window are counts; the others are bytes: strides of the queries of a KV head, the results of a
        # token and the partials of a KV head, layer_offset from a slot to the layer's K, value_offset from K to V.
        numbers=(
            "head_stride", "out_stride", "partial_stride", "layer_offset", "slot_bytes", "piece_bytes", "value_offset",
            "kv_heads", "window", "selected_stride",
        ),
        reals=("scale", "softcap"),
    )  # fmt: skip

    shape: AttentionShape
    softcap: bool = False
    window: bool = False
    sinks: bool = False
    chunked: bool = False
    plan: int = 0
    sparse: bool = False

    def emit(self, call: KernelCall) -> None:
        k, shape = call.k, self.shape
        narrow, wide, _ = row_counts(k.isa, shape.group, shape.bf16)
        tiles = MatrixTiles.of(k) if in_matrix_tiles(k.isa, shape.bf16) else None
        counts = sorted({narrow, wide}) if tiles is None else [TILE_ROWS, wide]
        with each_attention_item(call, "items", self.plan) as (head, item):
            for lower, max_rows in zip((0, *counts), counts, strict=False):
                with k.when((item.rows > lower) & (item.rows <= max_rows)):
                    if tiles is None:
                        _VectorPass(self, call, item, head, max_rows).emit()
                    else:
                        _TilePass(self, call, item, head, max_rows, tiles).emit()
            if tiles is not None:
                tiles.release()


class _ItemPass:
    """Emitter of the attention of one item of at most ``max_rows`` rows."""

    def __init__(self, spec: Attention, call: KernelCall, item: AttentionItem, head: Int, max_rows: int) -> None:
        self._spec, self._shape, self._call, self._k = spec, spec.shape, call, call.k
        self._item, self._head = item, head
        self._scratch = AttentionScratch(spec.shape, max_rows, in_matrix_tiles(call.k.isa, spec.shape.bf16))
        assert self._scratch.end <= SCRATCH_BYTES
        self._window = Window.of(spec, call)

    def emit(self) -> None:
        k, item, shape, scratch = self._k, self._item, self._shape, self._scratch
        args = self._call.args
        queries = args.pointer("queries") + self._head * args.number("head_stride")
        self._copy_queries(queries + item.row * (shape.head_dim * shape.element_bytes))
        begin = item.begin(k, shape.group, self._window)
        is_cut = item.partial >= 0
        sums, fresh = (self._call.scratch + offset for offset in (scratch.sums, scratch.fresh))
        with k.range(item.last, begin) as partition:
            # The first partition's sums need no folding; those of a cut item are folded by the merge.
            to_fold = k.select(is_cut | partition.equals(begin), k.int(0), k.int(scratch.fresh - scratch.sums))
            self._emit_partition(partition, sums + to_fold)
            with k.when(to_fold > 0), k.range(item.rows) as row:
                emit_fold(shape, sums + row * shape.sum_bytes, fresh + row * shape.sum_bytes)
            with k.when(is_cut):
                index = item.partial + (partition - item.first) * item.rows
                partials = args.pointer("partials") + self._head * args.number("partial_stride")
                k.copy(sums, partials + index * shape.sum_bytes, item.rows * shape.sum_bytes)
        with k.when(item.partial < 0), k.range(item.rows) as row:
            _emit_result(self._call, shape, self._head, item.row + row, sums + row * shape.sum_bytes, self._spec.sinks)

    def _copy_queries(self, source: Ptr) -> None:
        """Copy the item's queries to the scratch memory."""
        raise NotImplementedError

    def _emit_partition(self, partition: Int, sums: Ptr) -> None:
        """Store the sums (A, m, l) of a partition."""
        raise NotImplementedError

    def _range(self, partition: Int) -> GroupRange:
        """Return the groups of a partition that are visible to any row."""
        k, item, group = self._k, self._item, self._shape.group
        begin = partition * PARTITION_GROUPS
        if self._window is not None:
            lowest = k.max(self._window.first(item.visible_end(group, k.int(0))), 0)
            begin = k.max(begin, lowest // LANES)
        last = (item.visible_end(group, item.rows - 1) + (LANES - 1)) // LANES
        return GroupRange(begin, k.min((partition + 1) * PARTITION_GROUPS, last), last)

    def _groups(self, group_range: GroupRange) -> Groups:
        return emit_groups(self._call, self._shape, self._item.sequence, self._head, group_range, self._scratch.places)

    def _visibility(self, row: Int) -> Visibility:
        end = self._item.visible_end(self._shape.group, row)
        return Visibility(None if self._window is None else self._window.first(end), end)

    def _prepare_scores(self, groups: Groups, row: Int, scores: Ptr) -> Vec | None:
        """Apply token selection and soft cap to a row's scores; return the factor still to apply, or None after a
        cap."""
        args = self._call.args
        if self._spec.sparse:
            self._hide_unselected(groups, row, scores)
        if self._spec.softcap:
            emit_softcap(scores, groups.count, args.real("scale"), args.real("softcap"))
            return None
        return args.real("scale") * LOG2E

    def _hide_unselected(self, groups: Groups, row: Int, scores: Ptr) -> None:
        k, args = self._k, self._call.args
        token = (self._item.row + row) // self._shape.group
        bits = args.pointer("selected") + token * args.number("selected_stride") + groups.first // LANES * GROUP_BYTES
        with k.range(groups.count) as index:
            at, selected = scores + index * VECTOR_BYTES, k.lanes(k.load_int(bits + index * GROUP_BYTES, 16))
            k.store(at, k.select(selected, k.load(at), k.vector(HIDDEN_SCORE)))


class _VectorPass(_ItemPass):
    """The attention of an item in vectors."""

    def __init__(self, spec: Attention, call: KernelCall, item: AttentionItem, head: Int, max_rows: int) -> None:
        super().__init__(spec, call, item, head, max_rows)
        queries, tile = call.scratch + self._scratch.queries, row_tile(call.k.isa, spec.shape, max_rows)
        self._products = QueryVectors(PoolLines(call.k, spec.shape), spec.shape, item.rows, tile, queries)

    def _copy_queries(self, source: Ptr) -> None:
        self._products.copy_queries(source)

    def _emit_partition(self, partition: Int, sums: Ptr) -> None:
        k, shape, products = self._k, self._shape, self._products
        groups = self._groups(self._range(partition))
        scores = self._call.scratch + self._scratch.scores
        products.emit_scores(groups, scores)
        with k.range(self._item.rows) as row:
            row_scores = scores + row * SCORE_BYTES
            factor = self._prepare_scores(groups, row, row_scores)
            maximum = sums + (row * shape.sum_bytes + 4 * shape.value_dim)
            weights = products.weights(groups, row_scores)
            emit_weights(groups, self._visibility(row), row_scores, factor, maximum, weights)
        products.emit_sums(groups, scores, sums)


class _TilePass(_ItemPass):
    """The attention of an item in matrix tiles: one strip of up to 16 rows, or several strips of 32."""

    def __init__(
        self, spec: Attention, call: KernelCall, item: AttentionItem, head: Int, max_rows: int, tiles: MatrixTiles
    ) -> None:
        super().__init__(spec, call, item, head, max_rows)
        self._height = 1 if max_rows == TILE_ROWS else 2
        rows = item.rows if self._height == 1 else call.k.int(STRIP_ROWS)
        queries, scratch = (call.scratch + offset for offset in (self._scratch.queries, self._scratch.tiles))
        products = LatentTiles if spec.shape.latents else QueryTiles
        self._products = products(tiles, spec.shape, rows, self._height, queries, scratch)

    def _copy_queries(self, source: Ptr) -> None:
        self._products.copy_queries(source, self._item.rows)

    def _emit_partition(self, partition: Int, sums: Ptr) -> None:
        k, item, products, stride = self._k, self._item, self._products, self._shape.sum_bytes
        groups = self._groups(self._range(partition))
        scores = self._call.scratch + self._scratch.scores
        products.copy_values(groups)
        with k.range(item.rows, step=STRIP_ROWS) as row:
            visible = self._visible_groups(groups, row)
            products.emit_scores(visible, row // STRIP_ROWS, scores)
            self._emit_weights(visible, row, scores, sums)
            products.emit_sums(visible, scores, sums + row * stride)

    def _visible_groups(self, groups: Groups, row: Int) -> Groups:
        """Return the groups visible to any row of the strip that begins with ``row``; one group if none is."""
        if self._height == 1:
            return groups
        k, item, group = self._k, self._item, self._shape.group
        tokens = item.visible_end(group, k.min(row + STRIP_ROWS, item.rows) - 1) - groups.first
        end = k.max(k.min((tokens + (LANES - 1)) // LANES, groups.count), 1)
        if self._window is None:
            return groups.part(k.int(0), end)
        begin = k.max(self._window.first(item.visible_end(group, row)) - groups.first, 0) // LANES
        return groups.part(k.min(begin, end - 1), end)

    def _emit_weights(self, groups: Groups, first_row: Int, scores: Ptr, sums: Ptr) -> None:
        """Replace the scores of a strip by weights."""
        k, shape = self._k, self._shape
        with k.range(k.min(self._item.rows - first_row, STRIP_ROWS)) as index:
            row, row_scores = first_row + index, scores + index * SCORE_BYTES
            listed = row_scores + first_group(groups) * VECTOR_BYTES
            self._products.scale_scores(groups, listed)
            factor = self._prepare_scores(groups, row, listed)
            maximum = sums + (row * shape.sum_bytes + 4 * shape.value_dim)
            emit_tile_weights(shape, groups, self._visibility(row), row_scores, factor, maximum)


@dataclass(frozen=True, slots=True)
class AttentionMerge(KernelSpec):
    """Merge of the partial results of query rows whose context was divided over several work items."""

    layout = RecordLayout(
        "attention_merge",
        pointers=("out", "partials", "sinks"),
        numbers=("out_stride", "partial_stride", "kv_heads", "window"),
    )

    shape: AttentionShape
    window: bool = False
    sinks: bool = False
    chunked: bool = False
    plan: int = 0

    def emit(self, call: KernelCall) -> None:
        k, shape = call.k, self.shape
        window = Window.of(self, call)
        with each_attention_item(call, "merges", self.plan) as (head, item):
            partials = call.args.pointer("partials") + head * call.args.number("partial_stride")
            begin = item.begin(k, shape.group, window)
            with k.range(item.rows) as row:

                def partial(partition: Int, row: Int = row, item: AttentionItem = item, base: Ptr = partials) -> Ptr:
                    index = item.partial + (partition - item.first) * item.rows + row
                    return base + index * shape.sum_bytes

                k.copy(partial(begin), call.scratch, shape.sum_bytes)
                with k.range(item.last, begin + 1) as partition:
                    emit_fold(shape, call.scratch, partial(partition))
                _emit_result(call, shape, head, item.row + row, call.scratch, self.sinks)


@dataclass(frozen=True, slots=True)
class GroupRange:
    """The groups of 16 tokens of a partition that a work item attends to, begin .. end - 1. Groups up to ``last`` - 1
    are visible to it."""

    begin: Int
    end: Int
    last: Int


def emit_groups(
    call: KernelCall, shape: AttentionShape, sequence: Int, head: Int, group_range: GroupRange, places_at: int
) -> Groups:
    """Write the groups' offsets in the pool into the scratch, at ``places_at``, in the order in which they are read and
    prefetched."""
    k, args = call.k, call.args
    places = call.scratch + places_at
    table = call.step.pointer("block_tables") + sequence * call.step.number("table_stride") * 4
    per_block = shape.block_size // LANES
    slot_bytes, value_offset = args.number("slot_bytes"), args.number("value_offset")
    count = group_range.end - group_range.begin

    def place(group: Int) -> Int:
        slot = k.load_int(table + (group // per_block) * 4, 32)
        return slot * slot_bytes + (group % per_block) * shape.group_bytes

    with k.range(count) as index:
        key = place(group_range.begin + index)
        k.store_int(places + index * 8, key)
        k.store_int(places + (count + index) * 8, key + value_offset)
    with k.range(TAIL_GROUPS) as index:
        k.store_int(places + (count * 2 + index) * 8, place(k.min(group_range.end + index, group_range.last - 1)))
    pool = call.step.pointer("pool") + (args.number("layer_offset") + head * args.number("piece_bytes"))
    return Groups(pool, places, group_range.begin * LANES, count, count)


def row_tile(isa: Isa, shape: AttentionShape, rows: int) -> RowTile:
    """Return the tile of ``rows`` rows, with as many sums as fit into the registers, to hide the latency of
    products."""
    # Lines of codes that are widened to float32 need registers, so that at most 16 sums fit.
    sums = min(isa.attention_sums, 16) if shape.codes else isa.attention_sums
    max_columns = max(1, sums // rows)
    side = 1 << (min(isa.decode_groups, SIDE_GROUPS, max_columns).bit_length() - 1)
    width = shape.head_dim // LANES
    columns = max(count for count in range(1, width + 1) if width % count == 0 and count <= max_columns)
    return RowTile(rows, side, columns, in_turns=rows <= row_counts(isa, shape.group, shape.bf16)[0])


def _emit_result(call: KernelCall, shape: AttentionShape, head: Int, row: Int, sums: Ptr, sinks: bool) -> None:
    """Store the result of a row whose folded sums are ``sums``; ``sinks``: first fold its head's sink."""
    if in_matrix_tiles(call.k.isa, shape.bf16):
        total = sums + (4 * shape.value_dim + VECTOR_BYTES)
        call.k.store(total, call.k.sum(call.k.load(total)))
    token = row // shape.group
    place = head * shape.group + row % shape.group
    if sinks:
        emit_sink(shape, sums, call.k.broadcast(call.args.pointer("sinks") + place * 4))
    out = call.args.pointer("out") + token * call.args.number("out_stride")
    # Without matrix tiles, rows of latents are widened to float32 on every processor.
    lines = PoolLines(call.k, shape, wide=shape.latents > 0)
    factor = 1.0 if in_matrix_tiles(call.k.isa, shape.bf16) else lines.factor
    emit_result(shape, sums, out + place * (shape.value_dim * shape.element_bytes), factor)
