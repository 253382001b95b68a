"""Scores of a prompt's known tokens: log-softmax of unedited logits.

The host scores row by row, so that a row stays in its caches; a GPU scores a few rows at a time, so that a step needs
little memory besides its logits. Never raises.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from pillion.engine.sampling.cuts import whole_groups
from pillion.engine.sampling.logprobs import MIN_LOGPROB, LogprobReport
from pillion.kernels.step import ScoredRows
from pillion.types import TokenLogprob

# Rows per round on a GPU, whose temporary values are as large as the logits.
ROUND_ROWS = 32


def score_on_host(logits: torch.Tensor, rows: ScoredRows) -> tuple[TokenLogprob, ...]:
    """Return an entry per row of logits [Q, V]; the log probability is NaN if the row's largest logit is not finite."""
    with np.errstate(all="ignore"):
        report = LogprobReport(whole_groups(logits), logits.shape[1], rows.alternatives)
        return tuple(entry for entry in report.of(rows.token_ids, ranked=True) if entry is not None)


def score(logits: torch.Tensor, token_ids: torch.Tensor, alternatives: int) -> torch.Tensor:
    """Score tokens [Q] int64 by logits [Q, V] float32 on their device.

    Returns float32 [Q, 2 + 2 * alternatives]: each token's log probability and its rank, from 1; the likeliest tokens'
    log probabilities, in descending order, and their ids, exact below 2**24. NaN if a row's logits are not finite.
    """
    scores = torch.empty((len(logits), 2 + 2 * alternatives), dtype=torch.float32, device=logits.device)
    for begin in range(0, len(logits), ROUND_ROWS):
        rows, ids = logits[begin : begin + ROUND_ROWS], token_ids[begin : begin + ROUND_ROWS, None]
        out = scores[begin : begin + ROUND_ROWS]
        own, total = rows.gather(1, ids), rows.logsumexp(1, keepdim=True)
        likeliest, top_ids = rows.topk(alternatives, dim=1)
        out[:, :1] = torch.where(total.isfinite(), (own - total).clamp(min=MIN_LOGPROB), math.nan)
        out[:, 1] = (rows > own).sum(1) + 1
        out[:, 2 : 2 + alternatives] = (likeliest - total).clamp(min=MIN_LOGPROB)
        out[:, 2 + alternatives :] = top_ids
    return scores


def max_alternatives(rows: ScoredRows, vocab_size: int) -> int:
    """Return the largest number of alternatives that a row reports."""
    return int(min(rows.alternatives.max(initial=0), vocab_size))


def entries(scores: torch.Tensor, rows: ScoredRows) -> tuple[TokenLogprob, ...]:
    """Convert the result of :func:`score`, copied to the host, to a TokenLogprob per row."""
    alternatives = (scores.shape[1] - 2) // 2
    ids = scores[:, 2 + alternatives :].to(torch.int64).tolist()
    return tuple(
        TokenLogprob(token, own, tuple(top_ids[:count]), tuple(values[:count]), int(rank))
        for token, count, (own, rank, *values), top_ids in zip(
            rows.token_ids.tolist(),
            rows.alternatives.tolist(),
            scores[:, : 2 + alternatives].tolist(),
            ids,
            strict=True,
        )
    )
