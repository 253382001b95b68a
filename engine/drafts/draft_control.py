"""Number of draft tokens per stream of a step, chosen to make decoding fastest.

A step of R rows, one per decode and per draft token, takes t(R) seconds. It yields a token for each of its D decodes,
and one more per draft token with the probability P that it and those before it are accepted. Draft tokens are added in
descending order of P while (D + sum of P) / t(R) grows. P comes from the measured acceptance of the stream and of all
streams, t from measured steps: rows are nearly free while a step is memory-bound and cost almost as much as decodes
once it is compute-bound, so no single price fits. For one stream nearly every draft token is worth its row; in a full
batch hardly any is. Steps with draft tokens do not run ahead of the device
(:mod:`pillion.engine.scheduling.in_flight`), which t includes.

Where no draft token is worth its row, acceptance is still measured by probes: now and then tokens are drafted, and
compared with the text generated without them. A probe costs a look-up and no row. The control then rests for a few
steps with the same number of decodes, so that a full batch does not pay for a decision in every step. Sans-IO (I9).
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

# Row counts between which step durations are interpolated. A measured step moves the two adjacent knots, together by
# LEARNING_RATE of its error.
KNOTS = tuple(2**power for power in range(13))
LEARNING_RATE = 0.2
# Share of the distance to the linear step model by which each step moves all knots, so that a row count that was slow
# once, and avoided since, is tried again.
RETURN_RATE = 0.002
# Min expected speedup for drafting, because estimates err.
MIN_SPEEDUP = 1.05
# Weight, in draft tokens, of the prior of 1 for the ratio of accepted to expected draft tokens, by which chances are
# multiplied: the streams that look best are chosen, so fewer draft tokens are accepted than expected.
CALIBRATION_TOKENS = 8.0
# Range of the interval between probes of a stream without draft tokens, in tokens. Within it, the interval is the
# number of decodes, for one probe per step on average. A probe drafts the tokens up to the next one.
MIN_PROBE_TOKENS, MAX_PROBE_TOKENS = 2, 16
# Slow drafters, such as models, probe one stream at a time: interval in tokens, max share of all step time, and max
# unused time carried over.
SLOW_PROBE_TOKENS = 128
MAX_PROBING_SHARE = 0.01
MAX_PROBING_CREDIT_S = 0.05
MAX_RESTING_STEPS = 4


class RowCosts:
    """Estimated seconds of a decode-only step by its number of rows: linear between KNOTS, whose values follow measured
    steps.

    What runs per step is plain Python: much of NumPy, e.g. its interpolation and sorting, releases the GIL, which the
    step thread then gets back only after the last step's tokens are sent.
    """

    def __init__(self) -> None:
        self._seconds = [0.0] * len(KNOTS)
        self._known = False

    def expect(self, rows: int, seconds: float, row_s: float, steps: int = 1) -> None:
        """Move all knots towards a linear model, which predicts ``seconds`` for ``rows`` rows and ``row_s`` per further
        row, by RETURN_RATE for each of ``steps`` steps since the last call; at the first call, to the model."""
        if seconds > 0:
            rate = 1 - (1 - RETURN_RATE) ** steps if self._known else 1.0
            for index, knot in enumerate(KNOTS):
                expected = max(seconds + row_s * (knot - rows), seconds / 2)
                self._seconds[index] += rate * (expected - self._seconds[index])
            self._known = True

    def observe(self, rows: int, seconds: float) -> None:
        """Record the duration of a step."""
        if not self._known:
            return
        expected = self.seconds(rows)
        # Outliers count as twice the expectation.
        error = LEARNING_RATE * (min(seconds, 2 * expected) - expected)
        index, share = _knot_below(rows)
        self._seconds[index] += (1 - share) * error
        self._seconds[index + 1] += share * error

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step of ``rows`` (at least 1) rows; 0.0 if unknown."""
        index, share = _knot_below(rows)
        return (1 - share) * self._seconds[index] + share * self._seconds[index + 1]

    def curve(self, rows: npt.NDArray[Any]) -> Float64:
        """Return the seconds, float64 [n], for ``rows`` [n] row counts."""
        seconds: Float64 = np.interp(rows, KNOTS, self._seconds)
        return seconds


