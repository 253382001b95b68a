"""Which queries meet which keys in which call: the part of a step's attention that is the same in every layer.

A call gathers K and V of a *tile* of a sequence's tokens and attends some queries to it. No tile has more than a fixed
number of tokens, so what a step needs beside the pool depends on its batch and not on how long the contexts are.
Tiles that nobody sees are not planned, and a tile that everybody sees whole needs no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from pillion.kernels.torch.reference import Int32, RaggedBatch

Int64 = npt.NDArray[np.int64]

# A sequence's context is attended in tiles of at most this many tokens. Their K and V are still in a cache when they
# are read after being gathered: 32K tokens of 8 KV heads of 128 took 106 ms in one piece, 33 ms in tiles of this size.
ATTENTION_TILE_TOKENS = 2048
# A soft cap needs the scores themselves in memory, [heads, queries, tokens] in float32, so its tiles are smaller.
CAPPED_TILE_TOKENS = 1024
# Tiles have at least this many times the rows of a query tile. With 2 or more, evenly cut tiles leave no query
# without a key in any tile, which torch's kernel would report with a wrong weight (a log-sum-exp of 0).
TILE_TOKENS_PER_QUERY = 4
# Sequences share a padded call when the shorter one has at least half of the longer one's blocks, or nearly so: a
# call costs about as much as gathering this many blocks.
GROUP_SLACK_BLOCKS = 8
# What a call may gather, but for the least tile. From 32 MiB on, glibc maps fresh pages for each allocation, and the
# kernel clears them.
GATHER_BYTES = 16 * 2**20
LEAST_TILE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class KeyTile:
    """Keys and values of one call.

    Attributes:
        pieces: indices of the (slot, K or V, head) pieces to gather, in the order [2, S, kv_heads, B], for layer 0.
        first, behind: tokens that are kept of the gathered B * block_size ones.
        mask: what is added to the scores, [queries, tokens] or, for queries of several sequences, [S, 1, 1, tokens];
            None where nothing is hidden.
        causal: query i sees the tokens 0 .. i of the tile, so that the kernel's own rule serves.
    """

    pieces: torch.Tensor
    first: int
    behind: int
    mask: torch.Tensor | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Queries that are attended together: of S sequences with one row each, or of one sequence. In every tile each
    query sees something; results of several tiles are merged by their log-sum-exp.
    """

    rows: slice | torch.Tensor
    num_seqs: int
    tiles: tuple[KeyTile, ...]


