"""Gives a supervisor that is itself a fork a fork server that is one, too: what both import has been imported already.

    a fork server of tests --fork--> `pillion serve`, before it does anything --fork--> waiting
    waiting --the supervisor starts its fork server: the environment, standard input and output--> the server's program
       '-- the supervisor has ended, or has started the program in the usual way --> its end

A fork server that starts as a program imports torch, which takes 3 s of a core for each cluster. A supervisor has
threads by the time that it starts the server, and nothing can be forked then, so the fork is made ahead.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NoReturn

from lab.testbed.faults.board import BOARD_VARIABLE
from pillion.cli import app
from pillion.supervisor.child_process import ChildProcess, ForkedProcess, reader_of
from pillion.supervisor.lifeline import tie_to_parent
from pillion.supervisor.standbys import fork_server, fork_server_main

# A waiting fork gets two descriptors with this: its standard input, and its standard output and error.
BEGIN = b"b"
DESCRIPTORS = 2
# This line of the cluster's log says that its fork server is a fork.
FORKED = "it is a fork of a process that has imported everything"
# No import reads these variables, so processes may have their own after they were forked. Settings of the product begin
# with the prefix, and components read them when they start.
LATE_VARIABLES = ("TMPDIR", "PYTEST_CURRENT_TEST", BOARD_VARIABLE)
LATE_PREFIX = "PILLION_"


def read_by_imports(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of an environment in which processes that are forks of one another must be alike."""
    return {
        name: value
        for name, value in environ.items()
        if name not in (*LATE_VARIABLES, "ROOM_FOR_COMMAND_LINES") and not name.startswith(LATE_PREFIX)
    }


def install(text: str) -> None:
    """Lets each supervisor that is forked from this process have a fork server that is a fork. A fork server calls it
    after its imports, in the environment that they have read; ``text`` is empty."""
    assert not text, f"nothing is to be said here: {text!r}"
    imported_in, run = read_by_imports(os.environ), app.main

    def main(argv: list[str] | None = None) -> None:
        if sys.argv[1:2] == ["serve"]:
            _fork_ahead(imported_in)
        run(argv)

    _replace(app, "main", main)


def _replace(module: object, name: str, value: Callable[..., object]) -> None:
    setattr(module, name, value)


def _fork_ahead(imported_in: Mapping[str, str]) -> None:
    """Forks the process that will be this supervisor's fork server."""
    connection, its_connection = socket.socketpair()
    supervisor = os.getpid()
    pid = os.fork()
    if not pid:
        connection.close()
        _serve(its_connection, supervisor)
    its_connection.close()
    _ServerAhead.waiting, _ServerAhead.imported_in = (connection, pid), imported_in
    _replace(fork_server, "ChildProcess", _ServerAhead)


class _ServerAhead(ChildProcess):
    """Starts processes for a fork server's owner; the first fork server in the environment ``imported_in`` is the fork
    that waits."""

    waiting: ClassVar[tuple[socket.socket, int] | None] = None
    imported_in: ClassVar[Mapping[str, str]] = {}

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str],
        forward: Callable[[str], None],
        *,
        stdin: int = asyncio.subprocess.DEVNULL,
    ) -> ChildProcess:
        """Starts a process as :meth:`ChildProcess.start` does."""
        # A fork server's program itself adds some variables to those that it was started with.
        fits = read_by_imports(environ).items() <= cls.imported_in.items()
        if cls.waiting is None or not fits or [*argv[1:3]] != ["-m", fork_server.PROGRAM]:
            return await ChildProcess.start(argv, environ, forward, stdin=stdin)
        (connection, pid), cls.waiting = cls.waiting, None
        output, its_output = os.pipe()
        with connection:
            socket.send_fds(connection, [BEGIN], [stdin, its_output])
            connection.sendall(fork_server_main.order_of(argv, environ))
        os.close(its_output)
        forward(FORKED)
        return ChildProcess(ForkedProcess(pid, await reader_of(output)), forward)


def _serve(connection: socket.socket, supervisor: int) -> NoReturn:
    """Waits for the order, and is the fork server then, and each of its forks. It ends as a program does."""
    status: object = 1
    try:
        tie_to_parent(supervisor)
        with connection:
            _, descriptors, _, _ = socket.recv_fds(connection, len(BEGIN), DESCRIPTORS)
            order = fork_server_main.order_from(connection)
        if order is not None:
            stdin, output = descriptors
            os.setsid()
            fork_server_main.take_over(*order, stdin, output)
            sys.argv = order[0][2:]
            fork_server_main.main()
        status = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)
