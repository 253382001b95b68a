"""Finds ports for programs that have to be told one: nobody else takes such a port between its choice and its use.

A port that was bound to number 0 and released is free for a moment only: the system gives the same range to every
connection and to everybody else who binds to 0. The ports here lie below that range (Linux: 32768 to 60999), where
nobody gets one by chance. Other tests are kept away by a UDP socket of the same number, which this process holds until
it ends; UDP is a space of its own, so the port itself stays free for a TCP server.
"""

from __future__ import annotations

import itertools
import random
import socket

FIRST, LAST = 10_240, 22_239
# At most this many ports of that range are asked for, until some are free.
MOST_TRIES = 4 * (LAST - FIRST)

_held: list[socket.socket] = []
_next = itertools.count(random.SystemRandom().randrange(LAST - FIRST))


def free_port() -> int:
    """Returns a TCP port that belongs to this process, to give to a server, until it ends."""
    return free_ports(1)


def free_ports(count: int, offset: int = 1) -> int:
    """Returns the first of ``count`` such ports, each ``offset`` above the one before."""
    for _ in range(MOST_TRIES):
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
    """Returns a UDP socket that marks the port as taken. Raises OSError where it is taken, or where something listens
    there."""
    held = socket.socket(type=socket.SOCK_DGRAM)
    try:
        held.bind(("127.0.0.1", port))
        with socket.socket() as probe:
            probe.bind(("", port))
    except BaseException:
        held.close()
        raise
    return held
