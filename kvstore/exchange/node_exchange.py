"""Both sides of a node's exchange of blocks: what it reads from other nodes, and what they read here.

    start --> calls fail --the pool has its shape--> fetches, and serves reads
                +-- another node lives, or the first reader asks --> the data plane is created, on a thread

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
from pillion.kvstore.exchange.exchanged_pool import ExchangedPool, PinsOf, choose_transport
from pillion.kvstore.exchange.peers import SourceNode
from pillion.kvstore.exchange.plane_servicer import SERVICE_NAME, KVPlaneServicer
from pillion.kvstore.index.registry import Addresses
from pillion.kvstore.ledger.records import PoolShape
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.node.pool import Pool
from pillion.kvstore.transfer.hand_over import HandOver, HandOverLook, LookUp
from pillion.v1 import kvplane_pb2_grpc

log = logging.getLogger("pillion.kvnode")

Service = tuple[str, Callable[[Any], None]]

# Interval of checks whether another node is alive.
PEER_POLL_S = 1.0


class NodeExchange:
    """Exchange of blocks with other nodes. Raises ConfigError for a transport that the flags do not allow.

    Attributes:
        pool: the exchanged pool; None before it has its shape.
    """

    def __init__(
        self, flags: KVNodeFlags, addresses: Addresses, boot_epoch: Callable[[], int], pins_of: PinsOf
    ) -> None:
        self._node_id, self._kv_transport = flags.node_id, _transport_of(flags)
        self._addresses, self._boot_epoch, self._pins_of = addresses, boot_epoch, pins_of
        self.pool: ExchangedPool | None = None

    @property
    def transport(self) -> str:
        """Transport that copies blocks between nodes."""
        plane_task = None if self.pool is None else self.pool.plane_task
        if plane_task is None or not plane_task.done() or plane_task.exception():
            return self._kv_transport
        return plane_task.result().name

    async def start(self) -> None:
        """Start with the node. Raises ConfigError if the transport named by the flags is unusable."""
        if self._kv_transport == "nixl":
            # Check at once that an explicitly requested NIXL works; otherwise NIXL is tried when needed.
            await asyncio.to_thread(choose_transport, "nixl")

    def services(self) -> Sequence[Service]:
        """Return the gRPC services for other nodes."""
        servicer = KVPlaneServicer(self.require_pool)
        return ((SERVICE_NAME, lambda server: kvplane_pb2_grpc.add_KVPlaneServicer_to_server(servicer, server)),)

    def open_pool(self, shape: PoolShape, memory: PoolMemory, pool: Pool) -> None:
        """Start exchanging blocks of a pool with its shape and memory; the caller closes the memory."""
        self.pool = ExchangedPool(
            shape,
            memory,
            pool,
            node_id=self._node_id,
            kv_transport=self._kv_transport,
            addresses=self._addresses,
            boot_epoch=self._boot_epoch,
            pins_of=self._pins_of,
        )

    def source(self, node_id: str) -> SourceNode:
        """Return another node as a source of blocks. Raises Unavailable."""
        return self.require_pool().peers.source(node_id)

    def require_pool(self) -> ExchangedPool:
        """Return the exchanged pool. Raises Unavailable before it has its shape."""
        if self.pool is None:
            raise Unavailable("no worker has attached to the KV node yet, so its pool has no shape")
        return self.pool

    async def run(self) -> None:
        """Create the data plane as soon as another node lives, so that the first fetch does not wait for it."""
        pool = self.require_pool()
        while pool.plane_task is None:
            with contextlib.suppress(Unavailable):
                if set(await self._addresses()) - {self._node_id}:
                    break
            await asyncio.sleep(PEER_POLL_S)
        try:
            await pool.plane()
        except ConfigError as error:
            log.warning("no blocks are exchanged with other nodes: %s", error.message)
        await asyncio.Event().wait()

    async def hand_over(self, plan: HandOver[bytes], look_up: LookUp) -> None:
        """Let other nodes fetch the chains that ``plan`` selects, until the plan ends. Raises nothing if nodes fail;
        less is handed over then."""
        pool, loop = self.require_pool(), asyncio.get_running_loop()
        while (step := plan.next(loop.time())) is not None:
            if isinstance(step, float):
                await asyncio.sleep(step - loop.time())
                continue
            if isinstance(step, HandOverLook):
                await self._look_up_chain(plan, step, look_up)
                continue
            hashes, max_bytes = b"".join(step.chain), step.max_blocks * pool.memory.block_bytes
            try:
                peer = await pool.peers.get(step.node_id, plan.until_s - loop.time())
                reply = await peer.offer(self._node_id, hashes, max_bytes, plan.until_s - loop.time())
                if plan.record_answer(step, reply.blocks, reply.fetched_blocks):
                    await peer.pin_prefixes(pool.pins_of(step.chain))
            except PillionError as error:
                log.info("node %s accepts no blocks: %s", step.node_id, error.message)
                plan.record_failure(step)
        for node_id, chain in reversed(plan.whole):
            if loop.time() >= plan.until_s:
                break
            with contextlib.suppress(PillionError):
                await (await pool.peers.get(node_id)).touch(b"".join(chain))

    async def _look_up_chain(self, plan: HandOver[bytes], look: HandOverLook[bytes], look_up: LookUp) -> None:
        """Look up a chain in the index. If a full node has it, recreate the pins within the chain there."""
        node_id = plan.record_lookup(look, await look_up(b"".join(look.chain)))
        pool = self.require_pool()
        if node_id is not None and (pins := pool.pins_of(look.chain)):
            try:
                await (await pool.peers.get(node_id)).pin_prefixes(pins)
            except PillionError as error:
                log.info("node %s accepts no pins: %s", node_id, error.message)

    async def leave(self) -> None:
        """Disconnect all peers, which ends all fetches. Idempotent."""
        if self.pool is not None:
            await self.pool.peers.aclose()

    async def aclose(self) -> None:
        """Close the pool's data plane, after all fetches have ended. Idempotent."""
        pool, self.pool = self.pool, None
        if pool is not None:
            await pool.aclose()


def _transport_of(flags: KVNodeFlags) -> str:
    """Return ``--kv-transport``, "grpc" for a pool divided over GPUs. Raises ConfigError for NIXL with such a pool."""
    divided = "," in flags.kv_device
    if divided and flags.kv_transport == "nixl":
        raise ConfigError(
            f"--kv-transport nixl reads a block as one range, and --kv-device {flags.kv_device} divides blocks over"
            " several GPUs; choose grpc"
        )
    return "grpc" if divided else flags.kv_transport
