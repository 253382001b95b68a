"""What happened between two looks at a cluster, for `pillion top`.

    Look (status, pages) at t0 --+
                                 +--> changes of counters and histograms --> rates, shares, quantiles
    Look (status, pages) at t1 --+

Sans-IO (I9). A figure that nobody told is None, never zero: the view shows a dash for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Labels, Metric, Snapshot
from pillion.top.top_pages import ComponentPage
from pillion.types import ClusterStatus

USES = ("decode", "tail", "prefill", "speculative", "idle")
SOURCES = ("pool", "fetched", "restored", "prefill", "tail")
ANSWERED = ("stop", "length")
CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """The cluster at one moment.

    Attributes:
        at_s: on a clock that only goes forward.
        pages: by part.
        troubles: what could not be read, and why, one line each.
    """

    at_s: float
    status: ClusterStatus
    pages: Mapping[str, ComponentPage] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()

    def gauge(self, component_id: str, metric: Metric, *labels: str) -> float | None:
        """What a part's page says of a gauge; None where no page does."""
        page = self.pages.get(component_id)
        value = page.values.get(metric, {}).get(labels) if page else None
        return value if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of a histogram's change. Each is in the histogram's unit, infinite beyond its last bound."""

    count: int
    p50: float
    p99: float
    last_bound: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a worker's steps did. ``shares`` has each of USES and adds up to 1; it is empty where no step ran."""

    per_second: float
    p50_s: float
    busy: float
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GatewayFlow:
    """What the gateways did, per second; None is what nobody told.

    Attributes:
        from_pages: read off the gateways' pages; else from the status, which counts a request's tokens when it ends.
        gateways: whose pages were read.
        requests: ended ones, by "answered", "cancelled" and "failed".
        refused: at the edge, by reason.
        sources: prompt tokens by where their KV came from, see SOURCES; of the status the pool's alone.
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


def steps(before: ClusterReading, now: ClusterReading, component_id: str) -> StepFigures | None:
    """Of one worker; None where its page was not read both times."""
    pair = _pair(before, now, component_id)
    seconds = now.at_s - before.at_s
    if pair is None or seconds <= 0:
        return None
    durations = _distribution(pair, names.STEP_DURATION)
    tokens = {labels[0]: grown for labels, grown in _grown(pair, names.STEP_BUDGET)}
    if durations is None:
        return None
    total = sum(tokens.values())
    shares = {use: tokens.get(use, 0.0) / total for use in USES} if total else {}
    return StepFigures(durations.count / seconds, quantile(durations, 0.5), min(1.0, durations.total / seconds), shares)


def flow(before: ClusterReading, now: ClusterReading) -> GatewayFlow:
    """Of all gateways together."""
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
        cached=prompt - sources["prefill"] - sources["tail"],
        sources=sources,
        requests=rates(names.REQUESTS, lambda labels: _outcome(labels[1])),
        refused=rates(names.REJECTED, lambda labels: labels[0]),
        first_token=_quantiles(_distribution(pair, names.TTFT) for pair in pairs),
        between_tokens=_quantiles(_distribution(pair, names.ITL) for pair in pairs),
    )


def quantile(found: Snapshot, share: float) -> float:
    """As Prometheus's histogram_quantile: linear within a bucket; infinite beyond the last bound, 0 of nothing."""
    rank, below = share * found.count, 0
    for number, count in enumerate(found.counts):
        if count and below + count >= rank:
            if number == len(found.bounds):
                return math.inf
            low = found.bounds[number - 1] if number else 0.0
            return low + (found.bounds[number] - low) * (rank - below) / count
        below += count
    return 0.0


def _flow_of_status(before: ClusterStatus, now: ClusterStatus, seconds: float) -> GatewayFlow:
    def rate(name: str) -> float | None:
        grown: int = getattr(now, name) - getattr(before, name)
        # A gateway that ended took its totals along.
        return grown / seconds if grown >= 0 else None

    prompt, cached = rate("prompt_tokens"), rate("cached_tokens")
    return GatewayFlow(False, 0, generated=rate("completion_tokens"), prompt=prompt, cached=cached)


_Pair = tuple[ComponentPage, ComponentPage]


def _pair(before: ClusterReading, now: ClusterReading, component_id: str) -> _Pair | None:
    first, second = before.pages.get(component_id), now.pages.get(component_id)
    return (first, second) if first is not None and second is not None else None


def _grown(pair: _Pair, metric: Metric) -> Iterator[tuple[Labels, float]]:
    """How much each of a counter's cells grew. One that is smaller than before belongs to a part that began anew."""
    before = pair[0].values.get(metric, {})
    for labels, value in pair[1].values.get(metric, {}).items():
        first = before.get(labels, 0.0)
        if not isinstance(value, Snapshot) and not isinstance(first, Snapshot):
            yield labels, value - first if value >= first else value


def _distribution(pair: _Pair, metric: Metric) -> Snapshot | None:
    """The change of a histogram, all its cells together; None where the page has none."""
    before, found = pair[0].values.get(metric, {}), []
    for labels, value in pair[1].values.get(metric, {}).items():
        first = before.get(labels)
        if isinstance(value, Snapshot):
            found.append(_since(first, value) if isinstance(first, Snapshot) else value)
    return _together(found)


def _since(before: Snapshot, now: Snapshot) -> Snapshot:
    grown = tuple(b - a for a, b in zip(before.counts, now.counts, strict=False))
    if before.bounds != now.bounds or any(count < 0 for count in grown):
        return now
    return Snapshot(now.bounds, grown, now.total - before.total, 0.0, 0.0)


def _together(found: Iterable[Snapshot | None]) -> Snapshot | None:
    made: Snapshot | None = None
    for one in found:
        if one is None:
            continue
        if made is None or made.bounds != one.bounds:
            # Other bounds are another version's; two cannot be added, and the last one is as good as the first.
            made = one
            continue
        counts = tuple(a + b for a, b in zip(made.counts, one.counts, strict=True))
        made = Snapshot(made.bounds, counts, made.total + one.total, 0.0, 0.0)
    return made


def _quantiles(found: Iterable[Snapshot | None]) -> Quantiles | None:
    all_of_it = _together(found)
    if all_of_it is None or not all_of_it.count:
        return None
    return Quantiles(all_of_it.count, quantile(all_of_it, 0.5), quantile(all_of_it, 0.99), all_of_it.bounds[-1])


def _outcome(said: str) -> str:
    return "answered" if said in ANSWERED else said if said == CANCELLED else "failed"
