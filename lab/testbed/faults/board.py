"""Maps the board: a file in which a test arms faults, and in which the processes of a cluster count their passings.

empty --arm--> armed, passings to go --the last one--> empty, and fired: by whom, when
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pathlib
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lab.testbed.faults.points import FaultPoint

# This variable names the board's file to a process. Its name must not begin as those of the product's settings do.
BOARD_VARIABLE = "TESTBED_FAULT_BOARD"
# This variable says how many milliseconds a process with a board waits at least for each answer of Redis.
REDIS_PATIENCE_VARIABLE = "TESTBED_REDIS_PATIENCE_MS"
REDIS_PATIENCE_MS = 30_000
# A process that has these folders on its path has the hooks.
HOOK_PATHS = (str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[3]))
# This many faults can be armed at once.
SLOTS = 2
# These are the 64-bit words of a slot.
_POINT, _LEFT, _SIGNAL, _VICTIM, _FIRED_PID, _FIRED_NS, _HELD_MS, _WORDS = range(8)
# After the slots there is a word for each point, with the number of its passings.
MAX_POINTS = 255
_COUNTS = SLOTS * _WORDS


@dataclass(frozen=True, slots=True)
class FiredFault:
    """Describes a fault that has happened: the process that passed the point, and when, by the monotonic clock."""

    pid: int
    at_s: float


class FaultBoard:
    """Represents one board, mapped by the test and by each process of its cluster."""

    def __init__(self, path: pathlib.Path) -> None:
        """Maps the board's file, and makes it where it does not exist."""
        self._path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = (_COUNTS + MAX_POINTS + 1) * 8
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            self._words = memoryview(mmap.mmap(descriptor, size)).cast("q")
        finally:
            os.close(descriptor)

    # The methods from here on are those that the test calls.

    def arm(
        self,
        slot: int,
        point: FaultPoint,
        passing: int,
        number: signal.Signals | None,
        victim: int = 0,
        held_s: float = 0.0,
    ) -> None:
        """Arms a fault: the ``passing``-th passing of a point, from now on and over all processes of its role, sends a
        signal to the process that passes, or to ``victim``. Without a signal, the thread that passes is held for
        ``held_s``, and then the process goes on."""
        base = slot * _WORDS
        values = {_LEFT: passing, _SIGNAL: number or 0, _VICTIM: victim, _FIRED_PID: 0, _FIRED_NS: 0}
        values[_HELD_MS] = round(held_s * 1000)
        for word, value in values.items():
            self._words[base + word] = value
        self._words[base + _POINT] = point.number

    def fired(self, slot: int) -> FiredFault | None:
        """Returns the fault that was armed last, once it has happened; None before that."""
        base = slot * _WORDS
        pid = self._words[base + _FIRED_PID]
        return FiredFault(pid, self._words[base + _FIRED_NS] / 1e9) if pid else None

    def disarm(self) -> None:
        """Disarms all faults: none happens from now on. The faults that have happened are still known."""
        for slot in range(SLOTS):
            self._words[slot * _WORDS + _POINT] = 0

    def passings(self, point: FaultPoint) -> int:
        """Returns about how often the processes of its role have passed a point since the board was cleared: two that
        pass it in the same moment may count as one."""
        return self._words[_COUNTS + point.number]

    def clear(self) -> None:
        """Clears the board: no fault is armed, none has happened, and no passing is counted."""
        self.disarm()
        for word in range(len(self._words)):
            self._words[word] = 0

    # The methods from here on are those that the cluster's processes call.

    def passes(self, number: int) -> None:
        """Notes that this process passes a point. It costs a few accesses to memory where the point is not armed."""
        words = self._words
        words[_COUNTS + number] += 1
        for base in range(0, _COUNTS, _WORDS):
            if words[base + _POINT] == number:
                self._count(base, number)

    def _count(self, base: int, number: int) -> None:
        words = self._words
        # Each lock gets a descriptor of its own, so that the threads of a process keep each other out, too.
        with self._path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if words[base + _POINT] != number:
                return
            words[base + _LEFT] -= 1
            if words[base + _LEFT] > 0:
                return
            words[base + _POINT] = 0
            words[base + _FIRED_NS] = time.monotonic_ns()
            words[base + _FIRED_PID] = os.getpid()
            victim, sent = words[base + _VICTIM] or os.getpid(), words[base + _SIGNAL]
            held_s = words[base + _HELD_MS] / 1000
        if not sent:
            time.sleep(held_s)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, sent)


def hook_environment(board: pathlib.Path, *, redis_is_sound: bool = True) -> dict[str, str]:
    """Returns the variables with which a cluster has the hooks, beside those that it has anyway. Unless the test harms
    Redis, its processes wait for each answer of Redis, however busy the machine is."""
    patience = {REDIS_PATIENCE_VARIABLE: str(REDIS_PATIENCE_MS)} if redis_is_sound else {}
    return {BOARD_VARIABLE: str(board), **_hook_path(os.environ), **patience}


def hooked(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with the hooks and, where it has none, without a board: forks of its process count nothing
    before they have one."""
    return {BOARD_VARIABLE: "", **environ, **_hook_path(environ)}


def other_paths(environ: Mapping[str, str]) -> str:
    """Returns the environment's path for imports without the folders of the hooks."""
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(path for path in paths if path and path not in HOOK_PATHS)


def _hook_path(environ: Mapping[str, str]) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (*HOOK_PATHS, other_paths(environ))))}
