"""Evicts blocks ahead of need, so that leases find free slots. Victims are first copied to the lower tiers.

    free < low --> next victims --copied, on a thread--> still unused? --evicted--> bytes go to the tiers
         ^                                                   | no: the copy is discarded
         +------------- free < high ------------------------+

Victims need no pin while they are copied: a committed block is immutable (I2) and can only be evicted on this loop, so
if the same block is still present afterwards, the copy is good. An urgent lease evicts at once, and the tiers miss
those blocks (I1). While no tier has room, nothing is evicted ahead of need: blocks are best left in the pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import Block, IndexEvent
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.tiers.host_tier import HostTier
from pillion.kvstore.tiers.tiers import BlockName, Tier

log = logging.getLogger("pillion.kvnode")

# Max bytes and blocks per batch of victims.
BATCH_BYTES = 16 * 2**20
BATCH_BLOCKS = 512
# Interval of checks for room in a tier, for copies that can wait.
ROOM_POLL_S = 0.02
# Max bytes of evicted blocks that wait to be written to the tiers.
MAX_IN_FLIGHT_BYTES = 128 * 2**20


def without_moved(events: Iterable[IndexEvent], in_tier: Callable[[bytes], bool]) -> list[IndexEvent]:
    """Return the pool's events without evictions of blocks that a tier has, so that those stay in the index."""
    return [event for event in events if event.here or not in_tier(event.block_hash)]


def lost_everywhere(
    names: Iterable[BlockName], pool: Container[bytes], in_tier: Callable[[bytes], bool]
) -> list[IndexEvent]:
    """Return removal events for blocks that a tier dropped, except those that the pool or another tier has."""
    lost = (name for name in names if name.hash not in pool and not in_tier(name.hash))
    return [IndexEvent(name.hash, here=False, segment=name.segment) for name in lost]


