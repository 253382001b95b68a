"""What the first worker decides about a pool."""

from __future__ import annotations

from dataclasses import dataclass

# Beyond this a slot number or a byte offset would stop fitting somewhere.
MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How many slots, of how many bytes, of which namespace (hexadecimal)."""

    num_slots: int
    block_bytes: int
    namespace: str


def slots_of(pool_bytes: int, block_bytes: int) -> int:
    """How many blocks of that size so much memory holds."""
    return min(pool_bytes // block_bytes, MAX_BLOCKS) if block_bytes > 0 else 0
