"""Sampled tokens against transformers' processors, the softmax, and sampling without pruning."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pillion.engine.sampling.cuts import cuts, group_maxima, in_nucleus, surely_in_nucleus
from pillion.engine.sampling.gumbel import GROUP_TOKENS
from pillion.engine.sampling.sampler import LargestLogits, sample
from pillion.kernels.step import NO_TOKEN
from tests.support.examples import examples
from tests.support.sampling import RowParameters, chi_square_fits, draws_of, padded, rows_of, unpruned, warp


def random_logits(*shape: int, seed: int = 4, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def chosen(logits: torch.Tensor, *all_params: RowParameters) -> list[int]:
    return list(sample(logits, rows_of(all_params)).token_ids)


def kept(logits: torch.Tensor, params: RowParameters) -> np.ndarray:
    """Mark the tokens [V] of one row that may be drawn."""
    table = padded(logits[None])
    return logits.numpy() >= cuts(table, group_maxima(table), rows_of([params]), np.array([0]))[0]


@pytest.mark.parametrize("odd", [0.0, 5.0, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("vocab_size", [97, 1280])
def test_greedy_rows_alone_and_beside_others(odd: float, vocab_size: int) -> None:
    """Batches of only greedy rows take a shortcut to the same tokens. A row with NaN or infinity has none."""
    logits, greedy = random_logits(4, vocab_size, spread=0.1), RowParameters(temperature=0.0)
    logits[1, [9, 40, 90]] = odd
    logits[2] = odd
    rows = rows_of([greedy] * 4)
    assert rows.plain
    alone = sample(logits, rows).token_ids
    assert (alone[1] == NO_TOKEN) == (odd == torch.inf or math.isnan(odd))
    assert (alone[2] == NO_TOKEN) == (not math.isfinite(odd))
    assert NO_TOKEN not in (alone[0], alone[3])
    for beside in (RowParameters(seed=1), replace(greedy, logprobs=0), replace(greedy, bias={3: 1.0})):
        longer = rows_of([*[greedy] * 4, beside])
        assert not longer.plain
        assert sample(torch.cat((logits, logits[:1])), longer).token_ids[:4] == alone


@pytest.mark.parametrize("vocab_size", [97, 300, 1280])
def test_greedy_is_the_argmax(vocab_size: int) -> None:
    logits, wanted = random_logits(5, vocab_size), random_logits(5, vocab_size).argmax(-1).tolist()
    for params in (
        RowParameters(temperature=0.0),
        RowParameters(temperature=1e-6, seed=3),
        RowParameters(top_k=1, seed=3),
        RowParameters(top_p=1e-6, seed=3),
        RowParameters(min_p=1.0, seed=3),
        RowParameters(temperature=100.0, top_k=1, seed=3),
    ):
        assert chosen(logits, *[params] * 5) == wanted
    assert chosen(logits, *[RowParameters(temperature=0.0)] * 4, RowParameters())[:4] == wanted[:4]


FILTERS = [
    RowParameters(),
    RowParameters(temperature=0.6),
    RowParameters(top_p=0.8),
    RowParameters(temperature=1.3, top_k=7),
    RowParameters(temperature=0.9, top_k=12, top_p=0.9),
    RowParameters(min_p=0.1),
    RowParameters(temperature=1.5, top_k=30, top_p=0.95, min_p=0.05),
]


@pytest.mark.parametrize("vocab_size", [40, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("params", FILTERS, ids=repr)
def test_tokens_are_distributed_as_the_softmax_says(params: RowParameters, vocab_size: int) -> None:
    logits, draws = random_logits(vocab_size), 6_000
    tokens = sample(logits.expand(draws, -1), draws_of(params, draws)).token_ids
    assert chi_square_fits(tokens, warp(logits[None], params)[0].double().softmax(-1).numpy())


def test_a_flat_and_a_steep_distribution() -> None:
    """In a flat distribution nearly every winner is the first of its group, in a steep one nearly none."""
    draws = 8_000
    for logits in (torch.zeros(640), torch.tensor([0.0, -1.0, *[-9.0] * 500])):
        tokens = sample(logits.expand(draws, -1), draws_of(RowParameters(), draws)).token_ids
        assert chi_square_fits(tokens, logits.double().softmax(-1).numpy())


def test_the_chi_square_test_sees_a_wrong_temperature() -> None:
    logits, draws = random_logits(40), 6_000
    tokens = sample(logits.expand(draws, -1), draws_of(RowParameters(temperature=1.1), draws)).token_ids
    assert not chi_square_fits(tokens, logits.double().softmax(-1).numpy())


all_params = st.builds(
    RowParameters,
    temperature=st.sampled_from([1e-5, 0.01, 0.3, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 50, 700, 5000]),
    top_p=st.sampled_from([1e-9, 0.05, 0.5, 0.9, 0.999, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.2, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**33),
)


@settings(max_examples=examples(200))
@given(
    params=all_params,
    seed=st.integers(0, 2**20),
    size=st.sampled_from([1, 5, 127, 128, 129, 1000, 5003, 40_000]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 8.0, 1e4]),
)
def test_pruning_does_not_change_the_token(params: RowParameters, seed: int, size: int, spread: float) -> None:
    logits = random_logits(size, seed=seed, spread=spread)
    assert chosen(logits[None], params) == [unpruned(logits, params)]


@settings(max_examples=examples(200))
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([5, 64, 3000, 70_000]),
    spread=st.sampled_from([0.3, 2.0, 8.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 50, 5000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_candidate_tokens_match_transformers(
    seed: int, size: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(size, seed=seed, spread=spread)
    params = RowParameters(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = kept(logits, params)
    # transformers sums from the smallest in fp32; in float64 both orders agree.
    wide = logits[None].double()
    unsure = ours != (warp(wide, params)[0].numpy() > -np.inf)
    if unsure.any():
        # Only a token on the edge of mass p or ratio min_p, within fp32 rounding, may be judged differently.
        before_p = warp(wide, replace(params, top_p=1.0, min_p=0.0))[0].softmax(-1).numpy()
        edge = before_p[unsure].max()
        mass = before_p[before_p > edge].sum()
        assert unsure.sum() == 1
        assert abs(mass - top_p) < 1e-5 or abs(edge / before_p.max() - min_p) < 1e-6


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([0.0, -1.0, -1.0, -1.0, -5.0])
    assert kept(logits, RowParameters(top_k=2)).tolist() == [True, True, True, True, False]
    assert kept(logits, RowParameters(top_p=0.5)).tolist() == [True, True, True, True, False]
    assert kept(logits, RowParameters(top_p=0.3)).tolist() == [True, False, False, False, False]
    assert kept(logits, RowParameters(top_k=5)).all()
    # Equal logits: no short head, and each token may win.
    flat = torch.zeros(50_000)
    assert kept(flat, RowParameters(top_k=3)).all()
    assert len({*chosen(flat.expand(20, -1), *[RowParameters(top_k=3, top_p=0.5, seed=n) for n in range(20)])}) > 10


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_long_nucleus(temperature: float, top_p: float) -> None:
    """With the mass spread over thousands of tokens, the cut is found by ranges of logits."""
    logits = random_logits(60_000)
    params = RowParameters(temperature=temperature, top_p=top_p)
    probabilities = (logits.double() / temperature).softmax(-1).numpy()
    inside = kept(logits, params)
    least = probabilities[inside].min()
    assert least > probabilities[~inside].max()
    assert probabilities[inside].sum() >= top_p - 1e-5
    assert probabilities[inside].sum() - least < top_p + 1e-5


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Sampling is batch-invariant: a row's token and log probabilities depend neither on the other rows nor on its
    index (I6)."""
    random, count, vocab_size = np.random.default_rng(0), 24, 20_003
    logits = random_logits(count, vocab_size)
    batch = [
        RowParameters(
            temperature=float(random.choice([0.0, 0.7, 1.0, 1.5])),
            top_k=int(random.choice([0, 20, 2000])),
            top_p=float(random.choice([0.5, 0.95, 1.0])),
            min_p=float(random.choice([0.0, 0.05])),
            seed=int(random.integers(0, 2**63)),
            position=int(random.integers(0, 10_000)),
            logprobs=int(random.choice([-1, 0, 5])),
            seen=random.integers(0, vocab_size, 50).tolist(),
            repetition=float(random.choice([1.0, 1.3])),
            bias={int(random.integers(vocab_size)): 5.0} if random.random() < 0.5 else {},
        )
        for _ in range(count)
    ]
    together = sample(logits, rows_of(batch))
    for order in (random.permutation(count), np.array([3]), np.array([7, 2]), *np.arange(count)[:, None]):
        part = sample(logits[order], rows_of([batch[row] for row in order]))
        assert part.token_ids == tuple(together.token_ids[row] for row in order)
        if part.logprobs:
            assert part.logprobs == tuple(together.logprobs[row] for row in order)


