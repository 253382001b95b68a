"""Memory of a KV node whose pool outlives its process: finds the pool of the node's previous process, and recovers it
or leaves it to its users.

    open     the keeper's descriptors under this node's name --> candidate
    shape    candidate --same shape, and no process uses it any more--> the pool
               '--else--> left to its users, and a fresh one created

For a pool on GPUs, the table's namespace includes how the pool is divided, and over which GPUs
(:meth:`pillion.kvstore.memory.domain.Domain.layout_id`). A GPU seldom has room for two pools, so the node drops a pool
that it cannot recover, at the keeper as well, before it creates a fresh one, or if a region needs the room.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Callable

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError, PillionError
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import PoolShape, slots_of
from pillion.kvstore.memory.domain import Domain, MadeSegment
from pillion.kvstore.memory.memory import HOST, until_over
from pillion.kvstore.memory.node_memory import NodeMemory
from pillion.kvstore.memory.shards import Shards
from pillion.kvstore.node.attach_server import UNSEEN_PROCESS
from pillion.kvstore.pool_survival.keeper_client import PoolKeeper
from pillion.kvstore.pool_survival.owned_segment import OwnedSegment
from pillion.kvstore.pool_survival.survival import PoolSurvival
from pillion.kvstore.pool_survival.surviving_pool import SurvivingPool
from pillion.wire.attach import AttachHello, AttachReply

log = logging.getLogger("pillion.kvnode")


def open_keeper(socket_path: str) -> PoolKeeper:
    """Return a connection to the keeper. A separate function, so that simulations can replace the keeper."""
    return PoolKeeper(socket_path)


class SurvivingMemory(NodeMemory):
    """Memory of a node with ``--keeper-socket``.

    Attributes:
        keeper: holds the pool's descriptors while no node runs.
        surviving: the pool as stored at the keeper, set by :meth:`shape`; None if the pool ends with this node.
        drained: places of workers of the node's previous process whose last step has ended.
    """

    def __init__(self, flags: KVNodeFlags, open_domain: Callable[[KVNodeFlags], Domain]) -> None:
        super().__init__(flags, open_domain)
        self.keeper = open_keeper(flags.keeper_socket)
        self.surviving: SurvivingPool | None = None
        # Pool of the previous process, not recovered yet.
        self._candidate: SurvivingPool | None = None
        self.drained: set[int] = set()

    @property
    def pool_id(self) -> str:
        return self.surviving.pool_id if self.surviving is not None else ""

    async def open(self) -> None:
        await super().open()
        # Close the new memory: the first worker's block size and namespace decide whether the previous pool is
        # recovered.
        self._close_segments()
        await until_over(asyncio.to_thread(self._find))
        if self._candidate and self.domain.kind == HOST and self._candidate.places.size_bytes != self.pool_bytes:
            size = f"{self._candidate.places.size_bytes} bytes, this node's {self.pool_bytes}"
            log.warning("the pool of this node's previous process is not recovered: it has %s", size)
            await self._drop_candidate()

    def unshape(self) -> None:
        super().unshape()
        pool, self.surviving = self.surviving, None
        if pool is not None and pool.recovered:
            self._candidate, self.segments = pool, []
        elif pool is not None:
            pool.close()

    async def region(self, size_bytes: int, shard: int = 0) -> MadeSegment:
        try:
            return await super().region(size_bytes, shard)
        except ConfigError:
            if self._candidate is None:
                raise
        async with self._allocating:
            log.warning("the pool of this node's previous process is dropped: its memory is needed")
            await self._drop_candidate()
        return await super().region(size_bytes, shard)

    def close(self) -> None:
        self.unshape()
        self._close_candidate()
        self.keeper.close()
        super().close()

    def asked(self, hello: AttachHello) -> None:
        if hello.place:
            self.drained.add(hello.place)

    def admitted(self, hello: AttachHello) -> str:
        pool = self.surviving
        if pool is None:
            return ""
        if reason := self._why_unrecoverable(hello):
            log.warning("%s %s: this pool will not outlive the node", hello.component_id, reason)
            pool.forsake()
        # Workers on GPUs lock places of a separate file, which they only get if the pool survives the node.
        has_places = self.domain.kind == HOST or (bool(pool.memory_fds) and not pool.forsaken)
        return pool.pool_id if hello.takes_place and has_places else ""

    def _why_unrecoverable(self, hello: AttachHello) -> str:
        """Return why a later process of the node could not prove that this worker has stopped using the pool; "" if it
        could."""
        if not hello.takes_place:
            return "is of an older version"
        if self.domain.kind != HOST and hello.processes > 1:
            return f"computes on GPUs with {hello.processes} processes"
        return ""

    async def answering(self, hello: AttachHello, reply: AttachReply, process: int) -> list[int]:
        """Register a GPU worker with the keeper before it gets slots; return the file of its place."""
        pool = self.surviving
        if pool is None or not reply.pool_id or self.domain.kind == HOST:
            return []
        if process == UNSEEN_PROCESS:
            log.warning("this pool will not outlive the node, which cannot see the process of %s", hello.component_id)
            pool.forsake()
        elif process >= 0:
            await pool.admit(self.keeper, self._flags.node_id, reply.epoch, hello.place or reply.epoch, process)
        return [pool.places.fileno()]

    def ended(self, epoch: int) -> None:
        if self.surviving is not None:
            self.surviving.ended(epoch)

    def survival(self, ledger: Ledger, changed: Callable[[], None]) -> PoolSurvival | None:
        if self.surviving is None:
            return None
        assert self.pool is not None
        return PoolSurvival(self._flags.node_id, self.keeper, self.surviving, ledger, self.pool, changed)

    def _find(self) -> None:
        """Find the pool of this node's previous process, on a thread."""
        shards = 0 if self.domain.kind == HOST else len(self.domain.device_uuids)
        try:
            kept = self.keeper.take(self._flags.node_id)
        except PillionError as error:
            log.warning("%s", error.message)
            return
        self._candidate = SurvivingPool.reopen(kept, shards) if kept is not None else None
        if shards and kept is not None and self._candidate is None:
            self._drop_at_keeper()

    async def _fill(self, hello: AttachHello, shards: Shards) -> None:
        await self._choose(shards, hello.namespace)
        await super()._fill(hello, shards)
        if self.pool is not None and self.domain.kind != HOST and self.surviving is None:
            self._make_surviving(self._shape(self.pool.num_slots, shards, hello.namespace))

    async def _choose(self, shards: Shards, namespace: str) -> None:
        """Recover the candidate, or drop it and create a fresh one, if that is in host memory."""
        candidate = self._candidate
        if candidate is not None:
            if not await until_over(asyncio.to_thread(self._fits, candidate, shards, namespace)):
                log.warning(
                    "the pool of this node's previous process has another shape or model: it is left to its users"
                )
            elif await candidate.wait_unused(self.drained) and await self._open_candidate(candidate, shards):
                self._candidate, self.surviving = None, candidate
                return
        num_slots = slots_of(self.pool_bytes, shards.block_bytes)
        if self.domain.kind == HOST and not num_slots:
            return
        await self._drop_candidate()
        if self.domain.kind == HOST:
            # Creating a pool for an earlier, refused worker may have left segments.
            self._close_segments()
            segment = await until_over(asyncio.to_thread(OwnedSegment, self.pool_bytes))
            self.segments.append(segment)
            self.surviving = SurvivingPool.make(segment, self._shape(num_slots, shards, namespace))

    def _fits(self, candidate: SurvivingPool, shards: Shards, namespace: str) -> bool:
        """Return whether this node would now create a pool like the candidate. Its size only counts if the flags set
        one."""
        shape = self._shape(candidate.table.shape.num_slots, shards, namespace)
        if candidate.table.shape != shape:
            return False
        if self.domain.kind == HOST or self._flags.kv_pool_bytes:
            return shape.num_slots == slots_of(self.domain.pool_bytes(shards), shards.block_bytes)
        return True

    async def _open_candidate(self, candidate: SurvivingPool, shards: Shards) -> bool:
        """Open an owned pool with its blocks; return False if its memory is unavailable."""
        domain = self.domain
        if domain.kind != HOST:
            num_slots = candidate.table.shape.num_slots
            try:
                self.segments = await until_over(
                    asyncio.to_thread(domain.map_descriptors, candidate.memory_fds, num_slots, shards)
                )
            except ConfigError as error:
                log.warning("the pool of this node's previous process is not recovered: %s", error.message)
                return False
            self.pool_bytes = num_slots * shards.block_bytes
        else:
            self.segments = [candidate.places]
        await candidate.read()
        return True

    def _shape(self, num_slots: int, shards: Shards, namespace: str) -> PoolShape:
        """Return the shape to record in a surviving pool's table."""
        return PoolShape(num_slots, shards.block_bytes, self.domain.layout_id(namespace, shards))

    def _make_surviving(self, shape: PoolShape) -> None:
        """Make a fresh pool on GPUs survive this node, if the system supports that."""
        places = OwnedSegment(mmap.PAGESIZE)
        self.surviving = SurvivingPool.make(places, shape, [segment.fileno() for segment in self.segments])
        if self.surviving is None:
            places.close()

    def _close_candidate(self) -> None:
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            candidate.close()
            candidate.places.close()

    async def _drop_candidate(self) -> None:
        """Drop the candidate; at the keeper as well if it is on GPUs, to free their memory."""
        on_gpus = self._candidate is not None and bool(self._candidate.memory_fds)
        self._close_candidate()
        if on_gpus:
            await until_over(asyncio.to_thread(self._drop_at_keeper))

    def _drop_at_keeper(self) -> None:
        """Make the keeper drop a pool on GPUs, on a thread."""
        try:
            self.keeper.drop(self._flags.node_id)
        except PillionError as error:
            log.warning("%s", error.message)
