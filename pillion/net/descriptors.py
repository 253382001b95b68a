"""Division of the process's file descriptors between its ports.

limit of open files = in use when the ports are opened + RESERVED_DESCRIPTORS + connections of each port
"""

from __future__ import annotations

import os
import resource

# Max connections per port, and the limit if descriptors are scarce.
MAX_CONNECTIONS = 4096
MIN_CONNECTIONS = 32
# For connections to Redis, for those to other components, and for accepted ones until they are refused.
RESERVED_DESCRIPTORS = 80 + 80 + 96


def connections_per_port(ports: int = 1) -> int:
    """Return the max connections of each of ``ports`` ports that the process is about to open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    free = limit - len(open_descriptors()) - RESERVED_DESCRIPTORS
    return min(MAX_CONNECTIONS, max(MIN_CONNECTIONS, free // ports))


def open_descriptors() -> list[str]:
    """Return the numbers of the open descriptors; [] without /proc."""
    try:
        return os.listdir("/proc/self/fd")
    except OSError:
        return []
