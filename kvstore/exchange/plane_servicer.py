"""gRPC service of the data plane's source side (kvplane.proto): converts messages and calls the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from pillion.errors import InvalidRequest
from pillion.kvstore.exchange.exchanged_pool import ExchangedPool
from pillion.kvstore.exchange.plane import MAX_PIECE_BYTES, MAX_READ_SLOTS, BlockShape
from pillion.kvstore.hashing import split_hashes
from pillion.kvstore.memory.memory import keep_freed_buffers
from pillion.v1 import kvplane_pb2, kvplane_pb2_grpc
from pillion.wire.common import check_hello

SERVICE_NAME = kvplane_pb2.DESCRIPTOR.services_by_name["KVPlane"].full_name
# Max blocks pinned per call: 8 MiB of hashes, half of a message's limit.
MAX_PIN_BLOCKS = 2**18

Context = grpc.aio.ServicerContext[Any, Any]


class KVPlaneServicer(kvplane_pb2_grpc.KVPlaneServicer):
    """Implements kvplane.proto. ``source`` returns the pool, or raises Unavailable while it has no shape."""

    def __init__(self, source: Callable[[], ExchangedPool]) -> None:
        self._source = source
        keep_freed_buffers()

    async def Meet(self, request: Any, context: Context) -> Any:  # noqa: N802
        reader = check_hello(request.hello)
        reply = await self._source().describe()
        shape = BlockShape(reply.block_bytes, reply.kv_namespace)
        shape.check(BlockShape(request.block_bytes, request.kv_namespace), reader)
        return reply

    async def PinBlocks(self, request: Any, context: Context) -> Any:  # noqa: N802
        hashes = split_hashes(request.block_hashes)
        if len(hashes) > MAX_PIN_BLOCKS:
            raise InvalidRequest(f"{len(hashes)} blocks cannot be pinned at once, at most {MAX_PIN_BLOCKS}")
        if request.first_block > len(hashes):
            raise InvalidRequest(f"block {request.first_block} is after the end of a chain of {len(hashes)}")
        # Spend at most half of the caller's time on loading blocks from lower tiers.
        left_s = context.time_remaining()
        timeout_s = left_s / 2 if left_s else 0.0
        return await self._source().pin_chain(request.epoch, request.nonce, hashes, request.first_block, timeout_s)

    async def ReadBlocks(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        slots, source = tuple(request.slots), self._source()
        if len(slots) > MAX_READ_SLOTS:
            raise InvalidRequest(f"{len(slots)} slots cannot be read in one call, at most {MAX_READ_SLOTS}")
        memory, ticket_id = source.memory, request.ticket_id
        if not set(slots) <= source.pinned_slots(request.epoch, ticket_id):
            raise InvalidRequest(f"a slot is not in the chain of ticket {ticket_id}")
        ahead_blocks = memory.ahead_blocks if request.max_piece_bytes else 1
        piece_bytes = min(request.max_piece_bytes or MAX_PIECE_BYTES, MAX_PIECE_BYTES)
        for first in range(0, len(slots), ahead_blocks):
            pieces = await memory.pieces(slots[first : first + ahead_blocks], piece_bytes)
            # Check again: a ticket's chain never shrinks, so if the ticket still exists, these blocks were pinned while
            # they were copied. Otherwise the slots may have been reused.
            source.pinned_slots(request.epoch, ticket_id)
            for piece in pieces:
                yield kvplane_pb2.BlockPiece(data=piece)
