"""Defines the interface of lower tiers: places to which blocks go when they leave the pool, and come back from.

Each tier is a target of eviction and a source of blocks, in this order: pool, pinned host memory, disk, other nodes'
pools, a bucket.
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

# At most one warning of a kind is logged in this time.
WARN_EVERY_S = 30.0


class Corrupt(Exception):  # noqa: N818
    """Says that the bytes that a medium gave are damaged, unfinished or of another block."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """Identifies a block outside the pool.

    Attributes:
        hash: the block's chain hash (32 bytes).
        parent: hash of the block before it, empty for a chain's first.
        segment: hash of its segment's first block (:class:`pillion.kvstore.ledger.records.Block`).
        checksum: XXH3-64 of its bytes.
    """

    hash: bytes
    parent: bytes
    segment: bytes
    checksum: int

    @classmethod
    def of(cls, block: Block, checksum: int) -> BlockName:
        """Returns the name of a block that is, or was, in the pool."""
        return cls(block.hash, block.parent_hash, block.segment, checksum)


@dataclass(slots=True)
class TierCounts:
    """Counts blocks since the node started.

    Attributes:
        stored, loaded: blocks that went in and came back whole.
        dropped: blocks that made room for others.
        corrupt: blocks that did not fit their header or checksum, and were removed.
        failed: blocks that the medium could not write or read.
    """

    stored: int = 0
    loaded: int = 0
    dropped: int = 0
    corrupt: int = 0
    failed: int = 0


class Tier(ABC):
    """Represents a lower tier, with the names of its blocks, the least recently used first. The node's loop makes all
    calls, so it needs no lock; the work itself runs in threads.

    It never raises for a medium's trouble: a block that cannot be written is forgotten, and one that cannot be read or
    does not fit its checksum is removed, counted and missing (I1).
    """

    name: str

    def __init__(self) -> None:
        self.counts = TierCounts()
        self._kept: OrderedDict[bytes, BlockName] = OrderedDict()
        # These blocks were dropped without a report; the next store reports them.
        self._unreported: list[BlockName] = []
        self._closed = False

    def __len__(self) -> int:
        """Returns the number of blocks that the tier keeps."""
        return len(self._kept)

    def __contains__(self, block_hash: bytes) -> bool:
        """Returns whether the block is believed to be in the tier. This costs no input or output."""
        return block_hash in self._kept

    @property
    def short_blocks(self) -> int:
        """Gives how many fewer blocks the medium has room for than the tier may keep, because others have filled it."""
        return 0

    def answers(self) -> bool:
        """Returns whether loads may begin now; False while the medium is paused because it was late."""
        return True

    @abstractmethod
    def room_bytes(self) -> int:
        """Returns how many bytes a store may bring now without being refused; 0 after an error of the medium."""

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Marks blocks as used, in the order given; blocks that the tier lacks are ignored."""
        for block_hash in hashes:
            if block_hash in self._kept:
                self._kept.move_to_end(block_hash)

    @abstractmethod
    async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        """Stores whole blocks. Returns blocks that are not kept any more: those that made room or failed."""

    @abstractmethod
    async def load_slots(self, memory: PoolMemory, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
        """Loads at most ``memory.batch_blocks`` blocks, as :func:`load_into` does."""

    def names(self) -> Iterable[BlockName]:
        """Returns all blocks that are kept, each after its parent if that is kept too."""
        return heads_first(self._kept)

    @abstractmethod
    async def close(self) -> None:
        """Waits for writes under way. Blocks on a medium that lasts stay there. Idempotent."""


class MediumTier(Tier):
    """Represents a tier on a medium that may fail, and whose blocks are read into targets. ``medium`` names it in the
    log. A medium that was late is paused and probed (:mod:`pillion.kvstore.tiers.tier_breaker`)."""

    def __init__(self, medium: object) -> None:
        super().__init__()
        self._medium = medium
        self._warned_s: dict[str, float] = {}
        self._breaker = TierBreaker()
        self._probing: asyncio.Task[None] | None = None

    @abstractmethod
    async def load(self, hashes: Sequence[bytes], targets: Sequence[memoryview]) -> int:
        """Reads blocks into ``targets``, in order, until one is missing or broken; returns how many came whole. A
        cancelled caller is held until no thread writes to ``targets``."""

    @abstractmethod
    async def _answers_probe(self) -> bool:
        """Asks the medium for something; returns whether it answered in time."""

    async def load_slots(self, memory: PoolMemory, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
        async with memory.writing(slots) as targets:
            return await self.load(hashes, targets)

    def answers(self) -> bool:
        return not self._breaker.paused

    def _pause(self) -> None:
        """Pauses the medium until a probe comes in time."""
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
        now_s = time.monotonic()
        if now_s - self._warned_s.get(message, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned_s[message] = now_s
            log.warning("%s: %s (%s); %s", message, failure, self._medium, self.counts)


def heads_first(kept: Mapping[bytes, BlockName]) -> Iterator[BlockName]:
    """Yields all blocks of ``kept``, each after its parent if that is kept too."""
    done: set[bytes] = set()
    # The loop uses a copy, because blocks come and go while it is read.
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
    """Loads blocks into slots of the pool, in order, until one is missing or broken; returns how many came whole.

    When the call ends, however it ends, nobody writes to the slots any more. Raises Unavailable if a GPU fails.
    """
    came = 0
    while came < len(hashes):
        part = slice(came, came + memory.batch_blocks)
        count = await tier.load_slots(memory, hashes[part], slots[part])
        came += count
        if count < len(hashes[part]):
            break
    return came
