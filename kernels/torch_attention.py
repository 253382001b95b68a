"""Paged attention on the CPU by torch's own kernels; :mod:`kernels.reference` is its oracle.

Everything that does not depend on the layer (rows to write, pieces to gather, masks) is computed once per step. In a
layer, sequences that run one token are gathered into a padded group and share one call; each chunk has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.reference import RaggedBatch

Int64 = npt.NDArray[np.int64]

# Sequences share a padded call when the shorter one has at least half of the longer one's blocks, or nearly so: a
# call costs about as much as gathering this many blocks.
GROUP_SLACK_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences attended by one call.

    Attributes:
        rows: rows of the batch that they own.
        pieces: indices of the (slot, K or V, head) pieces to gather, in the order [2, S, kv_heads, B], layer 0.
        context: tokens that are kept of the gathered B * block_size ones.
        masks: per window, what is added to the scores; None where nothing is hidden.
    """

    rows: slice | torch.Tensor
    num_seqs: int
    pieces: torch.Tensor
    context: int
    masks: dict[int, torch.Tensor | None]
    causal: bool


class StepAttention:
    """Attention of one step over one pool.

    Threads: the step's. What changes: the pool's rows that the batch writes, and, when it is made, the rest of blocks
    that the batch begins: they are cleared in all layers, because a padded call multiplies hidden rows by zero, and
    zero times a stale infinity would not be zero.
    """

    def __init__(
        self, pool: torch.Tensor, batch: RaggedBatch, *, num_heads: int, scale: float, windows: Sequence[int] = (0,)
    ) -> None:
        """pool: [slots, layers, 2, kv_heads, block_size, head_dim], contiguous. windows: those that layers will use."""
        _, _, _, self._kv_heads, self._block_size, self._head_dim = pool.shape
        self._num_heads = num_heads
        self._scale = scale
        self._dtype = pool.dtype
        self._pieces_per_layer = 2 * self._kv_heads
        self._pieces_per_slot = pool.shape[1] * self._pieces_per_layer
        self._rows = pool.view(-1, self._head_dim)
        self._pieces = pool.view(-1, self._block_size * self._head_dim)
        lengths = np.diff(batch.query_starts)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        slots = batch.block_tables[owners, batch.positions // self._block_size].astype(np.int64)
        offsets = batch.positions % self._block_size
        self._clear_begun(pool, batch, slots[offsets == 0])
        heads = np.arange(self._pieces_per_layer)
        rows = (slots[:, None] * self._pieces_per_slot + heads) * self._block_size + offsets[:, None]
        self._write_rows = torch.from_numpy(rows.reshape(-1))
        self._groups = self._plan(batch, lengths, sorted(set(windows)))

    def _clear_begun(self, pool: torch.Tensor, batch: RaggedBatch, begun: Int64) -> None:
        unfilled = [
            table[context // self._block_size]
            for table, context in zip(batch.block_tables, batch.context_lens, strict=True)
            if context % self._block_size
        ]
        for slot in np.intersect1d(begun, np.asarray(unfilled, np.int64)):
            pool[int(slot)].zero_()

    def _plan(self, batch: RaggedBatch, lengths: npt.NDArray[np.int32], windows: list[int]) -> tuple[_Group, ...]:
        blocks = -(-batch.context_lens // self._block_size)
        groups = [self._chunk(batch, int(sequence), windows) for sequence in np.flatnonzero(lengths > 1)]
        single = np.flatnonzero(lengths == 1)
        single = single[np.argsort(-blocks[single], kind="stable")]
        while len(single):
            taken = blocks[single] * 2 + GROUP_SLACK_BLOCKS >= blocks[single[0]]
            groups.append(self._decodes(batch, np.sort(single[taken]), windows))
            single = single[~taken]
        return tuple(groups)

    def _gather_indices(self, tables: Int64) -> torch.Tensor:
        """tables [S, B] -> flat indices in the order [2, S, kv_heads, B]."""
        kinds = np.arange(2)[:, None, None, None] * self._kv_heads
        heads = np.arange(self._kv_heads)[:, None]
        indices = tables[None, :, None, :] * self._pieces_per_slot + kinds + heads
        return torch.from_numpy(indices.reshape(-1))

    def _decodes(self, batch: RaggedBatch, sequences: Int64, windows: list[int]) -> _Group:
        contexts = batch.context_lens[sequences]
        width = -(-int(contexts.max()) // self._block_size)
        tables = batch.block_tables[sequences, :width].astype(np.int64)
        # Columns behind a sequence's end are hidden; they read its own first block, which holds finite numbers.
        behind = np.arange(width) * self._block_size >= contexts[:, None]
        tables = np.where(behind, tables[:, :1], tables)
        context = int(contexts.max()) if len(sequences) == 1 else width * self._block_size
        columns = np.arange(context)
        masks: dict[int, torch.Tensor | None] = {}
        for window in windows:
            hidden = columns >= contexts[:, None]
            if window:
                hidden |= columns < contexts[:, None] - window
            masks[window] = self._mask(hidden)[:, None, None] if hidden.any() else None
        rows = batch.query_starts[sequences].astype(np.int64)
        return _Group(_rows(rows), len(rows), self._gather_indices(tables), context, masks, False)

    def _chunk(self, batch: RaggedBatch, sequence: int, windows: list[int]) -> _Group:
        context = int(batch.context_lens[sequence])
        first, behind = (int(row) for row in batch.query_starts[sequence : sequence + 2])
        tables = batch.block_tables[sequence : sequence + 1, : -(-context // self._block_size)].astype(np.int64)
        # Without tokens before the chunk, the kernel's own causal rule needs no mask.
        causal = behind - first == context
        positions, columns = batch.positions[first:behind, None], np.arange(context)
        masks: dict[int, torch.Tensor | None] = {}
        for window in windows:
            if causal and (not window or window >= context):
                masks[window] = None
                continue
            hidden = columns > positions
            if window:
                hidden |= columns <= positions - window
            masks[window] = self._mask(hidden)
        return _Group(slice(first, behind), 1, self._gather_indices(tables), context, masks, causal)

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts keys and values [T, kv_heads, head_dim] into the pool's ``layer``."""
        both = torch.cat((keys, values), 1).view(-1, self._head_dim)
        first = layer * self._pieces_per_layer * self._block_size
        self._rows[first:].index_copy_(0, self._write_rows, both)

    def attend(self, layer: int, queries: torch.Tensor, window: int = 0) -> torch.Tensor:
        """queries [T, heads, head_dim] -> [T, heads * head_dim]; the layer's KV must have been written."""
        out = torch.empty_like(queries)
        heads_per_kv = self._num_heads // self._kv_heads
        for group in self._groups:
            pieces = self._pieces[layer * self._pieces_per_layer :].index_select(0, group.pieces)
            shape = (2, group.num_seqs, self._kv_heads, -1, self._head_dim)
            keys, values = pieces.view(shape)[:, :, :, : group.context].unbind(0)
            mask = group.masks[window]
            mine = queries[group.rows].view(-1, self._kv_heads, heads_per_kv, self._head_dim)
            if len(mine) == group.num_seqs:
                # One token each: the query heads of a KV head stand as its rows.
                found = scaled_dot_product_attention(mine, keys, values, attn_mask=mask, scale=self._scale)
            else:
                # A chunk: KV heads are the batch, and their keys are seen by each query head without a copy.
                wide = (self._kv_heads, heads_per_kv, group.context, self._head_dim)
                keys, values = keys[0][:, None].expand(wide), values[0][:, None].expand(wide)
                found = scaled_dot_product_attention(
                    mine.permute(1, 2, 0, 3),
                    keys,
                    values,
                    attn_mask=mask,
                    is_causal=group.causal and mask is None,
                    scale=self._scale,
                ).permute(2, 0, 1, 3)
            out[group.rows] = found.reshape(-1, self._num_heads, self._head_dim)
        return out.view(len(out), -1)


def _rows(rows: Int64) -> slice | torch.Tensor:
    """A slice where the rows follow each other: it costs no copy."""
    if len(rows) == rows[-1] - rows[0] + 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
