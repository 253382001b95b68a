"""Evicts ahead of need, so that leases find free slots; victims are copied to the lower tiers first.

    free < low --> next victims --copied, on a thread--> still unused? --evicted--> bytes go to the tiers
         ^                                                   | no: the copy is discarded
         +------------- free < high ------------------------+

Victims need no pin while they are copied: a committed block is immutable (I2) and can only be evicted on this loop, so
if the same block is still present afterwards, the copy is good. An urgent lease evicts at once, and the tiers miss
those blocks (I1). While no tier has room, nothing is evicted ahead of need: the pool is the best place left.
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

BATCH_BYTES = 16 * 2**20
BATCH_BLOCKS = 512
# Interval of checks for room in a tier, for copies that can wait.
ROOM_POLL_S = 0.02
# Bytes copied and not yet written or refused.
MAX_UNDER_WAY_BYTES = 128 * 2**20


def without_moved(events: Iterable[IndexEvent], in_tier: Callable[[bytes], bool]) -> list[IndexEvent]:
    """Return the pool's events without evictions to a tier, so that the index keeps those blocks."""
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
        blocks_lost: called with blocks that a tier dropped or refused.
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
        # Evicted blocks that are not in all tiers yet, counted: a block may come back and be evicted again.
        self._moving: dict[bytes, int] = {}
        self._work: dict[asyncio.Future[Any], None] = {}
        self._under_way_bytes = 0

    def poke(self) -> None:
        """Start evicting; fewer than ``low_slots`` slots are free."""
        self._poked.set()

    @property
    def busy(self) -> bool:
        """True while evicted blocks are being stored."""
        return bool(self._moving)

    def keeps(self, block_hash: bytes) -> bool:
        """Return whether a block is in a tier or being stored there."""
        return block_hash in self._moving or any(block_hash in tier for tier in self._tiers)

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
        """Copy blocks, which stay in the pool, to tiers that may outlive the node, in order, at this rate, until a time
        on the loop's clock; return how many were copied."""
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
            missing = [block for block in part if self._here(block) and any(block.hash not in tier for tier in tiers)]
            copies = await self._copied(missing) if missing else []
            named = [
                (BlockName.of(block, checksum), data)
                for block, (data, checksum) in zip(missing, copies, strict=True)
                if self._here(block)
            ]
            for tier in tiers:
                self._blocks_lost(await tier.store([one for one in named if one[0].hash not in tier]))
            self._release([data for data, _ in copies])
            saved += len(named)
        return saved

    def _here(self, block: Block) -> bool:
        return self._ledger.tree.by_hash.get(block.hash) is block

    async def close(self) -> None:
        """Wait until evicted blocks are stored and nothing reads the pool, after ``run`` has ended. Idempotent."""
        while self._work:
            await asyncio.gather(*self._work, return_exceptions=True)

    async def _evict_some(self, missing: int) -> bool:
        """Evict a batch of victims. Return False if none was evicted."""
        # Last blocks of chains come first. Prefix-pinned blocks are not evicted ahead of need.
        victims = list(islice(self._ledger.tree.plain, min(missing, BATCH_BLOCKS)))
        if not victims or not self._tiers:
            return self._evict(victims, {}) > 0
        while self._under_way_bytes >= MAX_UNDER_WAY_BYTES:
            await asyncio.wait(self._work, return_when=asyncio.FIRST_COMPLETED)
        block_bytes = self._memory.block_bytes
        room_bytes = max(tier.room_bytes() for tier in self._tiers)
        if room_bytes < block_bytes:
            return False
        victims = victims[: max(1, min(BATCH_BYTES, room_bytes) // block_bytes)]
        open_tiers = [tier for tier in self._tiers if tier.room_bytes() >= block_bytes]
        wanted = [block for block in victims if any(block.hash not in tier for tier in open_tiers)]
        copies = dict(zip(wanted, await self._copied(wanted) if wanted else [], strict=True))
        evicted = self._evict(victims, copies)
        self._release([data for data, _ in copies.values()])
        return evicted > 0

    def _evict(self, victims: Sequence[Block], copies: dict[Block, tuple[memoryview, int]]) -> int:
        """Evict the victims that are still unused, moving their copies from ``copies`` to the tiers; return how many
        were evicted."""
        moved: list[tuple[BlockName, memoryview]] = []
        stayed: list[bytes] = []
        evicted = 0
        for block in victims:
            if self._ledger.tree.by_hash.get(block.hash) is not block or block.ref_count or block.children:
                continue
            self._ledger.evict_block(block)
            evicted += 1
            if block in copies:
                data, checksum = copies.pop(block)
                moved.append((BlockName.of(block, checksum), data))
                self._moving[block.hash] = self._moving.get(block.hash, 0) + 1
            else:
                stayed.append(block.hash)
        for tier in self._tiers:
            tier.touch(stayed)
        if moved:
            self.spilled_blocks += len(moved)
            self._under_way_bytes += sum(data.nbytes for _, data in moved)
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
            self._under_way_bytes -= sum(data.nbytes for _, data in moved)
            self._release([data for _, data in moved])
            for name, _ in moved:
                self._moving[name.hash] -= 1
                if not self._moving[name.hash]:
                    del self._moving[name.hash]
            gone += [name for name, _ in moved if not self.keeps(name.hash)]
            if gone:
                self._blocks_lost(list(dict.fromkeys(gone)))

    async def _copied(self, blocks: Sequence[Block]) -> list[tuple[memoryview, int]]:
        """Return copies and checksums, preferably in a tier's own buffers, which avoids a second copy."""
        acquired = [] if self._buffers is None else self._buffers.acquire_empty(len(blocks))
        fresh = [np.empty(self._memory.block_bytes, np.uint8).data for _ in range(len(blocks) - len(acquired))]
        targets = acquired + fresh
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
        self._work[work] = None
        work.add_done_callback(lambda done: self._work.pop(done, None))
