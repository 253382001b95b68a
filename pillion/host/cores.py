"""Finds the machine's cores that this process may use, and makes background threads leave the cores to others."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path, PurePosixPath
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
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity and by a container's quota where there is one."""
    return max(1, int(min(len(allowed_cores()), quota_cores())))


def quota_cores(root: Path = Path("/")) -> float:
    """Return how many cores' time the control groups of this process have: the tightest quota of its own group and of
    all groups around it, of either version. It is infinite where there is none, and outside Linux."""
    groups = root / "sys" / "fs" / "cgroup"
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    # Version 2 names no controllers. In a container without a namespace of its own for groups the path is the host's,
    # and the container's own group stands at the root.
    found, own = [math.inf], [tuple(line.split(":", 2)[1:]) for line in lines if line.count(":") > 1]
    for controllers, path in (("", "/"), ("cpu", "/"), *own):
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = PurePosixPath(path.strip("/"))
        for place in (controllers, "cpu") if controllers else ("", "unified"):
            found += [_quota(groups / place / folder) for folder in (inner, *inner.parents)]
    return min(found)


def _quota(folder: Path) -> float:
    """Return the cores' time that one control group may have; infinite where it has no quota, or is not there."""
    try:
        if (file := folder / "cpu.max").is_file():
            quota, period = file.read_text("ascii").split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period"))
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        # The quota "max" is no number.
        return math.inf
    return cores if cores > 0 else math.inf


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse a list of cores: "0,2-4" -> (0, 2, 3, 4). Raises ConfigError for a text that is no list, and for cores
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
    """Make this thread, and those that it starts, nice, where threads have a niceness of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS)
