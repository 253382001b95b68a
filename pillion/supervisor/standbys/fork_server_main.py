"""The fork server's program: it imports what components need, and then forks whenever the supervisor asks for a
component.

    python -m pillion.supervisor.standbys.fork_server_main MODULE|MODULE:FUNCTION=TEXT...
        (which calls FUNCTION(TEXT), too)

    importing --READY--> waiting --FORK, with three descriptors--> forked ---> waiting
                            |  '-- some are missing: this process is out of them --> closed, no fork --> waiting
                            '-- the connection ends --> exit

    a fork:  the supervisor's child, tied to it, in its own session --its pid--> waiting for its order
                 --the order--> `python -m pillion WORDS`, in the order's environment
                 '-- the connection ends --> exit

It starts no thread and uses no GPU: a fork has only the thread that called it, and locks that others held stay locked.
:mod:`pillion.supervisor.standbys.fork_server` is the supervisor's side, and explains why there is a fork server.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from pillion.supervisor.lifeline import parent_pid, tie_to_parent
from pillion.supervisor.standbys.process_title import STANDBY_VARIABLE, find_title, show_title

READY, FORK = b"r", b"f"
# Descriptors of a fork: the component's end of a connection, its standard input, and its standard output and error.
DESCRIPTORS = 3
# An order is JSON after its length in this many bytes. Tests with two versions also send it to the last release's fork
# server.
LENGTH_BYTES = 4
MAX_ORDER_BYTES = 8 * 2**20
ORPHAN_POLL_MS = 1


def component_words(argv: Sequence[str]) -> list[str] | None:
    """Return what follows ``python -m pillion`` in a command line of this same Python; None for another program."""
    if [*argv[:3]] != [sys.executable, "-m", "pillion"]:
        return None
    return [*argv[3:]]


def order_of(argv: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Encode a fork's order: the command line that it replaces, and its whole environment."""
    data = json.dumps([[*argv], {**environ}]).encode()
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def order_from(connection: socket.socket) -> tuple[list[str], dict[str, str]] | None:
    """Read the order that :func:`order_of` encoded; return None if the connection ends early. Raises OSError if it
    breaks."""
    with connection.makefile("rb") as stream:
        size = int.from_bytes(stream.read(LENGTH_BYTES), "big")
        data = stream.read(size) if size <= MAX_ORDER_BYTES else b""
    if not size or len(data) < size:
        return None
    argv, environ = json.loads(data)
    return argv, environ


def main() -> None:
    """Serve until the connection on standard input ends; in a fork, run the component."""
    tie_to_parent()
    find_title()
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # NumPy's BLAS would start threads during its import, and nothing here benefits from them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imported objects stay alive; scanning them repeatedly would take a fifth of the imports' time.
    gc.disable()
    for word in sys.argv[1:]:
        name, _, call = word.partition(":")
        module = importlib.import_module(name)
        if call:
            function, _, text = call.partition("=")
            getattr(module, function)(text)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"{threads} threads run after the imports, so nothing can be forked")
    # Everything loaded by now stays alive, so garbage collections skip it: they would write to its pages, and so copy
    # them in every fork.
    gc.collect()
    gc.freeze()
    gc.enable()
    control.sendall(READY)
    if words := _serve(control, parent_pid()):
        sys.argv = ["pillion", *words]
        runpy.run_module("pillion", run_name="__main__", alter_sys=True)


def _serve(control: socket.socket, supervisor: int) -> list[str] | None:
    """Fork processes until the connection ends. In a fork, return the words of the component's command line."""
    while True:
        try:
            asked, descriptors, _, _ = socket.recv_fds(control, len(FORK), DESCRIPTORS)
        except ConnectionError:
            return None
        if asked != FORK:
            return None
        if len(descriptors) < DESCRIPTORS:
            # The supervisor notices the end of the component's connection, and starts its command line.
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        between = os.fork()
        if between:
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(between, 0)
        else:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            control.close()
            return _become(descriptors, between, supervisor)


def _become(descriptors: list[int], between: int, supervisor: int) -> list[str]:
    """Make this fork what its order says; return the words of the component's command line. Ends the process if no
    order comes."""
    while os.getppid() == between:
        time.sleep(ORPHAN_POLL_MS / 1000)
    tie_to_parent(supervisor)
    os.setsid()
    connection_fd, stdin, output = descriptors
    with socket.socket(fileno=connection_fd) as connection:
        try:
            connection.sendall(b"%d\n" % os.getpid())
            order = order_from(connection)
        except OSError:
            order = None
    if order is None:
        os._exit(0)
    argv, environ = order
    take_over(argv, environ, stdin, output)
    return argv[3:]


def take_over(argv: Sequence[str], environ: Mapping[str, str], stdin: int, output: int) -> None:
    """Give this fork its standard input, output and error, its environment and its command line. Closes the two
    descriptors."""
    for source, target in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(stdin)
    os.close(output)
    os.environ.clear()
    os.environ.update(environ)
    sys.orig_argv = [*argv]
    show_title(waits=STANDBY_VARIABLE in environ)


if __name__ == "__main__":
    main()
