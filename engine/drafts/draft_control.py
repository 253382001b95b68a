"""Decides how many tokens are drafted for each stream of a step: as many as make decoding fastest.

A step of R rows, a row for each decode and for each draft token, takes t(R) seconds. It brings a token for each of its
D decodes, and for each draft token one more with the chance P that it and those before it are right. Draft tokens are
added in falling order of P, as many as make (D + all their P) / t(R) largest. P comes from the measured acceptance of
the stream's and all streams' draft tokens, t from the steps that ran: rows cost hardly anything as long as a step waits
for weights to be read, and nearly as much as decodes once it waits for arithmetic, so no single price fits. For one
stream nearly every draft token is worth its row; in a full batch hardly any is. Where steps run ahead of the device,
those with draft tokens do not (:mod:`pillion.engine.scheduling.in_flight`), which t has in it, too.

Where no draft token is worth its row, the acceptance is measured all the same: now and then the drafter is asked, and
its draft token is compared with the text that comes without it. Such a probe costs a look-up and no row. The control
then rests, too: it decides nothing for the next few steps of as many decodes, so that a full batch, in which drafts
hardly ever pay, does not pay for deciding against them in each step, either. Sans-IO (I9).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from pillion.engine.drafts.acceptance import (
    UNKNOWN_RATE,
    UNKNOWN_WEIGHT,
    WORKER_FADING,
    Acceptance,
    Float64,
)
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_cost import StepCost, features
from pillion.engine.scheduling.step_plan import ScheduledChunk, StepPlan
from pillion.kernels.step import Int32
from pillion.settings.speculative_config import SpeculativeConfig

# The cost of steps is assumed to be linear between these numbers of rows, the knots. Each measured step moves the costs
# at the two knots beside it by the factor LEARNING_RATE.
KNOTS = tuple(2**power for power in range(13))
LEARNING_RATE = 0.2
# Each step moves all knots back by this factor to what the linear model of steps expects, so that a number of rows that
# was measured while the machine was slow, and is avoided since, is tried again.
RETURN_RATE = 0.002
# Draft tokens are made where they should make decoding faster by this factor, at least, because estimates err.
LEAST_SPEEDUP = 1.05
# Draft tokens are made for the streams that look best, so fewer of their draft tokens are right than expected. The
# chances are therefore multiplied by the ratio of right to expected tokens, which begins as if this many tokens had
# come as expected.
CALIBRATION_TOKENS = 8.0
# A stream without draft tokens is probed once in as many tokens as there are decodes, within these bounds, so that a
# step has one probe on average; a drafter that needs more than a look-up probes more rarely. A probe drafts the tokens
# up to the next probe.
LEAST_PROBE_TOKENS, MOST_PROBE_TOKENS = 2, 16
SLOW_PROBE_TOKENS = 128
# A drafter that needs more than a look-up probes one stream at a time, and takes at most this share of the time of all
# steps. Time that it leaves is kept for later probes, up to MOST_PROBING_CREDIT_S.
MOST_PROBING_SHARE = 0.01
MOST_PROBING_CREDIT_S = 0.05
# While draft tokens do not pay, the control decides nothing for at most this many steps in a row.
MOST_RESTING_STEPS = 4


class RowCosts:
    """Estimates the seconds of steps without prompt tails by their rows: a line through KNOTS, each of which moves
    towards the steps that were measured beside it.

    The numbers that each step needs are plain ones. Much of NumPy, its interpolation and sorting among that, lets go of
    the interpreter's lock, and a step thread that does so while the last step's tokens are being sent on waits for all
    of them.
    """

    def __init__(self) -> None:
        self._seconds = [0.0] * len(KNOTS)
        self._known = False

    def expect(self, rows: int, seconds: float, row_s: float, steps: int = 1) -> None:
        """Notes that the linear model expects a step of ``rows`` rows to take ``seconds``, and ``row_s`` for each row
        more. The model was last asked ``steps`` steps ago."""
        if seconds > 0:
            rate = 1 - (1 - RETURN_RATE) ** steps if self._known else 1.0
            for place, knot in enumerate(KNOTS):
                expected = max(seconds + row_s * (knot - rows), seconds / 2)
                self._seconds[place] += rate * (expected - self._seconds[place])
            self._known = True

    def observe(self, rows: int, seconds: float) -> None:
        """Notes how many seconds a step of ``rows`` rows has taken."""
        if not self._known:
            return
        expected = self.seconds(rows)
        # A step that took far longer than expected, perhaps disturbed, counts like one that took twice as long.
        error = LEARNING_RATE * (min(seconds, 2 * expected) - expected)
        place, share = _beside(rows)
        self._seconds[place] += (1 - share) * error
        self._seconds[place + 1] += share * error

    def seconds(self, rows: int) -> float:
        """Returns the seconds that a step of so many rows takes, at least one; 0.0 as long as nothing is known."""
        place, share = _beside(rows)
        return (1 - share) * self._seconds[place] + share * self._seconds[place + 1]

    def curve(self, rows: npt.NDArray[Any]) -> Float64:
        """Returns the seconds that a step takes, float64, for each number of rows."""
        seconds: Float64 = np.interp(rows, KNOTS, self._seconds)
        return seconds


def _beside(rows: int) -> tuple[int, float]:
    """Returns the place of the knot at or below so many rows, and how far the number is on the way to the next knot."""
    place = min(rows.bit_length() - 1, len(KNOTS) - 2)
    return place, min(rows / KNOTS[place] - 1, 1.0)


class DraftControl:
    """Decides for one scheduler how much is drafted.

    Args:
        most_draft_tokens: most tokens that are drafted for a stream in one step.
        most_decodes: steps of more decodes draft nothing; with 0 the costs alone decide.
    """

    def __init__(self, most_draft_tokens: int, most_decodes: int = 0) -> None:
        self.most_draft_tokens = most_draft_tokens
        self._most_decodes = most_decodes
        self._all = Acceptance(WORKER_FADING)
        self._level = UNKNOWN_RATE
        self._rates: Float64 = self._all.rates(UNKNOWN_RATE, UNKNOWN_WEIGHT)
        # The first number counts the draft tokens that were right, the second how many were expected to be right; the
        # third is their ratio.
        self._right = self._expected = CALIBRATION_TOKENS
        self._trust = 1.0
        self.costs = RowCosts()
        # These are the number of decodes of the next step, and the seconds that making a draft for it takes.
        self._decodes = 0
        self._drafting_s = 0.0
        # These are the steps until the next decision, if the number of decodes stays; the length of the next rest; and
        # the steps since the last decision.
        self._resting_steps = 0
        self._rest_steps = 1
        self._undecided_steps = 0
        # These are the seconds that slow probes may still take, below 0 after one that took longer, and the share of
        # probes among the drafts for the next step.
        self._probing_credit_s = 0.0
        self._probing_part = 0.0
        # With this many decodes in a step the last draft tokens that were found did not pay, and count as probes; 0
        # says that they paid.
        self._unpaid_decodes = 0

    @classmethod
    def of(cls, config: SpeculativeConfig) -> DraftControl:
        """Makes the control with the options of ``--speculative-config``."""
        return cls(config.num_speculative_tokens, config.disable_by_batch_size)

    def rests(self, decodes: int) -> bool:
        """Returns whether the next step, of so many decodes, is run without draft tokens and without a probe."""
        self._undecided_steps += 1
        self._resting_steps = max(0, self._resting_steps - 1) if decodes == self._decodes else 0
        return self._resting_steps > 0

    @property
    def keeps_resting(self) -> bool:
        """Says whether the next step, if it has as many decodes as this one, will run without draft tokens and
        probes."""
        return self._resting_steps > 1

    def observe(self, decodes: Seq[ScheduledChunk], cost: StepCost, drafting_s: float) -> None:
        """Notes that the next step has these decodes, one token each as yet. ``drafting_s`` are the seconds that making
        a draft token takes."""
        self._decodes, self._drafting_s = len(decodes), drafting_s
        if cost.steps:
            context = sum(chunk.start for chunk in decodes) / max(1, len(decodes))
            seconds, row_s = cost.predict(features(decodes)), cost.row_seconds(context)
            self.costs.expect(len(decodes), seconds, row_s, max(1, self._undecided_steps))
        self._undecided_steps = 0

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """Notes how many seconds a step has taken."""
        self._probing_credit_s = min(self._probing_credit_s + MOST_PROBING_SHARE * seconds, MOST_PROBING_CREDIT_S)
        if seconds > 0 and all(chunk.samples == chunk.count and not chunk.scores for chunk in plan.scheduled):
            self.costs.observe(plan.num_tokens, seconds)

    def decide(self, streams: Seq[Sequence], room: Seq[int], left: int) -> list[int]:
        """Returns the :meth:`shares` of the next step. Where no draft token would be worth its row, the control decides
        nothing for some steps."""
        found = self.shares(streams, room, left)
        self._probing_part = 0.0
        if self._probing_credit_s < 0 < self._drafting_s and 0 < self._unpaid_decodes <= self._decodes:
            found = [0] * len(streams)
            self._rest(self._probe_tokens)
        elif not any(found) and not self.may_draft(streams):
            self._rest(self._probe_tokens)
        elif self._drafting_s:
            self._value(streams, found)
        return found

    def pays(self, found: Seq[tuple[Sequence, int]]) -> bool:
        """Returns whether a step should judge the draft tokens that the drafter has found, so many tokens for each of
        these streams. There may be fewer than were asked for; where they are too few, the control decides nothing for
        some steps."""
        count = sum(tokens for _, tokens in found)
        brought = sum(float(stream.draft_tokens.chances[:tokens].sum()) for stream, tokens in found) * self._trust
        plain_s = self.costs.seconds(self._decodes)
        if count and (not plain_s or self._speedup(brought, count, plain_s) >= LEAST_SPEEDUP):
            self._rest_steps, self._unpaid_decodes = 1, 0
            return True
        if count:
            self._probing_part, self._unpaid_decodes = 1.0, self._decodes
        # With fewer than four decodes the control never pauses, because a draft token is worth much there.
        self._rest(self._decodes // 4)
        return False

    def _rest(self, most: int) -> None:
        """Makes the control decide nothing for some steps, twice as many each time in a row."""
        self._resting_steps = min(self._rest_steps, most)
        self._rest_steps = min(2 * self._rest_steps, MOST_RESTING_STEPS)

    def shares(self, streams: Seq[Sequence], room: Seq[int], left: int) -> list[int]:
        """Returns how many tokens to draft for each of these streams: at most its entry of ``room`` for each, and at
        most ``left`` for all together."""
        none, decodes = [0] * len(streams), self._decodes
        if not (streams and decodes) or left <= 0 or self._crowded:
            return none
        plain_s = self.costs.seconds(decodes)
        highest = max(stream.draft_tokens.likeliest for stream in streams) * self._trust
        if plain_s and max(self._speedup(knot * highest, knot, plain_s) for knot in KNOTS) < LEAST_SPEEDUP:
            return none
        chances = (
            np.array([stream.draft_tokens.chances for stream in streams])[:, : self.most_draft_tokens] * self._trust
        )
        chances[np.arange(chances.shape[1]) >= np.array(room)[:, None]] = 0.0
        order = np.argsort(-chances, axis=None, kind="stable")[: min(left, np.count_nonzero(chances))]
        count = len(order)
        if count and plain_s:
            draft_tokens = np.arange(1, count + 1)
            seconds = self.costs.curve(decodes + draft_tokens) + self._drafting_s * draft_tokens
            speedups = (1 + np.cumsum(chances.ravel()[order]) / decodes) * plain_s / seconds
            best = int(speedups.argmax())
            count = best + 1 if speedups[best] >= LEAST_SPEEDUP else 0
        found: list[int] = np.bincount(order[:count] // chances.shape[1], minlength=len(streams)).tolist()
        return found

    def _value(self, streams: Seq[Sequence], shares: Seq[int]) -> None:
        """Notes how much time so many draft tokens in each step save in the rest of each stream's life, for a drafter
        that has to catch up with the text before its first draft token."""
        plain_s, step_s = self.costs.seconds(self._decodes), self.costs.seconds(self._decodes + sum(shares))
        draft_s = (step_s - plain_s) / max(1, sum(shares)) + self._drafting_s
        for stream, share in zip(streams, shares, strict=True):
            if share and plain_s:
                brought = float(stream.draft_tokens.chances[:share].sum()) * self._trust
                steps = (stream.most_tokens - stream.num_tokens) / (1 + brought)
                stream.draft_tokens.worth_s = steps * (brought * plain_s / self._decodes - share * draft_s)

    @property
    def _probe_tokens(self) -> int:
        """Gives how many tokens a stream generates from one probe to the next."""
        return min(max(LEAST_PROBE_TOKENS, self._decodes), MOST_PROBE_TOKENS)

    @property
    def _crowded(self) -> bool:
        """Says whether the next step has too many decodes for draft tokens."""
        return 0 < self._most_decodes < self._decodes

    def _speedup(self, brought: float, draft_tokens: int, plain_s: float) -> float:
        """Returns by which factor so many draft tokens, which bring so many tokens on average, make decoding faster."""
        seconds = self.costs.seconds(self._decodes + draft_tokens) + self._drafting_s * draft_tokens
        return (1 + brought / self._decodes) * plain_s / seconds

    def may_draft(self, likely: Seq[Sequence]) -> bool:
        """Returns whether the step after the one just planned would draft something for these streams, for which the
        drafter has found draft tokens."""
        return any(self.shares(likely, [self.most_draft_tokens] * len(likely), self.most_draft_tokens * len(likely)))

    def judged(self, stream: Sequence, made: int, right: int) -> None:
        """Notes that a step has judged a draft of ``made`` tokens for a stream: its first ``right`` ones were right."""
        self._right = self._right * WORKER_FADING + right
        self._expected = self._expected * WORKER_FADING + stream.draft_tokens.expected
        self._trust = min(1.0, (self._right + CALIBRATION_TOKENS) / (self._expected + CALIBRATION_TOKENS))
        self._learn(stream, made, right)

    def _learn(self, stream: Sequence, made: int, right: int) -> None:
        """Updates the measured acceptance with the draft tokens, or a probe, of a stream."""
        self._all.judge(made, right)
        self._level = self._all.level(UNKNOWN_RATE, UNKNOWN_WEIGHT)
        self._rates = self._all.rates(self._level, UNKNOWN_WEIGHT)
        stream.draft_tokens.judge(made, right)
        stream.draft_tokens.expect(self._rates, self._level)

    def begin(self, stream: Sequence) -> None:
        """Notes that a stream begins, whose draft tokens are expected to be right as often as those of all others."""
        stream.draft_tokens.expect(self._rates, self._level)

    def due_for_probe(self, streams: Iterable[Sequence], slow: bool) -> list[tuple[Sequence, int]]:
        """Returns the streams to probe, and by how many tokens, once their last probe is judged. ``slow`` draft tokens,
        which are more than a look-up, are made for one stream at a time, within MOST_PROBING_SHARE, and not where the
        batch is too full for any."""
        if slow and (self._crowded or self._probing_credit_s < 0):
            return []
        every = self._probe_tokens
        due = []
        for stream in streams:
            if stream.draft_tokens.probe_is_due(stream.num_tokens, SLOW_PROBE_TOKENS if slow else every):
                self._judge_probe(stream)
                due.append((stream, min(self.most_draft_tokens, every)))
                if slow:
                    stream.draft_tokens.worth_s = inf
                    break
        return due

    def keep_as_probe(self, stream: Sequence, drafted: Int32) -> None:
        """Keeps draft tokens that no step judges as a probe, if one is due, to be compared with the text."""
        if stream.draft_tokens.probe_is_due(stream.num_tokens, self._probe_tokens):
            self._judge_probe(stream)
            stream.draft_tokens.probe(drafted, stream.num_tokens)
        else:
            stream.draft_tokens.found = len(drafted) > 0

    def _judge_probe(self, stream: Sequence) -> None:
        made, right = stream.draft_tokens.take_probe(stream.tokens(0, stream.num_tokens))
        if made:
            self._learn(stream, made, right)

    def drafts_for(self, wanted: int, probes: int) -> None:
        """Notes that the next drafts are for so many streams, and probes of so many others."""
        self._probing_part = probes / (wanted + probes)

    def drafted(self, seconds: float) -> None:
        """Notes how many seconds the draft model's passes for the next step have taken."""
        self._probing_credit_s -= self._probing_part * seconds
