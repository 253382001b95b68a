"""Chooses the address that a component advertises: the one it listens on, unless that is a wildcard.

A container listens on 0.0.0.0 and does not know its address in advance, and replicas with one spec cannot get it by a
flag. But all components of a cluster reach one Redis, so the local address of the route to Redis is reachable by the
others: a container's own, a pod's own, loopback if Redis is local.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence

from pillion.errors import ConfigError
from pillion.kvstore.index.redis_url import parse

# Destinations that determine the default route if Redis has no name or address yet. Reserved for documentation
# (RFC 5737, RFC 3849); connecting a datagram socket sends nothing.
SOMEWHERE = (("192.0.2.1", 9), ("2001:db8::1", 9))

ADDRESS_CHECK_S = 2.0


async def follow_address(address: str, flag: str, listening: str, redis_url: str, moved: Callable[[str], None]) -> None:
    """Call ``moved`` with the server's advertised address, now ``address``, each time its host gets another one, until
    cancelled. The address is fixed if set by a flag, or without a wildcard listener.

    The other arguments are those of :func:`advertised`.
    """
    if address in (flag, listening):
        await asyncio.get_running_loop().create_future()
    while True:
        await asyncio.sleep(ADDRESS_CHECK_S)
        try:
            found = await asyncio.to_thread(advertised, flag, listening, redis_url)
        except ConfigError:
            continue
        if found != address:
            address = found
            moved(address)


def advertised(flag: str, listening: str, redis_url: str) -> str:
    """Return the address at which others reach a server.

    Blocks for name look-ups. Raises ConfigError for an unresolvable wildcard.

    Args:
        flag: ``--advertise``, which takes precedence if not empty.
        listening: ``host:port``, ``[host]:port`` or ``unix:path``.
    """
    if flag or listening.startswith("unix:"):
        return flag or listening
    host, _, port = listening.rpartition(":")
    wildcard = _wildcard(host.strip("[]"))
    if wildcard is None:
        return listening
    # An IPv6 wildcard accepts IPv4 as well, but not vice versa.
    families = (socket.AF_INET,) if wildcard == 4 else (socket.AF_INET, socket.AF_INET6)
    redis = parse(redis_url) if redis_url else None
    if redis is not None and not redis.hosts:
        return f"127.0.0.1:{port}" if wildcard == 4 else f"[::1]:{port}"
    for peers in (redis.hosts if redis else (), SOMEWHERE):
        found = _own_address(peers, families)
        if found:
            return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"
    raise ConfigError(
        f"{listening} has no address that others could use: give --advertise (a KV node: --node-advertise)"
    )


def _wildcard(host: str) -> int | None:
    """Return 4 or 6 for the wildcard address of that IP version, else None."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return address.version if address.is_unspecified else None


def _own_address(peers: Sequence[tuple[str, int]], families: Sequence[socket.AddressFamily]) -> str:
    """Return the source address of packets to the first reachable one of ``peers``; empty if there is none."""
    for host, port in peers:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, address in found:
            if family not in families:
                continue
            with socket.socket(family, kind, protocol) as way:
                try:
                    way.connect(address)
                except OSError:
                    continue
                own = str(way.getsockname()[0])
                # Link-local addresses ("fe80::1%eth0") are useless to others.
                if "%" not in own and not ipaddress.ip_address(own).is_link_local:
                    return own
    return ""
