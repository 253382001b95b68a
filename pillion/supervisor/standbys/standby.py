"""Runs a standby: a second process of a component, started ahead, that takes over at once when the first one dies.

    started --imports; a worker also loads whatever needs no KV node--> READY to the supervisor, waiting
                                                          |-- BEGIN --> starts like any process of the component
                                                          '-- the connection ends (the supervisor is gone) --> exit

Starting Python and imports take seconds on a busy machine, and a client's stream waits for them if the only worker of
its kind dies. A standby has nothing that other processes can see: no port, no socket file, no slot, no registry entry.
It maps a model's weights only if all processes share their memory, and allocates no GPU memory. A standby that maps the
weights has read them once, in a short step, and has the model's tokenizer for grammars: it only has to attach and to
serve.

Both sides are here: :class:`Standby` in the process that waits, :class:`Successor` in the supervisor. They communicate
over the process's standard input, which is a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pillion.config import WorkerFlags
from pillion.supervisor.child_process import ChildProcess, Launch
from pillion.supervisor.standbys.process_title import (
    STANDBY_VARIABLE,
    WAITING_NAME,
    name_program,
    program_name,
    show_title,
)

READY, BEGIN = b"r", b"b"
# Imported ahead by standbys of workers on a GPU.
GPU_LOADER = "pillion.engine.backends.gpu.gpu_loading"
MAX_KEPT_LINES = 20


class Standby:
    """A standby in its own process. ``supervisor`` is the connection to the supervisor."""

    def __init__(self, supervisor: socket.socket) -> None:
        self._supervisor: socket.socket | None = supervisor
        self._own_name = program_name()
        self._waited_s = 0.0

    @classmethod
    def of_process(cls) -> Standby | None:
        """Return this process's standby; None if it was not started as one."""
        if not os.environ.pop(STANDBY_VARIABLE, ""):
            return None
        supervisor = socket.socket(fileno=os.dup(0))
        with open(os.devnull, "rb") as devnull:
            os.dup2(devnull.fileno(), 0)
        return cls(supervisor)

    @property
    def waiting(self) -> bool:
        """Whether this process's turn has not come yet."""
        return self._supervisor is not None

    def wait(self) -> float:
        """Block until this process's turn; return how many seconds it has waited in all. Ends the process if the
        supervisor is gone."""
        supervisor, began_s = self._supervisor, time.monotonic()
        if supervisor is None:
            return self._waited_s
        name_program(WAITING_NAME)
        try:
            with contextlib.suppress(BrokenPipeError):
                supervisor.sendall(READY)
            begun = supervisor.recv(1) == BEGIN
        except OSError:
            begun = False
        if not begun:
            # No thread has anything to save, and some may block forever.
            os._exit(0)
        supervisor.close()
        self._supervisor = None
        name_program(self._own_name)
        self._waited_s = time.monotonic() - began_s
        return self._waited_s

    def serves(self) -> None:
        """Show this process as the component in the process table, now that it has taken over and serves."""
        show_title(waits=False)

    def load_ahead(self) -> Callable[[WorkerFlags, int], Any]:
        """Return a worker's function to load its model. It loads shared weights while the standby waits, and others
        after its turn has come."""
        from pillion.engine.load_model import load_model, shares_weights

        def load(flags: WorkerFlags, threads: int) -> Any:
            if not self.waiting:
                return load_model(flags, threads)
            if flags.device != "cpu":
                importlib.import_module(GPU_LOADER)
            if not shares_weights(flags):
                self.wait()
            return load_model(flags, threads)

        return load


class Successor:
    """A standby as its supervisor sees it: a started process that waits, or will wait, for its turn."""

    def __init__(
        self, child: ChildProcess, reader: asyncio.StreamReader, connection: asyncio.StreamWriter, output: _OutputBuffer
    ) -> None:
        self._child = child
        self._connection = connection
        self._output = output
        # wait() kills the rest of the process group before its id can be reused.
        self._ended = asyncio.create_task(child.wait())
        self._ready = asyncio.create_task(_receive_ready(reader))

    @classmethod
    async def start(
        cls, argv: Sequence[str], environ: Mapping[str, str], launch: Launch = ChildProcess.start
    ) -> Successor:
        """Start the process by ``launch``. Raises OSError."""
        ours, theirs = socket.socketpair()
        output = _OutputBuffer()
        with theirs:
            reader, connection = await asyncio.open_unix_connection(sock=ours)
            try:
                child = await launch(argv, {**environ, STANDBY_VARIABLE: "1"}, output.write, stdin=theirs.fileno())
            except BaseException:
                connection.close()
                raise
        return cls(child, reader, connection, output)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.running

    def has_exited(self) -> bool:
        """Return whether no process of the standby's group is alive."""
        return self._child.has_exited()

    async def ready(self) -> bool:
        """Return True when the process waits for its turn, or False when it has ended."""
        return await asyncio.shield(self._ready)

    def output(self) -> tuple[str, ...]:
        """Return the last lines of the standby's output."""
        return self._output.lines()

    def begin(self, show: Callable[[str], None]) -> ChildProcess | None:
        """Let the process start to serve, and return it; None if it has ended. ``show`` gets the last lines of its
        output so far, and each further line."""
        if not self.running:
            self.close()
            return None
        self._connection.write(BEGIN)
        self._connection.close()
        self._output.show(show)
        return self._child

    def close(self) -> None:
        """Kill the standby's process. Idempotent."""
        if self.running:
            self._child.kill()
        self._connection.close()

    async def wait(self) -> None:
        """Wait until the standby's process has ended."""
        await asyncio.wait({self._ended})


async def _receive_ready(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(OSError):
        return await reader.read(1) == READY
    return False


class _OutputBuffer:
    """The last lines of a process's output, until :meth:`show` passes them and all later lines on."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_KEPT_LINES)
        self.write: Callable[[str], None] = lambda line: self._show(line)
        self._show: Callable[[str], None] = self._lines.append

    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def show(self, show: Callable[[str], None]) -> None:
        self._show = show
        for line in self._lines:
            show(line)
