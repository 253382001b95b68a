"""One run: a seed draws faults and requests, the requests run while the faults happen, the checker looks at all of it.

    drawn --armed--> requests under way --faults--> all ended --> whole again --> idle, integrity proved --> a row

The seed decides which faults are armed and what is asked. When exactly a process comes to its n-th passing is the
machine's to say, so a seed that failed is run several times to meet the same defect again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from testbed.faults.points import AT_START, MOST_PASSINGS, POINTS, SELDOM, FaultPoint
from tests.faults.histories import RequestHistory, complaints, read_history
from tests.faults.places import LOOK_EVERY_S, FaultPlace, roles_in
from tests.faults.questions import QUESTIONS

STREAMS = 6
# The salt of the undisturbed answers.
UNDISTURBED = "undisturbed"
# Longest time of a run's requests. Whatever dies is back long before.
REQUESTS_WITHIN_S = 140.0
PATIENCE_S = 110.0
# Longest wait for a component to start in which another fault is to happen.
START_WITHIN_S = 40.0
SECOND_FAULT_SHARE = 0.3
STOP_SHARE = 0.25
# How long a stopped process stays stopped: shorter and longer than the time after which it is fenced.
STOPS_S = (0.3, 3.0, 11.0)
SALTED_SHARE = 0.75
OTHER_VICTIM_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class DrawnFault:
    """A fault: at the ``passing``-th passing of a point the signal goes to the process that passes it, or to a process
    of ``victim``."""

    point: FaultPoint
    passing: int
    number: signal.Signals
    victim: str
    stop_s: float

    @property
    def words(self) -> str:
        """The fault for ledgers and people."""
        whom = f" to {self.victim}" if self.victim else ""
        stop = f" for {self.stop_s:g} s" if self.number is signal.SIGSTOP else ""
        return f"{self.number.name}{whom}{stop} at passing {self.passing} of {self.point.name}"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What a seed draws: faults, questions by name, and for each whether its prompt is new to the cluster (a salt of
    the run's own) or was computed before."""

    seed: int
    faults: tuple[DrawnFault, ...]
    questions: tuple[str, ...]
    salted: tuple[bool, ...]

    def undisturbed(self) -> FaultPlan:
        """The same without a fault."""
        return replace(self, faults=())


@dataclass(slots=True)
class FaultRecord:
    """What came of a run. ``fired`` says which faults happened."""

    plan: FaultPlan
    fired: list[bool] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    pause_s: float = 0.0
    replays: int = 0
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        """One or two words, or what is wrong."""
        if self.wrong:
            return "; ".join(self.wrong)
        return "right" if all(self.fired) else "right, but not every point was reached"


def draw(seed: int, shape: str, *, one_fault: bool = False) -> FaultPlan:
    """What a seed stands for in a cluster of a shape."""
    chance = random.Random(seed)
    points = [point for point in POINTS if point.passed_in(shape)]
    victims = roles_in(shape)
    faults = [_fault(chance, [point for point in points if point.passed != AT_START], victims)]
    if not one_fault and chance.random() < SECOND_FAULT_SHARE:
        faults.append(_fault(chance, [point for point in points if _may_follow(point, faults[0])], victims))
    asked = [(chance.choice(tuple(QUESTIONS)), chance.random() < SALTED_SHARE) for _ in range(STREAMS)]
    # What is certain to pass some points: a long prompt that is new, and a stop string.
    if any(fault.point.role == "prefill" or fault.point.passed == SELDOM for fault in faults):
        asked[0] = "long prompt", True
    if any(fault.point.what == "a cancel" for fault in faults):
        asked[1] = "stop strings", True
    questions, salted = zip(*asked, strict=True)
    return FaultPlan(seed, tuple(faults), questions, salted)


def _may_follow(point: FaultPoint, first: DrawnFault) -> bool:
    """A component starts only where it has died, or where the node died that it is attached to."""
    if point.passed != AT_START:
        return True
    dead = first.victim or first.point.role
    return first.number is signal.SIGKILL and (dead == point.role or dead == "kvnode")


