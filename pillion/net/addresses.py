"""Addresses of parts: ``host:port``, ``[host]:port`` or ``unix:path``."""

from __future__ import annotations

import ipaddress


def is_local(address: str) -> bool:
    """Whether only this machine can reach ``host:port`` or ``unix:path``."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
