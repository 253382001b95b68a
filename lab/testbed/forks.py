"""Starts components and whole clusters as a supervisor starts components: as forks of one process that has imported
what all of them need.

    shared_forks(environ) --first start()--> the fork server imports, once --start()--> a process, watched as a Popen is
                                                  '--this process ends, or stop()--> ends

Ten components that each import torch take 20 s of a core before the first one does anything. The fork server is the
product's own (:mod:`pillion.supervisor.standbys.fork_server`), on an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from lab.testbed.conditions import WITHIN_S
from lab.testbed.faults.board import hooked
from lab.testbed.nested_forks import BEGIN, GIVEN, PROGRAM, STARTER, read_by_imports
from pillion.supervisor.child_process import ChildProcess, child_environ
from pillion.supervisor.component_process import preloaded_modules
from pillion.supervisor.lifeline import KERNEL_TIES, adopt_orphans
from pillion.supervisor.local_cluster import compute_environ
from pillion.supervisor.standbys.fork_server import ForkServer

T = TypeVar("T")
_PR_SET_CHILD_SUBREAPER = 36
# A fork server of this tree imports these modules.
MODULES = (*preloaded_modules("cpu"), "lab.testbed.nested_forks:install=")


class ForkedComponent:
    """Represents a component that a fork server has started."""

    def __init__(self, child: ChildProcess, ended: Future[int]) -> None:
        self._child, self._ended = child, ended

    @property
    def pid(self) -> int:
        """Gives the process id."""
        return self._child.pid

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal, or None while the process runs or its log is being
        written."""
        return self._ended.result() if self._ended.done() else None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status when the process has ended. Raises TimeoutExpired after ``timeout`` seconds."""
        try:
            return self._ended.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None

    def terminate(self) -> None:
        """Sends SIGTERM, where the process has not ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, where the process has not ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, where the process has not ended."""
        if self._child.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkedChild:
    """Represents a process for coroutines, with the methods that they use of a :class:`ChildProcess`. That belongs to
    another event loop."""

    def __init__(self, child: ChildProcess, loop: asyncio.AbstractEventLoop) -> None:
        self._child, self._loop = child, loop

    @property
    def pid(self) -> int:
        """Gives the process id."""
        return self._child.pid

    @property
    def running(self) -> bool:
        """Says whether the process has not ended."""
        return self._child.running

    def kill(self) -> None:
        """Sends SIGKILL to the process and what it has started."""
        self._child.kill()

    async def wait(self) -> int:
        """Returns the exit status, negative for a signal, when the process has ended."""
        return await self._there(self._child.wait())

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, and SIGKILL after ``grace_s``; returns when the process is gone."""
        await self._there(self._child.stop(grace_s))

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Makes this process the parent of the orphans among its descendants, until the block ends."""
    adopt_orphans()
    try:
        yield
    finally:
        if KERNEL_TIES:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# This process's fork servers, by the folder and the environment in which they import.
_shared: dict[tuple[object, ...], Forks] = {}
_sharing = threading.Lock()
# Only one process starts at a time, for a process either adopts orphans or does not.
_starting = threading.Lock()


def shared_forks(environ: Mapping[str, str], *, packages: bool = False) -> Forks:
    """Returns this process's fork server for processes whose environment imports read as this one; it lasts as long as
    this process. With ``packages`` the environment leads to another version of Pillion, whose own fork server it is
    then."""
    key = (os.getcwd(), *sorted(read_by_imports(environ).items()))
    with _sharing:
        if key not in _shared:
            _shared[key] = Forks(environ, _preloaded(environ)) if packages else Forks(hooked(environ))
        return _shared[key]


def component_forks() -> Forks:
    """Returns the fork server for processes whose imports may read of the environment what components of this process's
    clusters read."""
    return shared_forks(child_environ(os.environ, "") | compute_environ(1))


def _preloaded(environ: Mapping[str, str]) -> list[str]:
    """Returns the modules that the version of Pillion in this environment imports before it forks components."""
    program = "from pillion.supervisor.component_process import preloaded_modules as of; print(*of('cpu'))"
    return subprocess.check_output([sys.executable, "-c", program], env=environ, text=True).split()


class Forks:
    """Starts components by one fork server, which imports in the environment ``environ``. A component's own environment
    may differ from it in variables that no import reads. It imports ``modules``."""

    def __init__(self, environ: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        self.environ = dict(environ)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forks", daemon=True)
        self._thread.start()
        # The server would write here why a component was started without it; the component's own log shows that.
        self._server = ForkServer(modules, self.environ, lambda line: None)
        self._call(self._begin())

    def start(self, argv: Sequence[str], environ: Mapping[str, str], log: pathlib.Path) -> ForkedComponent:
        """Starts ``python -m pillion ...``; its output is added to ``log``. Raises OSError where it does not start."""
        log.touch()

        def forward(line: str) -> None:
            with log.open("a") as out:
                out.write(f"{line}\n")

        return self._watched(self._launch(argv, environ, forward))

    def program(
        self,
        module: str,
        words: Sequence[str],
        environ: Mapping[str, str],
        output: int,
        errors: int,
        given: Sequence[int] = (),
        *,
        starts_clusters: bool = False,
    ) -> ForkedComponent:
        """Starts ``python -m module words...`` with these descriptors for its output and errors. A word may be the
        number of one of the descriptors ``given``, and is that of the program's duplicate then. A program that
        ``starts_clusters`` starts them as forks, too. Raises OSError where it does not start."""
        ours, its_own = socket.socketpair()
        with ours, its_own:
            socket.send_fds(ours, [BEGIN], [output, errors, *given])
            numbers = {str(number): f"{GIVEN}{place}" for place, number in enumerate(given)}
            kind, named = STARTER if starts_clusters else PROGRAM, (numbers.get(word, word) for word in words)
            argv = (sys.executable, "-m", "pillion", kind, module, *named)
            return self._watched(self._launch(argv, environ, lambda line: None, its_own.fileno()))

    def _watched(self, child: ChildProcess) -> ForkedComponent:
        return ForkedComponent(child, asyncio.run_coroutine_threadsafe(child.wait(), self._loop))

    async def launch(
        self, argv: Sequence[str], environ: Mapping[str, str], forward: Callable[[str], None]
    ) -> ForkedChild:
        """Starts ``python -m pillion ...`` as a fork, or any other program; ``forward`` gets each line of its output,
        on another thread. Raises OSError where it does not start."""
        return ForkedChild(await asyncio.to_thread(self._launch, argv, environ, forward), self._loop)

    def _launch(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        forward: Callable[[str], None],
        stdin: int = asyncio.subprocess.DEVNULL,
    ) -> ChildProcess:
        # A component's parent is a fork of the fork server that ends at once, and then this process adopts the
        # component. This process adopts no other orphans: nothing here would reap them, and a zombie looks alive to
        # tests that wait for a process's end.
        with _starting, _adopting():
            return self._call(self._server.launch(argv, environ, forward, stdin=stdin))

    def stop(self) -> None:
        """Ends the fork server; components that still run go on without an owner."""
        self._call(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WITHIN_S)
        self._loop.close()

    async def _begin(self) -> None:
        with _starting, _adopting():
            self._server.start()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
