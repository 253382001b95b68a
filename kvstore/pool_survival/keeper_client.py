"""A node's connection to its pool's keeper, the process that holds the pool's descriptors while no node runs.

node                                    keeper (:mod:`pillion.kvstore.pool_survival.keeper_process`)
  | -- KeeperHello "take", its name ----> |
  | <-- KeeperReply [+ descriptors] ----- |  those of the previous node of that name, if any
  | -- KeeperHello "keep" + descriptors > |  replaces them; or "drop" closes them
  | <-- KeeperReply --------------------- |
  | <=========== the end ================ |  the keeper is gone: its memory is freed with the last user
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pillion.errors import PillionError, Unavailable
from pillion.kvstore.pool_survival.keeper_messages import (
    MAX_KEEPER_LINE_BYTES,
    MAX_KEPT_MEMORIES,
    MAX_KEPT_PROCESSES,
    KeeperHello,
    KeeperReply,
    keeper_reply_from_line,
)
from pillion.net.private_socket import close_all, peer_gone, receive_line
from pillion.wire.json_lines import line_to_bytes

# The keeper serves calls one by one, each for at most a second.
KEEPER_TIMEOUT_S = 5.0


@dataclass
class KeeperDescriptors:
    """Descriptors stored at the keeper under one name: those of a pool's memories, and (place, pidfd) of each process
    that uses the pool. The owner of this object closes them."""

    memories: list[int]
    processes: list[tuple[int, int]]

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        close_all(self.memories)
        while self.processes:
            os.close(self.processes.pop()[1])


class PoolKeeper:
    """Connection to the keeper behind a Unix socket. Calls block for up to KEEPER_TIMEOUT_S and raise Unavailable if
    the keeper does not answer."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._connection: socket.socket | None = None

    def take(self, name: str) -> KeeperDescriptors | None:
        """Return duplicates of the descriptors stored under ``name``, or None if there are none."""
        sock, reply, descriptors = self._ask(KeeperHello(action="take", name=name), ())
        sock.close()
        if not reply.kept or len(descriptors) != reply.memories + len(reply.places):
            close_all(descriptors)
            return None
        processes = zip(reply.places, descriptors[reply.memories :], strict=True)
        return KeeperDescriptors(descriptors[: reply.memories], list(processes))

    def keep(self, name: str, memories: Sequence[int], processes: Sequence[tuple[int, int]] = ()) -> None:
        """Replace the descriptors stored under ``name`` by duplicates of these: the pool's memories, and (place, pidfd)
        of ``processes``. Raises Unavailable, also if another live node has stored descriptors under that name."""
        # While the previous connection is open, the keeper takes this node for another one.
        self.close()
        places = tuple(place for place, _ in processes)
        hello = KeeperHello(action="keep", name=name, memories=len(memories), places=places)
        sock, reply, descriptors = self._ask(hello, [*memories, *(descriptor for _, descriptor in processes)])
        close_all(descriptors)
        if not reply.kept:
            sock.close()
            raise Unavailable(f"the pool's keeper stored nothing: {reply.error or 'it gave no reason'}")
        sock.setblocking(False)
        self._connection = sock

    def drop(self, name: str) -> None:
        """Remove the descriptors stored under ``name``, unless they are another live node's."""
        self.close()
        sock, _, descriptors = self._ask(KeeperHello(action="drop", name=name), ())
        sock.close()
        close_all(descriptors)

    def lost(self) -> bool:
        """Return whether the keeper of this node's pool has ended."""
        return self._connection is None or peer_gone(self._connection)

    def close(self) -> None:
        """Close the connection; the keeper still holds its descriptors. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, hello: KeeperHello, descriptors: Sequence[int]) -> tuple[socket.socket, KeeperReply, list[int]]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        received: list[int] = []
        try:
            sock.settimeout(KEEPER_TIMEOUT_S)
            sock.connect(self._path)
            socket.send_fds(sock, [line_to_bytes(hello)], descriptors)
            line, received = receive_line(sock, MAX_KEEPER_LINE_BYTES, MAX_KEPT_MEMORIES + MAX_KEPT_PROCESSES)
            for descriptor in received:
                os.set_inheritable(descriptor, False)
            return sock, keeper_reply_from_line(line), received
        except (OSError, PillionError) as error:
            sock.close()
            close_all(received)
            reason = error.message if isinstance(error, PillionError) else error.strerror or str(error)
            raise Unavailable(f"no answer from the pool's keeper at {self._path}: {reason}") from None
