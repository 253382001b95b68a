"""Paged attention on the CPU by torch's own kernels; :mod:`lab.testbed.attention_reference` is its oracle.

Everything that does not depend on the layer (rows to write, pieces to gather, masks) is computed once per step, in
:mod:`pillion.kernels.torch.attention_tiles`. In a layer, sequences that run one token over short contexts are gathered
into a padded group and share one call. Chunks and long contexts are attended tile by tile, and the results of tiles are
merged by the log-sum-exp of their scores ("Self-attention Does Not Need O(n^2) Memory", Rabe and Staats 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pillion.kernels.step import Int32, StepBatch
from pillion.kernels.torch.attention_tiles import KeyTile, QueryGroup, TilePlanner, choose_tile_tokens

# Unlike scaled_dot_product_attention, also returns the log-sum-exp of the scores.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class StepAttention:
    """Attention of one step over one pool, used only by the step loop's thread.

    Writes the batch's rows of the pool. The constructor also zeroes, in all layers, the blocks that the batch begins
    and does not fill, because a padded call multiplies masked rows by zero, and zero times a stale infinity is not
    zero.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        batch: StepBatch,
        *,
        num_heads: int,
        scale: float,
        windows: Sequence[int] = (0,),
        chunked: bool = False,
        softcap: float = 0.0,
        tile_tokens: int = 0,
        firsts: Mapping[int, int] | None = None,
    ) -> None:
        """Plan the step. ``pool`` is contiguous [slots, layers, planes, kv_heads, block_size, head_dim]; planes are K
        and V, or a single one if a row is both. ``windows``: sliding windows of the layers, 0 for none; with
        ``chunked`` a query sees the tokens since the last multiple of its window.

        ``softcap`` is that of :func:`lab.testbed.attention_reference.paged_attention`. One call gathers at most
        ``tile_tokens`` of a sequence; 0: a default. ``firsts``, for models whose layers differ in the size of their KV:
        offset in a slot, in values, of each layer that this object serves; ``pool`` is then [slots, 1, planes, ...],
        and its slots are a whole number of pieces apart.
        """
        _, _, self._planes, self._kv_heads, self._block_size, self._head_dim = pool.shape
        self._num_heads = num_heads
        self._scale = scale
        self._softcap = softcap
        self._pieces_per_layer = self._planes * self._kv_heads
        piece, slot_values = self._block_size * self._head_dim, pool.stride(0)
        self._pieces_per_slot, self._firsts = slot_values // piece, firsts
        self._values = pool.as_strided((len(pool) * slot_values,), (1,))
        lengths = np.diff(batch.query_starts)
        _clear_partial_blocks(self._values.view(len(pool), -1), self._block_size, batch, lengths)
        self._write_rows = self._rows_to_write(batch, lengths)
        max_tile_tokens = tile_tokens or choose_tile_tokens(
            self._pieces_per_layer * self._head_dim * pool.dtype.itemsize, capped=softcap > 0
        )
        planner = TilePlanner(pool.shape, pool.dtype, batch, lengths, max_tile_tokens, chunked, self._pieces_per_slot)
        longest = int(batch.context_lens.max())
        # A window that exceeds every context hides nothing, so its layers share the plan of those without a window.
        effective = {window: window if window < longest else 0 for window in windows}
        plans = {window: planner.plan(window) for window in set(effective.values())}
        self._plans = {window: plans[used] for window, used in effective.items()}
        self._batch = batch
        # For each sequence the masked tokens [queries, context], or None if causal; empty without a selection.
        self._hidden: list[torch.Tensor | None] = []

    def _table(self, layer: int, width: int) -> torch.Tensor:
        """Return the pool from a layer's first value on, as a table with rows of ``width`` values."""
        layer_values = self._pieces_per_layer * self._block_size * self._head_dim
        first = layer * layer_values if self._firsts is None else self._firsts[layer]
        rows = (len(self._values) - first) // width
        return self._values[first : first + rows * width].view(rows, width)

    def _rows_to_write(self, batch: StepBatch, lengths: Int32) -> torch.Tensor:
        """Return the indices of each token's rows in a layer's :meth:`_table`: K and V of every KV head."""
        owners = np.repeat(np.arange(len(lengths)), lengths)
        blocks, offsets = np.divmod(batch.positions, self._block_size)
        slots = batch.block_tables[owners, blocks].astype(np.int64)
        pieces = slots[:, None] * self._pieces_per_slot + np.arange(self._pieces_per_layer)
        return torch.from_numpy((pieces * self._block_size + offsets[:, None]).reshape(-1))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Write keys and values [T, kv_heads, head_dim], or rows that are both, into the pool's ``layer``."""
        both = (keys if values is None else torch.cat((keys, values), 1)).reshape(-1, self._head_dim)
        self._table(layer, self._head_dim).index_copy_(0, self._write_rows, both)

    def attend(
        self, layer: int, queries: torch.Tensor, window: int = 0, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the attention of queries [T, heads, head_dim] -> [T, heads * head_dim]; the layer's KV must have
        been written.

        ``sinks`` [heads]: attention sinks, a score per head that is part of its softmax and has no value.
        """
        if self._hidden:
            return self._attend_selected(layer, queries)
        groups = self._plans[window]
        if len(groups) == 1:
            return self._attend_group(layer, queries, groups[0], sinks)
        out = queries.new_empty(len(queries), self._num_heads * self._head_dim)
        for group in groups:
            out[group.rows] = self._attend_group(layer, queries[group.rows], group, sinks)
        return out

    def select(self, layer: int, queries: torch.Tensor, weights: torch.Tensor, first: int, top: int) -> None:
        """Restrict the step's attention, from now on, to the ``top`` visible tokens of each query with the largest sum
        of relu(index query * index key) * weight; of equal ones the first. The layer's rows must have been written.

        Takes index queries [T, heads, dim] and weights [T, heads] float32; index keys are the values of the layer's
        rows from ``first`` on. If no context exceeds ``top`` tokens, all are selected.
        """
        starts, contexts = self._batch.query_starts, self._batch.context_lens
        self._hidden = [] if int(contexts.max()) <= top else [None] * len(contexts)
        for number in np.flatnonzero(contexts > top).tolist():
            context, rows = int(contexts[number]), slice(int(starts[number]), int(starts[number + 1]))
            keys = self._rows_of(layer, number)[:, first:].float().T
            visible = self._visible_tokens(rows)
            hidden = torch.ones((len(visible), context), dtype=torch.bool)
            # At most 2**24 scores in memory at once.
            size = max(1, 2**24 // (queries.shape[1] * context))
            for part in map(slice, range(0, len(visible), size), range(size, len(visible) + size, size)):
                scores = (queries[rows][part].float() @ keys).relu_().mul_(weights[rows][part][..., None]).sum(1)
                unseen = torch.arange(context) >= visible[part]
                best = scores.masked_fill_(unseen, -torch.inf).sort(descending=True, stable=True).indices[:, :top]
                hidden[part] = hidden[part].scatter_(1, best, value=False) | unseen
            self._hidden[number] = hidden

    def _visible_tokens(self, rows: slice) -> torch.Tensor:
        """Return the number of tokens up to each row's own one [rows, 1]."""
        return torch.from_numpy(self._batch.positions[rows].astype(np.int64))[:, None] + 1

    def _rows_of(self, layer: int, number: int) -> torch.Tensor:
        """Return the rows [context, head_dim] of the sequence ``number``, in a layer with one plane and one KV head."""
        context = int(self._batch.context_lens[number])
        slots = self._batch.block_tables[number, : -(-context // self._block_size)].astype(np.int64)
        pieces = torch.from_numpy(slots * self._pieces_per_slot)
        blocks = self._table(layer, self._block_size * self._head_dim).index_select(0, pieces)
        return blocks.view(-1, self._head_dim)[:context]

    def _attend_selected(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Compute the attention of queries [T, heads, head_dim] to the selected tokens -> [T, heads * head_dim]."""
        out, starts = torch.empty_like(queries), self._batch.query_starts
        for number, hidden in enumerate(self._hidden):
            rows = slice(int(starts[number]), int(starts[number + 1]))
            keys, by_head = self._rows_of(layer, number), queries[rows].transpose(0, 1)[None]
            if hidden is None:
                hidden = torch.arange(len(keys)) >= self._visible_tokens(rows)
            mask = torch.zeros(hidden.shape, dtype=queries.dtype).masked_fill_(hidden, -torch.inf)
            expanded = keys.expand(1, self._num_heads, *keys.shape)
            attended, _ = _flash(by_head, expanded, expanded, attn_mask=mask, scale=self._scale)
            out[rows] = attended[0].transpose(0, 1)
        return out.flatten(1)

    def _attend_group(
        self, layer: int, queries: torch.Tensor, group: QueryGroup, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the attention of a group's queries [rows, heads, head_dim] -> [rows, heads * head_dim]."""
        rows = len(queries)
        grouped = queries.view(rows, self._kv_heads, -1, self._head_dim)
        # Queries are [S, kv_heads, heads per KV head, head_dim] for sequences of one row each, and [kv_heads, heads per
        # KV head, rows, head_dim] for one sequence: with the KV heads as batch, no key is copied per query head.
        one_sequence = rows > group.num_seqs
        if one_sequence:
            grouped = grouped.permute(1, 2, 0, 3)
        out, lse = self._attend_tile(layer, grouped, group.tiles[0], one_sequence)
        for tile in group.tiles[1:]:
            tile_out, tile_lse = self._attend_tile(layer, grouped, tile, one_sequence)
            # Weight the outputs of two softmaxes by their denominators.
            out = torch.lerp(out.float(), tile_out.float(), torch.sigmoid(tile_lse - lse)[..., None])
            lse = torch.logaddexp(lse, tile_lse)
        if sinks is not None:
            # A sink is merged like a further tile, with the value 0.
            sink = sinks.float().view(self._kv_heads, -1)
            share = torch.sigmoid(lse - (sink[..., None] if one_sequence else sink))
            out = out.float() * share[..., None]
        if one_sequence:
            out = out.permute(2, 0, 1, 3)
        return out.to(queries.dtype).reshape(rows, -1)

    def _attend_tile(
        self, layer: int, queries: torch.Tensor, tile: KeyTile, one_sequence: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of queries [a, b, c, head_dim] to one tile -> the same shape, and log-sum-exps of
        scores [a, b, c]."""
        seqs = 1 if one_sequence else len(queries)
        pieces = self._table(layer, self._block_size * self._head_dim).index_select(0, tile.pieces)
        pieces = pieces.view(self._planes, seqs, self._kv_heads, -1, self._head_dim)[:, :, :, tile.begin : tile.end]
        keys, values = pieces[0], pieces[-1]
        if self._softcap:
            return self._capped(queries, keys, values, tile)
        if not one_sequence:
            out, lse = _flash(queries, keys, values, attn_mask=tile.mask, scale=self._scale)
            return out, lse
        if tile.causal or tile.mask is not None:
            shape = (*queries.shape[:2], tile.end - tile.begin, self._head_dim)
            keys, values = keys[0][:, None].expand(shape), values[0][:, None].expand(shape)
            out, lse = _flash(queries, keys, values, is_causal=tile.causal, attn_mask=tile.mask, scale=self._scale)
            return out, lse
        # All rows see the same keys, so the query heads of a KV head can also be rows.
        stacked = queries.reshape(1, self._kv_heads, -1, self._head_dim)
        out, lse = _flash(stacked, keys, values, scale=self._scale)
        return out.view(queries.shape), lse.view(queries.shape[:-1])

    def _capped(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: KeyTile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention with a soft cap, which torch's kernels lack, by matrix products in float32.

        ``keys`` and ``values`` are [S, kv_heads, tokens, head_dim].
        """
        stacked = queries.reshape(len(keys), self._kv_heads, -1, self._head_dim).float()
        scores = stacked * (self._scale / self._softcap) @ keys.float().mT
        by_row = scores.tanh_().mul_(self._softcap).view(*queries.shape[:-1], -1)
        if tile.causal:
            by_row += torch.full(by_row.shape[-2:], -torch.inf).triu_(1)
        if tile.mask is not None:
            by_row += tile.mask
        lse = by_row.logsumexp(-1)
        probabilities = by_row.sub_(lse[..., None]).exp_().view(scores.shape)
        return (probabilities @ values.float()).view(queries.shape), lse


class MixedAttention:
    """Attention of one step over layers that differ in their KV heads: a :class:`StepAttention` per kind of layer."""

    def __init__(self, by_layer: Mapping[int, StepAttention]) -> None:
        """``by_layer``: the attention of each layer that has keys and values of its own."""
        self._by_layer = by_layer

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        self._by_layer[layer].write(layer, keys, values)

    def attend(
        self, layer: int, queries: torch.Tensor, window: int = 0, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._by_layer[layer].attend(layer, queries, window, sinks)


def _clear_partial_blocks(slots: torch.Tensor, block_size: int, batch: StepBatch, lengths: Int32) -> None:
    """Zero the blocks that the batch begins and does not fill; ``slots`` [slots, values] is the pool."""
    ends = batch.context_lens
    last = ends - ends % block_size
    begun = np.flatnonzero((ends > last) & (ends - lengths <= last))
    for slot in batch.block_tables[begun, last[begun] // block_size].tolist():
        slots[slot].zero_()
