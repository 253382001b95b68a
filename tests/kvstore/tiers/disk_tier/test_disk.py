"""The disk tier: what survives a restart, what is found damaged, and what is limited."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pillion.errors import ConfigError
from pillion.kvstore.tiers.disk_tier import disk
from pillion.kvstore.tiers.disk_tier.disk_files import HEADER_BYTES, LOCK_NAME, BlockFileLayout, BlockFiles, DiskFolder
from pillion.kvstore.tiers.tiers import BlockName
from tests.support.disk import BLOCK_BYTES, FILE_BYTES, NAMESPACE, OTHER, chain, file_of, files_in, flip, loaded, opened
from tests.support.processes import started


async def test_blocks_come_back_after_a_restart(tmp_path: Path) -> None:
    blocks = chain(5)
    async with opened(tmp_path) as tier:
        assert await tier.store(blocks[::-1]) == []
        assert len(tier) == 5
        assert tier.counts.stored == 5
    async with opened(tmp_path) as tier:
        assert len(tier) == 5
        assert all(name.hash in tier for name, _ in blocks)
        assert list(tier.names()) == [name for name, _ in blocks], "all of the name, heads first"
        assert await loaded(tier, blocks) == 5
        assert await loaded(tier, [*blocks[:2], *chain(1, 77), blocks[3]]) == 2, "up to what is missing"
        assert tier.counts.loaded == 7


async def test_files_are_private(tmp_path: Path) -> None:
    async with opened(tmp_path / "new" / "folder") as tier:
        await tier.store(chain(3))
    for path in (tmp_path / "new").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o755 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


async def test_chains_are_listed_from_head_to_tail(tmp_path: Path) -> None:
    """Heads come before last blocks in whatever order blocks were stored or used."""
    one, two = chain(6), chain(6, 50)
    mixed = [*one, *two]
    random.Random(3).shuffle(mixed)
    async with opened(tmp_path) as tier:
        await tier.store(mixed)
        tier.touch([one[0][0].hash, two[5][0].hash])
    async with opened(tmp_path) as tier:
        seen: set[bytes] = set()
        for name in tier.names():
            assert name.parent in seen or not name.parent
            seen.add(name.hash)
        assert len(seen) == 12


async def test_the_oldest_file_is_evicted_at_the_limit(tmp_path: Path) -> None:
    blocks = [chain(1, token)[0] for token in range(12)]
    async with opened(tmp_path, blocks=4) as tier:
        assert await tier.store(blocks[:4]) == []
        assert await loaded(tier, blocks[:1]) == 1
        tier.touch([blocks[2][0].hash])
        gone = await tier.store(blocks[4:6])
        assert [name.hash for name in gone] == [blocks[1][0].hash, blocks[3][0].hash], "the others were used since"
        assert len(tier) == 4
        assert tier.counts.dropped == 2
        refused = await tier.store(blocks[6:12])
        assert len(refused) == 6, "four made room, two never fitted"
        assert len(tier) == 4
    assert len(files_in(tmp_path)) == 4


async def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    blocks = [chain(1, token)[0] for token in range(5)]
    async with opened(tmp_path) as tier:
        await tier.store(blocks)
        await loaded(tier, blocks[:1])
        tier.touch([blocks[1][0].hash])
    async with opened(tmp_path, blocks=3) as tier:
        assert [name.hash for name in tier.names()] == [blocks[n][0].hash for n in (4, 0, 1)]
        assert tier.counts.dropped == 2
    assert len(files_in(tmp_path)) == 3


async def test_a_file_keeps_the_stamp_of_its_last_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing thread handles a touch only after the block was read, and was older than another for a while."""
    blocks, held = chain(3), threading.Event()
    stamp = BlockFiles.stamp

    def late(files: BlockFiles, block_hash: bytes, at: int) -> None:
        held.wait(30)
        stamp(files, block_hash, at)

    async with opened(tmp_path) as tier:
        await tier.store(blocks)
        with monkeypatch.context() as patch:
            patch.setattr(BlockFiles, "stamp", late)
            tier.touch([blocks[0][0].hash])
            assert await loaded(tier, blocks[1:2]) == 1
            assert await loaded(tier, blocks[:1]) == 1
            by_use = tier.by_use()
            held.set()
            await tier.close()
    assert by_use == [blocks[place][0].hash for place in (2, 1, 0)]
    async with opened(tmp_path) as tier:
        assert tier.by_use() == by_use


async def test_the_order_of_use_survives_a_clock_that_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = chain(3)
    async with opened(tmp_path) as tier:
        await tier.store(blocks)
    monkeypatch.setattr(disk, "time", SimpleNamespace(time_ns=lambda: 1, monotonic=time.monotonic))
    async with opened(tmp_path) as tier:
        tier.touch([blocks[0][0].hash])
        by_use = tier.by_use()
    async with opened(tmp_path) as tier:
        assert tier.by_use() == by_use


async def test_a_read_chain_is_evicted_from_its_tail(tmp_path: Path) -> None:
    blocks = chain(4)
    async with opened(tmp_path, blocks=4) as tier:
        await tier.store(blocks[::-1])
        assert await loaded(tier, blocks) == 4
        gone = await tier.store(chain(2, 50))
        assert [name.hash for name in gone] == [blocks[3][0].hash, blocks[2][0].hash]


