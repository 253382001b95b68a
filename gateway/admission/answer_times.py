"""Predicts how long a request of a model will take once it has its turn, from the last answers. Sans-IO (I9).

    seconds = prompt, by the step model: its tokens and those at the workers without a first token   each corrected by
            + tokens, by the step model: beside the other streams                                     :class:`WorkTimes`

The step model (:mod:`pillion.engine.scheduling.step_model`) knows how a step grows with the number of streams and with
a prompt's length, and the last answers know everything else: the prompts between the tokens, cached prefixes, other
loads. So a prediction follows the number of streams at once, before an answer beside as many has ended.

What the last answers took beyond the step model's word is a delay, which adds (a queue, a call, a pause), or a pace,
which multiplies (slow cores, steps that are shared). A pace is what longer work took more than shorter work. All else
is a delay, and adds once to longer work: a short prompt that waited 3 s does not make a long one 100 times as long.

Without a measured step model nothing is learnt or predicted: an assumed one may be off by a hundred times, and would
refuse the first long prompts.

A pause is a silence: no request has a token meanwhile. One silence, whichever slowed answers most, is taken off the
times of all answers, so one pause raises no prediction (tests/gateway/admission/test_pauses.py). Where that leaves
too few of them, the step model's word is an upper bound.

An answer may have fewer tokens than its client allows. Half of the answers had no more than the *usual* tokens, where
those that were cut short count as longer than they are: this is the estimate of Kaplan and Meier ("Nonparametric
estimation from incomplete observations", 1958).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.planning.plan_cost import ASSUMED_POSITION, ASSUMED_STEP_TOKENS

# Answers that predictions rest on: at most MAX_ANSWERS, at least MIN_ANSWERS, and none that ended longer ago than
# KEPT_S, or KEPT_DURATIONS times its own duration.
MAX_ANSWERS = 64
MIN_ANSWERS = 3
KEPT_S = 60.0
KEPT_DURATIONS = 4
# Time for which predictions rest on what was learnt, because learning takes a millisecond.
RELEARN_S = 0.1
# Limit of a client's own bound, in lengths of the longest answer, while the usual length is unknown.
FAR_LONGER = 16


class DecodeFleet(NamedTuple):
    """The decode workers of a model: the step model that the median one measured, their number, and the streams that
    other gateways have there."""

    model: StepModel
    workers: int = 1
    others: int = 0

    def prompt_s(self, tokens: int, before: int) -> float:
        """Returns the seconds until a prompt is computed after so many tokens of others, which all workers share, if
        workers computed nothing else."""
        return self.model.range_s(0, max(1, tokens + before // self.workers), ASSUMED_STEP_TOKENS)

    def token_s(self, running: float) -> float:
        """Returns the seconds of a token while this gateway has so many streams at the workers."""
        streams = max(1, round((running + self.others) / self.workers))
        return self.model.plain_s(streams, streams * ASSUMED_POSITION)


class ServedRequest(NamedTuple):
    """Describes a request that had its turn and has ended.

    Attributes:
        tokens_before: the tokens of the prompts that were at the workers before it.
        beside: how many answers had slots meanwhile, on the average.
        begun_s, ended_s: when its turn came, and when it ended.
        first_s, last_s: when it had its first and its last token (0.0: never).
        tokens: those of an answer.
        ended_itself: whether the model ended the answer, and no bound did.
        late: whether its deadline was over.
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


class SeenWork(NamedTuple):
    """Describes the prompt or the further tokens of an answer: its begin and end, its seconds, and those that the step
    model says, more than 0. They are fewer than those from its begin to its end where a silence was taken off."""

    begun_s: float
    over_s: float
    took_s: float
    expected_s: float


