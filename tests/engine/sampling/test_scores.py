"""Scores of known tokens against torch's own log-softmax, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pillion.engine.sampling.logprobs import MIN_LOGPROB
from pillion.engine.sampling.sampler import sample
from pillion.engine.sampling.scores import (
    ROUND_ROWS,
    entries,
    max_alternatives,
    score,
    score_on_host,
)
from pillion.kernels.step import ScoredRows
from tests.support.sampling import RowParameters, rows_of


def on_host(logits: torch.Tensor, tokens: list[int], alternatives: list[int]) -> list:
    return list(score_on_host(logits, ScoredRows(np.array(tokens, np.int64), np.array(alternatives, np.int64))))


def on_device(logits: torch.Tensor, tokens: list[int], alternatives: list[int]) -> list:
    rows = ScoredRows(np.array(tokens, np.int64), np.array(alternatives, np.int64))
    most = max_alternatives(rows, logits.shape[1])
    return list(entries(score(logits, torch.tensor(tokens), most), rows))


@pytest.mark.parametrize("scored", [on_host, on_device])
@pytest.mark.parametrize("vocab_size", [5, 128, 1000])
def test_scores_match_log_softmax(vocab_size: int, scored: Callable) -> None:
    generator = torch.Generator().manual_seed(1)
    count = 2 * ROUND_ROWS + 3
    logits = torch.randn(count, vocab_size, generator=generator) * 8
    tokens = torch.randint(vocab_size, (count,), generator=generator).tolist()
    counts = [min(n % 5, vocab_size) for n in range(count)]
    exact = torch.log_softmax(logits.double(), -1)
    for one, token, most, row in zip(scored(logits, tokens, counts), tokens, counts, exact, strict=True):
        top = row.topk(most)
        assert (one.token_id, one.top_ids) == (token, tuple(top.indices.tolist()))
        assert (one.logprob, *one.top_logprobs) == pytest.approx((float(row[token]), *top.values.tolist()), abs=1e-5)
        assert one.rank == int((row > row[token]).sum()) + 1


@pytest.mark.parametrize("scored", [on_host, on_device])
def test_scores_of_nan_and_infinite_logits(scored: Callable) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [0.0, torch.nan, 1.0], [torch.inf, 0.0, 0.0], [-torch.inf] * 3])
    impossible, *broken = scored(logits, [1, 0, 1, 1], [3] * 4)
    assert (impossible.logprob, impossible.rank, impossible.top_logprobs[2]) == (MIN_LOGPROB, 3, MIN_LOGPROB)
    assert all(np.isnan(one.logprob) for one in broken)


def test_sampled_and_scored_rows_share_a_batch() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    kept = logits.clone()
    rows = rows_of([RowParameters(temperature=0.0, bias={7: 50.0}), RowParameters(seed=3, logprobs=2)])
    object.__setattr__(rows, "scored", ScoredRows(np.array([4, 5, 6]), np.array([0, 1, 2])))
    found = sample(logits, rows)
    assert (len(found.token_ids), found.token_ids[0], len(found.logprobs)) == (2, 7, 2)
    assert list(found.scored) == on_host(kept[2:], [4, 5, 6], [0, 1, 2])
    assert torch.equal(logits, kept)
