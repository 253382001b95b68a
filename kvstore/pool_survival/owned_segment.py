"""Host memory that one process owns and others use. A place is a byte offset of its file, which a process locks.

The node owns the memory while it maps it through a separate descriptor with place 0 locked. Each worker locks the place
with its epoch's number (:mod:`pillion.kvstore.memory.segment`).
"""

from __future__ import annotations

import fcntl
import os
import sys

from pillion.errors import ConfigError
from pillion.kvstore.memory.segment import FLOCK, Segment, lock_place, reopened

# Place of the owning node; that of a worker is its epoch.
OWNER = 0


class OwnedSegment(Segment):
    """A segment that this process owns after :meth:`own`."""

    _own_fd = -1

    @classmethod
    def from_descriptor(cls, descriptor: int) -> OwnedSegment:
        """Return the segment of an earlier process behind ``descriptor``, which it then owns. Raises ConfigError if the
        size of the file could change."""
        segment = cls.__new__(cls)
        segment.size_bytes, segment._fd = os.fstat(descriptor).st_size, descriptor
        if not _is_sealed(descriptor):
            segment.close()
            raise ConfigError("the stored memory does not belong to a KV node")
        return segment

    @property
    def to_map(self) -> int:
        """Descriptor to map the memory by: that with the owner's lock, if this process owns the segment."""
        return self._own_fd if self._own_fd >= 0 else self._fd

    def own(self) -> bool:
        """Lock the owner's place, until the segment is closed and its mapping by ``to_map`` ends. Return False if
        another process owns it. Raises OSError if the system has no open file description locks."""
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
        """Return the places of the processes that use the segment, except its owner's."""
        return locked_places(self.to_map)

    def close(self) -> None:
        super().close()
        if self._own_fd >= 0:
            os.close(self._own_fd)
            self._own_fd = -1


def locked_places(descriptor: int) -> set[int]:
    """Return the places after OWNER that are locked through other open files. Raises OSError."""
    places = set[int]()
    # F_OFD_GETLK returns any lock within a range, so search on both sides of it. Length 0 means no end.
    ranges = [(OWNER + 1, 0)]
    while ranges:
        first, length = ranges.pop()
        query = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, length, 0)
        kind, _, start, locked, _ = FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, query))
        if kind == fcntl.F_UNLCK:
            continue
        places.add(start)
        if start > first:
            ranges.append((first, start - first))
        after = start + locked
        if locked and (not length or after < first + length):
            ranges.append((after, first + length - after if length else 0))
    return places


def _is_sealed(descriptor: int) -> bool:
    if sys.platform != "linux":
        return False
    sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & sealed == sealed
    except OSError:
        return False
