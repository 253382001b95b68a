"""The work of each program of the paged attention, planned once per step, on the host, for all layers.

A query row is one head's query of one token. The rows of a KV head are numbered token * group + head in the group, so
the rows of a sequence are consecutive and share its keys and values. A *unit* is a tile of such rows, a KV head, and
the key tiles visible to the rows. All units in order are divided evenly among a fixed number of programs, wherever the
cuts fall (stream-K: Osama et al. 2023; for attention, LeanAttention: Sanovar et al. 2024). A program's part of a unit
is an *item*. A cut unit has partial results, and a *merge* describes how to join them.

The decode kernel runs sequences of a few rows, and the chunk kernel all others. Each kernel has separate units and
programs, so a chunk in the batch changes nothing for decodes.

Record, int32, one vector per step; all offsets in it are in words from its beginning:

    for each window: starts[decode programs + 1] | starts[chunk programs + 1] | counts of merges   (the fixed head)
    block tables, sequence after sequence
    for each window, for decodes and then for chunks: items | merges | owners

The owners are the offsets of the merges of the partial results, in their order.

Only the words in use are copied to the device. Grids and buffers depend on the limits alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pillion.errors import Internal
from pillion.kernels.step import Int32, StepBatch

Int64 = npt.NDArray[np.int64]

# Words of an item by index. TABLE is the offset of its block table in the record; ROW .. ROW + ROWS - 1 are its rows; a
# token's position is its index in the batch + SHIFT; BEGIN .. END - 1 are the keys, with BEGIN a multiple of the key
# tile; PARTIAL is the first of its rows in the partial results, or -1 for an item that is a whole unit.
TABLE, ROW, ROWS, SHIFT, HEAD, BEGIN, END, PARTIAL = range(8)
# Of a merge, which has ROW, ROWS, HEAD and PARTIAL at the same indices: the number of partial results that it adds up,
# whose rows are consecutive.
PARTS = 5
ITEM_WORDS = 8

# Last words of a window's record: the number of decode merges and their offset in the record, and the same for chunk
# merges.
COUNT_WORDS = 4
# For units cut into parts of a fixed number of keys (Tiling.part_keys): parts whose results are allocated per program,
# and the fraction of a program's share above which a unit may be cut.
PARTS_A_PROGRAM, PIECES_A_PROGRAM = 8, 4


@dataclass(frozen=True, slots=True)
class Tiling:
    """The sizes by which one kernel's work is divided.

    Attributes:
        rows: rows of a row tile.
        keys: keys of a key tile.
        programs: number of programs that share the work.
        unit_tiles: overhead of a unit (queries, results, an empty pipeline), in key tiles.
        part_keys: units are cut at multiples of this many keys, a multiple of ``keys``, and nowhere else
            (:mod:`pillion.kernels.gpu.attention.parted_attention`); 0: at any key tile.
    """

    rows: int
    keys: int
    programs: int
    unit_tiles: int = 1
    part_keys: int = 0

    @property
    def max_partials(self) -> int:
        """Max items of cut units: there are at most programs - 1 cuts, and c cuts make c + 1 <= 2c items of a unit.
        Units in parts are cut only while results can be allocated."""
        return PARTS_A_PROGRAM * self.programs if self.part_keys else 2 * (self.programs - 1)

    @property
    def max_merges(self) -> int:
        """Max units that are cut, each of which needs a merge."""
        return self.max_partials // 2

    @property
    def own_rows(self) -> int:
        """Rows of results of programs for units in parts that they do not cut."""
        return self.programs * self.rows if self.part_keys else 0

    def max_items(self, units: int) -> int:
        """Return the max items of ``units`` units."""
        return units + self.max_partials // (1 if self.part_keys else 2)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Some sequences of a step: first token in the batch, number of tokens, context, and offset of the block table."""

    begins: Int64
    counts: Int64
    contexts: Int64
    tables: Int64


@dataclass(frozen=True, slots=True)
class GpuAttentionPlan:
    """The words in use of a step's record, and whether the chunk kernel has work."""

    record: Int32
    with_chunks: bool


def _changes(values: Int64) -> npt.NDArray[np.bool_]:
    """Return the mask of sorted values that differ from their predecessor."""
    changes = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes


@dataclass(frozen=True, slots=True)
class _Units:
    """Units in order, each with its row tile, its head and its number of key tiles.

    Row tiles have rows [R, ITEM_WORDS], an item with all visible keys of the rows, and lows, the index of the first key
    tile.
    """

    row_tiles: Int64
    heads: Int64
    tiles: Int64
    rows: Int32
    lows: Int64


