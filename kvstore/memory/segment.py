"""Host memory of a pool or region: an anonymous file that the KV node makes and workers map.

It has no name anywhere: memfd on Linux, a temporary file that is unlinked at once elsewhere. Workers get its descriptor
over the attach socket (:mod:`pillion.kvstore.node.attach_server`), and when the last process that has it ends, however
it ends, the kernel frees the memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile

from pillion.errors import ConfigError

# Linux: no process that has the descriptor can cut the file short under another one's mapping.
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4


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

    def fileno(self) -> int:
        """Returns the descriptor, to be sent or mapped."""
        return self._fd

    def close(self) -> None:
        """Gives up the node's own descriptor; workers that map the memory keep it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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
