"""Memory of a KV node: segments of its pool and of shared regions, allocated in its memory domain.

open --> domain (a pool in host memory has its segment at once) --shape: first worker--> the pool's memory is mapped
                                                                      +-- it is refused --> freed again

:class:`NodeMemory` creates a fresh pool for each process of the node, which ends with it.
:class:`pillion.kvstore.pool_survival.surviving_memory.SurvivingMemory` recovers the pool of the node's previous
process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pillion.config import KVNodeFlags
from pillion.errors import Conflict
from pillion.kvstore.ledger.records import slots_of
from pillion.kvstore.memory.domain import Domain, MadeSegment
from pillion.kvstore.memory.memory import HOST, PoolMemory, until_over
from pillion.kvstore.memory.shards import Shards
from pillion.wire.attach import AttachHello, AttachReply

POOL_GONE = "the pool that this worker has mapped is gone: start it again"


class NodeMemory:
    """The node's memory. Only the node's loop calls it; slow work runs on threads. ``open_domain`` opens the memory
    domain of a node's flags, on a thread; it raises ConfigError.

    Attributes:
        pool, shards: the pool's memory, and its division over the domain; set by :meth:`shape`.
        pool_bytes: size of all whole blocks; on GPUs also set by :meth:`shape`.
        segments: the memory of each shard; empty for a pool on GPUs before :meth:`shape`.
    """

    def __init__(self, flags: KVNodeFlags, open_domain: Callable[[KVNodeFlags], Domain]) -> None:
        self._flags = flags
        self._open_domain = open_domain
        self._opened: Domain | None = None
        self.segments: list[MadeSegment] = []
        self.pool: PoolMemory | None = None
        self.shards: Shards | None = None
        self.pool_bytes = 0
        # Held while measuring and allocating the domain's remaining memory.
        self._allocating = asyncio.Lock()

    @property
    def domain(self) -> Domain:
        """The node's memory domain. Raises Conflict before :meth:`open` and after :meth:`close`."""
        if self._opened is None:
            raise Conflict("the KV node has no memory: it is starting or stopping")
        return self._opened

    @property
    def pool_id(self) -> str:
        """Identifies a pool that outlives this node; empty otherwise."""
        return ""

    @property
    def divided(self) -> bool:
        """True if the pool has several shards."""
        return len(self.domain.device_uuids) > 1

    async def open(self) -> None:
        """Open the memory domain. Raises ConfigError if the device, or the memory of a pool on the host, is
        unavailable."""
        self._opened = await until_over(asyncio.to_thread(self._open_domain, self._flags))
        if self._opened.kind == HOST:
            self.pool_bytes = self._opened.pool_bytes(Shards.whole(1))
            self.segments.append(self._opened.segment(self.pool_bytes))

    async def shape(self, hello: AttachHello) -> None:
        """Create the pool's memory for a worker's blocks, once; does nothing if not even one block fits.

        On a GPU this determines the pool's size, because the attaching worker has its weights there already. Over
        several GPUs, blocks are divided by KV heads. Raises ConfigError, InvalidRequest for blocks that cannot be
        divided, and Conflict for a worker that reconnects to a vanished pool on GPUs, since it occupies the memory that
        a fresh one needs.
        """
        shards = self.domain.division(hello.block_bytes, hello.kv_rows, hello.kv_heads)
        async with self._allocating:
            if self.pool is None:
                await self._fill(hello, shards)

    def unshape(self) -> None:
        """Undo :meth:`shape` if it failed or its worker was refused, since the next worker may need other blocks."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()
        self.shards = None
        if self._opened is not None and self._opened.kind != HOST:
            self._close_segments()

    def filenos(self) -> list[int]:
        """Return the descriptor of each shard. Raises Conflict before the pool has a shape."""
        if not self.segments:
            raise Conflict("the pool has no memory yet")
        return [segment.fileno() for segment in self.segments]

    async def region(self, size_bytes: int, shard: int = 0) -> MadeSegment:
        """Allocate memory for a region on the device of a shard. Raises ConfigError if memory is short."""
        async with self._allocating:
            return await until_over(asyncio.to_thread(self.domain.segment, size_bytes, shard))

    def check_integrity(self) -> None:
        """Raise Conflict unless the segments match the pool's shards and have room for all slots."""
        if self.pool is None or self.shards is None:
            if self.pool is not None or self.shards is not None:
                raise Conflict("the pool has memory and no shape, or a shape and no memory")
            return
        shards = range(len(self.shards.shares))
        if len(self.segments) != len(shards) or len(self.domain.device_uuids) != len(shards):
            raise Conflict(f"{len(self.segments)} segments for a pool of {len(shards)} shards")
        for shard, segment in zip(shards, self.segments, strict=True):
            if segment.fileno() < 0 or segment.size_bytes < self.pool.num_slots * self.shards.shard_bytes(shard):
                raise Conflict(f"shard {shard} of the pool has no room for {self.pool.num_slots} slots")

    def close(self) -> None:
        """Close the node's own descriptors and mappings; workers' mappings stay. Idempotent."""
        self.unshape()
        self._close_segments()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # Hooks for pools that outlive their node.

    def asked(self, hello: AttachHello) -> None:
        """Handle a worker's request to attach before the pool has a shape; another worker may be setting it."""

    def admitted(self, hello: AttachHello) -> str:
        """Handle an admitted worker. Return the ``pool_id`` by which it finds the pool again after a restart of the
        node, "" if the pool ends with this node."""
        return ""

    async def answering(self, hello: AttachHello, reply: AttachReply, process: int) -> list[int]:
        """Prepare the answer to a worker's attach; ``process`` is
        :attr:`pillion.kvstore.node.attach_server.PeerProcess.descriptor`. Return descriptors for the worker in addition
        to the pool's: none here."""
        return []

    def ended(self, epoch: int) -> None:
        """Handle the end of an admitted worker's use of the pool. Idempotent."""

    def _close_segments(self) -> None:
        while self.segments:
            self.segments.pop().close()

    async def _fill(self, hello: AttachHello, shards: Shards) -> None:
        """Create the pool's memory. The caller has ``_allocating`` locked."""
        if hello.pool_id and not self.pool_id and self.domain.kind != HOST:
            raise Conflict(POOL_GONE)
        self.pool = await until_over(asyncio.to_thread(self._make, self.domain, shards))
        self.shards = None if self.pool is None else shards

    def _make(self, domain: Domain, shards: Shards) -> PoolMemory | None:
        if domain.kind != HOST and not self.segments:
            self.pool_bytes = domain.pool_bytes(shards)
        num_slots = slots_of(self.pool_bytes, shards.block_bytes)
        if not num_slots:
            return None
        for shard in range(len(self.segments), len(shards.shares)):
            self.segments.append(domain.segment(num_slots * shards.shard_bytes(shard), shard))
        return domain.memory(self.segments, num_slots, shards)
