"""Eviction ahead of need: when it starts and ends, what is spilled or lost, and what is announced to the index."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.records import IndexEvent
from pillion.kvstore.memory.memory import HostMemory, PoolMemory, block_checksum
from pillion.kvstore.tiers import spill
from pillion.kvstore.tiers.disk_tier.disk import open_disk_tier
from pillion.kvstore.tiers.disk_tier.disk_files import DiskFolder
from pillion.kvstore.tiers.spill import Spiller, lost_everywhere, without_moved
from pillion.kvstore.tiers.tiers import BlockName, Tier, TierCounts
from tests.kvstore.ledger.test_eviction import LedgerDriver, prompt

BLOCK_BYTES = 256
NUM_SLOTS = 20
LOW, HIGH = 20, 40


class ScriptedTier:
    """A memory that can hang, fail and forget."""

    name = "fake"
    short_blocks = 0

    def __init__(self) -> None:
        self.counts = TierCounts()
        self.kept: dict[bytes, bytes] = {}
        self.names_of: dict[bytes, BlockName] = {}
        self.touched: list[bytes] = []
        self.room = 2**30
        self.refuses = False
        self.gate = asyncio.Event()
        self.gate.set()

    def __len__(self) -> int:
        return len(self.kept)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.kept

    def is_available(self) -> bool:
        return True

    def room_bytes(self) -> int:
        return self.room

    def touch(self, hashes: Sequence[bytes]) -> None:
        self.touched += hashes

    async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        await self.gate.wait()
        if self.refuses:
            return [name for name, _ in blocks]
        for name, data in blocks:
            assert block_checksum(data) == name.checksum
            self.kept[name.hash], self.names_of[name.hash] = bytes(data), name
        return []

    async def load_slots(self, memory: PoolMemory, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
        raise NotImplementedError

    def names(self) -> Iterable[BlockName]:
        return self.names_of.values()

    async def close(self) -> None: ...


class ScriptedMemory(HostMemory):
    """Threads that read it report this, and may have to wait."""

    def __init__(self) -> None:
        super().__init__(bytearray(NUM_SLOTS * BLOCK_BYTES), NUM_SLOTS, BLOCK_BYTES)
        self.read = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def block(self, slot: int) -> memoryview:
        if threading.current_thread() is not threading.main_thread():
            self.read.set()
            assert self.go_on.wait(WITHIN_S)
        return super().block(slot)


class SpillHost:
    """A pool with memory, a spiller and a fake index."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.node = LedgerDriver(NUM_SLOTS)
        self.ledger = self.node.ledger
        self.memory = ScriptedMemory()
        self.index: set[bytes] = set()
        self.spiller = Spiller(self.ledger, self.memory, tiers, LOW, HIGH, self.forgotten, self.changed)
        self.read, self.go_on = self.memory.read, self.memory.go_on

    def apply(self, events: Iterable[IndexEvent]) -> None:
        for event in events:
            (self.index.add if event.here else self.index.discard)(event.block_hash)

    def forgotten(self, names: Sequence[BlockName]) -> None:
        self.apply(lost_everywhere(names, self.ledger.tree.by_hash, self.spiller.is_stored))

    def changed(self) -> None:
        self.apply(without_moved(self.ledger.drain_events(), self.spiller.is_stored))
        if self.free < self.spiller.low_slots:
            self.spiller.poke()

    def open(self, *tokens: int) -> int:
        hashes = prompt(*tokens)
        here = self.ledger.tree.longest_prefix(hashes).blocks
        ticket_id = self.node.open(hashes)
        for block in self.ledger.tree.chain(self.ledger.tickets[ticket_id].last_block)[here:]:
            self.memory.block(block.slot)[:] = content(block.hash)
        self.changed()
        return ticket_id

    def serve(self, *tokens: int) -> None:
        self.close(self.open(*tokens))

    def close(self, ticket_id: int) -> None:
        self.node.close(ticket_id)
        self.changed()

    @property
    def free(self) -> int:
        return len(self.ledger.free)


