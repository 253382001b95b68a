"""Log probabilities of the chosen and the most likely tokens, by the model's unedited logits.

In a row with a grammar, only allowed tokens count: their probabilities add up to 1.
"""

from __future__ import annotations

import numpy as np

from pillion.engine.sampling.cuts import group_maxima, heads, softmax_mass
from pillion.kernels.step import Float32, Int64
from pillion.types import TokenLogprob

# Reported for a probability of zero, as OpenAI does: JSON has no minus infinity.
MIN_LOGPROB = -9999.0


class LogprobReport:
    """Log probabilities of a step, for the rows that report some: log-softmax of the unedited logits.

    Created before the logits are edited, and read after the edits are undone.
    """

    def __init__(self, table: Float32, vocab_size: int, alternatives: Int64) -> None:
        """``table``: logits [R, W], C-contiguous, with -inf after the vocabulary. ``alternatives`` [R]: number of
        likeliest tokens to report per row, -1 for rows without a report."""
        self._table = table
        self._reporting = np.flatnonzero(alternatives >= 0)
        counts = np.minimum(alternatives[self._reporting], vocab_size)
        maxima = group_maxima(table)[self._reporting]
        values, tokens, _ = heads(table, maxima, self._reporting, np.maximum(counts, 1), maxima.shape[1])
        order = np.argsort(-values, axis=1, kind="stable")[:, : counts.max(initial=0)]
        self._values, self._tokens = np.take_along_axis(values, order, 1), np.take_along_axis(tokens, order, 1)
        self._counts = np.minimum(counts, (self._tokens >= 0).sum(axis=1))
        top, unscaled = maxima.max(axis=1), np.float32(1.0)
        masses = [softmax_mass(table[row], peak, unscaled) for row, peak in zip(self._reporting, top, strict=True)]
        self._log_mass = top + np.log(np.array(masses))

    def of(self, chosen: Int64, *, ranked: bool = False) -> tuple[TokenLogprob | None, ...]:
        """Return an entry per row, for the token chosen[i] and the likeliest ones; None for rows without a report. With
        ``ranked``, entries have the token's rank, and NaN if the row's largest logit is not finite."""
        entries: list[TokenLogprob | None] = [None] * len(chosen)
        tokens = chosen[self._reporting]
        logits = self._table[self._reporting, tokens]
        own = _floored(logits - self._log_mass)
        ranks = [0] * len(own)
        if ranked:
            own[~np.isfinite(self._log_mass)] = np.nan
            rows = zip(self._reporting.tolist(), logits, strict=True)
            ranks = [1 + int(np.count_nonzero(self._table[row] > logit)) for row, logit in rows]
        alternatives = _floored(self._values - self._log_mass[:, None])
        for index, row in enumerate(self._reporting.tolist()):
            count = self._counts[index]
            entries[row] = TokenLogprob(
                int(tokens[index]),
                float(own[index]),
                tuple(self._tokens[index, :count].tolist()),
                tuple(alternatives[index, :count].tolist()),
                ranks[index],
            )
        return tuple(entries)


def _floored(logprobs: Float32) -> Float32:
    return np.maximum(np.nan_to_num(logprobs, nan=MIN_LOGPROB, neginf=MIN_LOGPROB, posinf=0.0), MIN_LOGPROB)
