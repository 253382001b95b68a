"""The source's side of the data plane: messages in, calls on the pool, messages out. No decision is made here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc

from pillion.errors import InvalidRequest
from pillion.kvstore.hashing import split_hashes
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.transfer.plane import BlockShape, PeerPool, Pinned
from pillion.v1 import kvplane_pb2_grpc
from pillion.wire import kvplane as wire

SERVICE_NAME = wire.PLANE_SERVICE_NAME
# Of a chain that may be pinned at once: 8 MiB of hashes, half of what a message may have.
MAX_PIN_BLOCKS = 2**18
MAX_READ_SLOTS = 4096
MAX_PIECE_BYTES = 2**20

Context = grpc.aio.ServicerContext[Any, Any]


class Source(Protocol):
    """A pool that others read from."""

    async def describe(self) -> tuple[PeerPool, BlockShape]:
        """What readers have to know; may take a second the first time. Raises Conflict without a shape."""

    async def pin_chain(
        self, epoch: int, nonce: int, hashes: list[bytes], first_block: int, timeout_s: float
    ) -> Pinned:
        """Pins the longest prefix that is here, lower tiers included, to a ticket of ``epoch``; names its slots from
        ``first_block`` on. Ticket 0: nothing of that is here, and nothing is held. Raises NotFound for a void epoch."""

    def pinned_slots(self, epoch: int, ticket_id: int) -> frozenset[int]:
        """Slots of a ticket's chain. Raises NotFound unless ``epoch`` holds the ticket."""

    @property
    def memory(self) -> PoolMemory:
        """The pool's."""


class KVPlaneServicer(kvplane_pb2_grpc.KVPlaneServicer):
    """See kvplane.proto. ``source`` gives the pool, or raises Conflict as long as it has no shape."""

    def __init__(self, source: Callable[[], Source]) -> None:
        self._source = source

    async def Meet(self, request: Any, context: Context) -> Any:  # noqa: N802
        reader, theirs = wire.meet_from_pb(request)
        pool, shape = await self._source().describe()
        shape.check(theirs, reader)
        return wire.met_to_pb(pool, shape)

    async def PinBlocks(self, request: Any, context: Context) -> Any:  # noqa: N802
        hashes = split_hashes(request.block_hashes)
        if len(hashes) > MAX_PIN_BLOCKS:
            raise InvalidRequest(f"{len(hashes)} blocks cannot be pinned at once, at most {MAX_PIN_BLOCKS}")
        if request.first_block > len(hashes):
            raise InvalidRequest(f"block {request.first_block} is behind the end of a chain of {len(hashes)}")
        # What is on a disk comes up first: half of the caller's time for that, so that what came is of use.
        left_s = context.time_remaining()
        timeout_s = left_s / 2 if left_s else 0.0
        pinned = await self._source().pin_chain(request.epoch, request.nonce, hashes, request.first_block, timeout_s)
        return wire.pinned_to_pb(pinned)

    async def ReadBlocks(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        slots, source = tuple(request.slots), self._source()
        if len(slots) > MAX_READ_SLOTS:
            raise InvalidRequest(f"{len(slots)} slots cannot be read in one call, at most {MAX_READ_SLOTS}")
        memory = source.memory
        for first in range(0, len(slots), memory.ahead_blocks):
            part = slots[first : first + memory.ahead_blocks]
            # Looked at as late as can be: what was released meanwhile may hold another block already.
            pinned = source.pinned_slots(request.epoch, request.ticket_id)
            for slot in part:
                if slot not in pinned:
                    raise InvalidRequest(f"slot {slot} is not of ticket {request.ticket_id}'s chain")
            async for piece in memory.pieces(part, MAX_PIECE_BYTES):
                yield wire.piece_to_pb(piece)
