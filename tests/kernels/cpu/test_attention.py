"""CPU attention against its reference; a row's bits depend only on the row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from pillion.errors import Internal
from pillion.kernels.cpu.attention.attention_rows import AttentionShape
from pillion.kernels.cpu.attention.cpu_attention import Attention, AttentionMerge, row_counts
from pillion.kernels.cpu.attention.cpu_attention_plan import (
    FIRST,
    ITEMS_PER_THREAD,
    LAST,
    PARTITION_TOKENS,
    CpuAttentionPlanner,
)
from pillion.kernels.cpu.language.isa import BY_NAME
from tests.support.attention_case import KV_HEADS, LAYER, PARTIAL_ROWS, AttentionCase, packed, text_of, unpacked
from tests.support.covering import each_value
from tests.support.examples import examples
from tests.support.kernel_runner import TILE_MODES, Runner, isa_or_skip, kernel_modes, with_checks
from tests.support.machine_code import assembly

# The shape of most tests, with all options, and one whose chunks have no spare rows.
SMALL, WIDE = AttentionShape(64, 4, 16, True), AttentionShape(64, 3, 32, False)
OPTIONS = [(False, False), (True, True)]
# 8-bit keys and values, with rows of either type.
PAIRS, FLOATS = replace(SMALL, codes="fp8_e4m3"), replace(WIDE, codes="int8")
# Specs that run on every processor and in every mode; the other sizes run in one.
SPECS = [spec for shape in (SMALL, WIDE) for pair in OPTIONS for spec in (Attention(shape, *pair),)]
SPECS += [AttentionMerge(shape, window) for shape in (SMALL, WIDE) for window in (False, True)]
SPECS += [Attention(PAIRS), AttentionMerge(PAIRS), Attention(FLOATS, True, True), AttentionMerge(FLOATS, True)]
SPECS += [
    spec
    for shape, capped in ((SMALL, False), (WIDE, True), (PAIRS, False), (FLOATS, True))
    for spec in (Attention(shape, capped, capped, True), AttentionMerge(shape, capped, True))
]
SPECS += [
    spec
    for shape in (SMALL, WIDE)
    for spec in (Attention(shape, False, True, False, True), AttentionMerge(shape, True, False, True))
]
SIZES = [
    AttentionShape(16, 1, 16, True),
    AttentionShape(64, 16, 16, True),
    AttentionShape(96, 2, 32, True),
    AttentionShape(128, 4, 16, True),
    AttentionShape(128, 8, 32, True),
    AttentionShape(256, 7, 16, True),
    AttentionShape(512, 3, 16, True),
    AttentionShape(16, 5, 16, False),
    AttentionShape(256, 2, 16, False),
    AttentionShape(80, 30, 16, False),
    AttentionShape(16, 1, 16, True, "fp8_e4m3"),
    AttentionShape(128, 4, 32, True, "int8"),
    AttentionShape(80, 7, 16, False, "fp8_e4m3"),
    AttentionShape(192, 16, 16, True, latents=128),
    AttentionShape(96, 5, 32, True, latents=64),
    AttentionShape(48, 16, 16, True, latents=32),
    AttentionShape(48, 3, 16, False, latents=32),
    AttentionShape(64, 1, 16, True),
    AttentionShape(80, 40, 16, True),
    AttentionShape(96, 5, 32, True, "int8", latents=64),
]
# The subset of SIZES that `make test` runs: every head size, row type, code type and number of latents.
SHORT = each_value(SIZES, lambda shape: (shape.head_dim, shape.bf16, shape.codes, shape.latents))
# Checked code of AVX-512 takes a minute to compile, and is covered by models (tests/engine/models/test_families.py).
MODES = [*TILE_MODES, ("avx512_bf16", False), ("avx512", False), ("avx2", False), ("avx2", True)]
# Each sequence: (text, earlier tokens, tokens of this step).
MIXED = [(0, 40, 1), (1, 0, 1), (2, 530, 1), (3, 0, 30), (4, 500, 20), (5, 1030, 2)]


# With checks, `make test` runs each kind of attention with one shape.
WITH_CHECKS = {
    *(
        (Attention(SMALL), name)
        for name in ("test_attention_of_a_mixed_batch_matches_the_reference", "test_a_row_does_not_depend_on_its_batch")
    ),
    (Attention(SMALL), "test_masked_tokens_have_no_effect"),
    (Attention(WIDE, True, True), "test_attention_of_a_mixed_batch_matches_the_reference"),
    (Attention(PAIRS), "test_attention_of_a_mixed_batch_matches_the_reference"),
    (Attention(SMALL), "test_sinks"),
    (Attention(SMALL), "test_chunked_attention_matches_the_reference"),
}


def left_to_long(checked, name, params):
    """The hook of tests/kernels/cpu/conftest.py."""
    if not checked or name in ("test_as_exact_as_torch_in_bf16", "test_out_of_bounds_items_are_reported"):
        return False
    if "shape" not in params:
        return True
    spec = Attention(params["shape"], bool(params.get("softcap")), bool(params.get("window")))
    return (spec, name) not in WITH_CHECKS


@pytest.fixture(scope="module", params=kernel_modes(MODES))
def runner(request):
    name, checked = request.param
    found = Runner(SPECS, isa_or_skip(name), checked)
    yield found
    found.close()


def isa_of(runner):
    return getattr(runner, "isa", BY_NAME["neon"])


def planned(runner, case, *, threads=2, window=0, partial_rows=PARTIAL_ROWS):
    counts = row_counts(isa_of(runner), case.shape.group, case.shape.bf16)
    return CpuAttentionPlanner(case.shape.group, counts, KV_HEADS, threads, partial_rows, window).plan(case.batch)


def attend(runner, case, *, window=0, threads=3, plan_threads=2, partial_rows=PARTIAL_ROWS, **options):
    plan = planned(runner, case, threads=plan_threads, window=window, partial_rows=partial_rows)
    return case.run(runner, plan, window=window, threads=threads, **options)


def check(runner, case, **options):
    found = attend(runner, case, **options).float()
    expected = case.reference(**options)
    if case.shape.bf16:
        # Weights and results are rounded to 8 bits; values are around 1.
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def same(a, b):
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def cases(*options):
    """Parameters shape, window and softcap: each of ``options`` with both plain shapes, and two of 8 bits."""
    plain = [(shape, *each) for shape in (SMALL, WIDE) for each in options]
    return pytest.mark.parametrize(
        ("shape", "window", "softcap"),
        [*plain, (PAIRS, 0, 0.0), (FLOATS, options[-1][0] or 700, options[-1][1] or 5.0)],
        ids=lambda value: getattr(value, "name", str(value)),
    )


@cases((0, 0.0), (1, 3.0), (37, 0.7), (600, 30.0))
def test_attention_of_a_mixed_batch_matches_the_reference(runner, shape, window, softcap):
    check(runner, AttentionCase.of(shape, MIXED, window=window), window=window, softcap=softcap)


@pytest.mark.parametrize(
    ("shape", "window", "softcap"), [(SMALL, 0, 0.0), (WIDE, 37, 0.7), (PAIRS, 0, 0.0), (FLOATS, 700, 5.0)]
)
def test_sinks(runner, shape, window, softcap):
    """Sinks below and above all scores, some by so much that the sink or the scores vanish."""
    count = KV_HEADS * shape.group
    sinks = torch.linspace(-3.0, 6.0, count)
    sinks[0], sinks[-1] = -200.0, 200.0
    case = AttentionCase.of(shape, MIXED, window=window)
    check(runner, case, window=window, softcap=softcap, sinks=sinks)
    head = attend(runner, case, window=window, softcap=softcap, sinks=sinks)[:, : shape.head_dim]
    assert same(head, attend(runner, case, window=window, softcap=softcap)[:, : shape.head_dim])


@pytest.mark.parametrize("chunk", [1, 37, 512, 600])
@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=lambda shape: shape.name)
def test_chunked_attention_matches_the_reference(runner, shape, chunk):
    """Rows of one item that begin a chunk, and see none of the tokens that earlier rows see."""
    case = AttentionCase.of(shape, MIXED, window=chunk)
    check(runner, case, window=chunk, chunked=True)
    check(runner, AttentionCase.of(shape, [(7, 500, 30)], window=chunk), window=chunk, chunked=True)


PARTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 600), st.one_of(st.just(1), st.integers(1, 40))),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(12))
@given(PARTS, st.sampled_from([0, 1, 16, 50, 520]), st.sampled_from([SMALL, WIDE]))
def test_ragged_batches(runner, parts, window, shape):
    check(runner, AttentionCase.of(shape, parts, window=window), window=window, softcap=1.5 if window else 0.0)


@pytest.mark.parametrize("stale", [torch.nan, torch.inf, -torch.inf])
def test_stale_memory_is_not_seen(runner, stale):
    parts = [(0, 17, 1), (1, 0, 5), (2, 33, 14)]
    for shape, options in ((SMALL, {}), (WIDE, {}), (PAIRS, {}), (FLOATS, {"window": 700, "softcap": 5.0})):
        clean = attend(runner, AttentionCase.of(shape, parts, stale=0.0), **options)
        assert same(attend(runner, AttentionCase.of(shape, parts, stale=stale), **options), clean)


@cases((0, 0.0), (700, 5.0))
def test_a_row_does_not_depend_on_its_batch(runner, shape, window, softcap):
    """A prompt at once, in chunks of any size, token by token, beside others, on one thread or three."""
    length = 2 * PARTITION_TOKENS + 70

    def run(*parts, **options):
        case = AttentionCase.of(shape, parts, window=window)
        return attend(runner, case, window=window, softcap=softcap, **options)

    whole = run((0, 0, length))
    assert not torch.isnan(whole).any()
    first = 0
    for size in (1, 7, 300, 205, 5, 509, 60):
        chunk = run((1, 40, 1), (0, first, size), (2, 3, 17))
        assert same(chunk[1 : 1 + size], whole[first : first + size]), (first, size)
        first += size
    for position in (0, 15, 16, 100, 511, 512, 513, 1023, 1024, length - 1):
        alone = run((0, position, 1), threads=1)
        assert same(alone, whole[position : position + 1]), position


@cases((0, 0.0), (1700, 5.0), (300, 5.0))
def test_splitting_a_context_changes_no_bit(runner, shape, window, softcap):
    # Both tokens of the second sequence see four partitions, regardless of the rows per item.
    parts = [(0, 9 * PARTITION_TOKENS + 3, 1), (1, 3 * PARTITION_TOKENS, 2)]
    case, options = AttentionCase.of(shape, parts, window=window), {"window": window, "softcap": softcap}
    # As in a model in which some layers have no window: the plan has none.
    uncut = planned(runner, case, partial_rows=0)
    found = case.run(runner, uncut, **options)
    torch.testing.assert_close(found.float(), case.reference(**options), rtol=2**-7, atol=2**-7)
    merges = []
    for threads, partial_rows in ((16, PARTIAL_ROWS), (1, PARTIAL_ROWS), (16, 12 * shape.group)):
        plan = planned(runner, case, threads=threads, partial_rows=partial_rows)
        assert same(case.run(runner, plan, **options), found), (threads, partial_rows)
        merges.append((len(plan.merges), int((plan.items[:, LAST] - plan.items[:, FIRST]).max())))
    # Pieces of one partition and of several, and a second sequence for which there are too few partials.
    items = 1 + -(-2 * shape.group // row_counts(isa_of(runner), shape.group, shape.bf16)[1])
    assert merges == [(items, 1), (items, 3), (1, 4)]


@cases((0, 0.0))
def test_masked_tokens_have_no_effect(runner, shape, window, softcap):
    """For any finite content, even in a partition of which a row of the same item sees nothing."""
    first, visible, now = PARTITION_TOKENS - 18, 17, 40
    case, huge = (AttentionCase.of(shape, [(0, first, now)]) for _ in range(2))
    plain = unpacked(huge.pool, shape)
    case.pool.copy_(packed(plain, shape))
    for position in range(first + visible, first + now):
        slot = int(huge.batch.block_tables[0, position // shape.block_size])
        plain[slot, LAYER, :, :, position % shape.block_size] = 3e38
    huge.pool.copy_(packed(plain, shape))
    options = {"window": window, "softcap": softcap}
    assert same(attend(runner, huge, **options)[:visible], attend(runner, case, **options)[:visible])


def test_as_exact_as_torch_in_bf16(runner):
    case = AttentionCase.of(SMALL, [(0, 900, 60)])
    found, exact = attend(runner, case).float(), case.reference()
    queries = case.queries[:, : case.batch.num_tokens]
    pairs = text_of(0, 960, SMALL.group, SMALL.head_dim)[1].bfloat16()
    keys, values = pairs.permute(1, 2, 0, 3).repeat_interleave(SMALL.group, 1)
    mask = torch.ones(60, 960, dtype=torch.bool).tril(900)
    rows = queries.permute(0, 2, 1, 3).flatten(0, 1)
    theirs = scaled_dot_product_attention(rows[None], keys[None], values[None], attn_mask=mask)[0]
    theirs = theirs.transpose(0, 1).flatten(1).float()
    assert (found - exact).square().mean() <= 1.2 * (theirs - exact).square().mean()


@with_checks
def test_out_of_bounds_items_are_reported(runner):
    case = AttentionCase.of(SMALL, [(0, 20, 1)])
    plan = planned(runner, case)
    plan.items[0, 0] = 10**6
    with pytest.raises(Internal, match="attention"):
        case.run(runner, plan)


@pytest.fixture(scope="module", params=kernel_modes([TILE_MODES[0], ("avx512_bf16", False)]))
def sizes_runner(request):
    isa = isa_or_skip(request.param[0])
    found = Runner([spec for shape in SIZES for spec in (Attention(shape), AttentionMerge(shape))], isa, False)
    yield found
    found.close()


of_sizes = pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, id=shape.name, marks=() if shape in SHORT else pytest.mark.long) for shape in SIZES],
)


@of_sizes
def test_head_sizes_and_groups(sizes_runner, shape):
    check(sizes_runner, AttentionCase.of(shape, MIXED))
    long = AttentionCase.of(shape, [(0, 2000, 1)])
    assert len(planned(sizes_runner, long, threads=ITEMS_PER_THREAD).merges)
    found = attend(sizes_runner, long, plan_threads=ITEMS_PER_THREAD)
    assert same(found, attend(sizes_runner, long, partial_rows=0))


@of_sizes
def test_a_row_of_any_size_does_not_depend_on_its_batch(sizes_runner, shape):
    """In a prompt at once, in chunks, and alone, across the start of a partition."""
    length = PARTITION_TOKENS + 40
    whole = attend(sizes_runner, AttentionCase.of(shape, [(0, 0, length)]))
    for first, size in ((0, 1), (PARTITION_TOKENS - 3, 7), (PARTITION_TOKENS + 9, 31), (length - 1, 1)):
        part = attend(sizes_runner, AttentionCase.of(shape, [(1, 20, 1), (0, first, size)]))
        assert same(part[1:], whole[first : first + size]), (first, size)


@pytest.mark.parametrize(
    "shape", [SIZES[-3], SMALL, PAIRS, AttentionShape(128, 40, 16, True, "int8")], ids=lambda shape: shape.name
)
def test_bfloat16_attention_uses_matrix_tiles(shape):
    """In code for a processor with matrix tiles, which any machine can compile, in any group. A tile of K or V is
    loaded once for both tiles of rows."""
    spec = Attention(shape)
    text = assembly([spec], BY_NAME["amx"])[spec.name]
    assert "vdpbf16ps" not in text
    steps = shape.head_dim // 32
    # Of one strip of 16 rows, and of strips of 32: scores, of 4 groups and of 2, then weighted sums.
    assert text.count("tdpbf16ps") == (4 * steps + 4) + (2 * 2 * steps + 4)
    assert text.count("tileloadd") == (5 * steps + 5) + (2 * 3 * steps + 4)


def test_windows_that_begin_at_each_group(runner):
    """Weighted sums of two groups at a time, of which a window may exclude the first one."""
    for before in range(600, 632, 16):
        case = AttentionCase.of(SMALL, [(0, before, 3), (1, before - 570, 1)], window=40)
        check(runner, case, window=40, softcap=5.0)
