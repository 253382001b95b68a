"""Chains of blocks for tests of the object tier, with shared prefixes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pillion.kvstore.hashing import SEGMENT_BLOCKS, chain_hashes, split_hashes
from pillion.kvstore.memory.memory import block_checksum
from pillion.kvstore.tiers.tiers import BlockName
from tests.support.disk import BLOCK_BYTES, Stored


def branched(lengths: Sequence[int], first_token: int = 0) -> list[list[Stored]]:
    """Return chains of these lengths; each diverges after the first half of its predecessor."""
    tokens: list[int] = []
    chains = []
    for number, length in enumerate(lengths):
        tokens = [*tokens[: len(tokens) // 2], *(first_token + 10_000 * number + at for at in range(length))][:length]
        chains.append(_chain(tokens))
    return chains


def _chain(tokens: Sequence[int]) -> list[Stored]:
    hashes = split_hashes(chain_hashes(bytes(32), tokens, 1))
    blocks = []
    for at, (parent, block_hash) in enumerate(zip([b"", *hashes], hashes, strict=False)):
        data = random.Random(block_hash).randbytes(BLOCK_BYTES)
        segment = hashes[at // SEGMENT_BLOCKS * SEGMENT_BLOCKS]
        blocks.append((BlockName(block_hash, parent, segment, block_checksum(data)), memoryview(data)))
    return blocks
