"""The portable data plane: the source streams the blocks' bytes (ReadBlocks), and they land in their slots directly."""

from __future__ import annotations

import asyncio

from pillion.errors import PillionError, Unavailable
from pillion.kvstore.memory.memory import PoolMemory, keep_freed_buffers
from pillion.kvstore.transfer.plane import MAX_READS, READ_TIMEOUT_S, BlockStream, check_slots, node_id_of
from pillion.v1.kvplane_pb2 import MeetReply


class GrpcPlane:
    """A DataPlane (:mod:`pillion.kvstore.transfer.plane`) over a gRPC stream of blocks."""

    name = "grpc"
    nixl_metadata = b""
    pool_address = 0

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._reads = 0
        keep_freed_buffers()

    async def read(
        self, source: MeetReply, stream: BlockStream, ticket_id: int, remote: tuple[int, ...], local: tuple[int, ...]
    ) -> None:
        """Read blocks as :meth:`DataPlane.read` says. Only this coroutine writes to the slots."""
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
            raise Unavailable(f"{node_id_of(source)} sent not everything within {READ_TIMEOUT_S:.0f} s") from None
        except Unavailable:
            raise
        except PillionError as error:
            raise Unavailable(f"{node_id_of(source)}: {error.message}") from None
        finally:
            self._reads -= 1

    def forget(self, node_id: str) -> None:
        """This plane knows nothing of a source."""

    def close(self) -> None:
        """Does nothing: the memory is its owner's to close."""
