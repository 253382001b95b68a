"""Components and clusters as forks of one process that has imported what all of them need, as a supervisor starts them.

    shared_forks(environ) --first start()--> the fork server imports, once --start()--> a process, watched as a Popen is
                                                  '--this process ends, or stop()--> ends

Without it, ten components that import torch take 20 s of a core before their first work. The fork server is the
product's own (:mod:`pillion.supervisor.standbys.fork_server`), on an event loop in a thread.
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
# Modules that a fork server of this tree imports.
MODULES = (*preloaded_modules("cpu"), "lab.testbed.nested_forks:install=")


class ForkedComponent:
    """A component started by a fork server, with the methods of a Popen."""

    def __init__(self, child: ChildProcess, ended: Future[int]) -> None:
        self._child, self._ended = child, ended

    @property
    def pid(self) -> int:
        return self._child.pid

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None until the process has ended and its log is written."""
        return self._ended.result() if self._ended.done() else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises TimeoutExpired after ``timeout`` seconds."""
        try:
            return self._ended.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None

    def terminate(self) -> None:
        """Send SIGTERM unless the process has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless the process has ended."""
        if self._child.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkedChild:
    """A process for coroutines: the methods that they use of a :class:`ChildProcess`, which belongs to another event
    loop."""

    def __init__(self, child: ChildProcess, loop: asyncio.AbstractEventLoop) -> None:
        self._child, self._loop = child, loop

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.running

    def kill(self) -> None:
        """Send SIGKILL to the process and its descendants."""
        self._child.kill()

    async def wait(self) -> int:
        """Wait for the end and return the exit status, negative for a signal."""
        return await self._there(self._child.wait())

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after ``grace_s``, and wait for the end."""
        await self._there(self._child.stop(grace_s))

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the parent of orphaned descendants until the block ends."""
    adopt_orphans()
    try:
        yield
    finally:
        if KERNEL_TIES:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# Fork servers of this process, by folder and the environment that their imports read.
_shared: dict[tuple[object, ...], Forks] = {}
_sharing = threading.Lock()
# One start at a time, since adopting orphans is a setting of the whole process.
_starting = threading.Lock()


def shared_forks(environ: Mapping[str, str], *, packages: bool = False) -> Forks:
    """Return this process's fork server for an environment that imports read as this one; it lives as long as this
    process. ``packages``: the environment contains another version of Pillion, whose own fork server is used."""
    key = (os.getcwd(), *sorted(read_by_imports(environ).items()))
    with _sharing:
        if key not in _shared:
            _shared[key] = Forks(environ, _preloaded(environ)) if packages else Forks(hooked(environ))
        return _shared[key]


def component_forks() -> Forks:
    """Return the fork server for environments whose imports match those of this process's clusters."""
    return shared_forks(child_environ(os.environ, "") | compute_environ(1))


def _preloaded(environ: Mapping[str, str]) -> list[str]:
    """Return the modules that the Pillion of this environment imports before it forks components."""
    program = "from pillion.supervisor.component_process import preloaded_modules as of; print(*of('cpu'))"
    return subprocess.check_output([sys.executable, "-c", program], env=environ, text=True).split()


class Forks:
    """Starts components from one fork server, which imports ``modules`` in the environment ``environ``. A component's
    environment may differ in variables that no import reads."""

    def __init__(self, environ: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        self.environ = dict(environ)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forks", daemon=True)
        self._thread.start()
        # Lines on components started without the server are dropped: the component's own log has them.
        self._server = ForkServer(modules, self.environ, lambda line: None)
        self._call(self._begin())

    def start(self, argv: Sequence[str], environ: Mapping[str, str], log: pathlib.Path) -> ForkedComponent:
        """Start ``python -m pillion ...`` with its output appended to ``log``. Raises OSError if it does not start."""
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
        """Start ``python -m module words...`` with these descriptors for its output and errors. A word that is the
        number of a descriptor in ``given`` becomes that of the duplicate. ``starts_clusters``: the program's clusters
        are forks as well. Raises OSError if it does not start."""
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
        """Start ``python -m pillion ...`` as a fork, or any other program; ``forward`` is called with each line of its
        output, on another thread. Raises OSError if it does not start."""
        return ForkedChild(await asyncio.to_thread(self._launch, argv, environ, forward), self._loop)

    def _launch(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        forward: Callable[[str], None],
        stdin: int = asyncio.subprocess.DEVNULL,
    ) -> ChildProcess:
        # A component's parent is a fork of the fork server that exits at once, so this process adopts the component.
        # It adopts no other orphans: without a reaper they would be zombies, which look alive to tests.
        with _starting, _adopting():
            return self._call(self._server.launch(argv, environ, forward, stdin=stdin))

    def stop(self) -> None:
        """End the fork server; running components become orphans."""
        self._call(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WITHIN_S)
        self._loop.close()

    async def _begin(self) -> None:
        with _starting, _adopting():
            self._server.start()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
