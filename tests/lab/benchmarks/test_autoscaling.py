"""The fleets that lab.benchmarks.autoscaling compares: their rules, their day, and that shrinking loses nothing."""

from __future__ import annotations

import argparse
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.benchmarks import autoscaling
from lab.benchmarks.autoscaling import (
    BY_FORECAST,
    BY_QUEUE,
    SYNC_S,
    HeldScaler,
    ScaledFleet,
    ScalingRule,
    bent,
    load_of,
    run,
)
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
    attainment=0.95,
    most=8,
)


@pytest.mark.parametrize("forecast", [True, False])
def test_rules_are_those_of_the_chart(forecast: bool) -> None:
    charts = pytest.importorskip("tests.support.charts", reason="Helm's library has no wheel for this machine")
    alone = {"sequencesPerPod": None, "kvUsagePercent": None} if forecast else {}
    scaled = {"enabled": True, "forecast": forecast, **alone}
    rendered = charts.render({"pools": {"decode": {"autoscaling": scaled}}})
    spec = charts.of_kind(rendered, "ScaledObject", "decode")["spec"]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    up, down = behavior["scaleUp"], behavior["scaleDown"]
    [doubling] = up["policies"]
    shares = [policy["value"] / 100 for policy in down["policies"] if policy["type"] == "Percent"]
    assert doubling["value"] == 100
    assert (BY_FORECAST if forecast else BY_QUEUE) == ScalingRule(
        up["stabilizationWindowSeconds"],
        doubling["periodSeconds"],
        down["stabilizationWindowSeconds"],
        down["policies"][0]["periodSeconds"],
        shares[0] if shares else 0.0,
    )


@given(wishes=st.lists(st.integers(0, 60), min_size=2, max_size=80))
def test_a_rule_bounds_every_change(wishes: list[int]) -> None:
    present, sizes = 4, []
    scaler = HeldScaler(BY_QUEUE, 1, 50)
    for number, wish in enumerate(wishes):
        present = scaler.take(number * SYNC_S, wish, present)
        sizes.append(present)
        assert 1 <= present <= 50
    for at, size in enumerate(sizes):
        lately = sizes[max(0, at - int(BY_QUEUE.up_period_s / SYNC_S)) : at] or [4]
        assert size <= 2 * min(lately)
        longer = sizes[max(0, at - int(BY_QUEUE.down_period_s / SYNC_S) + 1) : at + 1]
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
