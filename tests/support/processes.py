"""Processes that tests start: none outlives its test, however the test ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def started(command: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A running process, killed at the end of the block.

    ``with subprocess.Popen(...)`` waits for the process instead, for ever where the block fails before it has told the
    process to end.
    """
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait()


def hear_interrupts() -> None:
    """Makes SIGINT end this process and its children again where it was inherited as ignored.

    A shell starts background jobs so, and nohup does, and a child that ignores SIGINT never hears a test's.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
