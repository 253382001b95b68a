"""Runs many simulated processes on an event loop with a virtual clock, in an order that a seed decides.

    a handle's context --names--> its process      running: waits in the process's line
                                                   paused:  waits there until the process goes on (SIGSTOP, SIGCONT)
                                                   dead:    is dropped (SIGKILL)

    run: while a line has handles   -> a process, by the seed, runs its first one; no time passes
         while none has             -> the clock jumps to the next timer

Each process keeps the order that asyncio gives it. Between processes any order is possible, and the seed chooses one.
What runs in a task belongs to the process in whose context the task was made, however deep the calls.
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

# Work that is run on a thread takes at most this long, unless the work itself waits.
MAX_THREAD_S = 0.001
# After this many events without a request under way, the run counts as one that never ends.
MAX_EVENTS = 2_000_000
# Each time a process has made this many tasks, the loop forgets all its tasks that have ended.
TASKS_BEFORE_SWEEP = 256


class ProcessState(Enum):
    """Names the states of a simulated process: it runs, is paused, or is dead."""

    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class Process:
    """Represents a simulated process: its name, and the calls that the loop has to make for it.
    :meth:`VirtualLoop.process` makes it."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.state = ProcessState.RUNNING
        self.ready: deque[SimHandle] = deque()
        self.listed = False
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        # These are all tasks that were made and have not been seen to end. A task that nobody holds would be closed,
        # and would then do what a killed process does not do.
        self.tasks: list[asyncio.Task[Any]] = []
        # These tasks had died when they were seen to end, and nobody had asked for their exception. Somebody who holds
        # them may still ask; where nobody holds them, asyncio reports them.
        self.unseen: list[weakref.ref[asyncio.Task[Any]]] = []
        # These functions are called once when the process dies.
        self.on_death: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        return self.state is not ProcessState.DEAD

    def __repr__(self) -> str:
        return self.name


PROCESS: ContextVar[Process] = ContextVar("process")


class SimExecutor:
    """Runs work on threads of the simulation's own (:mod:`lab.simulator.sim_threads`)."""

    def submit(self, job: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Runs ``job(*args)`` on a thread of the simulation."""
        raise NotImplementedError


class SimHandle:
    """Holds a call that is to be made in ``process``, soon or at a time, with the public methods of asyncio's
    handles."""

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
        """Keeps the call from being made; a timer is dropped when it falls due."""
        self.is_cancelled = True

    def cancelled(self) -> bool:
        """Returns whether the call was cancelled, so that the loop never makes it."""
        return self.is_cancelled

    def when(self) -> float:
        """Returns the time of the virtual clock at which the call is made."""
        return self.when_s

    def get_context(self) -> Context:
        """Returns the context in which the call is made."""
        return self.context


class Stuck(Exception):  # noqa: N818  (a finding, not a mistake)
    """Says that no event is left that could happen, or that too many have happened."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs all processes on one clock. ``random`` decides the order. ``look`` is called after event ``next_look`` and
    returns the number of the event after which it is called next."""

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
        """Makes a process, which runs nothing yet."""
        made = Process(name, next(self._numbers))
        self.processes.append(made)
        return made

    def spawn(self, process: Process, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Runs ``work`` as a task of ``process``."""
        return process.context.copy().run(self.create_task, work, name=name or None)

    def post(self, process: Process, call: Callable[..., object], *args: Any) -> None:
        """Makes ``process`` call ``call(*args)`` when it runs next; nothing happens where it is dead."""
        self.call_soon(call, *args, context=process.context)

    def post_at(self, when: float, process: Process, call: Callable[..., object], *args: Any) -> SimHandle:
        """Makes ``process`` call ``call(*args)``, as :meth:`post` does, at the time ``when`` of the virtual clock."""
        return self.call_at(when, call, *args, context=process.context)

    def pause(self, process: Process) -> None:
        """Stops a process where it stands. Its timers fall due, and it notices when it goes on."""
        if process.state is ProcessState.RUNNING:
            process.state = ProcessState.PAUSED
            self._unlist(process)

    def resume(self, process: Process) -> None:
        """Lets a paused process go on."""
        if process.state is ProcessState.PAUSED:
            process.state = ProcessState.RUNNING
            if process.ready:
                self._list(process)

    def kill(self, process: Process) -> None:
        """Ends a process: none of its code runs any more, not even to clean up."""
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

    # The methods from here on are those that asyncio calls.

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
        """Runs ``func`` a moment later, between two events, or on the simulation's threads. A ``func`` that waits
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
        """Calls ``callback`` once when ``fd``, a number of the simulation's own, becomes readable."""
        self._readers[fd] = copy_context(), callback, args
        if fd in self._readable:
            self._wake_reader(fd)

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def readable(self, fd: int) -> None:
        """Makes ``fd`` readable from now on."""
        self._readable.add(fd)
        self._wake_reader(fd)

    def _wake_reader(self, fd: int) -> None:
        if fd in self._readers and not self._closed:
            context, callback, args = self._readers[fd]
            self.call_soon(callback, *args, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keeps an exception that a callback raised, or that nobody awaited: it is a finding."""
        self.failures.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)

    def unseen_deaths(self) -> list[dict[str, Any]]:
        """Returns the exceptions that ended tasks of living processes, where nobody has asked for them until now; each
        is returned once.

        asyncio reports such an exception only when nobody refers to the task any more, and components keep references
        to their tasks until they stop. Tasks of killed processes do not count: the process might have asked later.
        """
        return [
            {"message": f"task {task.get_name()} of {process.name} died unseen:", "exception": task.exception()}
            for process in self.processes
            if process.alive
            for task in (*process.tasks, *(one() for one in process.unseen))
            if task is not None and _unseen(task)
        ]

    async def shutdown_asyncgens(self) -> None:
        """Does nothing, because generators belong to their tasks."""

    def run(self, until: asyncio.Future[Any]) -> None:
        """Runs events until the future ``until`` is done. Raises Stuck where it never will be."""
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
        """Moves the clock to the next timer, and puts all timers that are due then into their lines."""
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
        """Ends all tasks; what they do while they are closed has no effect."""
        if self._closed:
            return
        self._closed = True
        self._timers.clear()
        self._runnable.clear()
        asyncio._set_running_loop(self)
        try:
            # What a task does while it is closed may make further tasks, which are closed before they begin.
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
    """Returns whether a task ended with an exception that nobody has asked for, which asyncio has no public way to
    tell."""
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
    """Closes a coroutine; where its ``finally`` blocks await something, that is ignored."""
    with contextlib.suppress(BaseException):
        work.close()
