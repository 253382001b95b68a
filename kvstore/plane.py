"""The data plane: how blocks of another node's pool come into this one's. Two implementations pass the same tests.

    nixl    one-sided: this node reads the other's memory (UCX: shared memory, TCP, RDMA); the other's CPU is not asked
    grpc    the other node streams the bytes; works everywhere

Nothing here decides anything: which blocks, from whom and what becomes of them is :mod:`kvstore.fetch`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PeerPool:
    """What a source said of its pool (MeetReply). Void once its boot epoch differs.

    Attributes:
        pool_address: where the pool begins in the source's address space.
        nixl_metadata: empty where the source has no NIXL.
    """

    node_id: str
    boot_epoch: int
    num_slots: int
    block_bytes: int
    pool_address: int
    nixl_metadata: bytes


@dataclass(frozen=True, slots=True)
class Pinned:
    """Blocks of a chain that are pinned at a source. ``checksums``: XXH3-64, 0 where the source does not check."""

    ticket_id: int
    slots: tuple[int, ...]
    checksums: tuple[int, ...]


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

        When it ends, however it ends, nobody writes to the local slots any more; so it is never cancelled, and it ends
        by itself when the source is lost. Raises Unavailable when not everything came.
        """

    def forget(self, node_id: str) -> None:
        """A source is gone or has restarted: what is known of it is void."""

    def close(self) -> None:
        """No read is under way any more. Idempotent."""
