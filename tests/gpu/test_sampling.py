"""The device's sampler against the CPU's, which is checked against transformers: the same tokens."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE  # isort: skip  (before the kernels)

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.sampling.cuts import row_cut
from pillion.engine.sampling.sampler import sample
from pillion.errors import Internal
from pillion.kernels.gpu.sampling import sampling_record
from pillion.kernels.gpu.sampling.gpu_sampling import MASS_TOLERANCE, TOTAL_TOLERANCE, choose
from pillion.kernels.gpu.sampling.sampling_device import HEAD_TOKENS, SamplerScratch
from pillion.kernels.gpu.sampling.sampling_record import FIELD_OF, KEY_FIELD, pack_rows, write_rows
from pillion.kernels.step import MIN_TEMPERATURE
from tests.support.examples import examples
from tests.support.gpu_sampling import chosen_on_device, edited_row, nearly_tie
from tests.support.sampling import RowParameters, all_noise, chi_square_fits, rows_of, unpruned, warp

# The interpreter takes about a second per row.
EXAMPLES = 150 if NATIVE else 8
# numpy warns about infinities.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

all_params = st.builds(
    RowParameters,
    temperature=st.sampled_from([0.0, 1e-5, 0.01, 0.6, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 50, 5000]),
    top_p=st.sampled_from([1.0, 1e-9, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.2, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
)


def random_logits(*shape: int, seed: int = 4, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def on_cpu(logits: torch.Tensor, batch: list[RowParameters]) -> list[int]:
    return list(sample(logits.float().clone(), rows_of(batch)).token_ids)


def check(logits: torch.Tensor, batch: list[RowParameters]) -> None:
    """Check that tokens are equal or, for drawn rows, a tie by the tolerances of the kernels' module."""
    found, wanted = chosen_on_device(logits, batch), on_cpu(logits, batch)
    for row, (token, other) in enumerate(zip(found, wanted, strict=True)):
        if token != other:
            assert batch[row].temperature >= MIN_TEMPERATURE, (row, token, other)
            assert nearly_tie(edited_row(logits[row], batch[row]), batch[row], token, other), (row, token, other)


