"""Masked rows against plain sampling over only the allowed tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.sampling.cuts import group_maxima
from pillion.engine.sampling.masks import FEW_TOKENS, AllowedTokens
from pillion.engine.sampling.sampler import LargestLogits, sample
from pillion.kernels.step import MASK_LATE, NO_TOKEN, SamplingRows
from tests.support.examples import examples
from tests.support.sampling import GivenMasks, RowParameters, packed_bits, rows_of, unpruned

DENSITIES = st.sampled_from([0.0, 0.003, 0.1, 0.5, 0.97, 1.0])


def with_masks(rows: SamplingRows, numbers: list[int], allowed: np.ndarray, late: tuple[int, ...] = ()) -> SamplingRows:
    places = [numbers.index(number) for number in late]
    return replace(rows, masks=GivenMasks(np.array(numbers), allowed, places))


def a_case(seed: int, vocab_size: int, count: int, density: float) -> tuple[torch.Tensor, np.ndarray]:
    """Return logits [count, V] and allowed tokens, bool [count, V], at least one in each row."""
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    draws = np.random.default_rng(seed)
    allowed = draws.random((count, vocab_size)) < density
    allowed[np.arange(count), draws.integers(0, vocab_size, count)] = True
    return logits, allowed


@settings(max_examples=examples(150))
@given(
    st.integers(0, 10_000),
    st.sampled_from([33, 97, 300, 1280, 5000]),
    DENSITIES,
    st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    st.sampled_from([0, 1, 5, 40]),
    st.sampled_from([1.0, 0.9, 0.2]),
    st.sampled_from([0.0, 0.1]),
)
def test_masked_rows_sample_only_allowed_tokens(
    seed: int, vocab_size: int, density: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits, allowed = a_case(seed, vocab_size, 4, density)
    params = [
        RowParameters(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed + row, position=row)
        for row in range(4)
    ]
    allowed[3] = True
    kept = np.where(allowed, logits.numpy(), -np.inf)
    wanted = [
        int(kept[row].argmax()) if temperature == 0.0 else unpruned(torch.from_numpy(kept[row]), params[row])
        for row in range(4)
    ]
    rows = with_masks(rows_of(params), [0, 1, 2], allowed[:3])
    assert list(sample(logits.clone(), rows).token_ids) == wanted


def likeliest(logits: torch.Tensor) -> LargestLogits:
    """Return the largest logits as a backend's kernels find them."""
    table = logits.numpy()
    tokens = np.where(np.isfinite(table).all(axis=1), table.argmax(axis=1), -1)
    return LargestLogits(group_maxima(table), tokens.astype(np.int32))


@settings(max_examples=examples(150))
@given(
    st.integers(0, 10_000),
    st.lists(st.sampled_from([0.0, 0.003, 0.05, 0.4, 0.97]), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 4.0]), min_size=5, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([np.nan, np.inf])), max_size=2),
    st.booleans(),
)
def test_whole_and_masked_logits_give_the_same_tokens(
    seed: int,
    densities: list[float],
    temperatures: list[float],
    broken: list[tuple[int, float]],
    known: bool,
) -> None:
    """Editing a row without a mask makes the sampler mask all rows, without effect there."""
    vocab_size = 16 * 128
    cases = [a_case(seed + row, vocab_size, 1, density) for row, density in enumerate([*densities, 1.0])]
    logits, allowed = torch.cat([case[0] for case in cases]), np.concatenate([case[1] for case in cases])
    for row, value in broken:
        logits[row, seed % vocab_size] = value
    params = [RowParameters(temperature=one, seed=seed, position=row) for row, one in enumerate(temperatures)]
    whole = with_masks(rows_of(params), [0, 1, 2, 3], allowed[:4])
    edited = with_masks(rows_of([*params[:4], replace(params[4], bias={7: 0.0})]), [0, 1, 2, 3], allowed[:4])
    found = sample(logits.clone(), whole, likeliest(logits) if known else None).token_ids
    assert found == sample(logits.clone(), edited).token_ids
    for row, token in enumerate(found):
        spoilt = allowed[row] & ~np.isfinite(logits[row].numpy())
        assert token == NO_TOKEN if spoilt.any() else allowed[row, token]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_is_masked_only_where_it_has_to_be(temperature: float) -> None:
    """The likeliest token is allowed, banned with few others allowed, and banned with many allowed."""
    vocab_size = 2 * FEW_TOKENS + 128
    logits = torch.zeros(3, vocab_size)
    logits[:, 9] = 20.0
    allowed = np.zeros((3, vocab_size), bool)
    allowed[0, [9, 10]] = allowed[1, [11, 12]] = allowed[2, 128:] = True
    rows = with_masks(rows_of([RowParameters(temperature=temperature)] * 3), [0, 1, 2], allowed)
    tokens = sample(logits, rows).token_ids
    assert tokens[0] == 9
    assert tokens[1] in (11, 12)
    assert tokens[2] >= 128
    assert torch.isinf(logits).any(1).tolist() == [False, False, True]


