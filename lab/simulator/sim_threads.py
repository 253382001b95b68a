"""Threads of simulated processes: blocking production code runs in real threads, one at a time, while the event loop
waits.

    submit --> waits for a thread of its pool --> runs --park(seconds)--> waits on the virtual clock --> runs --> done
                                                    '--its process dies--> unwound at its next wait

A thread of a paused process waits with it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from lab.simulator.virtual_loop import PROCESS, Process, SimExecutor, VirtualLoop

THREAD_NAME = "simulated"
# Latency until a thread begins a job.
START_S = 0.0002


class ThreadKilledError(BaseException):
    """Unwinds a thread of a dead process."""


class SimThread:
    """Represents a thread of ``process`` that runs ``work`` once."""

    current = threading.local()

    def __init__(self, loop: VirtualLoop, process: Process, work: Callable[[], None]) -> None:
        self._loop = loop
        self._process = process
        self._work = work
        self._killed = False
        self._over = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, name=THREAD_NAME, daemon=True)
        process.on_death.append(self.kill)
        loop.call_later(START_S, self._begin, context=process.context)

    def park(self, seconds: float) -> None:
        """Block the calling thread, which is this one, for a time of the virtual clock."""
        self._loop.call_later(seconds, self._switch_in, context=self._process.context)
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise ThreadKilledError

    def kill(self) -> None:
        """Unwind the thread, or keep it from beginning. Does nothing if it has ended."""
        self._killed = True
        if self._thread.is_alive():
            self._switch_in()

    def _begin(self) -> None:
        if not self._killed:
            self._thread.start()
            self._back.acquire()

    def _switch_in(self) -> None:
        if not self._over:
            self._go.release()
            self._back.acquire()

    def _main(self) -> None:
        SimThread.current.thread = self
        try:
            self._process.context.copy().run(self._work)
        except ThreadKilledError:
            pass
        finally:
            self._over = True
            self._back.release()


def park(seconds: float) -> None:
    """Block the calling simulated thread; no time passes outside of one."""
    thread = getattr(SimThread.current, "thread", None)
    if thread is not None:
        thread.park(seconds)


class SimThreadPool(SimExecutor):
    """Replaces ThreadPoolExecutor for the process that makes it; started threads are added to ``threads``."""

    def __init__(self, loop: VirtualLoop, threads: list[SimThread], workers: int) -> None:
        self._loop = loop
        self._threads = threads
        self._process = PROCESS.get()
        self._workers = workers
        self._busy = 0
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``job(*args)`` when a thread is free."""
        done: Future[Any] = Future()
        self._jobs.append((done, lambda: job(*args)))
        if self._busy < self._workers:
            self._busy += 1
            self._threads.append(SimThread(self._loop, self._process, self._work_off))
        return done

    def map(self, job: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Run the job for each item, on the caller's thread."""
        return map(job, items)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: running work ends with its process."""

    def __enter__(self) -> SimThreadPool:
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()

    def _work_off(self) -> None:
        try:
            while self._jobs:
                done, job = self._jobs.popleft()
                if not done.set_running_or_notify_cancel():
                    continue
                try:
                    done.set_result(job())
                except Exception as error:  # noqa: BLE001  (as a thread hands it on)
                    done.set_exception(error)
        finally:
            self._busy -= 1
