"""Plain records of the slot ledger. Other parts of a node only read them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Shape of a pool, decided by the first worker that attaches: number of slots, bytes of each, and namespace
    (hexadecimal)."""

    num_slots: int
    block_bytes: int
    namespace: str


def slots_of(pool_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of ``block_bytes`` that fit into ``pool_bytes``; at most 2**31 - 1, since
    block tables have int32 entries."""
    return min(pool_bytes // block_bytes, 2**31 - 1) if block_bytes > 0 else 0


@dataclass(slots=True, eq=False)
class Block:
    """A committed slot.

    Attributes:
        depth: number of blocks before it in its chain.
        segment: hash of the first block of its segment; the index divides chains into segments of SEGMENT_BLOCKS.
        ref_count: number of pins on the block itself, plus its protected children; nonzero for a protected block.
        children: number of committed blocks whose parent it is.
        page: True for a page of a state, which follows a block or another page.
        prefix_pins: number of prefix pins that end with the block, plus its prefix-pinned children; if nonzero, the
            block is evicted last.
        checksum: XXH3-64 of the block's bytes, 0 until first requested.
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
        """Hash of the parent; empty for the first block of a chain."""
        return self.parent.hash if self.parent else b""


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """Arrival (``here``) or eviction of a block. ``segment`` is that of the Block. ``parent`` is the hash of an
    arriving block's parent, empty for the first block of a chain."""

    block_hash: bytes
    here: bool
    segment: bytes = b""
    parent: bytes = b""