def test_sampling_does_not_modify_the_logits() -> None:
    for vocab_size in (50, 256):
        logits = random_logits(3, vocab_size)
        before = logits.clone()
        params = RowParameters(
            top_k=5, top_p=0.5, seen=[1, 2, 2], repetition=2.0, bias={2: 3.0}, banned=[1], logprobs=3
        )
        sample(logits, rows_of([params] * 3))
        assert torch.equal(logits, before)


@settings(max_examples=examples(100))
@given(
    several=st.lists(all_params, min_size=1, max_size=4),
    greedy=st.booleans(),
    biased=st.booleans(),
    odd=st.sampled_from([None, torch.inf, -torch.inf, torch.nan]),
    seed=st.integers(0, 1000),
)
def test_precomputed_largest_logits_change_no_token(
    several: list[RowParameters], greedy: bool, biased: bool, odd: float | None, seed: int
) -> None:
    """The CPU kernels find the largest logits before the sampler's edits, which may change them."""
    logits = random_logits(len(several) + 1, 5 * GROUP_TOKENS, seed=seed)
    if odd is not None:
        logits[0, seed % logits.shape[1]] = odd
    finite = logits.isfinite()
    maxima = torch.where(finite, logits, torch.nan).view(len(logits), -1, GROUP_TOKENS).amax(-1).numpy()
    tokens = torch.where(finite.all(1), logits.argmax(1), -1).to(torch.int32).numpy()
    several = [replace(one, temperature=0.0) if greedy else one for one in several]
    several[0] = replace(several[0], bias={seed % 64: 9.0} if biased else {})
    rows = rows_of(several)
    known = sample(logits[: len(several)].clone(), rows, LargestLogits(maxima, tokens))
    assert known == sample(logits[: len(several)].clone(), rows)


