"""Torch's attention by tiles against the reference, and the reference against a dense softmax."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.testbed.attention_reference import paged_attention
from pillion.kernels.torch import attention_tiles as attention_plan
from pillion.kernels.torch.torch_attention import StepAttention
from tests.support.batches import Sequences
from tests.support.covering import each_value
from tests.support.examples import examples
from tests.support.plain_pools import write_kv

LAYERS = 2
STALE = (torch.nan, torch.inf, -torch.inf)

# Each sequence: (tokens already there, tokens of this step); a context of up to a dozen blocks.
PARTS = st.lists(st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=6)
MIXED = [(50, 1), (3, 1), (200, 1), (0, 30), (64, 16), (97, 33)]


def filled(parts, block_size, kv_heads, head_dim, dtype, seed=0):
    """A pool with the sequences' earlier tokens in it, NaN and infinities elsewhere, and the batch of this step."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    slots = sum(-(-(before + now) // block_size) for before, now in parts) + 2
    shape = (slots, LAYERS, 2, kv_heads, block_size, head_dim)
    pool = torch.tensor(STALE, dtype=dtype)[torch.randint(0, len(STALE), shape, generator=generator)]
    sequences = Sequences(slots, block_size, seed)
    numbers = sequences.add(len(parts))
    # A few tokens at a time: a block is begun, and then filled, in different steps, as in a decode.
    for number, (before, _) in zip(numbers, parts, strict=True):
        for first in range(0, before, 7):
            batch = sequences.step([(number, [0] * min(7, before - first))])
            attention = StepAttention(pool, batch, num_heads=kv_heads, scale=1.0)
            for layer in range(LAYERS):
                count = batch.num_tokens
                attention.write(layer, random(count, kv_heads, head_dim), random(count, kv_heads, head_dim))
    batch = sequences.step([(n, [0] * now) for n, (_, now) in zip(numbers, parts, strict=True)], extra_blocks=1)
    return pool, batch, random


def compare(
    parts,
    *,
    block_size=16,
    kv_heads=2,
    group=2,
    head_dim=16,
    window=0,
    softcap=0.0,
    tile=0,
    dtype=torch.float32,
    sinks=False,
    chunked=False,
):
    pool, batch, random = filled(parts, block_size, kv_heads, head_dim, dtype)
    total, heads, scale = batch.num_tokens, kv_heads * group, head_dim**-0.5
    attention = StepAttention(
        pool,
        batch,
        num_heads=heads,
        scale=scale,
        windows=(0, window),
        chunked=chunked,
        softcap=softcap,
        tile_tokens=tile,
    )
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for layer in range(LAYERS):
        keys, values = random(total, kv_heads, head_dim), random(total, kv_heads, head_dim)
        # Twice the usual scores, so that a soft cap of a few bends them.
        queries = random(total, heads, head_dim) * 2
        attention.write(layer, keys, values)
        mine = pool.clone()
        write_kv(pool, layer, batch, keys, values)
        assert torch.equal(mine.nan_to_num(7.0), pool.nan_to_num(7.0))
        scores = random(heads).float() * 3 if sinks else None
        got = attention.attend(layer, queries, window, scores)
        options = {"window": window, "chunked": chunked, "softcap": softcap, "sinks": scores}
        wanted = paged_attention(queries, pool, layer, batch, scale=scale, **options)
        torch.testing.assert_close(got.view(wanted.shape), wanted, atol=tolerance, rtol=tolerance)


@settings(max_examples=examples(120))
@given(
    parts=PARTS,
    block_size=st.sampled_from([1, 3, 16, 32]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([8, 24]),
    window=st.sampled_from([0, 1, 5, 40]),
    softcap=st.sampled_from([0.0, 0.0, 1.5]),
    tile=st.sampled_from([0, 3, 8, 21, 64]),
    gather_bytes=st.sampled_from([1, 20_000, 2**24]),
    sinks=st.booleans(),
    chunked=st.booleans(),
)
def test_ragged_batches_equal_the_reference(
    parts, block_size, kv_heads, group, head_dim, window, softcap, tile, gather_bytes, sinks, chunked
):
    with mock.patch.object(attention_plan, "GATHER_BYTES", gather_bytes):
        compare(
            parts,
            block_size=block_size,
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            window=window,
            softcap=softcap,
            tile=tile,
            sinks=sinks,
            chunked=chunked,
        )


HEADS = ((64, 96, 128, 256), ("float32", "bfloat16"), ((0, 0.0), (24, 0.0), (24, 3.0)))
SHORT = each_value(list(itertools.product(*HEADS)), tuple)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "tile", "softcap"),
    [
        pytest.param(size, dtype, *tile, marks=() if (size, dtype, tile) in SHORT else pytest.mark.long)
        for size, dtype, tile in itertools.product(*HEADS)
    ],
)
def test_head_sizes(head_dim, dtype, tile, softcap):
    dtype = getattr(torch, dtype)
    compare(MIXED, group=3, head_dim=head_dim, window=20, softcap=softcap, tile=tile, dtype=dtype, block_size=32)
    compare(MIXED, group=1, head_dim=head_dim, softcap=softcap, tile=tile, dtype=dtype)


