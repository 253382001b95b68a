"""Forecasts how many workers of each model and kind are wanted now, for the objectives to be met later (I9).

    arrived, planned, answered --> what requests are like    \
    tick, every TICK_S: arrivals of all gateways --> rates    >--> workers needed --held--> wanted
                        the workers' heartbeats --> the curve /

A wish is for the time when a worker that is asked for now will serve: the *horizon*. It rises at once. It falls only to
the most that was needed, chance included, within twice the window through which the rate is measured, so a lower wish
rests on that many new arrivals. A gateway that has just started wishes for the workers that are there until it has seen
as much.

Each gateway sees a part of the arrivals, and how many workers are needed is no sum over parts: many streams need less
room for chance than a few. So gateways tell in their heartbeats how many requests came to them, and each one counts all
of them. It takes the size of requests from its own. The wishes of gateways agree but for the age of a heartbeat, and
the largest one is to be taken.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pillion.config import GatewayFlags
from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.planning.forecast import Forecaster, GivenAnswer, PlannedPrompt
from pillion.gateway.planning.plan_cost import ASSUMED_STEP_TOKENS, COMPARED_TOKENS, Models, queued_token_s
from pillion.gateway.scaling.arrival_history import TICK_S, ArrivalHistory, Rates, window_s
from pillion.gateway.scaling.objectives import Objectives, parse_objectives
from pillion.gateway.scaling.worker_needs import (
    DecodeNeeds,
    PrefillNeeds,
    TypicalWorker,
    range_s,
)
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Reading
from pillion.wire.registry import ComponentRecord

# The last requests, which are this many, show what the next ones are like.
SAMPLE_REQUESTS = 256
# A start is assumed to take this long where neither the operator nor any worker says how long.
ASSUMED_START_S = 30.0
KINDS = ("prefill", "decode")
# The number of wanted workers falls only when no more were needed during this many windows, because the estimates of
# two windows share no arrival.
HOLD_WINDOWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForecast:
    """Holds what is known and wanted of one model.

    Attributes:
        rates: requests a second.
        load: the mean number of workers that the rate ahead keeps busy, by kind; a kind is missing whose steps nobody
            has measured yet.
        wanted: how many workers there should be, by kind.
        horizon_s: how far ahead the rate is forecast.
    """

    rates: Rates
    load: Mapping[str, float]
    wanted: Mapping[str, int]
    horizon_s: float


class HeldWish:
    """Represents a number of wanted workers that rises at once, and falls to the largest number needed within a
    time."""

    def __init__(self, present: int, now: float) -> None:
        self.wanted = present
        self._began_s = now
        self._needed: deque[tuple[float, int]] = deque()

    def take(self, needed: int, at_most: int, now: float, hold_s: float) -> int:
        """Notes that ``needed`` workers are needed now, and ``at_most`` if more requests are on their way than were
        counted by chance. Returns how many workers are wanted."""
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
    """Holds a sample of one model's requests, how many came to this gateway, and the wishes for its workers."""

    history: ArrivalHistory
    arrived: int = 0
    counted: int = 0
    prompts: deque[PlannedPrompt] = field(default_factory=lambda: deque(maxlen=SAMPLE_REQUESTS))
    answers: deque[GivenAnswer] = field(default_factory=lambda: deque(maxlen=SAMPLE_REQUESTS))
    wishes: dict[str, HeldWish] = field(default_factory=dict)