def test_no_rows() -> None:
    assert sample(torch.empty(0, 300), rows_of([])).token_ids == ()


ODD = [-torch.inf, torch.inf, torch.nan, 0.0, 1.0, 3e38, -3e38]


@settings(max_examples=examples(200))
@example(values=[-torch.inf, torch.nan, 0.0, 1.0], params=RowParameters(), logprobs=2, greedy=False)
@example(values=[torch.nan, -torch.inf], params=RowParameters(), logprobs=2, greedy=True)
@given(
    values=st.lists(st.sampled_from(ODD), min_size=1, max_size=300),
    params=all_params,
    logprobs=st.sampled_from([-1, 0, 20]),
    greedy=st.booleans(),
)
def test_nan_logits_neither_raise_nor_win(
    values: list[float], params: RowParameters, logprobs: int, greedy: bool
) -> None:
    logits = torch.tensor([values, [0.0] * len(values)])
    params = replace(params, logprobs=logprobs, temperature=0.0 if greedy else params.temperature)
    sampled = sample(logits, rows_of([params, params]))
    token, numbers = sampled.token_ids[0], [v for v in values if v > -torch.inf]
    sound = bool(numbers) and torch.inf not in numbers and not any(map(math.isnan, values))
    assert (token == NO_TOKEN) == (not sound)
    if sound:
        assert values[token] == max(numbers) if greedy else values[token] in numbers
    for entry in sampled.logprobs:
        assert entry is not None
        assert np.isfinite([entry.logprob, *entry.top_logprobs]).all()
    assert sampled.token_ids[1] == sample(logits[1:], rows_of([params])).token_ids[0]


@settings(max_examples=examples(100))
@given(
    spread=st.sampled_from([0.5, 2.0, 6.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.floats(0.01, 0.999),
    groups=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_tokens_found_surely_in_the_nucleus_are_in_it(
    spread: float, temperature: float, top_p: float, groups: int, seed: int
) -> None:
    logits = random_logits(2, groups * GROUP_TOKENS, seed=seed, spread=spread)
    table, rows = logits.numpy(), rows_of([RowParameters(temperature=temperature, top_p=top_p)] * 2)
    order = np.argsort(-table, axis=1)
    for place in (0, 1, 5, 20, 100):
        tokens = order[:, place]
        sure = surely_in_nucleus(table, group_maxima(table), rows, np.arange(2), tokens)
        for row in np.flatnonzero(sure):
            assert in_nucleus(
                table[row], table[row].max(), np.float32(temperature), float(rows["top_p"][row]), int(tokens[row])
            )
        if place == 0:
            assert sure.all(), "the likeliest token is in each nucleus"