@settings(max_examples=examples(EXAMPLES))
@given(
    batch=st.lists(all_params, min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
    size=st.sampled_from([1, 127, 300, 1000, 2000]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 8.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_tokens_match_the_cpu(batch, seed, size, spread, dtype):
    check(random_logits(len(batch), size, seed=seed, spread=spread).to(dtype), batch)


@pytest.mark.parametrize(
    ("params", "spread"),
    [
        (RowParameters(temperature=0.0), 2.0),
        (RowParameters(temperature=0.7, seed=9, position=2**33 + 1), 2.0),
        (RowParameters(top_k=20, top_p=0.95, seed=5), 3.0),
        (RowParameters(top_p=0.9, seed=8), 0.2),
        (RowParameters(min_p=0.05, seed=6), 2.0),
    ],
    ids=repr,
)
def test_tokens_of_several_slices_match_the_cpu(params, spread):
    """The vocabulary's last slice is one partial group; the nucleus is larger than the head."""
    check(random_logits(1, 8195, spread=spread), [params])


@settings(max_examples=examples(EXAMPLES))
@given(
    batch=st.lists(all_params, min_size=1, max_size=2),
    seed=st.integers(0, 2**20),
    bias=st.dictionaries(st.integers(0, 299), st.floats(-20, 20, width=32), max_size=9),
    seen=st.lists(st.integers(0, 299), max_size=30),
    answered=st.lists(st.integers(0, 299), max_size=30),
    banned=st.lists(st.sampled_from([0, 7, 299, 300, 9000]), max_size=3),
)
def test_edited_rows_match_the_cpu(batch, seed, bias, seen, answered, banned):
    params = RowParameters(
        bias=bias, seen=seen, repetition=1.3, answered=answered, presence=0.5, frequency=-0.3, banned=banned
    )
    edited = [
        replace(params, temperature=one.temperature, top_k=one.top_k, seed=one.seed, position=one.position)
        for one in batch
    ]
    mixed = [one for pair in zip(batch, edited, strict=True) for one in pair]
    check(random_logits(len(mixed), 300, seed=seed), mixed)


ODD = [-torch.inf, torch.inf, torch.nan, 0.0, -0.0, 1.0, 3e38, -3e38]


@settings(max_examples=examples(EXAMPLES * 2))
@given(values=st.lists(st.sampled_from(ODD), min_size=1, max_size=200), params=all_params)
def test_nan_and_infinite_logits_match_the_cpu(values, params):
    logits = torch.tensor([values, [0.0] * len(values)])
    greedy = replace(params, temperature=0.0)
    check(logits, [params, greedy])
    # The same code samples a greedy row's token with and without drawn rows in the batch.
    assert chosen_on_device(logits[:1], [greedy]) == on_cpu(logits[:1], [greedy])


def test_ties_go_to_the_lowest_token_id():
    """Equal logits in one group, in one slice and in two."""
    logits = torch.zeros(3, 4300)
    for row, equals in enumerate(([9, 40, 127], [130, 4000], [4095, 4096, 4299])):
        logits[row, equals] = 1.0
    assert chosen_on_device(logits, [RowParameters(temperature=0.0)] * 3) == [9, 130, 4095]


def test_a_row_does_not_depend_on_its_batch():
    """A row samples the same token alone, in any place and in any batch (I6)."""
    batch = [
        RowParameters(temperature=0.0),
        RowParameters(seed=3),
        RowParameters(temperature=1.5, top_k=9, seed=4),
        RowParameters(top_p=0.8, seed=5),
        RowParameters(temperature=0.8, min_p=0.1, seed=6),
    ]
    logits = random_logits(len(batch), 4300, spread=1.0)
    together = chosen_on_device(logits, batch)
    for order in ([1], [3], [4, 2, 1]):
        assert chosen_on_device(logits[order], [batch[row] for row in order]) == [together[row] for row in order]


def test_nothing_is_written_for_padding_rows():
    batch = [RowParameters(seed=3), RowParameters(temperature=0.0)]
    logits = random_logits(2, 300)
    assert chosen_on_device(logits, batch, padded_to=4) == [*on_cpu(logits, batch), -7, -7]


@pytest.mark.skipif(not NATIVE, reason="the interpreter would take hours for so many draws")
def test_tokens_are_distributed_as_the_softmax_says():
    draws = 20_000
    logits = random_logits(40)
    for params in (
        RowParameters(),
        RowParameters(temperature=0.6),
        RowParameters(temperature=1.3, top_k=7),
        RowParameters(top_p=0.8),
    ):
        batch = [replace(params, seed=number % 7, position=number) for number in range(draws)]
        tokens = chosen_on_device(logits.expand(draws, -1), batch)
        assert chi_square_fits(tokens, warp(logits[None], params)[0].double().softmax(-1).numpy()), params


def test_totals_decide_down_to_the_tolerance():
    """A logit is raised until its token almost wins, and until it just wins: results differ by the tolerance."""
    params, logits = RowParameters(temperature=0.7, seed=12, position=5), random_logits(300)
    scores = logits.double().numpy() / np.float32(params.temperature)
    totals = scores + all_noise(params.seed, params.position, 300)
    second, first = np.argsort(totals)[-2:].tolist()
    ahead = [-1e-3, -TOTAL_TOLERANCE, TOTAL_TOLERANCE, 1e-3]
    table = logits.repeat(len(ahead), 1)
    for row, step in zip(table, ahead, strict=True):
        row[second] += float((totals[first] - totals[second] + step) * np.float32(params.temperature))
    assert chosen_on_device(table, [params] * len(ahead)) == [first, first, second, second]


@pytest.mark.parametrize(("size", "spread", "seed"), [(300, 1.0, 2), (8 * HEAD_TOKENS + 3, 0.05, 3)])
def test_masses_decide_down_to_the_tolerance(size, spread, seed):
    """The winner is at the edge of the nucleus: top_p is the mass before it, plus or minus a little. In the second case
    the whole row is searched for the nucleus."""
    params, logits = RowParameters(temperature=1.5, seed=seed, position=8), random_logits(size, spread=spread)
    weights = (logits.double() / np.float32(params.temperature)).softmax(-1).numpy()
    winner = unpruned(logits, params)
    before = float(weights[weights > weights[winner]].sum())
    assert 0.1 < before < 0.95
    batch = [replace(params, top_p=before + step) for step in (MASS_TOLERANCE, -MASS_TOLERANCE)]
    inside, outside = chosen_on_device(logits.repeat(2, 1), batch)
    assert inside == winner
    assert outside == unpruned(logits, batch[1]) != winner


def test_records_are_what_kernels_read():
    assert sampling_record.MIN_TEMPERATURE == MIN_TEMPERATURE
    rows = rows_of(
        [
            RowParameters(temperature=1e-6, top_k=2**40, seed=-1, position=2**33),
            RowParameters(temperature=2.0, min_p=0.5),
        ]
    )
    record = pack_rows(rows, 3)
    assert record.shape == (3, sampling_record.RECORD_FIELDS)
    assert record.view(np.float32)[:, 0].tolist() == [0.0, 2.0, -1.0]
    assert record.view(np.float32)[:2, FIELD_OF["min_p"]].tolist() == [
        -np.inf,
        np.float32(2.0) * np.log(np.float32(0.5)),
    ]
    assert record[0, [FIELD_OF["top_k"], *range(KEY_FIELD, KEY_FIELD + 4)]].tolist() == [2**31 - 1, -1, -1, 0, 2]
    # A rewritten record has no content of earlier rows.
    table = np.full_like(record, 7)
    write_rows(table, rows)
    assert np.array_equal(table[:2], record[:2])
    assert table.view(np.float32)[2, 0] == -1.0
    write_rows(table, None)
    assert table.view(np.float32)[:, 0].tolist() == [-1.0] * 3


def test_misshapen_tensors_are_refused():
    scratch = SamplerScratch(2, 300, DEVICE)
    record = torch.from_numpy(pack_rows(rows_of([RowParameters()] * 2))).to(DEVICE)
    out, logits = torch.zeros(2, dtype=torch.int32, device=DEVICE), torch.zeros(2, 300, device=DEVICE)
    for wrong in (
        (torch.zeros(2, 301, device=DEVICE), record, out),
        (logits.double(), record, out),
        (logits, record[:1], out),
        (logits, record, out.long()),
        (torch.zeros(3, 300, device=DEVICE), record.repeat(2, 1)[:3], torch.zeros(3, dtype=torch.int32, device=DEVICE)),
    ):
        with pytest.raises(Internal):
            choose(*wrong, scratch)
    with pytest.raises(Internal):
        SamplerScratch(2, 2**25, DEVICE)


def chosen_with_cut(logits: torch.Tensor, params: RowParameters) -> tuple[int, float]:
    """Return the token sampled from logits [V], and the cut that was found for it."""
    scratch, out = SamplerScratch(1, len(logits), DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    record = torch.from_numpy(pack_rows(rows_of([params]))).to(DEVICE)
    choose(logits[None].to(DEVICE), record, out, scratch)
    return int(out[0]), float(scratch.cut[0])


@pytest.mark.parametrize(
    ("params", "size"),
    [
        (RowParameters(top_p=0.9), 128_256),
        (RowParameters(top_p=0.95, temperature=0.8), 20_000),
        (RowParameters(top_k=40), 20_000),
        (RowParameters(top_k=200, top_p=0.9, temperature=0.7), 20_000),
        (RowParameters(top_k=50, temperature=0.01), 20_000),
    ],
    ids=repr,
)
def test_cuts_of_a_language_models_logits_need_no_search_of_the_row(params, size):
    """The token of rank r has a probability of about r ** -1.5, at any place: a nucleus of 58 tokens in 58 groups."""
    ranks = torch.randperm(size, generator=torch.Generator().manual_seed(2)) + 1
    logits = -1.5 * ranks.float().log()
    token, cut = chosen_with_cut(logits, params)
    wanted = row_cut(logits.numpy(), np.float32(0), np.float32(params.temperature), params.top_k, params.top_p)
    # A searched row has no cut if its token is known to be inside. No token far below can win, so a cut by top_k may
    # be lower.
    assert cut == wanted if params.temperature > 0.1 else wanted < cut < 0.0
    assert [token] == on_cpu(logits[None], [params])


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (5000, 1.0)])
def test_cuts_of_rows_whose_candidates_do_not_fit_the_head(top_k, top_p):
    """More of nearly flat logits reach the bound than are gathered, so the whole row is searched, for a nucleus if the
    token drawn without it is outside."""
    logits = random_logits(8 * HEAD_TOKENS + 3, spread=0.05)
    row = logits.numpy()
    wanted = row >= row_cut(row, row.max(), np.float32(1), top_k, top_p)
    assert wanted.sum() > HEAD_TOKENS
    outside = [seed for seed in range(40) if not wanted[unpruned(logits, RowParameters(seed=seed))]]
    inside = next(seed for seed in range(40) if seed not in outside)
    for seed in (inside, outside[0]):
        params = RowParameters(top_k=top_k, top_p=top_p, seed=seed)
        token, cut = chosen_with_cut(logits, params)
        assert wanted[token]
        if seed == inside:
            assert token == unpruned(logits, replace(params, top_k=0, top_p=1.0))
        if seed == inside and not top_k:
            assert cut == -np.inf
        else:
            # Within the tolerance of a nucleus' mass; a count is exact.
            kept = (row >= cut).sum()
            assert kept == wanted.sum() if top_k else abs(kept - wanted.sum()) <= MASS_TOLERANCE * len(row) + 1
