"""The plan of a step's attention, common to all layers: which queries attend to which keys in each call of torch.

A call gathers K and V of a *tile* of a sequence's tokens and attends some queries to it. The size of tiles is limited,
so the temporary memory of a step depends on its batch and not on the length of contexts. Tiles that no query sees are
not planned, and a tile that all queries see completely needs no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from pillion.kernels.step import Int32, StepBatch

Int64 = npt.NDArray[np.int64]

# Max tokens of a tile. Its gathered K and V then stay in the processor's cache: 32K tokens of 8 KV heads of 128 took
# 106 ms in one piece, 33 ms in tiles of this size.
ATTENTION_TILE_TOKENS = 2048
# Max tokens of a tile with a soft cap, whose scores [heads, queries, tokens] are in memory as float32.
CAPPED_TILE_TOKENS = 1024
# Max bytes gathered by a call, except by the smallest possible tile. From 32 MiB on, glibc maps fresh pages for each
# allocation, which the operating system clears.
GATHER_BYTES = 16 * 2**20
MIN_TILE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class KeyTile:
    """The keys and values of one call.

    Attributes:
        pieces: indices in layer 0 of the (slot, K or V, head) pieces to gather, in the order [planes, S, kv_heads, B].
        begin, end: of the B * block_size gathered tokens, those used are begin .. end - 1.
        mask: added to the scores, [queries, tokens] or, for queries of several sequences, [S, 1, 1, tokens]; None if
            nothing is masked.
        causal: whether query i sees the tokens 0 .. i of the tile, which torch's kernel masks itself.
    """

    pieces: torch.Tensor
    begin: int
    end: int
    mask: torch.Tensor | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Queries that share calls: the rows of S sequences with one row each, or rows of one sequence.

    Each query sees a key in every tile; results of several tiles are merged by their log-sum-exp.
    """

    rows: slice | torch.Tensor
    num_seqs: int
    tiles: tuple[KeyTile, ...]