class WorkerForecaster(Forecaster):
    """Makes the forecast of one gateway. ``now`` is monotonic, in seconds.

    Attributes:
        forecasts: the last forecast of each model for which requests came.
    """

    def __init__(self, goals: Objectives | None = None) -> None:
        self._goals = goals or Objectives()
        self._samples: dict[str, ModelSample] = {}
        # For each gateway and model this has the requests that came to it, as the gateway's last heartbeat says.
        self._theirs: dict[tuple[str, str], int] = {}
        self._ticked_s = 0.0
        self.forecasts: dict[str, ModelForecast] = {}

    def arrived(self, model: str) -> None:
        """Notes that a request came, whether it is served or refused for want of room."""
        self._sample(model).arrived += 1

    def planned(self, model: str, prompt: PlannedPrompt) -> None:
        """Notes that a request was planned for the first time."""
        self._sample(model).prompts.append(prompt)

    def answered(self, model: str, answer: GivenAnswer) -> None:
        """Notes that a request which generated something has ended."""
        if answer.tokens > 0:
            self._sample(model).answers.append(answer)

    def arrivals(self) -> tuple[tuple[str, int], ...]:
        """Returns, for this gateway's heartbeat, how many requests came to it, by model."""
        return tuple((model, sample.arrived) for model, sample in sorted(self._samples.items()))

    def tick(self, now: float, components: Iterable[ComponentRecord], gateway_id: str) -> None:
        """Looks at the registry's records, this gateway's own among them; does nothing within TICK_S of the last
        look."""
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
                    # A gateway that is seen for the first time may have served for long, so its count is the start; one
                    # that counts less than before has been restarted.
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

    def readings(self) -> Iterator[Reading]:
        """Yields the gauges of the wanted workers, by model."""
        return forecast_readings(self.forecasts)

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
        # A kind of worker of which this gateway knows too little is left out: other gateways may know more, and the
        # largest wish counts.
        needed: dict[str, tuple[int, int]] = {}
        load: dict[str, float] = {}
        measured = any(one.step_cost_s for kind in KINDS for one in workers[kind])
        if measured and sample.prompts:
            models = Models(workers["decode"], workers["prefill"])
            before_s = [0.0] * len(sample.prompts)
            if workers["prefill"]:
                typical = _typical(workers["prefill"], models, {})
                before_s = [range_s(typical, one) for one in sample.prompts]
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
        """Returns how many workers would be busy for the horizon with prompts that wait, beyond those that the present
        workers compute within the bound of the first token."""
        waiting_s = 0.0
        for worker in workers:
            step_tokens = worker.max_step_tokens or ASSUMED_STEP_TOKENS
            waiting_s += worker.queued_tokens * queued_token_s(model, step_tokens, model.step_s)
        return max(0.0, waiting_s - len(workers) * self._goals.ttft_s) / max(horizon_s, self._goals.ttft_s)


def make_forecaster(flags: GatewayFlags) -> WorkerForecaster:
    """Makes the forecast by a gateway's flags. Raises ConfigError for objectives that make no sense."""
    return WorkerForecaster(parse_objectives(flags.slo, flags.attainment, flags.worker_start_s))


def forecast_readings(forecasts: Mapping[str, ModelForecast]) -> Iterator[Reading]:
    """Yields the gauges of forecasts by model."""
    for model, found in forecasts.items():
        for role, count in found.wanted.items():
            yield names.WANTED_WORKERS, (model, role), count
        for role, load in found.load.items():
            yield names.FORECAST_LOAD, (model, role), load
        yield names.FORECAST_ARRIVALS, (model, "present"), found.rates.present
        yield names.FORECAST_ARRIVALS, (model, "ahead"), found.rates.ahead
        yield names.FORECAST_HORIZON, (model,), found.horizon_s


def _start_s(workers: Sequence[ComponentRecord]) -> float:
    """Returns how long the slowest of the workers took to start."""
    return max((one.start_s for one in workers), default=0.0) or ASSUMED_START_S


def _typical(workers: Sequence[ComponentRecord], models: Models, nodes: Mapping[str, ComponentRecord]) -> TypicalWorker:
    """Describes the median worker of a kind, of which at least one exists."""
    fits = sorted((models.of(one) for one in workers), key=lambda fit: fit.range_s(0, COMPARED_TOKENS, COMPARED_TOKENS))
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
