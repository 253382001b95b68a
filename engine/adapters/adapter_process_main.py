"""The process that reads adapters beside the steps of a worker, or beside a gateway: ``python -m`` runs it.

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

from pillion.cores import BACKGROUND_NICENESS
from pillion.engine.adapters.adapter_forms import NO_BYTES, Bytes, made
from pillion.errors import ConfigError, PillionError

# The bytes of an answer's JSON, and of what follows it.
ANSWER_HEAD = struct.Struct("<QQ")

# Where others need the cores, it computes so long at a time, and leaves them alone for so long then. A step is as slow
# as its slowest thread, and a process that runs may keep a core for milliseconds, however nice it is.
BURST_S = 0.0005
PAUSE_S = 0.002
# Where many wait for each core, this process waits long for its turn; then it computes for a share of that wait, up to
# this long.
LONGEST_BURST_S = 0.004
BURSTS_OF_A_WAIT = 20
# Others need the cores where a burst and its pause took so much longer than planned; that holds for some bursts.
LATE_S = 0.0003
CROWDED_BURSTS = 16


class WorkPace:
    """Computes in bursts while others need the cores; sans-IO (I9). Times are in seconds."""

    def __init__(self) -> None:
        self._crowded = 0
        self._burst_s = BURST_S
        self.begin(0.0, 0.0)

    def begin(self, now_s: float, computed_s: float) -> None:
        """A job begins. ``computed_s``: how long this process has computed so far."""
        self._began_s, self._before_s, self._paused_s = now_s, computed_s, 0.0
        # Whether others need the cores is unknown before a first pause has ended, so each job begins with one.
        self._crowded = max(self._crowded, 2)

    def pause_s(self, now_s: float, computed_s: float) -> float:
        """How long to pause now; 0 to go on."""
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
    """A timer interrupts what runs here, between two of its operations."""

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
        # A timer that has fallen due meanwhile must not set the next one.
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Works until there are no more jobs, which is when the owner has ended."""
    memory_bytes = json.loads(jobs.readline())
    if memory_bytes:
        with suppress(ValueError, OSError):
            # Files that are mapped do not count. Some systems know this limit and refuse to set it.
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
        # Until the next job they would be memory that nobody needs.
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
    # Signals for the whole process group are the owner's to answer; this process ends with its input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(BrokenPipeError), os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        # What prints by chance must not come between answers.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin.buffer, answers)
