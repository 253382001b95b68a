"""One run: a seed draws faults and requests, the requests run while the faults happen, the checker looks at all of it.

In a part of the runs components are paused for moments at random meanwhile. In the shape `hosts` a link between two
hosts is cut besides, one way or both, and all links are long, narrow or lossy.

Of some runs the faults are a chain: a step takes long, or a worker or Redis stands still, and meanwhile a process, most
often the KV node, is killed once or several times. What needs it notices late, or comes back late. The last request
comes only when the first of these kills has happened.

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

from lab.testbed.faults.points import AT_START, MAX_PASSINGS, POINTS, SELDOM, FaultPoint
from lab.testbed.networks import HostNetwork
from lab.testbed.wire import PERFECT, LinkRule
from tests.faults.histories import RequestHistory, complaints, read_history
from tests.faults.places import LOOK_EVERY_S, NETWORK_HOSTS, FaultPlace, roles_in
from tests.faults.questions import QUESTIONS
from tests.faults.short_pauses import short_pauses

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
# This share of the runs has its faults in a chain. What begins a chain lasts for a time that is shorter or longer than
# a node waits for workers of its earlier life. The first kill comes a while after that, and the others follow apart.
CHAIN_SHARE = 0.4
CHAIN_LASTS_S, CHAIN_BEGINS_S, CHAIN_APART_S = (2.0, 4.0, 8.0), (0.05, 0.3), (0.3, 1.5, 4.0)
# This share of the runs without a longer SIGSTOP has short pauses of components at random.
PAUSES_SHARE = 0.5
# How long the last request waits for the first kill of a chain.
KILL_WITHIN_S = 15.0
# What all links between hosts are like in a run of the shape `hosts`; when a pair of hosts is cut apart, and how long.
LINKS = {
    "0.2 ms and a gigabit": LinkRule(0.0001, 125e6),
    "20 ms and 100 Mbit": LinkRule(0.01, 12.5e6),
    "0.2 ms and a lost packet of a hundred": LinkRule(0.0001, 125e6, loss=0.01),
}
CUT_BEGINS_S, CUT_LASTS_S = (0.1, 0.5, 2.0), (0.5, 3.0, 9.0)
# Where a worker's step begins, on the thread of its steps.
LONG_STEPS = ("decode, before a launch", "prefill, before a launch")
# What a request may say that was in a step of two workers when they were killed.
KILLED_TWO = "two workers were lost in a step with this request"


@dataclass(frozen=True, slots=True)
class DrawnFault:
    """A fault: at the ``passing``-th passing of a point the signal goes to the process that passes it, or to a process
    of ``victim``. Without a signal, what happens there takes ``stop_s``, and the process goes on."""

    point: FaultPoint
    passing: int
    number: signal.Signals | None
    victim: str
    stop_s: float

    @property
    def words(self) -> str:
        """The fault for ledgers and people."""
        if self.number is None:
            return f"{self.stop_s:g} s at passing {self.passing} of {self.point.name}"
        whom = f" to {self.victim}" if self.victim else ""
        stop = f" for {self.stop_s:g} s" if self.number is signal.SIGSTOP else ""
        return f"{self.number.name}{whom}{stop} at passing {self.passing} of {self.point.name}"


@dataclass(frozen=True, slots=True)
class ChainedKill:
    """A further fault of a chain: SIGKILL to a process of ``victim``, so long after the first fault."""

    victim: str
    after_s: float

    @property
    def words(self) -> str:
        """The fault for ledgers and people."""
        return f"SIGKILL to {self.victim} {self.after_s:.2f} s later"


@dataclass(frozen=True, slots=True)
class LinkFault:
    """What the network of a run is like: all links follow one of LINKS, and between two hosts nothing passes for a
    while, in one direction or in both."""

    links: str
    one: str
    other: str
    both_ways: bool
    begins_s: float
    lasts_s: float

    @property
    def words(self) -> str:
        """The fault for ledgers and people."""
        arrow = "<->" if self.both_ways else "->"
        cut = f"{self.one} {arrow} {self.other} cut after {self.begins_s:g} s for {self.lasts_s:g} s"
        return f"links of {self.links}, {cut}"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What a seed draws: faults, questions by name, and for each whether its prompt is new to the cluster (a salt of
    the run's own) or was computed before. ``chain`` follows the first fault, in time. ``pauses``: whether components
    are paused for moments at random meanwhile."""

    seed: int
    faults: tuple[DrawnFault, ...]
    questions: tuple[str, ...]
    salted: tuple[bool, ...]
    chain: tuple[ChainedKill, ...] = ()
    network: LinkFault | None = None
    pauses: bool = False

    @property
    def struck(self) -> tuple[str, ...]:
        """The role of the process that each fault strikes, in the order of :attr:`FaultRecord.fired`."""
        return (*(fault.victim or fault.point.role for fault in self.faults), *(kill.victim for kill in self.chain))

    @property
    def words(self) -> list[str]:
        """All faults for ledgers and people, in the same order."""
        words = [fault.words for fault in (*self.faults, *self.chain, *filter(None, [self.network]))]
        return [*words, "short pauses"] if self.pauses else words

    def undisturbed(self) -> FaultPlan:
        """The same without a fault."""
        return replace(self, faults=(), chain=(), network=None, pauses=False)