class WorkTimes:
    """Predicts the seconds of work from what the step model says of it and what such work took, a silence taken off.
    ``signs_s`` are times when tokens came."""

    def __init__(self, seen: Sequence[SeenWork], signs_s: Iterable[float]) -> None:
        left = _without_a_silence(seen, signs_s) if seen else []
        self._trusted = len(left) >= MIN_ANSWERS - 1
        pace = _pace(left)
        # Of each: the step model's seconds, how many times as long it took, and the pace that longer work has.
        self._seen = [
            (one.expected_s, ratio := one.took_s / one.expected_s, min(pace, ratio))
            for one in (left if self._trusted else seen)
        ]

    def seconds(self, expected_s: float) -> float:
        """Returns how long work will take of which the step model says ``expected_s``: the median of what each that was
        seen suggests, of shorter work its share, and of longer work its pace times the difference; 0.0 where too little
        was seen."""
        if len(self._seen) < MIN_ANSWERS - 1:
            return 0.0
        found_s = median(
            ratio * expected_s if expected_s <= seen_s else ratio * seen_s + pace * (expected_s - seen_s)
            for seen_s, ratio, pace in self._seen
        )
        return found_s if self._trusted else min(found_s, expected_s)


def _without_a_silence(seen: Sequence[SeenWork], signs_s: Iterable[float]) -> list[SeenWork]:
    """Takes one time between two signs off the work that was under way then: the one that makes work least slow beside
    the step model. Work of which nothing is left is left out."""
    begun = _TimesSince((one.begun_s, 1 / one.expected_s) for one in seen)
    over = _TimesSince((one.over_s, 1 / one.expected_s) for one in seen)
    edges_s = sorted({min(one.begun_s for one in seen), *signs_s, max(one.over_s for one in seen)})
    slowed = [begun.until(at_s) - over.until(at_s) for at_s in edges_s]
    worst = max(range(1, len(edges_s)), key=lambda number: slowed[number] - slowed[number - 1], default=0)
    from_s, to_s = edges_s[worst - 1], edges_s[worst]
    shortened = (
        one._replace(took_s=one.took_s - max(0.0, min(one.over_s, to_s) - max(one.begun_s, from_s))) for one in seen
    )
    return [one for one in shortened if one.took_s > 0]


class _TimesSince:
    """Sums the seconds since some times, each with a weight."""

    def __init__(self, weighted: Iterable[tuple[float, float]]) -> None:
        by_time = sorted(weighted)
        self._times_s = [at_s for at_s, _ in by_time]
        self._weights = [0.0, *accumulate(weight for _, weight in by_time)]
        self._products = [0.0, *accumulate(weight * (at_s - self._times_s[0]) for at_s, weight in by_time)]

    def until(self, now_s: float) -> float:
        """Returns the sum of the seconds until then, of the times before it."""
        number = bisect_left(self._times_s, now_s)
        return (now_s - self._times_s[0]) * self._weights[number] - self._products[number]


def _pace(seen: Sequence[SeenWork]) -> float:
    """Returns how many times as long as the step model says longer work took more than shorter work; at least 1. The
    less both differ beside the delay of the shorter work, the nearer it is to 1."""
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
    """Describes an answer that has ended: what it was, and what the step model said of its prompt and of all of its
    further tokens."""

    served: ServedRequest
    prompt_s: float
    further_s: float


class AnswerLengths(NamedTuple):
    """Holds the usual tokens of the last answers, 0 where more than half of them were cut short before, and the most
    that any had."""

    usual_tokens: int
    most_tokens: int

    @classmethod
    def of(cls, answers: Iterable[PastAnswer]) -> AnswerLengths:
        """Computes the lengths of some answers, of which there is at least one."""
        by_length = sorted((one.served for one in answers), key=lambda one: (one.tokens, not one.ended_itself))
        return cls(_usual_tokens(by_length), by_length[-1].tokens)

    def answer_tokens(self, allowed: int) -> int:
        """Returns how many tokens an answer is expected to have whose client allows so many."""
        if self.usual_tokens:
            return min(allowed, self.usual_tokens)
        return allowed if allowed <= FAR_LONGER * self.most_tokens else self.most_tokens


