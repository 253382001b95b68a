"""Closes the most silent connections of a gRPC port before it reaches its limit.

gRPC's sockets belong to its C core. Above its limit it closes new connections and keeps silent ones: until the
handshake times out, or forever if the client finishes the handshake and answers pings. So a client that opens enough
connections could lock out all others. So this module finds the sockets in /proc (Linux), and the most silent ones
without a call are shut down, which the C core sees as the client's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import math
import os
import socket
import stat
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pillion.net.descriptors import open_descriptors

log = logging.getLogger("pillion.net")

# Share of a port's limit above which silent connections are closed.
HIGH_WATER_PERCENT = 75
CHECK_INTERVAL_S = 0.25
LOG_INTERVAL_S = 60.0
# Offset of tcpi_last_data_recv in Linux' struct tcp_info: milliseconds since the last data came, or since the accept.
LAST_DATA_RECEIVED = struct.Struct("52xI")


Client = tuple[str, int]


class PortConnection(NamedTuple):
    """A connection of a port: its descriptor, the client's address and port, and how long it has been silent."""

    descriptor: int
    host: str
    port: int
    silent_ms: int


def most_silent(idle: Sequence[PortConnection], count: int) -> list[PortConnection]:
    """Return up to ``count`` of the ``idle`` connections to close: repeatedly the most silent one of the host with the
    most connections left."""
    by_host: dict[str, list[PortConnection]] = defaultdict(list)
    for connection in sorted(idle, key=lambda connection: connection.silent_ms):
        by_host[connection.host].append(connection)
    hosts = [(-len(connections), host) for host, connections in by_host.items()]
    heapq.heapify(hosts)
    chosen: list[PortConnection] = []
    while hosts and len(chosen) < count:
        size, host = heapq.heappop(hosts)
        chosen.append(by_host[host].pop())
        if size < -1:
            heapq.heappush(hosts, (size + 1, host))
    return chosen


async def close_silent(port: int, max_connections: int, calling: Callable[[], set[Client]]) -> None:
    """Keep a gRPC port below its limit, until cancelled. ``calling``: returns the clients with calls in progress."""
    target = max_connections * HIGH_WATER_PERCENT // 100
    took_s, closed, logged_s = 0.0, 0, -math.inf
    while True:
        # Rest ten times as long as a check takes, which is 0.1 s with thousands of descriptors.
        await asyncio.sleep(CHECK_INTERVAL_S + 10 * took_s)
        began_s = time.monotonic()
        if len(open_descriptors()) > target:
            closed += await asyncio.to_thread(_close_above, port, target, calling)
        took_s = time.monotonic() - began_s
        if closed and began_s - logged_s >= LOG_INTERVAL_S:
            log.warning("port %d: %d silent connections were closed to make room for new ones", port, closed)
            closed, logged_s = 0, began_s


def _close_above(port: int, target: int, calling: Callable[[], set[Client]]) -> int:
    """Close the most silent connections of a port until ``target`` are open; return how many were closed."""
    descriptors = map(int, open_descriptors())
    connections = [found for number in descriptors if (found := _connection_at(number, port)) is not None]
    busy = calling()
    idle = [connection for connection in connections if (connection.host, connection.port) not in busy]
    chosen = most_silent(idle, len(connections) - target)
    for connection in chosen:
        with _duplicate(connection.descriptor) as copy, contextlib.suppress(OSError):
            if copy is not None and _peer(copy) == (connection.host, connection.port):
                copy.shutdown(socket.SHUT_RDWR)
    return len(chosen)


def _connection_at(descriptor: int, port: int) -> PortConnection | None:
    """Return the connection behind a descriptor, None if it is not a connection of this port."""
    with _duplicate(descriptor) as copy:
        if copy is None:
            return None
        try:
            own = copy.getsockname()
            if not isinstance(own, tuple) or own[1] != port:
                return None
            tcp_info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_DATA_RECEIVED.size)
            return PortConnection(descriptor, *_peer(copy), *LAST_DATA_RECEIVED.unpack(tcp_info))
        except OSError:
            # A listening socket has no peer, nor has one that the client has reset.
            return None


@contextlib.contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket | None]:
    """Yield a duplicate of a socket, which stays the same if another thread closes and reuses the descriptor; None if
    the descriptor is not a socket."""
    try:
        number = os.dup(descriptor) if stat.S_ISSOCK(os.fstat(descriptor).st_mode) else -1
    except OSError:
        number = -1
    if number < 0:
        yield None
    else:
        with socket.socket(fileno=number) as copy:
            yield copy


def _peer(connection: socket.socket) -> tuple[str, int]:
    """Return the client's host and port as gRPC writes them. Raises OSError."""
    host, port = connection.getpeername()[:2]
    return host.removeprefix("::ffff:"), port
