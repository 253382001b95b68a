"""The fleets that lab.benchmarks.autoscaling compares: their rules, their day, and that shrinking loses nothing."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.benchmarks import autoscaling
from lab.benchmarks.autoscaling import (
    BUSY_PER_POD,
    CHART_RULE,
    SEQUENCES_PER_POD,
    SYNC_S,
    TICK_S,
    ChartQueries,
    RuleScaler,
    ScaledFleet,
    ScalingRule,
    bent,
    fleet_config,
    load_of,
    run,
)
from lab.fleets.traffic import Request
from lab.fleets.world import FleetWorld
from pillion.loadgen.traces import TraceRequest

ARGS = argparse.Namespace(
    workload="conversation",
    rate=0.7,
    day_s=120.0,
    swing=0.5,
    bursts=[0.5],
    burst_s=20.0,
    burst_factor=2.0,
    gateways=2,
    policy="auto",
    slo="ttft=1.5+0.0004*n,itl_p99=0.06",
    most=8,
)


# Seconds of a step, token, sequence, KV token read and query-key pair of the demo model.
DEMO_COST_S = (10e-3, 0.4e-3, 0.3e-3, 0.3e-6, 1e-9)
# A rule that lets a fleet shrink by one worker in five minutes.
SLOW = ScalingRule(30.0, 60.0, 600.0, 300.0, 0.0)


def test_the_rule_is_the_charts() -> None:
    charts = pytest.importorskip("tests.support.charts", reason="Helm's library has no wheel for this machine")
    scaled = {"autoscaling": {"enabled": True}}
    rendered = charts.render({"pools": {"prefill": scaled, "decode": scaled}})
    prefill, decode = (charts.of_kind(rendered, "ScaledObject", name)["spec"] for name in ("prefill", "decode"))
    thresholds = {
        one["name"]: float(one["metadata"]["threshold"]) for one in (*prefill["triggers"], *decode["triggers"])
    }
    assert thresholds["busy"] == 100 * BUSY_PER_POD
    assert thresholds["sequences"] == SEQUENCES_PER_POD
    assert prefill["advanced"] == decode["advanced"]
    behavior = prefill["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    up, down = behavior["scaleUp"], behavior["scaleDown"]
    [doubling] = up["policies"]
    [share] = [policy["value"] / 100 for policy in down["policies"] if policy["type"] == "Percent"]
    assert doubling["value"] == 100
    assert (
        ScalingRule(
            up["stabilizationWindowSeconds"],
            doubling["periodSeconds"],
            down["stabilizationWindowSeconds"],
            down["policies"][0]["periodSeconds"],
            share,
        )
        == CHART_RULE
    )


def test_a_fresh_demo_wants_one_worker_of_each_kind() -> None:
    """Half a chat a second on a small model, whose steps cost what they did on two cores."""
    config = replace(fleet_config(ARGS, (1, 1)), prefill_cost_s=DEMO_COST_S, decode_cost_s=DEMO_COST_S)
    world = FleetWorld(config)
    fleet, queries = ScaledFleet(world, 10.0), ChartQueries()
    world.send([Request(number, 2.0 * number, 300, 120) for number in range(120)])
    wishes = []
    while world.open_requests() or world.clock.now < 240.0:
        world.clock.run(world.clock.now + TICK_S)
        wishes.append(queries(fleet))
    assert all(wish == {"prefill": 1, "decode": 1} for wish in wishes), wishes
    assert len(wishes) > 40


@given(wishes=st.lists(st.integers(0, 60), min_size=2, max_size=80))
def test_a_rule_bounds_every_change(wishes: list[int]) -> None:
    present, sizes = 4, []
    scaler = RuleScaler(SLOW, 1, 50)
    for number, wish in enumerate(wishes):
        present = scaler.take(number * SYNC_S, wish, present)
        sizes.append(present)
        assert 1 <= present <= 50
    for at, size in enumerate(sizes):
        lately = sizes[max(0, at - int(SLOW.up_period_s / SYNC_S)) : at] or [4]
        assert size <= 2 * min(lately)
        longer = sizes[max(0, at - int(SLOW.down_period_s / SYNC_S) + 1) : at + 1]
        assert max(longer) - size <= 1


def test_a_day_has_its_swing_and_bursts() -> None:
    trace = [TraceRequest(number * 100, 10, 5) for number in range(36_000)]
    moved = bent(trace, 0.5, [(0.25, 300.0)], 2.0)
    assert [row.input_length for row in moved] == [10] * len(trace)
    assert all(one.timestamp <= other.timestamp for one, other in itertools.pairwise(moved))

    def per_s(begin_s: float) -> float:
        return sum(begin_s <= row.timestamp / 1000 < begin_s + 200 for row in moved) / 200

    assert 1.4 * per_s(0) < per_s(600) < 0.7 * per_s(1700)
    # The sine itself rises by the factor 1.3 meanwhile.
    assert per_s(950) / per_s(650) == pytest.approx(2.0 * 1.3, rel=0.1)


@pytest.mark.parametrize("drain_s", [0.0, 600.0])
def test_a_fleet_that_shrinks_loses_nothing(monkeypatch: pytest.MonkeyPatch, drain_s: float) -> None:
    """Workers of both kinds come and go at every look; what a drain leaves no time for goes on elsewhere."""
    monkeypatch.setattr(autoscaling, "DRAIN_S", drain_s)
    looks = itertools.count()

    def restless(fleet: ScaledFleet) -> dict[str, int]:
        size = 3 if next(looks) % 2 else 1
        return {"prefill": size, "decode": size}

    requests = load_of(ARGS, 1)
    rule = ScalingRule(0.0, 15.0, 0.0, 15.0, 1.0)
    found = run(ARGS, requests, (3, 3), 5.0, restless, rule)
    assert found["failed"] == 0
    assert found["answered"] == len(requests) > 40
    assert len({tuple(size[1:]) for size in found["sizes"]}) > 1
    if not drain_s:
        assert found["replayed"] > 0
