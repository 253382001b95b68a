"""Computes rates, shares and quantiles of what happened between two readings of a cluster, for the live picture.

A reading has the cluster's status and the metrics of the gateway that shows the picture. Sans-IO (I9). A figure that
neither reports is None, never zero: the page shows a dash for it.
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

USES = ("decode", "tail", "prefill", "speculative", "idle")
# Grammars left no choice of the tokens with this use; they are shown with the speculative ones.
FORCED = "forced"
SOURCES = ("pool", "fetched", "restored", "bucket", "prefill", "tail")
# The rates of a gateway's flow, and the quantiles of its latencies.
FLOW = ("generated", "prompt", "cached", "sources", "requests", "refused", "first_token", "between_tokens")
ANSWERED = ("stop", "length")
CANCELLED = "cancelled"
# A component without a heartbeat for this long is late; seconds later its record is gone from the registry.
LATE_MS = 3000


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """Holds the state of the cluster at one moment.

    Attributes:
        at_s: the time, on a clock that only goes forward.
        metrics: the gateway's own metrics.
    """

    at_s: float
    status: ClusterStatus
    metrics: Values

    def gauge(self, metric: Metric, *labels: str) -> float | None:
        """Returns the value of one of the gateway's gauges; None where it has none."""
        value = self.metrics.get(metric, {}).get(labels)
        return value if isinstance(value, int | float) else None


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


def steps(before: ClusterReading | None, now: ClusterReading, component_id: str) -> dict[str, Any] | None:
    """Describes a worker's steps by two of its heartbeats: how many a second, their mean duration, the share of the
    time in which one ran, and the shares of their budgets by each of USES. Returns None where the heartbeats do not
    report steps, or where the process was started between them."""
    if before is None or (seconds := now.at_s - before.at_s) <= 0:
        return None
    first, second = (
        {one.component_id: one for one in reading.status.components}.get(component_id) for reading in (before, now)
    )
    if first is None or second is None or not second.steps:
        return None
    count = second.steps - first.steps
    grown = {
        use: getattr(second, f"step_{use}_tokens") - getattr(first, f"step_{use}_tokens") for use in (*USES, FORCED)
    }
    if min(count, *grown.values()) < 0:
        return None
    total, total_s = sum(grown.values()), (second.steps_ms - first.steps_ms) / 1000
    # Speculative and forced tokens both come beside the one token that each decode gets.
    grown["speculative"] += grown.pop(FORCED)
    return {
        "per_second": count / seconds,
        "mean_s": total_s / count if count else 0.0,
        "busy": min(1.0, total_s / seconds),
        "shares": {use: tokens / total for use, tokens in grown.items()} if total else {},
    }


def flow(before: ClusterReading | None, now: ClusterReading) -> dict[str, Any]:
    """Returns the gateway's rates per second between two readings, by the names of FLOW: tokens, prompt tokens by each
    of SOURCES, requests that ended by "answered", "cancelled" and "failed", and those that were refused by reason. They
    are None where nothing was read before."""
    if before is None or (seconds := now.at_s - before.at_s) <= 0:
        return dict.fromkeys(FLOW)

    def rates(metric: Metric, key: Callable[[Labels], str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for labels, grown in _grown(before, now, metric):
            found[key(labels)] = found.get(key(labels), 0.0) + grown / seconds
        return found

    sources = dict.fromkeys(SOURCES, 0.0) | rates(names.PROMPT_TOKENS, lambda labels: labels[1])
    # The rates are added up because a difference of rates may be a little below zero, and would be shown as -0 %.
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


def quantile(found: Distribution, share: float) -> float:
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


def _grown(before: ClusterReading, now: ClusterReading, metric: Metric) -> Iterator[tuple[Labels, float]]:
    """Yields how much each of a counter's cells grew. A cell that is smaller than before was counted from zero
    again."""
    firsts = before.metrics.get(metric, {})
    for labels, value in now.metrics.get(metric, {}).items():
        first = firsts.get(labels, 0.0)
        yield labels, value - first if value >= first else value


def _quantiles(before: ClusterReading, now: ClusterReading, metric: Metric) -> dict[str, float | None] | None:
    """Returns quantiles of a histogram's change, for JSON, which has no infinity: one beyond the last bound is None."""
    counts = [0] * (len(metric.bounds) + 1)
    for reading, apply in ((now, operator.add), (before, operator.sub)):
        for cell in reading.metrics.get(metric, {}).values():
            counts = list(map(apply, counts, cell.counts))
    if not any(counts):
        return None
    found = Distribution(metric.bounds, counts)
    p50, p99 = (None if math.isinf(at := quantile(found, share)) else at for share in (0.5, 0.99))
    return {"p50_s": p50, "p99_s": p99, "last_bound_s": metric.bounds[-1]}


def _outcome(label: str) -> str:
    return "answered" if label in ANSWERED else label if label == CANCELLED else "failed"
