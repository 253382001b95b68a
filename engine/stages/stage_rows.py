"""Transfer of the residual stream's rows from stage to stage.

    stage s: send --copy--> slot k % stages --step number--> stage s + 1: receive --copy--> its buffer

Each rank of a stage sends its rows to the same rank of the next stage. Rows are in memory mapped by all processes, with
as many slots per gap as there are stages. At most as many steps are in flight, so a slot is never overwritten while it
is read. A socket carries the number of each step whose rows are ready.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct

import numpy as np

from pillion.engine.backends.backend import BackendLost, Bytes
from pillion.engine.stages.stage_shares import StagePlace
from pillion.errors import ConfigError, Internal

_NUMBER = struct.Struct("<Q")


class StageRows:
    """Mapping of the rows of a worker's steps, [stages - 1][ranks][stages][row_bytes * max_tokens]: per gap between
    stages, rank, and step in flight."""

    def __init__(self, descriptor: int, stages: int, ranks: int, max_tokens: int, row_bytes: int) -> None:
        """Map the memory of a descriptor, and own the descriptor. Raises ConfigError if its size is wrong."""
        self.fd = descriptor
        self.stages, self.ranks, self.max_tokens, self.row_bytes = stages, ranks, max_tokens, row_bytes
        size = (stages - 1) * ranks * stages * max_tokens * row_bytes
        if os.fstat(descriptor).st_size != size:
            raise ConfigError("this is not the memory of these stages")
        found: Bytes = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self._slots = found.reshape(stages - 1, ranks, stages, max_tokens * row_bytes)

    @classmethod
    def create(cls, stages: int, ranks: int, max_tokens: int, row_bytes: int) -> StageRows:
        """Create the memory; untouched pages take none. Raises ConfigError on OOM."""
        try:
            descriptor = os.memfd_create("pillion-stages", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, (stages - 1) * ranks * stages * max_tokens * row_bytes)
            return cls(descriptor, stages, ranks, max_tokens, row_bytes)
        except OSError as error:
            raise ConfigError(f"no memory for {stages} stages: {error.strerror}") from None

    def slot(self, after: int, rank: int, step: int) -> Bytes:
        """Return the memory of the rows that a rank of stage ``after`` sends in a step."""
        slot: Bytes = self._slots[after, rank, step % self.stages]
        return slot

    def close(self) -> None:
        """Close the descriptor; the mapping lives until its last user. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StageLink:
    """One process's connections to the adjacent stages: ``before`` and ``after``, None at the ends of the pipeline. One
    thread transfers rows; any thread may call :meth:`abort`."""

    def __init__(
        self, place: StagePlace, rows: StageRows, before: socket.socket | None, after: socket.socket | None
    ) -> None:
        """Own the sockets and the memory from now on."""
        self.place, self.rows = place, rows
        self._before, self._after = before, after
        self._received = self._sent = 0

    @property
    def max_tokens(self) -> int:
        return self.rows.max_tokens

    def receive(self, into: Bytes) -> None:
        """Begin a step: wait for the rows of the previous stage, if any, and copy them to ``into``. Raises BackendLost
        if that stage has exited."""
        if self._before is not None:
            if self._number(self._before) != self._received:
                raise Internal(f"{self.place.name} is at step {self._received}, and the stage before is not")
            slot = self.rows.slot(self.place.stage - 1, self.place.rank, self._received)
            into[:] = slot[: len(into)]
        self._received += 1

    def send(self, rows: Bytes) -> None:
        """End a step: send its rows to the next stage, if any. Raises BackendLost if that stage has exited."""
        if self._after is not None:
            self.rows.slot(self.place.stage, self.place.rank, self._sent)[: len(rows)] = rows
            try:
                self._after.sendall(_NUMBER.pack(self._sent))
            except OSError:
                raise BackendLost(f"the stage after {self.place.name} has ended") from None
        self._sent += 1

    def abort(self) -> None:
        """End all waits for other stages for good, here and in the adjacent stages."""
        for sock in (self._before, self._after):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the memory's descriptor, after :meth:`abort`. Idempotent."""
        self.abort()
        self.rows.close()

    def _number(self, before: socket.socket) -> int:
        data = b""
        while len(data) < _NUMBER.size:
            try:
                more = before.recv(_NUMBER.size - len(data))
            except OSError:
                more = b""
            if not more:
                raise BackendLost(f"the stage before {self.place.name} has ended")
            data += more
        return int(_NUMBER.unpack(data)[0])
