"""Computes how many prefill and decode workers a rate of requests needs, by what a step of them costs (I9).

A request is a prefill range on a prefill worker (or none), a prompt tail on a decode worker, and an answer there. The
sample is what the planner chose for the last requests, so it includes the split policy and prefix hits.

*Prefill workers* compute prefill ranges one after the other. There are enough when no more than the late share of the
sample would wait for a prefill range longer than its bound leaves (:mod:`pillion.gateway.scaling.staffing`).

*Decode workers.* A step costs ``fixed`` and then for each stream and token, so where work takes the share ``used`` of
each worker's time, steps take ``fixed / (1 - used)``: the work that comes in one step's time makes up the next step.
There are enough when this keeps the inter-token latency, when the streams that are then under way (Little's law: tokens
a second * seconds of a step) have their slots and their KV memory, and when the prompt tails, which get what the
streams leave of steps as long as the bound, do not wait too long. The streams under way vary as those of a Poisson
process do, by the square root of their number; the load is taken as many deviations larger as the objectives ask for
(the square-root staffing of Halfin and Whitt, "Heavy-traffic limits for queues with many exponential servers", 1981).
More workers than these are needed where more streams run already than they would carry.

Dynamo's planner divides the tokens a second by a throughput that was profiled before; llm-d's has a queueing model or
the saturation of what runs. Here the curve is the workers' own fit, and it has to answer for the slowest requests, not
for the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.planning.forecast import GivenAnswer, PlannedPrompt
from pillion.gateway.planning.plan_cost import CHUNK_CALL_S, SPAN_CALL_S
from pillion.gateway.scaling.objectives import Objectives
from pillion.gateway.scaling.staffing import late_share, least

# Where a lone stream's step takes longer than the bound, no number of workers keeps the bound; then this many times a
# lone stream's step is the bound.
HOPELESS_STEPS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalWorker:
    """Describes what one more worker of a kind is taken to be.

    Attributes:
        model: the median of the kind's fitted step models.
        step_tokens: tokens of a prompt that a step takes.
        slots: streams that run at once; 0: not known.
        pool_tokens: tokens of KV that each decode worker has room for; 0: not known.
    """

    model: StepModel
    step_tokens: int
    slots: int = 0
    pool_tokens: float = 0.0


class PrefillNeeds:
    """Counts prefill workers for prefill ranges like those of ``prompts``, of which there is at least one."""

    def __init__(self, worker: TypicalWorker, prompts: Sequence[PlannedPrompt], goals: Objectives) -> None:
        prefill_ranges = [one for one in prompts if one.split > one.cached]
        self._late_share = goals.late_share
        self._ranges_share = len(prefill_ranges) / len(prompts)
        self._ranges_s = np.array([range_s(worker, one) for one in prefill_ranges])
        # The prompt tail after the prefill range takes at least one step.
        left_s = np.array([goals.ttft_of(one.prompt) - goals.itl_s for one in prefill_ranges]) - self._ranges_s
        # A prompt whose computation alone takes longer than its bound is late with any number of workers.
        self._slacks_s = np.where(left_s < 0, np.inf, left_s)
        self._mean_s = float(self._ranges_s.mean()) if prefill_ranges else 0.0

    def load(self, per_s: float) -> float:
        """Returns the mean number of workers that so many requests a second keep busy."""
        return per_s * self._ranges_share * self._mean_s

    def workers(self, per_s: float, busy: float = 0.0, at_least: int = 0) -> int:
        """Returns the smallest number of workers from ``at_least`` on that is enough, beside ``busy`` workers for the
        prompts that wait already."""
        ranges_per_s = per_s * self._ranges_share

        def enough(workers: int) -> bool:
            free = math.floor(workers - busy)
            late = (
                self._ranges_share * late_share(free, ranges_per_s, self._ranges_s, self._slacks_s) if free > 0 else 1.0
            )
            return late <= self._late_share

        return least(enough, at_least) if ranges_per_s > 0 else max(at_least, math.ceil(busy))


def range_s(worker: TypicalWorker, prompt: PlannedPrompt) -> float:
    """Returns the seconds of a prompt's prefill range on an idle prefill worker, with its calls; 0.0 if it has none."""
    tokens = prompt.split - prompt.cached
    if tokens <= 0:
        return 0.0
    calls_s = SPAN_CALL_S + CHUNK_CALL_S * -(-tokens // worker.step_tokens)
    return worker.model.range_s(prompt.cached, prompt.split, worker.step_tokens) + calls_s


class DecodeNeeds:
    """Counts decode workers for prompt tails like those of ``prompts``, and for ``answers``; there is at least one of
    each.

    ``before_s`` are the seconds of the prompts' prefill ranges on prefill workers, which pass before their tails begin.
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
        # These are the KV tokens that all steps of an answer read together; the answer holds as many for the time of
        # one step each.
        self._read_tokens = sum(one.tokens * (one.prompt + one.tokens / one.answers / 2) for one in answers) / len(
            answers
        )
        self._answer_s = self._answer_tokens * (token_s + sequence_s) + self._read_tokens * (read_s + pair_s)
        self._request_s = self._answer_s + float(self._tails_s.mean())
        # The step of a stream that is alone on its worker is the shortest one.
        self._least_step_s = step_s + self._answer_s / self._answer_tokens
        self._itl_s = max(goals.itl_s, HOPELESS_STEPS * self._least_step_s)
        # Prompt tails get at most this share of a worker's time, which its streams leave.
        self._most_left = 1 - self._least_step_s / self._itl_s
        # A prompt that is late where it is alone is late with any number of workers. A tail takes a step at least.
        self._hopeless = self._ttft_left_s < np.maximum(self._tails_s / self._most_left, self._itl_s)

    def load(self, per_s: float) -> float:
        """Returns the mean number of workers that so many requests a second keep busy at the bound of the latency,
        where as many streams as possible share the fixed cost of a step."""
        return per_s * self._request_s / self._most_left

    def workers(
        self, per_s: float, streams: int = 0, context_tokens: int = 0, busy: float = 0.0, at_least: int = 0
    ) -> int:
        """Returns the smallest number of decode workers from ``at_least`` on that is enough.

        Args:
            streams, context_tokens: how many streams run or wait already, and what they read in a step.
            busy: workers for prompts that wait already, beside all others.
        """
        now = max(at_least, self._for_streams(streams, context_tokens))
        return least(lambda workers: self._enough(workers, per_s, busy), now) if per_s > 0 else now + math.ceil(busy)

    def _for_streams(self, streams: int, context_tokens: int) -> int:
        """Returns how many workers carry so many streams within the bound of the latency."""
        step_s, token_s, sequence_s, read_s, pair_s = self._worker.model
        streams_s = streams * (token_s + sequence_s) + context_tokens * (read_s + pair_s)
        by_time = streams_s / max(self._itl_s - step_s, self._itl_s / HOPELESS_STEPS)
        return math.ceil(max(by_time, streams / self._worker.slots if self._worker.slots else 0.0))

    def _enough(self, workers: int, per_s: float, busy: float) -> bool:
        each = workers - busy
        if each <= 0:
            return False
        # These are the mean number of streams where steps take as long as the bound, and how far their number goes
        # beyond it.
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
        """Returns the share of prompt tails that wait too long; 1.0 where the streams leave no time for them."""
        left = self._most_left - per_s * self._answer_s / each
        servers = math.floor(each)
        if left <= 0 or servers < 1:
            return 1.0
        seconds = self._tails_s / left
        slacks_s = np.where(self._hopeless, np.inf, self._ttft_left_s - np.maximum(seconds, self._itl_s))
        return late_share(servers, per_s, seconds, slacks_s)


def _tail_s(worker: TypicalWorker, prompt: PlannedPrompt) -> float:
    """Returns the seconds that a prompt's tail adds to the steps of a decode worker, which run in any case."""
    start, end = prompt.split, prompt.prompt
    steps = max(1, -(-(end - start) // worker.step_tokens))
    return max(0.0, worker.model.range_s(start, end, worker.step_tokens) - steps * worker.model.step_s)
