"""Acceptance rates of draft tokens by position after a text's end, per stream and for all streams of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from pillion.kernels.step import Int32
from pillion.settings.speculative_config import MAX_SPECULATIVE_TOKENS

Float64 = npt.NDArray[np.float64]

# Decay of older draft tokens per verified draft, in a stream's own rates and in those of all streams.
STREAM_FADING = 0.85
WORKER_FADING = 0.98
# Max factor by which a stream whose last probes were wrong or empty is probed more rarely.
MAX_PATIENCE = 4
# Prior of an unmeasured acceptance rate, and its weight in verified draft tokens.
UNKNOWN_RATE = 0.5
UNKNOWN_WEIGHT = 8.0
# Weights in draft tokens: of all streams' rate in a stream's, and of the expected rate at a position.
OTHERS_WEIGHT = 2.0
PLACE_WEIGHT = 3.0
MAX_EXPECTED_RATE = 0.98

NO_TOKENS = np.empty(0, dtype=np.int32)


class Acceptance:
    """Share of accepted tokens per position of a draft, float64 [MAX_SPECULATIVE_TOKENS], among those reached because
    all before them were accepted. Older draft tokens decay."""

    __slots__ = ("_fading", "_right", "_tried")

    def __init__(self, fading: float) -> None:
        self._fading = fading
        self._tried: Float64 = np.zeros(MAX_SPECULATIVE_TOKENS)
        self._right: Float64 = np.zeros(MAX_SPECULATIVE_TOKENS)

    def judge(self, made: int, right: int) -> None:
        """Record a verified draft of ``made`` tokens: the first ``right`` were accepted, the next one rejected."""
        self._tried *= self._fading
        self._right *= self._fading
        self._tried[: min(right + 1, made)] += 1.0
        self._right[:right] += 1.0

    def level(self, expected: float, weight: float) -> float:
        """Return the acceptance rate over all positions, mixed with ``expected``, which counts as ``weight`` draft
        tokens."""
        return float((self._right.sum() + weight * expected) / (self._tried.sum() + weight))

    def rates(self, expected: Float64 | float, weight: float) -> Float64:
        """Return the acceptance rates by position, mixed with ``expected``, which counts as ``weight`` draft tokens."""
        mixed: Float64 = (self._right + weight * expected) / (self._tried + weight)
        return mixed


@dataclass(slots=True, eq=False)
class DraftRecord:
    """A stream's draft statistics. Attributes are for reading.

    Attributes:
        chances: float64 [MAX_SPECULATIVE_TOKENS], probability that the first 1, 2, 3... draft tokens are all accepted;
            descending.
        likeliest: first entry of ``chances``, as a Python float.
        found: True if the drafter had a draft when last asked.
        expected: expected number of accepted tokens of the draft being verified.
        worth_s: seconds that draft tokens save in the rest of the stream's life; infinite if unknown.
    """

    chances: Float64 = field(default_factory=lambda: np.full(MAX_SPECULATIVE_TOKENS, UNKNOWN_RATE).cumprod())
    likeliest: float = UNKNOWN_RATE
    found: bool = True
    expected: float = 0.0
    worth_s: float = inf
    _acceptance: Acceptance = field(default_factory=lambda: Acceptance(STREAM_FADING))
    # Tokens of the last probe: compared with the stream's text once generated, never verified by a step.
    _probe: Int32 = field(default_factory=lambda: NO_TOKENS)
    # Whether a probe, perhaps empty, is pending, and the text's length when it was made.
    _probed: bool = False
    _probed_at: int = -1
    # Factor by which probes are rarer; doubles with each useless probe.
    _patience: int = 1

    def judge(self, made: int, right: int) -> None:
        """Record verified draft tokens of this stream, like :meth:`Acceptance.judge`."""
        self._acceptance.judge(made, right)

    def expect(self, all_rates: Float64, all_level: float) -> None:
        """Update ``chances``. At positions with few verified draft tokens, the stream's rate is assumed to differ from
        all streams' by as much as over all positions."""
        level = self._acceptance.level(all_level, OTHERS_WEIGHT)
        expected = np.minimum(all_rates * (level / all_level), MAX_EXPECTED_RATE)
        chances: Float64 = self._acceptance.rates(expected, PLACE_WEIGHT).cumprod()
        self.chances, self.likeliest = chances, chances.item(0)

    def probe_is_due(self, num_tokens: int, every_tokens: int) -> bool:
        """Return whether the last probe was made at least ``every_tokens`` (more after useless probes) before the
        text's end, or never."""
        return self._probed_at < 0 or num_tokens - self._probed_at >= every_tokens * self._patience

    def pop_probe(self, text: Int32) -> tuple[int, int]:
        """Compare the last probe with the stream's whole text and drop it. Returns its length, and how many of its
        tokens were right."""
        came = text[self._probed_at : self._probed_at + len(self._probe)] if len(self._probe) else NO_TOKENS
        wrong = np.flatnonzero(came != self._probe[: len(came)])
        right = int(wrong[0]) if len(wrong) else len(came)
        self._patience = 1 if right or not self._probed else min(2 * self._patience, MAX_PATIENCE)
        self._probe, self._probed = NO_TOKENS, False
        return len(came), right

    def probe(self, drafted: Int32, num_tokens: int) -> None:
        """Store a probe: tokens drafted after the first ``num_tokens`` tokens of the text."""
        self._probe, self._probed, self._probed_at = drafted.copy(), True, num_tokens
        self.found = len(drafted) > 0

    def asked(self, drafted: Int32, num_tokens: int) -> None:
        """Record draft tokens that a step verifies; they replace a probe."""
        self._probe, self._probed, self._probed_at, self._patience = NO_TOKENS, False, num_tokens, 1
        self.found = len(drafted) > 0
        self.expected = float(self.chances[: len(drafted)].sum())