@pytest.mark.parametrize(
    "parameters",
    [
        RowParameters(top_k=3),
        RowParameters(top_p=0.5),
        RowParameters(min_p=0.1),
        RowParameters(logprobs=0),
        RowParameters(bias={3: 1.0}),
    ],
)
def test_cuts_edits_and_reports_need_masked_logits(parameters: RowParameters) -> None:
    allowed = np.ones((1, 97), bool)
    plain = rows_of([RowParameters(), parameters])
    found = AllowedTokens.of(np.array([0]), packed_bits(allowed), plain)
    assert (found is None) == bool(parameters.bias)
    assert AllowedTokens.of(np.array([1]), packed_bits(allowed), plain) is None


def test_logprobs_are_those_of_the_masked_distribution() -> None:
    logits, allowed = a_case(1, 300, 2, 0.05)
    kept = torch.from_numpy(np.where(allowed, logits.numpy(), -np.inf))
    wanted = kept.double().log_softmax(-1)
    rows = with_masks(rows_of([RowParameters(temperature=0.7, logprobs=3, bias={4: 3.0})] * 2), [0, 1], allowed)
    sampled = sample(logits.clone(), rows)
    for row, entry in enumerate(sampled.logprobs):
        assert entry is not None
        assert entry.token_id == sampled.token_ids[row]
        assert entry.logprob == pytest.approx(float(wanted[row, entry.token_id]), abs=1e-4)
        assert list(entry.top_ids) == wanted[row].topk(3).indices.tolist()
        assert entry.top_logprobs == pytest.approx(wanted[row].topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_late_mask_leaves_only_its_row_without_a_token(temperature: float) -> None:
    logits, allowed = a_case(2, 97, 3, 0.2)
    params = [RowParameters(temperature=temperature, seed=row) for row in range(3)]
    on_time = sample(logits.clone(), with_masks(rows_of(params), [0, 1, 2], allowed)).token_ids
    late = sample(logits.clone(), with_masks(rows_of(params), [0, 1, 2], allowed, late=(1,))).token_ids
    assert late == (on_time[0], MASK_LATE, on_time[2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_are_lifted_if_they_would_leave_no_token(temperature: float) -> None:
    """min_tokens bans EOS; a grammar that allows only EOS wins."""
    logits = torch.zeros(2, 300)
    logits[:, 7] = 5.0
    allowed = np.zeros((2, 300), bool)
    allowed[0, [7, 200]] = allowed[1, [7, 299]] = True
    params = [RowParameters(temperature=temperature, banned=banned) for banned in ([7], [7, 299, 9999])]
    tokens = sample(logits, with_masks(rows_of(params), [0, 1], allowed)).token_ids
    assert tokens[0] == 200
    assert tokens[1] in (7, 299)


def test_a_bias_cannot_allow_masked_tokens() -> None:
    logits, allowed = torch.zeros(1, 97), np.zeros((1, 97), bool)
    allowed[0, [3, 4]] = True
    rows = rows_of([RowParameters(temperature=0.0, bias={50: 100.0, 4: 1.0, 3: -100.0})])
    assert sample(logits, with_masks(rows, [0], allowed)).token_ids == (4,)
