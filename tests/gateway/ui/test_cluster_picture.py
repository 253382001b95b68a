"""The live picture: heartbeats and the gateway's own metrics, against figures computed here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pillion.gateway.ui.cluster_figures import ClusterReading, steps
from pillion.gateway.ui.cluster_picture import OLDEST_S, REFRESH_S, WINDOW_S, ClusterPicture
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Meters
from pillion.types import ClusterStatus, ComponentStatus

GATEWAY = ComponentStatus(component_id="gateway-0", role="gateway", running_requests=2)
DECODE = ComponentStatus(component_id="decode-0", role="decode", queued_tokens=7)
NODE = ComponentStatus(
    component_id="kv-0",
    role="kvnode",
    total_blocks=10,
    free_blocks=4,
    committed_blocks=6,
    pinned_blocks=2,
    fenced_components=("decode-9",),
)


def status(*components: ComponentStatus) -> ClusterStatus:
    return ClusterStatus(
        version="1",
        components=components,
        active_requests=2,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        index_available=True,
    )


def worked(times: int) -> ComponentStatus:
    """Return the decode worker's record after ``times`` repetitions of the same steps."""
    return replace(
        DECODE,
        steps=10 * times,
        steps_ms=400.0 * times,
        step_decode_tokens=30 * times,
        step_tail_tokens=10 * times,
        step_speculative_tokens=10 * times,
        step_forced_tokens=10 * times,
        step_idle_tokens=40 * times,
    )


def test_rates_come_from_heartbeats_and_own_cells() -> None:
    meters, picture = Meters(), ClusterPicture("gateway-0")
    meters.watch(lambda: [(names.REQUESTS_NOW, ("running",), 2), (names.REQUESTS_NOW, ("waiting",), 3)])
    first = picture.at(100.0, lambda: status(GATEWAY, worked(1), NODE), meters.collect)
    assert first["rates_over_s"] is None
    assert first["flow"]["generated"] is None
    meters.counter(names.GENERATED_TOKENS, "demo").add(100)
    meters.counter(names.PROMPT_TOKENS, "demo", "pool").add(60)
    meters.counter(names.PROMPT_TOKENS, "demo", "tail").add(20)
    meters.distribution(names.TTFT, "chat", "demo").observe(1000.0)
    then = picture.at(102.0, lambda: status(GATEWAY, worked(3), NODE), meters.collect)
    assert (then["rates_over_s"], then["requests_here"]) == (2.0, {"running": 2, "waiting": 3})
    flow = then["flow"]
    assert (flow["generated"], flow["prompt"], flow["cached"], flow["gateways"]) == (50.0, 40.0, 30.0, 1)
    assert flow["first_token"] == {"p50_s": None, "p99_s": None, "last_bound_s": names.TTFT_BOUNDS[-1]}
    found = {one["component_id"]: one for one in then["components"]}
    made = found["decode-0"]["steps"]
    assert (made["per_second"], made["mean_s"], made["busy"]) == (10.0, pytest.approx(0.04), pytest.approx(0.4))
    # Grammar-forced tokens count as draft tokens; all shares sum to the budget.
    assert made["shares"] == {"decode": 0.3, "tail": 0.1, "prefill": 0.0, "speculative": 0.2, "idle": 0.4}
    assert found["kv-0"]["pool"] | {"disk": 0} == found["kv-0"]["pool"]
    assert sum(found["kv-0"]["pool"][kind] for kind in ("cached", "pinned", "leased", "quarantined", "free")) == 10
    assert (found["decode-9"]["role"], found["decode-9"]["state"]) == ("", "fenced")
    assert json.loads(json.dumps(then, allow_nan=False)) == then


def test_viewers_share_a_snapshot() -> None:
    taken, picture = [], ClusterPicture("gateway-0")

    def read() -> ClusterStatus:
        taken.append(1)
        return status(GATEWAY)

    first = picture.at(5.0, read, dict)
    assert picture.at(5.0 + REFRESH_S / 2, read, dict) is first
    assert picture.at(5.0 + REFRESH_S, read, dict) is not first
    assert len(taken) == 2


def test_rates_do_not_span_a_component_restart() -> None:
    picture = ClusterPicture("gateway-0")
    picture.at(0.0, lambda: status(GATEWAY, worked(5)), dict)
    # Restarted in between: its counters are smaller.
    again = picture.at(1.0, lambda: status(GATEWAY, replace(worked(2), heartbeat_age_ms=3000)), dict)
    found = again["components"][1]
    assert (found["steps"], found["state"]) == (None, "late")
    # The next rates are those of one process, though the window begins earlier.
    late = picture.at(1.0 + WINDOW_S, lambda: status(GATEWAY, worked(3)), dict)["components"][1]["steps"]
    assert late["per_second"] == pytest.approx(10 / WINDOW_S)


def test_the_first_snapshot_after_an_idle_period_has_no_rates() -> None:
    """A mean over minutes is not shown as one over seconds."""
    picture, last_s = ClusterPicture("gateway-0"), OLDEST_S + 1.0
    for at_s, over_s in ((0.0, None), (OLDEST_S, OLDEST_S), (OLDEST_S + last_s, None), (OLDEST_S + last_s + 1.0, 1.0)):
        found = picture.at(at_s, lambda at_s=at_s: status(GATEWAY, worked(1 + int(at_s))), dict)
        assert found["rates_over_s"] == over_s
        assert (found["components"][1]["steps"] is None) == (over_s is None)


def test_a_worker_without_steps_has_no_figures() -> None:
    """As one of a version without these fields, whose zeros would be wrong."""
    assert steps(ClusterReading(0.0, status(DECODE), {}), ClusterReading(1.0, status(DECODE), {}), "decode-0") is None
