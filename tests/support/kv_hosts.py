"""Real KV nodes in this process, each with a gateway session and a worker, over blocks whose bytes are derived from
their hashes, so that a pinned chain can be verified."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.redis import RedisServer
from pillion.config import KVNodeFlags
from pillion.errors import NotFound, PillionError
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.attachment import Attachment, attach
from pillion.kvstore.client.node_client import NodeClient, NodeSession
from pillion.kvstore.gpu.mapped_memory import map_pool
from pillion.kvstore.hashing import HASH_BYTES, chain_hashes, split_hashes
from pillion.kvstore.node.kv_node import KVNode
from pillion.settings.node_limits import NodeLimits
from pillion.v1.kvnode_pb2 import CommitRun, NodeStatus, OpenTicketReply, PrefetchReply
from tests.support.fixed_limits import split_limits
from tests.support.redis_nodes import patient

BLOCK_BYTES = 8192
# Divisions of a block in a pool on several GPUs: rows, and pieces per row.
KV_ROWS, KV_HEADS = 4, 4
PIECE_BYTES = BLOCK_BYTES // (KV_ROWS * KV_HEADS)
NUM_SLOTS = 40
NAMESPACE = "ab" * HASH_BYTES
ROOT = bytes(HASH_BYTES)


# Keeps much of a small pool free, so that blocks are spilled soon.
EAGER = {"low_watermark_percent": 60, "high_watermark_percent": 80}


def content(block_hash: bytes) -> bytes:
    """Return the bytes of a block of this hash, the same on every node."""
    return random.Random(block_hash).randbytes(BLOCK_BYTES)


def prompt(*tokens: int) -> bytes:
    """Return the hashes of a prompt of one token per block."""
    return chain_hashes(ROOT, tokens, 1)


# Reads and writes slots of device pools; set by their tests (tests/kvstore/gpu/conftest.py).
DEVICE_SLOTS: list[Any] = []


def read_slot(worker: Attachment, number: int) -> bytes:
    """Return a slot's bytes, in any pool."""
    if isinstance(worker.pool, memoryview):
        return bytes(worker.memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
    return DEVICE_SLOTS[0].read(worker.pool, number)


def write_slot(worker: Attachment, number: int, data: bytes) -> None:
    """Overwrite a slot."""
    if isinstance(worker.pool, memoryview):
        worker.memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] = data
    else:
        DEVICE_SLOTS[0].write(worker.pool, number, data)


