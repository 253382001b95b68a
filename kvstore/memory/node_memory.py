"""Makes a KV node's share of its memory domain: the pool's segments and those of shared regions, one at a time.

open --> domain (a pool in host memory has its segment at once) --shape: first worker--> the pool's memory is mapped
                                                                      +-- it is refused --> freed again

:class:`NodeMemory` makes a fresh pool whenever a node starts, which goes with the node.
:class:`pillion.kvstore.pool_survival.surviving_memory.SurvivingMemory` finds the pool of the node's earlier life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pillion.config import KVNodeFlags
from pillion.errors import Conflict
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import slots_of
from pillion.kvstore.memory.domain import Domain, MadeSegment
from pillion.kvstore.memory.memory import HOST, PoolMemory, until_over
from pillion.kvstore.memory.shards import Shards
from pillion.kvstore.pool_survival.survival import PoolSurvival
from pillion.wire.attach import AttachHello, AttachReply

POOL_GONE = "the pool that this worker has mapped is gone: start it again"


class NodeMemory:
    """Manages the node's memory. The node's loop makes all calls; slow work runs in threads. ``open_domain`` opens the
    memory domain of a node's flags, in a thread; it raises ConfigError.

    Attributes:
        pool, shards: the pool's memory, and how its blocks are divided over the domain; :meth:`shape` sets them.
        pool_bytes: number of bytes of whole blocks; on GPUs :meth:`shape` sets it, too.
        segments: the memory of each shard; a pool on GPUs has none before :meth:`shape`.
    """

    def __init__(self, flags: KVNodeFlags, open_domain: Callable[[KVNodeFlags], Domain]) -> None:
        self._flags = flags
        self._open_domain = open_domain
        self._opened: Domain | None = None
        self.segments: list[MadeSegment] = []
        self.pool: PoolMemory | None = None
        self.shards: Shards | None = None
        self.pool_bytes = 0
        # A task holds this lock while it measures the memory that is left and takes it.
        self._taking = asyncio.Lock()

    @property
    def domain(self) -> Domain:
        """Gives the node's memory domain. Raises Conflict before :meth:`open` and after :meth:`close`."""
        if self._opened is None:
            raise Conflict("the KV node has no memory: it is starting or stopping")
        return self._opened

    @property
    def pool_id(self) -> str:
        """Gives the name of a pool that outlives this node; empty for another one."""
        return ""

    @property
    def divided(self) -> bool:
        """Says whether the pool has several shards."""
        return len(self.domain.device_uuids) > 1

    async def open(self) -> None:
        """Opens the memory domain. Raises ConfigError if the device, or the memory of a pool on the host, cannot be
        had."""
        self._opened = await until_over(asyncio.to_thread(self._open_domain, self._flags))
        if self._opened.kind == HOST:
            self.pool_bytes = self._opened.pool_bytes(Shards.whole(1))
            self.segments.append(self._opened.segment(self.pool_bytes))

    async def shape(self, hello: AttachHello) -> None:
        """Makes the pool's memory for a worker's blocks, once; nothing happens if not even one block fits.

        On a GPU the pool gets its size here, because the worker that attaches has its weights there already. Over
        several GPUs, blocks of ``kv_rows`` rows (layers, keys and values apart) of ``kv_heads`` pieces are divided by
        heads. Raises ConfigError, InvalidRequest for blocks that cannot be divided, and Conflict for a worker that
        comes back to a pool on GPUs that is gone: it has the memory that a fresh one needs.
        """
        shards = self.domain.division(hello.block_bytes, hello.kv_rows, hello.kv_heads)
        async with self._taking:
            if self.pool is None:
                await self._fill(hello, shards)

    def unshape(self) -> None:
        """Undoes :meth:`shape` where it failed, or where its worker was refused, as the next worker may need other
        blocks."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()
        self.shards = None
        if self._opened is not None and self._opened.kind != HOST:
            self._close_segments()

    def filenos(self) -> list[int]:
        """Returns the descriptor of each shard of the pool. Raises Conflict before the pool has a shape."""
        if not self.segments:
            raise Conflict("the pool has no memory yet")
        return [segment.fileno() for segment in self.segments]

    async def region(self, size_bytes: int, shard: int = 0) -> MadeSegment:
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
        """Gives up the node's own descriptors and mappings; workers keep the memory that they map. Idempotent."""
        self.unshape()
        self._close_segments()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # The following methods tell a pool that outlives its node about its workers.

    def asked(self, hello: AttachHello) -> None:
        """Notes that a worker asks to attach while the pool has no shape; another worker may be about to give it
        one."""

    def admitted(self, hello: AttachHello) -> str:
        """Notes that a worker was admitted. Returns the ``pool_id`` that it is told, by which it finds the pool again
        in the node's next life; "" where the pool goes with this node."""
        return ""

    async def answering(self, hello: AttachHello, reply: AttachReply, process: int) -> list[int]:
        """Runs before a worker's attach is answered; ``process`` is
        :attr:`pillion.kvstore.node.attach_server.PeerProcess.descriptor`. Returns the descriptors that the worker gets
        beside those of the pool: none here."""
        return []

    def ended(self, epoch: int) -> None:
        """Notes that a worker which was admitted uses the pool no more. Idempotent."""

    def survival(self, ledger: Ledger, changed: Callable[[], None]) -> PoolSurvival | None:
        """Makes the object that keeps the pool for the node's next life; the pool has its memory. ``changed`` is called
        after every change in the ledger. Returns None for a pool that goes with its node."""
        return None

    def _close_segments(self) -> None:
        while self.segments:
            self.segments.pop().close()

    async def _fill(self, hello: AttachHello, shards: Shards) -> None:
        """Makes the pool's memory, while the lock is held."""
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
