"""Runs the fork server for the supervisor: components start as forks of a process that has imported what they need.

    the server   (none) --start()--> importing --READY--> forking --its end--> importing again, RESPAWN_DELAY_S later
                                         |--its end--> importing again, later each time
                                         '--MAX_FAILED_STARTS such ends in a row--> no server any more
    a component  requested --> forked, this process's child --its pid--> watched --its order--> runs like any other
                                  |-- FORK_TIMEOUT_S, or the server's end --> started by its command line
                                  '-- not wanted any more --its pid--> ends without an order, waited for

Starting Python and importing torch and similar packages takes seconds of a core in each process, while a client's
stream waits if its worker has died. A fork has everything imported at once, and shares the memory. Nothing depends on
the server: without it, or if it fails, a component is started by its command line.

A component is forked twice, and the intermediate process ends at once. The kernel then makes it a child of the
supervisor, which is a child subreaper: its exit status, its tie to the supervisor and its process group are those of
any other child, and the fork server's death does not affect it. Only Linux supports this. The server's program is
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
# Max time of a fork server's imports, which take seconds on an idle machine.
READY_TIMEOUT_S = 120.0
FORK_TIMEOUT_S = 10.0
# Max wait for the process id of a fork that a hanging server may have made before it was killed.
LATE_FORK_S = 1.0
# Delay before a dead fork server is replaced, because components that died with it need the cores first.
RESPAWN_DELAY_S = 2.0
# Max ends during imports in a row. The server may have been killed, so it is restarted, with a delay that doubles.
MAX_FAILED_STARTS = 5
STOP_GRACE_S = 1.0
# Extra environment of the server. A fork's title overwrites the memory of the server's command line and environment.
TITLE_ROOM_BYTES = 16 * 1024


class ForkServer:
    """Keeps a fork server alive and starts components by it, on one event loop.

    Use: :meth:`start`, then ``await launch(...)`` as often as needed, then ``await stop()``, always.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str], show: Callable[[str], None]) -> None:
        """Set the ``modules`` to import, and the server's environment, whose settings libraries read during their
        import. A module "MODULE:FUNCTION=TEXT" also calls FUNCTION(TEXT). ``show`` gets each line of the server's
        output."""
        self._modules = tuple(modules)
        self._environ = {**environ, "ROOM_FOR_COMMAND_LINES": " " * TITLE_ROOM_BYTES}
        self._show = show
        self._upkeep: asyncio.Task[None] | None = None
        self._server: ChildProcess | None = None
        self._control: socket.socket | None = None
        # Set when the first server is ready, or when it is certain that there will be none.
        self._decided = asyncio.Event()
        self._reaping = OwnTasks()

    def start(self) -> None:
        """Start the server in the background, and make this process the parent of orphaned descendants."""
        if adopt_orphans():
            self._upkeep = asyncio.create_task(self._run_servers(), name="fork server")
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
        await asyncio.gather(*self._reaping, return_exceptions=True)

    def has_exited(self) -> bool:
        """Return whether no process of the fork server is alive."""
        return self._server is None or self._server.has_exited()

    async def _run_servers(self) -> None:
        """Run fork servers one after another, until several in a row end during their imports."""
        failed_starts = 0
        while failed_starts < MAX_FAILED_STARTS:
            failed_starts = 0 if await self._run_server() else failed_starts + 1
            await asyncio.sleep(RESPAWN_DELAY_S * 2**failed_starts)

    async def _run_server(self) -> bool:
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
            devnull = os.open(os.devnull, os.O_RDONLY)
            output, its_output = os.pipe()
            for fd in (devnull, output, its_output):
                ends.callback(os.close, fd)
            its_input = devnull if stdin == asyncio.subprocess.DEVNULL else stdin
            try:
                socket.send_fds(control, [FORK], [its_connection.fileno(), its_input, its_output])
            except OSError:
                return None
            its_connection.close()
            pid, child = 0, None
            try:
                pid = await _receive_pid(connection, server)
                if not pid:
                    return None
                child = ChildProcess(ForkedProcess(pid, await reader_of(os.dup(output))), forward)
            finally:
                if child is None:
                    reap = _reap_fork(socket.socket(fileno=connection.detach()), server, pid)
                    self._reaping.begin(reap, "abandoned fork")
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(connection, order_of(argv, environ))
            return child


async def _receive_pid(connection: socket.socket, server: ChildProcess) -> int:
    """Return the process id that a fork sends, or 0 if none arrives. Kills a server that hangs."""
    for timeout_s in (FORK_TIMEOUT_S, LATE_FORK_S):
        try:
            async with asyncio.timeout(timeout_s):
                return int(await asyncio.get_running_loop().sock_recv(connection, 16) or 0)
        except TimeoutError:
            server.kill()
        except OSError:
            break
    return 0


async def _reap_fork(connection: socket.socket, server: ChildProcess, pid: int) -> None:
    """Close an abandoned fork's ``connection``, so that it exits, and reap it.

    ``pid``: its process id, or 0 if it has not been received yet. If it never arrives, the server has not forked, or is
    killed. Returns within the timeouts of :func:`_receive_pid` plus FORK_TIMEOUT_S.
    """
    with connection, contextlib.suppress(OSError, TimeoutError):
        connection.shutdown(socket.SHUT_WR)
        if pid := pid or await _receive_pid(connection, server):
            async with asyncio.timeout(FORK_TIMEOUT_S):
                await ForkedProcess(pid, None).wait()
