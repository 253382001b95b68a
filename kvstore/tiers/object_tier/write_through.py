"""Copies blocks to the bucket while they are still in the pool.

    committed --COPY_DELAY_S--> still there? --copied, on a thread--> still the same? --> stored, and still in the pool

Eviction alone would send a bucket only the ends of chains, since a chain's end leaves the pool first and its head maybe
never, and nothing from a node that dies; and an end is useless to a node without the head. The delay lets a prompt's
blocks, and some of its answer's, become one object. Blocks are copied in order of commit, head first. As in the
spiller, no pin is needed: if the same block is still present afterwards, the copy is good.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pillion.kvstore.hashing import SEGMENT_BLOCKS
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import Block, IndexEvent
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.tiers.object_tier.object_tier import ObjectTier
from pillion.kvstore.tiers.spill import BATCH_BYTES
from pillion.kvstore.tiers.tiers import BlockName

# Delay from a block's commit to its copy.
COPY_DELAY_S = 5.0
# Blocks waiting to be copied; the oldest are skipped if the tier cannot keep up.
MAX_DUE_BLOCKS = 2**16
# Retry delay if the tier has no room.
NO_ROOM_S = 0.5


class WriteThrough:
    """Copies one pool's committed blocks to the bucket. Only the node's loop calls it.

    Args:
        blocks_lost: called with blocks that the tier dropped.
    """

    def __init__(
        self,
        ledger: Ledger,
        memory: PoolMemory,
        tier: ObjectTier,
        blocks_lost: Callable[[Sequence[BlockName]], None],
    ) -> None:
        self._ledger = ledger
        self._memory = memory
        self._tier = tier
        self._blocks_lost = blocks_lost
        # (time due on the loop's clock, hash) of committed blocks.
        self._due: deque[tuple[float, bytes]] = deque(maxlen=MAX_DUE_BLOCKS)
        self._scheduled = asyncio.Event()

    def committed(self, events: Iterable[IndexEvent]) -> None:
        """Schedule copies of the blocks that arrived in the pool."""
        due_s = asyncio.get_running_loop().time() + COPY_DELAY_S
        self._due.extend((due_s, event.block_hash) for event in events if event.here)
        self._scheduled.set()

    async def run(self) -> None:
        """Copy blocks when they are due, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._scheduled.wait()
            if not self._due:
                self._scheduled.clear()
                continue
            await asyncio.sleep(max(0.0, self._due[0][0] - loop.time()))
            if not await self._copy_some(loop.time()):
                await asyncio.sleep(NO_ROOM_S)

    async def _copy_some(self, now: float) -> bool:
        """Copy a batch of due blocks; return False if the tier has no room for one."""
        tier, block_bytes = self._tier, self._memory.block_bytes
        room_bytes = tier.room_bytes()
        if room_bytes < block_bytes:
            return False
        max_blocks = max(1, min(BATCH_BYTES, room_bytes) // block_bytes)
        blocks: dict[bytes, Block] = {}
        while self._due and self._due[0][0] <= now and len(blocks) < max_blocks:
            block = self._ledger.tree.by_hash.get(self._due.popleft()[1])
            if block is not None and block.hash not in tier:
                blocks[block.hash] = block
        await self._find(blocks.values())
        missing = [block for block in blocks.values() if block.hash not in tier]
        if missing:
            self._blocks_lost(await tier.store(await self._copy_out(missing)))
        return True

    async def _find(self, blocks: Iterable[Block]) -> None:
        """Look the blocks up in the tier: other nodes, or an earlier process of this one, may have written them."""
        last_blocks = {block.segment: block for block in blocks}
        for last_block in last_blocks.values():
            chain = [block.hash for block in self._ledger.tree.chain(last_block)]
            await self._tier.find(chain, (len(chain) - 1) // SEGMENT_BLOCKS * SEGMENT_BLOCKS)

    async def _copy_out(self, blocks: Sequence[Block]) -> list[tuple[BlockName, memoryview]]:
        """Copy blocks out of the pool; return the copies of those that are still in it afterwards."""
        targets = [np.empty(self._memory.block_bytes, np.uint8).data for _ in blocks]
        slots, sums = [block.slot for block in blocks], [block.checksum for block in blocks]
        checksums = await self._memory.copy_out(slots, targets, sums)
        pool = self._ledger.tree.by_hash
        return [
            (BlockName.of(block, checksum), data)
            for block, data, checksum in zip(blocks, targets, checksums, strict=True)
            if pool.get(block.hash) is block
        ]