def _owners(merges: Int32, at: int) -> Int32:
    """Return the offset of each partial result's merge, padded with zeros to a multiple of an item's words. ``merges``
    begin at offset ``at``."""
    owners = at + np.arange(len(merges)).repeat(merges[:, PARTS]) * ITEM_WORDS
    return np.pad(owners, (0, -len(owners) % ITEM_WORDS)).astype(np.int32)


def _by_head(counts: Int64, firsts: Int64, which: Int64, kv_heads: int) -> tuple[Int64, Int64]:
    """Return heads and row tiles of the units: sequence by sequence, head by head, row tile by row tile."""
    if len(which) == len(counts):
        return np.tile(np.arange(kv_heads), len(counts)), which.repeat(kv_heads)
    owners = which.repeat(kv_heads)
    inside = np.arange(len(owners)) - firsts[owners] * kv_heads
    heads = inside // counts[owners]
    return heads, firsts[owners] + inside - heads * counts[owners]


def _whole_first(items: Int32, first: Int64, starts: Int64) -> Int32:
    """Move the rest of a unit that another program began to the end of each program's items.

    All programs then begin with the first key tile of some unit, so that those with rows of the same sequence and head
    read the same keys at about the same time, from L2.
    """
    begins, ends = starts[:-1], starts[1:]
    moved = np.flatnonzero(ends - begins > 1)
    moved = moved[first[begins[moved]] > 0]
    places = np.arange(len(items))
    shifts = np.zeros(len(items) + 1, np.int64)
    shifts[begins[moved]] += 1
    shifts[ends[moved]] -= 1
    places -= shifts[:-1].cumsum()
    places[begins[moved]] = ends[moved] - 1
    ordered = np.empty_like(items)
    ordered[places] = items
    return ordered


