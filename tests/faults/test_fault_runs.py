"""A few seeds of `make faults` on one cluster: whatever dies or sleeps costs a pause, and nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from testbed.faults.points import POINTS
from tests.faults.fault_runs import FaultRunner, draw
from tests.faults.places import fault_place

# One seed for each: a decode worker, a prefill worker and a KV node that are killed, and one that only slept.
SEEDS = (5, 12, 15, 16)
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
        record = runner.run(draw(seed, one_fault=True))
        assert record.wrong == []
        if all(record.fired):
            return
    pytest.fail(f"no process came to its point in {MAX_RUNS} runs")


def test_every_point_is_a_seam_of_the_product() -> None:
    for point in POINTS:
        module, _, name = point.seam.partition(":")
        found = importlib.import_module(module)
        for word in name.split("."):
            found = getattr(found, word)
        assert callable(found), point.seam
