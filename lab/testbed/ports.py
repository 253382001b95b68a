"""Ports for programs that need a number in advance, reserved from choice to use.

A port bound as number 0 and released is free for a moment only: the system assigns the same range to every connection
and every other bind to 0. The ports here are below that range (Linux: 32768 to 60999). Other tests are kept off by a
UDP socket of the same number, which this process owns until it ends; the TCP port itself stays free.
"""

from __future__ import annotations

import itertools
import random
import socket

FIRST, LAST = 10_240, 22_239
# Limit of attempts to find free ports of that range.
MAX_TRIES = 4 * (LAST - FIRST)

_held: list[socket.socket] = []
_next = itertools.count(random.SystemRandom().randrange(LAST - FIRST))


def free_port() -> int:
    """Return a TCP port for a server, reserved until this process ends."""
    return free_ports(1)


def free_ports(count: int, offset: int = 1) -> int:
    """Return the first of ``count`` such ports, each ``offset`` above the one before."""
    for _ in range(MAX_TRIES):
        first = FIRST + next(_next) % (LAST - FIRST)
        wanted = range(first, first + count * offset, offset)
        held: list[socket.socket] = []
        try:
            held += map(_hold, wanted)
        except OSError:
            for one in held:
                one.close()
            continue
        _held.extend(held)
        return first
    raise OSError(f"no {count} of the ports {FIRST} to {LAST} are free")


def _hold(port: int) -> socket.socket:
    """Return a UDP socket that reserves the port. Raises OSError if it is reserved or something listens on it."""
    held = socket.socket(type=socket.SOCK_DGRAM)
    try:
        held.bind(("127.0.0.1", port))
        with socket.socket() as probe:
            probe.bind(("", port))
    except BaseException:
        held.close()
        raise
    return held
