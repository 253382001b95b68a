"""Cores that this process may use, and niceness of background threads."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path, PurePosixPath
from threading import get_native_id

from pillion.errors import ConfigError

MAX_CORES = 1024
MAX_CPU_THREADS = 512
# Extra niceness of threads that do not compute steps: all share the cores, and a step is as slow as its slowest thread.
# Not the max, because a step may wait for the GIL while such a thread has it.
BACKGROUND_NICENESS = 10


def allowed_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity and any container quota."""
    return max(1, int(min(len(allowed_cores()), quota_cores())))


def quota_cores(root: Path = Path("/")) -> float:
    """Return this process's CPU quota in cores: the tightest quota of its control group and all enclosing ones, of
    either version. Infinite if there is none, and outside Linux."""
    groups = root / "sys" / "fs" / "cgroup"
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    # Lines of version 2 name no controllers. In a container without a cgroup namespace the paths are the host's, and
    # the container's own group is the root.
    quotas, own = [math.inf], [tuple(line.split(":", 2)[1:]) for line in lines if line.count(":") > 1]
    for controllers, path in (("", "/"), ("cpu", "/"), *own):
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = PurePosixPath(path.strip("/"))
        for mount in (controllers, "cpu") if controllers else ("", "unified"):
            quotas += [_quota(groups / mount / folder) for folder in (inner, *inner.parents)]
    return min(quotas)


def _quota(folder: Path) -> float:
    """Return one control group's quota in cores; infinite without a quota or a group."""
    try:
        if (file := folder / "cpu.max").is_file():
            quota, period = file.read_text("ascii").split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period"))
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
    return cores if cores > 0 else math.inf


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse a list of cores: "0,2-4" -> (0, 2, 3, 4). Raises ConfigError for invalid text, and for cores that this
    process may not use."""
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


def lower_priority() -> None:
    """Make this thread, and threads that it starts, nice, on systems with per-thread niceness."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS)
