"""Number of draft tokens per stream of a step, chosen to make decoding fastest.

A step of R rows, one per decode and per draft token, takes t(R) seconds. It yields a token for each of its D decodes,
and one more per draft token with the probability P that it and those before it are accepted. Draft tokens are added in
descending order of P while (D + sum of P) / t(R) grows. P comes from the measured acceptance of the stream and of all
streams, t from measured steps: rows are nearly free while a step is memory-bound and cost almost as much as decodes
once it is compute-bound, so no single price fits. For one stream nearly every draft token is worth its row; in a full
batch hardly any is. Steps with draft tokens do not run ahead of the device
(:mod:`pillion.engine.scheduling.in_flight`), which t includes.

Where no draft token is worth its row, acceptance is still measured: now and then the drafter is asked, and its tokens
are compared with the text generated without them. Such a probe costs a look-up and no row. The control then rests for
the next few steps of the same number of decodes, so that a full batch does not pay for a decision in every step.
Sans-IO (I9).
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

# Row counts between which step costs are interpolated. Each measured step moves the two adjacent knots by
# LEARNING_RATE.
KNOTS = tuple(2**power for power in range(13))
LEARNING_RATE = 0.2
# Rate at which each step pulls all knots to the linear step model, so that a row count measured on a slow machine, and
# avoided since, is tried again.
RETURN_RATE = 0.002
# Min expected speedup for drafting, because estimates err.
MIN_SPEEDUP = 1.05
# Prior weight of calibration: the best-looking streams are chosen, so fewer draft tokens are accepted than expected,
# and chances are multiplied by the ratio of accepted to expected tokens.
CALIBRATION_TOKENS = 8.0
# Range of the interval between probes of a stream without draft tokens, in tokens; it is the number of decodes, for one
# probe per step on average. Slow drafters probe more rarely. A probe drafts the tokens up to the next one.
MIN_PROBE_TOKENS, MAX_PROBE_TOKENS = 2, 16
SLOW_PROBE_TOKENS = 128
# Slow drafters probe one stream at a time: max share of all step time, and max unused time carried over.
MAX_PROBING_SHARE = 0.01
MAX_PROBING_CREDIT_S = 0.05
MAX_RESTING_STEPS = 4


class RowCosts:
    """Estimated seconds of steps without prompt tails by row count: piecewise linear in KNOTS, which move towards
    measured steps.

    Per-step numbers are plain Python: much of NumPy, e.g. its interpolation and sorting, releases the GIL, and a step
    thread that does so while the last step's tokens are being sent waits for all of them.
    """

    def __init__(self) -> None:
        self._seconds = [0.0] * len(KNOTS)
        self._known = False

    def expect(self, rows: int, seconds: float, row_s: float, steps: int = 1) -> None:
        """Pull the knots to the linear model, which predicts ``seconds`` for ``rows`` rows and ``row_s`` per further
        row. It was last applied ``steps`` steps ago."""
        if seconds > 0:
            rate = 1 - (1 - RETURN_RATE) ** steps if self._known else 1.0
            for place, knot in enumerate(KNOTS):
                expected = max(seconds + row_s * (knot - rows), seconds / 2)
                self._seconds[place] += rate * (expected - self._seconds[place])
            self._known = True

    def observe(self, rows: int, seconds: float) -> None:
        """Record the duration of a step."""
        if not self._known:
            return
        expected = self.seconds(rows)
        # Caps outliers at twice the expectation.
        error = LEARNING_RATE * (min(seconds, 2 * expected) - expected)
        place, share = _beside(rows)
        self._seconds[place] += (1 - share) * error
        self._seconds[place + 1] += share * error

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step of ``rows`` (at least 1) rows; 0.0 if unknown."""
        place, share = _beside(rows)
        return (1 - share) * self._seconds[place] + share * self._seconds[place + 1]

    def curve(self, rows: npt.NDArray[Any]) -> Float64:
        """Return the seconds, float64, for each row count."""
        seconds: Float64 = np.interp(rows, KNOTS, self._seconds)
        return seconds


def _beside(rows: int) -> tuple[int, float]:
    """Return the index of the knot at or below ``rows``, and the fraction of the way to the next."""
    place = min(rows.bit_length() - 1, len(KNOTS) - 2)
    return place, min(rows / KNOTS[place] - 1, 1.0)


