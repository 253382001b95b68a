"""A node's side of its pool's keeper, a process that holds the pool's descriptors while no node does.

node                                    keeper (:mod:`pillion.kvstore.memory.keeper_process`)
  | -- KeeperHello "take", its name ----> |
  | <-- KeeperReply [+ descriptors] ----- |  what an earlier node of that name gave it, if anything
  | -- KeeperHello "keep" + descriptors > |  in place of those
  | <-- KeeperReply --------------------- |
  | <=========== the end ================ |  the keeper is gone: what it kept goes with its last user
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from pillion.errors import PillionError, Unavailable
from pillion.kvstore.memory.segment import Segment
from pillion.net.private_socket import close_all, peer_gone, receive_line
from pillion.wire.keeper import (
    KEPT_DESCRIPTORS,
    MAX_KEEPER_LINE_BYTES,
    KeeperHello,
    KeeperReply,
    keeper_line,
    keeper_reply_from_line,
)

# The keeper serves one call after the other, none for longer than a second.
KEEPER_TIMEOUT_S = 5.0


class PoolKeeper:
    """The keeper behind a Unix socket. Calls block for up to KEEPER_TIMEOUT_S and raise Unavailable where it does not
    answer."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._connection: socket.socket | None = None

    def take(self, name: str) -> list[Segment]:
        """Returns the segments that are kept under ``name``, none where nothing is; they stay kept. Raises ConfigError
        where they are none that a node has made."""
        sock, reply, descriptors = self._ask(KeeperHello(action="take", name=name), ())
        sock.close()
        try:
            if not reply.kept or len(descriptors) != KEPT_DESCRIPTORS:
                return []
            segments: list[Segment] = []
            try:
                while descriptors:
                    segments.append(Segment.kept(descriptors.pop(0)))
            except PillionError:
                for segment in segments:
                    segment.close()
                raise
            return segments
        finally:
            close_all(descriptors)

    def keep(self, name: str, segments: Sequence[Segment]) -> None:
        """Has the segments kept under ``name``, in place of what is. Raises Unavailable, too, where another node that
        lives keeps its own under that name."""
        # By an open connection the keeper would take this node for another one.
        self.close()
        hello = KeeperHello(action="keep", name=name)
        sock, reply, descriptors = self._ask(hello, [segment.fileno() for segment in segments])
        close_all(descriptors)
        if not reply.kept:
            sock.close()
            raise Unavailable(f"the pool's keeper keeps nothing: {reply.error or 'it did not say why'}")
        sock.setblocking(False)
        self._connection = sock

    def lost(self) -> bool:
        """Whether the keeper that keeps this node's segments has ended."""
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
            line, received = receive_line(sock, MAX_KEEPER_LINE_BYTES, KEPT_DESCRIPTORS)
            for descriptor in received:
                os.set_inheritable(descriptor, False)
            return sock, keeper_reply_from_line(line), received
        except (OSError, PillionError) as error:
            sock.close()
            close_all(received)
            why = error.message if isinstance(error, PillionError) else error.strerror or str(error)
            raise Unavailable(f"no answer from the pool's keeper at {self._path}: {why}") from None
