"""Plain records of the slot ledger that other parts of a node read. Only the ledger, the block tree and the eviction
policy change them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Shape of a pool, decided by the first worker that attaches: number of slots, bytes of each, and namespace
    (hexadecimal)."""

    num_slots: int
    block_bytes: int
    namespace: str


def slots_of(pool_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of ``block_bytes`` that fit into ``pool_bytes``, at most MAX_BLOCKS."""
    return min(pool_bytes // block_bytes, MAX_BLOCKS) if block_bytes > 0 else 0


@dataclass(slots=True, eq=False)
class Block:
    """A committed slot.

    Attributes:
        depth: number of blocks before it in its chain.
        segment: hash of the first block of its segment of SEGMENT_BLOCKS, the unit of the index.
        ref_count: pins on the block itself plus its protected children; the block is protected while nonzero.
        children: committed blocks whose parent it is.
        page: True for a page of a state, which follows a block or another page.
        prefix_pins: prefix pins that end with the block plus its prefix-pinned children; evicted late while nonzero.
        checksum: XXH3-64 of its bytes, 0 until first requested.
    """

    slot: int
    hash: bytes
    parent: Block | None = field(repr=False)
    depth: int
    segment: bytes = field(repr=False)
    ref_count: int = 0
    children: int = 0
    page: bool = False
    prefix_pins: int = 0
    checksum: int = 0

    @property
    def parent_hash(self) -> bytes:
        """Hash of the block before it, empty for the first block of a chain."""
        return self.parent.hash if self.parent else b""


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """Arrival (``here``) or eviction of a block. ``segment`` is as in :class:`Block`. ``parent`` is the hash of the
    block before an arriving one, empty for the first of a chain."""

    block_hash: bytes
    here: bool
    segment: bytes = b""
    parent: bytes = b""
