"""How many workers of each model and kind are wanted now, so that those are there which the objectives will need (I9).

    arrived, planned, answered --> what requests are like    \
    tick, every TICK_S: arrivals of all gateways --> rates    >--> workers needed --held--> wanted
                        the workers' heartbeats --> the curve /

A wish is for the time when a worker that is asked for now will serve: the *horizon*. It rises at once. It falls only to
the most that was needed, chance included, within twice the window through which the rate is measured, so a lower wish
rests on that many new arrivals. A gateway that has just started wishes for what is there until it has seen as much.

Each gateway sees a part of the arrivals, and how many workers are needed is no sum over parts: many streams need less
room for chance than a few. So gateways tell in their heartbeats how many requests came to them, and each one counts all
of them. What requests are like it takes from its own. Their wishes agree but for the age of a heartbeat, and the
largest one is to be taken.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pillion.gateway.planning.plan_cost import ASSUMED_STEP_TOKENS, COMPARED_TOKENS, Models, StepModel
from pillion.gateway.scaling.arrival_history import TICK_S, ArrivalHistory, Rates, window_s
from pillion.gateway.scaling.objectives import Objectives
from pillion.gateway.scaling.worker_needs import (
    DecodeNeeds,
    GivenAnswer,
    PlannedPrompt,
    PrefillNeeds,
    TypicalWorker,
    span_s,
)
from pillion.wire.registry import ComponentRecord

# The last requests, which say what the next ones are like.
SAMPLE_REQUESTS = 256
# The time of a start where neither the operator nor any worker says it.
ASSUMED_START_S = 30.0
KINDS = ("prefill", "decode")
# A wish falls when nothing asked for more in so many windows: the estimates of two share no arrival.
HOLD_WINDOWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForecast:
    """What is known and wanted of one model.

    Attributes:
        rates: requests a second.
        load: by kind, the mean number of workers that the rate ahead keeps busy; a kind is missing whose steps nobody
            has measured yet.
        wanted: by kind, how many workers there should be.
        horizon_s: how far ahead that is.
    """

    rates: Rates
    load: Mapping[str, float]
    wanted: Mapping[str, int]
    horizon_s: float


class HeldWish:
    """A number of workers that rises at once, and falls to the most that was needed for a time."""

    def __init__(self, present: int, now: float) -> None:
        self.wanted = present
        self._began_s = now
        self._needed: deque[tuple[float, int]] = deque()

    def take(self, needed: int, at_most: int, now: float, hold_s: float) -> int:
        """Notes what is needed now, and at the most what chance may have hidden; returns what is wanted."""
        while self._needed and self._needed[-1][1] <= at_most:
            self._needed.pop()
        self._needed.append((now, at_most))
        while self._needed[0][0] < now - hold_s:
            self._needed.popleft()
        if needed > self.wanted:
            self.wanted = needed
        elif now - self._began_s >= hold_s:
            self.wanted = min(self.wanted, max(needed, self._needed[0][1]))
        return self.wanted


@dataclass(slots=True)
class ModelSample:
    """What one model's requests were like, how many came to this gateway, and the wishes for its workers."""

    history: ArrivalHistory
    arrived: int = 0
    counted: int = 0
    prompts: deque[PlannedPrompt] = field(default_factory=lambda: deque(maxlen=SAMPLE_REQUESTS))
    answers: deque[GivenAnswer] = field(default_factory=lambda: deque(maxlen=SAMPLE_REQUESTS))
    wishes: dict[str, HeldWish] = field(default_factory=dict)