def _knot_below(rows: int) -> tuple[int, float]:
    """Return the index of the last knot at or below ``rows``, and the fraction of the distance to the next, at most
    1."""
    index = min(rows.bit_length() - 1, len(KNOTS) - 2)
    return index, min(rows / KNOTS[index] - 1, 1.0)


class DraftControl:
    """Decides how many tokens are drafted per stream, and when; its measurements outlive schedulers.

    Args:
        max_draft_tokens: max draft tokens per stream and step.
        max_decodes: max decodes of a step with draft tokens; 0 for no limit.
    """

    def __init__(self, max_draft_tokens: int, max_decodes: int = 0) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._max_decodes = max_decodes
        # Acceptance of all streams: counts, mean rate, and rates by position.
        self._all = Acceptance(WORKER_FADING)
        self._mean_rate = UNKNOWN_RATE
        self._rates: Float64 = self._all.rates(UNKNOWN_RATE, UNKNOWN_WEIGHT)
        # Accepted and expected draft tokens, which fade, and their ratio, at most 1.
        self._accepted = self._expected = CALIBRATION_TOKENS
        self._trust = 1.0
        self.costs = RowCosts()
        self._decodes = 0
        # Seconds per draft token.
        self._drafting_s = 0.0
        # Steps left of this rest, which ends if the number of decodes changes; steps of the next rest; steps since the
        # last call of observe.
        self._resting_steps = 0
        self._next_rest_steps = 1
        self._unobserved_steps = 0
        # Time left for slow probes, negative after a long one, and the share of probes in the next drafting.
        self._probing_credit_s = 0.0
        self._probing_share = 0.0
        # Decodes of the last step whose draft tokens were not worth verifying (they count as probes); 0 if they were.
        self._unpaid_decodes = 0

    @classmethod
    def of(cls, config: SpeculativeConfig) -> DraftControl:
        return cls(config.num_speculative_tokens, config.disable_by_batch_size)

    def rests(self, decodes: int) -> bool:
        """Return whether the next step, of ``decodes`` decodes, runs without draft tokens and probes; call this once
        per step."""
        self._unobserved_steps += 1
        self._resting_steps = max(0, self._resting_steps - 1) if decodes == self._decodes else 0
        return self._resting_steps > 0

    @property
    def keeps_resting(self) -> bool:
        """True if the next step, with the same number of decodes, will run without draft tokens and probes."""
        return self._resting_steps > 1

    def observe(self, decodes: Seq[ScheduledChunk], cost: StepCost, drafting_s: float) -> None:
        """Set the next step's decodes, without draft tokens, its predicted cost, and the seconds per draft token."""
        self._decodes, self._drafting_s = len(decodes), drafting_s
        if cost.steps:
            context = sum(chunk.start for chunk in decodes) / max(1, len(decodes))
            seconds, row_s = cost.predict(features(decodes)), cost.row_seconds(context)
            self.costs.expect(len(decodes), seconds, row_s, max(1, self._unobserved_steps))
        self._unobserved_steps = 0

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step."""
        self._probing_credit_s = min(self._probing_credit_s + MAX_PROBING_SHARE * seconds, MAX_PROBING_CREDIT_S)
        if seconds > 0 and all(chunk.samples == chunk.count and not chunk.scores for chunk in plan.scheduled):
            self.costs.observe(plan.num_tokens, seconds)

    def decide(self, streams: Seq[Sequence], limits: Seq[int], left: int) -> list[int]:
        """Return the number of tokens to draft per stream in the next step, as :meth:`shares` does. If no draft token
        is worth its row, rest for some steps."""
        shares = self.shares(streams, limits, left)
        self._probing_share = 0.0
        if self._probing_credit_s < 0 < self._drafting_s and 0 < self._unpaid_decodes <= self._decodes:
            shares = [0] * len(streams)
            self._rest(self._probe_tokens)
        elif not any(shares) and not self.may_draft(streams):
            self._rest(self._probe_tokens)
        elif self._drafting_s:
            self._estimate_worth(streams, shares)
        return shares

    def pays(self, drafts: Seq[tuple[Sequence, int]]) -> bool:
        """Return whether a step should verify drafts, given as (stream, number of draft tokens); the drafter may have
        made fewer than :meth:`decide` returned. If not, rest for some steps."""
        count = sum(tokens for _, tokens in drafts)
        accepted = sum(float(stream.draft_tokens.chances[:tokens].sum()) for stream, tokens in drafts) * self._trust
        plain_s = self.costs.seconds(self._decodes)
        if count and (not plain_s or self._speedup(accepted, count, plain_s) >= MIN_SPEEDUP):
            self._next_rest_steps, self._unpaid_decodes = 1, 0
            return True
        if count:
            self._probing_share, self._unpaid_decodes = 1.0, self._decodes
        # No rest with fewer than four decodes, where a draft token is valuable.
        self._rest(self._decodes // 4)
        return False

    def _rest(self, max_steps: int) -> None:
        """Skip decisions for up to ``max_steps`` steps, twice as many each time in a row."""
        self._resting_steps = min(self._next_rest_steps, max_steps)
        self._next_rest_steps = min(2 * self._next_rest_steps, MAX_RESTING_STEPS)

    def shares(self, streams: Seq[Sequence], limits: Seq[int], left: int) -> list[int]:
        """Return the number of tokens to draft per stream, for the fastest next step: at most its entry of ``limits``,
        and ``left`` in total."""
        none, decodes = [0] * len(streams), self._decodes
        if not (streams and decodes) or left <= 0 or self._crowded:
            return none
        plain_s = self.costs.seconds(decodes)
        highest = max(stream.draft_tokens.likeliest for stream in streams) * self._trust
        # Cheap bound: no draft token has a better chance.
        if plain_s and max(self._speedup(knot * highest, knot, plain_s) for knot in KNOTS) < MIN_SPEEDUP:
            return none
        chances = (
            np.array([stream.draft_tokens.chances for stream in streams])[:, : self.max_draft_tokens] * self._trust
        )
        chances[np.arange(chances.shape[1]) >= np.array(limits)[:, None]] = 0.0
        order = np.argsort(-chances, axis=None, kind="stable")[: min(left, np.count_nonzero(chances))]
        count = len(order)
        if count and plain_s:
            draft_tokens = np.arange(1, count + 1)
            seconds = self.costs.curve(decodes + draft_tokens) + self._drafting_s * draft_tokens
            speedups = (1 + np.cumsum(chances.ravel()[order]) / decodes) * plain_s / seconds
            best = int(speedups.argmax())
            count = best + 1 if speedups[best] >= MIN_SPEEDUP else 0
        shares: list[int] = np.bincount(order[:count] // chances.shape[1], minlength=len(streams)).tolist()
        return shares

    def _estimate_worth(self, streams: Seq[Sequence], shares: Seq[int]) -> None:
        """Set ``worth_s`` of the streams with draft tokens, by which a draft model decides whether to catch up."""
        plain_s, step_s = self.costs.seconds(self._decodes), self.costs.seconds(self._decodes + sum(shares))
        draft_s = (step_s - plain_s) / max(1, sum(shares)) + self._drafting_s
        for stream, share in zip(streams, shares, strict=True):
            if share and plain_s:
                accepted = float(stream.draft_tokens.chances[:share].sum()) * self._trust
                steps = (stream.max_length - stream.num_tokens) / (1 + accepted)
                stream.draft_tokens.worth_s = steps * (accepted * plain_s / self._decodes - share * draft_s)

    @property
    def _probe_tokens(self) -> int:
        """Interval between a stream's probes, in tokens."""
        return min(max(MIN_PROBE_TOKENS, self._decodes), MAX_PROBE_TOKENS)

    @property
    def _crowded(self) -> bool:
        """True if the next step has too many decodes to draft."""
        return 0 < self._max_decodes < self._decodes

    def _speedup(self, accepted: float, draft_tokens: int, plain_s: float) -> float:
        """Return the speedup of decoding by ``draft_tokens`` draft tokens, of which ``accepted`` are accepted; a step
        without them takes ``plain_s``."""
        seconds = self.costs.seconds(self._decodes + draft_tokens) + self._drafting_s * draft_tokens
        return (1 + accepted / self._decodes) * plain_s / seconds

    def may_draft(self, streams: Seq[Sequence]) -> bool:
        """Return whether a step with these streams would draft, if each has as many draft tokens as allowed."""
        limit = self.max_draft_tokens
        return any(self.shares(streams, [limit] * len(streams), limit * len(streams)))

    def judged(self, stream: Sequence, drafted: int, accepted: int) -> None:
        """Record that a step verified ``drafted`` draft tokens of a stream and accepted the first ``accepted``."""
        self._accepted = self._accepted * WORKER_FADING + accepted
        self._expected = self._expected * WORKER_FADING + stream.draft_tokens.expected
        self._trust = min(1.0, (self._accepted + CALIBRATION_TOKENS) / (self._expected + CALIBRATION_TOKENS))
        self._record(stream, drafted, accepted)

    def _record(self, stream: Sequence, drafted: int, accepted: int) -> None:
        """Update the acceptance rates of a stream and of all streams by a draft or probe."""
        self._all.record(drafted, accepted)
        self._mean_rate = self._all.mean_rate(UNKNOWN_RATE, UNKNOWN_WEIGHT)
        self._rates = self._all.rates(self._mean_rate, UNKNOWN_WEIGHT)
        stream.draft_tokens.record(drafted, accepted)
        stream.draft_tokens.update_chances(self._rates, self._mean_rate)

    def begin(self, stream: Sequence) -> None:
        """Set a new stream's chances by the acceptance of all streams."""
        stream.draft_tokens.update_chances(self._rates, self._mean_rate)

    def due_for_probe(self, streams: Iterable[Sequence], slow: bool) -> list[tuple[Sequence, int]]:
        """Return (stream, number of tokens to draft) of the streams to probe, after evaluating their last probes. A
        ``slow`` drafter probes one stream at a time, within MAX_PROBING_SHARE, and none in a step with too many
        decodes."""
        if slow and (self._crowded or self._probing_credit_s < 0):
            return []
        every = self._probe_tokens
        due = []
        for stream in streams:
            if stream.draft_tokens.probe_is_due(stream.num_tokens, SLOW_PROBE_TOKENS if slow else every):
                self._evaluate_probe(stream)
                due.append((stream, min(self.max_draft_tokens, every)))
                if slow:
                    stream.draft_tokens.worth_s = inf
                    break
        return due

    def keep_as_probe(self, stream: Sequence, drafted: Int32) -> None:
        """Keep draft tokens that no step verifies as a probe, if one is due."""
        if stream.draft_tokens.probe_is_due(stream.num_tokens, self._probe_tokens):
            self._evaluate_probe(stream)
            stream.draft_tokens.probe(drafted, stream.num_tokens)
        else:
            stream.draft_tokens.had_draft = len(drafted) > 0

    def _evaluate_probe(self, stream: Sequence) -> None:
        drafted, correct = stream.draft_tokens.pop_probe(stream.tokens(0, stream.num_tokens))
        if drafted:
            self._record(stream, drafted, correct)

    def drafts_for(self, drafts: int, probes: int) -> None:
        """Set the number of drafts to verify and of probes in the next drafting."""
        self._probing_share = probes / (drafts + probes)

    def record_drafting(self, seconds: float) -> None:
        """Subtract the probes' share of a drafting's seconds from the time credit for slow probes. A probe is a draft
        that no step verifies; it is compared with the text generated later."""
        self._probing_credit_s -= self._probing_share * seconds
