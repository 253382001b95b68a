"""How many tokens are guessed for each stream of a step: as many as make decoding fastest.

A step of R rows, a row for each decode and for each guess, takes t(R) seconds. It brings a token for each of its D
decodes, and for each guess one more with the chance P that it and those before it are right. Guesses are added in
falling order of P, as many as make (D + all their P) / t(R) largest. P comes from the measured acceptance of the
stream's and all streams' guesses, t from the steps that ran: rows cost hardly anything as long as a step waits for
weights to be read, and nearly as much as decodes once it waits for arithmetic, so no single price fits. For one stream
nearly every guess is worth its row; in a full batch hardly any is. Where steps run ahead of the device, those with
guesses do not (:mod:`pillion.engine.scheduling.in_flight`), which t has in it, too.

Where no guess is worth its row, the acceptance is measured all the same: now and then the drafter is asked, and what it
says is compared with the text that comes without it. Such a probe costs a look-up and no row. The control then rests,
too: it decides nothing for the next few steps of as many decodes, so that a full batch, in which guesses hardly ever
pay, does not pay for deciding against them in each step, either. Sans-IO (I9).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from pillion.engine.backends.batch import Int32
from pillion.engine.scheduling.acceptance import UNKNOWN_RATE, UNKNOWN_WEIGHT, WORKER_FADING, Acceptance, Float64
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_cost import StepCost, features
from pillion.engine.scheduling.step_plan import SequencePiece, StepPlan
from pillion.speculative_config import SpeculativeConfig

# Numbers of rows between which the cost of steps is taken for linear, and how far a step moves the two beside it.
KNOTS = tuple(2**power for power in range(13))
LEARNING_RATE = 0.2
# How far each step moves all of them back to what the linear model of steps expects, so that one which was measured
# while the machine was slow, and is shunned since, is tried again.
RETURN_RATE = 0.002
# Guesses are made where they should make decoding faster by this factor, at least: estimates err.
LEAST_SPEEDUP = 1.05
# Guesses are made for the streams that look best, so fewer are right than it seems. The chances are therefore corrected
# by the share that was right of what was expected, which begins as if so many tokens had come as expected.
CALIBRATION_TOKENS = 8.0
# Streams without guesses are probed once in as many tokens as there are decodes, within these bounds, so that a step
# has one probe on average; by a drafter that takes its time, more rarely. A probe guesses what comes until the next.
LEAST_PROBE_TOKENS, MOST_PROBE_TOKENS = 2, 16
SLOW_PROBE_TOKENS = 128
# A drafter that takes its time probes one stream at a time, in at most this share of the time of all steps. What is
# left of that time is kept, up to so much.
MOST_PROBING_SHARE = 0.01
MOST_PROBING_CREDIT_S = 0.05
# The longest rest.
MOST_RESTING_STEPS = 4


class RowCosts:
    """Seconds of steps without prompt tails by their rows: a line through KNOTS, each of which moves towards the steps
    that were measured beside it.

    What each step needs is computed in plain numbers. Much of NumPy, its interpolation and sorting among that, lets go
    of the interpreter's lock, and a step thread that does so while the last step's tokens are being sent on waits for
    all of them.
    """

    def __init__(self) -> None:
        self._seconds = [0.0] * len(KNOTS)
        self._known = False

    def expect(self, rows: int, seconds: float, row_s: float, steps: int = 1) -> None:
        """The linear model expects a step of ``rows`` rows to take ``seconds``, and ``row_s`` for each row more. It was
        asked last ``steps`` steps ago."""
        if seconds > 0:
            rate = 1 - (1 - RETURN_RATE) ** steps if self._known else 1.0
            for place, knot in enumerate(KNOTS):
                expected = max(seconds + row_s * (knot - rows), seconds / 2)
                self._seconds[place] += rate * (expected - self._seconds[place])
            self._known = True

    def observe(self, rows: int, seconds: float) -> None:
        """A step has taken so long."""
        if not self._known:
            return
        expected = self.seconds(rows)
        # A hiccup teaches no more than a step that takes twice as long.
        error = LEARNING_RATE * (min(seconds, 2 * expected) - expected)
        place, share = _beside(rows)
        self._seconds[place] += (1 - share) * error
        self._seconds[place + 1] += share * error

    def seconds(self, rows: int) -> float:
        """For so many rows, 1 at least; 0.0 as long as nothing is known."""
        place, share = _beside(rows)
        return (1 - share) * self._seconds[place] + share * self._seconds[place + 1]

    def curve(self, rows: npt.NDArray[Any]) -> Float64:
        """float64, for each number of rows."""
        seconds: Float64 = np.interp(rows, KNOTS, self._seconds)
        return seconds


def _beside(rows: int) -> tuple[int, float]:
    """The place of the knot at or below so many rows, and how far they are on the way to the next one."""
    place = min(rows.bit_length() - 1, len(KNOTS) - 2)
    return place, min(rows / KNOTS[place] - 1, 1.0)


class DraftControl:
    """Decides for one scheduler how much is guessed.

    Args:
        most_guesses: most tokens that are guessed for a stream in one step.
        most_decodes: steps of more decodes guess nothing; 0: the costs alone decide.
    """

    def __init__(self, most_guesses: int, most_decodes: int = 0) -> None:
        self.most_guesses = most_guesses
        self._most_decodes = most_decodes
        self._all = Acceptance(WORKER_FADING)
        self._level = UNKNOWN_RATE
        self._rates: Float64 = self._all.rates(UNKNOWN_RATE, UNKNOWN_WEIGHT)
        # Right guesses of steps, and how many were expected; and their ratio.
        self._right = self._expected = CALIBRATION_TOKENS
        self._trust = 1.0
        self.costs = RowCosts()
        # The next step has so many decodes, and making a guess for it takes so many seconds.
        self._decodes = 0
        self._drafting_s = 0.0
        # Steps until the next decision, if the decodes stay as many; the length of the next rest; and steps since the
        # last decision.
        self._resting_steps = 0
        self._rest_steps = 1
        self._undecided_steps = 0
        # Seconds that slow probes may take, below 0 after one that took longer; and the part that probes have in what
        # is drafted for the next step.
        self._probing_credit_s = 0.0
        self._probing_part = 0.0
        # Beside so many decodes the guesses that were found last did not pay, and count as probes. 0: they did.
        self._unpaid_decodes = 0

    @classmethod
    def of(cls, config: SpeculativeConfig) -> DraftControl:
        """Makes the control that the operator configured."""
        return cls(config.num_speculative_tokens, config.disable_by_batch_size)

    def rests(self, decodes: int) -> bool:
        """Whether the next step, of so many decodes, is run without guesses and without a probe."""
        self._undecided_steps += 1
        self._resting_steps = max(0, self._resting_steps - 1) if decodes == self._decodes else 0
        return self._resting_steps > 0

    @property
    def keeps_resting(self) -> bool:
        """Whether the next step rests, if it has as many decodes."""
        return self._resting_steps > 1

    def observe(self, decodes: Seq[SequencePiece], cost: StepCost, drafting_s: float) -> None:
        """The next step has these decodes, one token each as yet. ``drafting_s``: what making a guess takes."""
        self._decodes, self._drafting_s = len(decodes), drafting_s
        if cost.steps:
            context = sum(piece.start for piece in decodes) / max(1, len(decodes))
            seconds, row_s = cost.predict(features(decodes)), cost.row_seconds(context)
            self.costs.expect(len(decodes), seconds, row_s, max(1, self._undecided_steps))
        self._undecided_steps = 0

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken so long."""
        self._probing_credit_s = min(self._probing_credit_s + MOST_PROBING_SHARE * seconds, MOST_PROBING_CREDIT_S)
        if seconds > 0 and all(piece.samples == piece.count and not piece.scores for piece in plan.pieces):
            self.costs.observe(plan.num_tokens, seconds)

    def decide(self, streams: Seq[Sequence], room: Seq[int], left: int) -> list[int]:
        """Returns the :meth:`shares` of the next step. Where no guess would be worth its row, the control rests."""
        found = self.shares(streams, room, left)
        self._probing_part = 0.0
        if self._probing_credit_s < 0 < self._drafting_s and 0 < self._unpaid_decodes <= self._decodes:
            found = [0] * len(streams)
            self._rest(self._probe_tokens)
        elif not any(found) and not self.may_guess(streams):
            self._rest(self._probe_tokens)
        elif self._drafting_s:
            self._value(streams, found)
        return found

    def pays(self, found: Seq[tuple[Sequence, int]]) -> bool:
        """Whether to make the guesses that the drafter has found, so many tokens for each of these streams. They may be
        fewer than it was asked for; where they are too few, the control rests."""
        count = sum(tokens for _, tokens in found)
        brought = sum(float(stream.guesses.chances[:tokens].sum()) for stream, tokens in found) * self._trust
        plain_s = self.costs.seconds(self._decodes)
        if count and (not plain_s or self._speedup(brought, count, plain_s) >= LEAST_SPEEDUP):
            self._rest_steps, self._unpaid_decodes = 1, 0
            return True
        if count:
            self._probing_part, self._unpaid_decodes = 1.0, self._decodes
        # With fewer than four decodes there is no rest: a guess is worth much there.
        self._rest(self._decodes // 4)
        return False

    def _rest(self, most: int) -> None:
        """Decide nothing for some steps, twice as many each time in a row."""
        self._resting_steps = min(self._rest_steps, most)
        self._rest_steps = min(2 * self._rest_steps, MOST_RESTING_STEPS)

    def shares(self, streams: Seq[Sequence], room: Seq[int], left: int) -> list[int]:
        """How many tokens to guess for each of these streams, at most ``room`` of each and ``left`` of all."""
        none, decodes = [0] * len(streams), self._decodes
        if not (streams and decodes) or left <= 0 or self._crowded:
            return none
        plain_s = self.costs.seconds(decodes)
        highest = max(stream.guesses.likeliest for stream in streams) * self._trust
        if plain_s and max(self._speedup(knot * highest, knot, plain_s) for knot in KNOTS) < LEAST_SPEEDUP:
            return none
        chances = np.array([stream.guesses.chances for stream in streams])[:, : self.most_guesses] * self._trust
        chances[np.arange(chances.shape[1]) >= np.array(room)[:, None]] = 0.0
        order = np.argsort(-chances, axis=None, kind="stable")[: min(left, np.count_nonzero(chances))]
        count = len(order)
        if count and plain_s:
            guesses = np.arange(1, count + 1)
            seconds = self.costs.curve(decodes + guesses) + self._drafting_s * guesses
            speedups = (1 + np.cumsum(chances.ravel()[order]) / decodes) * plain_s / seconds
            best = int(speedups.argmax())
            count = best + 1 if speedups[best] >= LEAST_SPEEDUP else 0
        found: list[int] = np.bincount(order[:count] // chances.shape[1], minlength=len(streams)).tolist()
        return found

    def _value(self, streams: Seq[Sequence], shares: Seq[int]) -> None:
        """Note what so many guesses in each step save in the rest of each stream's life, for a drafter that has to
        catch up with the text before its first guess."""
        plain_s, step_s = self.costs.seconds(self._decodes), self.costs.seconds(self._decodes + sum(shares))
        guess_s = (step_s - plain_s) / max(1, sum(shares)) + self._drafting_s
        for stream, share in zip(streams, shares, strict=True):
            if share and plain_s:
                brought = float(stream.guesses.chances[:share].sum()) * self._trust
                steps = (stream.most_tokens - stream.num_tokens) / (1 + brought)
                stream.guesses.worth_s = steps * (brought * plain_s / self._decodes - share * guess_s)

    @property
    def _probe_tokens(self) -> int:
        """Tokens of a stream from one probe to the next."""
        return min(max(LEAST_PROBE_TOKENS, self._decodes), MOST_PROBE_TOKENS)

    @property
    def _crowded(self) -> bool:
        """Whether the next step has too many decodes for guesses."""
        return 0 < self._most_decodes < self._decodes

    def _speedup(self, brought: float, guesses: int, plain_s: float) -> float:
        """How much faster than without guesses decoding is with so many of them, which bring so many tokens."""
        seconds = self.costs.seconds(self._decodes + guesses) + self._drafting_s * guesses
        return (1 + brought / self._decodes) * plain_s / seconds

    def may_guess(self, likely: Seq[Sequence]) -> bool:
        """Whether the step behind the one just planned would guess something for these streams, for which the drafter
        knows something."""
        return any(self.shares(likely, [self.most_guesses] * len(likely), self.most_guesses * len(likely)))

    def judged(self, stream: Sequence, made: int, right: int) -> None:
        """A step has judged a guess of ``made`` tokens for a stream: its first ``right`` ones were right."""
        self._right = self._right * WORKER_FADING + right
        self._expected = self._expected * WORKER_FADING + stream.guesses.expected
        self._trust = min(1.0, (self._right + CALIBRATION_TOKENS) / (self._expected + CALIBRATION_TOKENS))
        self._learn(stream, made, right)

    def _learn(self, stream: Sequence, made: int, right: int) -> None:
        """A guess was judged, or a probe."""
        self._all.judge(made, right)
        self._level = self._all.level(UNKNOWN_RATE, UNKNOWN_WEIGHT)
        self._rates = self._all.rates(self._level, UNKNOWN_WEIGHT)
        stream.guesses.judge(made, right)
        stream.guesses.expect(self._rates, self._level)

    def begin(self, stream: Sequence) -> None:
        """A stream begins: it is expected to be like all others."""
        stream.guesses.expect(self._rates, self._level)

    # Probes.

    def due_for_probe(self, streams: Iterable[Sequence], slow: bool) -> list[tuple[Sequence, int]]:
        """The streams to probe, and by how many tokens, once their last probe is judged. ``slow`` guesses, which are
        more than a look-up, are made for one stream at a time, within MOST_PROBING_SHARE, and not where the batch is
        too full for any."""
        if slow and (self._crowded or self._probing_credit_s < 0):
            return []
        every = self._probe_tokens
        due = []
        for stream in streams:
            if stream.guesses.probe_is_due(stream.num_tokens, SLOW_PROBE_TOKENS if slow else every):
                self._judge_probe(stream)
                due.append((stream, min(self.most_guesses, every)))
                if slow:
                    stream.guesses.worth_s = inf
                    break
        return due

    def keep_as_probe(self, stream: Sequence, guess: Int32) -> None:
        """A guess that no step makes is compared with the text, if a probe is due."""
        if stream.guesses.probe_is_due(stream.num_tokens, self._probe_tokens):
            self._judge_probe(stream)
            stream.guesses.probe(guess, stream.num_tokens)
        else:
            stream.guesses.found = len(guess) > 0

    def _judge_probe(self, stream: Sequence) -> None:
        made, right = stream.guesses.take_probe(stream.tokens(0, stream.num_tokens))
        if made:
            self._learn(stream, made, right)

    def drafts_for(self, wanted: int, probes: int) -> None:
        """What is drafted for the next step are guesses for so many streams, and probes of others."""
        self._probing_part = probes / (wanted + probes)

    def drafted(self, seconds: float) -> None:
        """The passes for the next step have taken so long."""
        self._probing_credit_s -= self._probing_part * seconds
