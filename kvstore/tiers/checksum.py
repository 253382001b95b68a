"""Checksums of blocks: XXH3-64 (Y. Collet, xxHash), which finds damage, not malice.

One core reads memory about as fast as memory is. The interpreter's lock is free while a block is read, so a thread of
:func:`asyncio.to_thread` does not hold up the event loop.
"""

from __future__ import annotations

import xxhash


def block_checksum(block: bytes | memoryview) -> int:
    """XXH3-64 of a block's bytes, never 0: that stands for "unknown"."""
    return xxhash.xxh3_64_intdigest(block) or 1
