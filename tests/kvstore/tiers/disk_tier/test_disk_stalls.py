"""A disk that hangs, with real reader threads: few slots wait for it, it is paused, and it recovers by itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until
from lab.testbed.redis import RedisServer
from pillion.kvstore.tiers import tier_breaker
from pillion.kvstore.tiers.disk_tier import disk
from pillion.kvstore.tiers.disk_tier.disk import READ_THREADS, DiskTier
from pillion.kvstore.tiers.disk_tier.disk_files import BlockFiles
from pillion.kvstore.tiers.tier_breaker import TierBreaker
from pillion.kvstore.tiers.tiers import BlockName
from tests.support.disk import BLOCK_BYTES, Stored, chain, file_of, files_in, loaded, opened
from tests.support.disk_stalls import stalled
from tests.support.kv_hosts import EAGER, NUM_SLOTS, hosts, prompt

LATE_S = 0.2


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LATE_S", LATE_S)
    monkeypatch.setattr(tier_breaker, "FIRST_PAUSE_S", 0.05)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[BlockName]:
    """The names of the blocks whose reading has started, in order. A thread starts when the machine has time for it,
    and no number of loop turns proves that it has."""
    names, read = list[BlockName](), BlockFiles.read

    def noted(files: BlockFiles, name: BlockName, target: memoryview) -> None:
        names.append(name)
        read(files, name, target)

    monkeypatch.setattr(BlockFiles, "read", noted)
    return names


async def all_threads_read(begun: list[BlockName]) -> None:
    """Wait until every thread has started to read its first block."""
    await until("a block in the hands of every thread", lambda: len(begun) >= READ_THREADS)


async def late(tier: DiskTier) -> None:
    """Wait until a pending read is late by the tier's own clock."""
    began_s = time.monotonic()
    await until("a read to be late", lambda: time.monotonic() - began_s > LATE_S)


async def test_a_cancel_stops_queued_reads_and_running_ones_after_a_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begun: list[BlockName]
) -> None:
    blocks = chain(12)
    async with opened(tmp_path) as tier:
        await tier.store(blocks)
        with stalled(file_of(tmp_path, name) for name, _ in blocks[:READ_THREADS]):
            stuck = asyncio.create_task(loaded(tier, blocks))
            queued = asyncio.create_task(loaded(tier, blocks[8:]))
            await all_threads_read(begun)
            await late(tier)
            for task in (queued, stuck):
                task.cancel()
            await asyncio.wait({queued})
            await loop_turns()
            assert not stuck.done(), "threads may still write to its slots"
            assert not tier.is_available()
            assert tier.room_bytes() == 0
        await asyncio.wait({stuck})
        await until("the disk to be used again", tier.is_available)
        assert tier.room_bytes() > 0
        assert await loaded(tier, blocks) == 12
    assert caplog.text.count("did not answer") == 1
    assert caplog.text.count("answers again") == 1


async def test_a_cancelled_disk_read_writes_no_further_block(tmp_path: Path, begun: list[BlockName]) -> None:
    """The block that a thread is reading may still arrive; it is the first of the thread's share."""
    blocks = chain(6)
    async with opened(tmp_path) as tier:
        await tier.store(blocks)
        targets = [bytearray(BLOCK_BYTES) for _ in blocks]
        hashes, views = [name.hash for name, _ in blocks], [memoryview(target) for target in targets]
        with stalled(file_of(tmp_path, name) for name, _ in blocks[:READ_THREADS]):
            hasty = asyncio.create_task(tier.load(hashes, views))
            await all_threads_read(begun)
            hasty.cancel()
            await loop_turns()
        await asyncio.wait({hasty})
        assert len(begun) == READ_THREADS
        assert not any(map(any, targets[READ_THREADS:]))


async def test_short_timeouts_still_detect_a_hung_disk(tmp_path: Path, begun: list[BlockName]) -> None:
    """Each of them gives up too early to blame the disk; but no block comes at all."""
    blocks: list[Stored] = chain(4)
    async with opened(tmp_path) as tier:
        await tier.store(blocks)
        with stalled(files_in(tmp_path)):
            hasty = asyncio.create_task(loaded(tier, blocks))
            await all_threads_read(begun)
            hasty.cancel()
            await loop_turns()
            await late(tier)
            assert not tier.is_available()
        await asyncio.wait({hasty})
        await until("the disk to be used again", tier.is_available)


async def test_many_late_reads_cause_a_single_first_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[BlockName]
) -> None:
    pauses, late_at = list[float](), TierBreaker.late
    judged = asyncio.Event()

    def recorded(breaker: TierBreaker, now: float) -> None:
        late_at(breaker, now)
        pauses.append(breaker.probe_at_s - now)

    async def probed(tier: DiskTier, probe: Callable[[DiskTier], Awaitable[bool]] = DiskTier._answers_probe) -> bool:
        # A probe that is late makes a further pause.
        await judged.wait()
        return await probe(tier)

    monkeypatch.setattr(TierBreaker, "late", recorded)
    monkeypatch.setattr(DiskTier, "_answers_probe", probed)
    blocks = chain(4)
    async with opened(tmp_path) as tier:
        await tier.store(blocks)
        with stalled(files_in(tmp_path)):
            reads = [asyncio.create_task(loaded(tier, blocks)) for _ in range(20)]
            await all_threads_read(begun)
            await late(tier)
            for read in reads:
                read.cancel()
            await asyncio.wait(reads[2:])
            for _ in range(20):
                assert not tier.is_available()
            assert pauses == [pytest.approx(tier_breaker.FIRST_PAUSE_S)]
            judged.set()
        await asyncio.wait(reads)
        await until("the disk to be used again", tier.is_available)


