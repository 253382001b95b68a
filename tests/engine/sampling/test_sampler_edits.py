"""Bias, penalties, min_tokens and log probabilities against transformers, torch and plain definitions in float64."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from pillion.engine.sampling.logprobs import MIN_LOGPROB
from pillion.engine.sampling.sampler import edited, sample
from tests.support.examples import examples
from tests.support.sampling import RowParameters, chi_square_fits, draws_of, rows_of

VOCAB = 300


def logits_of(rows: int = 1, seed: int = 5, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def after(logits: torch.Tensor, *all_params: RowParameters) -> torch.Tensor:
    """Return the edited logits."""
    table = logits.numpy().copy()
    with edited(table, rows_of(all_params).edits):
        inside = table.copy()
    assert np.array_equal(table, logits.numpy(), equal_nan=True), "the edits were not taken back"
    return torch.from_numpy(inside)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_penalty_matches_transformers(penalty: float) -> None:
    logits, history = logits_of(), [7, 8, 7, 299, 0, 7]
    wanted = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), logits.clone())
    assert torch.equal(after(logits, RowParameters(seen=history, repetition=penalty)), wanted)


def test_logit_bias_matches_transformers() -> None:
    logits, bias = logits_of(), {0: 5.0, 17: -100.0, 299: 0.25}
    wanted = hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(
        torch.zeros(1, 1, dtype=torch.long), logits.clone()
    )
    assert torch.equal(after(logits, RowParameters(bias=bias)), wanted)


def test_banned_ids_match_transformers_min_new_tokens() -> None:
    logits, ends = logits_of(), [3, 200]
    wanted = hf.MinNewTokensLengthLogitsProcessor(2, 4, ends, device="cpu")(
        torch.zeros(1, 5, dtype=torch.long), logits.clone()
    )
    assert torch.equal(after(logits, RowParameters(banned=ends)), wanted)
    # End tokens of a tokenizer may lack a logit.
    assert torch.equal(after(logits, RowParameters(banned=[*ends, VOCAB, 99_999])), wanted)


def plain(logits: list[float], params: RowParameters) -> list[float]:
    """Apply all edits in float64, token by token, in the order of pillion.engine.sampling.sampler."""
    values, answered = list(logits), Counter(params.answered)
    for token in range(len(values)):
        values[token] += params.bias.get(token, 0.0)
        if token in params.seen:
            values[token] = (
                values[token] / params.repetition if values[token] > 0 else values[token] * params.repetition
            )
        if answered[token]:
            values[token] -= params.presence + params.frequency * answered[token]
        if token in params.banned:
            values[token] = -math.inf
    return values


ids = st.lists(st.integers(0, VOCAB - 1), max_size=40)


@settings(max_examples=examples(150))
@given(
    seed=st.integers(0, 1000),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=20),
    prompt=ids,
    answer=ids,
    repetition=st.sampled_from([1.0, 0.1, 1.2, 10.0]),
    presence=st.sampled_from([0.0, -2.0, 0.5]),
    frequency=st.sampled_from([0.0, -2.0, 0.3]),
    banned=st.lists(st.integers(0, VOCAB - 1), max_size=4),
)
def test_all_edits_together(
    seed: int,
    bias: dict[int, float],
    prompt: list[int],
    answer: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    banned: list[int],
) -> None:
    params = RowParameters(
        bias=bias,
        seen=[*prompt, *answer],
        repetition=repetition,
        answered=answer if presence or frequency else [],
        presence=presence,
        frequency=frequency,
        banned=banned,
    )
    logits = logits_of(2, seed)
    got = after(logits, RowParameters(temperature=0.0), params)
    assert torch.equal(got[0], logits[0]), "another row's edits came here"
    np.testing.assert_allclose(got[1].numpy(), plain(logits[1].tolist(), params), rtol=1e-5, atol=1e-4)


def test_edits_decide_what_is_drawn() -> None:
    """Sampling uses the softmax of the edited logits, through all filters."""
    draws = 6000
    params = RowParameters(
        top_k=40, bias={5: 4.0, 6: -100.0}, seen=[1, 2, 3] * 5, repetition=1.5, answered=[2, 3, 3], frequency=0.7
    )
    logits = logits_of(spread=1.0)
    wanted = torch.tensor(plain(logits[0].tolist(), params))
    wanted[wanted < wanted.topk(40).values[-1]] = -torch.inf
    tokens = sample(logits.expand(draws, -1), draws_of(params, draws)).token_ids
    assert chi_square_fits(tokens, wanted.softmax(-1).numpy())


def test_greedy_rows_are_edited_too() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    for params, token in (
        (RowParameters(temperature=0.0, bias={1: 1.5}), 1),
        (RowParameters(temperature=0.0, banned=[0, 1]), 2),
        (RowParameters(temperature=0.0, answered=[0, 0, 1], frequency=1.0, presence=0.5), 2),
        (RowParameters(temperature=0.0, seen=[0, 1, 2], repetition=10.0), 3),
        # The bias leaves one token, which wins at any temperature.
        (RowParameters(temperature=100.0, banned=[t for t in range(VOCAB) if t != 250], seed=9), 250),
    ):
        assert sample(logits, rows_of([params])).token_ids == (token,)


@settings(max_examples=examples(60))
@given(
    all_params=st.lists(
        st.builds(
            RowParameters,
            temperature=st.sampled_from([0.0, 0.5, 2.0]),
            top_k=st.sampled_from([0, 3]),
            seed=st.integers(0, 99),
            logprobs=st.sampled_from([-1, 0, 1, 5, 20]),
            bias=st.sampled_from([{}, {4: 9.0}]),
            seen=st.just([1, 2, 3]),
            repetition=st.sampled_from([1.0, 3.0]),
        ),
        min_size=1,
        max_size=5,
    ),
    vocab_size=st.sampled_from([5, 20, 97, VOCAB, 40_000]),
    seed=st.integers(0, 1000),
)
def test_logprobs_are_the_log_softmax_of_the_raw_logits(
    all_params: list[RowParameters], vocab_size: int, seed: int
) -> None:
    logits = torch.randn(len(all_params), vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    truth = logits.double().log_softmax(-1)
    sampled = sample(logits, rows_of(all_params))
    if all(params.logprobs < 0 for params in all_params):
        assert sampled.logprobs == ()
        return
    for row, (params, token, entry) in enumerate(zip(all_params, sampled.token_ids, sampled.logprobs, strict=True)):
        if params.logprobs < 0:
            assert entry is None
            continue
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(truth[row, token].item(), abs=1e-4)
        best = truth[row].topk(min(params.logprobs, vocab_size))
        assert entry.top_ids == tuple(best.indices.tolist())
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


def test_logprobs_of_tied_and_impossible_tokens() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[0, 10:200] = 1.0
    logits[1, 7] = 0.0
    first, second = sample(
        logits, rows_of([RowParameters(temperature=0.0, logprobs=3), RowParameters(logprobs=2)])
    ).logprobs
    assert first is not None
    assert second is not None
    assert first.top_ids == (10, 11, 12)
    assert first.top_logprobs == pytest.approx([-math.log(190)] * 3)
    assert (second.token_id, second.logprob, second.top_ids[0]) == (7, 0.0, 7)
    assert second.top_logprobs == (0.0, MIN_LOGPROB)
