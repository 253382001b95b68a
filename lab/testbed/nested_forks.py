"""Gives a supervisor that is itself a fork two programs that are forks, too: its fork server, and the one that prepares
its model. What all of them import has been imported already.

    a fork server of tests --fork--> `pillion serve`, before it does anything --two forks--> waiting
    waiting --the supervisor starts the program: the environment, standard input and output--> the program
       '-- the supervisor has ended, or has started its fork server without needing this one --> its end

Each of the two programs imports torch when it starts in the usual way, seconds of a core for each cluster. A
supervisor has threads by the time that it starts them, and nothing can be forked then, so the forks are made ahead.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NoReturn

from lab.testbed.faults.board import BOARD_VARIABLE
from pillion.cli import app
from pillion.supervisor import local_cluster
from pillion.supervisor.child_process import ChildProcess, ForkedProcess, reader_of
from pillion.supervisor.lifeline import tie_to_parent
from pillion.supervisor.standbys import fork_server, fork_server_main

# A waiting fork gets two descriptors with this: its standard input, and its standard output and error.
BEGIN = b"b"
DESCRIPTORS = 2
# This line of the cluster's log says that its fork server is a fork.
FORKED = "it is a fork of a process that has imported everything"
# The programs that are forked ahead, by the words with which their command lines go on after the interpreter.
AHEAD = (("-m", fork_server.PROGRAM), ("-m", "pillion", "prepare"))
# No import reads these variables, so processes may have their own after they were forked, or they only decide what
# libraries print. Settings of the product begin with the prefix, and components read them when they start.
LATE_VARIABLES = ("TMPDIR", "PYTEST_CURRENT_TEST", BOARD_VARIABLE, "TRANSFORMERS_VERBOSITY", "TQDM_DISABLE")
LATE_PREFIX = "PILLION_"


def read_by_imports(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of an environment in which processes that are forks of one another must be alike."""
    return {
        name: value
        for name, value in environ.items()
        if name not in (*LATE_VARIABLES, "ROOM_FOR_COMMAND_LINES") and not name.startswith(LATE_PREFIX)
    }


def install(text: str) -> None:
    """Lets each supervisor that is forked from this process start programs that are forks. A fork server calls it after
    its imports, in the environment that they have read; ``text`` is empty."""
    assert not text, f"nothing is to be said here: {text!r}"
    imported_in, run = read_by_imports(os.environ), app.main

    def main(argv: list[str] | None = None) -> None:
        if sys.argv[1:2] == ["serve"]:
            _ForkedAhead.imported_in = imported_in
            for words in AHEAD:
                _ForkedAhead.waiting[words] = _forked()
            _replace(fork_server, "ChildProcess", _ForkedAhead)
            _replace(local_cluster, "ChildProcess", _ForkedAhead)
        run(argv)

    _replace(app, "main", main)


def _replace(module: object, name: str, value: Callable[..., object]) -> None:
    setattr(module, name, value)


def _forked() -> tuple[socket.socket, int]:
    """Forks a process that waits for its order; returns the connection to it, and its id."""
    connection, its_connection = socket.socketpair()
    supervisor = os.getpid()
    pid = os.fork()
    if not pid:
        # A fork that waits notices that the supervisor has closed its connection only where no other fork holds it.
        for end in (connection, *(end for end, _ in _ForkedAhead.waiting.values())):
            end.close()
        _serve(its_connection, supervisor)
    its_connection.close()
    return connection, pid


class _ForkedAhead(ChildProcess):
    """Starts processes for a supervisor; the first process of each program that ``waiting`` names, in the environment
    ``imported_in``, is the fork that waits. Nothing waits once the fork server runs."""

    waiting: ClassVar[dict[tuple[str, ...], tuple[socket.socket, int]]] = {}
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
        words = next((words for words in cls.waiting if (*argv[1 : 1 + len(words)],) == words), None)
        # A fork server's program itself adds some variables to those that it was started with.
        fits = read_by_imports(environ).items() <= cls.imported_in.items()
        if words is None or not fits:
            return await ChildProcess.start(argv, environ, forward, stdin=stdin)
        connection, pid = cls.waiting.pop(words)
        output, its_output = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        with connection:
            its_input = nothing if stdin == asyncio.subprocess.DEVNULL else stdin
            socket.send_fds(connection, [BEGIN], [its_input, its_output])
            connection.sendall(fork_server_main.order_of(argv, environ))
        os.close(nothing)
        os.close(its_output)
        child = ChildProcess(ForkedProcess(pid, await reader_of(output)), forward)
        if words == AHEAD[0]:
            forward(FORKED)
            cls._dismiss()
        return child

    @classmethod
    def _dismiss(cls) -> None:
        for connection, pid in cls.waiting.values():
            connection.close()
            os.waitpid(pid, 0)
        cls.waiting = {}


def _serve(connection: socket.socket, supervisor: int) -> NoReturn:
    """Waits for the order, and is the program then, and each of its forks. It ends as a program does."""
    status: object = 1
    try:
        tie_to_parent(supervisor)
        with connection:
            _, descriptors, _, _ = socket.recv_fds(connection, len(BEGIN), DESCRIPTORS)
            order = fork_server_main.order_from(connection) if descriptors else None
        if order is not None:
            stdin, output = descriptors
            os.setsid()
            fork_server_main.take_over(*order, stdin, output)
            argv, _ = order
            if (*argv[1:3],) == AHEAD[0]:
                sys.argv = argv[2:]
                fork_server_main.main()
            else:
                sys.argv = ["pillion", *argv[3:]]
                runpy.run_module("pillion", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)