def content(block_hash: bytes) -> bytes:
    return block_hash * (BLOCK_BYTES // 32)


async def until_free(host: SpillHost, free: int = 8, *, stored: bool = False) -> None:
    """Wait for free slots, and with ``stored`` until no evicted block is being stored any more."""
    await until(f"{free} free slots", lambda: host.free == free and not (stored and host.spiller.busy))


async def begin_copy(host: SpillHost) -> None:
    """Fill the pool until the spiller copies its oldest blocks, and stop it in the middle of that."""
    for token in range(16):
        host.serve(token)
    host.go_on.clear()
    host.serve(16)
    await until("a copy to begin", host.read.is_set)


@contextlib.asynccontextmanager
async def running(*tiers: Tier) -> AsyncIterator[SpillHost]:
    host = SpillHost(tiers)
    task = asyncio.create_task(host.spiller.run())
    yield host
    host.go_on.set()
    if task.done():
        await task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await host.spiller.close()
    check_integrity(host.ledger)
    assert host.index == set(host.ledger.tree.by_hash) | {h for tier in tiers for h in host.index if h in tier}
    assert all(host.spiller.is_stored(h) or h in host.ledger.tree.by_hash for h in host.index)


def test_watermarks_count_in_percent_of_the_pool() -> None:
    node = LedgerDriver(NUM_SLOTS)

    def slots_of(low_percent: int, high_percent: int) -> tuple[int, int]:
        spiller = Spiller(node.ledger, ScriptedMemory(), (), low_percent, high_percent)
        return spiller.low_slots, spiller.high_slots

    assert slots_of(20, 33) == (4, 7), "four of twenty free slots are not below 20 %"
    assert slots_of(21, 35) == (5, 7)
    assert slots_of(0, 0) == (0, 0), "never fewer than none are free"


async def test_without_tiers_the_oldest_blocks_are_evicted() -> None:
    async with running() as host:
        for token in range(16):
            host.serve(token)
        await loop_turns()
        assert host.free == 4, "not below the low watermark"
        host.serve(16)
        await until_free(host)
        assert [host.node.has(token) for token in range(17)] == [False] * 5 + [True] * 12
        assert len(host.index) == 12


async def test_evicted_blocks_are_stored_in_the_tier_below() -> None:
    """Bytes, parent and segment are unchanged, last blocks come before heads, and the index hears of no removal."""
    tier = ScriptedTier()
    async with running(tier) as host:
        host.serve(*range(9))
        host.serve(*range(9, 17))
        await until("five blocks below", lambda: len(tier) == 5 and not host.spiller.busy)
        assert host.free == 8
        assert list(tier.kept) == prompt(*range(9))[:3:-1]
        assert all(data == content(block_hash) for block_hash, data in tier.kept.items())
        name = tier.names_of[prompt(*range(5))[4]]
        assert (name.parent, name.segment) == (prompt(*range(4))[3], prompt(0)[0])
        assert host.index == set(prompt(*range(9))) | set(prompt(*range(9, 17)))
        assert host.spiller.spilled_blocks == 5
        assert host.ledger.status().evicted_blocks == 5


async def test_blocks_already_in_the_lower_tier_are_not_copied() -> None:
    tier = ScriptedTier()
    async with running(tier) as host:
        tier.kept = {prompt(token)[0]: content(prompt(token)[0]) for token in range(30)}
        for token in range(17):
            host.serve(token)
        await until_free(host)
        assert host.spiller.spilled_blocks == 0
        assert tier.touched == [prompt(token)[0] for token in range(5)]
        assert len(host.index) == 17


async def test_blocks_used_during_their_copy_stay() -> None:
    tier = ScriptedTier()
    async with running(tier) as host:
        await begin_copy(host)
        ticket = host.open(0)
        host.go_on.set()
        await until_free(host, stored=True)
        assert host.node.has(0)
        assert prompt(0)[0] not in tier
        assert len(tier) == 5
        host.close(ticket)


async def test_an_urgent_lease_takes_slots_that_are_being_copied() -> None:
    """The slot gets other bytes, or even the same block again: the copy is not trusted, and nothing wrong is stored."""
    tier = ScriptedTier()
    async with running(tier) as host:
        await begin_copy(host)
        first = host.node.block(0)
        tickets = [host.open(100, 101, 102, 103)]
        assert not host.node.has(0)
        tickets.append(host.open(0))
        assert host.node.block(0) is not first
        host.go_on.set()
        await until_free(host, stored=True)
        assert prompt(0)[0] not in tier
        assert all(data == content(block_hash) for block_hash, data in tier.kept.items())
        for ticket in tickets:
            host.close(ticket)


async def test_blocks_that_a_tier_rejects_are_announced_as_gone() -> None:
    tier = ScriptedTier()
    tier.refuses = True
    async with running(tier) as host:
        for token in range(17):
            host.serve(token)
        await until_free(host, stored=True)
        assert len(host.index) == 12


async def test_a_tier_that_raises_loses_its_blocks_only(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedTier):
        async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
            raise ValueError("broken")

    async with running(Broken()) as host:
        for token in range(17):
            host.serve(token)
        await until_free(host, stored=True)
        assert len(host.index) == 12
    assert "a lower tier failed" in caplog.text


async def test_blocks_stay_in_the_pool_if_no_tier_has_room() -> None:
    tier = ScriptedTier()
    tier.room = BLOCK_BYTES - 1
    async with running(tier) as host:
        for token in range(17):
            host.serve(token)
        await loop_turns()
        assert host.free == 3
        tier.room = 2 * BLOCK_BYTES
        host.spiller.poke()
        await until_free(host)


async def test_a_tier_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pending writes are limited; leases continue and evict for themselves."""
    monkeypatch.setattr(spill, "MAX_IN_FLIGHT_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(spill, "BATCH_BYTES", BLOCK_BYTES)
    tier = ScriptedTier()
    tier.gate.clear()
    async with running(tier) as host:
        for token in range(17):
            host.serve(token)
        await until_free(host, 5)
        await loop_turns()
        assert host.free == 5
        assert len(host.index) == 17, "two of them on their way"
        host.serve(*range(100, 118))
        assert host.free == 0
        tier.gate.set()
        await until_free(host)


async def test_evicted_blocks_are_offered_to_both_tiers() -> None:
    """A block is gone only when neither has it."""
    fast, slow = ScriptedTier(), ScriptedTier()
    fast.refuses = True
    async with running(fast, slow) as host:
        for token in range(17):
            host.serve(token)
        await until_free(host, stored=True)
        assert len(slow) == 5
        assert len(host.index) == 17


async def test_close_waits_for_the_last_bytes() -> None:
    tier = ScriptedTier()
    tier.gate.clear()
    host = SpillHost([tier])
    task = asyncio.create_task(host.spiller.run())
    for token in range(17):
        host.serve(token)
    await until_free(host)
    task.cancel()
    closing = asyncio.create_task(host.spiller.close())
    await loop_turns()
    assert not closing.done()
    tier.gate.set()
    await closing
    assert len(tier) == 5


async def test_a_cancelled_copy_is_waited_for() -> None:
    """The pool's memory must not be unmapped meanwhile."""
    host = SpillHost([ScriptedTier()])
    task = asyncio.create_task(host.spiller.run())
    host.go_on.clear()
    for token in range(17):
        host.serve(token)
    await until("a copy to begin", host.read.is_set)
    task.cancel()
    closing = asyncio.create_task(host.spiller.close())
    await loop_turns()
    assert task.done()
    assert not closing.done()
    host.go_on.set()
    await closing


def test_only_blocks_in_no_tier_are_announced_as_gone() -> None:
    a, b, c = (prompt(token)[0] for token in range(3))
    came, moved, gone = IndexEvent(b, here=True), IndexEvent(b, here=False), IndexEvent(c, here=False)
    assert without_moved([came, moved, gone], {b}.__contains__) == [came, gone]
    names = [BlockName(block_hash, b"", b"s" * 32, 1) for block_hash in (a, b, c)]
    assert lost_everywhere(names, {a}, {b}.__contains__) == [IndexEvent(c, here=False, segment=b"s" * 32)]


async def test_indexed_blocks_are_readable_with_a_real_disk(tmp_path: Path) -> None:
    """Many prompts through a small pool: whatever the index has is present, with the right bytes."""
    disk = await open_disk_tier(
        DiskFolder(tmp_path), namespace=bytes(32), block_bytes=BLOCK_BYTES, disk_bytes=40 * 4096
    )
    async with running(disk) as host:
        for turn in range(60):
            host.serve(0, 1, turn % 7, turn % 5, turn)
            await until("the spiller to catch up", lambda: host.free * 100 >= LOW * NUM_SLOTS)
    assert host.spiller.spilled_blocks > 40
    assert len(disk) == 40
    for block_hash in host.index - set(host.ledger.tree.by_hash):
        target = bytearray(BLOCK_BYTES)
        assert await disk.load([block_hash], [memoryview(target)]) == 1
        assert target == content(block_hash)
    await disk.close()
