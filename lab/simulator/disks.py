"""Disks of simulated machines: real files behind calls that take time, stall, and fail when a schedule says so.

    well --stalled until a time--> each call waits until then --> well
    well --full--> writes raise ENOSPC --> well            flip: one bit changes in every second block's file

:class:`DiskCalls` replaces the module ``os`` in kvstore/tiers/disk_tier/disk_files.py. Open files of a process are
closed when it dies, with its partial writes left as they are.
"""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterable
from random import Random
from typing import Any

from lab.simulator.sim_threads import park
from lab.simulator.virtual_loop import PROCESS
from pillion.kvstore.tiers.disk_tier.disk_files import HEADER_BYTES, SUFFIX

# Longest call to a disk that is not stalled.
MAX_CALL_S = 0.002
# Folders of a memory file system, in place of a slower disk.
PLACES = ("/dev/shm",)  # noqa: S108


class SimDisk:
    """The disk of one machine. Calls end after ``stalled_until_s``; writes fail while it is ``full``."""

    def __init__(self) -> None:
        place = next((place for place in PLACES if os.path.isdir(place)), None)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="pillion-simulator-", dir=place))
        self.stalled_until_s = 0.0
        self.full = False

    def flip(self, random: Random) -> int:
        """Flip a payload bit of every second block's file; return the number of changed files."""
        files = [path for path in sorted(self.folder.rglob(f"*{SUFFIX}")) if random.random() < 0.5]
        for path in files:
            data, stamps = bytearray(path.read_bytes()), path.stat()
            data[random.randrange(min(HEADER_BYTES, len(data) - 1), len(data))] ^= 1 << random.randrange(8)
            path.write_bytes(data)
            os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
        return len(files)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class DiskCalls:
    """The disk calls of ``os``; others pass through."""

    def __init__(self, disks: Iterable[SimDisk], random: Random) -> None:
        self._disks = list(disks)
        self._random = random
        self._paths: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, *args: Any) -> int:
        """Open a file for the current process."""
        fd = os.open(path, *args)
        self._paths[fd] = str(path)
        PROCESS.get().on_death.append(lambda: self._close_of_dead(fd, str(path)))
        return fd

    def close(self, fd: int) -> None:
        """Close a file, unless its process is dead, whose death has closed it."""
        if self._paths.pop(fd, None) is not None:
            os.close(fd)

    def writev(self, fd: int, pieces: list[memoryview]) -> int:
        """Write the pieces at the file's position. Raises OSError if the disk is full."""
        self._take_time(self._paths[fd])
        if self._disk_of(self._paths[fd]).full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.writev(fd, pieces)

    def readv(self, fd: int, pieces: list[memoryview]) -> int:
        """Read into the pieces from the file's position."""
        self._take_time(self._paths[fd])
        return os.readv(fd, pieces)

    def read(self, fd: int, size: int) -> bytes:
        """Read at most ``size`` bytes from the file's position."""
        self._take_time(self._paths[fd])
        return os.read(fd, size)

    def rename(self, old: str, new: str) -> None:
        self._take_time(new)
        os.rename(old, new)

    def _take_time(self, path: str) -> None:
        park(self._random.random() * MAX_CALL_S)
        while (left_s := self._disk_of(path).stalled_until_s - time.monotonic()) > 0:
            park(left_s)

    def _disk_of(self, path: str) -> SimDisk:
        return next(disk for disk in self._disks if path.startswith(str(disk.folder)))

    def _close_of_dead(self, fd: int, path: str) -> None:
        if self._paths.get(fd) == path:
            self.close(fd)
