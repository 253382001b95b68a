"""An event loop on a virtual clock that runs many simulated processes, in an order that a seed decides.

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

# Longest time that work on a thread takes, where it does not wait itself.
MAX_THREAD_S = 0.001
# Events without which no request can be under way; a run of more is one that never ends.
MAX_EVENTS = 2_000_000
# Tasks of a process between two looks for ended ones.
TASKS_BEFORE_SWEEP = 256


class ProcessState(Enum):
    """Whether a process runs."""

    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class Process:
    """A simulated process: a name, and what the loop has to do for it. Made by :meth:`VirtualLoop.process`."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.state = ProcessState.RUNNING
        self.ready: deque[SimHandle] = deque()
        self.listed = False
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        # All that were made and have not been seen to end: a task that nobody holds would be closed, and what it does
        # then, a killed process does not do.
        self.tasks: list[asyncio.Task[Any]] = []
        # Those that had died when they were seen to end, and that nobody had asked. Whoever holds them may ask yet;
        # where nobody holds them, asyncio tells of them.
        self.unseen: list[weakref.ref[asyncio.Task[Any]]] = []
        # Called once when the process dies.
        self.on_death: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        return self.state is not ProcessState.DEAD

    def __repr__(self) -> str:
        return self.name


PROCESS: ContextVar[Process] = ContextVar("process")


class SimExecutor:
    """Threads of the simulation's own (:mod:`pillion.simulator.sim_threads`)."""

    def submit(self, job: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Runs ``job(*args)``."""
        raise NotImplementedError


class SimHandle(asyncio.TimerHandle):
    """What is to be called, at a time or soon, in ``process``: asyncio's handle without what only debugging reads."""

    __slots__ = ("process",)

    def __init__(  # asyncio's would look each time whether the loop is debugged
        self, when: float, callback: Callable[..., object], args: Any, context: Context, process: Process
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self.process = process

    def cancel(self) -> None:
        """Has it never called; a timer is dropped when it falls due."""
        self._cancelled = True


class Stuck(Exception):  # noqa: N818  (a finding, not a mistake)
    """Nothing is left that could happen, or too much has happened."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """The loop. ``random`` decides the order. ``look`` is called behind event ``next_look`` and returns the number of
    the one behind which it is called next."""

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

    # -- processes

    def process(self, name: str) -> Process:
        """A new process, which runs nothing yet."""
        made = Process(name, next(self._numbers))
        self.processes.append(made)
        return made

    def spawn(self, process: Process, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Runs ``work`` as a task of ``process``."""
        return process.context.copy().run(self.create_task, work, name=name or None)

    def post(self, process: Process, call: Callable[..., object], *args: Any) -> None:
        """Has ``process`` call ``call(*args)`` when it runs next; nothing happens where it is dead."""
        self.call_soon(call, *args, context=process.context)

    def post_at(self, when: float, process: Process, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """:meth:`post` at a time of the virtual clock."""
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
        """Ends a process: nothing of it runs any more, no cleaning up either."""
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

    # -- what asyncio calls

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
    ) -> asyncio.Handle:
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
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
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
        """Runs ``func`` a moment later, between two events, or on the simulation's threads. One that returns a
        coroutine is one that waits: that is awaited."""
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
        """From now on ``fd`` is readable."""
        self._readable.add(fd)
        self._wake_reader(fd)

    def _wake_reader(self, fd: int) -> None:
        if fd in self._readers and not self._closed:
            context, callback, args = self._readers[fd]
            self.call_soon(callback, *args, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keeps what a callback raised, or what nobody awaited: it is a finding."""
        self.failures.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)

    def unseen_deaths(self) -> list[dict[str, Any]]:
        """What tasks of living processes have died of, where nobody has asked for it until now; each is told once.

        asyncio tells it when the last holder lets such a task go; whoever keeps its tasks until it stops holds them for
        as long as a world is looked at. A killed process might have asked later.
        """
        return [
            {"message": f"task {task.get_name()} of {process.name} died unseen:", "exception": task.exception()}
            for process in self.processes
            if process.alive
            for task in (*process.tasks, *(one() for one in process.unseen))
            if task is not None and _unseen(task)
        ]

    async def shutdown_asyncgens(self) -> None:
        """Nothing: generators belong to their tasks."""

    # -- running

    def run(self, until: asyncio.Future[Any]) -> None:
        """Runs events until ``until`` is done. Raises Stuck where it never will be."""
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
        if handle._cancelled:
            return
        self.events += 1
        try:
            handle._context.run(handle._callback, *handle._args)
        except (KeyboardInterrupt, SystemExit, Stuck):
            raise
        except BaseException as error:  # noqa: BLE001  (as asyncio's handles do)
            self.call_exception_handler({"message": f"in {handle._callback!r}", "exception": error})
        if self.events >= self.next_look:
            if self.events > MAX_EVENTS or self.look is None:
                raise Stuck(f"{MAX_EVENTS} events, and no end")
            self.next_look = self.look()

    def _jump(self) -> None:
        """Moves the clock to the next timer, and puts all timers that are due then into their lines."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Stuck("nothing is left to happen")
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            process = timer.process
            if not timer._cancelled and process.state is not ProcessState.DEAD:
                process.ready.append(timer)
                if not process.listed and process.state is ProcessState.RUNNING:
                    process.listed = True
                    self._runnable.append(process)

    def close(self) -> None:
        """Ends everything; what tasks do while they are closed has no effect."""
        if self._closed:
            return
        self._closed = True
        self._timers.clear()
        self._runnable.clear()
        asyncio._set_running_loop(self)
        try:
            for process in self.processes:
                process.ready.clear()
                tasks, process.tasks = process.tasks, []
                for task in tasks:
                    if not task.done():
                        task._log_destroy_pending = False  # type: ignore[attr-defined]
                        _close(task.get_coro())
        finally:
            asyncio._set_running_loop(None)


def _unseen(task: asyncio.Task[Any]) -> bool:
    """Whether it ended with an exception that nobody has asked for. asyncio has no public way to ask that."""
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
    """Closes a coroutine; its ``finally`` blocks may await, which counts for nothing any more."""
    with contextlib.suppress(BaseException):
        work.close()
