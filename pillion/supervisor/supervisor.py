"""Keeps a set of processes alive: starts them in order, restarts those that die, stops them in order, and leaves none.

Life of a component, each managed by its own task:

    waiting ----------> starting ---------> ready ---------> dead ---> waiting (for a delay, and for what it needs)
     lower levels        spawned, probed      the probe passed; |
     are not ready       until it is ready    killed if it      '----> the whole cluster stops: it flaps, and so does
                                              hangs for long           everything that could serve in its place

A standby is the next process of a component, started ahead (:mod:`pillion.supervisor.standbys`). Standbys start one at
a time after the cluster is ready, so that they do not compete for cores with a start that clients wait for.

An exception that ends one of the supervisor's own tasks is a bug: it is logged, and the task starts again, so that no
component is left without supervision.

Until the cluster has been ready once, any death ends it: a component that could not start would hardly start the next
time. Later the cluster continues as long as the live components can serve, and restarts flapping ones less and less
often.
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
# Interval of liveness probes, and the number of unanswered ones in a row from which a component hangs. A probe may take
# a second, so a hang is detected after about 20 s.
ALIVE_INTERVAL_S = 1.0
MAX_UNANSWERED_PROBES = 10
# Delay of a standby after its component is ready, because requests that waited for the component come first. Also the
# interval at which a missing standby is noticed.
STANDBY_DELAY_S = 2.0
# A death within this time after that of a needed component is attributed to it: the loss may be noticed late.
LOST_NEED_S = 30.0
# Delay before one of the supervisor's own tasks is restarted after a bug.
DEFECT_DELAY_S = 1.0
# Prefix of the error line with which a component exits.
ERROR_PREFIX = "pillion: "


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to keep alive.

    Attributes:
        level: this component starts after those of lower levels are ready, and stops before them.
        environ: the child's whole environment.
        needs: components that must be ready before this one is restarted, and with whose death it is killed; the first
            start waits for all lower levels.
        survives: it continues after the death of a component that it needs, with that component's next process.
        probe: returns True if the component is ready; polled until then, and must not raise.
        quiet: show the output only if the component dies by itself.
        drain_s: time to stop in addition to the usual grace, for running requests.
        alive: returns True if the component answers at all; polled while it runs, and must not raise. None: no check.
        standby: start its next process ahead, if possible; the component's program must support it.
        kind: components of the same kind can replace each other; "" for the only one of its kind.
        spare: requests are served even without any component of its kind.
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
    """A component and its process.

    Attributes:
        child: the running process; None before the first start, and between a death and the next start.
        successor: the standby, if any.
        failed: the error line that the process printed before the cluster was ready.
        lost: the needed component that died while this one lived, and the time until which this one's death is
            attributed to that.
        starting: True while its process is being launched.
        standby_error: why the last standby could not start.
        flapping: why it is not restarted at once after its last death; "" unless it flaps.
        restart_s: time of the restart after its last death. Times are in monotonic seconds.
    """

    spec: ProcessSpec
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    child: ChildProcess | None = None
    successor: Successor | None = None
    failed: str = ""
    lost: tuple[str, float] = ("", 0.0)
    starting: bool = False
    standby_error: str = ""
    flapping: str = ""
    restart_s: float = 0.0


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
        self._standby_lock = asyncio.Lock()

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
        processes = [process for each in self._components for process in (each.child, each.successor)]
        return [process.pid for process in processes if process and not process.has_exited()]

    def down(self) -> list[Down]:
        """Return the components that flap and wait for their next start."""
        now = time.monotonic()
        waiting = (one for one in self._components if one.child is None and one.flapping)
        return [Down(one.spec.component_id, one.flapping, max(0.0, one.restart_s - now)) for one in waiting]

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
        """Start a component when the components that it needs are ready, and restart it after each death, until the
        cluster has failed."""
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
            component.flapping, component.restart_s = decision.flapping, time.monotonic() + decision.delay_s
            if decision.flapping and self._ends_service(component.spec):
                return self._fail(decision.flapping)
            when = f"in {decision.delay_s:g} s" if decision.delay_s else "at once"
            self._notices.say(f"{decision.flapping or ended}; restarting it {when}", "bold yellow")
            await asyncio.sleep(decision.delay_s)
        return None

    def _ends_service(self, spec: ProcessSpec) -> bool:
        """Return True if the cluster cannot serve while this component flaps: all that could replace it flap, too."""
        others = [one for one in self._components if spec.kind and one.spec.kind == spec.kind and one.spec is not spec]
        return not spec.spare and all(one.flapping and not one.ready.is_set() for one in others)

    def _end_dependents(self, name: str) -> None:
        """Kill the components that need ``name``, which has just died. They would exit by themselves, but later, and so
        delay their restart."""
        for other in self._components:
            if name in other.spec.needs and (other.child is not None or other.starting):
                other.lost = name, time.monotonic() + LOST_NEED_S if other.spec.survives else math.inf
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
        """Run one process of a component from its start to its end; return the exit status."""
        spec = component.spec
        hidden_lines: deque[str] = deque(maxlen=MAX_KEPT_LINES)

        def show(line: str) -> None:
            if line.startswith(ERROR_PREFIX) and not self._was_ready:
                # The cluster's own error will contain this line.
                component.failed = line.removeprefix(ERROR_PREFIX)
                return
            self._notices.component(spec.component_id, line)

        forward = hidden_lines.append if spec.quiet else show
        component.child = child = await self._begin(component, forward)
        probing = asyncio.create_task(self._probe(component, child))
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
        for line in hidden_lines:
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

    async def _probe(self, component: _SupervisedProcess, child: ChildProcess) -> None:
        """Probe a new process until it is ready, and then whether it is alive. Kills it if it is not ready in time or
        hangs."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await component.spec.probe():  # noqa: ASYNC110  (there is no event to wait for)
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
        unanswered = 0
        while unanswered < MAX_UNANSWERED_PROBES:
            await asyncio.sleep(self._alive_interval_s)
            unanswered = 0 if await component.spec.alive() else unanswered + 1
        self._notices.say(
            f"{component.spec.component_id} hangs: no answer to {MAX_UNANSWERED_PROBES} probes", "bold red"
        )
        child.kill()

    async def _keep_standby(self, component: _SupervisedProcess) -> None:
        """Start a standby whenever the component has none and has been ready for a while. A dead standby is noticed and
        replaced only when it is needed."""
        while True:
            await component.ready.wait()
            await asyncio.sleep(self._standby_delay_s)
            async with self._standby_lock:
                if component.successor is None and component.ready.is_set():
                    await self._start_standby(component)

    async def _start_standby(self, component: _SupervisedProcess) -> None:
        """Start a standby. Returns when it waits for its turn, could not start or has ended, or after a timeout."""
        spec = component.spec
        try:
            component.successor = successor = await self._stand_by(spec.argv, spec.environ, self._launch)
        except OSError as error:
            if component.standby_error != str(error):
                component.standby_error = str(error)
                self._notices.say(f"{spec.component_id} has no standby: {error}", "bold yellow")
            return
        component.standby_error = ""
        ready = await at_most(self._start_timeout_s, successor.ready())
        if ready is False and component.successor is successor:
            self._notices.say(f"{spec.component_id} has no standby; it ended:", "bold yellow")
            for line in successor.output():
                self._notices.component(spec.component_id, line)

    async def _ready(self, predicate: Callable[[ProcessSpec], bool]) -> None:
        """Wait until all components whose specs fulfil ``predicate`` are ready."""
        for component in self._components:
            if predicate(component.spec):
                await component.ready.wait()

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_result(reason)


def describe_exit(code: int) -> str:
    """Describe an exit status in words: ``-9`` -> ``was ended by SIGKILL``."""
    names = {int(number): number.name for number in signal.Signals}
    return f"ended with status {code}" if code >= 0 else f"was ended by {names.get(-code, f'signal {-code}')}"
