"""The data plane: how blocks of another node's pool come into this one's. Two implementations pass the same tests.

    nixl    one-sided: this node reads the other's memory (UCX: shared memory, RDMA, CUDA); the other's CPU is not asked
    grpc    the other node streams the bytes; works everywhere

Nothing here decides anything: which blocks, from whom and what becomes of them is
:mod:`pillion.kvstore.transfer.fetch`'s business.
"""

from __future__ import annotations

import logging
from typing import Protocol

from pillion.errors import ConfigError
from pillion.kvstore.memory.memory import PoolMemory
from pillion.wire.kvplane import BlockShape, PeerPool, Pinned

__all__ = ["BlockShape", "BlockStream", "DataPlane", "PeerPool", "Pinned", "choose_plane", "choose_transport"]

log = logging.getLogger("pillion.kvnode")


class BlockStream(Protocol):
    """A source's ReadBlocks call, for the plane that needs it: fills ``targets``, one whole block each, in order."""

    async def read_blocks(self, ticket_id: int, slots: tuple[int, ...], targets: list[memoryview]) -> None: ...


class DataPlane(Protocol):
    """Of one node. Raises ConfigError when made with a pool that it cannot use.

    Attributes:
        name: "nixl" or "grpc".
        nixl_metadata, pool_address: what MeetReply tells readers; empty and 0 without NIXL.
    """

    name: str
    nixl_metadata: bytes
    pool_address: int

    async def read(
        self, source: PeerPool, stream: BlockStream, ticket_id: int, remote: tuple[int, ...], local: tuple[int, ...]
    ) -> None:
        """Copies slots of ``source``, which are pinned there under ``ticket_id``, into own slots, pair by pair.

        When it ends, however it ends, nobody writes to the local slots any more; so a caller that is cancelled is held
        until then, and it ends by itself when the source is lost. Raises Unavailable when not everything came, Conflict
        where the lists of slots do not fit the pools.
        """

    def forget(self, node_id: str) -> None:
        """A source is gone or has restarted: what is known of it is void."""

    def close(self) -> None:
        """No read is under way any more. Idempotent."""


def choose_transport(kv_transport: str) -> str:
    """What ``--kv-transport`` comes to on this machine: "nixl" or "grpc"; says it in one line.

    Importing NIXL and trying it takes about a second: not for the event loop's thread. Raises ConfigError where "nixl"
    is asked for and does not work.
    """
    from pillion.kvstore.transfer.nixl_agent import nixl_trouble

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
    """The plane of a pool.

    Takes about a second with NIXL, as :func:`choose_transport`. Raises ConfigError as that does.
    """
    from pillion.kvstore.transfer.grpc_plane import GrpcPlane
    from pillion.kvstore.transfer.nixl_plane import NixlPlane

    if choose_transport(kv_transport) == "nixl":
        try:
            return NixlPlane(memory)
        except ConfigError as error:
            # A big pool may meet limits that two pages do not.
            if kv_transport == "nixl":
                raise
            log.warning("blocks move between nodes by gRPC: %s", error.message)
    return GrpcPlane(memory)
