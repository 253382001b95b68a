"""The choice of a node's data plane by ``--kv-transport``."""

from __future__ import annotations

import logging

from pillion.errors import ConfigError
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.transfer.grpc_plane import GrpcPlane
from pillion.kvstore.transfer.nixl_agent import nixl_trouble
from pillion.kvstore.transfer.nixl_plane import NixlPlane
from pillion.kvstore.transfer.plane import DataPlane

log = logging.getLogger("pillion.kvnode")


def choose_transport(kv_transport: str) -> str:
    """Returns the transport that ``--kv-transport`` selects on this machine, "nixl" or "grpc", and logs it.

    It imports NIXL and tries it, which takes about a second: not for the event loop's thread. Raises ConfigError if
    ``kv_transport`` is "nixl" and NIXL does not work.
    """
    if kv_transport == "grpc":
        log.info("blocks move between nodes by gRPC (--kv-transport=grpc)")
        return "grpc"
    trouble = nixl_trouble()
    if not trouble:
        log.info("blocks move between nodes by NIXL (--kv-transport=%s)", kv_transport)
        return "nixl"
    if kv_transport == "nixl":
        raise ConfigError(f"--kv-transport=nixl: {trouble}")
    log.info("blocks move between nodes by gRPC (--kv-transport=%s; no NIXL: %s)", kv_transport, trouble)
    return "grpc"


def choose_plane(kv_transport: str, memory: PoolMemory) -> DataPlane:
    """Makes the data plane of a pool; with NIXL this takes about a second, so it is not for the event loop's thread.
    Raises ConfigError if ``kv_transport`` is "nixl" and NIXL does not work."""
    if choose_transport(kv_transport) == "nixl":
        try:
            return NixlPlane(memory)
        except ConfigError as error:
            # A big pool may meet limits that two pages do not.
            if kv_transport == "nixl":
                raise
            log.warning("blocks move between nodes by gRPC: %s", error.message)
    return GrpcPlane(memory)
