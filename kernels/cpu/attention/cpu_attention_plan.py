"""The plan of a step's attention: its division into work items, each some query rows and a part of their context.

A step is planned once, for all layers. A query row is one head's query of one token. The rows of a KV head are numbered
token * group + head in the group, so the rows of a sequence are consecutive and share its keys and values. An *item* is
consecutive rows and partitions of their context; every KV head computes every item once
(:mod:`pillion.kernels.cpu.attention.cpu_attention`).

An item that would occupy one thread while others are idle is cut into several items with fewer partitions. These write
a partial result per partition, and a *merge* folds them in the order in which an uncut item folds its partitions. So
cutting does not change bits of results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pillion.kernels.step import Int32, StepBatch

Int64 = npt.NDArray[np.int64]

# Tokens per partition, the range of one softmax; partitions begin at multiples of this in the sequence.
PARTITION_TOKENS = 512
# Longest context with token selection: a row's scores must fit into a thread's scratch memory.
MAX_SELECTED_TOKENS = 196_608
# Target for the items per thread, if partitions are short enough.
ITEMS_PER_THREAD = 8
# Words of an item or a merge. SHIFT is a token's position minus its row in the batch; FIRST .. LAST - 1 are the
# partitions; PARTIAL is the row of the partials for the first partition's results, or -1 if nothing is cut.
SEQUENCE, ROW, ROWS, SHIFT, FIRST, LAST, PARTIAL = range(7)
ITEM_WORDS = 8


class RowCounts(NamedTuple):
    """Rows of an item.

    Attributes:
        narrow: max rows of an item of one token.
        wide: max rows of an item of several tokens.
        step: items of several tokens have a multiple of this number of rows, except a sequence's last one.
    """

    narrow: int
    wide: int
    step: int


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """The plan of a step: items [N, ITEM_WORDS], the longest first, and merges [M, ITEM_WORDS]."""

    items: Int32
    merges: Int32


class CpuAttentionPlanner:
    """Planner of the CPU kernels' attention in a model's steps."""

    def __init__(
        self, group: int, row_counts: RowCounts, kv_heads: int, threads: int, partial_rows: int, window: int = 0
    ) -> None:
        """Create a planner.

        Args:
            group: query heads of a KV head.
            row_counts: rows per item (:func:`pillion.kernels.cpu.attention.cpu_attention.row_counts`).
            kv_heads: KV heads, each of which computes all items.
            threads: threads of the pool that shares the items.
            partial_rows: allocated rows of partial results per KV head; items whose partials do not fit stay uncut.
            window: the longest sliding window of all layers; 0 if a layer has none.
        """
        self._group, self._kv_heads, self._threads = group, kv_heads, threads
        self._narrow, self._wide, self._step = row_counts
        self._partial_rows = partial_rows
        self._window = window

    def plan(self, batch: StepBatch) -> CpuAttentionPlan:
        """Return the plan for all rows of ``batch``. A sequence's positions must be consecutive, and no sequence
        empty."""
        single = len(batch.positions) == len(batch.context_lens) and self._group <= self._narrow
        items, tokens = self._single_rows(batch) if single else self._rows(batch)
        max_tokens = int(tokens.sum()) * self._kv_heads // (self._threads * ITEMS_PER_THREAD)
        max_partitions = max(1, max_tokens // PARTITION_TOKENS)
        merges = items[:0]
        if int(tokens.max()) > max_tokens and int((items[:, LAST] - items[:, FIRST]).max()) > max_partitions:
            items, tokens, merges = self._cut(items, tokens, max_partitions)
        order = np.argsort(-tokens, kind="stable")
        return CpuAttentionPlan(items[order], merges)

    def _single_rows(self, batch: StepBatch) -> tuple[Int32, Int64]:
        """Return the result of :meth:`_rows` for a batch with one token, and so one item, per sequence."""
        limits = batch.context_lens.astype(np.int64)
        sequences = np.arange(len(limits), dtype=np.int32)
        items = np.zeros((len(limits), ITEM_WORDS), np.int32)
        items[:, SEQUENCE], items[:, ROW], items[:, ROWS] = sequences, sequences * self._group, self._group
        items[:, SHIFT] = batch.positions - sequences
        items[:, LAST] = (limits + (PARTITION_TOKENS - 1)) // PARTITION_TOKENS
        items[:, PARTIAL] = -1
        if not self._window:
            return items, limits
        lowest = np.maximum(limits - self._window, 0)
        items[:, FIRST] = lowest // PARTITION_TOKENS
        return items, limits - lowest

    def _rows(self, batch: StepBatch) -> tuple[Int32, Int64]:
        """Return the uncut items, and the number of tokens in the context of each."""
        starts = batch.query_starts.astype(np.int64)
        begins, counts = starts[:-1], np.diff(starts)
        shifts = batch.context_lens - starts[1:]
        sizes = np.where(counts == 1, self._narrow, self._wide_rows(len(batch.positions) * self._group))
        item_counts = -(-counts * self._group // sizes)
        if int(item_counts.max()) > 1:
            sequences = np.repeat(np.arange(len(item_counts)), item_counts)
            inside = np.arange(len(sequences)) - np.repeat(np.cumsum(item_counts) - item_counts, item_counts)
            rows = begins[sequences] * self._group + inside * sizes[sequences]
            ends = np.minimum(rows + sizes[sequences], starts[sequences + 1] * self._group)
            shifts = shifts[sequences]
        else:
            sequences, rows, ends = np.arange(len(item_counts)), begins * self._group, starts[1:] * self._group
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

    def _wide_rows(self, rows: int) -> int:
        """Return the rows per item of several tokens that minimize the threads' time, for ``rows`` rows in total."""

        def time_of(size: int) -> int:
            items = -(-rows // size) * self._kv_heads
            # The work that an item's rows share costs as much as 12 rows.
            return -(-items // self._threads) * (size + 12)

        return min(range(self._step, self._wide + 1, self._step), key=time_of)

    def _cut(self, items: Int32, tokens: Int64, max_partitions: int) -> tuple[Int32, Int64, Int32]:
        """Cut items of more than ``max_partitions`` partitions, the longest first, while partials are left.
        Return all items, the tokens of each, and the merges."""
        order = np.flatnonzero(items[:, LAST] - items[:, FIRST] > max_partitions)
        order = order[np.argsort(-tokens[order], kind="stable")]
        merges = items[order]
        partitions = merges[:, LAST] - merges[:, FIRST]
        sizes = partitions * merges[:, ROWS]
        ends = sizes.cumsum()
        fitting = int(ends.searchsorted(self._partial_rows, "right"))
        if not fitting:
            return items, tokens, merges[:0]
        merges[:, PARTIAL] = ends - sizes
        merges = merges[:fitting]
        counts = -(-partitions[:fitting] // max_partitions)
        cut = merges.repeat(counts, axis=0)
        shifts = (np.arange(len(cut)) - (counts.cumsum() - counts).repeat(counts)) * max_partitions
        begins = cut[:, FIRST] + shifts
        cut[:, FIRST] = begins
        cut[:, LAST] = np.minimum(begins + max_partitions, cut[:, LAST])
        cut[:, PARTIAL] += shifts * cut[:, ROWS]
        # The context of an item's last row may end before the end of its last partition.
        limits = (cut[:, ROW] + cut[:, ROWS] - 1) // self._group + cut[:, SHIFT] + 1
        lengths = np.minimum(cut[:, LAST] * PARTITION_TOKENS, limits) - begins * PARTITION_TOKENS
        whole = np.ones(len(items), bool)
        whole[order[:fitting]] = False
        return np.concatenate((items[whole], cut)), np.concatenate((tokens[whole], lengths)), merges
