"""Acceptance rates of draft tokens by position after a text's end, per stream and for all streams of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from pillion.kernels.step import Int32
from pillion.settings.speculative_config import MAX_SPECULATIVE_TOKENS

Float64 = npt.NDArray[np.float64]

# Factor on the weight of older draft tokens per verified draft, in a stream's own rates and in those of all streams.
STREAM_FADING = 0.85
WORKER_FADING = 0.98
# Max factor on the interval between probes of a stream whose last probes were wrong or empty.
MAX_PATIENCE = 4
# Prior of an unmeasured acceptance rate, and its weight in verified draft tokens.
UNKNOWN_RATE = 0.5
UNKNOWN_WEIGHT = 8.0
# Weight, in draft tokens, of all streams' mean rate as the prior of a stream's.
OTHERS_WEIGHT = 2.0
# Weight, in draft tokens, of the prior rate per position of a stream, and the max of that prior.
POSITION_WEIGHT = 3.0
MAX_EXPECTED_RATE = 0.98

NO_TOKENS: Int32 = np.empty(0, dtype=np.int32)


class Acceptance:
    """Acceptance rates by position of a draft, given that all tokens before were accepted, as counts float64
    [MAX_SPECULATIVE_TOKENS]. The weight of older draft tokens fades."""

    __slots__ = ("_accepted", "_fading", "_verified")

    def __init__(self, fading: float) -> None:
        self._fading = fading
        self._verified: Float64 = np.zeros(MAX_SPECULATIVE_TOKENS)
        self._accepted: Float64 = np.zeros(MAX_SPECULATIVE_TOKENS)

    def record(self, drafted: int, accepted: int) -> None:
        """Record a verified draft of ``drafted`` tokens, of which the first ``accepted`` were accepted."""
        self._verified *= self._fading
        self._accepted *= self._fading
        self._verified[: min(accepted + 1, drafted)] += 1.0
        self._accepted[:accepted] += 1.0

    def mean_rate(self, prior: float, weight: float) -> float:
        """Return the acceptance rate over all positions, with a prior that counts as ``weight`` draft tokens."""
        return float((self._accepted.sum() + weight * prior) / (self._verified.sum() + weight))

    def rates(self, prior: Float64 | float, weight: float) -> Float64:
        """Return the acceptance rates by position, float64 [MAX_SPECULATIVE_TOKENS], with a prior that counts as
        ``weight`` draft tokens."""
        rates: Float64 = (self._accepted + weight * prior) / (self._verified + weight)
        return rates


@dataclass(slots=True, eq=False)
class DraftRecord:
    """A stream's draft statistics.

    Attributes:
        chances: float64 [MAX_SPECULATIVE_TOKENS], probability that the first 1, 2, 3... draft tokens are all accepted;
            descending.
        likeliest: first entry of ``chances``, as a Python float.
        had_draft: True if the stream's last draft or probe was not empty.
        expected: expected number of accepted tokens of the draft being verified.
        worth_s: estimated seconds that drafting saves until the stream's end; infinite if unknown.
    """

    chances: Float64 = field(default_factory=lambda: np.full(MAX_SPECULATIVE_TOKENS, UNKNOWN_RATE).cumprod())
    likeliest: float = UNKNOWN_RATE
    had_draft: bool = True
    expected: float = 0.0
    worth_s: float = inf
    _acceptance: Acceptance = field(default_factory=lambda: Acceptance(STREAM_FADING))
    # Tokens of the last probe: compared with the tokens generated later, never verified by a step.
    _probe: Int32 = field(default_factory=lambda: NO_TOKENS)
    # True while a probe, perhaps an empty one, is pending; the text's length when the last one was made, -1 for none.
    _is_probed: bool = False
    _probed_at: int = -1
    # Factor on the interval between probes; doubles with each probe without a correct token.
    _patience: int = 1

    def record(self, drafted: int, accepted: int) -> None:
        """Record a verified draft of this stream, like :meth:`Acceptance.record`."""
        self._acceptance.record(drafted, accepted)

    def update_chances(self, all_rates: Float64, all_mean: float) -> None:
        """Update ``chances`` from the rates of all streams, by position and mean, and the stream's own. Its prior at a
        position is all streams' rate, scaled by the ratio of the stream's mean rate to theirs."""
        mean = self._acceptance.mean_rate(all_mean, OTHERS_WEIGHT)
        prior = np.minimum(all_rates * (mean / all_mean), MAX_EXPECTED_RATE)
        chances: Float64 = self._acceptance.rates(prior, POSITION_WEIGHT).cumprod()
        self.chances, self.likeliest = chances, chances.item(0)

    def probe_is_due(self, num_tokens: int, every_tokens: int) -> bool:
        """Return whether a text of ``num_tokens`` tokens has grown by at least ``every_tokens`` (more after probes
        without a correct token) since the last probe or draft, or there was none."""
        return self._probed_at < 0 or num_tokens - self._probed_at >= every_tokens * self._patience

    def pop_probe(self, text: Int32) -> tuple[int, int]:
        """Compare the pending probe with the stream's whole text and drop it. Return the number of its tokens that can
        be compared, and of correct ones before the first wrong one."""
        generated = text[self._probed_at : self._probed_at + len(self._probe)] if len(self._probe) else NO_TOKENS
        wrong = np.flatnonzero(generated != self._probe[: len(generated)])
        correct = int(wrong[0]) if len(wrong) else len(generated)
        self._patience = 1 if correct or not self._is_probed else min(2 * self._patience, MAX_PATIENCE)
        self._probe, self._is_probed = NO_TOKENS, False
        return len(generated), correct

    def probe(self, drafted: Int32, num_tokens: int) -> None:
        """Store a probe: tokens drafted after the first ``num_tokens`` tokens of the text."""
        self._probe, self._is_probed, self._probed_at = drafted.copy(), True, num_tokens
        self.had_draft = len(drafted) > 0

    def record_proposal(self, drafted: Int32, num_tokens: int) -> None:
        """Record tokens drafted after the first ``num_tokens`` tokens, which a step verifies; drop a pending probe."""
        self._probe, self._is_probed, self._probed_at, self._patience = NO_TOKENS, False, num_tokens, 1
        self.had_draft = len(drafted) > 0
        self.expected = float(self.chances[: len(drafted)].sum())
