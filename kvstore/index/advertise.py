"""Chooses the address that a component advertises: the address it listens on, unless that is a wildcard.

A container listens on 0.0.0.0 and does not know its address in advance, and replicas of one spec cannot get it by a
flag. But all components of a cluster connect to the same Redis, so the local address of the route to Redis can be
reached by the others: the address of the container or the pod, or loopback if Redis is local.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence

from pillion.errors import ConfigError
from pillion.kvstore.index.redis_url import parse

# Destinations by which the default route is found if there is no route to Redis. They are reserved for documentation
# (RFC 5737, RFC 3849), and connecting a datagram socket sends no packet.
DEFAULT_ROUTE_PROBES = (("192.0.2.1", 9), ("2001:db8::1", 9))

ADDRESS_CHECK_S = 2.0


async def follow_address(
    address: str, flag: str, listening: str, redis_url: str, on_moved: Callable[[str], None]
) -> None:
    """Call ``on_moved`` with a server's new advertised address whenever its host's address has changed, until
    cancelled. The address is fixed if it is set by a flag or the server does not listen on a wildcard.

    ``address`` is the advertised address so far; the other arguments are those of :func:`advertised`.
    """
    if address in (flag, listening):
        await asyncio.get_running_loop().create_future()
    while True:
        await asyncio.sleep(ADDRESS_CHECK_S)
        try:
            current = await asyncio.to_thread(advertised, flag, listening, redis_url)
        except ConfigError:
            continue
        if current != address:
            address = current
            on_moved(address)


def advertised(flag: str, listening: str, redis_url: str) -> str:
    """Return the address at which other components reach a server.

    Blocks for DNS look-ups. Raises ConfigError if a wildcard's address cannot be determined.

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
    for peers in (redis.hosts if redis else (), DEFAULT_ROUTE_PROBES):
        own = _own_address(peers, families)
        if own:
            return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"
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
    """Return the source address of packets to the first of ``peers`` to which there is a route; "" if there is none."""
    for host, port in peers:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, address in infos:
            if family not in families:
                continue
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.connect(address)
                except OSError:
                    continue
                own = str(probe.getsockname()[0])
                # Other hosts cannot use link-local addresses ("fe80::1%eth0").
                if "%" not in own and not ipaddress.ip_address(own).is_link_local:
                    return own
    return ""
