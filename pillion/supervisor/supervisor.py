"""Keeps a set of processes alive: it starts them in order, restarts those that die, stops them in order, and leaves
none.

Life of a component, tended by a task of its own:

    waiting ----------> starting ---------> ready ---------> dead ---> waiting (after a delay, for what it needs)
     lower levels        spawned, probed      the probe passed; |
     are not ready       until it is ready    killed when it    '----> the whole cluster stops: it flaps, and so does
                                              does not answer for long   everything that would serve in its place

A component with a standby has its next process ready (:mod:`pillion.supervisor.standbys`): one at a time they are
started when the cluster is ready, so that they take no core from a start that somebody waits for.

A task of the supervisor's own that ends by an exception is a defect: it is said, and the task begins again, so that no
component is left alone.

Before the cluster was ready once, a death is final: what cannot start will not start better the third time. From then
on the cluster goes on with what lives as long as that serves, and tries what flaps again and again, ever more rarely.
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

# A function of this type starts a process that stands by, from its command line, its environment, and the function that
# starts processes.
StandBy = Callable[[Sequence[str], Mapping[str, str], Launch], Awaitable[Successor]]

# Most of this time is for loading a large model.
START_TIMEOUT_S = 600.0
PROBE_INTERVAL_MS = 50
STOP_GRACE_S = 5.0
# A component that leaves this many probes in a row unanswered is taken to hang. Each probe may take a second, so this
# takes some twenty seconds.
ALIVE_INTERVAL_S = 1.0
MAX_SILENCES = 10
# A standby is started when its component has been ready for this long, because requests that waited for the component
# come first. The supervisor also looks this often whether there is a standby.
STANDBY_DELAY_S = 2.0
# A component that ends this soon after one that it needs has died ends because of that death: it may take a while to
# notice what it lost.
BEHIND_S = 30.0
# A task of the supervisor's that a defect has ended begins again after this time.
DEFECT_DELAY_S = 1.0
# A command of Pillion's that fails ends with one line, which begins like this.
FAILED = "pillion: "


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """Describes one process to keep.

    Attributes:
        level: components of a lower level are ready before this one starts, and stop after it.
        environ: the child's whole environment.
        needs: components that must be ready before this one is started again, and with whose death it is killed; the
            first start waits for all lower levels.
        survives: whether it goes on when a component that it needs dies, with that component's next process.
        probe: returns whether the component is ready; it is called again and again until that is so, and must not
            raise.
        quiet: whether the output is kept back, and shown only where the component dies by itself.
        drain_s: time to stop beside the usual grace, for the requests that are under way.
        alive: returns whether the component answers at all; it is called while the component runs, and must not raise.
            None: it is not called.
        standby: whether its next process is started ahead, where that is possible; the component's program must support
            it.
        kind: components of one kind serve in each other's place; "" for the only component of its kind.
        spare: whether requests are served without any component of its kind.
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
    """Says that a component flaps and is not started now: why, and for how many more seconds."""

    component_id: str
    why: str
    left_s: float


