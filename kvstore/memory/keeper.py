"""A node's side of its pool's keeper, a process that holds the pool's descriptors while no node does.

node                                    keeper (:mod:`pillion.kvstore.memory.keeper_process`)
  | -- KeeperHello "take", its name ----> |
  | <-- KeeperReply [+ descriptors] ----- |  what an earlier node of that name gave it, if anything
  | -- KeeperHello "keep" + descriptors > |  in place of those; or "drop": they are of no use
  | <-- KeeperReply --------------------- |
  | <=========== the end ================ |  the keeper is gone: what it kept goes with its last user
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pillion.errors import PillionError, Unavailable
from pillion.net.private_socket import close_all, peer_gone, receive_line
from pillion.wire.keeper import (
    MAX_KEEPER_LINE_BYTES,
    MAX_KEPT_MEMORIES,
    MAX_KEPT_PROCESSES,
    KeeperHello,
    KeeperReply,
    keeper_line,
    keeper_reply_from_line,
)

# The keeper serves one call after the other, none for longer than a second.
KEEPER_TIMEOUT_S = 5.0


@dataclass
class KeptDescriptors:
    """What is kept under one name: descriptors of a pool's memories, and of processes (pidfds) with the place that each
    has in the pool. They belong to whoever has this."""

    memories: list[int]
    processes: list[tuple[int, int]]

    def close(self) -> None:
        """Closes the descriptors. Idempotent."""
        close_all(self.memories)
        while self.processes:
            os.close(self.processes.pop()[1])


class PoolKeeper:
    """The keeper behind a Unix socket. Calls block for up to KEEPER_TIMEOUT_S and raise Unavailable where it does not
    answer."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._connection: socket.socket | None = None

    def take(self, name: str) -> KeptDescriptors | None:
        """Returns what is kept under ``name``, None where nothing is; it stays kept."""
        sock, reply, descriptors = self._ask(KeeperHello(action="take", name=name), ())
        sock.close()
        if not reply.kept or len(descriptors) != reply.memories + len(reply.places):
            close_all(descriptors)
            return None
        processes = zip(reply.places, descriptors[reply.memories :], strict=True)
        return KeptDescriptors(descriptors[: reply.memories], list(processes))

    def keep(self, name: str, memories: Sequence[int], processes: Sequence[tuple[int, int]] = ()) -> None:
        """Has these descriptors kept under ``name``, in place of those that are: of the pool's memories, and for
        ``processes`` their places and descriptors. They stay the caller's. Raises Unavailable, too, where another node
        that lives keeps its own under that name."""
        # By an open connection the keeper would take this node for another one.
        self.close()
        places = tuple(place for place, _ in processes)
        hello = KeeperHello(action="keep", name=name, memories=len(memories), places=places)
        sock, reply, descriptors = self._ask(hello, [*memories, *(descriptor for _, descriptor in processes)])
        close_all(descriptors)
        if not reply.kept:
            sock.close()
            raise Unavailable(f"the pool's keeper keeps nothing: {reply.error or 'it did not say why'}")
        sock.setblocking(False)
        self._connection = sock

    def drop(self, name: str) -> None:
        """Has nothing kept under ``name`` any more, unless another node that lives keeps its own under it."""
        self.close()
        sock, _, descriptors = self._ask(KeeperHello(action="drop", name=name), ())
        sock.close()
        close_all(descriptors)

    def lost(self) -> bool:
        """Whether the keeper that keeps this node's pool has ended."""
        return self._connection is None or peer_gone(self._connection)

    def close(self) -> None:
        """Closes the connection; what is kept stays kept. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, hello: KeeperHello, descriptors: Sequence[int]) -> tuple[socket.socket, KeeperReply, list[int]]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        received: list[int] = []
        try:
            sock.settimeout(KEEPER_TIMEOUT_S)
            sock.connect(self._path)
            socket.send_fds(sock, [keeper_line(hello)], descriptors)
            line, received = receive_line(sock, MAX_KEEPER_LINE_BYTES, MAX_KEPT_MEMORIES + MAX_KEPT_PROCESSES)
            for descriptor in received:
                os.set_inheritable(descriptor, False)
            return sock, keeper_reply_from_line(line), received
        except (OSError, PillionError) as error:
            sock.close()
            close_all(received)
            why = error.message if isinstance(error, PillionError) else error.strerror or str(error)
            raise Unavailable(f"no answer from the pool's keeper at {self._path}: {why}") from None