def choose_tile_tokens(token_bytes: int, capped: bool) -> int:
    """``token_bytes``: K and V of a token in one layer."""
    most = CAPPED_TILE_TOKENS if capped else ATTENTION_TILE_TOKENS
    return min(most, max(LEAST_TILE_TOKENS, GATHER_BYTES // token_bytes))


class TilePlanner:
    """Plans one step. Made and thrown away with it; shape and dtype are the pool's, lengths are rows per sequence."""

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, batch: RaggedBatch, lengths: Int32, tile_tokens: int
    ) -> None:
        _, layers, _, self._kv_heads, self._block_size, head_dim = shape
        self._pieces_per_slot = layers * 2 * self._kv_heads
        self._block_bytes = 2 * self._kv_heads * self._block_size * head_dim * dtype.itemsize
        self._dtype = dtype
        self._batch = batch
        self._tile_tokens = tile_tokens
        self._query_tokens = max(1, tile_tokens // TILE_TOKENS_PER_QUERY)
        self._kinds = np.arange(2)[:, None, None, None] * self._kv_heads + np.arange(self._kv_heads)[:, None]
        self._lengths = lengths
        self._bands: dict[tuple[int, int, int, int], torch.Tensor] = {}

    def plan(self, window: int) -> tuple[QueryGroup, ...]:
        """All rows of the batch, each in one group. ``window``: tokens that a query sees, itself included; 0: all."""
        groups: list[QueryGroup] = []
        for sequence in np.flatnonzero(self._lengths > 1).tolist():
            groups += self._chunk(sequence, window)
        single = np.flatnonzero(self._lengths == 1)
        if not len(single):
            return tuple(groups)
        ends = self._batch.context_lens[single]
        begins = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
        long = ends - begins > self._tile_tokens
        for sequence in single[long].tolist():
            groups += self._chunk(sequence, window)
        short = ~long
        return (*groups, *self._padded(single[short], begins[short], ends[short]))

    def _chunk(self, sequence: int, window: int) -> list[QueryGroup]:
        """The queries of one sequence, in tiles of their own where they are many."""
        first, behind = self._batch.query_starts[sequence : sequence + 2].tolist()
        # A row's position, given the row: rows of a sequence follow each other without a gap.
        shift = int(self._batch.context_lens[sequence]) - behind
        return [
            QueryGroup(slice(begin, end), 1, tuple(self._tiles(sequence, begin + shift, end + shift, window)))
            for begin, end in _cut(first, behind, self._query_tokens)
        ]

    def _tiles(self, sequence: int, begin: int, end: int, window: int) -> list[KeyTile]:
        """What the queries at positions begin .. end - 1 see."""
        lowest = max(0, begin - window + 1) if window else 0
        if end - lowest <= self._tile_tokens:
            spans = [(lowest, end)]
        elif end - begin == 1:
            spans = _cut(lowest, end, self._tile_tokens)
        else:
            # Behind the chunk's own square, which the kernel's causal rule masks, all is visible but a window's edge.
            spans = [(begin, end), *_cut(lowest, begin, self._tile_tokens)]
        return [self._tile(sequence, (begin, end), span, window) for span in spans]

    def _tile(self, sequence: int, queries: tuple[int, int], span: tuple[int, int], window: int) -> KeyTile:
        begin, end = queries
        ahead = span[1] - 1 > begin
        edge = window if window and span[0] < end - window else 0
        causal = ahead and not edge and span == queries
        mask = None
        if (ahead or edge) and not causal:
            mask = self._band(begin - span[0], end - begin, span[1] - span[0], edge)
        block = span[0] // self._block_size
        table = self._batch.block_tables[sequence : sequence + 1, block : -(-span[1] // self._block_size)]
        base = block * self._block_size
        return KeyTile(self._pieces(table), span[0] - base, span[1] - base, mask, causal)

    def _padded(self, sequences: Int64, begins: Int32, ends: Int32) -> list[QueryGroup]:
        """One row each, seeing begins .. ends - 1: similar lengths share a call, the shorter ones padded."""
        first_blocks = begins // self._block_size
        widths = -(-ends // self._block_size) - first_blocks
        order = np.argsort(-widths, kind="stable")
        groups = []
        while len(order):
            widest = int(widths[order[0]])
            most = max(1, GATHER_BYTES // (widest * self._block_bytes))
            count = min(int(np.count_nonzero(widths[order] * 2 + GROUP_SLACK_BLOCKS >= widest)), most)
            taken = np.sort(order[:count])
            base = first_blocks[taken] * self._block_size
            groups.append(
                self._padded_group(
                    sequences[taken], first_blocks[taken], widest, begins[taken] - base, ends[taken] - base
                )
            )
            order = order[count:]
        return groups

    def _padded_group(
        self, sequences: Int64, first_blocks: Int32, width: int, begins: Int32, ends: Int32
    ) -> QueryGroup:
        """begins, ends: what each row sees, in tokens from its first block on."""
        rows = self._batch.query_starts[sequences].astype(np.int64)
        first, last = int(begins.min()), int(ends.max())
        columns = np.arange(width, dtype=np.int32)
        # Columns behind a sequence's end are hidden; they read its own first block, which holds finite numbers.
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
        """tables [S, B] -> flat indices in the order [2, S, kv_heads, B]."""
        indices = tables.astype(np.int64)[None, :, None, :] * self._pieces_per_slot + self._kinds
        return torch.from_numpy(indices.reshape(-1))

    def _band(self, offset: int, queries: int, tokens: int, window: int) -> torch.Tensor:
        """Query i sees the tile's tokens i + offset - window + 1 .. i + offset. Tiles of one geometry share a mask."""
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


def _cut(begin: int, end: int, most: int) -> list[tuple[int, int]]:
    """begin .. end in the fewest parts of at most ``most``, as even as can be."""
    count = -(-(end - begin) // most)
    edges = [begin + (end - begin) * part // count for part in range(count + 1)]
    return list(pairwise(edges))


def _rows(rows: Int64) -> slice | torch.Tensor:
    """A slice where the rows follow each other: it costs no copy."""
    if len(rows) == rows[-1] - rows[0] + 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
