"""Plans of paged attention: every row sees each of its keys once, and programs have equal shares."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import Internal
from pillion.kernels.gpu.attention.gpu_attention_plan import (
    BEGIN,
    END,
    HEAD,
    ITEM_WORDS,
    PARTIAL,
    PARTS,
    ROW,
    ROWS,
    SHIFT,
    TABLE,
    GpuAttentionPlanner,
    Tiling,
)
from tests.support.examples import examples

BLOCK_SIZE = 16
KEYS = 8
TILINGS = st.builds(
    Tiling,
    rows=st.sampled_from([4, 16]),
    keys=st.just(KEYS),
    programs=st.integers(1, 24),
    unit_tiles=st.integers(0, 3),
)
# Cut anywhere, or in parts of a fixed number of keys.
CUT = TILINGS | st.builds(replace, TILINGS, part_keys=st.sampled_from([KEYS, 3 * KEYS]))
PARTS_OF_BATCH = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), min_size=1, max_size=5)


def batch_of(parts):
    lengths = [now for _, now in parts]
    contexts = np.array([before + now for before, now in parts], np.int32)
    blocks = -(-contexts // BLOCK_SIZE)
    tables = np.zeros((len(parts), int(blocks.max()) + 1), np.int32)
    for row, count in zip(tables, blocks, strict=True):
        row[:count] = np.random.default_rng(int(count)).integers(1, 1000, count)
    return SimpleNamespace(
        query_starts=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        context_lens=contexts,
        block_tables=tables,
    )


def planner_of(batch, kv_heads, group, decode, chunk, windows, **more):
    limits = {
        "max_tokens": max(1, int(batch.query_starts[-1])),
        "max_seqs": len(batch.context_lens),
        "max_context_blocks": batch.block_tables.shape[1],
        **more,
    }
    return GpuAttentionPlanner(
        kv_heads=kv_heads, group=group, block_size=BLOCK_SIZE, decode=decode, chunk=chunk, windows=windows, **limits
    )


def items_of(record, planner, window, chunk):
    """List the items of each program."""
    programs = (planner.chunk if chunk else planner.decode).programs
    at = planner.starts_at(window, chunk)
    starts = record[at : at + programs + 1]
    return [record[begin:end].reshape(-1, ITEM_WORDS) for begin, end in pairwise(starts)]


def merges_of(record, planner, window, chunk):
    count, begin = record[planner.counts_at(window, chunk) :][:2]
    return record[begin : begin + count * ITEM_WORDS].reshape(-1, ITEM_WORDS)


def owner_of(record, planner, window, chunk, partial):
    """Return the merge of a partial result in the record."""
    count, begin = record[planner.counts_at(window, chunk) :][:2]
    rows = (planner.chunk if chunk else planner.decode).rows
    at = record[begin + count * ITEM_WORDS + (partial - planner.first_partial(chunk)) // rows]
    return record[at : at + ITEM_WORDS]


@given(
    parts=PARTS_OF_BATCH,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    decode=CUT,
    chunk=CUT,
    windows=st.sampled_from([(0,), (0, 5), (30, 1), (0, -5), (-30, -1)]),
)
@settings(max_examples=examples(150))
def test_every_row_sees_each_of_its_keys_once(parts, kv_heads, group, decode, chunk, windows):
    batch = batch_of(parts)
    planner = planner_of(batch, kv_heads, group, decode, chunk, windows)
    plan = planner.plan(batch)
    record = plan.record
    assert record.dtype == np.int32
    assert len(record) <= planner.max_record_words
    assert np.array_equal(record, planner.plan(batch).record)
    for window in windows:
        met = Counter()
        partials = set()
        for is_chunk, tiling in ((False, decode), (True, chunk)):
            programs = items_of(record, planner, window, is_chunk)
            assert plan.with_chunks or not is_chunk or not any(len(items) for items in programs)
            components_of = {}
            for item in np.concatenate(programs):
                assert item[BEGIN] % KEYS == 0
                if tiling.part_keys and item[PARTIAL] >= 0:
                    assert item[END] <= (item[BEGIN] // tiling.part_keys + 1) * tiling.part_keys
                assert 0 < item[ROWS] <= tiling.rows
                lowest = lowest_key(item[ROW] // group + item[SHIFT], window)
                assert item[BEGIN] >= lowest // KEYS * KEYS
                for row in range(item[ROW], item[ROW] + item[ROWS]):
                    position = row // group + item[SHIFT]
                    for key in range(item[BEGIN], min(item[END], position + 1)):
                        if key >= lowest_key(position, window):
                            slot = record[item[TABLE] + key // BLOCK_SIZE]
                            met[int(row), int(item[HEAD]), int(key), int(slot)] += 1
                if item[PARTIAL] >= 0:
                    unit = tuple(item[[ROW, ROWS, HEAD]].tolist())
                    components_of.setdefault(unit, []).append(int(item[PARTIAL]))
                    rows = range(item[PARTIAL], item[PARTIAL] + tiling.rows)
                    assert partials.isdisjoint(rows)
                    assert rows.stop <= planner.own_at(False)
                    partials.update(rows)
            merges = merges_of(record, planner, window, is_chunk)
            assert len(merges) == len(components_of) <= tiling.max_merges
            for merge in merges:
                found = sorted(components_of.pop(tuple(merge[[ROW, ROWS, HEAD]].tolist())))
                for partial in found:
                    assert np.array_equal(owner_of(record, planner, window, is_chunk, partial), merge)
                assert found == [merge[PARTIAL] + part * tiling.rows for part in range(merge[PARTS])]
        assert met == wanted(batch, kv_heads, group, window)


def lowest_key(position, window):
    """Return the first key that a row at a position sees."""
    if not window:
        return 0
    return position // -window * -window if window < 0 else max(0, position - window + 1)


def wanted(batch, kv_heads, group, window):
    """List the keys that :func:`lab.testbed.attention_reference.paged_attention` reads."""
    found = Counter()
    for sequence, context in enumerate(batch.context_lens.tolist()):
        begin, end = batch.query_starts[sequence : sequence + 2].tolist()
        for token in range(begin, end):
            position = context - end + token
            for key in range(lowest_key(position, window), position + 1):
                slot = int(batch.block_tables[sequence, key // BLOCK_SIZE])
                for head in range(kv_heads):
                    for row in range(token * group, (token + 1) * group):
                        found[row, head, key, slot] += 1
    return found


@given(parts=PARTS_OF_BATCH, kv_heads=st.integers(1, 3), decode=TILINGS, chunk=TILINGS, window=st.sampled_from([0, 20]))
@settings(max_examples=examples(150))
def test_programs_have_equal_shares(parts, kv_heads, decode, chunk, window):
    batch = batch_of(parts)
    planner = planner_of(batch, kv_heads, 2, decode, chunk, (window,))
    record = planner.plan(batch).record
    for is_chunk, tiling in ((False, decode), (True, chunk)):
        begun = set()
        loads = []
        for items in items_of(record, planner, window, is_chunk):
            tiles = -(-items[:, END] // KEYS) - items[:, BEGIN] // KEYS
            units = {(row, head) for row, head in items[:, [ROW, HEAD]].tolist()} - begun
            begun |= units
            loads.append(int(tiles.sum()) + tiling.unit_tiles * len(units))
            # The rest of a unit that another program began comes last.
            continued = [(row, head) not in units for row, head in items[:, [ROW, HEAD]].tolist()]
            assert continued == sorted(continued)
        mean = sum(loads) / tiling.programs
        assert all(abs(load - mean) < 1 + tiling.unit_tiles for load in loads)


def test_a_chunk_changes_nothing_for_decodes():
    decode, chunk = Tiling(4, KEYS, 8), Tiling(16, KEYS, 4)
    alone, mixed = batch_of([(80, 1), (33, 1)]), batch_of([(80, 1), (33, 1), (10, 60)])
    planner = planner_of(mixed, 2, 4, decode, chunk, (0,))
    found = [items_of(planner.plan(batch).record, planner, 0, False) for batch in (alone, mixed)]
    for one, other in zip(*found, strict=True):
        assert np.array_equal(np.delete(one, TABLE, 1), np.delete(other, TABLE, 1))


def test_a_batch_beyond_the_limits_is_refused():
    batch = batch_of([(80, 1)] * 40)
    planner = planner_of(batch, 2, 4, Tiling(4, KEYS, 2), Tiling(16, KEYS, 2), (0,), max_seqs=2)
    with pytest.raises(Internal):
        planner.plan(batch)


@pytest.mark.parametrize("parts", [[(0, 65_536)], [(60_000, 32_000), *[(500, 1)] * 64, *[(0, 1000)] * 33, (0, 472)]])
def test_the_largest_step_has_a_plan(parts):
    """Steps of 65,536 tokens, of Llama 3 8B's heads and an H100's programs, stay within the reserved sizes."""
    batch = batch_of(parts)
    assert batch.query_starts[-1] == 65_536
    decode, chunk = Tiling(rows=16, keys=64, programs=264), Tiling(rows=128, keys=64, programs=132)
    planner = planner_of(batch, 8, 4, decode, chunk, (0,), max_context_blocks=131_072 // BLOCK_SIZE)
    record = planner.plan(batch).record
    tokens = 0
    for is_chunk in (False, True):
        items = np.concatenate(items_of(record, planner, 0, is_chunk)).astype(np.int64)
        begun = items[(items[:, BEGIN] == 0) & (items[:, HEAD] == 0)]
        tokens += begun[:, ROWS].sum() // 4
    assert tokens == 65_536
