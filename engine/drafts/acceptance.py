"""Measures how often drafts are right, by their place after a text's end, for one stream, or for all streams of a
worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from pillion.kernels.step import Int32
from pillion.settings.speculative_config import MAX_SPECULATIVE_TOKENS

Float64 = npt.NDArray[np.float64]

# When a draft token is judged, the weight of earlier draft tokens is multiplied by STREAM_FADING in the stream's own
# rates, and by WORKER_FADING in those of all streams.
STREAM_FADING = 0.85
WORKER_FADING = 0.98
# A stream whose last probes were wrong or empty is probed more rarely than others, but at most by this factor.
MOST_PATIENCE = 4
# A rate of right draft tokens that was never measured is assumed to be UNKNOWN_RATE, with the weight of UNKNOWN_WEIGHT
# judged draft tokens.
UNKNOWN_RATE = 0.5
UNKNOWN_WEIGHT = 8.0
# These two weights mix rates where a stream has few draft tokens of its own: the rate of all streams counts like so
# many draft tokens of the stream, and the rate that is expected for a place like so many draft tokens at that place.
OTHERS_WEIGHT = 2.0
PLACE_WEIGHT = 3.0
# As long as no draft token at a place was judged, draft tokens there are expected to be right no more often than this.
MOST_EXPECTED = 0.98

NO_TOKENS = np.empty(0, dtype=np.int32)


class Acceptance:
    """Holds, for each place of a draft, the share of right tokens, float64 [MAX_SPECULATIVE_TOKENS], among those whose
    place was reached because all before them were right. Older draft tokens count less and less."""

    __slots__ = ("_fading", "_right", "_tried")

    def __init__(self, fading: float) -> None:
        self._fading = fading
        self._tried: Float64 = np.zeros(MAX_SPECULATIVE_TOKENS)
        self._right: Float64 = np.zeros(MAX_SPECULATIVE_TOKENS)

    def judge(self, made: int, right: int) -> None:
        """Notes that a draft of ``made`` tokens was judged: the first ``right`` were right, the next one wrong."""
        self._tried *= self._fading
        self._right *= self._fading
        self._tried[: min(right + 1, made)] += 1.0
        self._right[:right] += 1.0

    def level(self, expected: float, weight: float) -> float:
        """Returns the share of right draft tokens at all places together, mixed with an expected one that counts like
        ``weight`` draft tokens."""
        return float((self._right.sum() + weight * expected) / (self._tried.sum() + weight))

    def rates(self, expected: Float64 | float, weight: float) -> Float64:
        """Returns the shares of right drafts by place, mixed with expected ones that count as much as ``weight``
        draft tokens."""
        mixed: Float64 = (self._right + weight * expected) / (self._tried + weight)
        return mixed


@dataclass(slots=True, eq=False)
class DraftRecord:
    """Holds what a scheduler remembers of one stream's draft tokens. Attributes are for reading.

    Attributes:
        chances: float64 [MAX_SPECULATIVE_TOKENS], how likely it is that the first 1, 2, 3... draft tokens are all
            right; falls from place to place.
        likeliest: the first entry of ``chances``, as a Python float.
        found: whether the drafter had a draft for this stream when it was asked last.
        expected: how many tokens are expected to be right of the draft token that a step judges now.
        worth_s: how many seconds draft tokens save in the rest of the stream's life; infinite where nobody knows.
    """

    chances: Float64 = field(default_factory=lambda: np.full(MAX_SPECULATIVE_TOKENS, UNKNOWN_RATE).cumprod())
    likeliest: float = UNKNOWN_RATE
    found: bool = True
    expected: float = 0.0
    worth_s: float = inf
    _acceptance: Acceptance = field(default_factory=lambda: Acceptance(STREAM_FADING))
    # These are the tokens of the last probe, which no step judges: they are compared with the stream's text once that
    # has come.
    _probe: Int32 = field(default_factory=lambda: NO_TOKENS)
    # These say whether a probe, perhaps an empty one, is not compared with the text yet, and after how many tokens it
    # was made.
    _probed: bool = False
    _probed_at: int = -1
    # The stream is probed this many times more rarely than others: twice as many for each probe that was of no use.
    _patience: int = 1

    def judge(self, made: int, right: int) -> None:
        """Notes that a step judged draft tokens of this stream, as :meth:`Acceptance.judge` does."""
        self._acceptance.judge(made, right)

    def expect(self, all_rates: Float64, all_level: float) -> None:
        """Computes ``chances`` anew. Where few draft tokens of the stream were judged at a place, its rate there is
        expected to differ from that of all streams as much as it does over all places."""
        level = self._acceptance.level(all_level, OTHERS_WEIGHT)
        expected = np.minimum(all_rates * (level / all_level), MOST_EXPECTED)
        chances: Float64 = self._acceptance.rates(expected, PLACE_WEIGHT).cumprod()
        self.chances, self.likeliest = chances, chances.item(0)

    def probe_is_due(self, num_tokens: int, every_tokens: int) -> bool:
        """Returns whether the last probe was made ``every_tokens`` before the text's end, or earlier, or never. Where
        probes were of no use, the next one is due later."""
        return self._probed_at < 0 or num_tokens - self._probed_at >= every_tokens * self._patience

    def take_probe(self, text: Int32) -> tuple[int, int]:
        """Compares the last probe with the stream's whole text, and forgets the probe. Returns how many tokens it had,
        and how many of them were right."""
        came = text[self._probed_at : self._probed_at + len(self._probe)] if len(self._probe) else NO_TOKENS
        wrong = np.flatnonzero(came != self._probe[: len(came)])
        right = int(wrong[0]) if len(wrong) else len(came)
        self._patience = 1 if right or not self._probed else min(2 * self._patience, MOST_PATIENCE)
        self._probe, self._probed = NO_TOKENS, False
        return len(came), right

    def probe(self, drafted: Int32, num_tokens: int) -> None:
        """Remembers a probe: the draft token that was made after the first ``num_tokens`` tokens of the text."""
        self._probe, self._probed, self._probed_at = drafted.copy(), True, num_tokens
        self.found = len(drafted) > 0

    def asked(self, drafted: Int32, num_tokens: int) -> None:
        """Notes that draft tokens were made which a step judges; they take the place of a probe."""
        self._probe, self._probed, self._probed_at, self._patience = NO_TOKENS, False, num_tokens, 1
        self.found = len(drafted) > 0
        self.expected = float(self.chances[: len(drafted)].sum())
