"""Rates, shares and quantiles between two readings of a cluster, for the live picture. Sans-IO (I9).

A reading has the cluster's status and the metrics of the gateway that shows the picture. A figure that was not reported
is None, not zero: the page shows a dash.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Distribution, Labels, Metric, Values
from pillion.types import ClusterStatus, ComponentStatus

# What a step's token budget is used for.
USES = ("decode", "tail", "prefill", "speculative", "idle")
# Tokens that a grammar determines; shown with the speculative ones.
FORCED = "forced"
# Where prompt tokens come from: the tiers of hits, and the workers that compute the others.
SOURCES = ("pool", "fetched", "restored", "bucket", "prefill", "tail")
# Names of the gateway's rates.
FLOW = ("generated", "prompt", "cached", "sources", "requests", "refused", "first_token", "between_tokens")
# Heartbeat age at which a component is shown as late; seconds later its record expires from the registry.
LATE_MS = 3000


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """State of the cluster at one moment.

    Attributes:
        at_s: time on a monotonic clock.
        metrics: the gateway's own metrics.
    """

    at_s: float
    status: ClusterStatus
    metrics: Values

    def gauge(self, metric: Metric, *labels: str) -> float | None:
        """Return the value of one of the gateway's gauges, or None."""
        value = self.metrics.get(metric, {}).get(labels)
        return value if isinstance(value, int | float) else None


def fenced_by(status: ClusterStatus) -> dict[str, str]:
    """Return the components that KV nodes have fenced: component id -> KV node's id."""
    return {name: node.component_id for node in status.components for name in node.fenced_components}


def all_components(status: ClusterStatus) -> tuple[ComponentStatus, ...]:
    """Return the registry's components, followed by fenced ones whose record has expired, without a role."""
    known = {one.component_id for one in status.components}
    expired = [
        ComponentStatus(component_id=name, role="", node_id=node)
        for name, node in fenced_by(status).items()
        if name not in known
    ]
    return (*status.components, *expired)


def state_of(component: ComponentStatus, fenced: Container[str]) -> Literal["ok", "late", "fenced", "down"]:
    """Return a component's state. ``fenced`` has the ids of all fenced components."""
    if component.trouble:
        return "down"
    if component.component_id in fenced:
        return "fenced"
    return "late" if component.heartbeat_age_ms >= LATE_MS else "ok"


def steps(before: ClusterReading | None, now: ClusterReading, component_id: str) -> dict[str, Any] | None:
    """Return a worker's steps per second, their mean duration, the busy share of the time, and the shares of the token
    budget by USES, between two heartbeats. None if none reports steps, or if the process restarted in between.
    """
    if before is None or (seconds := now.at_s - before.at_s) <= 0:
        return None
    first, second = (
        {one.component_id: one for one in reading.status.components}.get(component_id) for reading in (before, now)
    )
    if first is None or second is None or not second.steps:
        return None
    count = second.steps - first.steps
    growth = {
        use: getattr(second, f"step_{use}_tokens") - getattr(first, f"step_{use}_tokens") for use in (*USES, FORCED)
    }
    if min(count, *growth.values()) < 0:
        return None
    total, total_s = sum(growth.values()), (second.steps_ms - first.steps_ms) / 1000
    growth["speculative"] += growth.pop(FORCED)
    return {
        "per_second": count / seconds,
        "mean_s": total_s / count if count else 0.0,
        "busy": min(1.0, total_s / seconds),
        "shares": {use: tokens / total for use, tokens in growth.items()} if total else {},
    }


def flow(before: ClusterReading | None, now: ClusterReading) -> dict[str, Any]:
    """Return the gateway's rates per second between two readings, by the names of FLOW.

    Prompt tokens are split by SOURCES, finished requests into "answered", "cancelled" and "failed", refused ones by
    reason. All are None without an earlier reading.
    """
    if before is None or (seconds := now.at_s - before.at_s) <= 0:
        return dict.fromkeys(FLOW)

    def rates(metric: Metric, key: Callable[[Labels], str]) -> dict[str, float]:
        by_key: dict[str, float] = {}
        for labels, growth in _growth(before, now, metric):
            by_key[key(labels)] = by_key.get(key(labels), 0.0) + growth / seconds
        return by_key

    sources = dict.fromkeys(SOURCES, 0.0) | rates(names.PROMPT_TOKENS, lambda labels: labels[1])
    # Summed rather than subtracted: a difference may be slightly negative and would be shown as -0 %.
    cached = sum(rate for source, rate in sources.items() if source not in ("prefill", "tail"))
    return {
        "generated": sum(rates(names.GENERATED_TOKENS, str).values()),
        "prompt": sum(sources.values()),
        "cached": cached,
        "sources": sources,
        "requests": rates(names.REQUESTS, lambda labels: _outcome(labels[1])),
        "refused": rates(names.REJECTED, lambda labels: labels[0]),
        "first_token": _quantiles(before, now, names.TTFT),
        "between_tokens": _quantiles(before, now, names.ITL),
    }


def quantile(histogram: Distribution, share: float) -> float:
    """Return a histogram's quantile at ``share``, computed as by Prometheus's histogram_quantile.

    Linear within a bucket, infinite beyond the last bound, 0 for an empty histogram.
    """
    rank, below = share * histogram.count, 0
    for number, count in enumerate(histogram.counts):
        if count and below + count >= rank:
            if number == len(histogram.bounds):
                return math.inf
            low = histogram.bounds[number - 1] if number else 0.0
            return low + (histogram.bounds[number] - low) * (rank - below) / count
        below += count
    return 0.0


def _growth(before: ClusterReading, now: ClusterReading, metric: Metric) -> Iterator[tuple[Labels, float]]:
    """Yield (labels, growth) of a counter. A smaller value means a reset to zero in between."""
    firsts = before.metrics.get(metric, {})
    for labels, value in now.metrics.get(metric, {}).items():
        first = firsts.get(labels, 0.0)
        yield labels, value - first if value >= first else value


def _quantiles(before: ClusterReading, now: ClusterReading, metric: Metric) -> dict[str, float | None] | None:
    """Return p50 and p99 of a histogram's growth, None for one beyond the last bound (JSON has no infinity); None
    without growth."""
    counts = [0] * (len(metric.bounds) + 1)
    for reading, apply in ((now, operator.add), (before, operator.sub)):
        for cell in reading.metrics.get(metric, {}).values():
            counts = list(map(apply, counts, cell.counts))
    if not any(counts):
        return None
    growth = Distribution(metric.bounds, counts)
    p50, p99 = (None if math.isinf(value := quantile(growth, share)) else value for share in (0.5, 0.99))
    return {"p50_s": p50, "p99_s": p99, "last_bound_s": metric.bounds[-1]}


def _outcome(label: str) -> str:
    """Return the outcome of a request by its label of the metric REQUESTS: "answered", "cancelled" or "failed"."""
    if label in ("stop", "length"):
        return "answered"
    return label if label == "cancelled" else "failed"