async def test_half_written_files_are_removed(tmp_path: Path) -> None:
    [block] = chain(1)
    async with opened(tmp_path) as tier:
        await tier.store([block])
    whole = file_of(tmp_path, block[0])
    part = whole.with_name(whole.name + ".part")
    part.write_bytes(whole.read_bytes()[:5000])
    stranger = whole.with_name("notes.txt")
    stranger.write_text("mine")
    async with opened(tmp_path) as tier:
        assert len(tier) == 1
        assert tier.counts.corrupt == 0
    assert not part.exists()
    assert stranger.exists()


@pytest.mark.parametrize("at", [0, 8, 12, 16, 48, 80, 112, 144, 152, 170, 185])
async def test_a_flipped_bit_in_a_header(tmp_path: Path, at: int) -> None:
    """Found when the node starts; only that block is lost."""
    blocks = chain(3)
    async with opened(tmp_path) as tier:
        await tier.store(blocks)
    flip(file_of(tmp_path, blocks[1][0]), at)
    async with opened(tmp_path) as tier:
        assert len(tier) == 2
        assert tier.counts.corrupt == 1
        assert await loaded(tier, blocks) == 1
    assert len(files_in(tmp_path)) == 2


@pytest.mark.parametrize("at", [20, HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES - 1])
async def test_a_flipped_bit_is_found_when_it_is_read(tmp_path: Path, at: int) -> None:
    """A flipped bit is found in header and payload: the block is counted, removed and reported as gone."""
    blocks = chain(4)
    async with opened(tmp_path) as tier:
        await tier.store(blocks)
        flip(file_of(tmp_path, blocks[2][0]), at)
        assert await loaded(tier, blocks) == 2
        assert tier.counts.corrupt == 1
        assert blocks[2][0].hash not in tier
        assert await tier.store(chain(1, 50)) == [blocks[2][0]]
        assert await tier.store([blocks[2]]) == []
        assert await loaded(tier, blocks) == 4


@pytest.mark.parametrize(
    "length", [0, 100, HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES - 1, HEADER_BYTES + BLOCK_BYTES + 1]
)
async def test_files_of_another_length(tmp_path: Path, length: int) -> None:
    """Files with a wrong length are found at the start and when they are read."""
    blocks = chain(2)
    async with opened(tmp_path) as tier:
        await tier.store(blocks)
        os.truncate(file_of(tmp_path, blocks[0][0]), length)
        assert await loaded(tier, blocks) == 0
        assert tier.counts.corrupt == 1
    os.truncate(file_of(tmp_path, blocks[1][0]), length)
    async with opened(tmp_path) as tier:
        assert len(tier) == 0
        assert tier.counts.corrupt == 1


async def test_other_namespaces_are_left_alone(tmp_path: Path) -> None:
    """Even if one of their files is in this one's folder, and even if its hash is the same."""
    blocks = chain(2)
    async with opened(tmp_path, namespace=OTHER) as tier:
        await tier.store(blocks)
    async with opened(tmp_path) as tier:
        assert len(tier) == 0
        await tier.store(blocks[:1])
        misplaced = tmp_path / NAMESPACE.hex()[:16] / blocks[1][0].hash.hex()[:2] / f"{blocks[1][0].hash.hex()}.kv"
        misplaced.write_bytes(file_of(tmp_path / OTHER.hex()[:16], blocks[1][0]).read_bytes())
    async with opened(tmp_path) as tier:
        assert len(tier) == 1
        assert tier.counts.corrupt == 0
    assert misplaced.exists()
    async with opened(tmp_path, namespace=OTHER) as tier:
        assert await loaded(tier, blocks) == 2


async def test_other_versions_and_block_sizes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = chain(2)
    async with opened(tmp_path) as tier:
        await tier.store(blocks[:1])
        monkeypatch.setattr("pillion.kvstore.tiers.disk_tier.disk_files.VERSION", 2)
        await tier.store(blocks[1:])
    async with opened(tmp_path) as tier:
        assert [name.hash for name in tier.names()] == [blocks[1][0].hash]
    assert len(files_in(tmp_path)) == 1
    async with opened(tmp_path, block_bytes=BLOCK_BYTES - 1) as tier:
        assert len(tier) == 0
    assert not files_in(tmp_path)


def test_a_header_has_192_bytes() -> None:
    name = BlockName(b"h" * 32, b"", b"s" * 32, 7)
    layout = BlockFileLayout(NAMESPACE, BLOCK_BYTES)
    assert len(layout.pack(name)) == HEADER_BYTES
    assert layout.unpack(layout.pack(name), name.hash) == name
    assert layout.file_bytes == FILE_BYTES


def test_two_nodes_cannot_share_a_folder(tmp_path: Path) -> None:
    """Neither in one process nor in two; a dead owner leaves no lock."""
    held = DiskFolder(tmp_path)
    with pytest.raises(ConfigError, match="another node uses this folder"):
        DiskFolder(tmp_path)
    held.close()
    script = (
        "import sys; from pillion.kvstore.tiers.disk_tier.disk_files import DiskFolder; "
        "held = DiskFolder(sys.argv[1]); print(1, flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with started([sys.executable, "-c", script, str(tmp_path)], stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ConfigError, match=str(tmp_path)):
            DiskFolder(tmp_path)
    DiskFolder(tmp_path).close()


def test_a_folder_that_cannot_be_used_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--disk-path"):
        DiskFolder(tmp_path / "file" / "below")
    (tmp_path / LOCK_NAME).mkdir()
    with pytest.raises(ConfigError, match="--disk-path"):
        DiskFolder(tmp_path)