def choose_tile_tokens(token_bytes: int, capped: bool) -> int:
    """Return the max tokens of a tile. A token's K and V take ``token_bytes`` in one layer."""
    max_tokens = CAPPED_TILE_TOKENS if capped else ATTENTION_TILE_TOKENS
    return min(max_tokens, max(MIN_TILE_TOKENS, GATHER_BYTES // token_bytes))


class TilePlanner:
    """Planner of one step's attention. ``shape`` and ``dtype`` are the pool's; ``lengths`` are rows per sequence.
    ``chunked``: a query sees the tokens since the last multiple of its window, instead of the window's last tokens.
    ``pieces_per_slot``: (K or V, head) pieces of a slot in all layers; 0 if it follows from ``shape``."""

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        batch: StepBatch,
        lengths: Int32,
        tile_tokens: int,
        chunked: bool = False,
        pieces_per_slot: int = 0,
    ) -> None:
        _, layers, planes, self._kv_heads, self._block_size, head_dim = shape
        self._pieces_per_slot = pieces_per_slot or layers * planes * self._kv_heads
        self._block_bytes = planes * self._kv_heads * self._block_size * head_dim * dtype.itemsize
        self._dtype = dtype
        self._batch = batch
        self._tile_tokens = tile_tokens
        # From 2 tokens per query on, every query sees a key in each of its tiles. For a query that sees none, torch's
        # kernel would return a wrong log-sum-exp of 0.
        self._query_tokens = max(1, tile_tokens // 4)
        self._piece_offsets = (
            np.arange(planes)[:, None, None, None] * self._kv_heads + np.arange(self._kv_heads)[:, None]
        )
        self._lengths = lengths
        self._chunked = chunked
        self._bands: dict[tuple[int, int, int, int], torch.Tensor] = {}

    def plan(self, window: int) -> tuple[QueryGroup, ...]:
        """Return groups that contain each row of the batch once. A query sees ``window`` tokens with itself; 0: all."""
        groups: list[QueryGroup] = []
        for sequence in np.flatnonzero(self._lengths > 1).tolist():
            groups += self._chunk(sequence, window)
        single = np.flatnonzero(self._lengths == 1)
        if not len(single):
            return tuple(groups)
        ends = self._batch.context_lens[single]
        begins = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
        if window and self._chunked:
            begins = (ends - 1) // window * window
        long = ends - begins > self._tile_tokens
        for sequence in single[long].tolist():
            groups += self._chunk(sequence, window)
        short = ~long
        return (*groups, *self._padded(single[short], begins[short], ends[short]))

    def _chunk(self, sequence: int, window: int) -> list[QueryGroup]:
        """Return groups of one sequence's queries, each of at most ``_query_tokens``."""
        first, end = self._batch.query_starts[sequence : sequence + 2].tolist()
        # A row's position is the row + shift, because a sequence's rows are consecutive.
        shift = int(self._batch.context_lens[sequence]) - end
        groups = _cut(first, end, self._query_tokens)
        if window and self._chunked:
            # All queries of a group must see the same tokens before the group.
            within = (_cut_at(begin + shift, end + shift, window) for begin, end in groups)
            groups = [(begin - shift, end - shift) for parts in within for begin, end in parts]
        return [
            QueryGroup(slice(begin, end), 1, tuple(self._tiles(sequence, begin + shift, end + shift, window)))
            for begin, end in groups
        ]

    def _tiles(self, sequence: int, begin: int, end: int, window: int) -> list[KeyTile]:
        """Return the tiles that the queries at positions begin .. end - 1 see."""
        lowest = max(0, begin - window + 1) if window else 0
        if window and self._chunked:
            lowest, window = begin // window * window, 0
        if end - lowest <= self._tile_tokens:
            ranges = [(lowest, end)]
        elif end - begin == 1:
            ranges = _cut(lowest, end, self._tile_tokens)
        else:
            # The kernel masks the chunk's own square; the tokens before it are all visible, except at a window's edge.
            ranges = [(begin, end), *_cut(lowest, begin, self._tile_tokens)]
        return [self._tile(sequence, (begin, end), tokens, window) for tokens in ranges]

    def _tile(self, sequence: int, queries: tuple[int, int], tokens: tuple[int, int], window: int) -> KeyTile:
        begin, end = queries
        ahead = tokens[1] - 1 > begin
        edge = window if window and tokens[0] < end - window else 0
        causal = ahead and not edge and tokens == queries
        mask = None
        if (ahead or edge) and not causal:
            mask = self._band(begin - tokens[0], end - begin, tokens[1] - tokens[0], edge)
        block = tokens[0] // self._block_size
        table = self._batch.block_tables[sequence : sequence + 1, block : -(-tokens[1] // self._block_size)]
        base = block * self._block_size
        return KeyTile(self._pieces(table), tokens[0] - base, tokens[1] - base, mask, causal)

    def _padded(self, sequences: Int64, begins: Int32, ends: Int32) -> list[QueryGroup]:
        """Return groups of sequences of one row each, which sees the tokens begins .. ends - 1; similar lengths share a
        padded call."""
        first_blocks = begins // self._block_size
        widths = -(-ends // self._block_size) - first_blocks
        order = np.argsort(-widths, kind="stable")
        groups = []
        while len(order):
            widest = int(widths[order[0]])
            max_seqs = max(1, GATHER_BYTES // (widest * self._block_bytes))
            # A sequence joins if twice its blocks plus 8 reach the widest one's: a call costs as much as gathering 8.
            count = min(int(np.count_nonzero(widths[order] * 2 + 8 >= widest)), max_seqs)
            members = np.sort(order[:count])
            base = first_blocks[members] * self._block_size
            groups.append(
                self._padded_group(
                    sequences[members], first_blocks[members], widest, begins[members] - base, ends[members] - base
                )
            )
            order = order[count:]
        return groups

    def _padded_group(
        self, sequences: Int64, first_blocks: Int32, width: int, begins: Int32, ends: Int32
    ) -> QueryGroup:
        """Return a group of one row per sequence, which sees the tokens ``begins`` .. ``ends`` - 1 of the ``width``
        blocks from its first block on."""
        rows = self._batch.query_starts[sequences].astype(np.int64)
        first, last = int(begins.min()), int(ends.max())
        columns = np.arange(width, dtype=np.int32)
        # Columns after a sequence's end are masked; they read its first block, whose numbers are finite.
        columns = np.where(columns * self._block_size < ends[:, None], columns, 0)
        pieces = self._pieces(self._batch.block_tables[sequences[:, None], columns + first_blocks[:, None]])
        if len(rows) == 1 or (int(begins.max()) == first and int(ends.min()) == last):
            return QueryGroup(_rows(rows), len(rows), (KeyTile(pieces, first, last),))
        tokens = np.arange(width * self._block_size, dtype=np.int32)
        hidden = tokens >= ends[:, None]
        if int(begins.max()):
            hidden |= tokens < begins[:, None]
        mask = self._mask(hidden)[:, None, None]
        return QueryGroup(_rows(rows), len(rows), (KeyTile(pieces, 0, len(tokens), mask),))

    def _pieces(self, tables: Int32) -> torch.Tensor:
        """Convert block tables [S, B] to flat indices of pieces in the order [planes, S, kv_heads, B]."""
        indices = tables.astype(np.int64)[None, :, None, :] * self._pieces_per_slot + self._piece_offsets
        return torch.from_numpy(indices.reshape(-1))

    def _band(self, offset: int, queries: int, tokens: int, window: int) -> torch.Tensor:
        """Return the cached mask of a tile in which query i sees the tokens i + offset - window + 1 .. i + offset; all
        up to i + offset if ``window`` is 0."""
        key = (offset, queries, tokens, window)
        if key not in self._bands:
            distance = np.arange(offset, offset + queries, dtype=np.int32)[:, None] - np.arange(tokens, dtype=np.int32)
            hidden = distance < 0
            if window:
                hidden |= distance >= window
            self._bands[key] = self._mask(hidden)
        return self._bands[key]

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)


def _cut(begin: int, end: int, max_size: int) -> list[tuple[int, int]]:
    """Cut begin .. end into the fewest ranges of at most ``max_size``, as even as possible."""
    count = -(-(end - begin) // max_size)
    edges = [begin + (end - begin) * part // count for part in range(count + 1)]
    return list(pairwise(edges))


def _cut_at(begin: int, end: int, step: int) -> list[tuple[int, int]]:
    """Cut begin .. end at the multiples of ``step``."""
    return list(pairwise((begin, *range((begin // step + 1) * step, end, step), end)))


def _rows(rows: Int64) -> slice | torch.Tensor:
    """Return a slice if the rows are consecutive, because indexing with it copies nothing."""
    if len(rows) == rows[-1] - rows[0] + 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
