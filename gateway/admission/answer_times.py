"""Predicts how long a request will run at the workers, from recent answers. Sans-IO (I9).

    seconds = prompt, by the step model: its tokens and those at the workers without a first token   each corrected by
            + tokens, by the step model: beside the other streams                                     :class:`WorkTimes`

The step model (:mod:`pillion.engine.scheduling.step_model`) has the cost of a step by streams and prompt length. Recent
answers have the rest: prompts between tokens, cached prefixes, other load. So a prediction follows the number of
streams before an answer with as many has ended.

What recent answers took beyond the step model is either a delay, which adds (a queue, a call, a pause), or a pace,
which multiplies (slow cores, shared steps). The pace is the excess of longer over shorter work; the remainder is delay,
and adds once to longer work: a short prompt that waited 3 s does not make a long one take 100 times as long.

Without a measured step model nothing is predicted: an assumed one may be off by a factor of 100, and would refuse the
first long prompts.

A pause is a silence, i.e. a time without a token of any request. The silence that slowed answers most is subtracted
from all times, so that one pause raises no prediction (tests/gateway/admission/test_pauses.py). If that leaves too few
of them, the step model is an upper bound.

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

# Answers used for predictions: at most MAX_ANSWERS, at least MIN_ANSWERS, of the last KEPT_S, or KEPT_DURATIONS times
# their own duration.
MAX_ANSWERS = 64
MIN_ANSWERS = 3
KEPT_S = 60.0
KEPT_DURATIONS = 4
# Min interval between updates; each takes 1 ms.
RELEARN_S = 0.1
# While the usual length is unknown, client limits above this multiple of the longest answer are ignored.
FAR_LONGER = 16


class DecodeFleet(NamedTuple):
    """A model's decode workers: the median worker's measured step model, their number, and other gateways' streams."""

    model: StepModel
    workers: int = 1
    others: int = 0

    def prompt_s(self, tokens: int, before: int) -> float:
        """Return the seconds to compute a prompt after ``before`` tokens of other prompts, which all workers share, if
        they compute nothing else."""
        return self.model.range_s(0, max(1, tokens + before // self.workers), ASSUMED_STEP_TOKENS)

    def token_s(self, running: float) -> float:
        """Return the seconds per token while this gateway has ``running`` streams at the workers."""
        streams = max(1, round((running + self.others) / self.workers))
        return self.model.plain_s(streams, streams * ASSUMED_POSITION)


class ServedRequest(NamedTuple):
    """A request that had slots and has ended.

    Attributes:
        tokens_before: tokens of the prompts at the workers before it.
        beside: mean number of answers with slots meanwhile.
        begun_s, ended_s: when it got its slots, and when it ended.
        first_s, last_s: times of its first and last token (0.0: none).
        tokens: tokens per answer.
        ended_itself: whether the model ended the answer, rather than a limit.
        late: whether its deadline had passed.
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
    """Computation of a prompt or of further tokens: begin, end, seconds without the subtracted silence, and seconds by
    the step model (> 0)."""

    begun_s: float
    over_s: float
    took_s: float
    expected_s: float


class WorkTimes:
    """Predicts seconds from the step model's and from recent work, without the longest silence. ``token_times_s`` are
    times of tokens."""

    def __init__(self, seen: Sequence[MeasuredWork], token_times_s: Iterable[float]) -> None:
        left = _without_longest_silence(seen, token_times_s) if seen else []
        self._trusted = len(left) >= MIN_ANSWERS - 1
        pace = _pace(left)
        # Per piece of work: the step model's seconds, the ratio to it, and the pace for longer work.
        self._seen = [
            (one.expected_s, ratio := one.took_s / one.expected_s, min(pace, ratio))
            for one in (left if self._trusted else seen)
        ]

    def seconds(self, expected_s: float) -> float:
        """Predict the duration of work with ``expected_s`` by the step model: the median over recent work, scaled for
        shorter work, extended by its pace for longer work. 0.0 if there is too little of it."""
        if len(self._seen) < MIN_ANSWERS - 1:
            return 0.0
        found_s = median(
            ratio * expected_s if expected_s <= seen_s else ratio * seen_s + pace * (expected_s - seen_s)
            for seen_s, ratio, pace in self._seen
        )
        return found_s if self._trusted else min(found_s, expected_s)


def _without_longest_silence(seen: Sequence[MeasuredWork], token_times_s: Iterable[float]) -> list[MeasuredWork]:
    """Subtract the silence, i.e. the time between two tokens, that slowed work most relative to the step model. Work
    of which nothing remains is dropped."""
    begun = _TimesSince((one.begun_s, 1 / one.expected_s) for one in seen)
    over = _TimesSince((one.over_s, 1 / one.expected_s) for one in seen)
    edges_s = sorted({min(one.begun_s for one in seen), *token_times_s, max(one.over_s for one in seen)})
    slowed = [begun.until(at_s) - over.until(at_s) for at_s in edges_s]
    worst = max(range(1, len(edges_s)), key=lambda number: slowed[number] - slowed[number - 1], default=0)
    from_s, to_s = edges_s[worst - 1], edges_s[worst]
    shortened = (
        one._replace(took_s=one.took_s - max(0.0, min(one.over_s, to_s) - max(one.begun_s, from_s))) for one in seen
    )
    return [one for one in shortened if one.took_s > 0]


class _TimesSince:
    """Weighted sum of the seconds since given times."""

    def __init__(self, weighted: Iterable[tuple[float, float]]) -> None:
        by_time = sorted(weighted)
        self._times_s = [at_s for at_s, _ in by_time]
        self._weights = [0.0, *accumulate(weight for _, weight in by_time)]
        self._products = [0.0, *accumulate(weight * (at_s - self._times_s[0]) for at_s, weight in by_time)]

    def until(self, now_s: float) -> float:
        """Return the weighted sum of seconds from each earlier time until ``now_s``."""
        number = bisect_left(self._times_s, now_s)
        return (now_s - self._times_s[0]) * self._weights[number] - self._products[number]


def _pace(seen: Sequence[MeasuredWork]) -> float:
    """Return the slope of time taken over the step model's seconds, from the shorter to the longer half; at least 1.
    The smaller their difference relative to the delay of the shorter half, the nearer to 1."""
    half = len(seen) // 2
    if half < MIN_ANSWERS:
        return 1.0
    by_size = sorted(seen, key=lambda one: one.expected_s)
    shorter, longer = by_size[:half], by_size[half:]
    took_s = median(one.took_s for one in shorter)
    size_s = median(one.expected_s for one in shorter)
    delay_s = max(0.0, took_s - size_s)
    apart_s = median(one.expected_s for one in longer) - size_s + delay_s
    if apart_s <= 0:
        return 1.0
    return max(1.0, (median(one.took_s for one in longer) - took_s + delay_s) / apart_s)


class PastAnswer(NamedTuple):
    """An answer that has ended, with the step model's seconds for its prompt and for all further tokens."""

    served: ServedRequest
    prompt_s: float
    further_s: float


class AnswerLengths(NamedTuple):
    """Lengths of recent answers: the usual one, 0 if more than half were truncated before it, and the longest."""

    usual_tokens: int
    most_tokens: int

    @classmethod
    def of(cls, answers: Iterable[PastAnswer]) -> AnswerLengths:
        """Compute the lengths of one or more answers."""
        by_length = sorted((one.served for one in answers), key=lambda one: (one.tokens, not one.ended_itself))
        return cls(_usual_tokens(by_length), by_length[-1].tokens)

    def answer_tokens(self, allowed: int) -> int:
        """Return the expected tokens of an answer with a limit of ``allowed``."""
        if self.usual_tokens:
            return min(allowed, self.usual_tokens)
        return allowed if allowed <= FAR_LONGER * self.most_tokens else self.most_tokens


class AnswerTimes:
    """Predicted times of one model's requests. ``fleet`` returns its workers, or None until one has measured its steps;
    times are monotonic seconds."""

    def __init__(self, fleet: Callable[[], DecodeFleet | None]) -> None:
        self._fleet = fleet
        self._answers: list[PastAnswer] = []
        self._learnt: tuple[WorkTimes, WorkTimes, AnswerLengths] | None = None
        self._learnt_s = 0.0

    def ended(self, served: ServedRequest) -> None:
        """Record a request that had slots and has ended."""
        if not (served.first_s or served.late):
            # A request without a token says nothing, unless it was too slow to get one.
            return
        fleet = self._fleet()
        if fleet is None:
            return
        prompt_s = fleet.prompt_s(served.prompt_tokens, served.tokens_before)
        self._answers.append(PastAnswer(served, prompt_s, (served.tokens - 1) * fleet.token_s(served.beside)))
        if len(self._answers) > MAX_ANSWERS:
            # Drop where answers are densest, so that the rest is spread over time and few of them waited together.
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
            prompt_tokens, tokens_before: tokens of its prompt, and of prompts at the workers before it.
            beside: answers with slots, its own included.
            allowed_tokens: token limit of each of its answers.
            now_s: the time.
            token_times_s: times of tokens.
        """
        fleet = self._fleet()
        if fleet is None:
            return 0.0
        if self._learnt is None or now_s - self._learnt_s >= RELEARN_S:
            self._learn(now_s, token_times_s)
        if self._learnt is None:
            return 0.0
        prompts, further, lengths = self._learnt
        tokens = lengths.answer_tokens(allowed_tokens)
        return prompts.seconds(fleet.prompt_s(prompt_tokens, tokens_before)) + further.seconds(
            (tokens - 1) * fleet.token_s(beside)
        )

    def _learn(self, now_s: float, token_times_s: Iterable[float]) -> None:
        self._answers = [one for one in self._answers if not _is_past(one.served, now_s)]
        self._learnt, self._learnt_s = None, now_s
        if len(self._answers) >= MIN_ANSWERS:
            self._learnt = *_work_times(self._answers, token_times_s), AnswerLengths.of(self._answers)


def _is_past(served: ServedRequest, now_s: float) -> bool:
    return served.ended_s < now_s - max(KEPT_S, KEPT_DURATIONS * (served.ended_s - served.begun_s))


def _work_times(answers: Sequence[PastAnswer], token_times_s: Iterable[float]) -> tuple[WorkTimes, WorkTimes]:
    """Return the times of the prompts, and of the further tokens, of some answers."""
    prompts, further = [], []
    for served, prompt_s, further_s in answers:
        first_s = served.first_s or served.ended_s
        if prompt_s > 0:
            prompts.append(MeasuredWork(served.begun_s, first_s, first_s - served.begun_s, prompt_s))
        if further_s > 0:
            further.append(MeasuredWork(first_s, served.last_s, served.last_s - first_s, further_s))
    return WorkTimes(prompts, token_times_s), WorkTimes(further, token_times_s)


def _usual_tokens(by_length: list[ServedRequest]) -> int:
    # The share of longer answers, as an exact fraction: rounding could miss a half.
    longer, total, left = 1, 1, len(by_length)
    for one in by_length:
        if one.ended_itself:
            longer, total = longer * (left - 1), total * left
            if 2 * longer <= total:
                return one.tokens
        left -= 1
    return 0