class SlowReads:
    """The tier's clock, which advances by an eighth of LATE_S with each block read and otherwise stands still.

    ``allowed`` is the number of blocks that may be read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int = 0) -> None:
        self.now_s, self.allowed = 1000.0, threading.Semaphore(allowed)
        lock, read = threading.Lock(), BlockFiles.read

        def slow(files: BlockFiles, *words: object) -> None:
            assert self.allowed.acquire(timeout=WITHIN_S)
            with lock:
                self.now_s += LATE_S / 8
            read(files, *words)  # type: ignore[arg-type]

        clock = SimpleNamespace(monotonic=lambda: self.now_s, time_ns=time.time_ns)
        monkeypatch.setattr(BlockFiles, "read", slow)
        monkeypatch.setattr(disk, "time", clock)


async def test_waiting_for_a_thread_does_not_pause_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that waited for others and is abandoned does not pause a disk whose blocks come."""
    blocks, pauses = chain(8), list[float]()
    monkeypatch.setattr(TierBreaker, "late", lambda breaker, now: pauses.append(now))
    async with opened(tmp_path) as tier:
        await tier.store(blocks)
        reads = SlowReads(monkeypatch, allowed=24)
        began_s = reads.now_s
        others = [asyncio.create_task(loaded(tier, blocks)) for _ in range(10)]
        await loop_turns()
        last = asyncio.create_task(loaded(tier, blocks))
        await loop_turns()
        # 24 of the 80 blocks before those of the last read.
        await until("some blocks to be read", lambda: reads.now_s - began_s > 2 * LATE_S)
        last.cancel()
        # It is given up while the threads stand still: they have begun with none of its blocks.
        await loop_turns()
        reads.allowed.release(200)
        await asyncio.wait([*others, last])
        assert last.cancelled()
        assert not pauses
        assert not any(other.exception() for other in others)


async def test_a_slow_disk_that_answers_is_not_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long read is not late while its blocks come."""
    blocks = chain(24)
    async with opened(tmp_path) as tier:
        await tier.store(blocks)
        reads = SlowReads(monkeypatch)
        began_s, loading = reads.now_s, asyncio.create_task(loaded(tier, blocks))
        for number in range(1, 25):
            reads.allowed.release()
            await until("a block to be read", lambda number=number: reads.now_s - began_s > (number - 0.5) * LATE_S / 8)  # type: ignore[misc]
            assert tier.is_available()
        assert await loading == 24
        assert reads.now_s - began_s > 2 * LATE_S
        assert tier.is_available()


async def test_a_node_keeps_serving_while_its_disk_hangs(
    short_folder: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests compute what they cannot get. The slots kept by late reads do not grow with their number."""
    # A sound disk is not late because the machine stands still.
    monkeypatch.setattr(disk, "LATE_S", WITHIN_S)
    folder = Path(short_folder, "disk")
    # Evicting ends where it begins, so that a pool with enough free slots is one that evicts nothing more.
    flags = {**EAGER, "high_watermark_percent": EAGER["low_watermark_percent"]}
    flags |= {"disk_path": str(folder), "fetch_timeout_s": 1.5 * LATE_S}
    async with hosts(short_folder, redis, "a", **flags) as (a,):
        prompts = [prompt(*range(first, first + 8)) for first in range(100, 1300, 100)]
        for hashes in prompts:
            await a.serve(hashes)
            await a.until(lambda status: status.free_blocks >= NUM_SLOTS * 0.6)
        await a.until(lambda status: status.disk_blocks == status.spilled_blocks)
        monkeypatch.setattr(disk, "LATE_S", LATE_S)
        with stalled(files_in(folder)):
            most_late = 0
            for hashes in prompts:
                await a.serve(hashes)
                status = await a.until(lambda status: not status.tickets)
                await a.check()
                assert status.leased_blocks == status.late_blocks
                most_late = max(most_late, status.late_blocks)
            assert 0 < most_late <= 8, "one read keeps its slots"
            assert status.disk_paused
        await a.until(lambda status: not (status.disk_paused or status.late_blocks))
        await a.idle()
        await a.check()
        # The disk is sound again, however long the machine takes.
        monkeypatch.setattr(disk, "LATE_S", WITHIN_S)
        assert a.node is not None
        a.node.pool.fetcher._timeout_s = WITHIN_S
        restored = [(await a.serve(hashes)).restored_blocks for hashes in prompts]
        assert sum(restored) > 0
        await a.idle()
        await a.check()
