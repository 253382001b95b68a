"""A few seeds of `make faults` on one cluster: whatever dies or sleeps costs a pause, and nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from testbed.cluster import READY_TIMEOUT_S
from testbed.faults.points import POINTS
from tests.faults.fault_runs import REQUESTS_WITHIN_S, START_WITHIN_S, FaultRunner, draw
from tests.faults.places import ROLES, WHOLE_WITHIN_S, fault_place

# A prefill worker and a KV node that are killed, a decode worker that only slept, and one that is killed.
SEEDS = (7, 12, 15, 51)
# How often a seed is run at most: when a process comes to a point is the machine's to say.
MAX_RUNS = 3


@pytest.fixture(scope="module")
def runner() -> Iterator[FaultRunner]:
    with fault_place("small") as place:
        yield FaultRunner(place)


@pytest.mark.cluster
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_costs_a_pause(runner: FaultRunner, seed: int) -> None:
    for _ in range(MAX_RUNS):
        record = runner.run(draw(seed, "small", one_fault=True))
        assert record.wrong == []
        if all(record.fired):
            return
    pytest.fail(f"no process came to its point in {MAX_RUNS} runs")


@pytest.mark.cluster
@pytest.mark.parametrize("role", ROLES)
def test_every_role_has_a_process_that_a_fault_can_reach(runner: FaultRunner, role: str) -> None:
    assert len(runner.place.pids(role)) >= 1


def test_what_a_run_waits_for_ends_before_pytest_does(request: pytest.FixtureRequest) -> None:
    run_s = REQUESTS_WITHIN_S + START_WITHIN_S + WHOLE_WITHIN_S
    assert READY_TIMEOUT_S + run_s < float(request.config.getini("timeout"))


def test_every_point_is_a_seam_of_the_product() -> None:
    for point in POINTS:
        module, _, name = point.seam.partition(":")
        found = importlib.import_module(module)
        for word in name.split("."):
            found = getattr(found, word)
        assert callable(found), point.seam
