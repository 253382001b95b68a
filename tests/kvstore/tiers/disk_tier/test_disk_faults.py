"""The disk tier on a bad disk, and with callers that disconnect."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns
from pillion.kvstore.tiers.disk_tier import disk
from pillion.kvstore.tiers.disk_tier.disk_files import BlockFiles
from tests.support.disk import (
    BLOCK_BYTES,
    FILE_BYTES,
    NAMESPACE,
    OTHER,
    Stored,
    chain,
    file_of,
    files_in,
    loaded,
    opened,
)
from tests.support.small_disk import mounted_disk, pretended_disk


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PAUSE_S", 0.0)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond half a block, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES // 2, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files", "no_pause")
async def test_writes_that_fail_in_the_middle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of them is left, all are reported as gone, with one warning; with room again, everything continues."""
    blocks = chain(3)
    async with opened(tmp_path) as tier:
        assert await tier.store(blocks) == [name for name, _ in blocks]
        assert await tier.store(blocks) == [name for name, _ in blocks]
        assert tier.counts.failed == 6
        assert len(tier) == 0
        assert not files_in(tmp_path)
        assert caplog.text.count("cannot write blocks to disk") == 1
        resource.setrlimit(resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1:] * 2)
        assert await tier.store(blocks) == []
        assert await loaded(tier, blocks) == 3


