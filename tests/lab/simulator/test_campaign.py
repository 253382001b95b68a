"""Schedules of the simulator: none has findings, each is reproducible, and mutants are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from lab.simulator.campaign import run_schedule, seeds_to_find
from lab.simulator.hash_model import reference
from lab.simulator.mutations import MUTATIONS
from lab.simulator.requests import RequestRun
from lab.simulator.schedule import ClusterShape, FaultKind, SimFault, SimRequest, SimSchedule, draw
from lab.simulator.shrink import shrink
from lab.testbed.conditions import WITHIN_S

# First seed and number of seeds.
FEW, MANY = (1, 10), (11, 50)


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a fixed hash seed."""
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "lab.simulator", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=10 * WITHIN_S, check=False)


@pytest.mark.parametrize(("first", "count"), [FEW, pytest.param(*MANY, marks=pytest.mark.long)])
def test_schedules_have_no_findings(first: int, count: int) -> None:
    done = simulate("--first", str(first), "--count", str(count))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} schedules" in done.stdout
    assert "0 seeds found something" in done.stdout


@pytest.mark.long
def test_two_processes_find_the_same_as_one() -> None:
    outputs = [simulate("--count", "8", "--processes", number).stdout for number in "12"]
    # Except durations.
    one, two = [re.sub(r"in .* a minute", "", output) for output in outputs]
    assert one == two
    assert "8 schedules" in one


@pytest.mark.long
def test_a_seed_replays_to_the_event() -> None:
    """In two processes, whose objects have different addresses."""
    first, second = simulate("--seed", "27"), simulate("--seed", "27")
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout
    assert "fault:" in first.stdout


def test_requests_complete_without_faults() -> None:
    shape = ClusterShape(decodes=1, prefills=1, policy="disaggregated")
    prompt = tuple(range(40))
    requests = tuple(
        SimRequest(number, 0.1 * number, prompt, 6, seed=number, greedy=number != 1, stop_ids=(), answers=answers)
        for number, answers in ((0, 1), (1, 2), (2, 1))
    )
    result = run_schedule(SimSchedule(1, shape, requests, ()))
    assert result.findings == []
    assert result.endings == ["whole"] * 3
    assert len(result.states) > 3


def test_a_killed_decode_worker_costs_no_token() -> None:
    shape = ClusterShape(decodes=2, prefills=0, policy="colocated", step_s=0.05)
    request = SimRequest(0, 0.0, tuple(range(20)), 30, seed=5, greedy=False, stop_ids=())
    kills = tuple(SimFault(0.7, FaultKind.KILL, name) for name in ("decode-0", "decode-1"))
    result = run_schedule(SimSchedule(2, shape, (request,), kills), told=True)
    assert result.findings == []
    assert result.endings == ["whole"]
    assert any("replays=1" in line for line in result.history)


# Start of the search, shortly before a schedule that finds the mutant: not every fault shows every mutant.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("a fence frees what the worker may still write to", 20),
        ("an adopted ticket is not held", 20),
        ("a replay begins with the prompt alone", 0),
        ("a cancelled sequence stays", 0),
        ("a replay scores its prompt anew", 30),
        ("what comes back is offered a request, and not waited for", 200),
    ],
)
def test_a_mutant_is_found(name: str, first: int) -> None:
    """The others: ``python -m lab.simulator --mutate``."""
    count, finding = seeds_to_find(MUTATIONS[name], 60, first)
    assert count, name
    assert finding


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutant_replaces_what_exists(name: str) -> None:
    with MUTATIONS[name]():
        pass


@pytest.mark.long
def test_a_failing_schedule_is_minimized() -> None:
    schedule = draw(11)
    schedule = replace(schedule, faults=tuple(SimFault(n / 10, FaultKind.KILL, f"decode-{n}") for n in range(4)))

    def fails(one: SimSchedule) -> bool:
        return any(fault.process == "decode-2" for fault in one.faults)

    smallest = shrink(schedule, fails)
    assert [fault.process for fault in smallest.faults] == ["decode-2"]
    assert len(smallest.requests) == 1


def test_the_reference_stops_at_a_stop_id() -> None:
    whole = reference((1, 2, 3), 20, 0, True, frozenset(), False)
    assert len(whole) == 20
    assert reference((1, 2, 3), 20, 0, True, frozenset({whole[4]}), False) == whole[: whole.index(whole[4]) + 1]