class AnswerTimes:
    """Predicts the times of one model's requests. ``fleet`` describes its workers now, or returns None until one has
    measured its steps; times are monotonic, in seconds."""

    def __init__(self, fleet: Callable[[], DecodeFleet | None]) -> None:
        self._fleet = fleet
        self._answers: list[PastAnswer] = []
        self._learnt: tuple[WorkTimes, WorkTimes, AnswerLengths] | None = None
        self._learnt_s = 0.0

    def ended(self, served: ServedRequest) -> None:
        """Notes a request that had its turn and has ended."""
        if not (served.first_s or served.late):
            # A request without a token tells nothing, unless that is because it took too long.
            return
        fleet = self._fleet()
        if fleet is None:
            return
        prompt_s = fleet.prompt_s(served.prompt_tokens, served.tokens_before)
        self._answers.append(PastAnswer(served, prompt_s, (served.tokens - 1) * fleet.token_s(served.beside)))
        if len(self._answers) > MAX_ANSWERS:
            # Drop where answers are densest, so that those kept are spread over time and few of them waited together.
            ends = [one.served.ended_s for one in self._answers]
            del self._answers[min(range(1, MAX_ANSWERS), key=lambda number: ends[number] - ends[number - 1])]

    def seconds(
        self,
        prompt_tokens: int,
        tokens_before: int,
        beside: int,
        allowed_tokens: int,
        now_s: float,
        signs_s: Iterable[float] = (),
    ) -> float:
        """Returns how long a request will take that begins now; 0.0 where nothing is known.

        Args:
            prompt_tokens, tokens_before: the tokens of its prompt, and of those that are at the workers before it.
            beside: how many answers will have slots, its own included.
            allowed_tokens: the most tokens that each of its answers may have.
            now_s: the time.
            signs_s: times when tokens came.
        """
        fleet = self._fleet()
        if fleet is None:
            return 0.0
        if self._learnt is None or now_s - self._learnt_s >= RELEARN_S:
            self._learn(now_s, signs_s)
        if self._learnt is None:
            return 0.0
        prompts, further, lengths = self._learnt
        tokens = lengths.answer_tokens(allowed_tokens)
        return prompts.seconds(fleet.prompt_s(prompt_tokens, tokens_before)) + further.seconds(
            (tokens - 1) * fleet.token_s(beside)
        )

    def _learn(self, now_s: float, signs_s: Iterable[float]) -> None:
        self._answers = [one for one in self._answers if not _is_past(one.served, now_s)]
        self._learnt, self._learnt_s = None, now_s
        if len(self._answers) >= MIN_ANSWERS:
            self._learnt = *_work_times(self._answers, signs_s), AnswerLengths.of(self._answers)


def _is_past(served: ServedRequest, now_s: float) -> bool:
    return served.ended_s < now_s - max(KEPT_S, KEPT_DURATIONS * (served.ended_s - served.begun_s))


def _work_times(answers: Sequence[PastAnswer], signs_s: Iterable[float]) -> tuple[WorkTimes, WorkTimes]:
    """Learns from the prompts and from the further tokens of some answers."""
    prompts, further = [], []
    for served, prompt_s, further_s in answers:
        first_s = served.first_s or served.ended_s
        if prompt_s > 0:
            prompts.append(SeenWork(served.begun_s, first_s, first_s - served.begun_s, prompt_s))
        if further_s > 0:
            further.append(SeenWork(first_s, served.last_s, served.last_s - first_s, further_s))
    return WorkTimes(prompts, signs_s), WorkTimes(further, signs_s)


def _usual_tokens(by_length: list[ServedRequest]) -> int:
    longer, left = 1.0, len(by_length)
    for one in by_length:
        if one.ended_itself:
            longer *= 1 - 1 / left
            if longer <= 0.5:
                return one.tokens
        left -= 1
    return 0
