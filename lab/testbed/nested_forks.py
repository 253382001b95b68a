"""Forks for a supervisor that is itself a fork: its fork server, and the program that prepares its model. Also forks
that run on a host of a network, or any other Python program.

    a fork server of tests --fork--> `pillion serve`, before it does anything --two forks--> waiting
    waiting --the supervisor starts the program: the environment, standard input and output--> the program
       '-- the supervisor has ended, or has started its fork server without needing this one --> its end

Started normally, each of the two programs imports torch: seconds of a core per cluster. A supervisor has threads by
then and cannot fork, so the forks are made ahead.

    a fork server of tests --fork--> `python -m pillion on-host NAMESPACE ROLE ...` --setns--> `python -m pillion ROLE`
                           --fork--> `python -m pillion program MODULE ...` --its descriptors--> `python -m MODULE ...`

With "starter" as the word, the program starts clusters and has the two forks of a supervisor.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import runpy
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NoReturn

from lab.testbed.defaults import DEFAULTS_VARIABLE
from lab.testbed.faults.board import BOARD_VARIABLE, REDIS_PATIENCE_VARIABLE, other_paths
from lab.testbed.faults.hooks import change_defaults
from pillion.cli import app
from pillion.supervisor import local_cluster
from pillion.supervisor.child_process import ChildProcess, ForkedProcess, reader_of
from pillion.supervisor.lifeline import tie_to_parent
from pillion.supervisor.standbys import fork_server, fork_server_main

# Sent to a waiting fork with two descriptors: its standard input, and its standard output and error.
BEGIN = b"b"
DESCRIPTORS = 2
# First word of a fork's command line if it is not a component.
ON_HOST, PROGRAM, STARTER = "on-host", "program", "starter"
# Further descriptors of a program, sent over its standard input after its output and error. A word of its command line
# with this prefix and a number refers to one of them.
MAX_GIVEN = 8
GIVEN = "given:"
CLONE_NEWNET = 0x40000000
# Line of a cluster's log that shows that its fork server is a fork.
FORKED = "it is a fork of a process that has imported everything"
# Programs forked ahead, by the words after the interpreter.
AHEAD = (("-m", fork_server.PROGRAM), ("-m", "pillion", "prepare"))
# Set for a program that starts clusters as forks. No prefix of the product's settings, which reject unknown names.
FORKED_VARIABLE = "TESTBED_FORKED"
# Variables that may differ after the fork: no import reads them, or they only change what libraries print. Components
# read settings of the product and of exporters at their start, and the fake CUDA driver its own when called.
LATE_VARIABLES = (
    *("TMPDIR", "PYTEST_CURRENT_TEST", "TRANSFORMERS_VERBOSITY", "TQDM_DISABLE"),
    *(BOARD_VARIABLE, REDIS_PATIENCE_VARIABLE, DEFAULTS_VARIABLE),
    # Folder of a benchmark's results.
    *(FORKED_VARIABLE, "LAB_WRITTEN"),
)
LATE_PREFIXES = ("PILLION_", "OTEL_EXPORTER_", "OTEL_BSP_", "FAKE_CUDA_")


def read_by_imports(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in which processes that are forks of one another must be equal. All forks have the fault
    hooks."""
    found = {
        name: value
        for name, value in environ.items()
        if name not in (*LATE_VARIABLES, "ROOM_FOR_COMMAND_LINES") and not name.startswith(LATE_PREFIXES)
    }
    return {**found, "PYTHONPATH": other_paths(environ)}


def install(text: str) -> None:
    """Make supervisors forked from this process start programs that are forks. Called by a fork server after its
    imports, in the environment that they have read; ``text`` is empty."""
    assert not text, f"nothing is to be said here: {text!r}"
    if _ForkedAhead.imported_in:
        # A fork of another fork server.
        return
    _ForkedAhead.imported_in, run = read_by_imports(os.environ), app.main
    if os.environ.get("TRITON_INTERPRET") == "1":
        from lab.testbed.triton_interpreter import replace_once

        replace_once()

    def main(argv: list[str] | None = None) -> None:
        change_defaults()
        if sys.argv[1:2] == [ON_HOST]:
            _enter(sys.argv[2])
            del sys.argv[1:3], sys.orig_argv[3:5]
        if sys.argv[1:2] in (["serve"], [STARTER]):
            for words in AHEAD:
                _ForkedAhead.waiting[words] = _forked()
            _replace(fork_server, "ChildProcess", _ForkedAhead)
            _replace(local_cluster, "ChildProcess", _ForkedAhead)
        if sys.argv[1:2] in ([PROGRAM], [STARTER]):
            _run(sys.argv[2], sys.argv[3:])
        run(argv)

    _replace(app, "main", main)


def _enter(namespace: str) -> None:
    """Move this single-threaded process to a network namespace by path."""
    with open(namespace, "rb") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace} failed")


def _run(module: str, words: Sequence[str]) -> NoReturn:
    """Run a module as a program, with the descriptors received over standard input."""
    with socket.socket(fileno=os.dup(0)) as connection:
        _, (output, errors, *given), _, _ = socket.recv_fds(connection, len(BEGIN), 2 + MAX_GIVEN)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for source, target in ((output, 1), (errors, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.argv = [module, *(str(given[int(word[len(GIVEN) :])]) if word.startswith(GIVEN) else word for word in words)]
    status: object = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = 0 if ended.code is None else ended.code
        if not isinstance(status, int):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        # Exit without freeing objects, which would copy the memory shared with the fork server.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _end(status)


def _end(status: object) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


def _replace(module: object, name: str, value: Callable[..., object]) -> None:
    setattr(module, name, value)


def _forked() -> tuple[socket.socket, int]:
    """Fork a process that waits for its order; return the connection to it and its pid."""
    connection, its_connection = socket.socketpair()
    supervisor = os.getpid()
    pid = os.fork()
    if not pid:
        # The fork sees the supervisor close its connection only if no other fork has a duplicate.
        for end in (connection, *(end for end, _ in _ForkedAhead.waiting.values())):
            end.close()
        _serve(its_connection, supervisor)
    its_connection.close()
    return connection, pid


class _ForkedAhead(ChildProcess):
    """Starts processes for a supervisor. The first process of each program in ``waiting``, if its environment matches
    ``imported_in``, is the fork made ahead. None waits once the fork server runs."""

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
        words = next((words for words in cls.waiting if (*argv[1 : 1 + len(words)],) == words), None)
        # The fork server's program adds variables to its environment.
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
    """Wait for the order, then run the program and each of its forks, and exit as a program does."""
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
        _end(status)
