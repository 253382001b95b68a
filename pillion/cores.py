"""Finds the machine's cores that this process may use, and makes background threads leave the cores to others."""

from __future__ import annotations

import os
import sys
from threading import get_native_id

from pillion.errors import ConfigError

MAX_CORES = 1024
# A thread pool of the CPU kernels can have at most this many threads.
MAX_CPU_THREADS = 512
# Threads beside steps are this much nicer than those that compute steps: both use the same cores, and a step is as slow
# as its slowest thread. Their niceness is not the highest, because such a thread may hold the interpreter's lock while
# a step waits for it.
BACKGROUND_NICENESS = 10


def allowed_cores() -> frozenset[int]:
    """Returns the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Returns how many cores this process may use, by its affinity and by a container's quota where there is one."""
    cores = len(allowed_cores())
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def parse_cores(text: str) -> tuple[int, ...]:
    """Parses a list of cores: "0,2-4" -> (0, 2, 3, 4). Raises ConfigError for a text that is no list, and for cores
    that this process lacks."""
    cores: list[int] = []
    for part in filter(None, text.replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--cpu-affinity {text!r} is not a list of cores; write 0,1 or 4-7")
        begin, end = int(first), int(last or first)
        if end < begin or end - begin >= MAX_CORES:
            raise ConfigError(f"--cpu-affinity {text!r}: {part} is not a range of cores")
        cores += range(begin, end + 1)
    allowed = allowed_cores()
    missing = [core for core in cores if core not in allowed]
    if missing:
        raise ConfigError(f"--cpu-affinity: this process may not use core {missing[0]}")
    return tuple(cores)


def give_way() -> None:
    """Makes this thread, and those that it starts, nice, where threads have a niceness of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS)
