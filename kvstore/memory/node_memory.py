"""A KV node's share of its memory domain: the pool's segments and those of shared regions, made one at a time.

open --> domain (a pool in host memory has its segment at once) --shape: first worker--> the pool's memory is mapped
             '-- with a keeper, maybe an earlier life's pool        +-- it is refused --> freed again

Of a pool on GPUs that a keeper keeps, the table's namespace also says how it is divided, and over which GPUs
(:meth:`pillion.kvstore.memory.shards.Shards.layout`). There is seldom room for two, so one that is not taken over is
given up, at the keeper, too, before a fresh one is made; and so it is where room is needed for a region.
"""

from __future__ import annotations

import asyncio
import logging

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError, Conflict, InvalidRequest, PillionError
from pillion.kvstore.ledger.records import PoolShape, slots_of
from pillion.kvstore.memory.domain import AnySegment, CudaDomain, Domain, open_domain
from pillion.kvstore.memory.keeper import PoolKeeper
from pillion.kvstore.memory.kept_pool import PLACES_BYTES, KeptPool, open_keeper
from pillion.kvstore.memory.memory import HOST, PoolMemory, until_over
from pillion.kvstore.memory.segment import Segment
from pillion.kvstore.memory.shards import Shards

log = logging.getLogger("pillion.kvnode")


