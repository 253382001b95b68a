"""Log probabilities of the chosen and the most likely tokens, by the model's unedited logits.

For a row with a grammar, by the masked distribution: allowed tokens have a mass of one.
"""

from __future__ import annotations

import numpy as np

from pillion.engine.sampling.cuts import group_maxima, heads, softmax_mass
from pillion.kernels.step import Float32, Int64
from pillion.types import TokenLogprob

# Reported for a probability of zero, as OpenAI does: JSON has no minus infinity.
MIN_LOGPROB = -9999.0


class LogprobReport:
    """The log probabilities of a step's rows that report them: log-softmax of the raw logits.

    Made before the logits are edited and read when the edits are undone, so that temperature, penalties and bias have
    no effect.
    """

    def __init__(self, table: Float32, vocab_size: int, alternatives: Int64) -> None:
        """Make a report of ``table`` [R, W], C-contiguous and -inf after the vocabulary; ``alternatives`` is
        SamplingRows.logprobs."""
        self._table = table
        self._reporting = np.flatnonzero(alternatives >= 0)
        counts = np.minimum(alternatives[self._reporting], vocab_size)
        maxima = group_maxima(table)[self._reporting]
        values, tokens, _ = heads(table, maxima, self._reporting, np.maximum(counts, 1), maxima.shape[1])
        order = np.argsort(-values, axis=1, kind="stable")[:, : counts.max(initial=0)]
        self._values, self._tokens = np.take_along_axis(values, order, 1), np.take_along_axis(tokens, order, 1)
        self._counts = np.minimum(counts, (self._tokens >= 0).sum(axis=1))
        top, one = maxima.max(axis=1), np.float32(1.0)
        masses = [softmax_mass(table[row], peak, one) for row, peak in zip(self._reporting, top, strict=True)]
        self._log_mass = top + np.log(np.array(masses))

    def of(self, chosen: Int64, *, ranked: bool = False) -> tuple[TokenLogprob | None, ...]:
        """Return an entry for each row's token ``chosen`` [R]; None for rows without a report. ``ranked`` entries have
        ranks, and NaN for rows whose logits are not finite."""
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
        for place, row in enumerate(self._reporting.tolist()):
            count = self._counts[place]
            entries[row] = TokenLogprob(
                int(tokens[place]),
                float(own[place]),
                tuple(self._tokens[place, :count].tolist()),
                tuple(alternatives[place, :count].tolist()),
                ranks[place],
            )
        return tuple(entries)


def _floored(logprobs: Float32) -> Float32:
    return np.maximum(np.nan_to_num(logprobs, nan=MIN_LOGPROB, neginf=MIN_LOGPROB, posinf=0.0), MIN_LOGPROB)
