"""The keeper: a process that only holds descriptors of KV pools, so that a pool outlives its KV node.

    node --"keep", descriptors--> stored under the node's name --"take"--> the restarted node, any number of times
            |                          |-- the node, or a restarted one, stores others --> closed
            |                          |-- the node drops them --> closed
            |                          |-- the node is gone for KEPT_WITHOUT_NODE_S --> closed
            |                          '-- the keeper ends --> closed
            '-- another node of that name lives --> refused

The keeper never maps or reads the memory, and calls no GPU driver. The kernel frees a pool with its last descriptor and
mapping, so nothing is left when the keeper ends with the cluster, however that ends. Its socket is 0600 in a folder of
0700: a process that may connect may read all KV, as at the attach socket. (systemd has the same for its services,
FileDescriptorStoreMax=.)

The keeper serves one connection after the other, each within REQUEST_TIMEOUT_S. The connection of the last "keep" under
a name stays open, so that node and keeper detect each other's end.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass, field

from pillion.errors import Conflict, InvalidRequest, Overloaded, PillionError
from pillion.kvstore.pool_survival.keeper_messages import (
    MAX_KEEPER_LINE_BYTES,
    MAX_KEPT_MEMORIES,
    MAX_KEPT_PROCESSES,
    MIN_KEPT_MEMORIES,
    KeeperHello,
    KeeperReply,
    keeper_hello_from_line,
)
from pillion.net.private_socket import close_all, listen_private, peer_gone, receive_line
from pillion.wire.json_lines import line_to_bytes

log = logging.getLogger("pillion.keeper")

REQUEST_TIMEOUT_S = 1.0
KEEPER_BACKLOG = 16
# Max pools.
MAX_POOLS = 64
# Max open descriptors of all pools and of the nodes' connections. With those of one request this stays below 1,024,
# the limit of open files on most systems.
MAX_KEPT_DESCRIPTORS = 768
ACCEPT_PAUSE_S = 0.5
# How long a pool is stored without its node, and the interval of that check. The pool may occupy most of the
# machine's memory, and nodes are usually restarted within minutes.
KEPT_WITHOUT_NODE_S = 3600.0
CHECK_INTERVAL_S = 10.0


@dataclass
class _StoredPool:
    """Descriptors stored for one node, the last of which are pidfds of processes with these ``places`` in its pool.

    Attributes:
        node: the connection of the node that sent them.
        gone_s: time at which the node's end was detected, on the monotonic clock.
    """

    descriptors: list[int]
    places: tuple[int, ...]
    node: socket.socket
    gone_s: float | None = None

    @property
    def reply(self) -> KeeperReply:
        """Message that accompanies these descriptors."""
        return KeeperReply(kept=True, memories=len(self.descriptors) - len(self.places), places=self.places)


@dataclass
class KeeperServer:
    """Descriptors stored for nodes, by name."""

    kept: dict[str, _StoredPool] = field(default_factory=dict)

    def serve(self, sock: socket.socket) -> None:
        """Serve one connection; close it, or store it with its descriptors."""
        descriptors: list[int] = []
        stored = False
        try:
            sock.settimeout(REQUEST_TIMEOUT_S)
            line, descriptors = receive_line(sock, MAX_KEEPER_LINE_BYTES, MAX_KEPT_MEMORIES + MAX_KEPT_PROCESSES)
            hello = keeper_hello_from_line(line)
            if hello.action == "take":
                self._send(sock, hello.name)
            elif hello.action == "drop":
                if self._entry_of_dead(hello.name) is not None:
                    self._drop(self.kept.pop(hello.name))
                _answer(sock, KeeperReply())
            else:
                self._keep(sock, hello, descriptors)
                descriptors, stored = [], True
        except PillionError as error:
            _answer(sock, KeeperReply(error=error.message))
        except OSError as error:
            # Not logged: a process that connects and sends nothing may be probing for a keeper.
            log.debug("a connection failed: %s", error)
        finally:
            close_all(descriptors)
            if not stored:
                sock.close()

    def drop_abandoned(self, now_s: float) -> None:
        """Drop each pool whose node has been gone for KEPT_WITHOUT_NODE_S. Call at least every CHECK_INTERVAL_S."""
        for name, kept in tuple(self.kept.items()):
            if kept.gone_s is None and peer_gone(kept.node):
                kept.gone_s = now_s
            if kept.gone_s is not None and now_s - kept.gone_s >= KEPT_WITHOUT_NODE_S:
                minutes = KEPT_WITHOUT_NODE_S / 60
                log.warning("the pool of %s is dropped: that node did not return within %g minutes", name, minutes)
                self._drop(self.kept.pop(name))

    def close(self) -> None:
        """Close all descriptors. Idempotent."""
        while self.kept:
            self._drop(self.kept.popitem()[1])

    def _keep(self, sock: socket.socket, hello: KeeperHello, descriptors: list[int]) -> None:
        if hello.memories < MIN_KEPT_MEMORIES or len(descriptors) != hello.memories + len(hello.places):
            wanted = f"{hello.memories} of a pool and {len(hello.places)} of processes"
            raise InvalidRequest(f"{len(descriptors)} descriptors came; {wanted} were announced")
        if hello.name not in self.kept and len(self.kept) >= MAX_POOLS:
            raise Overloaded(f"{MAX_POOLS} pools are stored already")
        others = sum(len(kept.descriptors) + 1 for name, kept in self.kept.items() if name != hello.name)
        if others + len(descriptors) + 1 > MAX_KEPT_DESCRIPTORS:
            raise Overloaded(
                f"{others} descriptors of other pools are stored already, and this pool has {len(descriptors)}: the"
                f" keeper holds at most {MAX_KEPT_DESCRIPTORS}"
            )
        before = self._entry_of_dead(hello.name)
        _answer(sock, KeeperReply(kept=True))
        sock.setblocking(False)
        self.kept[hello.name] = _StoredPool(descriptors, hello.places, sock)
        if before is not None:
            self._drop(before)
        log.info("keeping the pool of %s", hello.name)

    def _entry_of_dead(self, name: str) -> _StoredPool | None:
        """Return the pool stored for a node that has ended, None if there is none. Raises Conflict if the node
        lives."""
        before = self.kept.get(name)
        if before is not None and not peer_gone(before.node):
            raise Conflict(f"another node named {name} is running: give each node a --node-id of its own")
        return before

    def _send(self, sock: socket.socket, name: str) -> None:
        kept = self.kept.get(name)
        _answer(sock, kept.reply if kept else KeeperReply(), kept.descriptors if kept else ())

    @staticmethod
    def _drop(kept: _StoredPool) -> None:
        kept.node.close()
        close_all(kept.descriptors)


def _answer(sock: socket.socket, reply: KeeperReply, descriptors: list[int] | tuple[()] = ()) -> None:
    """Send an answer of one small line into an empty socket buffer, which never blocks and only fails if the peer is
    gone."""
    try:
        socket.send_fds(sock, [line_to_bytes(reply)], list(descriptors))
    except OSError as error:
        log.debug("a reply could not be sent: %s", error)


def _accepted(server: socket.socket) -> socket.socket | None:
    """Return the next connection; None on a timeout or an error, which must not end the keeper."""
    try:
        return server.accept()[0]
    except TimeoutError:
        return None
    except OSError as error:
        log.warning("no connection can be accepted: %s", error.strerror or error)
        time.sleep(ACCEPT_PAUSE_S)
        return None


def run_keeper(path: str) -> None:
    """Store pools at the Unix socket ``path`` until the process ends. Raises ConfigError for an invalid path."""
    server, keeper = listen_private(path, KEEPER_BACKLOG, "keep pools"), KeeperServer()
    server.settimeout(CHECK_INTERVAL_S)
    try:
        while True:
            if (sock := _accepted(server)) is not None:
                keeper.serve(sock)
            keeper.drop_abandoned(time.monotonic())
    finally:
        keeper.close()
        server.close()
        os.unlink(path)
