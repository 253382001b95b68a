"""Runs the fork server for the supervisor: components start as forks of a process that has imported what they need.

    the server   (none) --start()--> importing --READY--> forking --its end--> importing again, RESPAWN_DELAY_S later
                                         |--its end--> importing again, later each time
                                         '--MAX_FAILED_STARTS such ends in a row--> no server any more
    a component  requested --> forked, this process's child --its pid--> watched --its order--> runs like any other
                                  |-- FORK_TIMEOUT_S, or the server's end --> started by its command line
                                  '-- not wanted any more --its pid--> ends without an order, waited for

Starting Python and importing torch and similar packages takes seconds of a core. Each process of a cluster would need
them, while a client's stream waits if its worker has died. A fork has everything at once, and shares the memory.
Nothing depends on the server: without it, or if it fails, a component is started by its command line.

A component is forked twice, and the intermediate process ends at once. The kernel then makes it a child of the
supervisor, which has asked to adopt orphans: its exit status, its tie to the supervisor and its process group are those
of any other child, and the fork server's death does not affect it. Only Linux has all of this. The server's program is
:mod:`pillion.supervisor.standbys.fork_server_main`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from pillion.supervisor.child_process import ChildProcess, ForkedProcess, reader_of
from pillion.supervisor.lifeline import adopt_orphans
from pillion.supervisor.standbys.fork_server_main import FORK, READY, component_words, order_of
from pillion.tasks import OwnTasks, end_tasks

PROGRAM = "pillion.supervisor.standbys.fork_server_main"
# A fork server's imports take seconds, and up to this long on a busy machine.
READY_TIMEOUT_S = 120.0
FORK_TIMEOUT_S = 10.0
# A hanging server may have forked a process before it was killed, which has this long to send its process id.
LATE_FORK_S = 1.0
# Delay before a dead fork server is replaced, because components that died with it need the cores first.
RESPAWN_DELAY_S = 2.0
# A server that ends during its imports may have been killed, so it is restarted after a delay that doubles each time.
# After this many such ends in a row the imports cannot work.
MAX_FAILED_STARTS = 5
STOP_GRACE_S = 1.0
# A fork's command line in the process table is written over the server's own command line and environment, which this
# extends.
TITLE_ROOM_BYTES = 16 * 1024
MAX_NUMBER_BYTES = 16


class ForkServer:
    """Keeps a fork server alive and starts components by it, on one event loop.

    Use: :meth:`start`, then ``await launch(...)`` as often as needed, then ``await stop()``, always.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str], show: Callable[[str], None]) -> None:
        """Take the ``modules`` to import in the environment ``environ``: settings that libraries read from it during
        their import apply to all components. An entry "MODULE:FUNCTION=TEXT" also calls FUNCTION(TEXT). ``show`` gets
        the lines that the server writes."""
        self._modules = tuple(modules)
        self._environ = {**environ, "ROOM_FOR_COMMAND_LINES": " " * TITLE_ROOM_BYTES}
        self._show = show
        self._upkeep: asyncio.Task[None] | None = None
        self._server: ChildProcess | None = None
        self._control: socket.socket | None = None
        # Set when the first server is ready, or when it is certain that there will be none.
        self._decided = asyncio.Event()
        self._burials = OwnTasks()

    def start(self) -> None:
        """Start the server in the background. From now on the kernel makes orphans among this process's descendants its
        children."""
        if adopt_orphans():
            self._upkeep = asyncio.create_task(self._keep(), name="fork server")
        else:
            self._decided.set()

    @property
    def pid(self) -> int | None:
        """Process id of a server that is ready, else None."""
        return self._server.pid if self._server is not None and self._control is not None else None

    async def launch(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        forward: Callable[[str], None],
        *,
        stdin: int = asyncio.subprocess.DEVNULL,
    ) -> ChildProcess:
        """Start a process like :meth:`ChildProcess.start`. A component waits for the first server and is forked; any
        other program, and a component without a server, is started by its command line."""
        if component_words(argv) is not None:
            await self._decided.wait()
            child = await self._fork(argv, environ, forward, stdin)
            if child is not None:
                return child
        return await ChildProcess.start(argv, environ, forward, stdin=stdin)

    async def stop(self) -> None:
        """End the server and wait for abandoned forks; components continue. Idempotent."""
        await end_tasks(self._upkeep)
        self._decided.set()
        await asyncio.gather(*self._burials, return_exceptions=True)

    def has_exited(self) -> bool:
        """Return whether no process of the fork server is alive."""
        return self._server is None or self._server.has_exited()

    async def _keep(self) -> None:
        failed_starts = 0
        while failed_starts < MAX_FAILED_STARTS:
            failed_starts = 0 if await self._live_once() else failed_starts + 1
            await asyncio.sleep(RESPAWN_DELAY_S * 2**failed_starts)

    async def _live_once(self) -> bool:
        """Run one fork server from its start to its end; return whether it was ever ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        server = None
        try:
            with theirs:
                argv = (sys.executable, "-m", PROGRAM, *self._modules)
                server = await ChildProcess.start(argv, self._environ, self._show, stdin=theirs.fileno())
            self._server = server
            async with asyncio.timeout(READY_TIMEOUT_S):
                if await asyncio.get_running_loop().sock_recv(ours, len(READY)) != READY:
                    self._show("it has ended; components are started without it")
                    return False
            self._control = ours
            self._decided.set()
            await server.wait()
            return True
        except (OSError, TimeoutError) as error:
            self._show(f"components are started without it: {error or 'it was not ready in time'}")
            return False
        finally:
            self._control = None
            self._decided.set()
            ours.close()
            if server is not None:
                await server.stop(STOP_GRACE_S)

    async def _fork(
        self, argv: Sequence[str], environ: Mapping[str, str], forward: Callable[[str], None], stdin: int
    ) -> ChildProcess | None:
        """Fork the component; return None if the server cannot. Raises OSError if this process has no descriptors
        left."""
        control, server = self._control, self._server
        if control is None or server is None:
            return None
        with contextlib.ExitStack() as ends:
            connection, its_connection = map(ends.enter_context, socket.socketpair())
            connection.setblocking(False)
            nothing = os.open(os.devnull, os.O_RDONLY)
            output, its_output = os.pipe()
            for end in (nothing, output, its_output):
                ends.callback(os.close, end)
            its_input = nothing if stdin == asyncio.subprocess.DEVNULL else stdin
            try:
                socket.send_fds(control, [FORK], [its_connection.fileno(), its_input, its_output])
            except OSError:
                return None
            its_connection.close()
            number, child = 0, None
            try:
                number = await _number_from(connection, server)
                if not number:
                    return None
                child = ChildProcess(ForkedProcess(number, await reader_of(os.dup(output))), forward)
            finally:
                if child is None:
                    burial = _bury(socket.socket(fileno=connection.detach()), server, number)
                    self._burials.begin(burial, "a fork that is given up")
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(connection, order_of(argv, environ))
            return child


async def _number_from(connection: socket.socket, server: ChildProcess) -> int:
    """Return the process id that a component sends, 0 if none comes. A hanging server is killed."""
    for patience_s in (FORK_TIMEOUT_S, LATE_FORK_S):
        try:
            async with asyncio.timeout(patience_s):
                return int(await asyncio.get_running_loop().sock_recv(connection, MAX_NUMBER_BYTES) or 0)
        except TimeoutError:
            server.kill()
        except OSError:
            break
    return 0


async def _bury(connection: socket.socket, server: ChildProcess, number: int) -> None:
    """Tell a fork that no order comes, and wait for its end: otherwise it would stay a zombie as long as this process
    lives.

    ``number`` is its process id, 0 if the fork has not sent it yet; if it never does, the server has not forked or is
    killed. This function owns the connection. Returns within the times of :func:`_number_from` and FORK_TIMEOUT_S.
    """
    with connection, contextlib.suppress(OSError, TimeoutError):
        connection.shutdown(socket.SHUT_WR)
        if number := number or await _number_from(connection, server):
            async with asyncio.timeout(FORK_TIMEOUT_S):
                await ForkedProcess(number, None).wait()
