"""An event loop with a virtual clock that runs many simulated processes in an order that a seed decides.

    a handle's context --names--> its process      running: queued for the process
                                                   paused:  queued until the process continues (SIGSTOP, SIGCONT)
                                                   dead:    dropped (SIGKILL)

    run: while queues have handles  -> a process, by the seed, runs its first one; no time passes
         while none has             -> the clock jumps to the next timer

Within a process the order is asyncio's; between processes any order is possible, and the seed chooses one. Code in a
task belongs to the process in whose context the task was made, however deep the calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import heapq
import inspect
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")

# Longest work on a thread, unless the work itself waits.
MAX_THREAD_S = 0.001
# Events without a running request after which a run counts as endless.
MAX_EVENTS = 2_000_000
# Tasks made by a process between two sweeps of its finished tasks.
TASKS_BEFORE_SWEEP = 256


class ProcessState(Enum):
    """States of a simulated process."""

    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class Process:
    """A simulated process: its name and pending calls. Made by :meth:`VirtualLoop.process`."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.state = ProcessState.RUNNING
        self.ready: deque[SimHandle] = deque()
        self.listed = False
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        # Tasks not seen to end. An unreferenced task would be closed, and its cleanup would run, unlike after a kill.
        self.tasks: list[asyncio.Task[Any]] = []
        # Tasks that ended with an exception not yet retrieved. An owner may still do so; without one, asyncio reports
        # them.
        self.unseen: list[weakref.ref[asyncio.Task[Any]]] = []
        # Called once at the death of the process.
        self.on_death: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        return self.state is not ProcessState.DEAD

    def __repr__(self) -> str:
        return self.name


PROCESS: ContextVar[Process] = ContextVar("process")


