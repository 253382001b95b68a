"""The Triton kernels of paged attention against plain torch."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE, rounded  # isort: skip  (before the kernels)
from tests.support.paged_case import LAYER, UNTOUCHED, PagedCase, PagedShape  # isort: skip

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from pillion.errors import Internal
from pillion.kernels.gpu.attention.gpu_attention_plan import ITEM_WORDS, PARTIAL
from tests.support.examples import examples

SHORT = st.tuples(st.integers(0, 200), st.integers(1, 2))
CHUNK = st.tuples(st.integers(0, 100), st.integers(3, 40))
BATCHES = st.lists(SHORT | CHUNK, min_size=1, max_size=3)
# Decodes whose tiles many programs share, and chunks, of the widest heads.
WIDE = {"parts": [(90, 1), (30, 20)], "group": 4, "head_dim": 512, "block_size": 16}
# An example takes seconds in the interpreter, so failing examples are not shrunk.
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)


def check(case: PagedCase, **more: object) -> None:
    attention = case.attention(**more)
    out = case.run(attention)
    many = case.batch.num_tokens
    assert (out[many:] == UNTOUCHED).all()
    # Each weight and the result are rounded once, scores and sums never.
    torch.testing.assert_close(out[:many].float(), case.reference(), **rounded(case.shape.dtype, 8))


@given(
    parts=BATCHES,
    group=st.sampled_from([1, 2, 4, 7, 8]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    window=st.sampled_from([0, 1, 33, 128, -1, -33, -128]),
    softcap=st.sampled_from([0.0, 1.5]),
    sinks=st.booleans(),
)
@settings(max_examples=examples(100 if NATIVE else 10), phases=UNSHRUNK)
@example(**WIDE, dtype=torch.bfloat16, window=33, softcap=1.5, sinks=True)
@example(**{**WIDE, "head_dim": 320}, dtype=torch.float32, window=0, softcap=0.0, sinks=False)
def test_ragged_batches_are_attended_like_plain_torch(parts, **shape):
    check(PagedCase.of(PagedShape(**shape), parts))


@given(
    parts=BATCHES,
    group=st.sampled_from([1, 4, 7]),
    head_dim=st.sampled_from([64, 112, 128]),
    block_size=st.sampled_from([16, 64]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    window=st.sampled_from([0, 40, -40]),
)
@settings(max_examples=examples(50 if NATIVE else 6), phases=UNSHRUNK)
@example(**WIDE, dtype=torch.bfloat16, window=0)
def test_float8_is_attended_by_its_codes_and_scales(parts, **shape):
    check(PagedCase.of(PagedShape(**shape), parts, fp8=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_are_decoded_like_single_tokens(dtype):
    case = PagedCase.of(PagedShape(4, 64, 16, dtype), [(500, 5), (3, 1), (0, 4)])
    attention = case.attention(decode_rows=5)
    assert not attention.planner.plan(case.batch).with_chunks
    assert case.attention().planner.plan(case.batch).with_chunks
    check(case, decode_rows=5)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("parts", [[(600, 1)], [(300, 20)]], ids=["decode", "chunk"])
def test_a_row_tile_that_many_programs_share_is_merged(parts, sinks):
    """A sink is counted once, regardless of the number of programs that share the tile."""
    case = PagedCase.of(PagedShape(4, 64, 16, torch.float16, sinks=sinks), parts)
    attention = case.attention()
    plan, planner = attention.planner.plan(case.batch), attention.planner
    starts = plan.record[planner.starts_at(0, plan.with_chunks) :]
    programs = planner.chunk.programs if plan.with_chunks else planner.decode.programs
    items = plan.record[starts[0] : starts[programs]].reshape(-1, ITEM_WORDS)
    assert (items[:, PARTIAL] >= 0).sum() > 2
    check(case)


@pytest.mark.parametrize("parts", [[(600, 1), (90, 1)], [(300, 20)]], ids=["decode", "chunk"])
def test_bits_do_not_depend_on_the_merging_program(parts):
    """Items are also run in the reverse order, so that another program counts a unit's last part."""
    case = PagedCase.of(PagedShape(4, 64, 16, torch.float16, sinks=True), parts)
    attention = case.attention()
    planner, plan = attention.planner, attention.planner.plan(case.batch)
    found = case.run(attention)
    assert not attention._tickets.any()
    programs = (planner.chunk if plan.with_chunks else planner.decode).programs
    at = planner.starts_at(0, plan.with_chunks)
    starts = plan.record[at : at + programs + 1].copy()
    items = plan.record[starts[0] : starts[-1]]
    items[:] = items.reshape(-1, ITEM_WORDS)[::-1].ravel()
    plan.record[at : at + programs + 1] = starts[0] + starts[-1] - starts[::-1]
    assert torch.equal(case.run(attention, plan), found)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_rows_see_the_keys_since_a_multiple_of_their_window(invariant, fp8):
    """Chunks of a prompt end before a multiple, at it and behind it, and cover several, beside decodes at a multiple
    and around it."""
    decodes = [(before, 1) for before in (96, 95, 94)]
    around = {-32: [(20, 12), (90, 7), (33, 31), (5, 70)], -128: [(250, 12)], -7: [(40, 30)], -1: [(70, 9)]}
    for window, chunks in around.items():
        shape = PagedShape(5, 64, 16, torch.float32, window=window)
        check(PagedCase.of(shape, decodes + chunks, fp8=fp8), invariant=invariant)


