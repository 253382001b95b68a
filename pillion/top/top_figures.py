"""Computes rates, shares and quantiles of what happened between two readings of a cluster, for `pillion top` and the
live picture of `--ui`.

Sans-IO (I9). A figure that no page or status reports is None, never zero: the view shows a dash for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Labels, Metric, Snapshot
from pillion.top.top_pages import ComponentPage
from pillion.types import ClusterStatus, ComponentStatus

USES = ("decode", "tail", "prefill", "speculative", "idle")
# Grammars left no choice of the tokens with this use; they are shown with the speculative ones.
FORCED = "forced"
SOURCES = ("pool", "fetched", "restored", "bucket", "prefill", "tail")
ANSWERED = ("stop", "length")
CANCELLED = "cancelled"
# A component without a heartbeat for this long is late; seconds later its record is gone from the registry.
LATE_MS = 3000


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """Holds the state of the cluster at one moment.

    Attributes:
        at_s: the time, on a clock that only goes forward.
        pages: the metrics pages, by component.
        troubles: the pages that could not be read, and why, one line each.
    """

    at_s: float
    status: ClusterStatus
    pages: Mapping[str, ComponentPage] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()

    def gauge(self, component_id: str, metric: Metric, *labels: str) -> float | None:
        """Returns a gauge's value on a component's page; None where it has no such page or gauge."""
        page = self.pages.get(component_id)
        value = page.values.get(metric, {}).get(labels) if page else None
        return value if isinstance(value, int | float) else None


class History:
    """Keeps the readings of the last ``window_s`` seconds, oldest first.

    Where nothing was read within the window, a reading that is at most ``oldest_s`` seconds old is still good for
    rates.
    """

    def __init__(self, window_s: float, oldest_s: float = math.inf) -> None:
        self._window_s = window_s
        self._oldest_s = oldest_s
        self._readings: list[ClusterReading] = []

    def add(self, reading: ClusterReading) -> ClusterReading | None:
        """Adds a reading. Returns the reading that rates are taken from: the oldest one in the window, or else the one
        before. None where no such reading exists, or it is too old."""
        before = [old for old in self._readings if reading.at_s - old.at_s <= self._window_s]
        before = before or [old for old in self._readings[-1:] if reading.at_s - old.at_s <= self._oldest_s]
        self._readings = [*before, reading]
        return before[0] if before else None

    def newest(self) -> ClusterReading | None:
        """Returns the reading that was added last, None before the first."""
        return self._readings[-1] if self._readings else None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Holds quantiles of a histogram's change, in the histogram's unit; infinite beyond its last bound."""

    count: int
    p50: float
    p99: float
    last_bound: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Describes a worker's steps between two readings.

    Attributes:
        p50_s: median duration; None where the worker's page was not read.
        mean_s: mean duration; 0 where no step ran.
        busy: share of the time in which a step ran.
        shares: share of the steps' budgets by each of USES, adding up to 1; empty where no step ran.
    """

    per_second: float
    p50_s: float | None
    mean_s: float
    busy: float
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GatewayFlow:
    """Holds the gateways' rates per second; None where no page or status reports a rate.

    Attributes:
        from_pages: whether the rates are from the gateways' pages; else they are from the status, which counts a
            request's tokens when it ends.
        gateways: number of gateways whose pages were read.
        requests: requests that ended, by outcome: "answered", "cancelled" and "failed".
        refused: requests that were refused at the edge, by reason.
        sources: prompt tokens by each of SOURCES, where their KV came from.
    """

    from_pages: bool
    gateways: int
    generated: float | None = None
    prompt: float | None = None
    cached: float | None = None
    sources: Mapping[str, float] | None = None
    requests: Mapping[str, float] | None = None
    refused: Mapping[str, float] | None = None
    first_token: Quantiles | None = None
    between_tokens: Quantiles | None = None


def fenced_by(status: ClusterStatus) -> dict[str, str]:
    """Returns the components that KV nodes have fenced, each with its node."""
    return {name: node.component_id for node in status.components for name in node.fenced_components}


def all_components(status: ClusterStatus) -> tuple[ComponentStatus, ...]:
    """Returns the components of the registry, and after them, without a role, those whose record has expired there and
    which only the node that fenced them still knows."""
    known = {one.component_id for one in status.components}
    gone = [
        ComponentStatus(component_id=name, role="", node_id=node)
        for name, node in fenced_by(status).items()
        if name not in known
    ]
    return (*status.components, *gone)


def state_of(component: ComponentStatus, fenced: Container[str]) -> Literal["ok", "late", "fenced", "down"]:
    """Returns a component's state, given the ids of all components that are fenced."""
    if component.trouble:
        return "down"
    if component.component_id in fenced:
        return "fenced"
    return "late" if component.heartbeat_age_ms >= LATE_MS else "ok"


