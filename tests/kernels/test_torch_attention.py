"""The fast CPU attention against the reference, and the reference against a dense softmax written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference import paged_attention, write_kv
from kernels.torch_attention import StepAttention
from tests.support.batches import Sequences

torch.set_num_threads(1)

LAYERS = 2

# Each sequence: (tokens already there, tokens of this step); a context of up to a dozen blocks.
PARTS = st.lists(st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=6)


def filled(parts, block_size, kv_heads, head_dim, dtype, seed=0):
    """A pool with the sequences' earlier tokens in it, NaN everywhere else, and the batch of this step."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    slots = sum(-(-(before + now) // block_size) for before, now in parts) + 2
    pool = torch.full((slots, LAYERS, 2, kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    sequences = Sequences(slots, block_size, seed)
    numbers = sequences.add(len(parts))
    # One token at a time: a block is begun, and then filled, in different steps, as in a decode.
    for number, (before, _) in zip(numbers, parts, strict=True):
        for first in range(0, before, 7):
            batch = sequences.step([(number, [0] * min(7, before - first))])
            attention = StepAttention(pool, batch, num_heads=kv_heads, scale=1.0)
            for layer in range(LAYERS):
                count = batch.num_tokens
                attention.write(layer, random(count, kv_heads, head_dim), random(count, kv_heads, head_dim))
    batch = sequences.step([(n, [0] * now) for n, (_, now) in zip(numbers, parts, strict=True)], extra_blocks=1)
    return pool, batch, random


def compare(parts, block_size, kv_heads, group, head_dim, window, dtype, tolerance):
    pool, batch, random = filled(parts, block_size, kv_heads, head_dim, dtype)
    total, heads, scale = batch.num_tokens, kv_heads * group, head_dim**-0.5
    attention = StepAttention(pool, batch, num_heads=heads, scale=scale, windows=(0, window))
    for layer in range(LAYERS):
        keys, values = random(total, kv_heads, head_dim), random(total, kv_heads, head_dim)
        queries = random(total, heads, head_dim)
        attention.write(layer, keys, values)
        mine = pool.clone()
        write_kv(pool, layer, batch, keys, values)
        assert torch.equal(mine.nan_to_num(7.0), pool.nan_to_num(7.0))
        got = attention.attend(layer, queries, window)
        wanted = paged_attention(queries, pool, layer, batch, scale=scale, window=window)
        torch.testing.assert_close(got.view(wanted.shape), wanted, atol=tolerance, rtol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    parts=PARTS,
    block_size=st.sampled_from([1, 3, 16, 32]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([8, 24]),
    window=st.sampled_from([0, 1, 5, 40]),
)
def test_ragged_batches_equal_the_reference(parts, block_size, kv_heads, group, head_dim, window):
    compare(parts, block_size, kv_heads, group, head_dim, window, torch.float32, 2e-5)


@pytest.mark.parametrize("window", [0, 20])
def test_bfloat16_is_close(window):
    compare([(50, 1), (3, 1), (200, 1), (0, 30), (64, 16)], 16, 3, 3, 64, window, torch.bfloat16, 2e-2)


def test_decodes_of_very_different_length_share_a_batch():
    compare([(1, 1), (900, 1), (30, 1), (450, 1), (0, 1), (899, 1)], 16, 2, 2, 16, 0, torch.float32, 2e-5)


@pytest.mark.parametrize("window", [0, 4])
def test_reference_equals_a_dense_softmax(window):
    parts = [(10, 5), (0, 9), (20, 1)]
    pool, batch, random = filled(parts, 4, 2, 8, torch.float32)
    keys, values = random(batch.num_tokens, 2, 8), random(batch.num_tokens, 2, 8)
    queries = random(batch.num_tokens, 6, 8)
    write_kv(pool, 1, batch, keys, values)
    got = paged_attention(queries, pool, 1, batch, scale=0.3, window=window)
    for sequence, (before, now) in enumerate(parts):
        table = batch.block_tables[sequence]
        rows = [pool[int(table[p // 4]), 1, :, :, p % 4] for p in range(before + now)]
        dense = torch.stack(rows, 2).repeat_interleave(3, 1)
        first = batch.query_starts[sequence]
        scores = torch.einsum("qhd,hkd->hqk", queries[first : first + now], dense[0]) * 0.3
        place, column = torch.arange(before, before + now)[:, None], torch.arange(before + now)
        hidden = (column > place) | ((column <= place - window) if window else column < 0)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        wanted = torch.einsum("hqk,hkd->qhd", weights, dense[1])
        torch.testing.assert_close(got[first : first + now], wanted, atol=1e-5, rtol=1e-5)
