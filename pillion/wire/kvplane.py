"""Converters of the data plane's service (protos/pillion/v1/kvplane.proto)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pillion.errors import Conflict
from pillion.v1 import kvplane_pb2
from pillion.wire.common import check_hello, hello_to_pb

PLANE_SERVICE_NAME = kvplane_pb2.DESCRIPTOR.services_by_name["KVPlane"].full_name


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What two pools must agree on before a block of one means anything in the other. ``namespace``: 32 bytes."""

    block_bytes: int
    namespace: bytes

    def check(self, other: BlockShape, other_id: str) -> None:
        """Raises Conflict unless ``other`` is the same."""
        if other.block_bytes != self.block_bytes:
            raise Conflict(f"blocks have {self.block_bytes} bytes here, {other.block_bytes} at {other_id}")
        if other.namespace != self.namespace:
            raise Conflict(f"{other_id} holds blocks of another namespace: model, dtype, layout or block size differ")


@dataclass(frozen=True, slots=True)
class PeerPool:
    """What a source said of its pool (MeetReply). Void once its boot epoch differs.

    Attributes:
        pool_address: where the pool begins in the source's address space.
        nixl_metadata: empty where the source has no NIXL.
        memory_kind, device_index: "host" or "cuda", and which GPU, as the source counts.
    """

    node_id: str
    boot_epoch: int
    num_slots: int
    block_bytes: int
    pool_address: int
    nixl_metadata: bytes
    memory_kind: str = "host"
    device_index: int = 0


@dataclass(frozen=True, slots=True)
class Pinned:
    """Blocks of a chain that are pinned at a source. ``checksums``: XXH3-64, 0 where the source does not check."""

    ticket_id: int
    slots: tuple[int, ...]
    checksums: tuple[int, ...]


def meet_to_pb(component_id: str, shape: BlockShape) -> kvplane_pb2.MeetRequest:
    """A reader's first words."""
    return kvplane_pb2.MeetRequest(
        hello=hello_to_pb(component_id), block_bytes=shape.block_bytes, kv_namespace=shape.namespace
    )


def meet_from_pb(request: kvplane_pb2.MeetRequest) -> tuple[str, BlockShape]:
    """The reader's name and its pool's shape. Raises Conflict on a foreign protocol."""
    return check_hello(request.hello), BlockShape(request.block_bytes, request.kv_namespace)


def met_to_pb(pool: PeerPool, shape: BlockShape) -> kvplane_pb2.MeetReply:
    """What the source says of itself."""
    return kvplane_pb2.MeetReply(
        hello=hello_to_pb(pool.node_id),
        boot_epoch=pool.boot_epoch,
        num_slots=pool.num_slots,
        block_bytes=shape.block_bytes,
        kv_namespace=shape.namespace,
        nixl_metadata=pool.nixl_metadata,
        pool_address=pool.pool_address,
        memory_kind=pool.memory_kind,
        device_index=pool.device_index,
    )


def met_from_pb(reply: kvplane_pb2.MeetReply) -> tuple[PeerPool, BlockShape]:
    """Raises Conflict on a foreign protocol."""
    pool = PeerPool(
        node_id=check_hello(reply.hello),
        boot_epoch=reply.boot_epoch,
        num_slots=reply.num_slots,
        block_bytes=reply.block_bytes,
        pool_address=reply.pool_address,
        nixl_metadata=reply.nixl_metadata,
        memory_kind=reply.memory_kind or "host",
        device_index=reply.device_index,
    )
    if pool.memory_kind not in ("host", "cuda"):
        raise Conflict(f"{pool.node_id} has its pool in memory of kind {pool.memory_kind!r}, which is not known here")
    return pool, BlockShape(reply.block_bytes, reply.kv_namespace)


def pin_to_pb(epoch: int, nonce: int, block_hashes: bytes, first_block: int) -> kvplane_pb2.PinBlocksRequest:
    """``block_hashes``: the chain from its first block, 32 bytes each."""
    return kvplane_pb2.PinBlocksRequest(epoch=epoch, nonce=nonce, block_hashes=block_hashes, first_block=first_block)


def pinned_to_pb(pinned: Pinned) -> kvplane_pb2.PinBlocksReply:
    """The source's answer."""
    return kvplane_pb2.PinBlocksReply(ticket_id=pinned.ticket_id, slots=pinned.slots, checksums=pinned.checksums)


def pinned_from_pb(reply: kvplane_pb2.PinBlocksReply) -> Pinned:
    """Raises Conflict where slots and checksums do not pair."""
    if len(reply.slots) != len(reply.checksums):
        raise Conflict(f"the source names {len(reply.slots)} slots and {len(reply.checksums)} checksums")
    return Pinned(reply.ticket_id, tuple(reply.slots), tuple(reply.checksums))


def read_to_pb(epoch: int, ticket_id: int, slots: Sequence[int]) -> kvplane_pb2.ReadBlocksRequest:
    """Blocks to stream, in this order."""
    return kvplane_pb2.ReadBlocksRequest(epoch=epoch, ticket_id=ticket_id, slots=slots)


def piece_to_pb(data: bytes) -> kvplane_pb2.BlockPiece:
    """A part of one block."""
    return kvplane_pb2.BlockPiece(data=data)
