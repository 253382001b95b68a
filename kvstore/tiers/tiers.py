"""Lower tiers: where blocks go when they leave the pool, and where they come back from.

Each is a target of eviction and a source of blocks, in order: pool, pinned host memory, disk, object store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class BlockName:
    """What a block is called wherever it is kept.

    Attributes:
        hash: its chain hash (32 bytes).
        parent: hash of the block before it, empty for a chain's first.
        segment: hash of its segment's first block (:class:`pillion.kvstore.ledger.tree.Block`).
        checksum: XXH3-64 of its bytes.
    """

    hash: bytes
    parent: bytes
    segment: bytes
    checksum: int


@dataclass(slots=True)
class TierCounts:
    """Blocks, since the node started.

    Attributes:
        stored, loaded: that went in and came back whole.
        dropped: that made room for others.
        corrupt: that did not fit their header or checksum, and were removed.
        failed: that the medium could not write or read.
    """

    stored: int = 0
    loaded: int = 0
    dropped: int = 0
    corrupt: int = 0
    failed: int = 0


class Tier(Protocol):
    """Owned by the node's loop; the work itself runs in threads. Never raises for a medium's trouble: what cannot be
    written is forgotten, what cannot be read or does not fit its checksum is removed, counted and missing (I1)."""

    name: str
    counts: TierCounts

    def __len__(self) -> int:
        """Blocks that are kept."""

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether it is believed to be here. Costs no input or output."""

    def room_bytes(self) -> int:
        """What a store may bring now without being refused: bounds what waits to be written; 0 in times of trouble."""

    def touch(self, hashes: Sequence[bytes]) -> None:
        """They were used elsewhere, the last one last; what is not here is ignored."""

    async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        """Keeps whole blocks. Returns what is not kept any more: older ones that made room, and those that failed."""

    async def load(self, hashes: Sequence[bytes], targets: Sequence[memoryview]) -> int:
        """Reads blocks into ``targets``, in order, until one is missing or broken; returns how many came whole.

        When it ends, however it ends, nobody writes to the targets any more.
        """

    def names(self) -> Iterable[BlockName]:
        """All that is kept, for the index; of a chain the head before its tail where both are."""

    async def close(self) -> None:
        """Waits for writes under way. What is kept stays. Idempotent."""


@runtime_checkable
class BufferTier(Tier, Protocol):
    """A tier in memory: copies can be made straight into it and out of it. A buffer that it lent, or whose block it
    holds for a reader, stays what it is until it is taken back."""

    def lend(self, count: int) -> list[memoryview]:
        """Up to ``count`` buffers of one block each, to be filled, handed to :meth:`store` or not, and taken back."""

    async def borrow(self, hashes: Sequence[bytes]) -> list[memoryview]:
        """The bytes of blocks, in order, until one is missing or broken; to be read only, and taken back."""

    def take_back(self, buffers: Sequence[memoryview]) -> None:
        """Whoever had them neither reads nor writes them any more. Buffers of others are ignored."""
