"""Runs both sides of a node's exchange of blocks with others: what it reads from them, and what they read here.

    start --> serves calls, which fail --the pool has its shape--> fetches and is read from
                +-- another node lives, or the first reader asks --> the data plane is made, in a thread

A failure here costs prefix hits, never requests (I1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError, PillionError, Unavailable
from pillion.kvstore.exchange.peers import Peers
from pillion.kvstore.exchange.plane import BlockShape, DataPlane
from pillion.kvstore.exchange.plane_servicer import SERVICE_NAME, KVPlaneServicer
from pillion.kvstore.index.registry import Addresses
from pillion.kvstore.ledger.records import Block, PoolShape
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.node.pool import Pool
from pillion.kvstore.transfer.fetch import BlockSource
from pillion.kvstore.transfer.hand_over import HandOver, HandOverLook, LookUp
from pillion.kvstore.transfer.nixl.nixl_plane import NixlPlane
from pillion.v1 import kvplane_pb2_grpc
from pillion.v1.kvnode_pb2 import PinPrefixRequest
from pillion.v1.kvplane_pb2 import MeetReply, PinBlocksReply
from pillion.wire.common import hello_to_pb

log = logging.getLogger("pillion.kvnode")

# A service is the name of a gRPC service, and the function that adds it to a server.
Service = tuple[str, Callable[[Any], None]]

# A node without a data plane looks this often whether another node lives.
LOOK_AROUND_S = 1.0
# A node that leaves keeps its data plane for this long after it last described the plane to a reader. The reader
# connects in that time, and UCX would abort the reader's process if the plane went away meanwhile.
FIRST_CONTACT_S = 1.0


class NodeExchange:
    """Represents a node among others. Raises ConfigError for a transport that its flags do not allow.

    Attributes:
        pool: the pool whose blocks travel; None before it has its shape.
    """

    def __init__(self, flags: KVNodeFlags, addresses: Addresses, boot_epoch: Callable[[], int]) -> None:
        self.node_id, self.verify, self.kv_transport = flags.node_id, flags.verify_blocks, _transport_of(flags)
        self.addresses, self.boot_epoch = addresses, boot_epoch
        self.pool: ExchangedPool | None = None

    @property
    def transport(self) -> str:
        """Gives the name of the transport that moves blocks between nodes."""
        making = None if self.pool is None else self.pool.making
        made = making is not None and making.done() and not making.exception()
        return making.result().name if making is not None and made else self.kv_transport

    async def start(self) -> None:
        """Begins the exchange when the node starts. Raises ConfigError where the transport that the flags name cannot
        be used."""
        if self.kv_transport == "nixl":
            # The flag names NIXL, so it is an error where NIXL is missing; otherwise NIXL is looked for when it is
            # needed.
            await asyncio.to_thread(choose_transport, "nixl")

    def services(self) -> Sequence[Service]:
        """Returns the gRPC services that the node offers to others."""
        servicer = KVPlaneServicer(self.shaped)
        return ((SERVICE_NAME, lambda server: kvplane_pb2_grpc.add_KVPlaneServicer_to_server(servicer, server)),)

    def open_pool(self, shape: PoolShape, memory: PoolMemory, pool: Pool) -> None:
        """Notes that the pool has got its shape and its memory, which its owner closes."""
        self.pool = ExchangedPool(self, shape, memory, pool)

    def source(self, node_id: str) -> BlockSource:
        """Returns another node as a source of blocks. Raises Unavailable."""
        return self.shaped().peers.source(node_id)

    def shaped(self) -> ExchangedPool:
        """Returns the pool whose blocks are exchanged. Raises Unavailable before it has its shape."""
        if self.pool is None:
            raise Unavailable("no worker has attached to the KV node yet, so its pool has no shape")
        return self.pool

    async def run(self) -> None:
        """Makes the data plane as soon as another node lives, because the first fetch should not wait for it."""
        pool = self.shaped()
        while pool.making is None:
            with contextlib.suppress(Unavailable):
                if set(await self.addresses()) - {self.node_id}:
                    break
            await asyncio.sleep(LOOK_AROUND_S)
        try:
            await pool.plane()
        except ConfigError as error:
            log.warning("no blocks from and for other nodes: %s", error.message)
        await asyncio.Event().wait()

    async def hand_over(self, plan: HandOver[bytes], look_up: LookUp) -> None:
        """Lets other nodes fetch what a plan wants them to have, until it is over. A failure hands over less."""
        pool, loop = self.shaped(), asyncio.get_running_loop()
        while (step := plan.next(loop.time())) is not None:
            if isinstance(step, float):
                await asyncio.sleep(step - loop.time())
                continue
            if isinstance(step, HandOverLook):
                await self._look(plan, step, look_up)
                continue
            hashes, most_bytes = b"".join(step.chain), step.most_blocks * pool.memory.block_bytes
            try:
                peer = await pool.peers.get(step.node_id, plan.until_s - loop.time())
                reply = await peer.offer(self.node_id, hashes, most_bytes, plan.until_s - loop.time())
                if plan.answered(step, reply.blocks, reply.fetched_blocks):
                    await peer.pin_prefixes(pool.pins_of(step.chain))
            except PillionError as error:
                log.info("node %s takes over nothing: %s", step.node_id, error.message)
                plan.failed(step)
        for node_id, chain in reversed(plan.whole):
            if loop.time() >= plan.until_s:
                break
            with contextlib.suppress(PillionError):
                await (await pool.peers.get(node_id)).touch(b"".join(chain))

    async def _look(self, plan: HandOver[bytes], look: HandOverLook[bytes], look_up: LookUp) -> None:
        """Asks the index about a chain. A full node that has it gets the pins that end in it."""
        node_id = plan.looked(look, await look_up(b"".join(look.chain)))
        pool = self.shaped()
        if node_id is not None and (pins := pool.pins_of(look.chain)):
            try:
                await (await pool.peers.get(node_id)).pin_prefixes(pins)
            except PillionError as error:
                log.info("node %s takes over no pins: %s", node_id, error.message)

    async def leave(self) -> None:
        """Ends all connections, and with them what is fetched. Idempotent."""
        if self.pool is not None:
            await self.pool.peers.aclose()

    async def aclose(self) -> None:
        """Closes what is left of the exchange; nothing is fetched any more. Idempotent."""
        pool, self.pool = self.pool, None
        if pool is not None:
            await pool.aclose()


class ExchangedPool:
    """Represents the pool whose blocks travel: the :class:`SourcePool` of kvstore/exchange/plane_servicer.py.

    Attributes:
        making: the data plane, which is made or being made; None before somebody has asked for it.
        peers: the nodes that this one reads from.
    """

    def __init__(self, node: NodeExchange, shape: PoolShape, memory: PoolMemory, pool: Pool) -> None:
        self.memory, self._node, self._pool, self._num_slots = memory, node, pool, shape.num_slots
        self._block_shape = BlockShape(shape.block_bytes, bytes.fromhex(shape.namespace))
        self.making: asyncio.Task[DataPlane] | None = None
        # A reader that was given the plane's description may be connecting until then, on the loop's clock.
        self._connecting_until_s = 0.0
        self.peers = Peers(node.node_id, self._block_shape, node.addresses, self.plane)

    async def plane(self) -> DataPlane:
        """Returns this node's data plane; the first caller waits for a second or two."""
        if self.making is None:
            making = asyncio.to_thread(choose_plane, self._node.kv_transport, self.memory)
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
        plane = await self.plane()
        if plane.nixl_metadata:
            self._connecting_until_s = asyncio.get_running_loop().time() + FIRST_CONTACT_S
        return MeetReply(
            hello=hello_to_pb(self._node.node_id),
            boot_epoch=self._node.boot_epoch(),
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
        ticket_id, chain = await self._pool.pin_chain(epoch, nonce, hashes, first_block, timeout_s)
        if not chain:
            return PinBlocksReply()
        sums = await self._checksums(chain)
        return PinBlocksReply(ticket_id=ticket_id, slots=[block.slot for block in chain], checksums=sums)

    def pinned_slots(self, epoch: int, ticket_id: int) -> frozenset[int]:
        return self._pool.pinned_slots(epoch, ticket_id)

    def pins_of(self, chain: Sequence[bytes]) -> Sequence[PinPrefixRequest]:
        """Returns the prefix pins that end in a chain, as requests to other nodes."""
        return self._pool.prefix_pins.ending_in(chain)

    async def _checksums(self, chain: Sequence[Block]) -> tuple[int, ...]:
        """Returns the checksums of pinned blocks, which do not change; each is computed once."""
        if not self._node.verify:
            return (0,) * len(chain)
        unknown = [block for block in chain if not block.checksum]
        found = await self.memory.checksums([block.slot for block in unknown])
        for block, checksum in zip(unknown, found, strict=True):
            block.checksum = checksum
        return tuple(block.checksum for block in chain)


def _transport_of(flags: KVNodeFlags) -> str:
    """Returns the transport that a node's flags allow. Raises ConfigError."""
    divided = "," in flags.kv_device
    if divided and flags.kv_transport == "nixl":
        raise ConfigError(
            f"--kv-transport nixl reads a block in one piece, and --kv-device {flags.kv_device} divides blocks over"
            " several GPUs; choose grpc"
        )
    return flags.kv_transport if flags.verify_blocks and not divided else "grpc"


def choose_transport(kv_transport: str) -> str:
    """Returns the transport that ``--kv-transport`` selects on this machine, "nixl" or "grpc", and logs it.

    It imports NIXL and tries it, which takes about a second: not for the event loop's thread. Raises ConfigError if
    ``kv_transport`` is "nixl" and NIXL does not work.
    """
    if kv_transport == "grpc":
        log.info("blocks move between nodes by gRPC (--kv-transport=grpc)")
        return "grpc"
    trouble = NixlPlane.trouble()
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
