"""A KV node's share of its memory domain: the pool's segment and those of shared regions, made one at a time.

open --> domain (a pool in host memory has its segment at once) --shape: first worker--> the pool's memory is mapped
                                                                    +-- it is refused --> freed again
"""

from __future__ import annotations

import asyncio

from pillion.config import KVNodeFlags
from pillion.errors import Conflict
from pillion.kvstore.ledger.records import slots_of
from pillion.kvstore.memory.domain import AnySegment, Domain, open_domain
from pillion.kvstore.memory.memory import HOST, PoolMemory, until_over


class NodeMemory:
    """The node's memory. The node's loop makes all calls; slow work runs in threads. ``pool`` is set by :meth:`shape`,
    and on a GPU ``pool_bytes`` too."""

    def __init__(self, flags: KVNodeFlags) -> None:
        self._flags = flags
        self._opened: Domain | None = None
        self._segment: AnySegment | None = None
        self.pool: PoolMemory | None = None
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
            self.pool_bytes = self._opened.pool_bytes()
            self._segment = self._opened.segment(self.pool_bytes)

    async def shape(self, block_bytes: int) -> None:
        """Makes the pool's memory for blocks of that size, once; nothing happens if not even one block fits.

        On a GPU the pool gets its size here, because the worker that attaches has its weights there already. Raises
        ConfigError.
        """
        async with self._taking:
            if self.pool is None:
                self.pool = await until_over(asyncio.to_thread(self._make, self.domain, block_bytes))

    def unshape(self) -> None:
        """Undoes :meth:`shape` if it failed or its worker was refused: the next one may need another block size."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()
        if self._opened is not None and self._opened.kind != HOST:
            self._close_segment()

    def fileno(self) -> int:
        """Returns the pool's descriptor. Raises Conflict before it has a shape."""
        if self._segment is None:
            raise Conflict("the pool has no memory yet")
        return self._segment.fileno()

    @property
    def mapped_bytes(self) -> int:
        """Size of the pool's segment, which a worker has to map whole on a GPU."""
        return 0 if self._segment is None else self._segment.size_bytes

    async def region(self, size_bytes: int) -> AnySegment:
        """Makes memory beside the pool's. Raises ConfigError if there is not enough."""
        async with self._taking:
            return await until_over(asyncio.to_thread(self.domain.segment, size_bytes))

    def close(self) -> None:
        """Gives up the node's hold on everything; workers keep the memory that they map. Idempotent."""
        self.unshape()
        self._close_segment()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _make(self, domain: Domain, block_bytes: int) -> PoolMemory | None:
        if domain.kind != HOST:
            self.pool_bytes = domain.pool_bytes()
        num_slots = slots_of(self.pool_bytes, block_bytes)
        if not num_slots:
            return None
        if self._segment is None:
            self._segment = domain.segment(num_slots * block_bytes)
        return domain.memory(self._segment, num_slots, block_bytes)