@dataclass(slots=True)
class FaultRecord:
    """What came of a run. ``fired`` says which faults happened, those of the chain after the others."""

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
    """The run that a seed draws in a cluster of a shape."""
    chance = random.Random(seed)
    points = [point for point in POINTS if point.passed_in(shape)]
    victims = roles_in(shape)
    faults = [_fault(chance, [point for point in points if point.passed != AT_START], victims)]
    chain: tuple[ChainedKill, ...] = ()
    if not one_fault and chance.random() < CHAIN_SHARE:
        faults, chain = [_begin_of_chain(chance, points)], _chain(chance, victims)
    elif not one_fault and chance.random() < SECOND_FAULT_SHARE:
        faults.append(_fault(chance, [point for point in points if _may_follow(point, faults[0])], victims))
    asked = [(chance.choice(tuple(QUESTIONS)), chance.random() < SALTED_SHARE) for _ in range(STREAMS)]
    # What is certain to pass some points: a long prompt that is new, and a stop string.
    if any(fault.point.role == "prefill" or fault.point.passed == SELDOM for fault in faults):
        asked[0] = "long prompt", True
    if any(fault.point.what == "a cancel" for fault in faults):
        asked[1] = "stop strings", True
    questions, salted = zip(*asked, strict=True)
    # These are drawn last, so that seeds stand for what they stood for before there were networks and pauses.
    network = _link_fault(chance) if shape == "hosts" else None
    # The wake-up after a short sleep would also end a longer one.
    pauses = chance.random() < PAUSES_SHARE and all(fault.number is not signal.SIGSTOP for fault in faults)
    return FaultPlan(seed, tuple(faults), questions, salted, chain, network, pauses)


def _link_fault(chance: random.Random) -> LinkFault:
    one, other = chance.sample(NETWORK_HOSTS, 2)
    begins_s, lasts_s = chance.choice(CUT_BEGINS_S), chance.choice(CUT_LASTS_S)
    return LinkFault(chance.choice(tuple(LINKS)), one, other, chance.random() < 0.5, begins_s, lasts_s)


def _begin_of_chain(chance: random.Random, points: list[FaultPoint]) -> DrawnFault:
    """A long step of a worker, or a worker or Redis that stands still."""
    point = chance.choice([point for point in points if point.name in LONG_STEPS])
    number = chance.choice((None, None, signal.SIGSTOP))
    victim = chance.choice(("", "redis-server")) if number is not None else ""
    passing = chance.randint(1, MAX_PASSINGS[point.passed])
    return DrawnFault(point, passing, number, victim, chance.choice(CHAIN_LASTS_S))


def _chain(chance: random.Random, victims: Sequence[str]) -> tuple[ChainedKill, ...]:
    victim = chance.choice((*("kvnode",) * 3, *(role for role in victims if role not in ("keeper", "redis-server"))))
    first_s, apart_s = chance.choice(CHAIN_BEGINS_S), chance.choice(CHAIN_APART_S)
    return tuple(ChainedKill(victim, first_s + n * apart_s) for n in range(chance.choice((1, 2, 3))))


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
        chance.randint(1, MAX_PASSINGS[point.passed]),
        signal.SIGSTOP if stops else signal.SIGKILL,
        victim,
        chance.choice(STOPS_S) if stops else 0.0,
    )


