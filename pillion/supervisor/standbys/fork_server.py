"""Runs the fork server for the supervisor: components begin as forks of a process that has imported what they need.

    the server   (none) --start()--> importing --READY--> forking --its end--> importing again, RESPAWN_DELAY_S later
                                         |--its end--> importing again, later each time
                                         '--MAX_FAILED_STARTS such ends in a row--> none any more
    a component  asked for --> forked, this process's child --its number--> watched --its order--> runs as any other
                                  |-- FORK_TIMEOUT_S, or the server's end --> started by its command line
                                  '-- nobody waits for it any more --its number--> ends without an order, waited for

Starting Python and importing torch and its like takes seconds of a core. Each process of a cluster would take them, and
a client's stream waits for them when its worker has died. A fork has it all at once, and shares the memory. Nothing
depends on the server: without it, or where it fails, a component is started by its command line.

A component is forked twice, and the process between ends at once. The kernel then makes it a child of the supervisor,
which has asked to adopt orphans: exit status, tie to the supervisor and process group are those of any other child, and
the fork server's death does not touch it. Linux alone has all of that. The server's program is
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
# The imports of a fork server take seconds, and up to this long where others use the cores.
READY_TIMEOUT_S = 120.0
# A fork takes some tens of milliseconds. A server that needs longer is taken for one that hangs, and is killed.
FORK_TIMEOUT_S = 10.0
# A server that hangs may have forked a process before it was killed, which gets this long to send its process id.
LATE_FORK_S = 1.0
# When a fork server has died, the next one starts after this time, because components that died with it need the cores
# first.
RESPAWN_DELAY_S = 2.0
# A server that ends while it imports may have been killed, so it is started again, after twice the time each time. What
# cannot import so many times in a row will not import later.
MAX_FAILED_STARTS = 5
STOP_GRACE_S = 1.0
# The process table shows a fork's command line in the memory of the server's own command line and environment, which
# this makes longer.
TITLE_ROOM_BYTES = 16 * 1024
MAX_NUMBER_BYTES = 16


class ForkServer:
    """Keeps a fork server alive and starts components by it, on one event loop.

    Use: :meth:`start`, then ``await launch(...)`` as often as you like, then ``await stop()``, always.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str], show: Callable[[str], None]) -> None:
        """Take the ``modules`` that the server imports in its environment ``environ``: what libraries read of the
        environment while they are imported holds for all components. For an entry "MODULE:FUNCTION=TEXT" FUNCTION(TEXT)
        is called as well. ``show`` gets the lines that the server writes."""
        self._modules = tuple(modules)
        self._environ = {**environ, "ROOM_FOR_COMMAND_LINES": " " * TITLE_ROOM_BYTES}
        self._show = show
        self._upkeep: asyncio.Task[None] | None = None
        self._server: ChildProcess | None = None
        # This is the connection to a fork server that is ready.
        self._control: socket.socket | None = None
        # The event is set when the first server is ready, or when it is certain that there will be none.
        self._decided = asyncio.Event()
        # These tasks wait for the ends of forks that were given up.
        self._burials = OwnTasks()

    def start(self) -> None:
        """Begin to start the server. From now on the kernel makes orphans among this process's descendants children of
        this process."""
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
        """Start a process as :meth:`ChildProcess.start` does. A component waits for the first server and is forked;
        any other program, and a component that finds no server, is started by its command line."""
        if component_words(argv) is not None:
            await self._decided.wait()
            child = await self._fork(argv, environ, forward, stdin)
            if child is not None:
                return child
        return await ChildProcess.start(argv, environ, forward, stdin=stdin)

    async def stop(self) -> None:
        """End the server; components go on. Forks that were given up have been waited for then. Idempotent."""
        await end_tasks(self._upkeep)
        self._decided.set()
        # The server is gone, so the connections of processes that it has not forked have ended.
        await asyncio.gather(*self._burials, return_exceptions=True)

    def gone(self) -> bool:
        """Return whether no process of the fork server lives."""
        return self._server is None or self._server.gone()

    async def _keep(self) -> None:
        failed_starts = 0
        while failed_starts < MAX_FAILED_STARTS:
            failed_starts = 0 if await self._live_once() else failed_starts + 1
            await asyncio.sleep(RESPAWN_DELAY_S * 2**failed_starts)

    async def _live_once(self) -> bool:
        """Run one fork server, from its start to its end; return whether it was ever ready."""
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
        """Fork the component; return None where the server cannot. Raises OSError where this process has no
        descriptors left."""
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
            # When this end is closed here, the connection ends with the last other process that holds it.
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
                # A fork that has died meanwhile is handled like any other child that died.
                await asyncio.get_running_loop().sock_sendall(connection, order_of(argv, environ))
            return child


async def _number_from(connection: socket.socket, server: ChildProcess) -> int:
    """Return the process id that a component tells, 0 where none comes. A server that hangs is killed."""
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
    """Tell a fork that no order comes, and wait for its end: otherwise the fork would stay a zombie as long as this
    process lives.

    ``number`` is its process id, 0 where the fork has not told it yet; where it never does, the server has not forked,
    or is killed. The connection belongs to this function from now on. Returns within the times of :func:`_number_from`
    and FORK_TIMEOUT_S.
    """
    with connection, contextlib.suppress(OSError, TimeoutError):
        connection.shutdown(socket.SHUT_WR)
        if number := number or await _number_from(connection, server):
            async with asyncio.timeout(FORK_TIMEOUT_S):
                await ForkedProcess(number, None).wait()
