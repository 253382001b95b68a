"""Defines the records of the slot ledger that other parts of a node read, too: plain data, changed by the ledger, the
block tree and the eviction policy alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# A slot number has to fit into 31 bits.
MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Holds what the first worker that attaches decides: number of slots, bytes of each, and namespace
    (hexadecimal)."""

    num_slots: int
    block_bytes: int
    namespace: str


def slots_of(pool_bytes: int, block_bytes: int) -> int:
    """Returns the number of blocks of ``block_bytes`` that fit into ``pool_bytes``, at most MAX_BLOCKS."""
    return min(pool_bytes // block_bytes, MAX_BLOCKS) if block_bytes > 0 else 0


@dataclass(slots=True, eq=False)
class Block:
    """Represents a committed slot.

    Attributes:
        depth: number of blocks before it in its chain.
        segment: hash of the first block of its segment, the SEGMENT_BLOCKS of a chain that the index keeps together.
        holds: pins on the block itself plus its protected children; the block is protected while this is not 0.
        children: committed blocks whose parent it is.
        page: whether it is a page of a state, which stands behind a block or another page.
        prefix_pins: prefix pins that end with the block plus its prefix-pinned children; it is evicted late while this
            is not 0.
        checksum: XXH3-64 of its bytes, 0 as long as nobody has asked for it.
    """

    slot: int
    hash: bytes
    parent: Block | None = field(repr=False)
    depth: int
    segment: bytes = field(repr=False)
    holds: int = 0
    children: int = 0
    page: bool = False
    prefix_pins: int = 0
    checksum: int = 0

    @property
    def parent_hash(self) -> bytes:
        """Returns the hash of the block before it, empty for the first one of a chain."""
        return self.parent.hash if self.parent else b""


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """Says that a block came (``here``) or went. :class:`Block` describes ``segment``. ``parent`` is the hash of the
    block before one that came into the pool, empty for a chain's first."""

    block_hash: bytes
    here: bool
    segment: bytes = b""
    parent: bytes = b""
