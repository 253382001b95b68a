"""Simulates the disks of machines: real files, behind calls that take time, stall, and fail where a schedule says so.

    well --stalled until a time--> each call waits until then --> well
    well --full--> writes raise ENOSPC --> well            flip: a bit of every second block's file is another one

:class:`DiskCalls` stands for the module ``os`` in kvstore/tiers/disk_tier/disk_files.py. What a process had open is
closed when it dies, and what it was writing stays as it was then.
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

# A call takes at most this long on a disk that is not stalled.
MAX_CALL_S = 0.002
# The files lie in a memory file system, which is faster than a disk and behaves alike.
PLACES = ("/dev/shm",)  # noqa: S108


class SimDisk:
    """Represents the disk of one machine. No call ends before the time ``stalled_until_s``, and every write fails while
    the disk is ``full``."""

    def __init__(self) -> None:
        place = next((place for place in PLACES if os.path.isdir(place)), None)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="pillion-simulator-", dir=place))
        self.stalled_until_s = 0.0
        self.full = False

    def flip(self, random: Random) -> int:
        """Flips a bit of the payload of every second block's file; returns how many files it changed."""
        files = [path for path in sorted(self.folder.rglob(f"*{SUFFIX}")) if random.random() < 0.5]
        for path in files:
            data, stamps = bytearray(path.read_bytes()), path.stat()
            data[random.randrange(min(HEADER_BYTES, len(data) - 1), len(data))] ^= 1 << random.randrange(8)
            path.write_bytes(data)
            os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
        return len(files)

    def remove(self) -> None:
        """Removes the disk's files."""
        shutil.rmtree(self.folder, ignore_errors=True)


class DiskCalls:
    """Stands for those calls of ``os`` that reach a disk; all others are passed on to ``os``."""

    def __init__(self, disks: Iterable[SimDisk], random: Random) -> None:
        self._disks = list(disks)
        self._random = random
        self._paths: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, *args: Any) -> int:
        """Opens a file for the process that runs."""
        fd = os.open(path, *args)
        self._paths[fd] = str(path)
        PROCESS.get().on_death.append(lambda: self._close_of_dead(fd, str(path)))
        return fd

    def close(self, fd: int) -> None:
        """Closes a file, unless its process is dead, because its death has closed the file."""
        if self._paths.pop(fd, None) is not None:
            os.close(fd)

    def writev(self, fd: int, pieces: list[memoryview]) -> int:
        """Writes the pieces at the file's position, or raises OSError where the disk is full."""
        self._take_time(self._paths[fd])
        if self._disk_of(self._paths[fd]).full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.writev(fd, pieces)

    def readv(self, fd: int, pieces: list[memoryview]) -> int:
        """Reads into the pieces from the file's position."""
        self._take_time(self._paths[fd])
        return os.readv(fd, pieces)

    def read(self, fd: int, size: int) -> bytes:
        """Reads at most ``size`` bytes from the file's position."""
        self._take_time(self._paths[fd])
        return os.read(fd, size)

    def rename(self, old: str, new: str) -> None:
        """Renames a file, in the time that a call to its disk takes."""
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
