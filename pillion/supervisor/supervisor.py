"""Keeps a set of processes alive: starts them in order, restarts those that die, stops them in order, and leaves none.

Life of a component, each managed by its own task:

    waiting ----------> starting ---------> ready ---------> dead ---> waiting (for a delay, and for what it needs)
     lower levels        spawned, probed      the probe passed; |
     are not ready       until it is ready    killed if it      '----> the whole cluster stops: it flaps, and so does
                                              hangs for long           everything that could serve in its place

A standby is the next process of a component, started ahead (:mod:`pillion.supervisor.standbys`). Standbys start one at
a time when the cluster is ready, so that they take no core from a start that somebody waits for.

An exception that ends one of the supervisor's own tasks is a defect: it is reported, and the task starts again, so that
no component is unattended.

Before the cluster was ready once, a death is final: what cannot start will not start the third time. Later the cluster
continues with what is alive as long as that can serve, and retries what flaps ever more rarely.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pillion.cli.console import Notices
from pillion.errors import ConfigError, Unavailable
from pillion.supervisor.child_process import KILL_TIMEOUT_S, ChildProcess, Launch
from pillion.supervisor.restarts import EXIT_CONFIG, RestartPolicy
from pillion.supervisor.standbys.standby import MAX_KEPT_LINES, Successor
from pillion.tasks import at_most, end_tasks

log = logging.getLogger("pillion.supervisor")

StandBy = Callable[[Sequence[str], Mapping[str, str], Launch], Awaitable[Successor]]

START_TIMEOUT_S = 600.0
PROBE_INTERVAL_MS = 50
STOP_GRACE_S = 5.0
# A component that leaves this many probes in a row unanswered hangs. Each probe may take a second, so detection takes
# about twenty seconds.
ALIVE_INTERVAL_S = 1.0
MAX_SILENCES = 10
# A standby starts when its component has been ready for this long, because requests that waited for the component come
# first. It is also the interval at which the supervisor checks for a missing standby.
STANDBY_DELAY_S = 2.0
# A component that ends this soon after one that it needs has ended because of it: it may notice the loss late.
BEHIND_S = 30.0
DEFECT_DELAY_S = 1.0
FAILED = "pillion: "


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to keep alive.

    Attributes:
        level: components of lower levels are ready before this one starts, and stop after it.
        environ: the child's whole environment.
        needs: components that must be ready before this one is restarted, and with whose death it is killed; the first
            start waits for all lower levels.
        survives: whether it continues when a component that it needs dies, with that component's next process.
        probe: returns whether the component is ready; it is called repeatedly until it is, and must not raise.
        quiet: whether the output is held back, and shown only if the component dies by itself.
        drain_s: time to stop in addition to the usual grace, for running requests.
        alive: returns whether the component answers at all; it is called while the component runs, and must not raise.
            None: it is not called.
        standby: whether its next process is started ahead, if possible; the component's program must support it.
        kind: components of one kind can replace each other; "" for the only one of its kind.
        spare: whether requests are served even without any component of its kind.
    """

    component_id: str
    level: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    probe: Callable[[], Awaitable[bool]]
    needs: tuple[str, ...] = ()
    survives: bool = False
    quiet: bool = False
    drain_s: float = 0.0
    alive: Callable[[], Awaitable[bool]] | None = None
    standby: bool = False
    kind: str = ""
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Down:
    """A component that flaps and is not running: why, and for how many more seconds."""

    component_id: str
    why: str
    left_s: float


@dataclass(slots=True)
class _SupervisedProcess:
    """The state of one component's process. ``child`` is None before the first start and between a death and the next
    start; ``successor`` is the standby, None while there is none. ``failed`` is why the process could not start, in its
    own words. ``lost`` is the needed component that died while this one lived, and the time until which its own end is
    attributed to that; ``starting`` is true from the order to start it until its process is known. ``unaided`` is why
    the last standby could not start. ``flapping`` is empty unless the component flapped at its last death, and
    ``begins_s`` is when it is restarted."""

    spec: ProcessSpec
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    child: ChildProcess | None = None
    successor: Successor | None = None
    failed: str = ""
    lost: tuple[str, float] = ("", 0.0)
    starting: bool = False
    unaided: str = ""
    flapping: str = ""
    begins_s: float = 0.0


