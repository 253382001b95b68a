"""Program of the subprocess that reads adapters for a worker or a gateway, run by ``python -m``.

It yields the cores to all other processes. stdin: JSON lines with the memory limit, an object such as an AdapterReader
(:func:`pillion.engine.adapters.adapter_forms.described`), and then per job a method of it and its arguments, as a list.
stdout: per job ANSWER_HEAD, JSON, and bytes.
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

# Numbers of bytes of the JSON and of the data that follow.
ANSWER_HEAD = struct.Struct("<QQ")

# On busy cores, compute for BURST_S, then sleep for PAUSE_S. A step is as slow as its slowest thread, and even a
# process of the lowest priority may occupy a core for milliseconds.
BURST_S = 0.0005
PAUSE_S = 0.002
# After a long wait for a core, a burst may last 1 / BURSTS_OF_A_WAIT of the wait, up to LONGEST_BURST_S.
LONGEST_BURST_S = 0.004
BURSTS_OF_A_WAIT = 20
# Cores count as busy for CROWDED_BURSTS bursts after a burst and its pause took LATE_S longer than planned.
LATE_S = 0.0003
CROWDED_BURSTS = 16


class WorkPace:
    """Alternation of bursts of computation and pauses on busy cores; sans-IO (I9)."""

    def __init__(self) -> None:
        self._crowded_bursts = 0
        self._burst_s = BURST_S
        self.begin(0.0, 0.0)

    def begin(self, now_s: float, cpu_s: float) -> None:
        """Start a job; ``cpu_s`` is the process's CPU time so far."""
        self._began_s, self._began_cpu_s, self._paused_s = now_s, cpu_s, 0.0
        # Begin with a pause, since busy cores are only detected after one.
        self._crowded_bursts = max(self._crowded_bursts, 2)

    def pause_s(self, now_s: float, cpu_s: float) -> float:
        """Return the seconds to sleep now; 0 to continue."""
        used_s = cpu_s - self._began_cpu_s
        if used_s < self._burst_s:
            return 0.0
        late_s = now_s - self._began_s - used_s - self._paused_s
        self._crowded_bursts = CROWDED_BURSTS if late_s > LATE_S else max(0, self._crowded_bursts - 1)
        self._burst_s = min(max(BURST_S, late_s / BURSTS_OF_A_WAIT), LONGEST_BURST_S)
        self._began_s, self._began_cpu_s = now_s, cpu_s
        self._paused_s = PAUSE_S if self._crowded_bursts else 0.0
        return self._paused_s


@contextmanager
def _in_bursts(pace: WorkPace) -> Iterator[None]:
    """Run the context in bursts; a timer's signal handler makes the pauses."""

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
        # A pending signal must not restart the timer.
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Run jobs until the input ends: the process's owner has closed it or exited."""
    memory_bytes = json.loads(jobs.readline())
    if memory_bytes:
        with suppress(ValueError, OSError):
            # RLIMIT_DATA does not count mapped files. Some systems reject it.
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    worker, pace = made(json.loads(jobs.readline())), WorkPace()
    for job in jobs:
        method, *arguments = json.loads(job)
        with _in_bursts(pace):
            about, data = _answer(getattr(worker, method), arguments)
            encoded = json.dumps(about).encode()
            answers.write(ANSWER_HEAD.pack(len(encoded), data.nbytes) + encoded)
            answers.write(data.data)
            answers.flush()
        # Free the memory before the next job.
        del about, data, encoded


def _answer(method: Any, arguments: list[Any]) -> tuple[dict[str, Any], Bytes]:
    try:
        about, data = method(*arguments)
    except PillionError as error:
        return {"error": [type(error).__name__, error.message]}, NO_BYTES
    except MemoryError:
        return {"error": [ConfigError.__name__, f"{arguments[0]} takes too much memory to read"]}, NO_BYTES
    except Exception as error:  # noqa: BLE001  (the owner reports it, and later jobs may succeed)
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}, NO_BYTES
    return {"about": about}, data


if __name__ == "__main__":
    os.nice(BACKGROUND_NICENESS)
    # Signals of the process group are the owner's to handle; this process ends with its input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(BrokenPipeError), os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        # Keep library output out of the answers.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin.buffer, answers)
