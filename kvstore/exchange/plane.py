"""Defines the interface of data planes, which bring blocks of another node's pool into this one's.

A plane decides nothing: which blocks are read, from which node, and what becomes of them is
:mod:`pillion.kvstore.transfer.fetch`'s business. A source's pool is named by the MeetReply that describes it, which is
void once the source's boot epoch differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pillion.errors import Conflict, PillionError, Unavailable
from pillion.kvstore.memory.memory import PoolMemory, keep_freed_buffers
from pillion.v1.kvplane_pb2 import MeetReply

# A data plane may have this many reads under way at once; further ones are refused.
MAX_READS = 64
# One read of another node's blocks may last at most this long.
READ_TIMEOUT_S = 30.0
# A ReadBlocks call has at most this many slots; a longer list is several calls, one after the other.
MAX_READ_SLOTS = 4096
# One message of a ReadBlocks stream, which holds several small blocks, has at most this many bytes.
MAX_PIECE_BYTES = 2**19


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Holds the properties that two pools must share before a block of one means anything in the other; ``namespace``
    has 32 bytes."""

    block_bytes: int
    namespace: bytes

    def check(self, other: BlockShape, other_id: str) -> None:
        """Raises Conflict unless ``other`` has the same properties."""
        if other.block_bytes != self.block_bytes:
            raise Conflict(f"blocks have {self.block_bytes} bytes here, {other.block_bytes} at {other_id}")
        if other.namespace != self.namespace:
            raise Conflict(f"{other_id} holds blocks of another namespace: model, dtype, layout or block size differ")


# Such a function, a source's ReadBlocks call, fills targets with pinned blocks, one whole block each, in order. It
# takes their ticket and slots.
StreamBlocks = Callable[[int, tuple[int, ...], list[memoryview]], Awaitable[None]]


class DataPlane:
    """Brings blocks by a gRPC stream (ReadBlocks), which writes them directly into their slots. Faster planes extend
    this class. The node's loop makes all calls, so callers need no lock. Making one raises ConfigError for a pool that
    it cannot use.

    Attributes:
        name: "nixl" or "grpc".
        nixl_metadata, pool_address: for readers, in MeetReply; empty and 0 without NIXL.
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
        """Copies slots of ``source``, which are pinned there under ``ticket_id``, into own slots, pair by pair;
        ``stream`` reads from the source.

        The caller owns the ``local`` slots: they are leased to it. When the call ends, however it ends, nobody writes
        to them any more; so a caller that is cancelled is held until then, and the call ends by itself when the source
        is lost. Raises Unavailable if not everything came (the slots may hold anything then), Conflict if the lists of
        slots do not fit the pools.
        """
        check_slots(source, self._memory, remote, local)
        if self._streaming >= MAX_READS:
            raise Unavailable(f"{MAX_READS} reads are under way already")
        self._streaming += 1
        most = self._memory.batch_blocks
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                for first in range(0, len(local), most):
                    part = slice(first, first + most)
                    async with self._memory.writing(local[part]) as targets:
                        await stream(ticket_id, remote[part], targets)
        except TimeoutError:
            raise Unavailable(f"{node_id_of(source)} sent not everything within {READ_TIMEOUT_S:.0f} s") from None
        except Unavailable:
            raise
        except PillionError as error:
            raise Unavailable(f"{node_id_of(source)}: {error.message}") from None
        finally:
            self._streaming -= 1

    def forget(self, node_id: str) -> None:
        """Forgets what it knows of a source that is gone or has restarted."""

    def close(self) -> None:
        """Frees everything except the pool's memory; no read is under way any more. A second call does nothing."""


def node_id_of(source: MeetReply) -> str:
    """Returns the name of the KV node that answered with ``source``, the description of its pool."""
    return source.hello.component_id


def check_slots(source: MeetReply, own: PoolMemory, remote: tuple[int, ...], local: tuple[int, ...]) -> None:
    """Raises Conflict if the two pools or the two lists do not fit, or if a slot is outside its pool."""
    if source.block_bytes != own.block_bytes:
        raise Conflict(f"blocks have {own.block_bytes} bytes here, {source.block_bytes} at {node_id_of(source)}")
    if len(remote) != len(local) or len(set(local)) != len(local):
        raise Conflict(f"{len(remote)} slots cannot be read into {len(set(local))} others, pair by pair")
    if min(remote, default=0) < 0 or max(remote, default=-1) >= source.num_slots:
        raise Conflict(f"{node_id_of(source)} has {source.num_slots} slots, another was named")
    if min(local, default=0) < 0 or max(local, default=-1) >= own.num_slots:
        raise Conflict("a slot outside the own pool was named")
