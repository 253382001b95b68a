"""How often guesses are right, by their place behind a text's end, measured for one stream or for all of a worker."""

from __future__ import annotations

from math import inf

import numpy as np
import numpy.typing as npt

from pillion.engine.backends.batch import Int32
from pillion.sampling_ranges import MAX_SPECULATIVE_TOKENS

Float64 = npt.NDArray[np.float64]

# Weight of a judged guess when the next one is judged: a stream's own, and of all streams together.
STREAM_FADING = 0.85
WORKER_FADING = 0.98
# A stream whose last probes were wrong, or for which nothing was found, is probed this many times more rarely at most.
MOST_PATIENCE = 4
# What nobody has measured yet: half of the guesses are right, said by as much as so many judged guesses.
UNKNOWN_RATE = 0.5
UNKNOWN_WEIGHT = 8.0
# As much as so many of a stream's own guesses count those of all streams; and for one place those of all places.
OTHERS_WEIGHT = 2.0
PLACE_WEIGHT = 3.0
# No place is expected to be right more often before it was measured.
MOST_EXPECTED = 0.98

NO_TOKENS = np.empty(0, dtype=np.int32)


class Acceptance:
    """Shares of right guesses, float64 [MAX_SPECULATIVE_TOKENS]: of those whose place was reached, because everything
    before them was right. Older guesses fade."""

    __slots__ = ("_fading", "_right", "_tried")

    def __init__(self, fading: float) -> None:
        self._fading = fading
        self._tried: Float64 = np.zeros(MAX_SPECULATIVE_TOKENS)
        self._right: Float64 = np.zeros(MAX_SPECULATIVE_TOKENS)

    def judge(self, made: int, right: int) -> None:
        """A guess of ``made`` tokens was judged: its first ``right`` ones were right, and the next one wrong."""
        self._tried *= self._fading
        self._right *= self._fading
        self._tried[: min(right + 1, made)] += 1.0
        self._right[:right] += 1.0

    def level(self, expected: float, weight: float) -> float:
        """The share at all places together, mixed with an expected one that counts as much as ``weight`` guesses."""
        return float((self._right.sum() + weight * expected) / (self._tried.sum() + weight))

    def rates(self, expected: Float64 | float, weight: float) -> Float64:
        """The shares, mixed with expected ones that count as much as ``weight`` guesses."""
        mixed: Float64 = (self._right + weight * expected) / (self._tried + weight)
        return mixed


class GuessRecord:
    """What a scheduler remembers of one stream's guesses. Attributes are for reading.

    Attributes:
        chances: float64 [MAX_SPECULATIVE_TOKENS], how likely it is that the first 1, 2, 3... guesses are all right;
            falls from place to place.
        likeliest: the first of them, as a plain number.
        found: whether the drafter knew a guess when it was asked last.
        expected: how many tokens of the guess that a step judges now were expected to be right.
        worth_s: how many seconds guesses save in the rest of the stream's life; infinite where nobody knows.
    """

    __slots__ = (
        "_acceptance",
        "_patience",
        "_probe",
        "_probed",
        "_probed_at",
        "chances",
        "expected",
        "found",
        "likeliest",
        "worth_s",
    )

    def __init__(self) -> None:
        self._acceptance = Acceptance(STREAM_FADING)
        self.chances: Float64 = np.array([UNKNOWN_RATE ** (place + 1) for place in range(MAX_SPECULATIVE_TOKENS)])
        self.likeliest = UNKNOWN_RATE
        self.found = True
        self.expected = 0.0
        self.worth_s = inf
        # A guess that no step judges: it is compared with the text once that has come.
        self._probe = NO_TOKENS
        # Whether there is one that has not been compared yet, be it empty; and behind how many tokens it was made.
        self._probed = False
        self._probed_at = -1
        # How many times more rarely than others it is probed: twice as many for each probe that was of no use.
        self._patience = 1

    def judge(self, made: int, right: int) -> None:
        """A guess was judged; see :meth:`Acceptance.judge`."""
        self._acceptance.judge(made, right)

    def expect(self, all_rates: Float64, all_level: float) -> None:
        """Compute ``chances`` anew. A place that is hardly measured is expected to differ from the same place of all
        streams as much as the stream does in general."""
        level = self._acceptance.level(all_level, OTHERS_WEIGHT)
        expected = np.minimum(all_rates * (level / all_level), MOST_EXPECTED)
        chances: Float64 = self._acceptance.rates(expected, PLACE_WEIGHT).cumprod()
        self.chances, self.likeliest = chances, chances.item(0)

    def probe_is_due(self, num_tokens: int, every_tokens: int) -> bool:
        """Whether the last probe was made ``every_tokens`` before the text's end, or earlier, or never. Where probes
        were of no use, the next one is due later."""
        return self._probed_at < 0 or num_tokens - self._probed_at >= every_tokens * self._patience

    def take_probe(self, text: Int32) -> tuple[int, int]:
        """(tokens, right ones) of the last probe, given all of the text. Nothing is left of it."""
        came = text[self._probed_at : self._probed_at + len(self._probe)] if len(self._probe) else NO_TOKENS
        wrong = np.flatnonzero(came != self._probe[: len(came)])
        right = int(wrong[0]) if len(wrong) else len(came)
        self._patience = 1 if right or not self._probed else min(2 * self._patience, MOST_PATIENCE)
        self._probe, self._probed = NO_TOKENS, False
        return len(came), right

    def probe(self, guess: Int32, num_tokens: int) -> None:
        """Remember what was guessed behind the first ``num_tokens`` tokens of the text."""
        self._probe, self._probed, self._probed_at = guess.copy(), True, num_tokens
        self.found = len(guess) > 0

    def asked(self, guess: Int32, num_tokens: int) -> None:
        """A guess was asked for, to be judged by a step; it takes the place of a probe."""
        self._probe, self._probed, self._probed_at, self._patience = NO_TOKENS, False, num_tokens, 1
        self.found = len(guess) > 0
        self.expected = float(self.chances[: len(guess)].sum())
