"""Blocks and folders for tests of the disk tier."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.memory.memory import block_checksum
from pillion.kvstore.tiers.disk_tier.disk import DiskTier, open_disk_tier
from pillion.kvstore.tiers.disk_tier.disk_files import HEADER_BYTES, PAGE_BYTES, DiskFolder
from pillion.kvstore.tiers.tiers import BlockName

BLOCK_BYTES = 2 * PAGE_BYTES - HEADER_BYTES
FILE_BYTES = 2 * PAGE_BYTES
NAMESPACE, OTHER = b"n" * 32, b"o" * 32
Stored = tuple[BlockName, memoryview]


def chain(length: int, first_token: int = 0) -> list[Stored]:
    """Return a prompt's blocks, head first, with distinct bytes."""
    hashes = split_hashes(chain_hashes(bytes(32), range(first_token, first_token + length), 1))
    blocks = []
    for parent, block_hash in zip([b"", *hashes], hashes, strict=False):
        data = random.Random(block_hash).randbytes(BLOCK_BYTES)
        blocks.append((BlockName(block_hash, parent, hashes[0], block_checksum(data)), memoryview(data)))
    return blocks


@contextlib.asynccontextmanager
async def opened(
    path: Path, *, namespace: bytes = NAMESPACE, block_bytes: int = BLOCK_BYTES, blocks: int = 100
) -> AsyncIterator[DiskTier]:
    """Return a tier for this number of blocks of BLOCK_BYTES."""
    folder = DiskFolder(path)
    try:
        tier = await open_disk_tier(
            folder, namespace=namespace, block_bytes=block_bytes, disk_bytes=blocks * FILE_BYTES
        )
        try:
            yield tier
        finally:
            await tier.close()
    finally:
        folder.close()


async def loaded(tier: DiskTier, blocks: Iterable[Stored]) -> int:
    """Return the number of leading blocks that were loaded, after checking their contents."""
    wanted = list(blocks)
    targets = [bytearray(BLOCK_BYTES) for _ in wanted]
    count = await tier.load([name.hash for name, _ in wanted], [memoryview(target) for target in targets])
    for (_, data), target in zip(wanted[:count], targets, strict=False):
        assert target == data
    return count


def file_of(path: Path, name: BlockName) -> Path:
    """Return the one file of a block below ``path``."""
    [found] = path.rglob(f"{name.hash.hex()}.kv")
    return found


def files_in(path: Path) -> list[Path]:
    """Return the names of all files in the folder, complete and partial."""
    return list(path.rglob("*.kv*"))


def flip(file: Path, at: int) -> None:
    """Flip one bit."""
    data = bytearray(file.read_bytes())
    data[at] ^= 16
    file.write_bytes(data)
