"""Says which addresses of components are local. An address is ``host:port``, ``[host]:port``, ``unix:path`` or
``in-process:NAME``."""

from __future__ import annotations

import ipaddress

# No network reaches addresses that begin like this, and nothing on them is encrypted.
IN_PROCESS = "in-process:"
OFF_NETWORK = ("unix:", IN_PROCESS)


def is_local(address: str) -> bool:
    """Returns whether only this machine can reach the address."""
    if address.startswith(OFF_NETWORK):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
