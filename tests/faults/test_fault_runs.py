"""A few faults as `make faults` draws them, on one cluster: what dies or sleeps costs a pause, and nothing else."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator

import pytest

from lab.testbed.cluster import READY_TIMEOUT_S
from lab.testbed.faults.points import BY_NAME, POINTS
from tests.faults.fault_runs import (
    REQUESTS_WITHIN_S,
    START_WITHIN_S,
    ChainedKill,
    DrawnFault,
    FaultPlan,
    FaultRunner,
    draw,
)
from tests.faults.places import ROLES, WHOLE_WITHIN_S, fault_place

# So much of the cluster's log is shown where a run is not right.
LOG_CHARS = 60_000
# Each fault comes at the first passing of a point that a new prompt is sure to come to, where every prompt goes to a
# prefill worker first. Adoptions and acknowledgements come first, while the gateway is sure to know a prefill worker:
# after a kill it may plan without one until the next has said that it lives.
ASKED = ("long prompt", "adapter", "n", "logprobs", "chat", "regex")
FAULTS = (
    DrawnFault(BY_NAME["decode, before an adoption"], 1, signal.SIGSTOP, "", 0.3),
    DrawnFault(BY_NAME["prefill, after an acknowledgement"], 1, signal.SIGKILL, "", 0.0),
    DrawnFault(BY_NAME["kvnode, after a commit"], 1, signal.SIGKILL, "", 0.0),
    DrawnFault(BY_NAME["decode, after a commit"], 1, signal.SIGKILL, "", 0.0),
)


@pytest.fixture(scope="module")
def runner() -> Iterator[FaultRunner]:
    with fault_place("small", "--split-policy", "disaggregated") as place:
        yield FaultRunner(place)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.point.name)
def test_a_fault_costs_a_pause(runner: FaultRunner, fault: DrawnFault) -> None:
    _right(runner, FaultPlan(0, (fault,), ASKED, (True,) * len(ASKED)))


@pytest.mark.long
@pytest.mark.cluster
def test_requests_wait_for_the_workers_after_a_node_restart(runner: FaultRunner) -> None:
    """The node is killed again and again amid a step that takes long, and gives no ticket before that has ended."""
    step = DrawnFault(BY_NAME["decode, before a launch"], 20, None, "", 6.0)
    kills = tuple(ChainedKill("kvnode", after_s) for after_s in (0.3, 2.0))
    _right(runner, FaultPlan(0, (step,), ("greedy", "long prompt", "n", "logprobs", "chat"), (True,) * 5, kills))


def _right(runner: FaultRunner, plan: FaultPlan) -> None:
    record = runner.run(plan)
    if record.wrong:
        # The cluster's log says what its components were doing, which no later run may show again.
        print(runner.place.log()[-LOG_CHARS:])
    assert record.outcome == "right"


def test_seeds_draw_chained_faults() -> None:
    """Long steps, workers and Redis that stand still, and kills in succession: each is drawn again and again."""
    plans = [draw(seed, "wide") for seed in range(200)]
    chains = [plan for plan in plans if plan.chain]
    assert len(chains) > 50
    assert {len(plan.chain) for plan in chains} == {1, 2, 3}
    assert {plan.faults[0].number for plan in chains} == {None, signal.SIGSTOP}
    assert {"kvnode", "decode", "prefill", "gateway", "redis-server"} <= {
        role for plan in chains for role in plan.struck
    }


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("role", ROLES)
def test_every_role_has_a_process_that_a_fault_can_reach(runner: FaultRunner, role: str) -> None:
    assert len(runner.place.pids(role)) >= 1


def test_timeouts_of_a_run_are_below_pytests(request: pytest.FixtureRequest) -> None:
    run_s = REQUESTS_WITHIN_S + START_WITHIN_S + WHOLE_WITHIN_S
    assert READY_TIMEOUT_S + run_s < float(request.config.getini("timeout"))


def test_every_fault_point_names_an_existing_function() -> None:
    for point in POINTS:
        module, _, name = point.seam.partition(":")
        found = importlib.import_module(module)
        for word in name.split("."):
            found = getattr(found, word)
        assert callable(found), point.seam
