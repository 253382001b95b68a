"""The kernel that norms, rotates and stores against torch in float32, and that reference against the decoder's
layers."""

from __future__ import annotations

from tests.support.gpu import DEVICE, rounded  # isort: skip  (before the kernels)

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab.testbed import gpu_reference as reference
from pillion.engine.models.layers import RmsNorm
from pillion.engine.models.rope import Rope, rotate
from pillion.errors import Internal
from pillion.kernels.gpu.attention.kv_write import HeadNorm, Rotary, kv_write
from tests.support.examples import examples
from tests.support.guarded import MARK, Guarded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTH = 40
SLOTS, LAYERS, LAYER = 5, 3, 1
EPS = 1e-5


def tables(head_dim: int) -> tuple[Rope, torch.Tensor, torch.Tensor]:
    """A rotary embedding and its cosines and sines [LENGTH, head_dim / 2], scaled as longrope scales them."""
    half = head_dim // 2
    rope = Rope(1e4 ** (-torch.arange(half) / half), torch.full((half,), 1.25))
    cos, signed_sin = rope.tables(torch.arange(LENGTH), torch.float32)
    return rope, cos[:, 0, :half].contiguous(), signed_sin[:, 0, half:].contiguous()


def made_norm(heads: int, head_dim: int, dtype: torch.dtype) -> HeadNorm:
    return HeadNorm((torch.randn(heads, head_dim) / 2 + 1).to(dtype).to(DEVICE), EPS)


def made_rotary(tokens: int, head_dim: int, dtype: torch.dtype) -> Rotary:
    _, cos, sin = tables(head_dim)
    positions = torch.randint(0, LENGTH, (tokens,), dtype=torch.int32)
    return Rotary(cos.to(dtype).to(DEVICE), sin.to(dtype).to(DEVICE), positions.to(DEVICE))


def made_rows(tokens: int, block_size: int) -> torch.Tensor:
    """Choose different rows of the pool; about one in four is -1."""
    rows = torch.randperm(SLOTS * block_size)[:tokens]
    rows[torch.rand(tokens) < 0.25] = -1
    return rows.to(torch.int32).to(DEVICE)


SHAPES = st.tuples(
    st.integers(1, 6),
    st.sampled_from([1, 3, 4, 9]),
    st.integers(1, 3),
    st.sampled_from([16, 64, 80, 96, 112, 256, 512]),
)


