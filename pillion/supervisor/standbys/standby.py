"""Runs a standby: a second process of a component, started ahead, which takes over at once when the first one dies.

    started --imports; a worker loads all that needs no KV node, too--> READY to the supervisor, waiting
                                                          |-- BEGIN --> starts as any process of the component
                                                          '-- the connection ends (the supervisor is gone) --> exit

Starting Python and importing take seconds on a busy machine, and a client's stream waits for them when the only worker
of its kind dies. A standby holds nothing that others can see: no port, no socket file, no slot, no place in the
registry. It costs memory, so it maps a model's weights only where all processes share them, and takes no memory of a
GPU. A standby that maps the weights has read them once, in a short step, and has the model's tokenizer for grammars:
what is left for its turn is to attach and to serve.

Both sides are here: :class:`Standby` in the process that waits, :class:`Successor` in the supervisor. They talk over
the process's standard input, which is a socket.
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
# A worker that computes on a GPU imports this module for its model.
GPU_LOADER = "pillion.engine.backends.gpu.gpu_loading"
# This many of the last lines are kept of an output that is not shown at once, such as a standby's until it takes over.
MAX_KEPT_LINES = 20


class Standby:
    """Represents a standby in its own process. ``supervisor`` is the connection to the supervisor."""

    def __init__(self, supervisor: socket.socket) -> None:
        self._supervisor: socket.socket | None = supervisor
        self._own_name = program_name()
        self._held_s = 0.0

    @classmethod
    def of_process(cls) -> Standby | None:
        """Return the turn that this process has to wait for; None where it was not started as a standby."""
        if not os.environ.pop(STANDBY_VARIABLE, ""):
            return None
        supervisor = socket.socket(fileno=os.dup(0))
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        return cls(supervisor)

    @property
    def waiting(self) -> bool:
        """Say whether this process's turn has not come yet."""
        return self._supervisor is not None

    def wait(self) -> float:
        """Block until this process's turn has come; return for how many seconds it has waited in all. Where the
        supervisor is gone, the process ends."""
        supervisor, began_s = self._supervisor, time.monotonic()
        if supervisor is None:
            return self._held_s
        name_program(WAITING_NAME)
        try:
            # The turn may have come already, and then nobody reads this line any more.
            with contextlib.suppress(BrokenPipeError):
                supervisor.sendall(READY)
            begun = supervisor.recv(1) == BEGIN
        except OSError:
            begun = False
        if not begun:
            # No thread of this process has anything that must be saved, and some may wait for ever.
            os._exit(0)
        supervisor.close()
        self._supervisor = None
        name_program(self._own_name)
        self._held_s = time.monotonic() - began_s
        return self._held_s

    def serves(self) -> None:
        """Note that the process has taken over and serves: from now on the process table shows it as the component."""
        show_title(waits=False)

    def load_ahead(self) -> Callable[[WorkerFlags, int], Any]:
        """Return a worker's factory of models: it loads a model before the process waits where that costs no memory of
        its own, and otherwise waits first."""
        from pillion.engine.load_model import load_model, shares_weights

        def load(flags: WorkerFlags, threads: int) -> Any:
            if not self.waiting:
                return load_model(flags, threads)
            if flags.device != "cpu":
                # Importing these modules does not touch the GPU.
                importlib.import_module(GPU_LOADER)
            if not shares_weights(flags):
                self.wait()
            return load_model(flags, threads)

        return load


class Successor:
    """Represents a standby as its supervisor sees it: a started process that waits, or will wait, for its turn."""

    def __init__(
        self, child: ChildProcess, reader: asyncio.StreamReader, connection: asyncio.StreamWriter, output: _KeptOutput
    ) -> None:
        self._child = child
        self._connection = connection
        self._output = output
        # wait() kills what the process leaves behind while the id of its group is still its own.
        self._ended = asyncio.create_task(child.wait())
        self._waits = asyncio.create_task(_says_ready(reader))

    @classmethod
    async def start(
        cls, argv: Sequence[str], environ: Mapping[str, str], launch: Launch = ChildProcess.start
    ) -> Successor:
        """Start the process by ``launch``. Raises OSError."""
        ours, theirs = socket.socketpair()
        output = _KeptOutput()
        with theirs:
            reader, connection = await asyncio.open_unix_connection(sock=ours)
            try:
                child = await launch(argv, {**environ, STANDBY_VARIABLE: "1"}, output.take, stdin=theirs.fileno())
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

    def gone(self) -> bool:
        """Return whether no process of the standby's group lives."""
        return self._child.gone()

    async def ready(self) -> bool:
        """Return when the process waits for its turn, or, with False, when it has ended."""
        return await asyncio.shield(self._waits)

    def output(self) -> tuple[str, ...]:
        """Return the last lines of the standby's output."""
        return self._output.lines()

    def begin(self, show: Callable[[str], None]) -> ChildProcess | None:
        """Let the process begin its turn. ``show`` gets its output from now on, after the lines that were kept.
        Returns None where the process has ended."""
        if not self.running:
            self.close()
            return None
        self._connection.write(BEGIN)
        self._connection.close()
        self._output.show(show)
        return self._child

    def close(self) -> None:
        """Kill the standby's process, which holds nothing. Idempotent."""
        if self.running:
            self._child.kill()
        self._connection.close()

    async def wait(self) -> None:
        """Return when the standby's process has ended."""
        await asyncio.wait({self._ended})


async def _says_ready(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(OSError):
        return await reader.read(1) == READY
    return False


class _KeptOutput:
    """Keeps the last lines of a process until somebody wants to see them and the lines that follow."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_KEPT_LINES)
        self.take: Callable[[str], None] = lambda line: self._show(line)
        self._show: Callable[[str], None] = self._lines.append

    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def show(self, show: Callable[[str], None]) -> None:
        self._show = show
        for line in self._lines:
            show(line)
