"""Interface of lower tiers, to which blocks are evicted from the pool and from which they are loaded.

The order of eviction and of look-ups is: pool, pinned host memory, disk, other nodes' pools, a bucket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pillion.kvstore.ledger.records import Block
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.tiers.tier_breaker import TierBreaker

log = logging.getLogger("pillion.kvnode")

# Min time between log lines with the same message.
WARN_INTERVAL_S = 30.0


class CorruptBlock(Exception):  # noqa: N818
    """Bytes from a medium that are damaged, incomplete or of another block."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """Identity of a block outside the pool.

    Attributes:
        hash: the block's chain hash (32 bytes).
        parent: hash of the block before it, empty for the first of a chain.
        segment: hash of its segment's first block (:class:`pillion.kvstore.ledger.records.Block`).
        checksum: XXH3-64 of its bytes.
    """

    hash: bytes
    parent: bytes
    segment: bytes
    checksum: int

    @classmethod
    def of(cls, block: Block, checksum: int) -> BlockName:
        """Return the name of a block that is, or was, in the pool."""
        return cls(block.hash, block.parent_hash, block.segment, checksum)


@dataclass(slots=True)
class TierCounts:
    """Block counts since the node started.

    Attributes:
        stored, loaded: blocks written, and read back intact.
        dropped: blocks evicted to make room.
        corrupt: blocks with a wrong header or checksum, which were removed.
        failed: blocks that the medium could not write or read.
    """

    stored: int = 0
    loaded: int = 0
    dropped: int = 0
    corrupt: int = 0
    failed: int = 0


class Tier(ABC):
    """A lower tier, with the names of its blocks, least recently used first. Only the node's loop calls it, so it has
    no lock; I/O runs on threads.

    Failures of a medium do not raise: a block that cannot be written is forgotten, and one that cannot be read or has a
    wrong checksum is removed, counted and treated as missing (I1).
    """

    name: str

    def __init__(self) -> None:
        self.counts = TierCounts()
        self._kept: OrderedDict[bytes, BlockName] = OrderedDict()
        # Blocks dropped since the last :meth:`store`; the next one reports them.
        self._unreported: list[BlockName] = []
        self._closed = False

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._kept)

    def __contains__(self, block_hash: bytes) -> bool:
        """Return whether the block is probably in the tier. No I/O."""
        return block_hash in self._kept

    @property
    def short_blocks(self) -> int:
        """Blocks by which the medium's free space falls short of the tier's limit, because other programs fill it."""
        return 0

    def is_available(self) -> bool:
        """Return whether loads may start; False while the medium is paused for being late."""
        return True

    @abstractmethod
    def room_bytes(self) -> int:
        """Return how many bytes :meth:`store` would accept now; 0 after an error of the medium."""

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark blocks as used, in the order given; ignores absent blocks."""
        for block_hash in hashes:
            if block_hash in self._kept:
                self._kept.move_to_end(block_hash)

    @abstractmethod
    async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        """Store whole blocks. Return the blocks that are not in the tier: those evicted since the last call, and those
        that could not be stored."""

    @abstractmethod
    async def load_slots(self, memory: PoolMemory, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
        """Load at most ``memory.batch_blocks`` blocks, as :func:`load_into` does."""

    def names(self) -> Iterable[BlockName]:
        """Return all blocks, each after its parent if that is in the tier."""
        return heads_first(self._kept)

    @abstractmethod
    async def close(self) -> None:
        """Wait for pending writes. Blocks on a persistent medium stay. Idempotent."""


class MediumTier(Tier):
    """A tier on a medium that may fail or hang. ``medium`` identifies the medium in the log. A late medium is paused
    and probed (:mod:`pillion.kvstore.tiers.tier_breaker`)."""

    def __init__(self, medium: object) -> None:
        super().__init__()
        self._medium = medium
        self._warned_s: dict[str, float] = {}
        self._breaker = TierBreaker()
        self._probing: asyncio.Task[None] | None = None

    @abstractmethod
    async def load(self, hashes: Sequence[bytes], targets: Sequence[memoryview]) -> int:
        """Read blocks into ``targets``, in order, until one is missing or corrupt; return how many were read intact. A
        cancelled caller waits until no thread writes to ``targets``."""

    @abstractmethod
    async def _answers_probe(self) -> bool:
        """Probe the medium; return whether it answered in time."""

    async def load_slots(self, memory: PoolMemory, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
        async with memory.writing(slots) as targets:
            return await self.load(hashes, targets)

    def is_available(self) -> bool:
        return not self._breaker.paused

    def _pause(self) -> None:
        """Pause the medium until a probe is answered in time."""
        self._breaker.late(time.monotonic())
        if not self._closed:
            self._probing = asyncio.create_task(self._probe(), name=f"probing the {self.name} tier")

    async def _probe(self) -> None:
        breaker = self._breaker
        while breaker.paused:
            await asyncio.sleep(max(0.0, breaker.probe_at_s - time.monotonic()))
            if await self._answers_probe():
                breaker.answered()
                paused_s = time.monotonic() - breaker.since_s
                log.warning("the %s tier answers again after %.1f s (%s)", self.name, paused_s, self._medium)
            else:
                breaker.late(time.monotonic())

    def _warn(self, message: str, failure: str) -> None:
        """Log a warning, at most once per WARN_INTERVAL_S for each ``message``."""
        now_s = time.monotonic()
        if now_s - self._warned_s.get(message, -WARN_INTERVAL_S) >= WARN_INTERVAL_S:
            self._warned_s[message] = now_s
            log.warning("%s: %s (%s); %s", message, failure, self._medium, self.counts)


def heads_first(kept: Mapping[bytes, BlockName]) -> Iterator[BlockName]:
    """Yield the blocks of ``kept``, each after its parent if ``kept`` has the parent."""
    done: set[bytes] = set()
    # A copy, because ``kept`` changes during the iteration.
    kept = dict(kept)
    for name in kept.values():
        chain = []
        at: BlockName | None = name
        while at is not None and at.hash not in done:
            done.add(at.hash)
            chain.append(at)
            at = kept.get(at.parent)
        yield from reversed(chain)


async def load_into(memory: PoolMemory, tier: Tier, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
    """Load blocks into slots, in order, until one is missing or corrupt; return how many were loaded intact.

    No write to the slots is pending when this returns or raises. Raises Unavailable if a GPU fails.
    """
    loaded = 0
    while loaded < len(hashes):
        part = slice(loaded, loaded + memory.batch_blocks)
        count = await tier.load_slots(memory, hashes[part], slots[part])
        loaded += count
        if count < len(hashes[part]):
            break
    return loaded
