"""Proof that a worker's process is gone (I4), where the end of its attach socket is no proof.

    socket ends --after DETACHED--> no step can run any more
        '-- without --> the process died, or is dying --pidfd--> gone

A dying process closes its files in order, after its memory is unmapped and its threads have ended. So for memory of the
host the socket's end is proof. A GPU is one more open file: a kernel that was launched may still store to the pool
while the socket is closed already. The process's exit is announced only after all its files are.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct

# Where the process cannot be seen (another PID namespace), a step's length and more passes before it counts as gone.
UNSEEN_EXIT_S = 2.0
_UNSEEN, _SELF = -1, -2


class PeerProcess:
    """The process at the other end of a connected Unix socket. Its maker closes it."""

    def __init__(self, sock: socket.socket) -> None:
        self._pidfd = _open(sock)

    async def gone(self) -> None:
        """Returns when the process has exited. This process itself counts as gone: it lives and dies with its
        memory."""
        if self._pidfd == _SELF:
            return
        if self._pidfd == _UNSEEN:
            await asyncio.sleep(UNSEEN_EXIT_S)
            return
        loop, exited = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pidfd, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(self._pidfd)

    def close(self) -> None:
        """Closes the process's descriptor. Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = _UNSEEN


def _open(sock: socket.socket) -> int:
    if not hasattr(os, "pidfd_open"):
        return _UNSEEN
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if pid == os.getpid():
        return _SELF
    try:
        return os.pidfd_open(pid) if pid > 0 else _UNSEEN
    except OSError:
        return _UNSEEN
