"""Is the process that reads adapters beside the steps of a worker, or beside a gateway: ``python -m`` runs it.

It shares no interpreter with its owner, and gives way to all others. It speaks over its standard streams. First come
two lines: its limit of memory, and a description of an object, such as an AdapterReader. Then each line of input, a
JSON list of the name of one of that object's methods and its arguments, has an answer: a head, JSON, and bytes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from pillion.engine.adapters.adapter_forms import NO_BYTES, Bytes, made
from pillion.errors import ConfigError, PillionError
from pillion.host.cores import BACKGROUND_NICENESS

# The head of an answer has the number of bytes of its JSON, and of the bytes after it.
ANSWER_HEAD = struct.Struct("<QQ")

# Where other processes need the cores, this one computes for BURST_S and then pauses for PAUSE_S. A step is as slow as
# its slowest thread, and a process that runs may keep a core for milliseconds, however low its priority is.
BURST_S = 0.0005
PAUSE_S = 0.002
# Where many threads wait for each core, this process waits long until it gets one; then it may compute for a share of
# that wait, up to LONGEST_BURST_S.
LONGEST_BURST_S = 0.004
BURSTS_OF_A_WAIT = 20
# Where a burst and its pause took LATE_S longer than planned, other processes need the cores, and are assumed to need
# them for the next CROWDED_BURSTS bursts.
LATE_S = 0.0003
CROWDED_BURSTS = 16


class WorkPace:
    """Decides when the process computes and when it pauses, while others need the cores; sans-IO (I9). Times are in
    seconds."""

    def __init__(self) -> None:
        self._crowded = 0
        self._burst_s = BURST_S
        self.begin(0.0, 0.0)

    def begin(self, now_s: float, computed_s: float) -> None:
        """Notes that a job begins. ``computed_s`` is how long this process has computed so far."""
        self._began_s, self._before_s, self._paused_s = now_s, computed_s, 0.0
        # Whether others need the cores is unknown before a first pause has ended, so each job begins with one.
        self._crowded = max(self._crowded, 2)

    def pause_s(self, now_s: float, computed_s: float) -> float:
        """Returns how long the process pauses now; 0 to go on."""
        used_s = computed_s - self._before_s
        if used_s < self._burst_s:
            return 0.0
        late_s = now_s - self._began_s - used_s - self._paused_s
        self._crowded = CROWDED_BURSTS if late_s > LATE_S else max(0, self._crowded - 1)
        self._burst_s = min(max(BURST_S, late_s / BURSTS_OF_A_WAIT), LONGEST_BURST_S)
        self._began_s, self._before_s = now_s, computed_s
        self._paused_s = PAUSE_S if self._crowded else 0.0
        return self._paused_s


@contextmanager
def _in_bursts(pace: WorkPace) -> Iterator[None]:
    """Runs the block in bursts of computing: a timer interrupts it between two of its operations."""

    def interrupt(*_: object) -> None:
        if pause_s := pace.pause_s(time.monotonic(), time.process_time()):
            time.sleep(pause_s)
        signal.setitimer(signal.ITIMER_REAL, BURST_S)

    pace.begin(time.monotonic(), time.process_time())
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, BURST_S)
    try:
        yield
    finally:
        # A timer whose signal is still to be handled must not start the next one.
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Works until there are no more jobs, which is when the owner has ended."""
    memory_bytes = json.loads(jobs.readline())
    if memory_bytes:
        with suppress(ValueError, OSError):
            # The limit does not count mapped files. Some systems know the limit and refuse to set it.
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    worker, pace = made(json.loads(jobs.readline())), WorkPace()
    for job in jobs:
        method, *arguments = json.loads(job)
        with _in_bursts(pace):
            about, data = _answer(getattr(worker, method), arguments)
            words = json.dumps(about).encode()
            answers.write(ANSWER_HEAD.pack(len(words), data.nbytes) + words)
            answers.write(data.data)
            answers.flush()
        # These objects would keep memory until the next job that nobody needs.
        del about, data, words


def _answer(method: Any, arguments: list[Any]) -> tuple[dict[str, Any], Bytes]:
    try:
        about, data = method(*arguments)
    except PillionError as error:
        return {"error": [type(error).__name__, error.message]}, NO_BYTES
    except MemoryError:
        return {"error": [ConfigError.__name__, f"{arguments[0]} takes too much memory to read"]}, NO_BYTES
    except Exception as error:  # noqa: BLE001  (the owner reports it, and the next adapter may do)
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}, NO_BYTES
    return {"about": about}, data


if __name__ == "__main__":
    os.nice(BACKGROUND_NICENESS)
    # On a signal the owner decides what to do for the whole process group; this process ends when its input does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(BrokenPipeError), os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        # Text that a library prints must not come between answers.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin.buffer, answers)
