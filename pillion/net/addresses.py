"""Addresses of components: ``host:port``, ``[host]:port``, ``unix:path`` or ``in-process:NAME``."""

from __future__ import annotations

import ipaddress

# Addresses that no network reaches, so that nothing on them is encrypted.
OFF_NETWORK = ("unix:", "in-process:")


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address."""
    if address.startswith(OFF_NETWORK):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
