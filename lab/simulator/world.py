"""A simulated world: a schedule's cluster, its clients and its faults, checked to the end.

    set up --all serve--> active: requests arrive, faults happen, dead processes are restarted
       --every request has ended, every fault is over--> quiet: everything recovers within QUIET_S
       --> the final checks (:mod:`lab.simulator.checker`)

A component is a process of the loop; :mod:`lab.simulator.components` has its main. The production supervisor restarts
it (:mod:`lab.simulator.supervision`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from lab.simulator.checker import Checker
from lab.simulator.components import STOP_GRACE_S, address_of, exit_status, start_component
from lab.simulator.disks import SimDisk
from lab.simulator.faults import FaultPlayer
from lab.simulator.hash_model import HashBackend, StepCosts
from lab.simulator.lives import Life, SimTurn
from lab.simulator.machine import Machine
from lab.simulator.network import Network
from lab.simulator.redis_client import RedisModelClient, WayToRedis
from lab.simulator.redis_model import RedisModel
from lab.simulator.requests import RequestRun
from lab.simulator.schedule import BLOCK_TOKENS, FaultKind, SimSchedule
from lab.simulator.seams import installed
from lab.simulator.sim_threads import THREAD_NAME
from lab.simulator.supervision import Supervision
from lab.simulator.virtual_loop import PROCESS, Process, Stuck, VirtualLoop
from pillion.client.async_client import AsyncClient
from pillion.errors import PillionError
from pillion.supervisor.component_process import run_to_end

# Virtual time within which all components must serve, and within which a request must end.
SET_UP_S = 120.0
LONGEST_REQUEST_S = 240.0
# Time after the last fault within which all slots, tickets and other holds must be freed.
QUIET_S = 8.0
READY_LOOK_S, QUIET_LOOK_S = 0.05, 0.2
# Replication lag of Redis.
REPLICA_LAG_S = 0.5


# Faults that may delay a component's stop past its grace: it is paused, or one that it says goodbye to.
SLOW_STOP_FAULTS = {
    FaultKind.PAUSE,
    FaultKind.STALL,
    FaultKind.CUT,
    FaultKind.HALF_CUT,
    FaultKind.DISK_STALL,
}


@dataclass
class Result:
    """The results of a simulated world. ``findings``: violations; ``states``: distinct states seen."""

    findings: list[str]
    history: list[str]
    events: int = 0
    messages: int = 0
    virtual_s: float = 0.0
    states: set[int] = field(default_factory=set)
    endings: list[str] = field(default_factory=list)


class World:
    """The world of one schedule. ``careful``: check after every event; ``told``: record a history."""

    def __init__(self, schedule: SimSchedule, *, careful: bool = False, told: bool = False) -> None:
        self.schedule = schedule
        self.shape = schedule.shape
        self.random = Random(schedule.seed * 2 + 1)
        self.loop = VirtualLoop(self.random)  # type: ignore[abstract]
        self.network = Network(self.loop, self.random)
        self.machine = Machine(self.loop, self.random)
        fails_over = FaultKind.REDIS_FAIL_OVER in {fault.kind for fault in schedule.faults}
        self.redis = RedisModel(self.loop.time, REPLICA_LAG_S if fails_over else None)
        self.way = WayToRedis(0.0003, 0.0003)
        self.lives = {name: Life(name) for name in self.shape.processes()}
        self.findings: list[str] = []
        self.history: list[str] = []
        self.told = told
        kinds = frozenset(fault.kind for fault in schedule.faults)
        self.runs = [
            RequestRun(request, self.note, self.find, kinds, repeats=self.shape.repeats)
            for request in schedule.requests
        ]
        self.runners: list[Any] = []
        self.checker = Checker(
            self.loop,
            self.lives,
            self.runners,
            self.find,
            self.shape.node_of,
            self.shape.step_tokens,
            careful=careful,
        )
        self.supervision = Supervision(self.loop, self.shape, self.lives, self.begin, self.note, self.find)
        self.began_s = 0.0
        self._failures: list[dict[str, Any]] = []
        of_machine = (self.redis, self.way, self.lives, self.machine.disks, self.random)
        self._player = FaultPlayer(self.loop, self.network, *of_machine, self.kill, self.note)
        self._log = _LogReader(self)

    def note(self, text: str) -> None:
        if self.told:
            process = PROCESS.get(self.loop.outside)
            after_s = self.loop.time() - self.began_s
            self.history.append(f"{self.loop.events:>7} {after_s:9.4f}  {process.name:<11} {text}")

    def find(self, text: str) -> None:
        """Record a violation, except during the teardown, whose events have no meaning."""
        if self.loop.is_closed():
            return
        self.note(f"FOUND: {text}")
        self.findings.append(text)

    def run(self) -> Result:
        """Run the world until it is quiet, and return its result."""
        logger = logging.getLogger("pillion")
        level, propagate, hook = logger.level, logger.propagate, sys.unraisablehook
        threads = set(threading.enumerate())
        logger.setLevel(logging.DEBUG if self.told else logging.ERROR)
        logger.propagate = False
        logger.addHandler(self._log)
        if self.shape.disk_blocks:
            self.machine.disks.update((name, SimDisk()) for name in self.shape.node_names())
        try:
            stand_ins = (self.machine, self.network, self._redis_client, self.runners)
            told = self.checker.watch_tokens
            with installed(*stand_ins, told, self.schedule.seed):
                main = self.loop.spawn(self.loop.outside, self._main(), "world")
                try:
                    self.loop.run(main)
                    main.result()
                except Stuck as stuck:
                    self.find(f"stuck: {stuck}")
                else:
                    for thread in set(threading.enumerate()) - threads:
                        if thread.name != THREAD_NAME:
                            self.find(f"a thread runs that is not simulated: {thread.name}")
                finally:
                    # The teardown begins: its log lines are not findings.
                    logger.removeHandler(self._log)
                    logging.disable(logging.CRITICAL)
                    self._failures = [*self.loop.failures, *self.loop.unseen_deaths()]
                    sys.unraisablehook = lambda _: None
                    self.machine.close()
                    self.loop.close()
        finally:
            logger.removeHandler(self._log)
            logger.propagate = propagate
            result = self._result()
            sys.unraisablehook = hook
            logging.disable(logging.NOTSET)
            logger.setLevel(level)
        return result

    def _result(self) -> Result:
        for failure in self._failures:
            error = failure.get("exception")
            if not isinstance(error, PillionError | asyncio.CancelledError):
                self.findings.append(f"unhandled: {failure.get('message')} {error!r}")
        return Result(
            findings=list(dict.fromkeys(self.findings)),
            history=self.history,
            events=self.loop.events,
            messages=self.network.sent,
            virtual_s=self.loop.time() - self.began_s,
            states=self.checker.states,
            endings=[run.ending for run in self.runs],
        )

    async def _main(self) -> None:
        self.supervision.run()
        if not await self._until_ready():
            self.find("the cluster was not ready")
            return
        self.began_s = self.loop.time()
        self.checker.begin()
        clients = self.loop.process("client")
        client = clients.context.copy().run(AsyncClient, [address_of(name) for name in self.shape.gateway_names()])
        tasks = [self.loop.spawn(clients, run.run(client), f"request {run.request.number}") for run in self.runs]
        playing = self.loop.spawn(self.loop.outside, self._player.run(self.schedule.faults), "faults")
        late = self.began_s + LONGEST_REQUEST_S
        await asyncio.wait([*tasks, playing], timeout=late - self.loop.time())
        for run, task in zip(self.runs, tasks, strict=True):
            if not task.done():
                self.find(f"request {run.request.number} has not ended within {LONGEST_REQUEST_S:g} s")
            elif task.exception() is not None:
                self.find(f"request {run.request.number}: {task.exception()!r}")
        if not playing.done():
            self.find(f"the faults are not over within {LONGEST_REQUEST_S:g} s")
        elif (error := playing.exception()) is not None:
            self.find(f"a fault could not be played: {error!r}")
        self.note("quiet")
        if not await self._until_ready():
            self.find("the cluster has not come back")
        quiet_s = self.loop.time() + QUIET_S
        while self.checker.troubles() and self.loop.time() < quiet_s:  # noqa: ASYNC110
            await asyncio.sleep(QUIET_LOOK_S)
        for trouble in self.checker.troubles():
            self.find(trouble)

    async def _until_ready(self) -> bool:
        """Wait until all components serve and the gateways report it."""
        until_s = self.loop.time() + SET_UP_S
        while not all(self._ready(life) for life in self.lives.values()):
            if self.loop.time() > until_s:
                return False
            await asyncio.sleep(READY_LOOK_S)
        return True

    def _ready(self, life: Life) -> bool:
        if life.component is None:
            return False
        if life.role == "gateway":
            known = life.component.cluster.view.records()
            return len({record.component_id for record in known}) >= len(self.lives) and not (
                life.component.gateway.not_ready()
            )
        return not (life.backend is not None and life.component.worker.epoch.over)

    def begin(self, name: str, stands_by: bool) -> SimTurn:
        """Start a process of a component, whose life begins with its turn."""
        life, process = self.lives[name], self.loop.process(name)
        process.on_death.append(lambda: self.network.died(process))
        if stands_by:
            life.standby = process
        costs = StepCosts(self.shape.step_s, self.shape.token_s) if life.is_worker else None
        backend = None if costs is None else self._backend(life, process, costs)

        def took(turn: SimTurn) -> None:
            life.component, life.stop = None, None
            life.process, life.costs, life.backend = process, costs, backend
            if stands_by:
                self.note(f"the standby of {name} takes over")

        turn = SimTurn(self.loop, process, took, stands_by=stands_by)
        self.loop.spawn(process, self._live(life, turn, backend), name)
        return turn

    def kill(self, name: str) -> None:
        """Send SIGKILL to a component if it runs."""
        child = self.lives[name].child
        if child is not None:
            self.note(f"{name} is killed")
            child.kill()

    async def _live(self, life: Life, turn: SimTurn, backend: HashBackend | None) -> None:
        status = 1
        try:
            disk = self.machine.disks.get(life.name)
            disk_path = str(disk.folder) if disk is not None else ""
            component = await start_component(self.shape, life.name, backend, turn, disk_path)
        except PillionError as error:
            self.note(f"{life.name} cannot start: {error.message}")
            status = exit_status(error)
        else:
            life.stop = asyncio.Event()
            life.component = component
            self.note(f"{life.name} serves")
            status = await run_to_end(life.name, _WatchedStop(component, self._hangs), life.stop, STOP_GRACE_S)
        self.note(f"{life.name} exits with {status}")
        if turn.child is not None:
            self.loop.post(self.loop.outside, turn.child.exited, status)
        else:
            self.loop.post(self.loop.outside, self.loop.kill, turn.process)

    def _hangs(self, name: str) -> None:
        """Record that a component did not stop within its grace."""
        excuses = {fault.kind for fault in self.schedule.faults} & SLOW_STOP_FAULTS
        (self.note if excuses else self.find)(f"{name} hangs while it stops")

    def _backend(self, life: Life, process: Process, costs: StepCosts) -> HashBackend:
        return HashBackend(
            BLOCK_TOKENS,
            costs,
            runs_ahead=self.shape.runs_ahead,
            repeats=self.shape.repeats,
            watch=lambda tokens, reads, writes: self.checker.watch_step(life, process, tokens, reads, writes),
            found=lambda what: self.find(f"{life.name}: {what}"),
        )

    def _redis_client(self) -> Any:
        return RedisModelClient(self.redis, self.way)


class _WatchedStop:
    """Calls ``hangs`` with a component's name if its stop was cut short."""

    def __init__(self, component: Any, hangs: Callable[[str], None]) -> None:
        self._component = component
        self._hangs = hangs

    async def wait_failed(self) -> Any:
        return await self._component.wait_failed()

    async def stop(self, grace_s: float) -> None:
        try:
            await self._component.stop(grace_s)
        except asyncio.CancelledError:
            self._hangs(PROCESS.get().name)
            raise


class _LogReader(logging.Handler):
    """Adds log lines to the history, and logged exceptions that a component survived to the findings."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        for node, disk in self._world.machine.disks.items():
            # The folder's name differs from run to run.
            text = text.replace(str(disk.folder), f"disk of {node}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, PillionError):
            self._world.find(f"a defect was logged: {text}: {error!r}")
        else:
            self._world.note(f"{record.levelname.lower()}: {text}")
