"""The board: a mapped file in which a test arms faults and a cluster's processes count their passes of points.

empty --arm--> armed, passes left --the last one--> empty, and fired: by which process, when
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

# Names the board's file to a process. No prefix of the product's settings, which reject unknown names.
BOARD_VARIABLE = "TESTBED_FAULT_BOARD"
# Minimum timeout of a Redis call in a process with a board, in ms.
REDIS_PATIENCE_VARIABLE = "TESTBED_REDIS_PATIENCE_MS"
REDIS_PATIENCE_MS = 30_000
# Folders on the path of a process with hooks.
HOOK_PATHS = (str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[3]))
# Faults armed at once.
SLOTS = 2
# 64-bit words of a slot.
_POINT, _LEFT, _SIGNAL, _VICTIM, _FIRED_PID, _FIRED_NS, _HELD_MS, _WORDS = range(8)
# Points; each has a word after the slots with the number of its passes.
MAX_POINTS = 255
_COUNTS = SLOTS * _WORDS


@dataclass(frozen=True, slots=True)
class FiredFault:
    """A fault that has happened: the process that passed the point, and the monotonic time."""

    pid: int
    at_s: float


class FaultBoard:
    """One board, mapped by the test and by each process of its cluster."""

    def __init__(self, path: pathlib.Path) -> None:
        """Map the board's file, creating it if missing."""
        self._path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = (_COUNTS + MAX_POINTS + 1) * 8
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            self._words = memoryview(mmap.mmap(descriptor, size)).cast("q")
        finally:
            os.close(descriptor)

    # Called by the test:

    def arm(
        self,
        slot: int,
        point: FaultPoint,
        passing: int,
        number: signal.Signals | None,
        victim: int = 0,
        held_s: float = 0.0,
    ) -> None:
        """Arm a fault: the ``passing``-th pass of a point from now on, counted over all processes of its role, sends a
        signal to the passing process or to ``victim``. Without a signal, the passing thread is held for ``held_s``."""
        base = slot * _WORDS
        values = {_LEFT: passing, _SIGNAL: number or 0, _VICTIM: victim, _FIRED_PID: 0, _FIRED_NS: 0}
        values[_HELD_MS] = round(held_s * 1000)
        for word, value in values.items():
            self._words[base + word] = value
        self._words[base + _POINT] = point.number

    def fired(self, slot: int) -> FiredFault | None:
        """Return the last armed fault once it has happened, else None."""
        base = slot * _WORDS
        pid = self._words[base + _FIRED_PID]
        return FiredFault(pid, self._words[base + _FIRED_NS] / 1e9) if pid else None

    def disarm(self) -> None:
        """Disarm all faults; :meth:`fired` still returns those that have happened."""
        for slot in range(SLOTS):
            self._words[slot * _WORDS + _POINT] = 0

    def passings(self, point: FaultPoint) -> int:
        """Return the approximate number of passes of a point since the board was cleared: simultaneous ones may count
        as one."""
        return self._words[_COUNTS + point.number]

    def clear(self) -> None:
        """Clear armed and fired faults and the counts of passes."""
        self.disarm()
        for word in range(len(self._words)):
            self._words[word] = 0

    # Called by the cluster's processes:

    def passes(self, number: int) -> None:
        """Record that this process passes a point: a few memory accesses if the point is not armed."""
        words = self._words
        words[_COUNTS + number] += 1
        for base in range(0, _COUNTS, _WORDS):
            if words[base + _POINT] == number:
                self._count(base, number)

    def _count(self, base: int, number: int) -> None:
        words = self._words
        # A descriptor per lock, so that threads of one process exclude each other as well.
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
    """Return the environment variables that give a cluster the hooks. Unless the test breaks Redis, its processes wait
    long for each answer of Redis, however busy the machine is."""
    patience = {REDIS_PATIENCE_VARIABLE: str(REDIS_PATIENCE_MS)} if redis_is_sound else {}
    return {BOARD_VARIABLE: str(board), **hook_path(os.environ), **patience}


def hooked(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the hooks and, unless it has one, without a board: forks count nothing before they
    have one."""
    return {BOARD_VARIABLE: "", **environ, **hook_path(environ)}


def other_paths(environ: Mapping[str, str]) -> str:
    """Return the environment's import path without the folders of the hooks."""
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(path for path in paths if path and path not in HOOK_PATHS)


def hook_path(environ: Mapping[str, str]) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (*HOOK_PATHS, other_paths(environ))))}
