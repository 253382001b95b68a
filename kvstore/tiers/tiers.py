"""The contract of lower tiers: places to which blocks go when they leave the pool, and from which they come back.

Each tier is a target of eviction and a source of blocks, in this order: pool, pinned host memory, disk, other nodes'
pools, a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pillion.kvstore.memory.memory import PoolMemory


class Corrupt(Exception):  # noqa: N818
    """What a medium gave is damaged, unfinished or of another block."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """The identity of a block outside the pool.

    Attributes:
        hash: its chain hash (32 bytes).
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
    """Counts of blocks since the node started.

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
    """A lower tier. The node's loop makes all calls, so it needs no lock; the work itself runs in threads.

    It never raises for a medium's trouble: a block that cannot be written is forgotten, and one that cannot be read or
    does not fit its checksum is removed, counted and missing (I1).
    """

    name: str
    counts: TierCounts

    def __len__(self) -> int:
        """Returns the number of blocks that are kept."""

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block is believed to be here. Costs no input or output."""

    def answers(self) -> bool:
        """Whether loads may begin now; False while the medium is paused because it was late."""

    def room_bytes(self) -> int:
        """Returns how many bytes a store may bring now without being refused; 0 after an error of the medium."""

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Marks blocks as used, in the order given; blocks that are not here are ignored."""

    async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        """Keeps whole blocks. Returns those not kept any more: older ones that made room, and those that failed."""

    async def load_slots(self, memory: PoolMemory, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
        """Loads at most ``memory.batch_blocks`` blocks; see :func:`load_into`."""

    def names(self) -> Iterable[BlockName]:
        """Returns all blocks that are kept, each after its parent if that is kept too."""

    async def close(self) -> None:
        """Waits for writes under way. Blocks on a medium that lasts stay there. Idempotent."""


@runtime_checkable
class BufferTier(Tier, Protocol):
    """A tier in memory: copies can be made straight into it. A buffer stays its user's until it is released."""

    def acquire_empty(self, count: int) -> list[memoryview]:
        """Returns up to ``count`` buffers of one block each, to be filled, maybe stored, and released."""

    def release_buffers(self, buffers: Sequence[memoryview]) -> None:
        """Ends the caller's use of buffers. Buffers of other owners are ignored."""


class FarTier(Tier, Protocol):
    """A tier that others write to as well, so that only asking tells what it has. It is asked after other nodes."""

    async def find(self, hashes: Sequence[bytes], first: int, *, roughly: bool = False) -> None:
        """Learns which blocks of a chain are here, from block ``first`` on; ``in`` says so from then on. ``hashes``
        begin with the chain's first block. ``roughly``: only how far the chain goes; of what lies between two blocks
        that are here, nothing need be learnt. Bounded in time, and may be cancelled."""


def heads_first(kept: Mapping[bytes, BlockName]) -> Iterator[BlockName]:
    """Yields all of ``kept``, each block after its parent if that is kept too."""
    done: set[bytes] = set()
    # A copy, because it is read lazily while blocks come and go.
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