class DraftControl:
    """Control of one scheduler's drafting.

    Args:
        most_draft_tokens: max draft tokens per stream and step.
        most_decodes: steps of more decodes draft nothing; 0 leaves it to the costs.
    """

    def __init__(self, most_draft_tokens: int, most_decodes: int = 0) -> None:
        self.most_draft_tokens = most_draft_tokens
        self._most_decodes = most_decodes
        self._all = Acceptance(WORKER_FADING)
        self._level = UNKNOWN_RATE
        self._rates: Float64 = self._all.rates(UNKNOWN_RATE, UNKNOWN_WEIGHT)
        self._right = self._expected = CALIBRATION_TOKENS
        self._trust = 1.0
        self.costs = RowCosts()
        self._decodes = 0
        self._drafting_s = 0.0
        # Steps until the next decision if the number of decodes stays; length of the next rest; steps since the last
        # decision.
        self._resting_steps = 0
        self._rest_steps = 1
        self._undecided_steps = 0
        # Time left for slow probes, negative after a long one, and the share of probes in the next step's drafts.
        self._probing_credit_s = 0.0
        self._probing_part = 0.0
        # Decodes of the last step for which found draft tokens did not pay (they count as probes); 0 if they paid.
        self._unpaid_decodes = 0

    @classmethod
    def of(cls, config: SpeculativeConfig) -> DraftControl:
        return cls(config.num_speculative_tokens, config.disable_by_batch_size)

    def rests(self, decodes: int) -> bool:
        """Return whether the next step, of ``decodes`` decodes, runs without draft tokens and probes."""
        self._undecided_steps += 1
        self._resting_steps = max(0, self._resting_steps - 1) if decodes == self._decodes else 0
        return self._resting_steps > 0

    @property
    def keeps_resting(self) -> bool:
        """True if the next step, with the same number of decodes, will run without draft tokens and probes."""
        return self._resting_steps > 1

    def observe(self, decodes: Seq[ScheduledChunk], cost: StepCost, drafting_s: float) -> None:
        """Set the decodes of the next step, one token each as yet, and the drafting time per draft token."""
        self._decodes, self._drafting_s = len(decodes), drafting_s
        if cost.steps:
            context = sum(chunk.start for chunk in decodes) / max(1, len(decodes))
            seconds, row_s = cost.predict(features(decodes)), cost.row_seconds(context)
            self.costs.expect(len(decodes), seconds, row_s, max(1, self._undecided_steps))
        self._undecided_steps = 0

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step."""
        self._probing_credit_s = min(self._probing_credit_s + MAX_PROBING_SHARE * seconds, MAX_PROBING_CREDIT_S)
        if seconds > 0 and all(chunk.samples == chunk.count and not chunk.scores for chunk in plan.scheduled):
            self.costs.observe(plan.num_tokens, seconds)

    def decide(self, streams: Seq[Sequence], room: Seq[int], left: int) -> list[int]:
        """Return the :meth:`shares` of the next step. If no draft token is worth its row, rest for some steps."""
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
        """Return whether a step should verify the draft tokens found for these streams, possibly fewer than asked for.
        If they are too few, rest for some steps."""
        count = sum(tokens for _, tokens in found)
        brought = sum(float(stream.draft_tokens.chances[:tokens].sum()) for stream, tokens in found) * self._trust
        plain_s = self.costs.seconds(self._decodes)
        if count and (not plain_s or self._speedup(brought, count, plain_s) >= MIN_SPEEDUP):
            self._rest_steps, self._unpaid_decodes = 1, 0
            return True
        if count:
            self._probing_part, self._unpaid_decodes = 1.0, self._decodes
        # Never rest below four decodes, where a draft token is valuable.
        self._rest(self._decodes // 4)
        return False

    def _rest(self, most: int) -> None:
        """Skip decisions for some steps, twice as many each time in a row."""
        self._resting_steps = min(self._rest_steps, most)
        self._rest_steps = min(2 * self._rest_steps, MAX_RESTING_STEPS)

    def shares(self, streams: Seq[Sequence], room: Seq[int], left: int) -> list[int]:
        """Return the number of tokens to draft per stream: at most its entry of ``room``, and ``left`` in total."""
        none, decodes = [0] * len(streams), self._decodes
        if not (streams and decodes) or left <= 0 or self._crowded:
            return none
        plain_s = self.costs.seconds(decodes)
        highest = max(stream.draft_tokens.likeliest for stream in streams) * self._trust
        if plain_s and max(self._speedup(knot * highest, knot, plain_s) for knot in KNOTS) < MIN_SPEEDUP:
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
            count = best + 1 if speedups[best] >= MIN_SPEEDUP else 0
        found: list[int] = np.bincount(order[:count] // chances.shape[1], minlength=len(streams)).tolist()
        return found

    def _value(self, streams: Seq[Sequence], shares: Seq[int]) -> None:
        """Estimate the time that draft tokens save in the rest of each stream's life, for drafters that first have to
        catch up with the text."""
        plain_s, step_s = self.costs.seconds(self._decodes), self.costs.seconds(self._decodes + sum(shares))
        draft_s = (step_s - plain_s) / max(1, sum(shares)) + self._drafting_s
        for stream, share in zip(streams, shares, strict=True):
            if share and plain_s:
                brought = float(stream.draft_tokens.chances[:share].sum()) * self._trust
                steps = (stream.most_tokens - stream.num_tokens) / (1 + brought)
                stream.draft_tokens.worth_s = steps * (brought * plain_s / self._decodes - share * draft_s)

    @property
    def _probe_tokens(self) -> int:
        """Tokens that a stream generates between probes."""
        return min(max(MIN_PROBE_TOKENS, self._decodes), MAX_PROBE_TOKENS)

    @property
    def _crowded(self) -> bool:
        """True if the next step has too many decodes to draft."""
        return 0 < self._most_decodes < self._decodes

    def _speedup(self, brought: float, draft_tokens: int, plain_s: float) -> float:
        """Return the speedup of decoding by ``draft_tokens`` draft tokens, of which ``brought`` are accepted."""
        seconds = self.costs.seconds(self._decodes + draft_tokens) + self._drafting_s * draft_tokens
        return (1 + brought / self._decodes) * plain_s / seconds

    def may_draft(self, likely: Seq[Sequence]) -> bool:
        """Return whether the step after the planned one would draft for these streams, for which drafts were found."""
        return any(self.shares(likely, [self.most_draft_tokens] * len(likely), self.most_draft_tokens * len(likely)))

    def judged(self, stream: Sequence, made: int, right: int) -> None:
        """Record a verified draft of ``made`` tokens, of which the first ``right`` were accepted."""
        self._right = self._right * WORKER_FADING + right
        self._expected = self._expected * WORKER_FADING + stream.draft_tokens.expected
        self._trust = min(1.0, (self._right + CALIBRATION_TOKENS) / (self._expected + CALIBRATION_TOKENS))
        self._learn(stream, made, right)

    def _learn(self, stream: Sequence, made: int, right: int) -> None:
        """Update the acceptance with a draft or probe of a stream."""
        self._all.judge(made, right)
        self._level = self._all.level(UNKNOWN_RATE, UNKNOWN_WEIGHT)
        self._rates = self._all.rates(self._level, UNKNOWN_WEIGHT)
        stream.draft_tokens.judge(made, right)
        stream.draft_tokens.expect(self._rates, self._level)

    def begin(self, stream: Sequence) -> None:
        """Start a stream with the acceptance of all others."""
        stream.draft_tokens.expect(self._rates, self._level)

    def due_for_probe(self, streams: Iterable[Sequence], slow: bool) -> list[tuple[Sequence, int]]:
        """Return the streams to probe, and the tokens to draft, after judging their last probes. ``slow`` drafts, more
        than a look-up, are made for one stream at a time, within MAX_PROBING_SHARE, and not if the batch is too
        full."""
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
        """Keep draft tokens that no step verifies as a probe, if one is due."""
        if stream.draft_tokens.probe_is_due(stream.num_tokens, self._probe_tokens):
            self._judge_probe(stream)
            stream.draft_tokens.probe(drafted, stream.num_tokens)
        else:
            stream.draft_tokens.found = len(drafted) > 0

    def _judge_probe(self, stream: Sequence) -> None:
        made, right = stream.draft_tokens.pop_probe(stream.tokens(0, stream.num_tokens))
        if made:
            self._learn(stream, made, right)

    def drafts_for(self, wanted: int, probes: int) -> None:
        """Set the numbers of drafts and probes in the next drafting."""
        self._probing_part = probes / (wanted + probes)

    def drafted(self, seconds: float) -> None:
        """Record the duration of the draft passes."""
        self._probing_credit_s -= self._probing_part * seconds
