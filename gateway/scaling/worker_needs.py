"""How many prefill and decode workers a rate of requests needs, by what a step of them costs (I9).

A request is a span on a prefill worker (or none), a prompt tail on a decode worker, and an answer there. What the
planner chose for the last requests is the sample, so the split policy and prefix hits are as they are.

*Prefill workers* compute spans one behind the other. There are enough when no more than the late share of the sample
would wait for a span longer than its bound leaves (:mod:`pillion.gateway.scaling.staffing`).

*Decode workers.* A step costs ``fixed`` and then for each stream and token, so with so many seconds of work a second
for each worker, the share ``used``, steps take ``fixed / (1 - used)``: whatever comes in one step's time is the next
step. There are enough when this keeps the inter-token latency, when the streams that are then under way (Little's law:
tokens a second * seconds of a step) have their slots and their KV memory, and when the prompt tails, which get what the
streams leave of steps as long as the bound, do not wait too long. The streams under way vary as those of a Poisson
process do, by the square root of their number; the load is taken so many deviations larger (the square-root staffing of
Halfin and Whitt, "Heavy-traffic limits for queues with many exponential servers", 1981). More workers than these are
needed where more streams run already than they would carry.

Dynamo's planner divides the tokens a second by a throughput that was profiled before; llm-d's has a queueing model or
the saturation of what runs. Here the curve is the workers' own fit, and what is asked of it is the tail, not the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pillion.gateway.planning.plan_cost import CHUNK_CALL_S, SPAN_CALL_S, StepModel
from pillion.gateway.scaling.objectives import Objectives
from pillion.gateway.scaling.staffing import late_share, least

# Where a lone stream's step takes longer than the bound, no number of workers keeps it; steps of so many lone ones are
# then what is aimed at.
HOPELESS_STEPS = 2.0


class PlannedPrompt(NamedTuple):
    """A request as it was planned: tokens that were cached, up to the split, and in all."""

    cached: int
    split: int
    prompt: int


class GivenAnswer(NamedTuple):
    """What a request generated: all tokens of its ``answers``, behind a prompt of ``prompt`` tokens."""

    prompt: int
    tokens: int
    answers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalWorker:
    """What one more worker of a kind is taken to be.

    Attributes:
        model: the middle one of the kind's fits.
        step_tokens: tokens of a prompt that a step takes.
        slots: streams that run at once; 0: not known.
        pool_tokens: tokens of KV that are there for each decode worker; 0: not known.
    """

    model: StepModel
    step_tokens: int
    slots: int = 0
    pool_tokens: float = 0.0


class PrefillNeeds:
    """Prefill workers for spans like those of ``prompts``, of which at least one is there."""

    def __init__(self, worker: TypicalWorker, prompts: Sequence[PlannedPrompt], goals: Objectives) -> None:
        spans = [one for one in prompts if one.split > one.cached]
        self._late_share = goals.late_share
        self._spans_share = len(spans) / len(prompts)
        self._spans_s = np.array([span_s(worker, one) for one in spans])
        # The tail behind the span takes a step at least.
        left_s = np.array([goals.ttft_of(one.prompt) - goals.itl_s for one in spans]) - self._spans_s
        # A prompt that takes longer than its bound alone is late with any number of workers.
        self._slacks_s = np.where(left_s < 0, np.inf, left_s)
        self._mean_s = float(self._spans_s.mean()) if spans else 0.0

    def load(self, per_s: float) -> float:
        """Mean number of workers that so many requests a second keep busy."""
        return per_s * self._spans_share * self._mean_s

    def workers(self, per_s: float, busy: float = 0.0, at_least: int = 0) -> int:
        """The least number from ``at_least`` on that is enough, beside ``busy`` workers for what waits already."""
        spans_per_s = per_s * self._spans_share

        def enough(workers: int) -> bool:
            free = math.floor(workers - busy)
            late = self._spans_share * late_share(free, spans_per_s, self._spans_s, self._slacks_s) if free > 0 else 1.0
            return late <= self._late_share

        return least(enough, at_least) if spans_per_s > 0 else max(at_least, math.ceil(busy))


def span_s(worker: TypicalWorker, prompt: PlannedPrompt) -> float:
    """Seconds of a prompt's span on an idle prefill worker, with its calls; 0.0 where it has none."""
    tokens = prompt.split - prompt.cached
    if tokens <= 0:
        return 0.0
    calls_s = SPAN_CALL_S + CHUNK_CALL_S * -(-tokens // worker.step_tokens)
    return worker.model.span_s(prompt.cached, prompt.split, worker.step_tokens) + calls_s


class DecodeNeeds:
    """Decode workers for prompt tails like those of ``prompts``, and for ``answers``; at least one of both is there.

    ``before_s`` are the seconds of the prompts' spans on prefill workers, which pass before their tails begin.
    """

    def __init__(
        self,
        worker: TypicalWorker,
        prompts: Sequence[PlannedPrompt],
        answers: Sequence[GivenAnswer],
        before_s: Sequence[float],
        goals: Objectives,
    ) -> None:
        self._worker, self._goals = worker, goals
        step_s, token_s, sequence_s, read_s, pair_s = worker.model
        self._tails_s = np.array([_tail_s(worker, one) for one in prompts])
        self._ttft_left_s = np.array([goals.ttft_of(one.prompt) for one in prompts]) - np.array(before_s)
        self._answer_tokens = sum(one.tokens for one in answers) / len(answers)
        # KV tokens that all steps of an answer read together, and hold for the time of a step each.
        self._read_tokens = sum(one.tokens * (one.prompt + one.tokens / one.answers / 2) for one in answers) / len(
            answers
        )
        self._answer_s = self._answer_tokens * (token_s + sequence_s) + self._read_tokens * (read_s + pair_s)
        self._request_s = self._answer_s + float(self._tails_s.mean())
        # The step of a lone stream is the shortest one.
        self._least_step_s = step_s + self._answer_s / self._answer_tokens
        self._itl_s = max(goals.itl_s, HOPELESS_STEPS * self._least_step_s)
        # What the streams of one worker could leave of its steps at the most.
        self._most_left = 1 - self._least_step_s / self._itl_s
        # A prompt that is late where it is alone is late with any number of workers. A tail takes a step at least.
        self._hopeless = self._ttft_left_s < np.maximum(self._tails_s / self._most_left, self._itl_s)

    def load(self, per_s: float) -> float:
        """Mean number of workers that so many requests a second keep busy at the bound of the latency: what a step
        costs by itself is then shared by as many as may be."""
        return per_s * self._request_s / self._most_left

    def workers(
        self, per_s: float, streams: int = 0, context_tokens: int = 0, busy: float = 0.0, at_least: int = 0
    ) -> int:
        """The least number from ``at_least`` on that is enough.

        Args:
            streams, context_tokens: how many streams run or wait already, and what they read in a step.
            busy: workers for prompts that wait already, beside all others.
        """
        now = max(at_least, self._for_streams(streams, context_tokens))
        return least(lambda workers: self._enough(workers, per_s, busy), now) if per_s > 0 else now + math.ceil(busy)

    def _for_streams(self, streams: int, context_tokens: int) -> int:
        """Workers that carry so many streams within the bound."""
        step_s, token_s, sequence_s, read_s, pair_s = self._worker.model
        streams_s = streams * (token_s + sequence_s) + context_tokens * (read_s + pair_s)
        by_time = streams_s / max(self._itl_s - step_s, self._itl_s / HOPELESS_STEPS)
        return math.ceil(max(by_time, streams / self._worker.slots if self._worker.slots else 0.0))

    def _enough(self, workers: int, per_s: float, busy: float) -> bool:
        each = workers - busy
        if each <= 0:
            return False
        # Streams under way at the bound, and how far their number goes beyond its mean.
        streams = per_s * self._answer_tokens * self._itl_s
        crowd = 1 + self._goals.deviations / math.sqrt(streams)
        used = crowd * per_s * self._request_s / each
        if used >= 1:
            return False
        step_s = self._least_step_s / (1 - used)
        slots, pool = self._worker.slots, self._worker.pool_tokens
        if step_s > self._itl_s or (slots and crowd * per_s * self._answer_tokens * step_s > slots * each):
            return False
        if pool and crowd * per_s * self._read_tokens * step_s > pool * each:
            return False
        return self._tails_late(each, per_s) <= self._goals.late_share

    def _tails_late(self, each: float, per_s: float) -> float:
        """The share of prompt tails that wait too long; 1.0 where the streams leave them no time."""
        left = self._most_left - per_s * self._answer_s / each
        servers = math.floor(each)
        if left <= 0 or servers < 1:
            return 1.0
        seconds = self._tails_s / left
        slacks_s = np.where(self._hopeless, np.inf, self._ttft_left_s - np.maximum(seconds, self._itl_s))
        return late_share(servers, per_s, seconds, slacks_s)


def _tail_s(worker: TypicalWorker, prompt: PlannedPrompt) -> float:
    """Seconds that a prompt's tail adds to the steps of a decode worker, which run in any case."""
    start, end = prompt.split, prompt.prompt
    steps = max(1, -(-(end - start) // worker.step_tokens))
    return max(0.0, worker.model.span_s(start, end, worker.step_tokens) - steps * worker.model.step_s)
