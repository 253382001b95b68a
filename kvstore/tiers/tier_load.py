"""From a lower tier into slots of the pool, with as few copies as there can be.

a tier in memory   its buffers --> slots
another one        its medium --> the slots, or what stands for them while they are written
(pillion.kvstore.memory.memory)
"""

from __future__ import annotations

from collections.abc import Sequence

from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.tiers.tiers import BufferTier, Tier


async def load_into(memory: PoolMemory, tier: Tier, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
    """Loads blocks into ``slots``, in order, until one is missing or broken; returns how many came whole.

    When it ends, however it ends, nobody writes to the slots any more. Raises Unavailable where a GPU fails.
    """
    came = 0
    while came < len(hashes):
        part = slice(came, came + memory.batch_blocks)
        if isinstance(tier, BufferTier):
            count = await _copied(memory, tier, hashes[part], slots[part])
        else:
            async with memory.writing(slots[part]) as targets:
                count = await tier.load(hashes[part], targets)
        came += count
        if count < len(hashes[part]):
            break
    return came


async def _copied(memory: PoolMemory, tier: BufferTier, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
    buffers = await tier.borrow(hashes)
    try:
        await memory.copy_in(slots[: len(buffers)], buffers)
    finally:
        tier.take_back(buffers)
    return len(buffers)