class NodeMemory:
    """The node's memory. The node's loop makes all calls; slow work runs in threads.

    Attributes:
        pool, shards: set by :meth:`shape`: the pool's memory, and how its blocks are divided over the domain.
        pool_bytes: of whole blocks; on GPUs it is set by :meth:`shape`, too.
        segments: the memory of each shard; of a pool on GPUs, none before :meth:`shape`.
        keeper: holds the pool while no node does; None without ``--keeper-socket``.
        kept: set by :meth:`shape`: the pool as the keeper has it; None where it goes with this node.
        drained: places of workers of this node's earlier life whose last step has ended; the node adds them.
    """

    def __init__(self, flags: KVNodeFlags) -> None:
        self._flags = flags
        self._opened: Domain | None = None
        self.segments: list[AnySegment] = []
        self.pool: PoolMemory | None = None
        self.shards: Shards | None = None
        self.pool_bytes = 0
        self.keeper: PoolKeeper | None = None
        self.kept: KeptPool | None = None
        self.drained: set[int] = set()
        self._found: KeptPool | None = None
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
        if self._flags.keeper_socket:
            self.keeper = open_keeper(self._flags.keeper_socket)
            shards = 0 if self._opened.kind == HOST else len(self._opened.device_uuids)
            await until_over(asyncio.to_thread(self._find, self.keeper, shards))
        if self._opened.kind == HOST:
            self.pool_bytes = self._opened.pool_bytes(Shards.whole(1))
            if self._found is not None and self._found.places.size_bytes != self.pool_bytes:
                size = f"{self._found.places.size_bytes} bytes, this node's {self.pool_bytes}"
                log.warning("the pool of this node's earlier life is not taken over: it has %s", size)
                await self._leave_found()
            if self._found is None:
                self.segments.append(self._opened.segment(self.pool_bytes))

    @property
    def divided(self) -> bool:
        """Whether the pool has several shards."""
        return len(self.domain.device_uuids) > 1

    async def shape(
        self, block_bytes: int, kv_rows: int = 0, kv_heads: int = 0, namespace: str = "", *, comes_back: bool = False
    ) -> None:
        """Makes the pool's memory for blocks of that size, once; nothing happens if not even one block fits.

        Where an earlier life of this node has left a pool of this shape and ``namespace``, it is taken over, once the
        processes that use it have :attr:`drained` or ended.

        On a GPU the pool gets its size here, because the worker that attaches has its weights there already. Over
        several GPUs, blocks of ``kv_rows`` rows (layers, keys and values apart) of ``kv_heads`` pieces are divided by
        heads. Raises ConfigError, InvalidRequest for blocks that cannot be divided, and Conflict for a worker that
        ``comes_back`` to a pool on GPUs that is not taken over: it has the memory that a fresh one needs.
        """
        shards = Shards.whole(block_bytes)
        if self.divided:
            shards = self._divided(block_bytes, kv_rows, kv_heads)
        async with self._taking:
            if self.pool is None:
                if self.keeper is not None:
                    await self._choose(shards, namespace)
                if comes_back and self.kept is None and self.domain.kind != HOST:
                    raise Conflict("the pool that this worker has mapped is gone: start it again")
                self.pool = await until_over(asyncio.to_thread(self._make, self.domain, shards))
                self.shards = None if self.pool is None else shards
                if self.keeper is not None and self.pool is not None and self.domain.kind != HOST and not self.kept:
                    self._keep(self.pool.num_slots, shards, namespace)

    def unshape(self) -> None:
        """Undoes :meth:`shape` if it failed or its worker was refused: the next one may need another block size."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()
        self.shards = None
        kept, self.kept = self.kept, None
        if self._opened is not None and self._opened.kind != HOST:
            self._close_segments()
        if kept is not None and kept.taken:
            self._found, self.segments = kept, []
        elif kept is not None:
            kept.close()

    def filenos(self) -> list[int]:
        """Returns the descriptor of each shard. Raises Conflict before the pool has a shape."""
        if not self.segments:
            raise Conflict("the pool has no memory yet")
        return [segment.fileno() for segment in self.segments]

    def place_filenos(self) -> list[int]:
        """Returns the descriptor of the file that has the places of a pool on GPUs that outlives this node, if it does;
        of one in host memory that is the pool's own."""
        kept = self.kept
        return [] if kept is None or kept.forsaken or not kept.memory_fds else [kept.places.fileno()]

    async def region(self, size_bytes: int, shard: int = 0) -> AnySegment:
        """Makes memory beside a shard of the pool. Raises ConfigError if there is not enough."""
        async with self._taking:
            try:
                return await until_over(asyncio.to_thread(self.domain.segment, size_bytes, shard))
            except ConfigError:
                if self._found is None:
                    raise
            log.warning("the pool of this node's earlier life is given up: its memory is needed")
            await self._leave_found()
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
        self._close_found()
        if self.keeper is not None:
            self.keeper.close()
        self._close_segments()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _close_segments(self) -> None:
        while self.segments:
            self.segments.pop().close()

    def _find(self, keeper: PoolKeeper, shards: int) -> None:
        """Finds what an earlier life of this node has left; in a thread."""
        try:
            kept = keeper.take(self._flags.node_id)
        except PillionError as error:
            log.warning("%s", error.message)
            return
        self._found = KeptPool.found(kept, shards) if kept is not None else None
        if shards and kept is not None and self._found is None:
            self._drop(keeper)

    async def _choose(self, shards: Shards, namespace: str) -> None:
        """Takes over the pool that was found, or leaves it for a fresh one, which in host memory is made here."""
        found, domain = self._found, self.domain
        if found is not None:
            if not await until_over(asyncio.to_thread(self._fits, found, domain, shards, namespace)):
                log.warning("the pool of this node's earlier life has another shape or is of another model: it is left")
            elif await found.freed(self.drained) and await self._take(found, domain, shards):
                self._found, self.kept = None, found
                return
        num_slots = slots_of(self.pool_bytes, shards.block_bytes)
        if domain.kind == HOST and not num_slots:
            return
        await self._leave_found()
        if domain.kind == HOST:
            if not self.segments:
                self.segments.append(await until_over(asyncio.to_thread(domain.segment, self.pool_bytes)))
            (segment,) = self.segments
            assert isinstance(segment, Segment)
            self.kept = KeptPool.make(segment, self._shape(num_slots, domain, shards, namespace))

    def _fits(self, found: KeptPool, domain: Domain, shards: Shards, namespace: str) -> bool:
        """Whether the pool is one that this life would make, where the flags say of what size; else it may be any."""
        shape = self._shape(found.table.shape.num_slots, domain, shards, namespace)
        if found.table.shape != shape:
            return False
        if domain.kind == HOST or self._flags.kv_pool_bytes:
            return shape.num_slots == slots_of(domain.pool_bytes(shards), shards.block_bytes)
        return True

    async def _take(self, found: KeptPool, domain: Domain, shards: Shards) -> bool:
        """Has the memory of a pool that this process owns, and what is in it; whether that could be had."""
        if isinstance(domain, CudaDomain):
            num_slots = found.table.shape.num_slots
            try:
                self.segments = await until_over(asyncio.to_thread(domain.kept, found.memory_fds, num_slots, shards))
            except ConfigError as error:
                log.warning("the pool of this node's earlier life is not taken over: %s", error.message)
                return False
            self.pool_bytes = num_slots * shards.block_bytes
        else:
            self.segments = [found.places]
        await found.read()
        return True

    @staticmethod
    def _shape(num_slots: int, domain: Domain, shards: Shards, namespace: str) -> PoolShape:
        """The shape that the table of a kept pool says."""
        if domain.kind != HOST:
            namespace = shards.layout(namespace, domain.device_uuids)
        return PoolShape(num_slots, shards.block_bytes, namespace)

    def _keep(self, num_slots: int, shards: Shards, namespace: str) -> None:
        """Makes a fresh pool on GPUs one that outlives this node, if the system can do that."""
        shape = self._shape(num_slots, self.domain, shards, namespace)
        places = Segment(PLACES_BYTES)
        self.kept = KeptPool.make(places, shape, [segment.fileno() for segment in self.segments])
        if self.kept is None:
            places.close()

    def _close_found(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            found.close()
            found.places.close()

    async def _leave_found(self) -> None:
        """Gives up the pool that was found; one on GPUs at the keeper, too, which would hold its memory."""
        on_gpus = self._found is not None and bool(self._found.memory_fds)
        self._close_found()
        if on_gpus and self.keeper is not None:
            await until_over(asyncio.to_thread(self._drop, self.keeper))

    def _drop(self, keeper: PoolKeeper) -> None:
        """Has the keeper hold a GPU's memory no longer; in a thread."""
        try:
            keeper.drop(self._flags.node_id)
        except PillionError as error:
            log.warning("%s", error.message)

    def _divided(self, block_bytes: int, kv_rows: int, kv_heads: int) -> Shards:
        count = len(self.domain.device_uuids)
        if not (kv_rows and kv_heads):
            raise InvalidRequest(
                f"this KV node divides blocks over {count} GPUs by KV heads, and the worker does not say how many it"
                " has: it is of an older version"
            )
        return Shards.divided(block_bytes, kv_rows, kv_heads, count)

    def _make(self, domain: Domain, shards: Shards) -> PoolMemory | None:
        if domain.kind != HOST and not self.segments:
            self.pool_bytes = domain.pool_bytes(shards)
        num_slots = slots_of(self.pool_bytes, shards.block_bytes)
        if not num_slots:
            return None
        for shard in range(len(self.segments), len(shards.shares)):
            self.segments.append(domain.segment(num_slots * shards.shard_bytes(shard), shard))
        return domain.memory(self.segments, num_slots, shards)