def steps(before: ClusterReading, now: ClusterReading, component_id: str) -> StepFigures | None:
    """Describes one worker's steps, by its page or, where that was not read both times, by the status. Returns None
    where neither reports them."""
    seconds = now.at_s - before.at_s
    if seconds <= 0:
        return None
    pair = _pair(before, now, component_id)
    if pair is None:
        return _steps_of_status(before.status, now.status, component_id, seconds)
    durations = _together(_changes(pair, names.STEP_DURATION))
    tokens = {labels[0]: grown for labels, grown in _grown(pair, names.STEP_BUDGET)}
    if durations is None:
        return None
    return _step_figures(durations.count, durations.total, quantile(durations, 0.5), tokens, seconds)


def flow(before: ClusterReading, now: ClusterReading) -> GatewayFlow:
    """Returns the rates of all gateways together."""
    seconds = now.at_s - before.at_s
    if seconds <= 0:
        return GatewayFlow(False, 0)
    gateways = [page.component_id for page in now.pages.values() if page.role == "gateway"]
    pairs = [pair for pair in (_pair(before, now, component_id) for component_id in gateways) if pair is not None]
    if not pairs:
        return _flow_of_status(before.status, now.status, seconds)

    def rates(metric: Metric, key: Callable[[Labels], str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for pair in pairs:
            for labels, grown in _grown(pair, metric):
                found[key(labels)] = found.get(key(labels), 0.0) + grown / seconds
        return found

    sources = dict.fromkeys(SOURCES, 0.0) | rates(names.PROMPT_TOKENS, lambda labels: labels[1])
    prompt = sum(sources.values())
    return GatewayFlow(
        True,
        len(pairs),
        generated=sum(rates(names.GENERATED_TOKENS, str).values()),
        prompt=prompt,
        # The rates are added up because a difference of rates may be a little below zero, and would be shown as -0 %.
        cached=sum(rate for source, rate in sources.items() if source not in ("prefill", "tail")),
        sources=sources,
        requests=rates(names.REQUESTS, lambda labels: _outcome(labels[1])),
        refused=rates(names.REJECTED, lambda labels: labels[0]),
        first_token=_quantiles(pairs, names.TTFT),
        between_tokens=_quantiles(pairs, names.ITL),
    )


def wanted_workers(now: ClusterReading) -> dict[str, int]:
    """Returns how many workers of each kind the gateways' forecast wants, for all models together; empty where no
    gateway forecasts."""
    largest: dict[Labels, float] = {}
    for page in now.pages.values():
        for labels, value in page.values.get(names.WANTED_WORKERS, {}).items():
            if not isinstance(value, Snapshot):
                largest[labels] = max(largest.get(labels, 0.0), value)
    found: dict[str, int] = {}
    for (_, role), count in sorted(largest.items()):
        found[role] = found.get(role, 0) + round(count)
    return found


def quantile(found: Snapshot, share: float) -> float:
    """Returns a histogram's quantile at ``share``, as Prometheus's histogram_quantile computes it.

    It is linear within a bucket, infinite beyond the last bound, and 0 for an empty histogram.
    """
    rank, below = share * found.count, 0
    for number, count in enumerate(found.counts):
        if count and below + count >= rank:
            if number == len(found.bounds):
                return math.inf
            low = found.bounds[number - 1] if number else 0.0
            return low + (found.bounds[number] - low) * (rank - below) / count
        below += count
    return 0.0


def _steps_of_status(
    before: ClusterStatus, now: ClusterStatus, component_id: str, seconds: float
) -> StepFigures | None:
    """Describes a worker's steps by two heartbeats of one process; None where the process was started between them."""
    first, second = ({one.component_id: one for one in status.components}.get(component_id) for status in (before, now))
    if first is None or second is None or not second.steps:
        return None
    uses = (*USES, FORCED)
    grown = {use: getattr(second, f"step_{use}_tokens") - getattr(first, f"step_{use}_tokens") for use in uses}
    if min(second.steps - first.steps, *grown.values()) < 0:
        return None
    total_s = (second.steps_ms - first.steps_ms) / 1000
    return _step_figures(second.steps - first.steps, total_s, None, grown, seconds)


def _step_figures(
    count: int, total_s: float, p50_s: float | None, tokens: Mapping[str, float], seconds: float
) -> StepFigures:
    total = sum(tokens.values())
    # Speculative and forced tokens both come beside the one token that each decode gets.
    beside = {"speculative": tokens.get("speculative", 0.0) + tokens.get(FORCED, 0.0)}
    shares = {use: {**tokens, **beside}.get(use, 0.0) / total for use in USES} if total else {}
    return StepFigures(count / seconds, p50_s, total_s / count if count else 0.0, min(1.0, total_s / seconds), shares)


def _flow_of_status(before: ClusterStatus, now: ClusterStatus, seconds: float) -> GatewayFlow:
    def rate(name: str) -> float | None:
        grown: int = getattr(now, name) - getattr(before, name)
        # The totals of a gateway that ended are missing in the new reading, so the sum may have fallen.
        return grown / seconds if grown >= 0 else None

    prompt, cached = rate("prompt_tokens"), rate("cached_tokens")
    return GatewayFlow(False, 0, generated=rate("completion_tokens"), prompt=prompt, cached=cached)


_Pair = tuple[ComponentPage, ComponentPage]


def _pair(before: ClusterReading, now: ClusterReading, component_id: str) -> _Pair | None:
    first, second = before.pages.get(component_id), now.pages.get(component_id)
    return (first, second) if first is not None and second is not None else None


def _grown(pair: _Pair, metric: Metric) -> Iterator[tuple[Labels, float]]:
    """Yields how much each of a counter's cells grew. A cell that is smaller than before was counted from zero
    again."""
    before = pair[0].values.get(metric, {})
    for labels, value in pair[1].values.get(metric, {}).items():
        first = before.get(labels, 0.0)
        if not isinstance(value, Snapshot) and not isinstance(first, Snapshot):
            yield labels, value - first if value >= first else value


def _changes(pair: _Pair, metric: Metric) -> Iterator[Snapshot]:
    """Yields how much each of a histogram's cells grew. A cell that is smaller than before was counted from zero
    again."""
    before = pair[0].values.get(metric, {})
    for labels, now in pair[1].values.get(metric, {}).items():
        first = before.get(labels)
        if isinstance(now, Snapshot):
            if isinstance(first, Snapshot) and first.bounds == now.bounds:
                grown = tuple(map(operator.sub, now.counts, first.counts))
                if min(grown) >= 0:
                    now = Snapshot(now.bounds, grown, now.total - first.total, 0.0, 0.0)
            yield now


def _together(found: Iterable[Snapshot]) -> Snapshot | None:
    """Returns the sum of histograms; None where there is none. Histograms with other bounds are of another version;
    then only the last one is kept."""
    made: Snapshot | None = None
    for one in found:
        made = made + one if made is not None and made.bounds == one.bounds else one
    return made


def _quantiles(pairs: Iterable[_Pair], metric: Metric) -> Quantiles | None:
    found = _together(change for pair in pairs for change in _changes(pair, metric))
    if found is None or not found.count:
        return None
    return Quantiles(found.count, quantile(found, 0.5), quantile(found, 0.99), found.bounds[-1])


def _outcome(label: str) -> str:
    return "answered" if label in ANSWERED else label if label == CANCELLED else "failed"
