"""Simulated workers that share the cores of a host: what lending gives them, and where `auto` has prompts computed."""

from __future__ import annotations

import pytest

from lab.benchmarks.closed_loop import ClosedLoad
from lab.fleets.clock import Clock
from lab.fleets.fleet_request import FleetRequest
from lab.fleets.host_cores import NEXT_CORE_SPEED, SharedCores
from lab.fleets.traffic import Request
from lab.fleets.world import FleetConfig, lab_fleet, simulate_closed
from pillion.config import AUTO
from pillion.gateway.request import events as ev
from pillion.host.core_lending_table import LINGER_NS
from pillion.loadgen.figures import percentile

# Seconds that the demo model takes on one core for a step, a token, a sequence, a KV token read, a query-key pair.
COST = (9.4e-3, 1.06e-3, 4.1e-4, 7.5e-7, 2.9e-7)


def test_a_step_runs_on_what_others_leave() -> None:
    """Two workers of a core each: alone one is faster, but not in the moment for which the other keeps its core."""
    clock, ends, speed, kept_s = Clock(), [], 1 + NEXT_CORE_SPEED, LINGER_NS / 1e9
    cores = SharedCores(clock, 2, 1)

    def step(number: int, seconds: float) -> None:
        begun_s = clock.now
        cores.run(number, seconds, lambda borrowed_s: ends.append((number, clock.now - begun_s, borrowed_s)))

    step(0, 0.1)
    step(1, 0.05)
    clock.run(1.0)
    longer_s = (0.05 - kept_s) / speed
    assert ends[0] == (1, pytest.approx(0.05), 0.0)
    assert ends[1] == (0, pytest.approx(0.05 + kept_s + longer_s), pytest.approx(longer_s))
    step(0, 0.1)
    clock.run(2.0)
    assert ends[2] == (0, pytest.approx(0.1 / speed), pytest.approx(0.1 / speed))


@pytest.mark.parametrize(
    "load", [ClosedLoad(1024, 64, 8, 20), ClosedLoad(256, 128, 16, 32)], ids=lambda load: load.name
)
def test_auto_serves_as_much_as_the_better_pure_policy(load: ClosedLoad) -> None:
    """Prompts that a prefill worker computes take the decode worker's cores, which then reads all weights for few."""

    def figures(fleet: FleetConfig) -> tuple[float, float]:
        requests = [Request(number, 0.0, load.input_tokens, load.output_tokens) for number in range(load.requests)]
        records, seconds = simulate_closed(fleet, requests, load.concurrency)
        assert all(len(record.gaps_s) == load.output_tokens - 1 for record in records)
        gaps = [gap for record in records for gap in record.gaps_s]
        return load.requests * load.output_tokens / seconds, percentile(gaps, 99)

    all_cores = tuple(cost / (1 + NEXT_CORE_SPEED) for cost in COST)
    rate, gap_s = figures(lab_fleet(0, 1, (), all_cores, AUTO, shared_cores=2, split_policy="colocated"))
    found, found_gap_s = figures(lab_fleet(1, 1, COST, COST, AUTO, shared_cores=1))
    assert found > 0.95 * rate
    assert found_gap_s < 1.25 * gap_s
    assert found > 0.9 * figures(lab_fleet(1, 1, COST, COST, AUTO, shared_cores=1, split_policy="disaggregated"))[0]


def test_a_lost_request_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = FleetRequest._submit

    def lose_one(flow: FleetRequest, action: ev.SubmitDecode) -> None:
        if flow.request.number != 2:
            submit(flow, action)

    monkeypatch.setattr(FleetRequest, "_submit", lose_one)
    requests = [Request(number, 0.0, 64, 4) for number in range(4)]
    with pytest.raises(RuntimeError, match="3 of 4 requests ended"):
        simulate_closed(lab_fleet(0, 1, (), COST, AUTO, shared_cores=2, split_policy="colocated"), requests, 2)