@pytest.mark.parametrize("tile", [0, 100])
def test_decodes_of_very_different_length_share_a_batch(tile):
    compare([(1, 1), (900, 1), (30, 1), (450, 1), (0, 1), (899, 1)], tile=tile)


def test_a_large_head_count_takes_smaller_tiles():
    """Wide keys and values lower the tile, so that a call's gather stays small; down to a least tile."""
    choose = attention_plan.choose_tile_tokens
    assert choose(768, capped=False) == attention_plan.ATTENTION_TILE_TOKENS
    assert choose(768, capped=True) == attention_plan.CAPPED_TILE_TOKENS
    assert choose(16_384, capped=False) == 1024
    assert choose(2**20, capped=False) == attention_plan.MIN_TILE_TOKENS


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation makes; views of the pool do not count."""

    def __init__(self, pool):
        super().__init__()
        self._pool = pool.untyped_storage().data_ptr()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() != self._pool:
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 50])
def test_memory_of_a_step_does_not_grow_with_the_context(window, softcap):
    def largest(before):
        parts = [(before, 24), (before, 1), (before - 5, 1), (3, 1), (2, 1)]
        pool, batch, random = filled(parts, 16, 2, 8, torch.float32)
        tokens = batch.num_tokens
        with Largest(pool) as seen:
            attention = StepAttention(
                pool, batch, num_heads=4, scale=1.0, windows=(window,), softcap=softcap, tile_tokens=32
            )
            attention.write(0, random(tokens, 2, 8), random(tokens, 2, 8))
            attention.attend(0, random(tokens, 4, 8), window)
        return seen.bytes

    assert largest(800) == largest(200)


@settings(max_examples=examples(100))
@given(
    parts=PARTS,
    block_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([0, 1, 7, 40]),
    tile=st.sampled_from([4, 9, 30]),
    gather_blocks=st.sampled_from([1, 4, 1000]),
)
def test_a_plan_covers_exactly_the_visible_keys(parts, block_size, window, tile, gather_blocks):
    """Every pair of query and visible key is planned once. No tile exceeds the bound, each query sees a key in each of
    its tiles, and a call gathers only tokens that one of its queries sees.
    """
    shape = torch.Size((1, 1, 2, 1, block_size, 8))
    block_bytes = 2 * block_size * 8 * 4
    slots = sum(-(-(before + now) // block_size) for before, now in parts) + 2
    sequences = Sequences(slots, block_size)
    numbers = sequences.add(len(parts))
    for number, (before, _) in zip(numbers, parts, strict=True):
        if before:
            sequences.step([(number, [0] * before)])
    batch = sequences.step([(n, [0] * now) for n, (_, now) in zip(numbers, parts, strict=True)])
    lengths = batch.query_starts[1:] - batch.query_starts[:-1]
    with mock.patch.object(attention_plan, "GATHER_BYTES", gather_blocks * block_bytes):
        planned = attention_plan.TilePlanner(shape, torch.float32, batch, lengths, tile).plan(window)
    seen = torch.zeros(batch.num_tokens, dtype=torch.int64)
    for group in planned:
        rows = torch.arange(batch.num_tokens)[group.rows]
        for part in group.tiles:
            tokens = part.end - part.begin
            blocks = len(part.pieces) // (2 * group.num_seqs)
            assert tokens <= tile or group.num_seqs > 1
            assert group.num_seqs == 1 or group.num_seqs * blocks <= gather_blocks
            assert blocks <= -(-tile // block_size) + 1
            assert 0 <= part.begin < part.end <= blocks * block_size
            visible = torch.ones(len(rows), tokens, dtype=torch.bool)
            if part.causal:
                visible = visible.tril()
            elif part.mask is not None:
                visible = (part.mask == 0).view(len(rows), tokens)
            assert visible.any(1).all()
            assert visible.any(0).all() or group.num_seqs > 1
            seen[rows] += visible.sum(1)
    wanted = torch.from_numpy(batch.positions).long() + 1
    assert torch.equal(seen, wanted.clamp(max=window) if window else wanted)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("window", [0, 4])
def test_reference_equals_a_dense_softmax(window, softcap):
    parts = [(10, 5), (0, 9), (20, 1)]
    pool, batch, random = filled(parts, 4, 2, 8, torch.float32)
    keys, values = random(batch.num_tokens, 2, 8), random(batch.num_tokens, 2, 8)
    queries = random(batch.num_tokens, 6, 8)
    write_kv(pool, 1, batch, keys, values)
    got = paged_attention(queries, pool, 1, batch, scale=0.3, window=window, softcap=softcap)
    for sequence, (before, now) in enumerate(parts):
        table = batch.block_tables[sequence]
        rows = [pool[int(table[p // 4]), 1, :, :, p % 4] for p in range(before + now)]
        dense = torch.stack(rows, 2).repeat_interleave(3, 1)
        first = batch.query_starts[sequence]
        scores = torch.einsum("qhd,hkd->hqk", queries[first : first + now], dense[0]) * 0.3
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        place, column = torch.arange(before, before + now)[:, None], torch.arange(before + now)
        hidden = (column > place) | ((column <= place - window) if window else column < 0)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        wanted = torch.einsum("hqk,hkd->qhd", weights, dense[1])
        torch.testing.assert_close(got[first : first + now], wanted, atol=1e-5, rtol=1e-5)
