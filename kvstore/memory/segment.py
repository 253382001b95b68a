"""Host memory of a pool or region: an anonymous file that the KV node creates and workers map.

It has no name: memfd on Linux, an unlinked temporary file elsewhere. Workers get its descriptor over the attach socket
(:mod:`pillion.kvstore.node.attach_server`), and the kernel frees the memory when the last process with it ends, however
it ends.

    descriptor of the segment   sent to other processes; refers to one open file, never locked
       |-- reopened by the node, locked at byte 0 --> mapped by the node          its ownership
       '-- reopened by a worker, locked at its place, the byte of its epoch --> mapped by the worker   its use

An open file description lock (fcntl(2)) ends with the last descriptor *and mapping* of that open file, so the kernel
releases a process's place exactly when no thread of it can store to the memory any more. A KV node that recovers a
dead node's pool relies on nothing else (:mod:`pillion.kvstore.pool_survival.surviving_pool`).
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

# struct flock of 64-bit Linux: type, whence, start, length, process id, and padding.
FLOCK = struct.Struct("hhqqi4x")


class Segment:
    """Descriptor of a segment. Pages consume memory once written. Raises ConfigError if a segment of ``size_bytes``
    cannot be created."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ConfigError(f"a KV pool of {size_bytes} bytes is empty")
        self.size_bytes = size_bytes
        try:
            self._fd = _anonymous_file(size_bytes)
        except OSError as error:
            raise ConfigError(f"cannot create a KV pool of {size_bytes} bytes: {error.strerror}") from None

    def fileno(self) -> int:
        """Return the descriptor to send."""
        return self._fd

    @property
    def to_map(self) -> int:
        """Descriptor that this process maps."""
        return self._fd

    def close(self) -> None:
        """Close the node's own descriptors; workers' mappings stay. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def reopened(descriptor: int) -> int:
    """Reopen the file behind a descriptor, so that its locks belong to this process alone. Raises OSError."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def lock_place(descriptor: int, place: int) -> None:
    """Lock one byte of an open file, at offset ``place``. Raises BlockingIOError if another open file has it locked,
    OSError if the system has no open file description locks."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
    except AttributeError:
        raise OSError(errno.ENOSYS, "no locks of open files") from None
    except OSError as error:
        # Systems report either EACCES or EAGAIN.
        raise BlockingIOError(error.errno, error.strerror) if error.errno == errno.EACCES else error from None


def map_shared(fd: int, size_bytes: int) -> mmap.mmap:
    """Map a descriptor, writable and shared. Raises ConfigError if the file is shorter, or cannot be mapped."""
    have_bytes = os.fstat(fd).st_size
    if have_bytes < size_bytes:
        raise ConfigError(f"the KV pool has {have_bytes} bytes, {size_bytes} are needed")
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
            # So that no process with the descriptor can truncate the file under another process's mapping.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd
