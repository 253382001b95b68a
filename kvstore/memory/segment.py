"""Host memory of a pool or region: an anonymous file that the KV node makes and workers map.

It has no name anywhere: memfd on Linux, a temporary file that is unlinked at once elsewhere. Workers get its descriptor
over the attach socket (:mod:`pillion.kvstore.node.attach_server`), and when the last process that has it ends, however
it ends, the kernel frees the memory.

    descriptor of the segment   sent around; it stands for one open file, and nobody locks that
       |-- opened anew by the node, locked at place 0 --> mapped by the node      its ownership
       '-- opened anew by a worker, locked at its place --> mapped by the worker  its use

A lock of an open file (fcntl(2), "Open file description locks") ends with the last descriptor *and mapping* of that
file, so the kernel frees a process's place exactly when no thread of it can store to the memory any more. A KV node
that takes over the pool of a dead one asks for nothing else (:mod:`pillion.kvstore.memory.kept_pool`).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import sys
import tempfile

from pillion.errors import ConfigError

# Linux: no process that has the descriptor can cut the file short under another one's mapping.
_F_ADD_SEALS, _F_GET_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1034, 1, 2, 4
# struct flock of 64-bit Linux: type, whence, start, length, process id, and padding.
_FLOCK = struct.Struct("hhqqi4x")
# The place of the node that owns a segment. Workers' places are their epochs.
OWNER = 0


class Segment:
    """The owner of the descriptor. Pages cost memory only once a process writes to them. Raises ConfigError if the
    machine cannot make a segment of ``size_bytes``."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ConfigError(f"a KV pool of {size_bytes} bytes holds nothing")
        self.size_bytes = size_bytes
        try:
            self._fd = _anonymous_file(size_bytes)
        except OSError as error:
            raise ConfigError(f"cannot make a KV pool of {size_bytes} bytes: {error.strerror}") from None
        self._own_fd = -1

    @classmethod
    def kept(cls, descriptor: int) -> Segment:
        """The segment of an earlier process behind ``descriptor``, which it closes in the end. Raises ConfigError where
        its size could change."""
        segment = cls.__new__(cls)
        segment.size_bytes, segment._fd, segment._own_fd = os.fstat(descriptor).st_size, descriptor, -1
        if sys.platform != "linux" or not _is_sealed(descriptor):
            segment.close()
            raise ConfigError("memory that was kept is none that a KV node has made")
        return segment

    def fileno(self) -> int:
        """Returns the descriptor, to be sent."""
        return self._fd

    @property
    def to_map(self) -> int:
        """The descriptor to be mapped by this process: that of its ownership, where it has that."""
        return self._own_fd if self._own_fd >= 0 else self._fd

    def own(self) -> bool:
        """Owns the segment, for as long as this process maps it by ``to_map`` or has not closed it. Returns False where
        another process does. Raises OSError where the system has no such locks."""
        if self._own_fd >= 0:
            return True
        own_fd = reopened(self._fd)
        try:
            lock_place(own_fd, OWNER)
        except BlockingIOError:
            os.close(own_fd)
            return False
        except OSError:
            os.close(own_fd)
            raise
        self._own_fd = own_fd
        return True

    def users(self) -> set[int]:
        """The places of the processes that use the segment, without its owner's."""
        return locked_places(self.to_map)

    def close(self) -> None:
        """Gives up the node's own descriptors; workers that map the memory keep it. Idempotent."""
        for descriptor in (self._fd, self._own_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._own_fd = -1


def reopened(descriptor: int) -> int:
    """Opens the file behind a descriptor anew, so that locks on it are this process's alone. Raises OSError."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def lock_place(descriptor: int, place: int) -> None:
    """Locks one place of an open file. Raises BlockingIOError where another open file has it, OSError where the system
    has no such locks."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
    except AttributeError:
        raise OSError(errno.ENOSYS, "no locks of open files") from None
    except OSError as error:
        # The system may say either.
        raise BlockingIOError(error.errno, error.strerror) if error.errno == errno.EACCES else error from None


def locked_places(descriptor: int) -> set[int]:
    """The places behind OWNER that other open files have locked. Raises OSError."""
    places = set[int]()
    # The system names any one lock within a range, so both sides of it are looked at. A length of 0 has no end.
    ranges = [(OWNER + 1, 0)]
    while ranges:
        first, length = ranges.pop()
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, length, 0)
        kind, _, start, locked, _ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            continue
        places.add(start)
        if start > first:
            ranges.append((first, start - first))
        behind = start + locked
        if locked and (not length or behind < first + length):
            ranges.append((behind, first + length - behind if length else 0))
    return places


def map_shared(fd: int, size_bytes: int) -> mmap.mmap:
    """Maps a descriptor, writable and shared. Raises ConfigError if the file is shorter, or cannot be mapped."""
    have_bytes = os.fstat(fd).st_size
    if have_bytes < size_bytes:
        raise ConfigError(f"the KV pool has {have_bytes} bytes, {size_bytes} were promised")
    try:
        return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise ConfigError(f"cannot map a KV pool of {size_bytes} bytes: {error.strerror}") from None


def _anonymous_file(size_bytes: int) -> int:
    if sys.platform == "linux":
        fd = os.memfd_create("pillion-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        fd, path = tempfile.mkstemp(prefix="pillion-kv-pool-")
        os.unlink(path)
    try:
        os.ftruncate(fd, size_bytes)
        if sys.platform == "linux":
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def _is_sealed(descriptor: int) -> bool:
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        return False
    return seals & (_F_SEAL_SHRINK | _F_SEAL_GROW) == _F_SEAL_SHRINK | _F_SEAL_GROW
