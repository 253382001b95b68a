"""A node's pool as other nodes read it, and the data plane that copies blocks.

The data plane is created, on a thread, when another node is alive or when the first reader asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from pillion.errors import ConfigError
from pillion.kvstore.exchange.peers import Peers
from pillion.kvstore.exchange.plane import BlockShape, DataPlane
from pillion.kvstore.index.registry import Addresses
from pillion.kvstore.ledger.records import Block, PoolShape
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.node.pool import Pool
from pillion.kvstore.transfer.nixl.nixl_agent import why_nixl_unusable
from pillion.kvstore.transfer.nixl.nixl_plane import NixlPlane
from pillion.v1.kvnode_pb2 import PinPrefixRequest
from pillion.v1.kvplane_pb2 import MeetReply, PinBlocksReply
from pillion.wire.common import hello_to_pb

log = logging.getLogger("pillion.kvnode")

# How long a leaving node keeps its data plane open after last describing it to a reader, which may be connecting: UCX
# aborts the reader's process if the plane is closed while it connects.
FIRST_CONTACT_S = 1.0

# Returns the prefix pins that end with a block of a chain of hashes, as requests that recreate them on another node.
PinsOf = Callable[[Sequence[bytes]], Sequence[PinPrefixRequest]]


class ExchangedPool:
    """This node's pool as a source for other nodes, and the peers that it reads from. Only the node's loop calls it.

    Args:
        shape, memory, pool: the pool, with its shape and memory.
        kv_transport: the transport from the node's flags.
        addresses, boot_epoch: the live nodes, and this node's boot epoch.
        pins_of: returns the prefix pins that end with a block of a chain.

    Attributes:
        plane_task: creates the data plane; None until first needed.
        peers: the nodes that this one reads from.
    """

    def __init__(
        self,
        shape: PoolShape,
        memory: PoolMemory,
        pool: Pool,
        *,
        node_id: str,
        kv_transport: str,
        addresses: Addresses,
        boot_epoch: Callable[[], int],
        pins_of: PinsOf,
    ) -> None:
        self.memory, self._pool, self._num_slots = memory, pool, shape.num_slots
        self._node_id, self._kv_transport = node_id, kv_transport
        self._boot_epoch, self._pins_of = boot_epoch, pins_of
        self._block_shape = BlockShape(shape.block_bytes, bytes.fromhex(shape.namespace))
        self.plane_task: asyncio.Task[DataPlane] | None = None
        self._connecting_until_s = 0.0
        self.peers = Peers(node_id, self._block_shape, addresses, self.plane)

    async def plane(self) -> DataPlane:
        """Return this node's data plane; the first call takes a second or two."""
        if self.plane_task is None:
            creating = asyncio.to_thread(choose_plane, self._kv_transport, self.memory)
            self.plane_task = asyncio.create_task(creating, name="data plane")
        return await asyncio.shield(self.plane_task)

    async def aclose(self) -> None:
        """Close the data plane once the last reader that got its description has had time to connect."""
        if self.plane_task is None:
            return
        with contextlib.suppress(Exception):
            plane = await self.plane_task
            await asyncio.sleep(self._connecting_until_s - asyncio.get_running_loop().time())
            plane.close()

    async def describe(self) -> MeetReply:
        """Return the pool's description for readers; the first call may take a second."""
        plane = await self.plane()
        if plane.nixl_metadata:
            self._connecting_until_s = asyncio.get_running_loop().time() + FIRST_CONTACT_S
        return MeetReply(
            hello=hello_to_pb(self._node_id),
            boot_epoch=self._boot_epoch(),
            num_slots=self._num_slots,
            block_bytes=self._block_shape.block_bytes,
            kv_namespace=self._block_shape.namespace,
            pool_address=plane.pool_address,
            nixl_metadata=plane.nixl_metadata,
            memory_kind=self.memory.kind,
            device_index=self.memory.device_index,
        )

    async def pin_chain(
        self, epoch: int, nonce: int, hashes: list[bytes], first_block: int, timeout_s: float
    ) -> PinBlocksReply:
        """Pin the longest prefix of a chain that this node has, lower tiers included, to a ticket of ``epoch``, and
        return its blocks from ``first_block`` on. Pins nothing if the prefix ends before ``first_block``. Raises
        NotFound for a void epoch."""
        ticket_id, chain = await self._pool.pin_chain(epoch, nonce, hashes, first_block, timeout_s)
        if not chain:
            return PinBlocksReply()
        sums = await self._checksums(chain)
        return PinBlocksReply(ticket_id=ticket_id, slots=[block.slot for block in chain], checksums=sums)

    def pinned_slots(self, epoch: int, ticket_id: int) -> frozenset[int]:
        """Return the slots of a ticket's chain, cached. Raises NotFound unless ``epoch`` holds the ticket."""
        return self._pool.pinned_slots(epoch, ticket_id)

    def pins_of(self, chain: Sequence[bytes]) -> Sequence[PinPrefixRequest]:
        """Return the prefix pins that end within a chain, as requests to other nodes."""
        return self._pins_of(chain)

    async def _checksums(self, chain: Sequence[Block]) -> tuple[int, ...]:
        """Return the checksums of pinned blocks, each computed once."""
        unknown = [block for block in chain if not block.checksum]
        computed = await self.memory.checksums([block.slot for block in unknown])
        for block, checksum in zip(unknown, computed, strict=True):
            block.checksum = checksum
        return tuple(block.checksum for block in chain)


def choose_transport(kv_transport: str) -> str:
    """Return the transport that ``--kv-transport`` selects on this machine, "nixl" or "grpc", and log it.

    Imports and tries NIXL, which takes about a second: do not call on the event loop. Raises ConfigError if
    ``kv_transport`` is "nixl" and NIXL does not work.
    """
    if kv_transport == "grpc":
        log.info("blocks move between nodes by gRPC (--kv-transport=grpc)")
        return "grpc"
    reason = why_nixl_unusable()
    if not reason:
        log.info("blocks move between nodes by NIXL (--kv-transport=%s)", kv_transport)
        return "nixl"
    if kv_transport == "nixl":
        raise ConfigError(f"--kv-transport=nixl: {reason}")
    log.info("blocks move between nodes by gRPC (--kv-transport=%s; no NIXL: %s)", kv_transport, reason)
    return "grpc"


def choose_plane(kv_transport: str, memory: PoolMemory) -> DataPlane:
    """Create the data plane of a pool. With NIXL this takes about a second: do not call on the event loop. Raises
    ConfigError if ``kv_transport`` is "nixl" and NIXL does not work."""
    if choose_transport(kv_transport) == "nixl":
        try:
            return NixlPlane(memory)
        except ConfigError as error:
            # The self-check with two pages passed, but a big pool may exceed NIXL's limits.
            if kv_transport == "nixl":
                raise
            log.warning("blocks move between nodes by gRPC: %s", error.message)
    return DataPlane(memory)
