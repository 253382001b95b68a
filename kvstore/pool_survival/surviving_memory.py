"""Gives a KV node a pool that outlives the node's process: finds the pool of the node's earlier life, and recovers it
or leaves it to its users.

    open     the keeper's descriptors of this node's name --> found
    shape    found --same shape, and nobody uses it any more--> the pool
               '--else--> left to its users, and a fresh one made

For a pool on GPUs, the table's namespace also says how the pool is divided, and over which GPUs
(:meth:`pillion.kvstore.memory.domain.Domain.layout`). A GPU seldom has room for two pools, so the node gives up a pool
that it does not recover, at the keeper, too, before it makes a fresh one, or if a region needs the room.
"""

from __future__ import annotations

import asyncio
import logging
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
from pillion.kvstore.pool_survival.surviving_pool import PLACES_BYTES, SurvivingPool
from pillion.wire.attach import AttachHello, AttachReply

log = logging.getLogger("pillion.kvnode")


def open_keeper(socket_path: str) -> PoolKeeper:
    """Connects to the keeper behind ``--keeper-socket``, and returns the connection."""
    return PoolKeeper(socket_path)


class SurvivingMemory(NodeMemory):
    """Manages the memory of a node with ``--keeper-socket``.

    Attributes:
        keeper: holds the pool while no node does.
        surviving: the pool as the keeper has it, set by :meth:`shape`; None if the pool goes with this node.
        drained: places of workers of this node's earlier life whose last step has ended.
    """

    def __init__(self, flags: KVNodeFlags, open_domain: Callable[[KVNodeFlags], Domain]) -> None:
        super().__init__(flags, open_domain)
        self.keeper = open_keeper(flags.keeper_socket)
        self.surviving: SurvivingPool | None = None
        self._found: SurvivingPool | None = None
        self.drained: set[int] = set()

    @property
    def pool_id(self) -> str:
        return self.surviving.pool_id if self.surviving is not None else ""

    async def open(self) -> None:
        await super().open()
        # The memory that was just made is closed again: whether the pool of the node's earlier life is recovered is
        # known only when the first worker has said its block size and namespace.
        self._close_segments()
        await until_over(asyncio.to_thread(self._find))
        if self._found and self.domain.kind == HOST and self._found.places.size_bytes != self.pool_bytes:
            size = f"{self._found.places.size_bytes} bytes, this node's {self.pool_bytes}"
            log.warning("the pool of this node's earlier life is not recovered: it has %s", size)
            await self._leave_found()

    def unshape(self) -> None:
        super().unshape()
        kept, self.surviving = self.surviving, None
        if kept is not None and kept.taken:
            self._found, self.segments = kept, []
        elif kept is not None:
            kept.close()

    async def region(self, size_bytes: int, shard: int = 0) -> MadeSegment:
        try:
            return await super().region(size_bytes, shard)
        except ConfigError:
            if self._found is None:
                raise
        async with self._taking:
            log.warning("the pool of this node's earlier life is given up: its memory is needed")
            await self._leave_found()
        return await super().region(size_bytes, shard)

    def close(self) -> None:
        self.unshape()
        self._close_found()
        self.keeper.close()
        super().close()

    def asked(self, hello: AttachHello) -> None:
        if hello.place:
            self.drained.add(hello.place)

    def admitted(self, hello: AttachHello) -> str:
        kept = self.surviving
        if kept is None:
            return ""
        if reason := self._why_not_kept(hello):
            log.warning("%s %s: this pool will not outlive the node", hello.component_id, reason)
            kept.forsake()
        # A worker on GPUs takes its place in the pool's file, and gets that only if the pool is kept.
        has_places = self.domain.kind == HOST or (bool(kept.memory_fds) and not kept.forsaken)
        return kept.pool_id if hello.takes_place and has_places else ""

    def _why_not_kept(self, hello: AttachHello) -> str:
        """Says why the node could not prove that this worker uses the pool no more; empty if it could."""
        if not hello.takes_place:
            return "is of an older version"
        if self.domain.kind != HOST and hello.processes > 1:
            return f"computes on GPUs with {hello.processes} processes"
        return ""

    async def answering(self, hello: AttachHello, reply: AttachReply, process: int) -> list[int]:
        """Tells the keeper of a worker on a GPU before that worker learns of slots; returns the file of its place."""
        kept = self.surviving
        if kept is None or not reply.pool_id or self.domain.kind == HOST:
            return []
        if process == UNSEEN_PROCESS:
            log.warning("this pool will not outlive the node, which cannot see the process of %s", hello.component_id)
            kept.forsake()
        elif process >= 0:
            await kept.admit(self.keeper, self._flags.node_id, reply.epoch, hello.place or reply.epoch, process)
        return [kept.places.fileno()]

    def ended(self, epoch: int) -> None:
        if self.surviving is not None:
            self.surviving.ended(epoch)

    def survival(self, ledger: Ledger, changed: Callable[[], None]) -> PoolSurvival | None:
        if self.surviving is None:
            return None
        assert self.pool is not None
        return PoolSurvival(self._flags.node_id, self.keeper, self.surviving, ledger, self.pool, changed)

    def _find(self) -> None:
        """Finds the pool that an earlier life of this node has left, in a thread."""
        shards = 0 if self.domain.kind == HOST else len(self.domain.device_uuids)
        try:
            kept = self.keeper.take(self._flags.node_id)
        except PillionError as error:
            log.warning("%s", error.message)
            return
        self._found = SurvivingPool.found(kept, shards) if kept is not None else None
        if shards and kept is not None and self._found is None:
            self._drop()

    async def _fill(self, hello: AttachHello, shards: Shards) -> None:
        await self._choose(shards, hello.namespace)
        await super()._fill(hello, shards)
        if self.pool is not None and self.domain.kind != HOST and self.surviving is None:
            self._keep(self._shape(self.pool.num_slots, shards, hello.namespace))

    async def _choose(self, shards: Shards, namespace: str) -> None:
        """Recovers the pool that was found, or gives it up and makes a fresh one, if that is in host memory."""
        found = self._found
        if found is not None:
            if not await until_over(asyncio.to_thread(self._fits, found, shards, namespace)):
                log.warning("the pool of this node's earlier life has another shape or is of another model: it is left")
            elif await found.freed(self.drained) and await self._take(found, shards):
                self._found, self.surviving = None, found
                return
        num_slots = slots_of(self.pool_bytes, shards.block_bytes)
        if self.domain.kind == HOST and not num_slots:
            return
        await self._leave_found()
        if self.domain.kind == HOST:
            # Segments may be left of an attempt for an earlier worker, which the node has refused.
            self._close_segments()
            segment = await until_over(asyncio.to_thread(OwnedSegment, self.pool_bytes))
            self.segments.append(segment)
            self.surviving = SurvivingPool.make(segment, self._shape(num_slots, shards, namespace))

    def _fits(self, found: SurvivingPool, shards: Shards, namespace: str) -> bool:
        """Returns whether the pool that was found is such as this node would make now. Its size counts only if the
        flags set one."""
        shape = self._shape(found.table.shape.num_slots, shards, namespace)
        if found.table.shape != shape:
            return False
        if self.domain.kind == HOST or self._flags.kv_pool_bytes:
            return shape.num_slots == slots_of(self.domain.pool_bytes(shards), shards.block_bytes)
        return True

    async def _take(self, found: SurvivingPool, shards: Shards) -> bool:
        """Takes a pool that this process owns, with the blocks in it. Says whether the pool's memory could be had."""
        domain = self.domain
        if domain.kind != HOST:
            num_slots = found.table.shape.num_slots
            try:
                self.segments = await until_over(asyncio.to_thread(domain.kept, found.memory_fds, num_slots, shards))
            except ConfigError as error:
                log.warning("the pool of this node's earlier life is not recovered: %s", error.message)
                return False
            self.pool_bytes = num_slots * shards.block_bytes
        else:
            self.segments = [found.places]
        await found.read()
        return True

    def _shape(self, num_slots: int, shards: Shards, namespace: str) -> PoolShape:
        """Returns the shape that is written into the table of a pool that is kept."""
        return PoolShape(num_slots, shards.block_bytes, self.domain.layout(namespace, shards))

    def _keep(self, shape: PoolShape) -> None:
        """Makes a fresh pool on GPUs one that outlives this node, if the system can do that."""
        places = OwnedSegment(PLACES_BYTES)
        self.surviving = SurvivingPool.make(places, shape, [segment.fileno() for segment in self.segments])
        if self.surviving is None:
            places.close()

    def _close_found(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            found.close()
            found.places.close()

    async def _leave_found(self) -> None:
        """Gives up the pool that was found. The keeper drops it, too, if it is on GPUs, because it would go on holding
        their memory."""
        on_gpus = self._found is not None and bool(self._found.memory_fds)
        self._close_found()
        if on_gpus:
            await until_over(asyncio.to_thread(self._drop))

    def _drop(self) -> None:
        """Makes the keeper give up a GPU's memory, in a thread."""
        try:
            self.keeper.drop(self._flags.node_id)
        except PillionError as error:
            log.warning("%s", error.message)
