"""Makes the live picture: figures of heartbeats and of the gateway's own metrics.

    every poll:  status, own metrics --> ClusterReading --> History --> figures over some seconds --> JSON

Sans-IO (I9). Components' steps and pools come with their heartbeats, so no metrics page of theirs is needed. A figure
that nobody reports is None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import asdict
from typing import Any

from pillion.gateway.ui.cluster_figures import (
    ClusterReading,
    GatewayFlow,
    History,
    Quantiles,
    StepFigures,
    all_components,
    fenced_by,
    flow,
    state_of,
    steps,
)
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Values
from pillion.types import WORKERS, ClusterStatus, ComponentStatus

# Rates are taken over this time, or over a little more where a poll was late.
WINDOW_S = 5.0
# No rates are computed from an older reading than this, as after a pause of all viewers, because a mean over minutes
# would look like one over seconds.
OLDEST_S = 2 * WINDOW_S
# Viewers who ask within this time get the same picture, so more viewers cost the gateway no more.
REFRESH_S = 0.5


class ClusterPicture:
    """Makes the picture that all viewers of one gateway process share. The class is not thread-safe.

    Args:
        component_id: the gateway's own id.
    """

    def __init__(self, component_id: str) -> None:
        self._component_id = component_id
        self._history = History(WINDOW_S, OLDEST_S)
        self._picture: dict[str, Any] = {}

    def at(self, now_s: float, status: Callable[[], ClusterStatus], metrics: Callable[[], Values]) -> dict[str, Any]:
        """Returns the picture at ``now_s`` (monotonic seconds), or the last one where that is hardly older. ``status``
        and ``metrics`` are called where a new reading is taken."""
        newest = self._history.newest()
        if newest is not None and now_s - newest.at_s < REFRESH_S:
            return self._picture
        now = ClusterReading(now_s, status(), metrics())
        before = self._history.add(now)
        self._picture = self._drawn(before, now)
        return self._picture

    def _drawn(self, before: ClusterReading | None, now: ClusterReading) -> dict[str, Any]:
        status = now.status
        streams = flow(before, now) if before is not None else GatewayFlow()
        fenced = fenced_by(status)
        requests = {state: now.gauge(names.REQUESTS_NOW, state) for state in ("running", "waiting")}
        return {
            "version": status.version,
            "gateway": self._component_id,
            "rates_over_s": now.at_s - before.at_s if before is not None else None,
            "active_requests": status.active_requests,
            "index_available": status.index_available,
            "requests_here": requests,
            "flow": _flow(streams, sum(one.role == "gateway" for one in status.components)),
            "components": [
                _component(one, fenced, steps(before, now, one.component_id) if before is not None else None)
                for one in all_components(status)
            ],
        }


def _flow(streams: GatewayFlow, gateways: int) -> dict[str, Any]:
    fields = ("generated", "prompt", "cached", "sources", "requests", "refused")
    return {
        **{name: getattr(streams, name) for name in fields},
        "first_token": _quantiles(streams.first_token),
        "between_tokens": _quantiles(streams.between_tokens),
        "gateways": gateways,
    }


def _quantiles(found: Quantiles | None) -> dict[str, float | None] | None:
    """Returns quantiles for JSON, which has no infinity: a quantile beyond the last bound is None."""
    if found is None:
        return None
    p50, p99 = (None if math.isinf(value) else value for value in (found.p50, found.p99))
    return {"p50_s": p50, "p99_s": p99, "last_bound_s": found.last_bound}


def _component(one: ComponentStatus, fenced: Container[str], found: StepFigures | None) -> dict[str, Any]:
    """Returns a component as the picture shows it; ``steps`` and ``pool`` only where it has them."""
    shown: dict[str, Any] = {
        "component_id": one.component_id,
        "role": one.role,
        "model": one.model,
        "node_id": one.node_id,
        "state": state_of(one, fenced),
        "heartbeat_age_ms": one.heartbeat_age_ms,
        "running_requests": one.running_requests,
        "waiting_requests": one.waiting_requests,
        "steps": None,
        "pool": None,
    }
    if one.role in WORKERS:
        figures = None if found is None else asdict(found)
        shown |= {"queued_tokens": one.queued_tokens, "free_seqs": one.free_seqs, "kernels": one.kernels}
        shown |= {"adapters": len(one.adapters), "ranks": one.tensor_parallel_size, "steps": figures}
    if one.role == "kvnode":
        # Pinned blocks are committed ones; the picture shows them once, as pinned.
        pinned = min(one.pinned_blocks, one.committed_blocks)
        shown["pool"] = {
            "total": one.total_blocks,
            "cached": one.committed_blocks - pinned,
            "pinned": pinned,
            "leased": one.leased_blocks,
            "quarantined": one.quarantined_blocks,
            "free": one.free_blocks,
            "disk": one.disk_blocks,
        }
    return shown