def test_layers_with_different_windows_have_plans_of_their_own():
    case = PagedCase.of(PagedShape(2, 64, 16, torch.float32, window=20), [(200, 1), (100, 30), (7, 2)])
    check(case, windows=(0, 20, 50))


def test_a_record_is_reused_step_after_step():
    """A graph has one record and one set of partial results: the previous step's must have no effect."""
    shape = PagedShape(4, 64, 16, torch.float32)
    long, short = PagedCase.of(shape, [(150, 1), (60, 9)]), PagedCase.of(shape, [(10, 1), (40, 9)])
    pools = torch.cat((long.pool, short.pool))
    attention = long.attention(pool=pools, max_tokens=16, max_seqs=3, max_context_blocks=16)
    record = torch.zeros(attention.planner.max_record_words, dtype=torch.int32, device=DEVICE)
    out = torch.full((len(long.queries), shape.heads * shape.head_dim), UNTOUCHED, device=DEVICE)
    for case, first_slot in ((long, 0), (short, len(long.pool))):
        plan = attention.planner.plan(replace(case.batch, block_tables=case.batch.block_tables + first_slot))
        record[: len(plan.record)] = torch.from_numpy(plan.record).to(DEVICE)
        mine = out[: len(case.queries)]
        attention.attend(LAYER, case.queries, mine, record, with_chunks=True)
        found = mine[: case.batch.num_tokens].cpu()
        torch.testing.assert_close(found, case.reference(), **rounded(torch.float32, 8))


def test_misuse_is_refused():
    case = PagedCase.of(PagedShape(2, 64, 16, torch.float32), [(20, 1), (5, 30)])
    attention = case.attention()
    plan = attention.planner.plan(case.batch)
    record = torch.from_numpy(plan.record).to(DEVICE)
    out = torch.zeros(len(case.queries), 4 * 64, device=DEVICE)
    for layer, queries, target, window in [
        (LAYER + 1, case.queries, out, 0),
        (LAYER, case.queries[:, :2], out, 0),
        (LAYER, case.queries.transpose(1, 2), out, 0),
        (LAYER, case.queries.half(), out, 0),
        (LAYER, case.queries, out[1:], 0),
        (LAYER, case.queries, out, 5),
    ]:
        with pytest.raises(Internal):
            attention.attend(layer, queries, target, record, window=window, with_chunks=True)
    sinks = torch.zeros(4, device=DEVICE)
    for expected, given_sinks in ((False, sinks), (True, None), (True, sinks[1:]), (True, sinks.half())):
        with pytest.raises(Internal, match="sinks"):
            case.attention(sinks=expected).attend(LAYER, case.queries, out, record, with_chunks=True, sinks=given_sinks)
    for bad in ({"scale": -1.0}, {"num_layers": 3}, {"head_dim": 72}, {"kv": "fp8_e4m3"}, {"dtype": torch.float16}):
        with pytest.raises(Internal):
            case.attention(**bad)


def test_records_are_the_same_for_the_same_batch():
    case = PagedCase.of(PagedShape(2, 64, 16, torch.float32), [(200, 1), (5, 30)])
    attention = case.attention()
    assert np.array_equal(attention.planner.plan(case.batch).record, attention.planner.plan(case.batch).record)
