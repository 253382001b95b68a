"""A disk filled from outside: a real file system of some hundred kilobytes if one can be mounted, and a folder in which
writes fail as on a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest


class SmallDisk:
    """A disk with ``folder``, whose free bytes are set by :meth:`leave`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def leave(self, free_bytes: int) -> None:
        """Fill or free the disk until this many bytes are free."""
        raise NotImplementedError


class _Mounted(SmallDisk):
    def leave(self, free_bytes: int) -> None:
        other = self.folder.parent / "of others"
        taken = other.stat().st_size if other.exists() else 0
        about = os.statvfs(self.folder)
        size = max(0, taken + about.f_bavail * about.f_frsize - free_bytes)
        with other.open("ab") as file:
            file.truncate(min(size, taken))
            file.write(bytes(size - min(size, taken)))


class _Pretended(SmallDisk):
    """Make ``os.writev`` fail if files in the folder would exceed the disk."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        super().__init__(folder)
        self._room_bytes = size_bytes
        self._writev = os.writev

    def _used_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def leave(self, free_bytes: int) -> None:
        self._room_bytes = self._used_bytes() + free_bytes

    def writev(self, file: int, pieces: Any) -> int:
        end = os.lseek(file, 0, os.SEEK_CUR) + sum(memoryview(piece).nbytes for piece in pieces)
        if self._used_bytes() + max(0, end - os.fstat(file).st_size) > self._room_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._writev(file, pieces)


@contextlib.contextmanager
def mounted_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount a file system; skip the test if this process may not."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(path)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        (path / "folder").mkdir()
        yield _Mounted(path / "folder")
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def pretended_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Yield a folder in which ``os.writev`` can meet a full disk."""
    path.mkdir()
    disk = _Pretended(path, size_bytes)
    with mock.patch.object(os, "writev", disk.writev):
        yield disk
