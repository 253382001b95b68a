"""The plan of a step's attention covers everything once, the longest items first, and threads end together."""

from __future__ import annotations

import heapq
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.kernels.cpu.attention.attention_tiles import MAX_STRIPS, STRIP_ROWS
from pillion.kernels.cpu.attention.cpu_attention import row_counts
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
    CpuAttentionPlanner,
    RowCounts,
)
from pillion.kernels.cpu.language.isa import TABLE
from tests.support.examples import examples

COUNTS = RowCounts(3, 12, 12)
GROUP = 3


def batch_of(*parts):
    """Sequences of (earlier tokens, tokens of this step)."""
    before, now = np.array(parts, np.int32).T
    starts = np.concatenate(([0], np.cumsum(now))).astype(np.int32)
    positions = np.concatenate([np.arange(a, a + n) for a, n in parts]).astype(np.int32)
    tables = np.zeros((len(parts), 1), np.int32)
    return SimpleNamespace(
        positions=positions, query_starts=starts, context_lens=(before + now).astype(np.int32), block_tables=tables
    )


def plan_of(batch, *, group=GROUP, counts=COUNTS, kv_heads=2, threads=2, partial_rows=512, window=0):
    return CpuAttentionPlanner(group, counts, kv_heads, threads, partial_rows, window).plan(batch)


def tokens_of(item, group=GROUP):
    """The number of tokens that the item's rows see, up to the last row's position."""
    behind = (item[ROW] + item[ROWS] - 1) // group + item[SHIFT] + 1
    return min(behind, item[LAST] * PARTITION_TOKENS) - item[FIRST] * PARTITION_TOKENS


PARTS = st.lists(st.tuples(st.integers(0, 9000), st.one_of(st.just(1), st.integers(1, 200))), min_size=1, max_size=12)


@settings(max_examples=examples(80))
@given(
    PARTS,
    st.sampled_from([(1, (1, 12, 12)), (3, (3, 12, 12)), (16, (16, 16, 16)), (30, (10, 12, 12)), (3, (3, 96, 32))]),
    st.sampled_from([1, 2, 3, 64]),
    st.sampled_from([0, 100, 5000]),
    st.sampled_from([0, 1, 700]),
)
def test_every_key_is_seen_once(parts, sizes, threads, partial_rows, window):
    group, counts = sizes
    batch = batch_of(*parts)
    plan = plan_of(batch, group=group, counts=counts, threads=threads, partial_rows=partial_rows, window=window)
    assert plan.items.dtype == plan.merges.dtype == np.int32
    assert plan.items.shape[1] == plan.merges.shape[1] == ITEM_WORDS
    assert plan.items.flags.c_contiguous
    met = Counter()
    for item in plan.items.tolist():
        sequence, begin = item[SEQUENCE], item[ROW]
        assert 1 <= item[ROWS] <= max(counts)
        first, behind = batch.query_starts[sequence : sequence + 2]
        assert first * group <= begin
        assert begin + item[ROWS] <= behind * group
        assert item[SHIFT] == batch.positions[first] - first
        assert item[FIRST] < item[LAST]
        for row in range(begin, begin + item[ROWS]):
            met.update((row, partition) for partition in range(item[FIRST], item[LAST]))
    assert set(met.values()) == {1}
    for row in range(len(batch.positions) * group):
        position = int(batch.positions[row // group])
        lowest = max(0, position - window + 1) if window else 0
        for partition in range(lowest // PARTITION_TOKENS, position // PARTITION_TOKENS + 1):
            assert (row, partition) in met


@settings(max_examples=examples(60))
@given(PARTS, st.sampled_from([1, 2, 8, 64]), st.sampled_from([0, 40, 5000]), st.sampled_from([0, 2500]))
def test_partials_are_written_once_and_merged(parts, threads, partial_rows, window):
    plan = plan_of(batch_of(*parts), threads=threads, partial_rows=partial_rows, window=window)
    cut = [item for item in plan.items.tolist() if item[PARTIAL] >= 0]
    written = {}
    for item in cut:
        for partition in range(item[FIRST], item[LAST]):
            for row in range(item[ROWS]):
                place = item[PARTIAL] + (partition - item[FIRST]) * item[ROWS] + row
                assert place < partial_rows
                assert place not in written
                written[place] = (item[ROW] + row, partition)
    folded = {}
    for merge in plan.merges.tolist():
        assert sum(item[SEQUENCE : SHIFT + 1] == merge[SEQUENCE : SHIFT + 1] for item in cut) > 1
        for partition in range(merge[FIRST], merge[LAST]):
            for row in range(merge[ROWS]):
                place = merge[PARTIAL] + (partition - merge[FIRST]) * merge[ROWS] + row
                folded[place] = (merge[ROW] + row, partition)
    assert folded == written


@settings(max_examples=examples(60))
@given(PARTS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 3, 8]))
def test_work_is_balanced_over_threads(parts, threads, kv_heads):
    """Each thread draws the next item when it has finished one; none ends later than a fair share plus one item."""
    plan = plan_of(batch_of(*parts), threads=threads, kv_heads=kv_heads, partial_rows=10**6)
    costs = [tokens_of(item) for item in plan.items.tolist()]
    assert costs == sorted(costs, reverse=True)
    ends = [0] * threads
    for cost in costs * kv_heads:
        heapq.heapreplace(ends, ends[0] + cost)
    fair = sum(costs) * kv_heads / threads
    assert max(ends) <= fair + max(PARTITION_TOKENS, fair / 8)


def test_one_long_sequence_is_cut():
    plan = plan_of(batch_of((8191, 1)))
    assert len(plan.merges) == 1
    assert len(plan.items) == 8
    assert (plan.items[:, LAST] - plan.items[:, FIRST]).tolist() == [2] * 8


def test_many_sequences_are_not_cut():
    plan = plan_of(batch_of(*[(2000, 1)] * 64))
    assert len(plan.items) == 64
    assert not len(plan.merges)
    assert (plan.items[:, PARTIAL] == -1).all()


def test_the_longest_sequences_are_cut_while_partials_suffice():
    plan = plan_of(batch_of((2047, 1), (8191, 1), (4095, 1)), threads=16, partial_rows=16 * GROUP + 8 * GROUP)
    assert plan.merges[:, SEQUENCE].tolist() == [1, 2]
    assert plan.merges[:, PARTIAL].tolist() == [0, 16 * GROUP]


def test_rows_of_several_tokens_share_items():
    plan = plan_of(batch_of((100, 6), (5, 1)))
    rows = plan.items[np.argsort(plan.items[:, ROW])]
    assert rows[:, ROWS].tolist() == [12, 6, 3]
    assert rows[:, SHIFT].tolist() == [100, 100, -1]


@pytest.mark.parametrize("isa", TABLE, ids=lambda isa: isa.name)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 30, 71])
@pytest.mark.parametrize("bf16", [False, True])
def test_rows_are_spread_evenly_over_items(isa, group, bf16):
    narrow, wide, step = row_counts(isa, group, bf16)
    assert narrow <= wide
    if isa.matrix_tiles and bf16:
        assert (wide, step) == (MAX_STRIPS * STRIP_ROWS, STRIP_ROWS)
    else:
        assert isa.attention_rows <= wide <= max(isa.attention_rows, isa.attention_sums)
    items = -(-group // narrow)
    # As even as possible: one row less would need more items.
    assert -(-group // items) == narrow