def _in_parts(units: _Units, tiling: Tiling, first_partial: int) -> tuple[Int32, Int64, Int32]:
    """Assign units whole, or cut at all multiples of ``tiling.part_keys``: the longest ones are cut, while their
    results can be allocated. Returns items, starts and merges like ``_share_out``; loads differ from the mean by at
    most an item."""
    tiles, lows = units.tiles, units.lows[units.row_tiles]
    depth = tiling.part_keys // tiling.keys
    first_parts = lows // depth
    parts = -(-(lows + tiles) // depth) - first_parts
    long = np.flatnonzero((parts > 1) & (tiles * (tiling.programs * PIECES_A_PROGRAM) > tiles.sum()))
    long = long[np.argsort(-tiles[long], kind="stable")]
    cut = np.zeros(len(tiles), bool)
    cut[long[parts[long].cumsum() <= tiling.max_partials]] = True
    counts = np.where(cut, parts, 1)
    firsts = counts.cumsum() - counts
    owner = np.arange(len(tiles)).repeat(counts)
    part = first_parts[owner] + np.arange(len(owner)) - firsts[owner]
    items, parted = units.rows[units.row_tiles[owner]], cut[owner]
    ends = np.where(parted, np.minimum((part + 1) * tiling.part_keys, items[:, END]), items[:, END])
    items[:, HEAD] = units.heads[owner]
    items[:, BEGIN], items[:, END] = np.maximum(part * depth, lows[owner]) * tiling.keys, ends
    items[:, PARTIAL] = np.where(parted, first_partial + (parted.cumsum() - 1) * tiling.rows, -1)
    merges = items[firsts[cut]]
    merges[:, PARTS] = parts[cut]
    loads = -(-ends // tiling.keys) - items[:, BEGIN] // tiling.keys + tiling.unit_tiles
    middles = loads.cumsum() - loads / 2
    program = middles * tiling.programs // loads.sum()
    return items, program.searchsorted(np.arange(tiling.programs + 1)), merges


class GpuAttentionPlanner:
    """Planner of a model's steps. Contains limits and sizes, and no state of a step."""

    def __init__(
        self,
        *,
        kv_heads: int,
        group: int,
        block_size: int,
        decode: Tiling,
        chunk: Tiling,
        windows: tuple[int, ...],
        max_tokens: int,
        max_seqs: int,
        max_context_blocks: int,
        decode_tokens: int = 0,
    ) -> None:
        """Compute the sizes of records and partial results. ``group`` is the number of query heads of a KV head. The
        windows and the limits are those of :class:`pillion.kernels.gpu.attention.paged_attention.PagedAttention`.
        ``decode_tokens``: max tokens of a sequence that counts as a decode; 0: those whose rows fit one row tile."""
        self._kv_heads, self._group, self._block_size = kv_heads, group, block_size
        self.decode, self.chunk, self.windows = decode, chunk, windows
        self._decode_rows = decode_tokens * group or decode.rows
        self._window_words = decode.programs + 1 + chunk.programs + 1 + COUNT_WORDS
        seqs = min(max_seqs, max_tokens)
        # All row tiles of a sequence but its last one are full.
        chunk_units = (max_tokens * group // chunk.rows + seqs) * kv_heads
        decode_units = seqs * kv_heads * -(-self._decode_rows // decode.rows)
        lists = decode.max_items(decode_units) + decode.max_merges
        lists += chunk.max_items(chunk_units) + chunk.max_merges
        owners = decode.max_partials + chunk.max_partials + 2 * ITEM_WORDS
        tables = seqs * max_context_blocks + ITEM_WORDS
        self.max_record_words = len(windows) * (self._window_words + lists * ITEM_WORDS + owners) + tables
        # After the results of cut units each program has its own rows.
        self._own_at = decode.max_partials * decode.rows + chunk.max_partials * chunk.rows
        self.partial_rows = self._own_at + decode.own_rows + chunk.own_rows

    def starts_at(self, window: int, chunk: bool) -> int:
        """Return the offset, in words, of the list of every program's first work item in each record, for layers with
        this ``window``."""
        return self.windows.index(window) * self._window_words + (self.decode.programs + 1 if chunk else 0)

    def counts_at(self, window: int, chunk: bool) -> int:
        """Return the offset of the number of a kernel's merges of a window, followed by their offset; the same in every
        record."""
        return (self.windows.index(window) + 1) * self._window_words - COUNT_WORDS + 2 * chunk

    def first_partial(self, chunk: bool) -> int:
        """Return the first row of a kernel's partial results."""
        return self.decode.max_partials * self.decode.rows if chunk else 0

    def own_at(self, chunk: bool) -> int:
        """Return the first of the programs' own rows in the partial results."""
        return self._own_at + (self.decode.own_rows if chunk else 0)

    def plan(self, batch: StepBatch) -> GpuAttentionPlan:
        """Plan all rows of ``batch``. A sequence's positions are consecutive and end with its context.

        Raises Internal for a batch beyond the limits.
        """
        query_starts = batch.query_starts.astype(np.int64)
        contexts = batch.context_lens.astype(np.int64)
        counts = query_starts[1:] - query_starts[:-1]
        head = len(self.windows) * self._window_words
        words, table_starts = self._tables(batch.block_tables, contexts)
        tables = table_starts + head
        # Aligned, so that an item is in one cache line.
        fill = -(head + sum(part.size for part in words)) % ITEM_WORDS
        parts: list[Int32] = [np.zeros(head, np.int32), *words, np.zeros(fill, np.int32)]
        at = sum(part.size for part in parts)
        few = counts * self._group <= self._decode_rows
        chosen = [
            SequenceRows(query_starts[:-1][mask], counts[mask], contexts[mask], tables[mask])
            for mask in (few & (counts > 0), ~few)
        ]
        for window in self.windows:
            for is_chunk, tiling, sequences in zip((False, True), (self.decode, self.chunk), chosen, strict=True):
                items, starts, merges = self._share_out(sequences, tiling, window, self.first_partial(is_chunk))
                begin, counted = self.starts_at(window, is_chunk), self.counts_at(window, is_chunk)
                parts[0][begin : begin + len(starts)] = at + starts * ITEM_WORDS
                at += items.size
                parts[0][counted : counted + 2] = len(merges), at
                owners = _owners(merges, at)
                at += merges.size + owners.size
                parts += [items.ravel(), merges.ravel(), owners]
        if at > self.max_record_words:
            raise Internal(f"attention of {len(counts)} sequences takes {at} words, at most {self.max_record_words}")
        return GpuAttentionPlan(np.concatenate(parts), bool((~few).any()))

    def _share_out(
        self, sequences: SequenceRows, tiling: Tiling, window: int, first_partial: int
    ) -> tuple[Int32, Int64, Int32]:
        """Divide all units of a kernel evenly among its programs.

        Returns items [N, ITEM_WORDS], of which program p has starts[p] .. starts[p + 1]; these starts; and merges
        [M, ITEM_WORDS]. A program's load is the key tiles of its items, and ``unit_tiles`` for each unit that it
        begins. Loads differ from the mean by less than 1 + unit_tiles, because a cut within a unit's overhead moves to
        the unit's beginning. ``window`` is one of the planner's. Partial rows are numbered from ``first_partial`` on.
        """
        if not len(sequences.counts):
            empty = np.zeros((0, ITEM_WORDS), np.int32)
            return empty, np.zeros(tiling.programs + 1, np.int64), empty
        units = self._units(sequences, tiling, window)
        if tiling.part_keys:
            return _in_parts(units, tiling, first_partial)
        overhead = tiling.unit_tiles
        lengths = units.tiles + overhead
        ends = lengths.cumsum()
        begins = ends - lengths
        cuts = ends[-1] * np.arange(tiling.programs + 1) // tiling.programs
        cut_begins = begins[ends[:-1].searchsorted(cuts[:-1], "right")]
        inside = cuts[:-1] - cut_begins > overhead
        cuts[:-1] = np.where(inside, cuts[:-1], cut_begins)
        # With fewer key tiles than programs, several programs end at the same cut.
        inner = cuts[:-1][inside]
        inner = inner[_changes(inner)]
        # No cut is at a unit's beginning, so its index among cuts and beginnings is the sum of its ranks in both.
        is_cut = np.zeros(len(begins) + len(inner), bool)
        is_cut[np.arange(len(inner)) + begins.searchsorted(inner)] = True
        edges = np.empty(len(is_cut) + 1, np.int64)
        edges[:-1][is_cut], edges[:-1][~is_cut], edges[-1] = inner, begins, ends[-1]
        owner = (~is_cut).cumsum() - 1
        first = edges[:-1] - begins[owner] - overhead
        first[~is_cut] = 0
        behind = edges[1:] - begins[owner] - overhead
        parted = behind - first < units.tiles[owner]
        row_tiles = units.row_tiles[owner]
        items = units.rows[row_tiles]
        items[:, HEAD] = units.heads[owner]
        items[:, BEGIN] = (units.lows[row_tiles] + first) * tiling.keys
        items[:, END] = np.minimum((units.lows[row_tiles] + behind) * tiling.keys, items[:, END])
        items[:, PARTIAL] = np.where(parted, first_partial + (parted.cumsum() - 1) * tiling.rows, -1)
        heads = np.flatnonzero(~is_cut)
        parts = np.empty_like(heads)
        parts[:-1], parts[-1] = heads[1:] - heads[:-1], len(items) - heads[-1]
        merged = parts > 1
        merges = items[heads[merged]]
        merges[:, PARTS] = parts[merged]
        starts = edges.searchsorted(cuts)
        return _whole_first(items, first, starts), starts, merges

    def _units(self, sequences: SequenceRows, tiling: Tiling, window: int) -> _Units:
        """List units head by head within a sequence, so that neighbouring programs read the same keys."""
        group = self._group
        rows = sequences.counts * group
        counts = -(-rows // tiling.rows)
        firsts = counts.cumsum() - counts
        which = np.arange(len(counts)).repeat(counts)
        before = (np.arange(len(which)) - firsts[which]) * tiling.rows
        row = sequences.begins[which] * group + before
        count = np.minimum(rows[which] - before, tiling.rows)
        shift = (sequences.contexts - sequences.begins - sequences.counts)[which]
        first, end = row // group + shift, (row + count - 1) // group + shift + 1
        lows = np.zeros_like(end)
        if window:
            # A tile's first row sees the lowest keys, even if its last one is in another chunk of positions.
            lows = (first // -window * -window if window < 0 else np.maximum(first + 1 - window, 0)) // tiling.keys
        items = np.empty((len(which), ITEM_WORDS), np.int32)
        items[:, TABLE], items[:, ROW], items[:, ROWS] = sequences.tables[which], row, count
        items[:, SHIFT], items[:, END] = shift, end
        heads, row_tiles = _by_head(counts, firsts, which, self._kv_heads)
        tiles = -(-end // tiling.keys) - lows
        return _Units(row_tiles, heads, tiles[row_tiles], items, lows)

    def _tables(self, block_tables: Int32, contexts: Int64) -> tuple[list[Int32], Int64]:
        """Return the words of block tables and each sequence's offset in them; the tables are padded if they are not
        much longer then."""
        blocks = -(-contexts // self._block_size)
        width = int(blocks.max(initial=0))
        used = int(blocks.sum())
        # Copy the tables with their padding if that at most doubles the words.
        if width * len(blocks) <= 2 * used:
            return [block_tables[:, :width].ravel()], np.arange(len(blocks)) * width
        named = [row[:many] for row, many in zip(block_tables, blocks.tolist(), strict=True)]
        return named, blocks.cumsum() - blocks
