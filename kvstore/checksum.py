"""XXH3-64 of blocks: finds what a medium or a transport damaged. No defence against whoever can write to the pool."""

from __future__ import annotations

import xxhash


def block_checksum(data: memoryview | bytes) -> int:
    """Of all bytes; never 0, which stands for "not known"."""
    return xxhash.xxh3_64_intdigest(data) or 1
