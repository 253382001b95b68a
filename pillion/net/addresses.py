"""Local addresses of components. An address is ``host:port``, ``[host]:port``, ``unix:path`` or ``in-process:NAME``."""

from __future__ import annotations

import ipaddress
import os
import socket

# Prefixes of addresses that are unreachable from a network, and therefore need no encryption.
IN_PROCESS = "in-process:"
OFF_NETWORK = ("unix:", IN_PROCESS)

LOOPBACK = ("localhost", "127.0.0.1", "::1")
BOTH_FAMILIES = "::"


def listening_host(host: str) -> str:
    """Return the host to listen on: for BOTH_FAMILIES, IPv4's wildcard on a machine without IPv6."""
    if host != BOTH_FAMILIES:
        return host
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((host, 0))
    except OSError:
        return "0.0.0.0"  # noqa: S104
    return host


def listen(host: str, port: int, backlog: int, *, share_port: bool) -> socket.socket:
    """Return a socket that listens for TCP at a host and port, for IPv4 and IPv6 at BOTH_FAMILIES. Raises OSError."""
    host = listening_host(host)
    both = host == BOTH_FAMILIES and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server(
        (host, port), family=family, backlog=backlog, reuse_port=share_port, dualstack_ipv6=both
    )


def spare_loopback() -> None:
    """Add this machine's loopback addresses to NO_PROXY if the environment sets a proxy, for HTTP libraries of this
    process and its children."""
    if not any(
        os.environ.get(name) or os.environ.get(name.upper())
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    ):
        return
    for name in ("no_proxy", "NO_PROXY"):
        value = os.environ.get(name) or os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        hosts = [host.strip() for host in value.split(",") if host.strip()]
        if "*" not in hosts:
            os.environ[name] = ",".join(dict.fromkeys([*hosts, *LOOPBACK]))


def is_local(address: str) -> bool:
    """Return whether only this machine can reach the address."""
    if address.startswith(OFF_NETWORK):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
