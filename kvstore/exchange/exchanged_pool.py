"""Represents a node's pool among those of other nodes: what they may read of it, and the data plane by which blocks
travel.

The data plane is made, in a thread, when another node lives or when the first reader asks.
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
from pillion.kvstore.transfer.nixl.nixl_agent import nixl_trouble
from pillion.kvstore.transfer.nixl.nixl_plane import NixlPlane
from pillion.v1.kvnode_pb2 import PinPrefixRequest
from pillion.v1.kvplane_pb2 import MeetReply, PinBlocksReply
from pillion.wire.common import hello_to_pb

log = logging.getLogger("pillion.kvnode")

# A node that leaves keeps its data plane for this long after it last described the plane to a reader. The reader
# connects in that time, and UCX would abort the reader's process if the plane went away meanwhile.
FIRST_CONTACT_S = 1.0


class ExchangedPool:
    """Represents the pool of this node as others read from it, and the nodes that it is filled from. All calls are made
    on the node's loop.

    Args:
        shape, memory, pool: the pool, which has its shape and its memory.
        kv_transport: the transport that the node's flags allow.
        addresses, boot_epoch: the live nodes, and this node's boot epoch.

    Attributes:
        making: the data plane, which is made or being made; None before somebody has asked for it.
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
    ) -> None:
        self.memory, self._pool, self._num_slots = memory, pool, shape.num_slots
        self._node_id, self._kv_transport = node_id, kv_transport
        self._boot_epoch = boot_epoch
        self._block_shape = BlockShape(shape.block_bytes, bytes.fromhex(shape.namespace))
        self.making: asyncio.Task[DataPlane] | None = None
        # A reader that was given the plane's description may be connecting until then, on the loop's clock.
        self._connecting_until_s = 0.0
        self.peers = Peers(node_id, self._block_shape, addresses, self.plane)

    async def plane(self) -> DataPlane:
        """Returns this node's data plane; the first caller waits for a second or two."""
        if self.making is None:
            making = asyncio.to_thread(choose_plane, self._kv_transport, self.memory)
            self.making = asyncio.create_task(making, name="data plane")
        return await asyncio.shield(self.making)

    async def aclose(self) -> None:
        """Closes the data plane as soon as the last reader that it was described to has had time to connect."""
        if self.making is None:
            return
        with contextlib.suppress(Exception):
            plane = await self.making
            await asyncio.sleep(self._connecting_until_s - asyncio.get_running_loop().time())
            plane.close()

    async def describe(self) -> MeetReply:
        """Describes the pool to readers; may take a second the first time."""
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
        """Pins the longest prefix of a chain that this node has, lower tiers included, to a ticket of ``epoch``, and
        returns its blocks from ``first_block`` on; without such blocks nothing is pinned. Raises NotFound for a void
        epoch."""
        ticket_id, chain = await self._pool.pin_chain(epoch, nonce, hashes, first_block, timeout_s)
        if not chain:
            return PinBlocksReply()
        sums = await self._checksums(chain)
        return PinBlocksReply(ticket_id=ticket_id, slots=[block.slot for block in chain], checksums=sums)

    def pinned_slots(self, epoch: int, ticket_id: int) -> frozenset[int]:
        """Returns the slots of a ticket's chain, in O(1) except for the first time. Raises NotFound unless ``epoch``
        holds the ticket."""
        return self._pool.pinned_slots(epoch, ticket_id)

    def pins_of(self, chain: Sequence[bytes]) -> Sequence[PinPrefixRequest]:
        """Returns the prefix pins that end in a chain, as requests to other nodes."""
        return self._pool.prefix_pins.ending_in(chain)

    async def _checksums(self, chain: Sequence[Block]) -> tuple[int, ...]:
        """Returns the checksums of pinned blocks, which do not change; each is computed once."""
        unknown = [block for block in chain if not block.checksum]
        found = await self.memory.checksums([block.slot for block in unknown])
        for block, checksum in zip(unknown, found, strict=True):
            block.checksum = checksum
        return tuple(block.checksum for block in chain)


def choose_transport(kv_transport: str) -> str:
    """Returns the transport that ``--kv-transport`` selects on this machine, "nixl" or "grpc", and logs it.

    It imports NIXL and tries it, which takes about a second: not for the event loop's thread. Raises ConfigError if
    ``kv_transport`` is "nixl" and NIXL does not work.
    """
    if kv_transport == "grpc":
        log.info("blocks move between nodes by gRPC (--kv-transport=grpc)")
        return "grpc"
    trouble = nixl_trouble()
    if not trouble:
        log.info("blocks move between nodes by NIXL (--kv-transport=%s)", kv_transport)
        return "nixl"
    if kv_transport == "nixl":
        raise ConfigError(f"--kv-transport=nixl: {trouble}")
    log.info("blocks move between nodes by gRPC (--kv-transport=%s; no NIXL: %s)", kv_transport, trouble)
    return "grpc"


def choose_plane(kv_transport: str, memory: PoolMemory) -> DataPlane:
    """Makes the data plane of a pool; with NIXL this takes about a second, so it is not for the event loop's thread.
    Raises ConfigError if ``kv_transport`` is "nixl" and NIXL does not work."""
    if choose_transport(kv_transport) == "nixl":
        try:
            return NixlPlane(memory)
        except ConfigError as error:
            # Even where NIXL works with two pages, a big pool may exceed its limits.
            if kv_transport == "nixl":
                raise
            log.warning("blocks move between nodes by gRPC: %s", error.message)
    return DataPlane(memory)