@pytest.mark.parametrize("lives", [True, False], ids=["lives", "dead"])
def test_a_standby_takes_over(lives: bool) -> None:
    shape = ClusterShape(decodes=1, prefills=0, policy="colocated", step_s=0.05, standbys=True)
    request = SimRequest(0, 0.0, tuple(range(20)), 30, seed=5, greedy=True, stop_ids=())
    faults = [SimFault(0.7, FaultKind.KILL_STANDBY, "decode-0")] * (not lives)
    faults.append(SimFault(0.9, FaultKind.KILL, "decode-0"))
    result = run_schedule(SimSchedule(5, shape, (request,), tuple(faults)), told=True)
    assert result.findings == []
    assert result.endings == ["whole"]
    assert any("the standby of decode-0 takes over" in line for line in result.history) == lives


def test_a_thread_that_is_not_simulated_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its effects would differ each time."""
    over, whole = threading.Event(), RequestRun._whole

    def starts_a_thread(run: RequestRun) -> None:
        threading.Thread(target=over.wait, name="stray", daemon=True).start()
        whole(run)

    monkeypatch.setattr(RequestRun, "_whole", starts_a_thread)
    request = SimRequest(0, 0.0, tuple(range(8)), 2, seed=5, greedy=True, stop_ids=())
    result = run_schedule(SimSchedule(6, ClusterShape(), (request,), ()))
    over.set()
    assert result.findings == ["a thread runs that is not simulated: stray"]


def test_workers_end_with_their_node() -> None:
    """As under the production supervisor: their deaths do not count, and each request continues."""
    shape = ClusterShape(decodes=1, prefills=1, policy="colocated", step_s=0.05)
    request = SimRequest(0, 0.0, tuple(range(20)), 30, seed=5, greedy=True, stop_ids=())
    result = run_schedule(SimSchedule(3, shape, (request,), (SimFault(0.5, FaultKind.KILL, "kvnode-0"),)), told=True)
    assert result.findings == []
    assert result.endings == ["whole"]
    ended = [line for line in result.history if "restarting it after kvnode-0" in line]
    assert {name for name in ("decode-0", "prefill-0") if any(name in line for line in ended)} == {
        "decode-0",
        "prefill-0",
    }


@pytest.mark.parametrize("kills", [1, 3])
def test_requests_wait_for_the_workers_after_a_node_restart(kills: int) -> None:
    """The node is back at once, but its pool has no shape before a worker, whose step takes long, has attached."""
    shape = ClusterShape(decodes=1, prefills=0, policy="colocated", step_s=0.05, kept=True)
    requests = tuple(
        SimRequest(number, at_s, tuple(range(number, number + 20)), 30, seed=5, greedy=True, stop_ids=())
        for number, at_s in enumerate((0.0, 0.1, 1.0))
    )
    faults = [SimFault(0.5, FaultKind.STALL, "decode-0", for_s=6.0)]
    faults += [SimFault(0.6 + 2.5 * number, FaultKind.KILL, "kvnode-0") for number in range(kills)]
    result = run_schedule(SimSchedule(3, shape, requests, tuple(faults)), told=True)
    assert result.findings == []
    assert result.endings == ["whole"] * 3
    assert any("decode-0 serves again under a new epoch" in line for line in result.history)


@pytest.mark.parametrize("kind", [FaultKind.DISK_STALL, FaultKind.DISK_FULL, FaultKind.DISK_FLIP])
def test_a_faulty_disk_loses_no_request(kind: FaultKind) -> None:
    """Prompts fill a small pool and repeat, so that blocks are spilled and fetched back."""
    shape = ClusterShape(decodes=1, prefills=0, policy="colocated", slots=36, disk_blocks=60, step_s=0.005)
    requests = tuple(
        SimRequest(number, 0.15 * number, tuple(range(n, n + 40)), 4, seed=1, greedy=True, stop_ids=())
        for number, n in enumerate((0, 50, 100, 150) * 3)
    )
    faults = tuple(SimFault(0.04 * number, kind, "kvnode-0", for_s=0.03) for number in range(1, 45))
    result = run_schedule(SimSchedule(6, shape, requests, faults), told=True)
    assert result.findings == []
    assert result.endings == ["whole"] * len(requests)
    signs = {
        FaultKind.DISK_STALL: "disk stalls",
        FaultKind.DISK_FULL: "the disk is full",
        FaultKind.DISK_FLIP: "is lost and will be computed again",
    }
    assert any(signs[kind] in line for line in result.history)
