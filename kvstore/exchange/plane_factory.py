"""Chooses a node's data plane by ``--kv-transport``."""

from __future__ import annotations

import logging

from pillion.errors import ConfigError
from pillion.kvstore.exchange.plane import DataPlane
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.transfer.nixl.nixl_plane import NixlPlane

log = logging.getLogger("pillion.kvnode")


def choose_transport(kv_transport: str) -> str:
    """Returns the transport that ``--kv-transport`` selects on this machine, "nixl" or "grpc", and logs it.

    It imports NIXL and tries it, which takes about a second: not for the event loop's thread. Raises ConfigError if
    ``kv_transport`` is "nixl" and NIXL does not work.
    """
    if kv_transport == "grpc":
        log.info("blocks move between nodes by gRPC (--kv-transport=grpc)")
        return "grpc"
    trouble = NixlPlane.trouble()
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
            # Even where NIXL works with two pages, a big pool may exceed its limits.
            if kv_transport == "nixl":
                raise
            log.warning("blocks move between nodes by gRPC: %s", error.message)
    return DataPlane(memory)