async def test_a_disk_that_rejects_writes_is_backed_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the rest of a batch nor for the next one. A full disk is retried once, with an old file."""
    monkeypatch.setattr(disk, "PAUSE_S", 10 * WITHIN_S)
    for number, times in ((errno.EIO, 1), (errno.EROFS, 1), (errno.ENOSPC, 2), (errno.EDQUOT, 2)):
        blocks, asked = chain(8), itertools.count()

        def bad(*_: object, number: int = number, asked: Iterator[int] = asked) -> int:
            next(asked)
            raise OSError(number, os.strerror(number))

        async with opened(tmp_path / str(number)) as tier:
            await tier.store(blocks[:2])
            with monkeypatch.context() as patches:
                patches.setattr(os, "writev", bad)
                gone = await tier.store(blocks[2:5])
                assert {name for name, _ in blocks[2:5]} <= set(gone)
                assert tier.room_bytes() == 0
                assert await tier.store(blocks[5:]) == [name for name, _ in blocks[5:]]
                assert next(asked) == times
                assert len(tier) == 2 - (times - 1), "the file that was written into is lost, and no other one"
                kept = [block for block in blocks[:2] if block[0].hash in tier]
                assert await loaded(tier, kept) == len(kept), "what is there can be read"
                patches.setattr(time, "monotonic", lambda now=time.monotonic: now() + disk.PAUSE_S)
                assert tier.room_bytes() > 0


@pytest.mark.parametrize("small_disk", [mounted_disk, pretended_disk])
async def test_the_disk_tier_adapts_to_free_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, small_disk: Any
) -> None:
    """The tier keeps as many of the newest blocks as fit, reports it once, and grows when there is room again; all
    blocks that it claims to have can be read, and the others are reported as gone."""
    caplog.set_level("INFO", "pillion.kvnode")
    blocks = [chain(1, token)[0] for token in range(180)]
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    told: set[bytes] = set()
    with small_disk(tmp_path / "disk", 64 * FILE_BYTES) as place:
        async with opened(place.folder, blocks=40) as tier:

            async def keep(part: list[Stored]) -> list[Stored]:
                for at in range(0, len(part), 3):
                    told.update(name.hash for name in await tier.store(part[at : at + 3]))
                kept = [block for block in blocks if block[0].hash in tier]
                # A read leaves its first block as the newest one.
                assert await loaded(tier, reversed(kept)) == len(kept) == len(tier)
                return kept

            assert await keep(blocks[:10]) == blocks[:10]
            place.leave(6 * FILE_BYTES)
            assert await keep(blocks[10:30]) == blocks[14:30], "the newest ones, as many as fit"
            assert told == {name.hash for name, _ in blocks[:14]}
            assert tier.counts.failed == 0, "a disk that is full costs none of the new blocks"
            assert tier.short_blocks == 24
            assert tier.room_bytes() > 0
            for at in range(30, 60, 3):
                now_s += disk.PAUSE_S
                assert len(await keep(blocks[at : at + 3])) == 16, "each try to grow fails and costs nothing"
            assert [record.levelname for record in caplog.records if "the disk is full" in record.message] == [
                "WARNING"
            ]
            assert [one.levelname for one in caplog.records if "the disk is full" in one.message] == ["WARNING"]
            place.leave(64 * FILE_BYTES)
            for at in range(60, 180, 3):
                now_s += disk.PAUSE_S
                await keep(blocks[at : at + 3])
            assert tier.short_blocks == 0
            assert await keep([]) == blocks[-40:]
            assert tier.counts.failed == 0
            assert caplog.text.count("room for all of its 40 blocks again") == 1
            assert told == {name.hash for name, _ in blocks[:-40]}
        place.leave(0)
        async with opened(place.folder, blocks=40) as tier:
            assert await loaded(tier, blocks[-40:]) == 40
        other = OTHER[:-1] + b"x"
        async with opened(place.folder, namespace=other, blocks=40) as tier:
            assert await tier.store(blocks[:2]) == [name for name, _ in blocks[:2]]
            place.leave(40 * FILE_BYTES)
            now_s += disk.PAUSE_S
            for block in blocks[:6]:
                now_s += disk.PAUSE_S
                await tier.store([block])
            assert await loaded(tier, blocks[:6]) == 6


@pytest.mark.usefixtures("no_pause")
async def test_a_disk_with_only_errors_raises_nothing(tmp_path: Path) -> None:
    """Its folders are gone: old blocks are missing, new ones are refused, nothing raises."""
    blocks = chain(3)
    async with opened(tmp_path) as tier:
        await tier.store(blocks[:2])
        for folder in (tmp_path / NAMESPACE.hex()[:16]).iterdir():
            folder.rename(tmp_path / f"away-{folder.name}")
        assert await loaded(tier, blocks) == 0
        assert len(tier) == 0
        assert set(await tier.store(blocks[2:])) == {name for name, _ in blocks}
        tier.touch([blocks[0][0].hash])


async def test_a_file_being_read_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read gets the requested block although it was dropped meanwhile. Otherwise a dropped block's file is reused for
    the next one."""
    one, two, three = (chain(1, token)[0] for token in range(3))
    loop, reading, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    async with opened(tmp_path, blocks=1) as tier:
        await tier.store([one])
        inode = file_of(tmp_path, one[0]).stat().st_ino
        await tier.store([two])
        assert file_of(tmp_path, two[0]).stat().st_ino == inode
        readv = os.readv

        def slow(*args: object) -> int:
            loop.call_soon_threadsafe(reading.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            return readv(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "readv", slow)
        task = asyncio.create_task(loaded(tier, [two]))
        await reading.wait()
        assert await tier.store([three]) == [two[0]]
        go_on.set()
        assert await task == 1
        assert await loaded(tier, [three]) == 1
        assert len(files_in(tmp_path)) == 1


async def test_a_read_outlives_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled caller gets its error only when no thread writes to the targets any more."""
    [block] = chain(1)
    loop, reading, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    async with opened(tmp_path) as tier:
        await tier.store([block])
        read = BlockFiles.read

        def slow(*args: Any, **kwargs: Any) -> None:
            loop.call_soon_threadsafe(reading.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            read(*args, **kwargs)

        monkeypatch.setattr(BlockFiles, "read", slow)
        target = bytearray(BLOCK_BYTES)
        task = asyncio.create_task(tier.load([block[0].hash], [memoryview(target)]))
        await reading.wait()
        for _ in range(2):
            task.cancel()
            await loop_turns()
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert target == block[1]


async def test_a_store_outlives_its_caller(tmp_path: Path) -> None:
    blocks = chain(3)
    async with opened(tmp_path) as tier:
        task = asyncio.create_task(tier.store(blocks))
        await loop_turns(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await tier.close()
        assert len(tier) == 3
        assert await tier.store(chain(1, 50)) != []
        assert await loaded(tier, blocks) == 0, "closed"
    async with opened(tmp_path) as tier:
        assert await loaded(tier, blocks) == 3


async def test_pending_writes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_QUEUED_BYTES", 2 * BLOCK_BYTES)
    blocks = chain(4)
    async with opened(tmp_path) as tier:
        busy, writev = threading.Event(), os.writev

        def held(*args: Any) -> int:
            assert busy.wait(WITHIN_S)
            return writev(*args)

        monkeypatch.setattr(os, "writev", held)
        first = asyncio.create_task(tier.store(blocks[:1]))
        await loop_turns()
        assert tier.room_bytes() == BLOCK_BYTES
        second = asyncio.create_task(tier.store(blocks[1:]))
        await loop_turns()
        assert tier.room_bytes() == 0
        busy.set()
        assert await second == [name for name, _ in blocks[2:]]
        assert await first == []
        assert tier.room_bytes() == 2 * BLOCK_BYTES
        assert await tier.store([(blocks[2][0], blocks[2][1][:-1])]) == [blocks[2][0]], "not a whole block"
