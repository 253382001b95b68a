"""A KV node's share of its memory domain: the pool's segments and those of shared regions, made one at a time.

open --> domain (a pool in host memory has its segment at once) --shape: first worker--> the pool's memory is mapped
                                                                    +-- it is refused --> freed again
"""

from __future__ import annotations

import asyncio

from pillion.config import KVNodeFlags
from pillion.errors import Conflict, InvalidRequest
from pillion.kvstore.ledger.records import slots_of
from pillion.kvstore.memory.domain import AnySegment, Domain, open_domain
from pillion.kvstore.memory.memory import HOST, PoolMemory, until_over
from pillion.kvstore.memory.shards import Shards


class NodeMemory:
    """The node's memory. The node's loop makes all calls; slow work runs in threads.

    Attributes:
        pool, shards: set by :meth:`shape`: the pool's memory, and how its blocks are divided over the domain.
        pool_bytes: of whole blocks; on GPUs it is set by :meth:`shape`, too.
        segments: the memory of each shard; of a pool on GPUs, none before :meth:`shape`.
    """

    def __init__(self, flags: KVNodeFlags) -> None:
        self._flags = flags
        self._opened: Domain | None = None
        self.segments: list[AnySegment] = []
        self.pool: PoolMemory | None = None
        self.shards: Shards | None = None
        self.pool_bytes = 0
        # The memory that is left is measured and taken under this lock.
        self._taking = asyncio.Lock()

    @property
    def domain(self) -> Domain:
        """The domain. Raises Conflict before :meth:`open` and after :meth:`close`."""
        if self._opened is None:
            raise Conflict("the KV node has no memory: it is starting or stopping")
        return self._opened

    async def open(self) -> None:
        """Opens the domain. Raises ConfigError if the device, or the memory of a pool on the host, cannot be had."""
        self._opened = await until_over(asyncio.to_thread(open_domain, self._flags))
        if self._opened.kind == HOST:
            self.pool_bytes = self._opened.pool_bytes(Shards.whole(1))
            self.segments.append(self._opened.segment(self.pool_bytes))

    @property
    def divided(self) -> bool:
        """Whether the pool has several shards."""
        return len(self.domain.device_uuids) > 1

    async def shape(self, block_bytes: int, kv_rows: int = 0, kv_heads: int = 0) -> None:
        """Makes the pool's memory for blocks of that size, once; nothing happens if not even one block fits.

        On a GPU the pool gets its size here, because the worker that attaches has its weights there already. Over
        several GPUs, blocks of ``kv_rows`` rows (layers, keys and values apart) of ``kv_heads`` pieces are divided by
        heads. Raises ConfigError, and InvalidRequest for blocks that cannot be divided.
        """
        shards = Shards.whole(block_bytes)
        if self.divided:
            shards = self._divided(block_bytes, kv_rows, kv_heads)
        async with self._taking:
            if self.pool is None:
                self.pool = await until_over(asyncio.to_thread(self._make, self.domain, shards))
                self.shards = None if self.pool is None else shards

    def unshape(self) -> None:
        """Undoes :meth:`shape` if it failed or its worker was refused: the next one may need another block size."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()
        self.shards = None
        if self._opened is not None and self._opened.kind != HOST:
            self._close_segments()

    def filenos(self) -> list[int]:
        """Returns the descriptor of each shard. Raises Conflict before the pool has a shape."""
        if not self.segments:
            raise Conflict("the pool has no memory yet")
        return [segment.fileno() for segment in self.segments]

    async def region(self, size_bytes: int, shard: int = 0) -> AnySegment:
        """Makes memory beside a shard of the pool. Raises ConfigError if there is not enough."""
        async with self._taking:
            return await until_over(asyncio.to_thread(self.domain.segment, size_bytes, shard))

    def check_integrity(self) -> None:
        """Raises Conflict unless the segments are those of the pool's shards, and hold all slots."""
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
        """Gives up the node's hold on everything; workers keep the memory that they map. Idempotent."""
        self.unshape()
        self._close_segments()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _close_segments(self) -> None:
        while self.segments:
            self.segments.pop().close()

    def _divided(self, block_bytes: int, kv_rows: int, kv_heads: int) -> Shards:
        count = len(self.domain.device_uuids)
        if not (kv_rows and kv_heads):
            raise InvalidRequest(
                f"this KV node divides blocks over {count} GPUs by KV heads, and the worker does not say how many it"
                " has: it is of an older version"
            )
        return Shards.divided(block_bytes, kv_rows, kv_heads, count)

    def _make(self, domain: Domain, shards: Shards) -> PoolMemory | None:
        if domain.kind != HOST:
            self.pool_bytes = domain.pool_bytes(shards)
        num_slots = slots_of(self.pool_bytes, shards.block_bytes)
        if not num_slots:
            return None
        for shard in range(len(self.segments), len(shards.shares)):
            self.segments.append(domain.segment(num_slots * shards.shard_bytes(shard), shard))
        return domain.memory(self.segments, num_slots, shards)
