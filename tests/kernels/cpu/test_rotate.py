"""The kernel between the QKV product and attention against its reference, and that against
pillion.engine.models.rope.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.models.layers import LayerNorm, RmsNorm
from pillion.engine.models.rope import Rope, rotate
from pillion.errors import Internal
from pillion.kernels.cpu.rows.rotate import RotateWrite
from tests.support.batches import Sequences
from tests.support.cpu_references import reference_rotate, reference_write, reference_write_codes
from tests.support.eight_bit_kv import TYPES, dequantized
from tests.support.examples import examples
from tests.support.kernel_runner import batch_step, normal, padded, runner_of, stride, with_checks

LAYERS, LAYER = 3, 1
# Large enough to affect results.
EPS = 0.1
# Each sequence: (earlier tokens, tokens of this step).
MIXED = [(0, 16), (5, 1), (0, 1), (15, 1), (16, 1), (3, 40), (30, 3), (0, 35)]

# Factors of queries at each position.
GROWTH = torch.linspace(1.0, 3.0, 128)

SHAPES = [
    RotateWrite(16, 4, 2, 16, bf16=True),
    RotateWrite(48, 3, 3, 16, bf16=True),
    RotateWrite(64, 6, 2, 32, bf16=True),
    RotateWrite(80, 2, 1, 16, bf16=True),
]
OPTIONS = [
    RotateWrite(16, 4, 2, 16, bf16=True, rope=False),
    RotateWrite(16, 4, 2, 16, bf16=True, rope=False, qk_norm="head"),
    RotateWrite(32, 4, 2, 16, bf16=True, qk_norm="head"),
    RotateWrite(16, 4, 2, 16, bf16=True, qk_norm="layer_by_head"),
    RotateWrite(16, 4, 2, 16, bf16=True, qk_norm="projection"),
    RotateWrite(32, 4, 2, 16, bf16=True, grows=True),
    RotateWrite(16, 4, 2, 16, bf16=True, rope=False, grows=True),
]


# 8-bit K and V.
CODED = [
    RotateWrite(48, 2, 1, 16, bf16=True, codes="fp8_e4m3"),
    RotateWrite(64, 6, 2, 32, bf16=True, codes="int8"),
    RotateWrite(16, 4, 2, 32, bf16=False, codes="fp8_e4m3"),
]


def wide(spec):
    """The spec ``spec`` for a model of float32."""
    return replace(spec, bf16=False)


SPECS = [*SHAPES, *OPTIONS, *CODED, *map(wide, SHAPES), *map(wide, OPTIONS)]


runner = runner_of(SPECS)


def left_to_long(checked, name, params):
    """The hook of tests/kernels/cpu/conftest.py: options, and some shapes, are checked with rows of one type."""
    return checked and params.get("spec") in (*OPTIONS, wide(SHAPES[1]), wide(SHAPES[3]))


def frequencies(spec):
    return 10_000.0 ** -(torch.arange(0, spec.head_dim, 2) / spec.head_dim)


@functools.cache
def tables_of(spec):
    """Cosines and sines [128, head_dim / 2]; there is no access after the last one."""
    angles = torch.arange(128.0)[:, None] * frequencies(spec)
    return angles.cos(), angles.sin()


def norms_of(spec):
    if not spec.qk_norm:
        return None
    counts = (1, 1) if spec.qk_norm == "head" else (spec.heads, spec.kv_heads)
    return tuple(normal(count * spec.head_dim, seed=seed) for seed, count in enumerate(counts))


def batch_of(parts, block_size, seed=0):
    """Sequences of ``before`` tokens that get ``now`` more; another slot after each table's end."""
    slots = sum(-(-(before + now) // block_size) for before, now in parts) + 1
    sequences = Sequences(slots, block_size, seed)
    numbers = sequences.add(len(parts))
    for number, (before, _) in zip(numbers, parts, strict=True):
        if before:
            sequences.step([(number, [0] * before)])
    batch = sequences.step([(n, [0] * now) for n, (_, now) in zip(numbers, parts, strict=True)], extra_blocks=1)
    return batch, slots


def stale_pool(spec, slots):
    """A pool of NaNs with distinct bits, so that a test detects a moved value."""
    shape = (slots, LAYERS, 2, spec.kv_heads, spec.block_size, spec.head_dim)
    count = functools.reduce(lambda a, b: a * b, shape)
    if spec.codes:
        shape = (*shape[:4], spec.block_size * (spec.head_dim + 4))
        return (torch.arange(count // spec.head_dim * (spec.head_dim + 4)) % 7 + 0xF9).to(torch.uint8).view(shape)
    if spec.bf16:
        return (torch.arange(count) % 63 + 0x7FC0).to(torch.int16).view(torch.bfloat16).view(shape)
    return (torch.arange(count) % 4_000_000 + 0x7FC00000).to(torch.int32).view(torch.float32).view(shape)


def run(runner, spec, qkv, batch, pool, threads=3, squares=None):
    """Run the kernel, which writes ``pool``; return queries [T, heads, head_dim]."""
    rows, room = padded(qkv), len(qkv) + 3
    dtype = torch.bfloat16 if spec.bf16 else torch.float32
    queries = torch.full((spec.kv_heads, room, spec.heads // spec.kv_heads, spec.head_dim), 7.0, dtype=dtype)
    cos, sin = tables_of(spec) if spec.rope else (None, None)
    q_norm, k_norm = norms_of(spec) or (None, None)
    values = {
        "qkv": rows,
        "queries": queries,
        "cos": cos,
        "sin": sin,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "squares": squares,
        "growth": GROWTH if spec.grows else None,
        "qkv_stride": stride(rows),
        "head_stride": stride(queries),
        "slot_bytes": stride(pool),
        "layer_offset": LAYER * pool.stride(1) * pool.element_size(),
        "value_offset": pool.stride(2) * pool.element_size(),
        "squares_stride": 0 if squares is None else stride(squares),
        "query_width": spec.heads * spec.head_dim,
        "key_width": spec.kv_heads * spec.head_dim,
        "eps": EPS,
    }
    runner.run(spec, values, batch_step(batch, pool), threads)
    assert (queries[:, len(qkv) :] == 7).all()
    return queries[:, : len(qkv)].transpose(0, 1).reshape(len(qkv), spec.heads, spec.head_dim)


def bits(values):
    if values.dtype == torch.uint8:
        return values
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


def compare(runner, spec, parts, seed=0):
    batch, slots = batch_of(parts, spec.block_size, seed)
    qkv = normal(batch.num_tokens, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, seed=seed)
    before = stale_pool(spec, slots)
    pool = before.clone()
    queries = run(runner, spec, qkv, batch, pool)
    positions = torch.from_numpy(batch.positions).long()
    growth = GROWTH if spec.grows else None
    wanted, keys, values = reference_rotate(spec, qkv, positions, tables_of(spec), norms_of(spec), EPS, growth)
    if spec.codes:
        expected = reference_write_codes(before, LAYER, batch, keys, values, spec.codes, spec.block_size)
    else:
        expected = reference_write(before, LAYER, batch, keys, values)
    if not spec.qk_norm:
        # The same operations in the same order.
        assert torch.equal(queries, wanted)
        assert torch.equal(bits(pool), bits(expected))
        return
    close = {"rtol": 2**-7 if spec.bf16 else 1e-5, "atol": 1e-5}
    torch.testing.assert_close(queries, wanted, **close)
    torch.testing.assert_close(pool, expected, equal_nan=True, **close)
    assert torch.equal(bits(pool[:, :, 1]), bits(expected[:, :, 1])), "values are not touched by norms"
    kept = before.isnan() & expected.isnan()
    assert torch.equal(bits(pool)[kept], bits(before)[kept])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_mixed_batch_is_rotated_like_the_reference(runner, spec):
    compare(runner, spec, MIXED)


PARTS = st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=4)


@settings(max_examples=examples(25))
@given(st.sampled_from([SHAPES[0], wide(SHAPES[0]), SHAPES[2], wide(SHAPES[2]), *CODED]), PARTS, st.integers(0, 2**31))
def test_any_batch_is_rotated_like_the_reference(runner, spec, parts, seed):
    compare(runner, spec, parts, seed)


@pytest.mark.parametrize("spec", [SHAPES[0], *OPTIONS, *CODED, wide(OPTIONS[3])], ids=lambda spec: spec.name)
def test_a_chunked_prompt_is_rotated_identically(runner, spec):
    """Row by row, or at once: the same bits; values cleared after a shorter step's end are written later."""
    qkv = normal(37, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
    whole, slots = batch_of([(0, 37)], spec.block_size)
    pool, pieces = stale_pool(spec, slots), stale_pool(spec, slots)
    queries = run(runner, spec, qkv, whole, pool)
    for begin, end in ((0, 5), (5, 6), (6, 16), (16, 37)):
        batch, _ = batch_of([(begin, end - begin)], spec.block_size)
        batch.block_tables[0, : whole.block_tables.shape[1]] = whole.block_tables[0, : batch.block_tables.shape[1]]
        found = run(runner, spec, qkv[begin:end], batch, pieces, threads=1)
        assert torch.equal(found, queries[begin:end])
    assert torch.equal(bits(pieces), bits(pool))


@pytest.mark.parametrize("spec", CODED, ids=lambda spec: spec.name)
def test_keys_and_values_of_every_magnitude_are_quantized(runner, spec):
    """Zeros, numbers that become subnormal codes, ties, and numbers next to the type's ends."""
    heads = spec.heads + 2 * spec.kv_heads
    rows = torch.zeros(34, heads, spec.head_dim)
    for row, size in enumerate((1e-30, 1e-12, 1.0, 447.9, 3e4, 1e38)):
        rows[1 + row] = normal(heads, spec.head_dim, seed=row) * size
    # The largest value sets the scale to 1, and the others are then codes and their midpoints.
    most = TYPES[spec.codes][1]
    steps = torch.arange(27 * heads * spec.head_dim).view(27, heads, spec.head_dim) * 2.0**-11
    rows[7:] = (steps * 16.0 - most).clamp(-most, most) if spec.codes == "int8" else steps
    rows[7:, :, 0] = -most
    batch, slots = batch_of([(0, 34)], spec.block_size)
    pool = stale_pool(spec, slots)
    run(runner, spec, rows.flatten(1), batch, pool)
    values = rows[:, spec.heads + spec.kv_heads :]
    keys = torch.zeros_like(values)
    expected = reference_write_codes(pool, LAYER, batch, keys, values, spec.codes, spec.block_size)
    assert torch.equal(pool[:, :, 1], expected[:, :, 1])


def test_a_row_with_nan_stays_one(runner):
    for spec in CODED:
        qkv = normal(3, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
        qkv[1] = torch.nan
        batch, slots = batch_of([(0, 3)], spec.block_size)
        pool = stale_pool(spec, slots)
        run(runner, spec, qkv, batch, pool)
        rows = dequantized(pool, spec.block_size, spec.codes)[int(batch.block_tables[0, 0]), LAYER, :, :, :3]
        assert rows[:, :, 1].isnan().all()
        assert rows[:, :, ::2].isfinite().all()


@with_checks
def test_slots_outside_the_pool_are_reported(runner):
    spec = SHAPES[0]
    batch, slots = batch_of([(0, 3)], spec.block_size)
    batch.block_tables[0, 0] = slots
    pool = stale_pool(spec, slots)
    before = pool.clone()
    with pytest.raises(Internal, match=spec.name):
        run(runner, spec, normal(3, 8 * 16), batch, pool)
    assert torch.equal(bits(pool), bits(before))


def test_the_reference_rotates_like_the_torch_path():
    spec = wide(SHAPES[0])
    qkv, positions = normal(20, 8 * 16), torch.arange(40, 60)
    queries, keys, values = reference_rotate(spec, qkv, positions, tables_of(spec), None, EPS)
    heads = qkv.view(20, 8, 16)
    expected = rotate(heads[:, :6], *Rope(frequencies(spec), torch.ones(8)).tables(positions, torch.float32))
    torch.testing.assert_close(torch.cat((queries, keys), 1), expected)
    assert torch.equal(values, heads[:, 6:])


@pytest.mark.parametrize("spec", [wide(OPTIONS[1]), wide(OPTIONS[3]), wide(OPTIONS[4])], ids=lambda spec: spec.name)
def test_the_reference_norms_like_the_torch_path(spec):
    still = RotateWrite(16, 4, 2, 16, bf16=False, rope=False, qk_norm=spec.qk_norm)
    qkv, norms = normal(9, 8 * 16), norms_of(spec)
    queries, keys, _ = reference_rotate(still, qkv, torch.arange(9), tables_of(spec), norms, EPS)
    heads = qkv.view(9, 8, 16)
    for found, part, weight in zip((queries, keys), heads[:, :6].split((4, 2), 1), norms, strict=True):
        over = part.flatten(1) if spec.qk_norm == "projection" else part
        norm = RmsNorm(weight, EPS, True)
        if spec.qk_norm == "layer_by_head":
            norm = LayerNorm(weight.view(-1, 16), EPS)
        torch.testing.assert_close(found, norm(over).view(part.shape))
