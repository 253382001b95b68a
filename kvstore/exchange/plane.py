"""Data planes, which copy blocks of another node's pool into this one's.

A plane makes no decisions: :mod:`pillion.kvstore.transfer.fetch` chooses blocks and sources and handles the results. A
source's pool is identified by its MeetReply, which is void once the source's boot epoch differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pillion.errors import Conflict, PillionError, Unavailable
from pillion.kvstore.memory.memory import PoolMemory, keep_freed_buffers
from pillion.v1.kvplane_pb2 import MeetReply

# Concurrent reads of one node.
MAX_READS = 64
READ_TIMEOUT_S = 30.0
MAX_READ_SLOTS = 4096
# Bytes per message of a ReadBlocks stream, which may contain several small blocks.
MAX_PIECE_BYTES = 2**19


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Properties that two pools must share for their blocks to be interchangeable. ``namespace`` has 32 bytes."""

    block_bytes: int
    namespace: bytes

    def check(self, other: BlockShape, other_id: str) -> None:
        """Raise Conflict unless ``other`` has the same properties."""
        if other.block_bytes != self.block_bytes:
            raise Conflict(f"blocks have {self.block_bytes} bytes here, {other.block_bytes} at {other_id}")
        if other.namespace != self.namespace:
            raise Conflict(f"{other_id} has blocks of another namespace: model, dtype, layout or block size differ")


# Calls a source's ReadBlocks with a ticket and slots; fills the targets with one whole block each, in order.
StreamBlocks = Callable[[int, tuple[int, ...], list[memoryview]], Awaitable[None]]


class DataPlane:
    """Reads blocks from a gRPC stream (ReadBlocks) directly into their slots. Faster planes extend this class. Only the
    node's loop calls it, so it has no lock. The constructor raises ConfigError for an unsuitable pool.

    Attributes:
        name: "nixl" or "grpc".
        nixl_metadata, pool_address: for MeetReply; empty and 0 without NIXL.
    """

    name = "grpc"
    nixl_metadata = b""
    pool_address = 0

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._streaming = 0
        keep_freed_buffers()

    async def read(
        self,
        source: MeetReply,
        stream: StreamBlocks,
        ticket_id: int,
        remote: tuple[int, ...],
        local: tuple[int, ...],
    ) -> None:
        """Copy slots ``remote`` of ``source``, pinned there under ``ticket_id``, into own slots ``local``, in order;
        ``stream`` reads from the source.

        The caller must have leased the ``local`` slots. No write to them is pending when this returns or raises, so
        cancelling it may take a while; it ends by itself when the source is lost. Raises Unavailable if not everything
        was copied, which leaves the slots undefined, and Conflict if the slots do not fit the pools.
        """
        check_slots(source, self._memory, remote, local)
        if self._streaming >= MAX_READS:
            raise Unavailable(f"{MAX_READS} reads are already in progress")
        self._streaming += 1
        batch = self._memory.batch_blocks
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                for first in range(0, len(local), batch):
                    part = slice(first, first + batch)
                    async with self._memory.writing(local[part]) as targets:
                        await stream(ticket_id, remote[part], targets)
        except TimeoutError:
            raise Unavailable(f"{node_id_of(source)} did not send everything within {READ_TIMEOUT_S:.0f} s") from None
        except Unavailable:
            raise
        except PillionError as error:
            raise Unavailable(f"{node_id_of(source)}: {error.message}") from None
        finally:
            self._streaming -= 1

    def forget(self, node_id: str) -> None:
        """Drop the state of a source that is gone or has restarted."""

    def close(self) -> None:
        """Free everything except the pool's memory, after all reads have ended. Idempotent."""


def node_id_of(source: MeetReply) -> str:
    """Return the node id of a source."""
    return source.hello.component_id


def check_slots(source: MeetReply, own: PoolMemory, remote: tuple[int, ...], local: tuple[int, ...]) -> None:
    """Raise Conflict unless both pools have the same block size, and the lists are of equal length, with each local
    slot once and every slot within its pool."""
    if source.block_bytes != own.block_bytes:
        raise Conflict(f"blocks have {own.block_bytes} bytes here, {source.block_bytes} at {node_id_of(source)}")
    if len(remote) != len(local) or len(set(local)) != len(local):
        raise Conflict(f"{len(remote)} slots cannot be read into {len(set(local))} different slots")
    if min(remote, default=0) < 0 or max(remote, default=-1) >= source.num_slots:
        raise Conflict(f"{node_id_of(source)} has {source.num_slots} slots, a slot beyond them was requested")
    if min(local, default=0) < 0 or max(local, default=-1) >= own.num_slots:
        raise Conflict("a slot is outside the own pool")
