"""Live picture of the cluster, from heartbeats and the gateway's own metrics. Sans-IO (I9).

    every poll:  status, own metrics --> ClusterReading --> figures over some seconds --> JSON

Components report their steps and pools with their heartbeats, so their metrics pages are not read. A figure that was
not reported is None, not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from pillion.gateway.ui.cluster_figures import ClusterReading, all_components, fenced_by, flow, state_of, steps
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Values
from pillion.types import WORKERS, ClusterStatus, ComponentStatus

# Time over which rates are computed.
WINDOW_S = 5.0
# Max age of the reading that rates start from: after a pause of all viewers, a mean over minutes would look like one
# over seconds.
OLDEST_S = 2 * WINDOW_S
# Time for which a picture is reused, so that further viewers cost the gateway nothing.
REFRESH_S = 0.5


class ClusterPicture:
    """Live picture, shared by all viewers of one gateway process. Not thread-safe.

    Args:
        component_id: the gateway's own id.
    """

    def __init__(self, component_id: str) -> None:
        self._component_id = component_id
        self._readings: list[ClusterReading] = []
        self._picture: dict[str, Any] = {}

    def at(self, now_s: float, status: Callable[[], ClusterStatus], metrics: Callable[[], Values]) -> dict[str, Any]:
        """Return the picture at ``now_s`` (monotonic seconds), or the last one if it is younger than REFRESH_S.

        ``status`` and ``metrics`` are called for a new reading only.
        """
        if self._readings and now_s - self._readings[-1].at_s < REFRESH_S:
            return self._picture
        now = ClusterReading(now_s, status(), metrics())
        before = [old for old in self._readings if now_s - old.at_s <= WINDOW_S]
        before = before or [old for old in self._readings[-1:] if now_s - old.at_s <= OLDEST_S]
        self._readings = [*before, now]
        self._picture = self._draw(before[0] if before else None, now)
        return self._picture

    def _draw(self, before: ClusterReading | None, now: ClusterReading) -> dict[str, Any]:
        status, fenced = now.status, fenced_by(now.status)
        return {
            "version": status.version,
            "gateway": self._component_id,
            "rates_over_s": now.at_s - before.at_s if before is not None else None,
            "active_requests": status.active_requests,
            "index_available": status.index_available,
            "requests_here": {state: now.gauge(names.REQUESTS_NOW, state) for state in ("running", "waiting")},
            "flow": {**flow(before, now), "gateways": sum(one.role == "gateway" for one in status.components)},
            "components": [
                _component(one, fenced, steps(before, now, one.component_id)) for one in all_components(status)
            ],
        }


def _component(one: ComponentStatus, fenced: Container[str], figures: dict[str, Any] | None) -> dict[str, Any]:
    """Return a component for the page; only workers have "steps" (``figures``), only KV nodes "pool"."""
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
        shown |= {"queued_tokens": one.queued_tokens, "free_seqs": one.free_seqs, "kernels": one.kernels}
        shown |= {"adapters": len(one.adapters), "ranks": one.tensor_parallel_size, "steps": figures}
    if one.role == "kvnode":
        # Pinned blocks are committed ones; show them once.
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