@dataclass(slots=True)
class _SupervisedProcess:
    """Holds the state of one component's process. ``child`` is None before the first start and between a death and the
    next start; ``successor`` is the standby, None while there is none. ``failed`` is why the process could not start,
    in its own words. ``lost`` names the component that it needs and that died while it lived, and the time until which
    its own end is put down to that death; ``starting`` is true from the order to start it until its process is known.
    ``unaided`` is why the last standby could not be started. ``flapping`` is
    empty unless the component flapped when it died last, and ``begins_s`` is when it is started again."""

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
    """Keeps the processes of ``specs`` alive. ``launch`` starts them, by default ChildProcess.start, and
    ``stand_by`` starts standbys of those that have one.

    Use: ``await start()``, then ``await failed()`` as long as you like, then ``await stop()``, always.
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
        """Start all components, and return once every one is ready. Raises Unavailable, which names the component
        that is not, or ConfigError where that component refused its flags; call :meth:`stop` then, too."""
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
        """Stop all components, highest level first. Returns when every process is gone; idempotent."""
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
        """Send SIGKILL to one component, which is then started again as after any death. Returns False where it does
        not run."""
        child = next((one.child for one in self._components if one.spec.component_id == component_id), None)
        if child:
            child.kill()
        return child is not None

    def living(self) -> list[int]:
        """Return the process groups that still live; none of them does after :meth:`stop`."""
        every = [one for component in self._components for one in (component.child, component.successor)]
        return [process.pid for process in every if process and not process.gone()]

    def down(self) -> list[Down]:
        """Return the components that flap and wait for their next start."""
        now = time.monotonic()
        waiting = (one for one in self._components if one.child is None and one.flapping)
        return [Down(one.spec.component_id, one.flapping, max(0.0, one.begins_s - now)) for one in waiting]

    async def _never_ending(
        self, component: _SupervisedProcess, work: Callable[[_SupervisedProcess], Awaitable[None]]
    ) -> None:
        """Do ``work`` for a component until it returns, and again where an exception ends it."""
        while True:
            try:
                return await work(component)
            except Exception as error:
                task = asyncio.current_task()
                name = component.spec.component_id if task is None else task.get_name()
                log.exception("the supervisor's task for %s failed", name)
                self._notices.say(
                    f"a defect of the supervisor's, which begins again with {name}: {error!r}", "bold red"
                )
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
                # The component could not go on without what it needs, so its death does not count as its own.
                self._notices.say(f"{ended}; starting it again after {lost}", "bold yellow")
                continue
            decision = self._policy.died(name, code, time.monotonic())
            component.flapping, component.begins_s = decision.flapping, time.monotonic() + decision.delay_s
            if decision.flapping and self._ends_service(component.spec):
                return self._fail(decision.flapping)
            when = f"in {decision.delay_s:g} s" if decision.delay_s else "at once"
            self._notices.say(f"{decision.flapping or ended}; starting it again {when}", "bold yellow")
            await asyncio.sleep(decision.delay_s)
        return None

    def _ends_service(self, spec: ProcessSpec) -> bool:
        """Return whether no component serves, or is about to, in the place of one that flaps."""
        others = [one for one in self._components if spec.kind and one.spec.kind == spec.kind and one.spec is not spec]
        return not spec.spare and all(one.flapping and not one.ready.is_set() for one in others)

    def _end_dependents(self, name: str) -> None:
        """Kill the components that need one that has just died. It would end by itself, but later, and its next
        process can start only after its end."""
        for other in self._components:
            if name in other.spec.needs and (other.child is not None or other.starting):
                # The end of this component may be noticed only when the one it needs is ready again.
                other.lost = name, time.monotonic() + BEHIND_S if other.spec.survives else math.inf
                # One that is being started is killed as soon as its process is known.
                if not other.spec.survives and other.child is not None:
                    other.child.kill()

    def _lost_need(self, component: _SupervisedProcess) -> str:
        """Return the component whose death ended this one's process; "" where it ended for another reason."""
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
                # The error with which the whole cluster ends has these words, so the line is not printed here as well.
                component.failed = line.removeprefix(FAILED)
                return
            self._notices.component(spec.component_id, line)

        forward = kept.append if spec.quiet else show
        component.child = child = await self._begin(component, forward)
        probing = asyncio.create_task(self._until_ready(component, child))
        try:
            code = await child.wait()
        except Exception:
            # A process that nobody tends must not go on beside the one that is started for it.
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
        """Start a component's process, or lets its standby begin. Raises OSError where the program does not start."""
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
        """Keep a standby for the component whenever the component has been ready for a while. The death of a waiting
        standby is noticed when the standby is needed; then it is replaced."""
        while True:
            await component.ready.wait()
            await asyncio.sleep(self._standby_delay_s)
            async with self._one_standby:
                # The component may have died while it waited for its turn, and then starts without a standby.
                if component.successor is None and component.ready.is_set():
                    await self._start_standby(component)

    async def _start_standby(self, component: _SupervisedProcess) -> None:
        """Return when the standby waits, cannot be started or has ended, or after the time for a start."""
        spec = component.spec
        try:
            component.successor = successor = await self._stand_by(spec.argv, spec.environ, self._launch)
        except OSError as error:
            # The start of the standby is tried again and again, but the same error is printed only once.
            if component.unaided != str(error):
                component.unaided = str(error)
                self._notices.say(f"{spec.component_id} has no standby: {error}", "bold yellow")
            return
        component.unaided = ""
        waits = await at_most(self._start_timeout_s, successor.ready())
        if waits is False and component.successor is successor:
            self._notices.say(f"{spec.component_id} has no standby, it ended:", "bold yellow")
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