def _fault(chance: random.Random, points: list[FaultPoint], victims: Sequence[str]) -> DrawnFault:
    point = chance.choice(points)
    stops = chance.random() < STOP_SHARE
    victim = chance.choice(victims) if chance.random() < OTHER_VICTIM_SHARE else ""
    return DrawnFault(
        point,
        chance.randint(1, MOST_PASSINGS[point.passed]),
        signal.SIGSTOP if stops else signal.SIGKILL,
        victim,
        chance.choice(STOPS_S) if stops else 0.0,
    )


class FaultRunner:
    """Runs plans on one cluster. ``expected`` are the answers of the undisturbed cluster, by question."""

    def __init__(self, place: FaultPlace) -> None:
        self.place = place
        self.expected: dict[str, RequestHistory] = {}
        for name in QUESTIONS:
            with place.client() as client:
                self.expected[name] = read_history(client, QUESTIONS[name], UNDISTURBED)
            assert not self.expected[name].error, f"{name}: {self.expected[name].error}"

    def run(self, plan: FaultPlan) -> FaultRecord:
        """Runs one plan, and leaves the cluster whole."""
        place, record, began_s = self.place, FaultRecord(plan), time.monotonic()
        stopped = threading.Event()
        waking = [threading.Thread(target=self._wake, args=(*armed, stopped)) for armed in self._arm(plan)]
        for thread in waking:
            thread.start()
        try:
            salts = [f"{plan.seed} {began_s}" if salted else UNDISTURBED for salted in plan.salted]
            for question, history in zip(plan.questions, self._ask(plan.questions, salts), strict=True):
                record.wrong += [f"{question}: {what}" for what in complaints(self.expected[question], history)]
                record.pause_s = max(record.pause_s, history.pause_s)
                record.replays = max(record.replays, history.replays)
            self._await_starts(plan)
        finally:
            place.board.disarm()
            record.fired = [place.board.fired(slot) is not None for slot in range(len(plan.faults))]
            stopped.set()
            for thread in waking:
                thread.join()
        record.wrong += place.complaints()
        record.seconds = time.monotonic() - began_s
        return record

    def _arm(self, plan: FaultPlan) -> list[tuple[int, DrawnFault, int]]:
        """Returns slot, fault and victim's process id of each that is armed; 0: the process that passes the point."""
        armed = []
        self.place.board.clear()
        for slot, fault in enumerate(plan.faults):
            pids = self.place.pids(fault.victim) if fault.victim else [0]
            if pids:
                self.place.board.arm(slot, fault.point, fault.passing, fault.number, pids[0])
                armed.append((slot, fault, pids[0]))
        return armed

    def _await_starts(self, plan: FaultPlan) -> None:
        """Waits for a fault at the start of a component that another fault has ended; requests may be over before."""
        until_s = time.monotonic() + START_WITHIN_S
        for slot, fault in enumerate(plan.faults):
            follows = slot > 0 and fault.point.passed == AT_START and self.place.board.fired(0) is not None
            while follows and self.place.board.fired(slot) is None and time.monotonic() < until_s:
                time.sleep(LOOK_EVERY_S)

    def _wake(self, slot: int, fault: DrawnFault, victim: int, over: threading.Event) -> None:
        """Lets a stopped process go on after its time."""
        if fault.number is not signal.SIGSTOP:
            return
        while not over.wait(0.02):
            if (fired := self.place.board.fired(slot)) is not None:
                break
        else:
            # It may have happened in the last moment.
            fired = self.place.board.fired(slot)
        if fired is None:
            return
        time.sleep(max(0.0, fired.at_s + fault.stop_s - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim or fired.pid, signal.SIGCONT)

    def _ask(self, questions: Sequence[str], salts: Sequence[str]) -> list[RequestHistory]:
        def ask(name: str, salt: str) -> RequestHistory:
            with self.place.client(PATIENCE_S) as client:
                return read_history(client, QUESTIONS[name], salt)

        pool = concurrent.futures.ThreadPoolExecutor(len(questions))
        try:
            asked = [pool.submit(ask, *one) for one in zip(questions, salts, strict=True)]
            concurrent.futures.wait(asked, REQUESTS_WITHIN_S)
            lost = RequestHistory(error=f"it had not ended after {REQUESTS_WITHIN_S:g} s")
            return [one.result() if one.done() else lost for one in asked]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
