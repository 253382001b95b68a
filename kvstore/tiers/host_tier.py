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
    """Tier in host memory, with buffers that the GPU can copy into directly. A buffer belongs to its user until it is
    released. Raises ConfigError if not even one block fits.

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
        self._place_of = {id(buffer): place for place, buffer in enumerate(self._buffers)}
        self._free = list(range(count))[::-1]
        self._users = [0] * count
        # Buffer number by block hash, and block hash by buffer.
        self._places: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * count

    def room_bytes(self) -> int:
        """Return the bytes of all buffers without a user."""
        return 0 if self._closed else self._users.count(0) * self._block_bytes

    def acquire_empty(self, count: int) -> list[memoryview]:
        """Return up to ``count`` buffers of one block each, to be filled, possibly stored, and released. Evicts the
        least recently used blocks."""
        buffers: list[memoryview] = []
        while len(buffers) < count and (place := self._acquire()) is not None:
            buffers.append(self._buffers[place])
        return buffers

    def release_buffers(self, buffers: Sequence[memoryview]) -> None:
        """End the caller's use of buffers. Ignores buffers of other owners."""
        for buffer in buffers:
            place = self._place_of.get(id(buffer))
            if place is not None:
                self._users[place] -= 1
                self._free_if_unused(place)

    async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        """Store blocks; a block in one of this tier's buffers stays there, uncopied."""
        refused = []
        for name, payload in blocks:
            place = self._place_of.get(id(payload))
            if name.hash in self._kept:
                self._kept.move_to_end(name.hash)
            elif payload.nbytes != self._block_bytes or self._closed:
                refused.append(name)
            elif place is not None:
                self._keep(name, place)
            elif not await self._copied(name, payload):
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
        """Return the bytes of blocks, in order, until one is missing or broken. They are read-only and must be
        released."""
        if self._closed:
            return []
        names = [self._kept[block_hash] for block_hash in takewhile(self._kept.__contains__, hashes)]
        buffers = [self._buffers[self._places[name.hash]] for name in names]
        for buffer in buffers:
            self._users[self._place_of[id(buffer)]] += 1
        good = 0
        try:
            sums = await until_over(asyncio.to_thread(lambda: [block_checksum(buffer) for buffer in buffers]))
            good = len(list(takewhile(lambda pair: pair[0].checksum == pair[1], zip(names, sums, strict=True))))
            if good < len(names):
                self._broken(names[good])
        finally:
            self.release_buffers(buffers[good:])
        self.touch([name.hash for name in names[:good]][::-1])
        self.counts.loaded += good
        return buffers[:good]

    async def close(self) -> None:
        """Drop all blocks. No buffer has a user any more."""
        if not self._closed:
            self._closed = True
            for buffer in self._buffers:
                buffer.release()
            self._release()

    def check_integrity(self) -> None:
        """Raise Conflict unless every buffer is in exactly one state."""
        findings = []
        kept = {place for place, block_hash in enumerate(self._hashes) if block_hash is not None}
        if kept != set(self._places.values()) or self._places.keys() != self._kept.keys():
            findings.append("the kept blocks and their buffers differ")
        if len(set(self._free)) != len(self._free) or kept & set(self._free):
            findings.append("a buffer is free twice, or free and kept")
        for place, users in enumerate(self._users):
            lost = not users and place not in kept and place not in self._free
            if users < 0 or (users and place in self._free) or lost:
                findings.append(f"buffer {place} has {users} users")
        if findings:
            raise Conflict("; ".join(findings))

    def _acquire(self) -> int | None:
        """Acquire a buffer for one user; return None if all are in use."""
        if self._closed:
            return None
        if not self._free:
            unused = (name for name in self._kept.values() if not self._users[self._places[name.hash]])
            oldest = next(unused, None)
            if oldest is None:
                return None
            self.counts.dropped += 1
            self._unreported.append(oldest)
            self._forget(oldest.hash)
        place = self._free.pop()
        self._users[place] += 1
        return place

    def _keep(self, name: BlockName, place: int) -> None:
        self._kept[name.hash], self._places[name.hash], self._hashes[place] = name, place, name.hash
        self.counts.stored += 1

    async def _copied(self, name: BlockName, payload: memoryview) -> bool:
        """Copy a block into a buffer and keep it; return False if no buffer is available."""
        place = self._acquire()
        if place is None:
            return False
        buffer = self._buffers[place]
        try:
            await until_over(asyncio.to_thread(copy_bytes, buffer, payload))
            if name.hash not in self._kept:
                self._keep(name, place)
        finally:
            self.release_buffers([buffer])
        return True

    def _broken(self, name: BlockName) -> None:
        log.warning("a block in host memory does not match its checksum; it is computed again")
        self.counts.corrupt += 1
        if self._kept.get(name.hash) is name:
            self._unreported.append(name)
            self._forget(name.hash)

    def _forget(self, block_hash: bytes) -> None:
        del self._kept[block_hash]
        place = self._places.pop(block_hash)
        self._hashes[place] = None
        self._free_if_unused(place)

    def _free_if_unused(self, place: int) -> None:
        if not self._users[place] and self._hashes[place] is None:
            self._free.append(place)
