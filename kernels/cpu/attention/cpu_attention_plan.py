"""Which query rows meet which part of their context in one piece of work: planned once per step, for all layers.

A query row is one head's query of one token. The rows of a KV head are numbered token * group + head in the group, so
the rows of a sequence follow each other and share its keys and values. An *item* is a few such rows and the partitions
of the context that they meet; every KV head takes every item once (:mod:`pillion.kernels.cpu.attention.cpu_attention`).

Where one item would keep a thread busy while the others have nothing left, its partitions are cut into several items.
These leave a partial result for every partition, and a *merge* folds those. The fold is the one that an uncut item
does from partition to partition, so cutting changes no bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pillion.kernels.torch.reference import Int32, RaggedBatch

Int64 = npt.NDArray[np.int64]

# A softmax is taken over this many tokens, which begin at a multiple of it in the sequence; partitions are folded.
PARTITION_TOKENS = 512
# No item is longer than this share of what one thread has to do, if partitions are short enough.
ITEMS_PER_THREAD = 8
# Words of an item or a merge, by place. SHIFT is what makes a token's position of its place in the batch;
# FIRST .. LAST are partitions; PARTIAL is the row of the partials where the first one's go, or -1: no partials.
SEQUENCE, ROW, ROWS, SHIFT, FIRST, LAST, PARTIAL = range(7)
ITEM_WORDS = 8


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What a step's record holds: items [N, ITEM_WORDS], the longest first, and merges [M, ITEM_WORDS]."""

    items: Int32
    merges: Int32


class AttentionPlanner:
    """Plans the steps of a model."""

    def __init__(
        self, group: int, row_counts: tuple[int, int], kv_heads: int, threads: int, partial_rows: int, window: int = 0
    ) -> None:
        """Raises nothing.

        Args:
            group: query heads of a KV head.
            row_counts: most rows of an item for one token and for several
            (``pillion.kernels.cpu.attention.cpu_attention.row_counts``).
            kv_heads: KV heads, each of which takes all items.
            threads: of the team.
            partial_rows: rows of the partials of a KV head; what does not fit stays uncut.
            window: the longest sliding window of all layers; 0 if a layer has none.
        """
        self._group, self._kv_heads, self._threads = group, kv_heads, threads
        self._narrow, self._wide = row_counts
        self._partial_rows = partial_rows
        self._window = window

    def plan(self, batch: RaggedBatch) -> AttentionPlan:
        """All rows of ``batch``, which has positions that follow each other in a sequence, and no empty sequence."""
        single = len(batch.positions) == len(batch.context_lens) and self._group <= self._narrow
        items, tokens = self._single_rows(batch) if single else self._rows(batch)
        most = int(tokens.sum()) * self._kv_heads // (self._threads * ITEMS_PER_THREAD)
        span = max(1, most // PARTITION_TOKENS)
        merges = items[:0]
        if int(tokens.max()) > most and int((items[:, LAST] - items[:, FIRST]).max()) > span:
            items, tokens, merges = self._cut(items, tokens, span)
        order = np.argsort(-tokens, kind="stable")
        return AttentionPlan(items[order], merges)

    def _single_rows(self, batch: RaggedBatch) -> tuple[Int32, Int64]:
        """:meth:`_rows` of one token of each sequence: an item each."""
        limits = batch.context_lens.astype(np.int64)
        each = np.arange(len(limits), dtype=np.int32)
        items = np.zeros((len(limits), ITEM_WORDS), np.int32)
        items[:, SEQUENCE], items[:, ROW], items[:, ROWS] = each, each * self._group, self._group
        items[:, SHIFT] = batch.positions - each
        items[:, LAST] = (limits + (PARTITION_TOKENS - 1)) // PARTITION_TOKENS
        items[:, PARTIAL] = -1
        if not self._window:
            return items, limits
        lowest = np.maximum(limits - self._window, 0)
        items[:, FIRST] = lowest // PARTITION_TOKENS
        return items, limits - lowest

    def _rows(self, batch: RaggedBatch) -> tuple[Int32, Int64]:
        """Uncut items, and how many tokens each one meets."""
        starts = batch.query_starts.astype(np.int64)
        begins, counts = starts[:-1], np.diff(starts)
        shifts = batch.context_lens - starts[1:]
        sizes = np.where(counts == 1, self._narrow, self._wide)
        parts = -(-counts * self._group // sizes)
        if int(parts.max()) > 1:
            sequences = np.repeat(np.arange(len(parts)), parts)
            inside = np.arange(len(sequences)) - np.repeat(np.cumsum(parts) - parts, parts)
            rows = begins[sequences] * self._group + inside * sizes[sequences]
            ends = np.minimum(rows + sizes[sequences], starts[sequences + 1] * self._group)
            shifts = shifts[sequences]
        else:
            sequences, rows, ends = np.arange(len(parts)), begins * self._group, starts[1:] * self._group
        limits = (ends - 1) // self._group + shifts + 1
        items = np.zeros((len(rows), ITEM_WORDS), np.int32)
        items[:, SEQUENCE], items[:, ROW], items[:, ROWS], items[:, SHIFT] = sequences, rows, ends - rows, shifts
        items[:, LAST] = -(-limits // PARTITION_TOKENS)
        items[:, PARTIAL] = -1
        if not self._window:
            return items, limits
        lowest = np.maximum(rows // self._group + shifts + 1 - self._window, 0)
        items[:, FIRST] = lowest // PARTITION_TOKENS
        return items, limits - lowest

    def _cut(self, items: Int32, tokens: Int64, span: int) -> tuple[Int32, Int64, Int32]:
        """Items of more than ``span`` partitions become several, the longest ones first while partials last."""
        order = np.flatnonzero(items[:, LAST] - items[:, FIRST] > span)
        order = order[np.argsort(-tokens[order], kind="stable")]
        merges = items[order]
        partitions = merges[:, LAST] - merges[:, FIRST]
        sizes = partitions * merges[:, ROWS]
        ends = sizes.cumsum()
        fitting = int(ends.searchsorted(self._partial_rows, "right"))
        if not fitting:
            return items, tokens, merges[:0]
        merges[:, PARTIAL] = ends - sizes
        merges, taken = merges[:fitting], order[:fitting]
        parts = -(-partitions[:fitting] // span)
        pieces = merges.repeat(parts, axis=0)
        shifts = (np.arange(len(pieces)) - (parts.cumsum() - parts).repeat(parts)) * span
        begins = pieces[:, FIRST] + shifts
        pieces[:, FIRST] = begins
        pieces[:, LAST] = np.minimum(begins + span, pieces[:, LAST])
        pieces[:, PARTIAL] += shifts * pieces[:, ROWS]
        # The last row's context ends somewhere in the last partition.
        limits = (pieces[:, ROW] + pieces[:, ROWS] - 1) // self._group + pieces[:, SHIFT] + 1
        lengths = np.minimum(pieces[:, LAST] * PARTITION_TOKENS, limits) - begins * PARTITION_TOKENS
        whole = np.ones(len(items), bool)
        whole[taken] = False
        return np.concatenate((items[whole], pieces)), np.concatenate((tokens[whole], lengths)), merges
