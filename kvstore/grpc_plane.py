"""The portable data plane: the source streams the blocks' bytes (ReadBlocks), and they land in their slots directly."""

from __future__ import annotations

import asyncio
import mmap

from kvstore.plane import BlockStream, PeerPool
from pillion.errors import ConfigError, Conflict, PillionError, Unavailable

# Reads under way at once; one more is refused.
MAX_READS = 64
# Longest time that one read may last.
READ_TIMEOUT_S = 30.0


class GrpcPlane:
    """See :class:`kvstore.plane.DataPlane`."""

    name = "grpc"
    nixl_metadata = b""
    pool_address = 0

    def __init__(self, memory: mmap.mmap, num_slots: int, block_bytes: int) -> None:
        if len(memory) < num_slots * block_bytes:
            raise ConfigError(f"{num_slots} slots of {block_bytes} bytes do not fit into {len(memory)} bytes")
        self._memory = memoryview(memory)
        self._block_bytes = block_bytes
        self._reads = 0

    async def read(
        self, source: PeerPool, stream: BlockStream, ticket_id: int, remote: tuple[int, ...], local: tuple[int, ...]
    ) -> None:
        """Only this coroutine writes to the slots, so nobody does once it has ended, even if it was cancelled."""
        check_slots(source, self._block_bytes, remote, local, len(self._memory))
        if self._reads >= MAX_READS:
            raise Unavailable(f"{MAX_READS} reads are under way already")
        self._reads += 1
        targets = [self._memory[slot * self._block_bytes : (slot + 1) * self._block_bytes] for slot in local]
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                await stream.read_blocks(ticket_id, remote, targets)
        except TimeoutError:
            raise Unavailable(f"{source.node_id} sent not everything within {READ_TIMEOUT_S:.0f} s") from None
        except Unavailable:
            raise
        except PillionError as error:
            raise Unavailable(f"{source.node_id}: {error.message}") from None
        finally:
            for target in targets:
                target.release()
            self._reads -= 1

    def forget(self, node_id: str) -> None:
        """Nothing is known of a source here."""

    def close(self) -> None:
        """Lets go of the mapping. Idempotent; the callers of reads under way have ended them."""
        if not self._reads:
            self._memory.release()


def check_slots(
    source: PeerPool, block_bytes: int, remote: tuple[int, ...], local: tuple[int, ...], own_bytes: int
) -> None:
    """Raises Conflict where the two pools or the two lists do not fit, or where a slot is outside its pool."""
    if source.block_bytes != block_bytes:
        raise Conflict(f"blocks have {block_bytes} bytes here, {source.block_bytes} at {source.node_id}")
    if len(remote) != len(local) or len(set(local)) != len(local):
        raise Conflict(f"{len(remote)} slots cannot be read into {len(set(local))} others, pair by pair")
    if any(not 0 <= slot < source.num_slots for slot in remote):
        raise Conflict(f"{source.node_id} has {source.num_slots} slots, another was named")
    if any(not 0 <= slot < own_bytes // block_bytes for slot in local):
        raise Conflict("a slot outside the own pool was named")
