"""Supervisors of a simulated cluster, one per KV node with its workers: the production class over simulated processes.
The first one has the gateways as well.

    Supervisor --launch--> SimChild --begin--> a process of the loop, with the component's main
               <--its exit status, or SIGKILL's--
               --stand_by--> SimSuccessor --> a process that starts and then waits for its turn
                 ready <------------------- it waits for its turn
                 begin --> SimChild, and the turn has come
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lab.simulator.components import address_of
from lab.simulator.lives import Life, SimTurn
from lab.simulator.schedule import ClusterShape
from lab.simulator.virtual_loop import Process, VirtualLoop
from pillion.errors import Unavailable
from pillion.supervisor.fence_watch import watch_fences
from pillion.supervisor.supervisor import ProcessSpec, Supervisor

FENCE_KILL_S = 5.0
# Shorter than in production, since most schedules would end before a standby was used.
STANDBY_DELAY_S = 0.3
NODE_LEVEL, WORKER_LEVEL, GATEWAY_LEVEL = range(3)


class SimChild:
    """A simulated process, with the methods that a supervisor uses of
    :class:`pillion.supervisor.child_process.ChildProcess`."""

    def __init__(self, loop: VirtualLoop, life: Life, process: Process) -> None:
        self.pid = process.number
        self._loop = loop
        self._life = life
        self._process = process
        self._ended: asyncio.Future[int] = loop.create_future()
        process.on_death.append(lambda: self.exited(-signal.SIGKILL))

    async def wait(self) -> int:
        """Wait for the end and return the exit status."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        self._loop.kill(self._process)

    def exited(self, status: int) -> None:
        """Record the end of the process."""
        if self._ended.done():
            return
        self._ended.set_result(status)
        self._loop.kill(self._process)
        if self._life.child is self:
            self._life.process = self._life.component = self._life.child = None


class SimSuccessor:
    """A standby process as its supervisor sees it (:class:`NextProcess`)."""

    def __init__(self, loop: VirtualLoop, life: Life, turn: SimTurn) -> None:
        self.pid = turn.process.number
        self._loop = loop
        self._life = life
        self._turn = turn
        turn.process.on_death.append(self._ended)

    async def ready(self) -> bool:
        """Wait until the process waits for its turn, or return False if it has ended."""
        return await asyncio.shield(self._turn.waits)

    def output(self) -> tuple[str, ...]:
        """Return no lines: the log is in the history."""
        return ()

    def begin(self, show: Callable[[str], None]) -> SimChild | None:
        """Begin the process; return None if it has ended."""
        if not self._turn.process.alive:
            return None
        child = self._life.child = self._turn.child = SimChild(self._loop, self._life, self._turn.process)
        self._turn.begin()
        return child

    def _ended(self) -> None:
        if not self._turn.waits.done():
            self._turn.waits.set_result(False)


class Supervision:
    """All supervisors. ``begin`` starts the process of a component, by name, and whether it waits for its turn."""

    def __init__(
        self,
        loop: VirtualLoop,
        shape: ClusterShape,
        lives: Mapping[str, Life],
        begin: Callable[[str, bool], SimTurn],
        note: Callable[[str], None],
        find: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._shape = shape
        self._lives = lives
        self._begin = begin
        self._note = note
        self._find = find

    def run(self) -> None:
        """Start the supervisors, which start everything else."""
        for number, node in enumerate(self._shape.node_names()):
            process = self._loop.process(f"supervisor-{number}")
            self._loop.spawn(process, self._keep(node, with_gateways=number == 0))

    async def launch(self, argv: Sequence[str], environ: Mapping[str, str], forward: Callable[[str], None]) -> SimChild:
        """Start a component by name."""
        life = self._lives[argv[0]]
        turn = self._begin(life.name, False)
        child = life.child = turn.child = SimChild(self._loop, life, turn.process)
        return child

    async def stand_by(self, argv: Sequence[str], environ: Mapping[str, str], launch: object) -> SimSuccessor:
        """Start a standby process by name."""
        life = self._lives[argv[0]]
        return SimSuccessor(self._loop, life, self._begin(life.name, True))

    async def _keep(self, node: str, *, with_gateways: bool) -> None:
        notices: Any = _NotedNotices(self._note)
        launch: Any = self.launch
        stand_by: Any = self.stand_by
        supervisor = Supervisor(
            self._specs(node, with_gateways=with_gateways),
            notices,
            launch=launch,
            stand_by=stand_by,
            standby_delay_s=STANDBY_DELAY_S,
        )
        try:
            await supervisor.start()
        except Unavailable as error:
            self._find(f"the cluster does not start: {error.message}")
            return
        fences = asyncio.create_task(watch_fences(address_of(node), FENCE_KILL_S, supervisor.kill_component, notices))
        reason = await supervisor.failed()
        fences.cancel()
        self._find(f"the supervisor gives up: {reason}")

    def _specs(self, node: str, *, with_gateways: bool) -> list[ProcessSpec]:
        workers = [name for name in self._shape.worker_names() if self._shape.node_of(name) == node]
        gateways = self._shape.gateway_names() if with_gateways else ()
        return [
            self._spec(node, NODE_LEVEL),
            *(self._spec(name, WORKER_LEVEL, needs=(node,)) for name in workers),
            *(self._spec(name, GATEWAY_LEVEL) for name in gateways),
        ]

    def _spec(self, name: str, level: int, needs: tuple[str, ...] = ()) -> ProcessSpec:
        async def probe() -> bool:
            return self._lives[name].runs

        standby = self._shape.standbys and level != GATEWAY_LEVEL
        return ProcessSpec(
            component_id=name,
            level=level,
            argv=(name,),
            environ={},
            probe=probe,
            needs=needs,
            survives=self._shape.kept,
            standby=standby,
        )


class _NotedNotices:
    """Reports of a supervisor, written into the history."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def say(self, text: str, *_: object) -> None:
        self._note(text)

    def component(self, component_id: str, line: str) -> None:
        self._note(f"{component_id}: {line}")
