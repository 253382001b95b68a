"""Programs that tests start."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from lab.testbed.conditions import WITHIN_S

# Seconds after which a program that waits to be ended ends by itself, should a test run be killed before it does that.
LIFE_S = 60
# The last statement of such a program.
STAY = f"import time; time.sleep({LIFE_S})"


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A program that is killed in the end, whatever became of it and of the test; ``options`` are those of Popen.

    The end of a plain ``with Popen`` waits for the program without a limit: a test that fails before it told the
    program to stop never ends. Pipes are closed unread, as a child of the program may hold them open.
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
    """The processes that this one has started since this object was made, and their children.

    A test counts these and not all children: libraries keep helpers until the interpreter ends, like the resource
    tracker of ``multiprocessing``, and which test file of the same process started one differs from run to run.
    """

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))

    def __call__(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child not in self._before]
