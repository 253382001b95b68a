"""Closes the most silent connections of a gRPC port before it reaches its limit.

gRPC's sockets belong to its C core. Above its limit it closes new connections and keeps silent ones: until the
handshake times out, or forever if the client finishes the handshake and answers pings. So a client that opens enough
connections could lock out all others. Here the sockets are found in /proc (Linux), and the most silent ones without a
call are shut down, which the C core sees as the client's end.
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

HIGH_WATER_PERCENT = 75
LOOK_INTERVAL_S = 0.25
# Pause after a look, in multiples of its duration: 0.1 s with thousands of descriptors.
LOOK_REST = 10
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
    """Return up to ``count`` connections to close: repeatedly the most silent one of the host that has most left."""
    by_host: dict[str, list[PortConnection]] = defaultdict(list)
    for one in sorted(idle, key=lambda one: one.silent_ms):
        by_host[one.host].append(one)
    hosts = [(-len(connections), host) for host, connections in by_host.items()]
    heapq.heapify(hosts)
    found: list[PortConnection] = []
    while hosts and len(found) < count:
        size, host = heapq.heappop(hosts)
        found.append(by_host[host].pop())
        if size < -1:
            heapq.heappush(hosts, (size + 1, host))
    return found


async def close_silent(port: int, max_connections: int, calling: Callable[[], set[Client]]) -> None:
    """Keep a gRPC port below its limit, until cancelled; ``calling`` returns the clients with calls."""
    keep = max_connections * HIGH_WATER_PERCENT // 100
    took_s, closed, logged_s = 0.0, 0, -math.inf
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S + LOOK_REST * took_s)
        began_s = time.monotonic()
        if len(open_descriptors()) > keep:
            closed += await asyncio.to_thread(_close_above, port, keep, calling)
        took_s = time.monotonic() - began_s
        if closed and began_s - logged_s >= LOG_INTERVAL_S:
            log.warning("port %d: %d silent connections were closed to make room for others", port, closed)
            closed, logged_s = 0, began_s


def _close_above(port: int, keep: int, calling: Callable[[], set[Client]]) -> int:
    """Close silent connections above ``keep``; return their number."""
    found = [one for name in open_descriptors() if (one := _look(int(name), port)) is not None]
    busy = calling()
    idle = [one for one in found if (one.host, one.port) not in busy]
    chosen = most_silent(idle, len(found) - keep)
    for one in chosen:
        with _duplicate(one.descriptor) as copy, contextlib.suppress(OSError):
            if copy is not None and _peer(copy) == (one.host, one.port):
                copy.shutdown(socket.SHUT_RDWR)
    return len(chosen)


def _look(descriptor: int, port: int) -> PortConnection | None:
    """Return the connection of the port with this descriptor; None if it is anything else."""
    with _duplicate(descriptor) as copy:
        if copy is None:
            return None
        try:
            own = copy.getsockname()
            if not isinstance(own, tuple) or own[1] != port:
                return None
            information = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_DATA_RECEIVED.size)
            return PortConnection(descriptor, *_peer(copy), *LAST_DATA_RECEIVED.unpack(information))
        except OSError:
            # A listening socket has no peer, nor has one that the client has reset.
            return None


@contextlib.contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket | None]:
    """Duplicate a socket, so that its number is not reused meanwhile; None if it is no socket."""
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
