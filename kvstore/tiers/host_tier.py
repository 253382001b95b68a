"""Tier in host memory: blocks evicted from a GPU's pool, in pinned buffers for direct copies.

    a buffer   free --acquire_empty--> in use --store--> in use, kept --release--> kept --least recently used--> free
                 ^                       +--release, not stored--> free             | ^
                 |                                                  acquire_blocks  v | release
                 +-------------------- checksum mismatch ------------------------- kept, read

The spiller's copy from the GPU is the block's only copy: it stays in its buffer, from which the disk tier writes it. A
buffer in use is never reassigned, whatever happens to its block.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import takewhile

from pillion.errors import ConfigError, Conflict
from pillion.kvstore.memory.memory import PoolMemory, block_checksum, copy_bytes, until_over
from pillion.kvstore.tiers.tiers import BlockName, Tier

log = logging.getLogger("pillion.kvnode")


class HostTier(Tier):
    """Tier in host memory, with buffers that the GPU can copy into directly. A buffer belongs to its users until they
    have released it. Raises ConfigError if not even one block fits.

    Args:
        release: called when the tier is closed and no longer uses ``memory``.
    """

    name = "host"

    def __init__(self, memory: memoryview, block_bytes: int, release: Callable[[], None]) -> None:
        count = memory.nbytes // block_bytes
        if not count:
            release()
            raise ConfigError(f"--host-bytes {memory.nbytes} is less than one block, which has {block_bytes} bytes")
        super().__init__()
        self._block_bytes = block_bytes
        self._release = release
        self._buffers = [memory[start : start + block_bytes] for start in range(0, count * block_bytes, block_bytes)]
        self._index_of = {id(buffer): index for index, buffer in enumerate(self._buffers)}
        self._free = list(range(count))[::-1]
        self._users = [0] * count
        # Buffer index by block hash, and block hash by buffer index.
        self._index_by_hash: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * count

    def room_bytes(self) -> int:
        """Return the size of all buffers without users."""
        return 0 if self._closed else self._users.count(0) * self._block_bytes

    def acquire_empty(self, count: int) -> list[memoryview]:
        """Return up to ``count`` buffers of one block each, evicting the least recently used blocks. The caller fills
        them, may store them, and releases them."""
        buffers: list[memoryview] = []
        while len(buffers) < count and (index := self._acquire()) is not None:
            buffers.append(self._buffers[index])
        return buffers

    def release_buffers(self, buffers: Sequence[memoryview]) -> None:
        """End the caller's use of buffers. Ignores buffers that are not of this tier."""
        for buffer in buffers:
            index = self._index_of.get(id(buffer))
            if index is not None:
                self._users[index] -= 1
                self._free_if_unused(index)

    async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        """Store blocks; a block in one of this tier's buffers stays there, uncopied."""
        refused = []
        for name, payload in blocks:
            index = self._index_of.get(id(payload))
            if name.hash in self._kept:
                self._kept.move_to_end(name.hash)
            elif payload.nbytes != self._block_bytes or self._closed:
                refused.append(name)
            elif index is not None:
                self._record_stored(name, index)
            elif not await self._store_copy(name, payload):
                refused.append(name)
        self.counts.failed += len(refused)
        gone, self._unreported = self._unreported + refused, []
        return [name for name in gone if name.hash not in self._kept]

    async def load_slots(self, memory: PoolMemory, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
        """Copy blocks from the tier's buffers directly into the slots."""
        buffers = await self.acquire_blocks(hashes)
        try:
            await memory.copy_in(slots[: len(buffers)], buffers)
        finally:
            self.release_buffers(buffers)
        return len(buffers)

    async def acquire_blocks(self, hashes: Sequence[bytes]) -> list[memoryview]:
        """Return the buffers of blocks, in order, until one is missing or corrupt. The caller must not write to them,
        and releases them."""
        if self._closed:
            return []
        names = [self._kept[block_hash] for block_hash in takewhile(self._kept.__contains__, hashes)]
        buffers = [self._buffers[self._index_by_hash[name.hash]] for name in names]
        for buffer in buffers:
            self._users[self._index_of[id(buffer)]] += 1
        good = 0
        try:
            sums = await until_over(asyncio.to_thread(lambda: [block_checksum(buffer) for buffer in buffers]))
            good = len(list(takewhile(lambda item: item[0].checksum == item[1], zip(names, sums, strict=True))))
            if good < len(names):
                self._drop_corrupt(names[good])
        finally:
            self.release_buffers(buffers[good:])
        self.touch([name.hash for name in names[:good]][::-1])
        self.counts.loaded += good
        return buffers[:good]

    async def close(self) -> None:
        """Drop all blocks, once no buffer has a user."""
        if not self._closed:
            self._closed = True
            for buffer in self._buffers:
                buffer.release()
            self._release()

    def check_integrity(self) -> None:
        """Raise Conflict unless every buffer is in exactly one state."""
        findings = []
        kept = {index for index, block_hash in enumerate(self._hashes) if block_hash is not None}
        if kept != set(self._index_by_hash.values()) or self._index_by_hash.keys() != self._kept.keys():
            findings.append("the stored blocks and their buffers differ")
        if len(set(self._free)) != len(self._free) or kept & set(self._free):
            findings.append("a buffer is free twice, or free and has a block")
        for index, users in enumerate(self._users):
            lost = not users and index not in kept and index not in self._free
            if users < 0 or (users and index in self._free) or lost:
                findings.append(f"buffer {index} has {users} users")
        if findings:
            raise Conflict("; ".join(findings))

    def _acquire(self) -> int | None:
        """Acquire a buffer for one user; return None if all are in use."""
        if self._closed:
            return None
        if not self._free:
            unused = (name for name in self._kept.values() if not self._users[self._index_by_hash[name.hash]])
            oldest = next(unused, None)
            if oldest is None:
                return None
            self.counts.dropped += 1
            self._unreported.append(oldest)
            self._forget(oldest.hash)
        index = self._free.pop()
        self._users[index] += 1
        return index

    def _record_stored(self, name: BlockName, index: int) -> None:
        self._kept[name.hash], self._index_by_hash[name.hash], self._hashes[index] = name, index, name.hash
        self.counts.stored += 1

    async def _store_copy(self, name: BlockName, payload: memoryview) -> bool:
        """Store a copy of a block in a buffer; return False if no buffer is available."""
        index = self._acquire()
        if index is None:
            return False
        buffer = self._buffers[index]
        try:
            await until_over(asyncio.to_thread(copy_bytes, buffer, payload))
            if name.hash not in self._kept:
                self._record_stored(name, index)
        finally:
            self.release_buffers([buffer])
        return True

    def _drop_corrupt(self, name: BlockName) -> None:
        log.warning("a block in host memory does not match its checksum; it is computed again")
        self.counts.corrupt += 1
        if self._kept.get(name.hash) is name:
            self._unreported.append(name)
            self._forget(name.hash)

    def _forget(self, block_hash: bytes) -> None:
        del self._kept[block_hash]
        index = self._index_by_hash.pop(block_hash)
        self._hashes[index] = None
        self._free_if_unused(index)

    def _free_if_unused(self, index: int) -> None:
        if not self._users[index] and self._hashes[index] is None:
            self._free.append(index)