@dataclass
class KVHost:
    """One node with a gateway's session and a worker."""

    name: str
    folder: str
    redis_url: str
    flags: dict[str, Any]
    node: KVNode | None = None
    client: NodeClient = field(init=False)
    session: NodeSession = field(init=False)
    worker: Attachment = field(init=False)
    working: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self) -> None:
        # A fetch that times out brings less, and most tests count blocks.
        own, limits = split_limits(NodeLimits, {"fetch_timeout_s": 60.0, **self.flags})
        self.node = await start_kvnode(
            KVNodeFlags(
                node_id=self.name,
                node_listen=f"unix:{self.folder}/{self.name}.sock",
                attach_socket=f"{self.folder}/{self.name}.attach",
                kv_pool_bytes=NUM_SLOTS * BLOCK_BYTES,
                redis_url=self.redis_url,
                heartbeat_ms=50,
                heartbeat_timeout_ms=60_000,
                **own,
            ),
            limits,
        )
        assert self.node._directory._registry is not None
        patient(self.node._directory._registry)
        await self.new_worker()
        self.client = NodeClient(self.node.address, "test")
        self.session = await until("a session at the node", self._open_session)

    async def make_plane(self) -> None:
        """Create the node's data plane, which takes a second or two with NIXL."""
        assert self.node is not None
        await self.node._exchange.require_pool().plane()

    async def _open_session(self) -> NodeSession | None:
        with contextlib.suppress(PillionError):
            return await self.client.open_session()
        return None

    async def stop(self) -> None:
        node, self.node = self.node, None
        if node is not None:
            self.worker.close()
            await self.session.aclose()
            await self.client.aclose()
            await node.stop(0.0)

    async def new_worker(self) -> None:
        self.worker = await asyncio.to_thread(
            attach,
            f"{self.folder}/{self.name}.attach",
            component_id=f"worker at {self.name}",
            role="decode",
            block_bytes=BLOCK_BYTES,
            timeout_s=WITHIN_S,
            namespace=NAMESPACE,
            kv_rows=KV_ROWS,
            kv_heads=KV_HEADS,
            map_device=map_pool,
        )

    def slot(self, number: int) -> memoryview:
        return self.worker.memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]

    def read(self, number: int) -> bytes:
        return read_slot(self.worker, number)

    def write(self, number: int, data: bytes) -> None:
        write_slot(self.worker, number, data)

    async def open(self, hashes: bytes, expected_blocks: int = 0) -> OpenTicketReply:
        total = len(hashes) // HASH_BYTES + 1
        return await self.client.open_ticket(
            self.session.epoch, hashes, total, expected_blocks=expected_blocks, timeout_s=WITHIN_S
        )

    async def fetch(
        self, ticket: OpenTicketReply, hashes: bytes, *sources: str, timeout_s: float = WITHIN_S
    ) -> PrefetchReply:
        return await self.client.prefetch(self.session.epoch, ticket.ticket_id, hashes, sources, timeout_s=timeout_s)

    async def fill(self, ticket: OpenTicketReply, hashes: bytes) -> int:
        """Adopt a ticket, verify its chain, compute the rest; return the chain's length."""
        adopted = await self.client.adopt(self.worker.epoch, ticket.ticket_id, 0)
        names = split_hashes(hashes)
        have = len(adopted.chain_slots)
        for slot, block_hash in zip(adopted.chain_slots, names, strict=False):
            assert self.read(slot) == content(block_hash), "a block holds something else than its hash says"
        left = names[have:]
        if left:
            slots = (await self.client.adopt(self.worker.epoch, ticket.ticket_id, len(left))).leased_slots
            for slot, block_hash in zip(slots, left, strict=True):
                self.write(slot, content(block_hash))
            run = CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(left))
            (result,) = await self.client.commit(self.worker.epoch, [run])
            assert not result.refusal
            lost = [slot for slot, stays in zip(slots, result.slots, strict=True) if slot != stays]
            if lost:
                await self.client.return_slots(self.worker.epoch, lost)
        return have

    async def release(self, ticket: OpenTicketReply) -> None:
        for epoch in (self.session.epoch, self.worker.epoch):
            with contextlib.suppress(NotFound):
                await self.client.release(epoch, [ticket.ticket_id])

    async def serve(self, hashes: bytes, *sources: str) -> PrefetchReply:
        """Run one request from end to end, without leftovers. The reply is without its times, which are nonzero if
        anything was fetched."""
        ticket = await self.open(hashes)
        try:
            brought = await self.fetch(ticket, hashes, *sources)
            async with self.working:
                try:
                    assert await self.fill(ticket, hashes) >= brought.blocks
                    await self.client.release(self.worker.epoch, [ticket.ticket_id])
                except (PillionError, asyncio.CancelledError):
                    # Like a real worker it ends, since its slots are unknown, and a new one starts.
                    self.worker.close()
                    await asyncio.shield(self.new_worker())
                    raise
        finally:
            with contextlib.suppress(PillionError):
                await asyncio.shield(self.client.release(self.session.epoch, [ticket.ticket_id]))
        assert bool(brought.bucket_ms) >= bool(brought.bucket_blocks)
        assert bool(brought.fetched_ms) >= bool(brought.fetched_blocks)
        brought.ClearField("fetched_ms")
        brought.ClearField("bucket_ms")
        return brought

    async def check(self) -> None:
        """Check the node's integrity and every committed block's bytes."""
        await self.client.check_integrity()
        assert self.node is not None
        for block_hash, block in self.node.pool.ledger.tree.by_hash.items():
            assert self.read(block.slot) == content(block_hash)

    async def until(self, condition: Callable[[NodeStatus], bool]) -> NodeStatus:
        """Return the first status for which ``condition`` holds."""

        async def asked() -> NodeStatus | None:
            status = await self.client.status()
            return status if condition(status) else None

        fitting: NodeStatus = await until(f"{self.name} to have the wanted status", asked)
        return fitting

    async def nothing_moves(self) -> None:
        """Wait until no block has to leave the pool and none is in transit to a lower tier, where fetches miss it."""
        assert self.node is not None
        spiller, ledger = self.node.pool.spiller, self.node.pool.ledger
        assert spiller is not None
        await until("nothing to move", lambda: len(ledger.free) >= spiller.low_slots and not spiller.busy)

    async def idle(self) -> None:
        """Wait until nothing is leased, pinned or being fetched."""
        status = await self.until(lambda status: not (status.tickets or status.leased_blocks))
        assert status.reserved_blocks == 0


async def _are_registered(made: list[KVHost]) -> bool:
    """Return True if the registry has all nodes. On a busy machine a node's first heartbeat may fail."""
    assert made[0].node is not None
    assert made[0].node._directory._registry is not None
    try:
        there = {record.component_id for record in await made[0].node._directory._registry.components()}
    except PillionError:
        return False
    return there >= {host.name for host in made}


@asynccontextmanager
async def hosts(folder: str, redis: RedisServer, *names: str, **flags: Any) -> AsyncIterator[list[KVHost]]:
    made = [KVHost(name, folder, redis.url, flags) for name in names]
    try:
        await asyncio.gather(*(host.start() for host in made))
        await until(f"{', '.join(names)} in the registry", lambda: _are_registered(made))
        if len(made) > 1:
            # The first fetch would wait for it, on a busy machine longer than a fetch may take.
            await asyncio.gather(*(host.make_plane() for host in made))
        yield made
    finally:
        await asyncio.gather(*(host.stop() for host in made))