class WorkerForecaster:
    """The forecast of one gateway. ``now`` is monotonic, in seconds.

    Attributes:
        forecasts: the last one of each model of which requests came.
    """

    def __init__(self, goals: Objectives | None = None) -> None:
        self._goals = goals or Objectives()
        self._samples: dict[str, ModelSample] = {}
        # By gateway and model: requests that came to it, as its last heartbeat says.
        self._theirs: dict[tuple[str, str], int] = {}
        self._ticked_s = 0.0
        self.forecasts: dict[str, ModelForecast] = {}

    def arrived(self, model: str) -> None:
        """A request came, whether it is served or refused for want of room."""
        self._sample(model).arrived += 1

    def planned(self, model: str, prompt: PlannedPrompt) -> None:
        """A request was planned for the first time."""
        self._sample(model).prompts.append(prompt)

    def answered(self, model: str, answer: GivenAnswer) -> None:
        """A request has ended that generated something."""
        if answer.tokens > 0:
            self._sample(model).answers.append(answer)

    def arrivals(self) -> tuple[tuple[str, int], ...]:
        """For this gateway's heartbeat: how many requests came to it, by model."""
        return tuple((model, sample.arrived) for model, sample in sorted(self._samples.items()))

    def tick(self, now: float, components: Iterable[ComponentRecord], gateway_id: str) -> None:
        """Looks at the registry's records, this gateway's own among them; does nothing within TICK_S of the last time
        that it did something."""
        if self._ticked_s and now - self._ticked_s < TICK_S:
            return
        self._ticked_s = now
        workers: dict[str, dict[str, list[ComponentRecord]]] = defaultdict(lambda: {kind: [] for kind in KINDS})
        nodes: dict[str, ComponentRecord] = {}
        theirs: Counter[str] = Counter()
        known: dict[tuple[str, str], int] = {}
        for record in components:
            if record.role in KINDS:
                workers[record.model][record.role].append(record)
            elif record.role == "kvnode":
                nodes[record.component_id] = record
            elif record.component_id != gateway_id:
                for model, count in record.arrivals:
                    key = record.component_id, model
                    known[key] = count
                    # One that is new here may have served for long; one that counts less than before began anew.
                    before = self._theirs.get(key, count)
                    theirs[model] += count - before if count >= before else count
        self._theirs = known
        for model, count in theirs.items():
            if count:
                self._sample(model)
        for model, sample in self._samples.items():
            came = sample.arrived - sample.counted + theirs[model]
            sample.counted = sample.arrived
            sample.history.tick(now, came)
            self.forecasts[model] = self._forecast(sample, workers[model], nodes, now)

    # -- inside

    def _sample(self, model: str) -> ModelSample:
        if model not in self._samples:
            history = ArrivalHistory(self._goals.deviations, self._goals.attainment, self._ticked_s)
            self._samples[model] = ModelSample(history)
        return self._samples[model]

    def _forecast(
        self,
        sample: ModelSample,
        workers: Mapping[str, Sequence[ComponentRecord]],
        nodes: Mapping[str, ComponentRecord],
        now: float,
    ) -> ModelForecast:
        horizon_s = self._goals.start_s or _start_s([*workers["prefill"], *workers["decode"]])
        rates = sample.history.rates(horizon_s)
        # A kind that this gateway knows too little of is left out: others may know more, and the largest wish counts.
        needed: dict[str, tuple[int, int]] = {}
        load: dict[str, float] = {}
        measured = any(one.step_cost_s for kind in KINDS for one in workers[kind])
        if measured and sample.prompts:
            models = Models(workers["decode"], workers["prefill"])
            before_s = [0.0] * len(sample.prompts)
            if workers["prefill"]:
                typical = _typical(workers["prefill"], models, {})
                before_s = [span_s(typical, one) for one in sample.prompts]
                prefills = PrefillNeeds(typical, sample.prompts, self._goals)
                busy = self._busy(workers["prefill"], typical.model, horizon_s)
                load["prefill"] = prefills.load(rates.ahead)
                count = prefills.workers(rates.ahead, busy, 1)
                needed["prefill"] = count, prefills.workers(rates.most_ahead, busy, count)
            if workers["decode"] and sample.answers:
                typical = _typical(workers["decode"], models, nodes)
                decodes = DecodeNeeds(typical, sample.prompts, sample.answers, before_s, self._goals)
                streams = sum(one.running_requests + one.waiting_requests for one in workers["decode"])
                context = sum(one.context_tokens for one in workers["decode"])
                busy = self._busy(workers["decode"], typical.model, horizon_s)
                load["decode"] = decodes.load(rates.ahead)
                count = decodes.workers(rates.ahead, streams, context, busy, 1)
                needed["decode"] = count, decodes.workers(rates.most_ahead, streams, context, busy, count)
        wanted = {}
        for kind, numbers in needed.items():
            wish = sample.wishes.setdefault(kind, HeldWish(len(workers[kind]), now))
            wanted[kind] = wish.take(*numbers, now, HOLD_WINDOWS * window_s(horizon_s))
        return ModelForecast(rates=rates, load=load, wanted=wanted, horizon_s=horizon_s)

    def _busy(self, workers: Sequence[ComponentRecord], model: StepModel, horizon_s: float) -> float:
        """How many workers would be busy for the horizon with prompts that wait, beyond what those that are there
        compute within the bound of the first token."""
        waiting_s = 0.0
        for worker in workers:
            step_tokens = worker.max_step_tokens or ASSUMED_STEP_TOKENS
            waiting_s += worker.queued_tokens * model.queued_token_s(step_tokens, model.step_s)
        return max(0.0, waiting_s - len(workers) * self._goals.ttft_s) / max(horizon_s, self._goals.ttft_s)


def _start_s(workers: Sequence[ComponentRecord]) -> float:
    """How long the slowest of the workers took to start."""
    return max((one.start_s for one in workers), default=0.0) or ASSUMED_START_S


def _typical(workers: Sequence[ComponentRecord], models: Models, nodes: Mapping[str, ComponentRecord]) -> TypicalWorker:
    """The middle worker of a kind, of which at least one is there."""
    fits = sorted((models.of(one) for one in workers), key=lambda fit: fit.span_s(0, COMPARED_TOKENS, COMPARED_TOKENS))
    shared = Counter(one.node_id for one in workers)
    pools = [
        nodes[one.node_id].total_blocks * one.block_size_tokens / shared[one.node_id]
        for one in workers
        if one.node_id in nodes
    ]
    return TypicalWorker(
        model=fits[len(fits) // 2],
        step_tokens=int(statistics.median_low(one.max_step_tokens or ASSUMED_STEP_TOKENS for one in workers)),
        slots=int(statistics.median_low(one.running_requests + one.free_seqs for one in workers)),
        pool_tokens=statistics.median(pools) if pools else 0.0,
    )
