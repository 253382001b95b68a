"""Predicts how long a request will run at the workers, from recent answers. Sans-IO (I9).

    seconds = time of the prompt, after the prompts at the workers that have no token yet   each by the step model,
            + time of the further tokens, in steps with the other streams                   corrected by WorkTimes

The step model (:mod:`pillion.engine.scheduling.step_model`) predicts the time of a step from its streams and prompt
tokens. Recent answers show what it lacks: prompts between tokens, cached prefixes, other load. So predictions follow
the number of streams at once, before an answer with that number has ended.

The excess of recent answers over the step model is either a delay, which is added (a queue, a call, a pause), or a
pace, which is multiplied (slow cores, shared steps). The pace is the slope from shorter to longer work. The rest is
delay, and is added only once to longer work: a short prompt that waited 3 s does not make a long prompt take 100 times
as long.

Without a measured step model nothing is predicted: an assumed model may be off by a factor of 100, and would refuse the
first long prompts.

A pause is a silence, i.e. a time without a token of any request. The silence that slowed answers most is subtracted
from all times, so that a single pause raises no prediction (tests/gateway/admission/test_pauses.py). If too few answers
remain, the step model is an upper bound.

An answer may have fewer tokens than its client allows. The *usual* length is the median, with truncated answers as
censored: the estimate of Kaplan and Meier ("Nonparametric estimation from incomplete observations", 1958).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.planning.plan_cost import ASSUMED_POSITION, ASSUMED_STEP_TOKENS

# Predictions use the last answers, from MIN_ANSWERS to MAX_ANSWERS. An answer is dropped after KEPT_S seconds, or after
# KEPT_DURATIONS times its own duration if that is longer.
MAX_ANSWERS = 64
MIN_ANSWERS = 3
KEPT_S = 60.0
KEPT_DURATIONS = 4
# Min interval between updates of the statistics; each takes 1 ms.
UPDATE_INTERVAL_S = 0.1
# Until a usual length is known: a max_tokens above this multiple of the longest answer so far is no estimate.
MAX_LENGTH_RATIO = 16


class DecodeFleet(NamedTuple):
    """A model's decode workers: the median worker's measured step model, the number of workers, and the number of the
    other gateways' streams."""

    model: StepModel
    workers: int = 1
    others: int = 0

    def prompt_s(self, tokens: int, before: int) -> float:
        """Return the seconds to compute a prompt after ``before`` tokens of other prompts, spread over all workers, if
        the workers compute nothing else."""
        return self.model.range_s(0, max(1, tokens + before // self.workers), ASSUMED_STEP_TOKENS)

    def token_s(self, running: float) -> float:
        """Return the seconds per token while this gateway has ``running`` streams at the workers."""
        streams = max(1, round((running + self.others) / self.workers))
        return self.model.plain_s(streams, streams * ASSUMED_POSITION)


class ServedRequest(NamedTuple):
    """A request that had slots and has ended.

    Attributes:
        tokens_before: tokens of earlier prompts at the workers that had no token yet when it began.
        beside: mean number of concurrent answers, its own included.
        begun_s, ended_s: when it got its slots, and when it ended.
        first_s, last_s: times of its first and last token; 0.0 without one.
        tokens: tokens per answer.
        ended_itself: True if the model ended the answer, rather than a limit.
        late: True if its deadline had passed.
    """

    prompt_tokens: int
    tokens_before: int
    beside: float
    begun_s: float
    first_s: float
    last_s: float
    ended_s: float
    tokens: int
    ended_itself: bool
    late: bool


class MeasuredWork(NamedTuple):
    """Computation of a prompt, or of an answer's tokens after the first: begin, end, seconds without the subtracted
    silence, and seconds by the step model (> 0)."""

    begun_s: float
    over_s: float
    took_s: float
    expected_s: float


class WorkTimes:
    """Corrects predictions of the step model by recent work, without the silence that slowed it most. ``token_times_s``
    are times of tokens, between which silences are found."""

    def __init__(self, work: Sequence[MeasuredWork], token_times_s: Iterable[float]) -> None:
        remaining = _without_longest_silence(work, token_times_s) if work else []
        self._trusted = len(remaining) >= MIN_ANSWERS - 1
        pace = _pace(remaining)
        # Per piece of work: the step model's seconds, the ratio to it, and the pace for longer work.
        self._work = [
            (one.expected_s, ratio := one.took_s / one.expected_s, min(pace, ratio))
            for one in (remaining if self._trusted else work)
        ]

    def seconds(self, expected_s: float) -> float:
        """Predict the duration of work that takes ``expected_s`` by the step model: the median of the extrapolations
        from each recent work, in proportion to shorter work, and by its pace to longer work. 0.0 if there is too little
        recent work."""
        if len(self._work) < MIN_ANSWERS - 1:
            return 0.0
        predicted_s = median(
            ratio * expected_s if expected_s <= size_s else ratio * size_s + pace * (expected_s - size_s)
            for size_s, ratio, pace in self._work
        )
        return predicted_s if self._trusted else min(predicted_s, expected_s)


def _without_longest_silence(work: Sequence[MeasuredWork], token_times_s: Iterable[float]) -> list[MeasuredWork]:
    """Return the work without the silence, i.e. the time between two tokens, that slowed it most relative to the step
    model. Work of which nothing remains is dropped."""
    begun = _TimesSince((one.begun_s, 1 / one.expected_s) for one in work)
    over = _TimesSince((one.over_s, 1 / one.expected_s) for one in work)
    edges_s = sorted({min(one.begun_s for one in work), *token_times_s, max(one.over_s for one in work)})
    slowed = [begun.until(at_s) - over.until(at_s) for at_s in edges_s]
    worst = max(range(1, len(edges_s)), key=lambda number: slowed[number] - slowed[number - 1], default=0)
    from_s, to_s = edges_s[worst - 1], edges_s[worst]
    shortened = (
        one._replace(took_s=one.took_s - max(0.0, min(one.over_s, to_s) - max(one.begun_s, from_s))) for one in work
    )
    return [one for one in shortened if one.took_s > 0]


class _TimesSince:
    """Weighted sum of the seconds elapsed since given times; ``weighted`` are (time, weight)."""

    def __init__(self, weighted: Iterable[tuple[float, float]]) -> None:
        by_time = sorted(weighted)
        self._times_s = [at_s for at_s, _ in by_time]
        self._weights = [0.0, *accumulate(weight for _, weight in by_time)]
        self._products = [0.0, *accumulate(weight * (at_s - self._times_s[0]) for at_s, weight in by_time)]

    def until(self, now_s: float) -> float:
        """Return the weighted sum of the seconds from each time before ``now_s`` until ``now_s``."""
        number = bisect_left(self._times_s, now_s)
        return (now_s - self._times_s[0]) * self._weights[number] - self._products[number]


def _pace(work: Sequence[MeasuredWork]) -> float:
    """Return the slope of measured over expected seconds, from the shorter to the longer half of the work; at least 1.
    The smaller the difference of the halves relative to the delay of the shorter one, the nearer to 1."""
    half = len(work) // 2
    if half < MIN_ANSWERS:
        return 1.0
    by_size = sorted(work, key=lambda one: one.expected_s)
    shorter, longer = by_size[:half], by_size[half:]
    took_s = median(one.took_s for one in shorter)
    size_s = median(one.expected_s for one in shorter)
    delay_s = max(0.0, took_s - size_s)
    apart_s = median(one.expected_s for one in longer) - size_s + delay_s
    if apart_s <= 0:
        return 1.0
    return max(1.0, (median(one.took_s for one in longer) - took_s + delay_s) / apart_s)


class PastAnswer(NamedTuple):
    """An answer that has ended, with the seconds by the step model for its prompt, and for its tokens after the
    first."""

    served: ServedRequest
    prompt_s: float
    further_s: float


class AnswerLengths(NamedTuple):
    """Lengths of recent answers: the usual one, 0 if too many were truncated to know it, and the longest."""

    usual_tokens: int
    longest_tokens: int

    @classmethod
    def of(cls, answers: Iterable[PastAnswer]) -> AnswerLengths:
        """Compute the lengths of one or more answers."""
        by_length = sorted((one.served for one in answers), key=lambda one: (one.tokens, not one.ended_itself))
        return cls(_usual_tokens(by_length), by_length[-1].tokens)

    def answer_tokens(self, allowed: int) -> int:
        """Return the expected tokens of an answer with a limit of ``allowed``."""
        if self.usual_tokens:
            return min(allowed, self.usual_tokens)
        return allowed if allowed <= MAX_LENGTH_RATIO * self.longest_tokens else self.longest_tokens


class AnswerTimes:
    """Predicts the durations of one model's requests. ``fleet`` returns the model's decode workers, or None until one
    has measured its steps; times are monotonic seconds."""

    def __init__(self, fleet: Callable[[], DecodeFleet | None]) -> None:
        self._fleet = fleet
        self._answers: list[PastAnswer] = []
        self._statistics: tuple[WorkTimes, WorkTimes, AnswerLengths] | None = None
        self._updated_s = 0.0

    def ended(self, served: ServedRequest) -> None:
        """Record a request that had slots and has ended."""
        if not (served.first_s or served.late):
            # A request without a token is no evidence, unless it was too slow to get one.
            return
        fleet = self._fleet()
        if fleet is None:
            return
        prompt_s = fleet.prompt_s(served.prompt_tokens, served.tokens_before)
        self._answers.append(PastAnswer(served, prompt_s, (served.tokens - 1) * fleet.token_s(served.beside)))
        if len(self._answers) > MAX_ANSWERS:
            # Drop the second of the two closest ends, so that the answers are spread over time and few waited together.
            ends = [one.served.ended_s for one in self._answers]
            del self._answers[min(range(1, MAX_ANSWERS), key=lambda number: ends[number] - ends[number - 1])]

    def seconds(
        self,
        prompt_tokens: int,
        tokens_before: int,
        beside: int,
        allowed_tokens: int,
        now_s: float,
        token_times_s: Iterable[float] = (),
    ) -> float:
        """Predict the seconds of a request that starts now; 0.0 if unknown.

        Args:
            prompt_tokens, tokens_before: tokens of its prompt, and of earlier prompts at the workers without a token
                yet.
            beside: number of concurrent answers, its own included.
            allowed_tokens: token limit of each of its answers.
            now_s: current time.
            token_times_s: times of recent tokens of all requests.
        """
        fleet = self._fleet()
        if fleet is None:
            return 0.0
        if self._statistics is None or now_s - self._updated_s >= UPDATE_INTERVAL_S:
            self._update(now_s, token_times_s)
        if self._statistics is None:
            return 0.0
        prompts, further, lengths = self._statistics
        tokens = lengths.answer_tokens(allowed_tokens)
        return prompts.seconds(fleet.prompt_s(prompt_tokens, tokens_before)) + further.seconds(
            (tokens - 1) * fleet.token_s(beside)
        )

    def _update(self, now_s: float, token_times_s: Iterable[float]) -> None:
        self._answers = [one for one in self._answers if not _is_past(one.served, now_s)]
        self._statistics, self._updated_s = None, now_s
        if len(self._answers) >= MIN_ANSWERS:
            self._statistics = *_work_times(self._answers, token_times_s), AnswerLengths.of(self._answers)


def _is_past(served: ServedRequest, now_s: float) -> bool:
    return served.ended_s < now_s - max(KEPT_S, KEPT_DURATIONS * (served.ended_s - served.begun_s))


def _work_times(answers: Sequence[PastAnswer], token_times_s: Iterable[float]) -> tuple[WorkTimes, WorkTimes]:
    """Return the times of the answers' prompts, and of their tokens after the first."""
    prompts, further = [], []
    for served, prompt_s, further_s in answers:
        first_s = served.first_s or served.ended_s
        if prompt_s > 0:
            prompts.append(MeasuredWork(served.begun_s, first_s, first_s - served.begun_s, prompt_s))
        if further_s > 0:
            further.append(MeasuredWork(first_s, served.last_s, served.last_s - first_s, further_s))
    return WorkTimes(prompts, token_times_s), WorkTimes(further, token_times_s)


def _usual_tokens(by_length: list[ServedRequest]) -> int:
    """Return the Kaplan-Meier median of the lengths of sorted answers; 0 if it is not reached."""
    # The estimated share of longer answers, as an exact fraction: rounding could miss a half.
    longer, total, at_risk = 1, 1, len(by_length)
    for one in by_length:
        if one.ended_itself:
            longer, total = longer * (at_risk - 1), total * at_risk
            if 2 * longer <= total:
                return one.tokens
        at_risk -= 1
    return 0