class Supervisor:
    """Keeps the processes of ``specs`` alive. ``launch`` starts them, by default ChildProcess.start, and ``stand_by``
    starts standbys of those that have one.

    Use: ``await start()``, then ``await failed()`` as long as needed, then ``await stop()``, always.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        notices: Notices,
        policy: RestartPolicy | None = None,
        *,
        launch: Launch | None = None,
        stand_by: StandBy = Successor.start,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_grace_s: float = STOP_GRACE_S,
        alive_interval_s: float = ALIVE_INTERVAL_S,
        standby_delay_s: float = STANDBY_DELAY_S,
    ) -> None:
        self._components = [_SupervisedProcess(spec) for spec in specs]
        self._notices = notices
        self._policy = policy or RestartPolicy()
        self._launch: Launch = launch or ChildProcess.start
        self._stand_by = stand_by
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._alive_interval_s = alive_interval_s
        self._standby_delay_s = standby_delay_s
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._was_ready = False
        self._refused = False
        self._one_standby = asyncio.Lock()

    async def start(self) -> None:
        """Start all components, and return when all are ready. Raises Unavailable, which names the component that is
        not, or ConfigError if that component rejected its flags; :meth:`stop` must be called even then."""
        self._tasks = [
            asyncio.create_task(self._never_ending(component, self._tend), name=component.spec.component_id)
            for component in self._components
        ]
        ready = asyncio.create_task(self._ready(lambda component: True), name="ready")
        self._tasks.append(ready)
        await asyncio.wait((ready, self._failure), return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            raise (ConfigError if self._refused else Unavailable)(self._failure.result())
        self._was_ready = True
        self._tasks += [
            asyncio.create_task(
                self._never_ending(component, self._keep_standby), name=f"standby of {component.spec.component_id}"
            )
            for component in self._components
            if component.spec.standby
        ]

    async def failed(self) -> str:
        """Wait until the cluster cannot be kept alive; return why."""
        return await asyncio.shield(self._failure)

    async def stop(self) -> None:
        """Stop all components, highest level first. Returns when every process has ended; idempotent."""
        await end_tasks(*self._tasks)
        waiting = [component.successor for component in self._components if component.successor]
        for successor in waiting:
            successor.close()
        if ends := [asyncio.create_task(successor.wait()) for successor in waiting]:
            await asyncio.wait(ends, timeout=KILL_TIMEOUT_S)
        for level in sorted({component.spec.level for component in self._components}, reverse=True):
            ending = [
                (component.child, component.spec)
                for component in self._components
                if component.spec.level == level and component.child
            ]
            await asyncio.gather(*(child.stop(self._stop_grace_s + spec.drain_s) for child, spec in ending))

    def kill_component(self, component_id: str) -> bool:
        """Send SIGKILL to one component, which is then restarted as after any death. Returns False if it is not
        running."""
        child = next((one.child for one in self._components if one.spec.component_id == component_id), None)
        if child:
            child.kill()
        return child is not None

    def living(self) -> list[int]:
        """Return the process groups that are still alive; there are none after :meth:`stop`."""
        every = [one for component in self._components for one in (component.child, component.successor)]
        return [process.pid for process in every if process and not process.has_exited()]

    def down(self) -> list[Down]:
        """Return the components that flap and wait for their next start."""
        now = time.monotonic()
        waiting = (one for one in self._components if one.child is None and one.flapping)
        return [Down(one.spec.component_id, one.flapping, max(0.0, one.begins_s - now)) for one in waiting]

    async def _never_ending(
        self, component: _SupervisedProcess, work: Callable[[_SupervisedProcess], Awaitable[None]]
    ) -> None:
        """Do ``work`` for a component until it returns, and again after an exception."""
        while True:
            try:
                return await work(component)
            except Exception as error:
                task = asyncio.current_task()
                name = component.spec.component_id if task is None else task.get_name()
                log.exception("the supervisor's task for %s failed", name)
                self._notices.say(f"bug in the supervisor; its task for {name} restarts: {error!r}", "bold red")
                await asyncio.sleep(DEFECT_DELAY_S)

    async def _tend(self, component: _SupervisedProcess) -> None:
        name = component.spec.component_id
        await self._ready(lambda other: other.level < component.spec.level)
        while not self._failure.done():
            await self._ready(lambda other: other.component_id in component.spec.needs)
            try:
                code = await self._run_once(component)
                ended = f"{name} {describe_exit(code)}"
            except OSError as error:
                code, ended = 1, f"{name} cannot be started: {error}"
                if not self._was_ready:
                    return self._fail(ended)
            if not self._was_ready:
                self._refused = code == EXIT_CONFIG and bool(component.failed)
                why = f"{name} cannot start: {component.failed}"
                return self._fail(why if component.failed else f"{ended} before it was ready")
            self._end_dependents(name)
            if lost := self._lost_need(component):
                # The component could not continue without what it needs, so its death does not count.
                self._notices.say(f"{ended}; restarting it after {lost}", "bold yellow")
                continue
            decision = self._policy.died(name, code, time.monotonic())
            component.flapping, component.begins_s = decision.flapping, time.monotonic() + decision.delay_s
            if decision.flapping and self._ends_service(component.spec):
                return self._fail(decision.flapping)
            when = f"in {decision.delay_s:g} s" if decision.delay_s else "at once"
            self._notices.say(f"{decision.flapping or ended}; restarting it {when}", "bold yellow")
            await asyncio.sleep(decision.delay_s)
        return None

    def _ends_service(self, spec: ProcessSpec) -> bool:
        """Return whether no component serves, or is about to, instead of one that flaps."""
        others = [one for one in self._components if spec.kind and one.spec.kind == spec.kind and one.spec is not spec]
        return not spec.spare and all(one.flapping and not one.ready.is_set() for one in others)

    def _end_dependents(self, name: str) -> None:
        """Kill the components that need one that has just died. They would end by themselves, but later, and their next
        processes can start only after that."""
        for other in self._components:
            if name in other.spec.needs and (other.child is not None or other.starting):
                other.lost = name, time.monotonic() + BEHIND_S if other.spec.survives else math.inf
                if not other.spec.survives and other.child is not None:
                    other.child.kill()

    def _lost_need(self, component: _SupervisedProcess) -> str:
        """Return the component whose death ended this one's process; "" if it ended for another reason."""
        (name, until_s), component.lost = component.lost, ("", 0.0)
        if name and time.monotonic() < until_s:
            return name
        needed = (one for one in self._components if one.spec.component_id in component.spec.needs)
        return next((one.spec.component_id for one in needed if not one.ready.is_set()), "")

    async def _run_once(self, component: _SupervisedProcess) -> int:
        spec = component.spec
        kept: deque[str] = deque(maxlen=MAX_KEPT_LINES)

        def show(line: str) -> None:
            if line.startswith(FAILED) and not self._was_ready:
                # The error with which the whole cluster ends contains this line, so it is not printed here too.
                component.failed = line.removeprefix(FAILED)
                return
            self._notices.component(spec.component_id, line)

        forward = kept.append if spec.quiet else show
        component.child = child = await self._begin(component, forward)
        probing = asyncio.create_task(self._until_ready(component, child))
        try:
            code = await child.wait()
        except Exception:
            child.kill()
            component.child = None
            raise
        finally:
            probing.cancel()
            component.ready.clear()
        child.kill()
        component.child = None
        for line in kept:
            show(line)
        return code

    async def _begin(self, component: _SupervisedProcess, forward: Callable[[str], None]) -> ChildProcess:
        """Start a component's process, or let its standby take over. Raises OSError if the program does not start."""
        spec, successor, component.successor = component.spec, component.successor, None
        component.starting = True
        try:
            child = successor.begin(forward) if successor is not None else None
            if child is None:
                child = await self._launch(spec.argv, spec.environ, forward)
        finally:
            component.starting = False
        if component.lost[0] and not spec.survives:
            child.kill()
        return child

    async def _until_ready(self, component: _SupervisedProcess, child: ChildProcess) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await component.spec.probe():  # noqa: ASYNC110  (nobody sends an event)
                    await asyncio.sleep(PROBE_INTERVAL_MS / 1000)
        except TimeoutError:
            self._notices.say(
                f"{component.spec.component_id} was not ready within {self._start_timeout_s:g} s", "bold red"
            )
            child.kill()
            return
        component.ready.set()
        if component.spec.alive is None:
            return
        silences = 0
        while silences < MAX_SILENCES:
            await asyncio.sleep(self._alive_interval_s)
            silences = 0 if await component.spec.alive() else silences + 1
        self._notices.say(f"{component.spec.component_id} hangs: no answer to {MAX_SILENCES} probes", "bold red")
        child.kill()

    async def _keep_standby(self, component: _SupervisedProcess) -> None:
        """Keep a standby whenever the component has been ready for a while. The death of a waiting standby is noticed
        when it is needed; then it is replaced."""
        while True:
            await component.ready.wait()
            await asyncio.sleep(self._standby_delay_s)
            async with self._one_standby:
                if component.successor is None and component.ready.is_set():
                    await self._start_standby(component)

    async def _start_standby(self, component: _SupervisedProcess) -> None:
        """Return when the standby waits, cannot start or has ended, or after the time for a start."""
        spec = component.spec
        try:
            component.successor = successor = await self._stand_by(spec.argv, spec.environ, self._launch)
        except OSError as error:
            if component.unaided != str(error):
                component.unaided = str(error)
                self._notices.say(f"{spec.component_id} has no standby: {error}", "bold yellow")
            return
        component.unaided = ""
        waits = await at_most(self._start_timeout_s, successor.ready())
        if waits is False and component.successor is successor:
            self._notices.say(f"{spec.component_id} has no standby; it ended:", "bold yellow")
            for line in successor.output():
                self._notices.component(spec.component_id, line)

    async def _ready(self, chosen: Callable[[ProcessSpec], bool]) -> None:
        for component in self._components:
            if chosen(component.spec):
                await component.ready.wait()

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_result(reason)


def describe_exit(code: int) -> str:
    """Describe an exit status in words: ``-9`` -> ``was ended by SIGKILL``."""
    names = {int(number): number.name for number in signal.Signals}
    return f"ended with status {code}" if code >= 0 else f"was ended by {names.get(-code, f'signal {-code}')}"
