"""Defines the interface of lower tiers: places to which blocks go when they leave the pool, and come back from.

Each tier is a target of eviction and a source of blocks, in this order: pool, pinned host memory, disk, other nodes'
pools, a bucket.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from pillion.kvstore.memory.memory import PoolMemory

log = logging.getLogger("pillion.kvnode")

Kept = TypeVar("Kept")

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


class Tier(Protocol):
    """Represents a lower tier. The node's loop makes all calls, so it needs no lock; the work itself runs in threads.

    It never raises for a medium's trouble: a block that cannot be written is forgotten, and one that cannot be read or
    does not fit its checksum is removed, counted and missing (I1).
    """

    name: str
    counts: TierCounts

    @property
    def short_blocks(self) -> int:
        """Gives how many fewer blocks the medium has room for than the tier may keep, because others have filled it."""

    def __len__(self) -> int:
        """Returns the number of blocks that the tier keeps."""

    def __contains__(self, block_hash: bytes) -> bool:
        """Returns whether the block is believed to be in the tier. This costs no input or output."""

    def answers(self) -> bool:
        """Returns whether loads may begin now; False while the medium is paused because it was late."""

    def room_bytes(self) -> int:
        """Returns how many bytes a store may bring now without being refused; 0 after an error of the medium."""

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Marks blocks as used, in the order given; blocks that the tier lacks are ignored."""

    async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        """Stores whole blocks. Returns blocks that are not kept any more: those that made room or failed."""

    async def load_slots(self, memory: PoolMemory, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
        """Loads at most ``memory.batch_blocks`` blocks, as :func:`load_into` does."""

    def names(self) -> Iterable[BlockName]:
        """Returns all blocks that are kept, each after its parent if that is kept too."""

    async def close(self) -> None:
        """Waits for writes under way. Blocks on a medium that lasts stay there. Idempotent."""


@runtime_checkable
class BufferTier(Tier, Protocol):
    """Represents a tier in memory: copies can be made straight into it. A buffer stays its user's until it is
    released."""

    def acquire_empty(self, count: int) -> list[memoryview]:
        """Returns up to ``count`` buffers of one block each, to be filled, maybe stored, and released."""

    def release_buffers(self, buffers: Sequence[memoryview]) -> None:
        """Ends the caller's use of buffers. Buffers of other owners are ignored."""


class FarTier(Tier, Protocol):
    """Represents a tier that other nodes write to as well, so that only a request shows what it has. It is asked after
    other nodes' pools."""

    async def find(self, hashes: Sequence[bytes], first: int, *, roughly: bool = False, states: bool = False) -> None:
        """Finds out which blocks of a chain the tier has, from block ``first`` on; ``in`` knows them from then on.
        ``hashes`` begin with the chain's first block. With ``roughly`` only the chain's length counts; of blocks
        between two that are here, nothing need be learnt. With ``states`` it finds out the first pages of states, too,
        at least those that stand far down the chain. The call is bounded in time, and may be cancelled."""


class TierBlocks(Generic[Kept]):
    """Holds the blocks that a tier has, by hash, the least recently used first.

    Attributes:
        counts: :attr:`Tier.counts`.
    """

    def __init__(self) -> None:
        self.counts = TierCounts()
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        # These blocks were dropped without a report; the next store reports them.
        self._unreported: list[BlockName] = []
        self._closed = False

    @property
    def short_blocks(self) -> int:
        return 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._kept

    def touch(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            if block_hash in self._kept:
                self._kept.move_to_end(block_hash)


class MediumTier(TierBlocks[Kept]):
    """Represents a tier on a medium that may fail, and whose blocks are read into targets. ``medium`` names it in the
    log."""

    def __init__(self, medium: object) -> None:
        super().__init__()
        self._medium = medium
        self._warned_s: dict[str, float] = {}

    async def load(self, hashes: Sequence[bytes], targets: Sequence[memoryview]) -> int:
        """Reads blocks into ``targets``, in order, until one is missing or broken; returns how many came whole. A
        cancelled caller is held until no thread writes to ``targets``."""
        raise NotImplementedError

    async def load_slots(self, memory: PoolMemory, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
        async with memory.writing(slots) as targets:
            return await self.load(hashes, targets)

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
