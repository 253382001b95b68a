"""Programs started by tests."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from lab.testbed.conditions import WITHIN_S

# Seconds until such a program ends by itself, in case the test run is killed first.
LIFE_S = 60
STAY = f"import time; time.sleep({LIFE_S})"


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a program that is always killed in the end; ``options`` are those of Popen.

    A plain ``with Popen`` waits for the program without a limit: a test that fails before stopping it never ends. Pipes
    are closed unread, as a child of the program may hold them open.
    """
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.kill()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        process.wait(WITHIN_S)


class NewChildren:
    """Processes started by this one since this object was created, and their children.

    Tests count these instead of all children: libraries keep helpers until the interpreter ends, like the resource
    tracker of ``multiprocessing``, which any earlier test file may have started.
    """

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))

    def __call__(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child not in self._before]
