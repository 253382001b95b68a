"""The portable data plane: the source streams the blocks' bytes (ReadBlocks), and they land in their slots directly."""

from __future__ import annotations

import asyncio

from pillion.errors import Conflict, PillionError, Unavailable
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.transfer.plane import BlockStream, PeerPool

# Reads under way at once; one more is refused.
MAX_READS = 64
# Longest time that one read may last.
READ_TIMEOUT_S = 30.0


class GrpcPlane:
    """See :class:`pillion.kvstore.transfer.plane.DataPlane`."""

    name = "grpc"
    nixl_metadata = b""
    pool_address = 0

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._reads = 0

    async def read(
        self, source: PeerPool, stream: BlockStream, ticket_id: int, remote: tuple[int, ...], local: tuple[int, ...]
    ) -> None:
        """Only this coroutine writes to the slots, so nobody does once it has ended, even if it was cancelled."""
        check_slots(source, self._memory, remote, local)
        if self._reads >= MAX_READS:
            raise Unavailable(f"{MAX_READS} reads are under way already")
        self._reads += 1
        most = self._memory.batch_blocks
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                for first in range(0, len(local), most):
                    part = slice(first, first + most)
                    async with self._memory.writing(local[part]) as targets:
                        await stream.read_blocks(ticket_id, remote[part], targets)
        except TimeoutError:
            raise Unavailable(f"{source.node_id} sent not everything within {READ_TIMEOUT_S:.0f} s") from None
        except Unavailable:
            raise
        except PillionError as error:
            raise Unavailable(f"{source.node_id}: {error.message}") from None
        finally:
            self._reads -= 1

    def forget(self, node_id: str) -> None:
        """Nothing is known of a source here."""

    def close(self) -> None:
        """The memory is its owner's. Idempotent; the callers of reads under way have ended them."""


def check_slots(source: PeerPool, own: PoolMemory, remote: tuple[int, ...], local: tuple[int, ...]) -> None:
    """Raises Conflict where the two pools or the two lists do not fit, or where a slot is outside its pool."""
    if source.block_bytes != own.block_bytes:
        raise Conflict(f"blocks have {own.block_bytes} bytes here, {source.block_bytes} at {source.node_id}")
    if len(remote) != len(local) or len(set(local)) != len(local):
        raise Conflict(f"{len(remote)} slots cannot be read into {len(set(local))} others, pair by pair")
    if any(not 0 <= slot < source.num_slots for slot in remote):
        raise Conflict(f"{source.node_id} has {source.num_slots} slots, another was named")
    if any(not 0 <= slot < own.num_slots for slot in local):
        raise Conflict("a slot outside the own pool was named")