class SimExecutor:
    """Runs work on the simulation's threads (:mod:`lab.simulator.sim_threads`)."""

    def submit(self, job: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        raise NotImplementedError


class SimHandle:
    """A call in ``process``, soon or at a time, with the public methods of asyncio's handles."""

    __slots__ = ("args", "call", "context", "is_cancelled", "process", "when_s")

    def __init__(
        self, when_s: float, call: Callable[..., object], args: Any, context: Context, process: Process
    ) -> None:
        self.when_s = when_s
        self.call = call
        self.args = args
        self.context = context
        self.process = process
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancel the call; a timer is dropped when it is due."""
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        """Return the virtual time of the call."""
        return self.when_s

    def get_context(self) -> Context:
        return self.context


class Stuck(Exception):  # noqa: N818  (a finding, not a mistake)
    """No event is left, or too many have happened."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """All processes on one clock. ``random`` decides the order. ``look`` is called after event ``next_look`` and
    returns the number of the event to be called after next."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.events = 0
        self.look: Callable[[], int] | None = None
        self.next_look = MAX_EVENTS
        self.failures: list[dict[str, Any]] = []
        self._now = 1000.0
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._sequence = itertools.count()
        self._numbers = itertools.count()
        self._runnable: list[Process] = []
        self._closed = False
        self._readers: dict[int, Any] = {}
        self._readable: set[int] = set()
        self.processes: list[Process] = []
        self.outside = self.process("world")

    def process(self, name: str) -> Process:
        """Make a process, which runs nothing yet."""
        made = Process(name, next(self._numbers))
        self.processes.append(made)
        return made

    def spawn(self, process: Process, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Run ``work`` as a task of ``process``."""
        return process.context.copy().run(self.create_task, work, name=name or None)

    def post(self, process: Process, call: Callable[..., object], *args: Any) -> None:
        """Make ``process`` call ``call(*args)`` when it runs next; nothing happens if it is dead."""
        self.call_soon(call, *args, context=process.context)

    def post_at(self, when: float, process: Process, call: Callable[..., object], *args: Any) -> SimHandle:
        """Make ``process`` call ``call(*args)`` at the virtual time ``when``."""
        return self.call_at(when, call, *args, context=process.context)

    def pause(self, process: Process) -> None:
        """Pause a process. Its timers expire, which it notices when it continues."""
        if process.state is ProcessState.RUNNING:
            process.state = ProcessState.PAUSED
            self._unlist(process)

    def resume(self, process: Process) -> None:
        """Continue a paused process."""
        if process.state is ProcessState.PAUSED:
            process.state = ProcessState.RUNNING
            if process.ready:
                self._list(process)

    def kill(self, process: Process) -> None:
        """Kill a process: none of its code runs any more, not even cleanup."""
        if process.alive:
            self._unlist(process)
            process.state = ProcessState.DEAD
            process.ready.clear()
            calls, process.on_death = process.on_death, []
            for call in calls:
                call()

    def _list(self, process: Process) -> None:
        if not process.listed:
            process.listed = True
            self._runnable.append(process)

    def _unlist(self, process: Process) -> None:
        if process.listed:
            process.listed = False
            self._runnable.remove(process)

    # Called by asyncio:

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        if context is None:
            context = copy_context()
        process = context.get(PROCESS, self.outside)
        handle = SimHandle(0.0, callback, args, context, process)
        state = process.state
        if state is not ProcessState.DEAD and not self._closed:
            process.ready.append(handle)
            if not process.listed and state is ProcessState.RUNNING:
                process.listed = True
                self._runnable.append(process)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        if context is None:
            context = copy_context()
        timer = SimHandle(when, callback, args, context, context.get(PROCESS, self.outside))
        if not self._closed:
            heapq.heappush(self._timers, (when, next(self._sequence), timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        process = PROCESS.get(self.outside) if context is None else context.get(PROCESS, self.outside)
        tasks = process.tasks
        tasks.append(task)
        if not len(tasks) % TASKS_BEFORE_SWEEP:
            process.unseen += [weakref.ref(one) for one in tasks if _unseen(one)]
            process.tasks = [one for one in tasks if not one.done()]
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run ``func`` a moment later, between two events, or on the simulation's threads. A ``func`` that waits
        returns a coroutine, which is awaited."""
        if isinstance(executor, SimExecutor):
            return asyncio.wrap_future(executor.submit(func, *args), loop=self)
        done = self.create_future()

        def work() -> None:
            if done.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001  (as a thread hands it on)
                done.set_exception(error)
                return
            if inspect.iscoroutine(result):
                waiting = self.create_task(result)
                waiting.add_done_callback(functools.partial(_hand_on, done))
            else:
                done.set_result(result)

        self.call_later(self.random.random() * MAX_THREAD_S, work)
        return done

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        """Call ``callback`` once when ``fd``, a number of the simulation, becomes readable."""
        self._readers[fd] = copy_context(), callback, args
        if fd in self._readable:
            self._wake_reader(fd)

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def readable(self, fd: int) -> None:
        self._readable.add(fd)
        self._wake_reader(fd)

    def _wake_reader(self, fd: int) -> None:
        if fd in self._readers and not self._closed:
            context, callback, args = self._readers[fd]
            self.call_soon(callback, *args, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an exception raised by a callback or never awaited as a finding."""
        self.failures.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)

    def unseen_deaths(self) -> list[dict[str, Any]]:
        """Return the exceptions of tasks of living processes that were never retrieved, each once.

        asyncio reports such an exception only when the task is unreferenced, and components reference their tasks until
        they stop. Tasks of killed processes do not count: the process might have retrieved it later.
        """
        return [
            {"message": f"task {task.get_name()} of {process.name} died unseen:", "exception": task.exception()}
            for process in self.processes
            if process.alive
            for task in (*process.tasks, *(one() for one in process.unseen))
            if task is not None and _unseen(task)
        ]

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: generators belong to their tasks."""

    def run(self, until: asyncio.Future[Any]) -> None:
        """Run events until the future ``until`` is done. Raises Stuck if it never will be."""
        asyncio._set_running_loop(self)
        try:
            while not until.done():
                if self._runnable:
                    self._run_one()
                else:
                    self._jump()
        finally:
            asyncio._set_running_loop(None)

    def _run_one(self) -> None:
        runnable = self._runnable
        count = len(runnable)
        index = int(self.random.random() * count) if count > 1 else 0
        process = runnable[index]
        handle = process.ready.popleft()
        if not process.ready:
            process.listed = False
            runnable[index] = runnable[-1]
            runnable.pop()
        if handle.is_cancelled:
            return
        self.events += 1
        try:
            handle.context.run(handle.call, *handle.args)
        except (KeyboardInterrupt, SystemExit, Stuck):
            raise
        except BaseException as error:  # noqa: BLE001  (as asyncio's handles do)
            self.call_exception_handler({"message": f"in {handle.call!r}", "exception": error})
        if self.events >= self.next_look:
            if self.events > MAX_EVENTS or self.look is None:
                raise Stuck(f"{MAX_EVENTS} events, and no end")
            self.next_look = self.look()

    def _jump(self) -> None:
        """Advance the clock to the next timer and queue all timers that are due."""
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Stuck("nothing is left to happen")
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            process = timer.process
            if not timer.is_cancelled and process.state is not ProcessState.DEAD:
                process.ready.append(timer)
                if not process.listed and process.state is ProcessState.RUNNING:
                    process.listed = True
                    self._runnable.append(process)

    def close(self) -> None:
        """End all tasks; their cleanup has no effect."""
        if self._closed:
            return
        self._closed = True
        self._timers.clear()
        self._runnable.clear()
        asyncio._set_running_loop(self)
        try:
            # Cleanup may make further tasks, which are closed before they begin.
            while left := [process for process in self.processes if process.tasks or process.ready]:
                for process in left:
                    process.ready.clear()
                    tasks, process.tasks = process.tasks, []
                    for task in tasks:
                        if not task.done():
                            task._log_destroy_pending = False  # type: ignore[attr-defined]
                            _close(task.get_coro())
        finally:
            asyncio._set_running_loop(None)


def _unseen(task: asyncio.Task[Any]) -> bool:
    """Return whether a task's exception was never retrieved (asyncio has no public API for this)."""
    return task._log_traceback


def _hand_on(done: asyncio.Future[Any], waited: asyncio.Task[Any]) -> None:
    if done.done():
        return
    if waited.cancelled():
        done.cancel()
    elif (error := waited.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(waited.result())


def _close(work: Any) -> None:
    """Close a coroutine, ignoring awaits in its ``finally`` blocks."""
    with contextlib.suppress(BaseException):
        work.close()