class Spiller:
    """Evicts blocks of one shaped pool ahead of need. Only the node's loop calls it.

    Args:
        tiers: fastest first, possibly empty; each gets the evicted blocks that it lacks.
        low_percent, high_percent: free share of the pool at which evicting starts and stops; 0 disables it.
        blocks_lost: called with the blocks that a tier dropped or refused.
        changed: called after every change in the ledger.

    Attributes:
        low_slots, high_slots: evicting starts below ``low_slots`` free slots and stops at ``high_slots``.
    """

    def __init__(
        self,
        ledger: Ledger,
        memory: PoolMemory,
        tiers: Sequence[Tier],
        low_percent: int,
        high_percent: int,
        blocks_lost: Callable[[Sequence[BlockName]], None] = lambda names: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.spilled_blocks = 0
        self._ledger = ledger
        self._memory = memory
        self._tiers = tiers
        self.low_slots = -(-low_percent * memory.num_slots // 100)
        self.high_slots = -(-high_percent * memory.num_slots // 100)
        self._blocks_lost = blocks_lost
        self._changed = changed
        self._poked = asyncio.Event()
        # Evicted blocks being stored, with a count, since a block may return to the pool and be evicted again.
        self._pending_stores: dict[bytes, int] = {}
        self._pending_work: dict[asyncio.Future[Any], None] = {}
        self._in_flight_bytes = 0

    def poke(self) -> None:
        """Start evicting; fewer than ``low_slots`` slots are free."""
        self._poked.set()

    @property
    def busy(self) -> bool:
        """True while evicted blocks are being stored."""
        return bool(self._pending_stores)

    def is_stored(self, block_hash: bytes) -> bool:
        """Return whether a block is in a tier or being stored there."""
        return block_hash in self._pending_stores or any(block_hash in tier for tier in self._tiers)

    async def run(self) -> None:
        """Evict blocks after each :meth:`poke`, until cancelled."""
        while True:
            await self._poked.wait()
            self._poked.clear()
            while (missing := self.high_slots - len(self._ledger.free)) > 0:
                if not await self._evict_some(missing):
                    break
                await asyncio.sleep(0)

    async def save(self, blocks: Sequence[Block], until_s: float, bytes_per_s: float) -> int:
        """Copy blocks, in order, to the tiers that may outlive the node, at ``bytes_per_s`` until ``until_s`` on the
        loop's clock. The blocks stay in the pool. Return how many were copied."""
        loop, block_bytes = asyncio.get_running_loop(), self._memory.block_bytes
        tiers = [tier for tier in self._tiers if not isinstance(tier, HostTier)]
        begun_s, saved, at = loop.time(), 0, 0
        while tiers and at < len(blocks):
            room_bytes = max(tier.room_bytes() for tier in tiers)
            due_s = begun_s + saved * block_bytes / bytes_per_s
            if max(due_s, loop.time()) >= until_s:
                break
            if due_s > loop.time() or room_bytes < block_bytes:
                await asyncio.sleep(max(ROOM_POLL_S, due_s - loop.time()))
                continue
            part = blocks[at : at + max(1, min(BATCH_BYTES, room_bytes) // block_bytes)]
            at += len(part)
            missing = [
                block for block in part if self._in_pool(block) and any(block.hash not in tier for tier in tiers)
            ]
            copies = await self._copy_out(missing) if missing else []
            named = [
                (BlockName.of(block, checksum), data)
                for block, (data, checksum) in zip(missing, copies, strict=True)
                if self._in_pool(block)
            ]
            for tier in tiers:
                self._blocks_lost(await tier.store([(name, data) for name, data in named if name.hash not in tier]))
            self._release([data for data, _ in copies])
            saved += len(named)
        return saved

    def _in_pool(self, block: Block) -> bool:
        return self._ledger.tree.by_hash.get(block.hash) is block

    async def close(self) -> None:
        """Wait until evicted blocks are stored and nothing reads the pool, after ``run`` has ended. Idempotent."""
        while self._pending_work:
            await asyncio.gather(*self._pending_work, return_exceptions=True)

    async def _evict_some(self, missing: int) -> bool:
        """Evict a batch of victims. Return False if none was evicted."""
        # Ordered so that a chain's last block comes first. Prefix-pinned blocks are not evicted ahead of need.
        victims = list(islice(self._ledger.tree.plain, min(missing, BATCH_BLOCKS)))
        if not victims or not self._tiers:
            return self._evict(victims, {}) > 0
        while self._in_flight_bytes >= MAX_IN_FLIGHT_BYTES:
            await asyncio.wait(self._pending_work, return_when=asyncio.FIRST_COMPLETED)
        block_bytes = self._memory.block_bytes
        room_bytes = max(tier.room_bytes() for tier in self._tiers)
        if room_bytes < block_bytes:
            return False
        victims = victims[: max(1, min(BATCH_BYTES, room_bytes) // block_bytes)]
        open_tiers = [tier for tier in self._tiers if tier.room_bytes() >= block_bytes]
        wanted = [block for block in victims if any(block.hash not in tier for tier in open_tiers)]
        copies = dict(zip(wanted, await self._copy_out(wanted) if wanted else [], strict=True))
        evicted = self._evict(victims, copies)
        self._release([data for data, _ in copies.values()])
        return evicted > 0

    def _evict(self, victims: Sequence[Block], copies: dict[Block, tuple[memoryview, int]]) -> int:
        """Evict the victims that are still unused, and start storing their copies in the tiers, removing those from
        ``copies``. Return how many were evicted."""
        moved: list[tuple[BlockName, memoryview]] = []
        in_all_tiers: list[bytes] = []
        evicted = 0
        for block in victims:
            if self._ledger.tree.by_hash.get(block.hash) is not block or block.ref_count or block.children:
                continue
            self._ledger.evict_block(block)
            evicted += 1
            if block in copies:
                data, checksum = copies.pop(block)
                moved.append((BlockName.of(block, checksum), data))
                self._pending_stores[block.hash] = self._pending_stores.get(block.hash, 0) + 1
            else:
                in_all_tiers.append(block.hash)
        for tier in self._tiers:
            tier.touch(in_all_tiers)
        if moved:
            self.spilled_blocks += len(moved)
            self._in_flight_bytes += sum(data.nbytes for _, data in moved)
            self._begin(asyncio.create_task(self._store(moved), name="spilling"))
        if evicted:
            self._changed()
        return evicted

    async def _store(self, moved: list[tuple[BlockName, memoryview]]) -> None:
        gone: list[BlockName] = []
        try:
            for tier in self._tiers:
                gone += await tier.store(moved)
        except Exception:
            log.exception("a lower tier failed")
        finally:
            self._in_flight_bytes -= sum(data.nbytes for _, data in moved)
            self._release([data for _, data in moved])
            for name, _ in moved:
                self._pending_stores[name.hash] -= 1
                if not self._pending_stores[name.hash]:
                    del self._pending_stores[name.hash]
            gone += [name for name, _ in moved if not self.is_stored(name.hash)]
            if gone:
                self._blocks_lost(list(dict.fromkeys(gone)))

    async def _copy_out(self, blocks: Sequence[Block]) -> list[tuple[memoryview, int]]:
        """Copy blocks out of the pool; return each copy and its checksum. Prefers buffers of the host tier, which
        avoids a second copy."""
        acquired = [] if self._buffers is None else self._buffers.acquire_empty(len(blocks))
        allocated = [np.empty(self._memory.block_bytes, np.uint8).data for _ in range(len(blocks) - len(acquired))]
        targets = acquired + allocated
        slots, sums = [block.slot for block in blocks], [block.checksum for block in blocks]
        copying = asyncio.ensure_future(self._memory.copy_out(slots, targets, sums))
        self._begin(copying)
        try:
            return list(zip(targets, await asyncio.shield(copying), strict=True))
        except BaseException:
            # Release the unused buffers once nothing writes to them.
            copying.add_done_callback(lambda _: self._release(acquired))
            raise

    def _release(self, buffers: Sequence[memoryview]) -> None:
        if self._buffers is not None and buffers:
            self._buffers.release_buffers(buffers)

    @property
    def _buffers(self) -> HostTier | None:
        """The tier in host memory, if there is one."""
        return next((tier for tier in self._tiers if isinstance(tier, HostTier)), None)

    def _begin(self, work: asyncio.Future[Any]) -> None:
        self._pending_work[work] = None
        work.add_done_callback(lambda done: self._pending_work.pop(done, None))