@given(
    shape=SHAPES,
    block_size=st.sampled_from([2, 3, 16]),
    dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from([None, "wide", "plain"]),
    table_dtype=st.sampled_from([None, "wide", "plain"]),
    kind=st.sampled_from(["rms", "centred", "values"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(40))
@example((3, 4, 1, 80), 2, torch.float32, torch.float32, "wide", "wide", "centred", 1)
@example((2, 4, 2, 512), 16, torch.bfloat16, torch.bfloat16, "wide", "wide", "rms", 1)
@example((3, 4, 1, 80), 2, torch.float32, torch.float32, "wide", "wide", "values", 1)
def test_queries_are_rotated_in_place_and_keys_and_values_written(
    shape, block_size, dtype, kv_dtype, weight_dtype, table_dtype, kind, seed
):
    torch.manual_seed(seed)
    tokens, heads, kv_heads, head_dim = shape
    types = {"wide": torch.float32, "plain": dtype}
    norm = None if weight_dtype is None else made_norm(heads + kv_heads, head_dim, types[weight_dtype])
    if norm is not None:
        norm = norm._replace(centred=kind == "centred", values=kind == "values")
    more = {} if norm is None else {"centred": norm.centred, "norms_values": norm.values}
    rotary = None if table_dtype is None else made_rotary(tokens, head_dim, types[table_dtype])
    rows = made_rows(tokens, block_size)
    qkv = Guarded((tokens, (heads + 2 * kv_heads) * head_dim), dtype)
    qkv.inside.copy_(torch.randn(qkv.inside.shape))
    was = qkv.inside.clone()
    queries, keys, values = reference.normed_and_rotated(was, kv_heads, heads, norm, rotary, **more)
    pool = Guarded((SLOTS, LAYERS, 2, kv_heads, block_size, head_dim), kv_dtype)
    expected = pool.inside.clone()
    reference.store_rows(expected, LAYER, rows, keys, values)
    kv_write(qkv.inside, pool.inside, rows, LAYER, heads=heads, norm=norm, rotary=rotary)
    written = qkv.inside[:, : heads * head_dim].float().view(queries.shape)
    # Values are of size 8 and less; float32 may be summed in another order.
    slack = rounded(dtype, 16 if dtype == torch.float32 else 1)
    torch.testing.assert_close(written, queries, rtol=slack["rtol"], atol=4 * rounded(torch.float32, 2)["atol"])
    assert torch.equal(qkv.inside[:, heads * head_dim :], was[:, heads * head_dim :])
    slack = rounded(kv_dtype, 16 if kv_dtype == torch.float32 else 2)
    torch.testing.assert_close(
        pool.inside, expected, rtol=slack["rtol"], atol=4 * rounded(torch.float32, 2)["atol"] + 2.0**-24
    )
    assert torch.equal(pool.inside == MARK, expected == MARK)
    assert qkv.margins_are_whole()
    assert pool.margins_are_whole()


@given(shape=SHAPES, block_size=st.sampled_from([2, 16]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
@settings(max_examples=examples(40))
@example((2, 3, 1, 512), 16, torch.bfloat16, 1)
def test_rows_of_fp8_have_codes_and_scales(shape, block_size, dtype, seed):
    torch.manual_seed(seed)
    tokens, heads, kv_heads, head_dim = shape
    norm = made_norm(heads + kv_heads, head_dim, dtype) if seed % 2 else None
    rotary = made_rotary(tokens, head_dim, torch.float32)
    rows = made_rows(tokens, block_size)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim) * 10 ** torch.randint(-4, 2, (tokens, 1, 1))
    qkv[0, -1] = 0
    qkv = qkv.to(dtype).flatten(1).to(DEVICE)
    _, keys, values = reference.normed_and_rotated(qkv, kv_heads, heads, norm, rotary)
    pool = Guarded((SLOTS, LAYERS, 2, kv_heads, block_size * (head_dim + 4)), torch.uint8)
    kv_write(qkv, pool.inside, rows, LAYER, heads=heads, norm=norm, rotary=rotary)
    codes, scales = reference.fp8_parts(pool.inside, head_dim)
    written = torch.zeros(scales.shape, dtype=torch.bool, device=DEVICE)
    for token, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        slot, offset = divmod(row, block_size)
        written[slot, LAYER, :, :, offset] = True
        both = torch.stack((keys[token], values[token]))
        here, scale = codes[slot, LAYER, :, :, offset], scales[slot, LAYER, :, :, offset]
        expected_codes, expected_scale = reference.fp8_rows(both)
        torch.testing.assert_close(scale, expected_scale, **rounded(torch.float32, 8))
        # Values are not changed before they are rounded to fp8.
        assert torch.equal(here[1], expected_codes[1])
        error = (reference.fp8_values(here, scale) - both).abs()
        assert bool((error <= 1.001 * torch.maximum(both.abs() * 2.0**-4, scale[..., None] * 2.0**-10)).all())
    assert bool((codes[~written] == MARK).all())
    assert bool((scales.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))[~written] == MARK).all())
    assert pool.margins_are_whole()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_layers_between_those_of_another_size(dtype):
    """Two layers with one KV head of 32 values follow one and two with two of 16, which do not change; a layer without
    keys and values changes only its queries."""
    torch.manual_seed(3)
    block_size, tokens, heads = 16, 3, 4
    rows = torch.tensor([2, 40, -1], dtype=torch.int32, device=DEVICE)
    inside = 2, 1, *((block_size, 32) if dtype == torch.float32 else (block_size * 36,))
    width = 2 * block_size * (32 if dtype == torch.float32 else 36)
    narrow = 2 * 2 * block_size * (16 if dtype == torch.float32 else 20)
    firsts, total = (narrow, 3 * narrow + width), 4 * narrow + 2 * width
    slots = torch.full((SLOTS, total), MARK, dtype=dtype, device=DEVICE)
    step = math.gcd(*firsts)
    strides = total, step, width // 2, width // 2, *((32, 1) if dtype == torch.float32 else (1,))
    pool = slots.as_strided((SLOTS, firsts[1] // step + 1, *inside), strides)
    alone = torch.full((SLOTS, 2, *inside), MARK, dtype=dtype, device=DEVICE)
    norm, rotary = made_norm(heads + 1, 32, torch.float32), made_rotary(tokens, 32, torch.float32)
    for layer, first in enumerate(firsts):
        qkv = torch.randn(tokens, (heads + 2) * 32, device=DEVICE)
        other, queries = qkv.clone(), qkv[:, : heads * 32].clone()
        options = {"heads": heads, "rotary": rotary}
        kv_write(qkv, pool, rows, first // step, norm=norm, **options)
        kv_write(other, alone, rows, layer, norm=norm, **options)
        of_queries = norm._replace(weight=norm.weight[:heads].contiguous())
        kv_write(queries, pool, rows, first // step, norm=of_queries, kv_heads=range(0), **options)
        assert torch.equal(qkv, other)
        assert torch.equal(queries, other[:, : heads * 32])
    for layer, first in enumerate(firsts):
        assert torch.equal(slots[:, first : first + width], alone[:, layer].flatten(1))
        slots[:, first : first + width] = MARK
    assert bool((slots == MARK).all())


def test_pools_of_more_than_two_billion_bytes():
    """The pool takes no memory unless it is touched."""
    head_dim, block_size = 64, 16
    slots = 2**31 // (2 * 2**10 * block_size * (head_dim + 4)) + 2
    pool = torch.empty((slots, 2, 2, 2**9, block_size * (head_dim + 4)), dtype=torch.uint8, device=DEVICE)
    row = (slots - 1) * block_size + 3
    assert pool[:-1].numel() > 2**31
    qkv = torch.randn(1, (2 * 2**9 + 1) * head_dim, device=DEVICE)
    kv_write(qkv, pool, torch.tensor([row], dtype=torch.int32, device=DEVICE), 1, heads=1)
    codes, scales = reference.fp8_parts(pool[-1:], head_dim)
    expected_codes, expected_scales = reference.fp8_rows(qkv[0, head_dim:].view(2, 2**9, head_dim))
    assert torch.equal(codes[0, 1, :, :, 3], expected_codes)
    torch.testing.assert_close(scales[0, 1, :, :, 3], expected_scales, **rounded(torch.float32, 2))


@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_reference_matches_the_decoder(head_dim):
    torch.manual_seed(1)
    heads, kv_heads, tokens = 4, 2, 7
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    weight = torch.randn(heads + kv_heads, head_dim)
    rope, cos, sin = tables(head_dim)
    positions = torch.randint(0, LENGTH, (tokens,))
    every = qkv.view(tokens, -1, head_dim)
    expected = rotate(RmsNorm(weight, EPS, wide=True)(every[:, :-kv_heads]), *rope.tables(positions, torch.float32))
    found = reference.normed_and_rotated(qkv, kv_heads, heads, (weight, EPS), (cos, sin, positions))
    torch.testing.assert_close(torch.cat(found[:2], 1), expected, **rounded(torch.float32, 8))
    assert torch.equal(found[2], every[:, -kv_heads:])


def test_misshapen_tensors_are_refused():
    rows = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    qkv = torch.zeros(2, 4 * 16, device=DEVICE)
    pool = torch.zeros(SLOTS, LAYERS, 2, 1, 4, 16, device=DEVICE)
    kv_write(qkv, pool, rows, LAYERS - 1, heads=2)
    with pytest.raises(Internal):
        kv_write(qkv, pool, rows, LAYERS, heads=2)
    with pytest.raises(Internal):
        kv_write(qkv, pool, rows[:1], 0, heads=2)
    for bad in (qkv[:, :63].contiguous(), qkv[:, :48].contiguous(), qkv.double(), qkv.T):
        with pytest.raises(Internal):
            kv_write(bad, pool, rows, 0, heads=2)
    for bad in (pool[:, :, :, :, ::2], pool[..., :8].contiguous(), pool.to(torch.uint8), pool[:, :, :1].contiguous()):
        with pytest.raises(Internal):
            kv_write(qkv, bad, rows, 0, heads=2)
    with pytest.raises(Internal):
        kv_write(qkv, pool, rows, 0, heads=2, norm=HeadNorm(torch.ones(2, 16, device=DEVICE), EPS))
    table = torch.ones(LENGTH, 16, device=DEVICE)
    with pytest.raises(Internal):
        kv_write(qkv, pool, rows, 0, heads=2, rotary=Rotary(table, table, rows))