def cut_apart(network: HostNetwork, fault: LinkFault, over: threading.Event) -> None:
    """Lets a network be as a fault says, until the run's requests are over; afterwards its links are perfect."""
    rule = LINKS[fault.links]
    cut = replace(rule, cut=True)
    network.links(rule)
    try:
        if not over.wait(fault.begins_s):
            network.link(fault.one, fault.other, cut, cut if fault.both_ways else rule)
            over.wait(fault.lasts_s)
            network.link(fault.one, fault.other, rule)
            over.wait()
    finally:
        network.links(PERFECT)


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
        struck, killed = [False] * len(plan.chain), threading.Event()
        if not plan.chain:
            killed.set()
        waking = [threading.Thread(target=self._wake, args=(*armed, stopped)) for armed in self._arm(plan)]
        waking.append(threading.Thread(target=self._strike, args=(plan.chain, struck, killed, stopped)))
        if plan.network is not None and place.network is not None:
            waking.append(threading.Thread(target=cut_apart, args=(place.network, plan.network, stopped)))
        for thread in waking:
            thread.start()
        try:
            salts = [f"{plan.seed} {began_s}" if salted else UNDISTURBED for salted in plan.salted]
            pausing = short_pauses(place.pids, plan.seed) if plan.pauses else contextlib.nullcontext()
            with pausing:
                answers = self._ask(plan.questions, salts, killed)
            for question, history in zip(plan.questions, answers, strict=True):
                if KILLED_TWO not in history.error or self._killed_workers(plan, struck) < 2:
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
            # Whatever runs over a link meets it: heartbeats do so several times a second. Somebody is always paused.
            record.fired += struck + [True] * ((plan.network is not None) + plan.pauses)
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
                self.place.board.arm(slot, fault.point, fault.passing, fault.number, pids[0], fault.stop_s)
                armed.append((slot, fault, pids[0]))
        return armed

    def _await_starts(self, plan: FaultPlan) -> None:
        """Waits for a fault at the start of a component that another fault has ended; requests may be over before."""
        until_s = time.monotonic() + START_WITHIN_S
        for slot, fault in enumerate(plan.faults):
            follows = slot > 0 and fault.point.passed == AT_START and self.place.board.fired(0) is not None
            while follows and self.place.board.fired(slot) is None and time.monotonic() < until_s:
                time.sleep(LOOK_EVERY_S)

    def _killed_workers(self, plan: FaultPlan, struck: Sequence[bool]) -> int:
        """How many workers were killed until now."""
        fired = [self.place.board.fired(slot) is not None for slot in range(len(plan.faults))]
        kills = [fault.number is signal.SIGKILL for fault in plan.faults] + [True] * len(plan.chain)
        happened = zip(plan.struck, kills, (*fired, *struck), strict=True)
        return sum(role in ("prefill", "decode") and kill and came for role, kill, came in happened)

    def _strike(
        self, chain: Sequence[ChainedKill], struck: list[bool], killed: threading.Event, over: threading.Event
    ) -> None:
        """Kills what the chain names, after its first fault, and when the requests are over, too; notes in ``struck``
        what has been killed, and sets ``killed`` after the first one."""
        while chain and (fired := self.place.board.fired(0)) is None:
            if over.wait(0.02):
                return
        for place, kill in enumerate(chain):
            assert fired is not None
            time.sleep(max(0.0, fired.at_s + kill.after_s - time.monotonic()))
            # One that was killed before may not be back yet.
            until_s = time.monotonic() + START_WITHIN_S
            while not (pids := self.place.pids(kill.victim)) and time.monotonic() < until_s:
                time.sleep(LOOK_EVERY_S)
            for pid in pids[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    struck[place] = True
            killed.set()

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

    def _ask(self, questions: Sequence[str], salts: Sequence[str], killed: threading.Event) -> list[RequestHistory]:
        def ask(name: str, salt: str, late: bool) -> RequestHistory:
            if late:
                killed.wait(KILL_WITHIN_S)
            with self.place.client(PATIENCE_S) as client:
                return read_history(client, QUESTIONS[name], salt)

        pool = concurrent.futures.ThreadPoolExecutor(len(questions))
        try:
            late = [number == len(questions) - 1 for number in range(len(questions))]
            asked = [pool.submit(ask, *one) for one in zip(questions, salts, late, strict=True)]
            concurrent.futures.wait(asked, REQUESTS_WITHIN_S)
            lost = RequestHistory(error=f"it had not ended after {REQUESTS_WITHIN_S:g} s")
            return [one.result() if one.done() else lost for one in asked]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
