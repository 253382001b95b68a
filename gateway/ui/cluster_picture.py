"""Makes the live picture: figures of heartbeats and of the gateway's own metrics.

    every poll:  status, own metrics --> ClusterReading --> figures over some seconds --> JSON

Sans-IO (I9). Components' steps and pools come with their heartbeats, so no metrics page of theirs is needed. A figure
that nobody reports is None, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from pillion.gateway.ui.cluster_figures import ClusterReading, all_components, fenced_by, flow, state_of, steps
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
        # These are the readings within WINDOW_S before the newest, the oldest first, or else the one before it.
        self._readings: list[ClusterReading] = []
        self._picture: dict[str, Any] = {}

    def at(self, now_s: float, status: Callable[[], ClusterStatus], metrics: Callable[[], Values]) -> dict[str, Any]:
        """Returns the picture at ``now_s`` (monotonic seconds), or the last one where that is hardly older. ``status``
        and ``metrics`` are called where a new reading is taken."""
        if self._readings and now_s - self._readings[-1].at_s < REFRESH_S:
            return self._picture
        now = ClusterReading(now_s, status(), metrics())
        before = [old for old in self._readings if now_s - old.at_s <= WINDOW_S]
        # Where nothing was read within the window, a reading that is a little older is still good for rates.
        before = before or [old for old in self._readings[-1:] if now_s - old.at_s <= OLDEST_S]
        self._readings = [*before, now]
        self._picture = self._drawn(before[0] if before else None, now)
        return self._picture

    def _drawn(self, before: ClusterReading | None, now: ClusterReading) -> dict[str, Any]:
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


def _component(one: ComponentStatus, fenced: Container[str], found: dict[str, Any] | None) -> dict[str, Any]:
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
        shown |= {"queued_tokens": one.queued_tokens, "free_seqs": one.free_seqs, "kernels": one.kernels}
        shown |= {"adapters": len(one.adapters), "ranks": one.tensor_parallel_size, "steps": found}
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
