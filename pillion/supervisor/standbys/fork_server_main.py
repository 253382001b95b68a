"""The fork server's program: imports the components' modules, and then forks a process per request of the supervisor.

    python -m pillion.supervisor.standbys.fork_server_main MODULE|MODULE:FUNCTION=TEXT...
        (which calls FUNCTION(TEXT), too)

    importing --READY--> waiting --FORK, with three descriptors--> forked ---> waiting
                            |  '-- some are missing: this process is out of them --> closed, no fork --> waiting
                            '-- the connection ends --> exit

    a fork:  the supervisor's child, tied to it, in its own session --its pid--> waiting for its order
                 --the order--> `python -m pillion WORDS`, in the order's environment
                 '-- the connection ends --> exit

It starts no thread and uses no GPU: a fork has only the calling thread, and locks of all other threads stay locked.
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
# Descriptors passed for a fork: its end of a connection, its standard input, and its standard output and error.
DESCRIPTORS = 3
# Bytes of the length before an order's JSON. Part of the protocol that tests with two versions use with the last
# release's fork server.
LENGTH_BYTES = 4
MAX_ORDER_BYTES = 8 * 2**20


def component_words(argv: Sequence[str]) -> list[str] | None:
    """Return the arguments after ``python -m pillion``, or None if the command line is not of this form with this same
    Python."""
    if [*argv[:3]] != [sys.executable, "-m", "pillion"]:
        return None
    return [*argv[3:]]


def order_of(argv: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Encode a fork's order: the component's command line, and its whole environment."""
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
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), 0)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # NumPy's BLAS would start threads during its import.
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
    # Exclude everything loaded so far from garbage collections, which would write to its pages and so copy them in each
    # fork.
    gc.collect()
    gc.freeze()
    gc.enable()
    control.sendall(READY)
    if words := _serve(control, parent_pid()):
        sys.argv = ["pillion", *words]
        runpy.run_module("pillion", run_name="__main__", alter_sys=True)


def _serve(control: socket.socket, supervisor: int) -> list[str] | None:
    """Fork processes until the connection ends, and return None. In a fork, return the component's arguments."""
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, len(FORK), DESCRIPTORS)
        except ConnectionError:
            return None
        if message != FORK:
            return None
        if len(descriptors) < DESCRIPTORS:
            # This process is out of descriptors. The supervisor gets EOF on the component's connection, and starts the
            # component by its command line.
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        intermediate_pid = os.fork()
        if intermediate_pid:
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(intermediate_pid, 0)
        else:
            intermediate_pid = os.getpid()
            if os.fork():
                os._exit(0)
            control.close()
            return _become(descriptors, intermediate_pid, supervisor)


def _become(descriptors: list[int], intermediate_pid: int, supervisor: int) -> list[str]:
    """Set up this fork as the component that its order describes; return the component's arguments. Exits if the
    connection ends without an order."""
    while os.getppid() == intermediate_pid:
        time.sleep(0.001)
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
    """Set this fork's standard input, output and error, its environment and its command line. Closes ``stdin`` and
    ``output``."""
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
