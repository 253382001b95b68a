"""Fetching blocks: sources and tiers that have all, some or none, that fail, lie, hang and are late."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed.conditions import WITHIN_S, loop_turns, until
from pillion.errors import NotFound, PillionError, Unavailable
from pillion.kvstore.hashing import chain_hashes, split_hashes, state_page
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import SESSION, Ledger
from pillion.kvstore.memory.memory import HostMemory, PoolMemory, block_checksum, until_over
from pillion.kvstore.tiers.tiers import BlockName
from pillion.kvstore.transfer import fetch as fetch_module
from pillion.kvstore.transfer.fetch import Fetcher
from pillion.v1.kvnode_pb2 import CommitRun, PrefetchReply
from pillion.v1.kvplane_pb2 import PinBlocksReply
from tests.support.examples import examples
from tests.support.loop_clock import turn_clock

BLOCK_BYTES = 64
NUM_SLOTS = 24
PROMPT = split_hashes(chain_hashes(bytes(32), range(10), 1))


def content(block_hash: bytes) -> bytes:
    """Return the bytes that a block with this hash has on every node."""
    return random.Random(block_hash).randbytes(BLOCK_BYTES)


class FakeSource:
    """Another node with some of the chain. Reads wait for ``gate``, fail after ``fail_after``, and corrupt ``flip``."""

    def __init__(self, node: FetchingNode, name: str, blocks: int) -> None:
        self.node, self.node_id, self.blocks = node, name, blocks
        self.gate = asyncio.Event()
        self.gate.set()
        self.flip: set[bytes] = set()
        self.fail_after = 1000
        self.answers = asyncio.Event()
        self.answers.set()
        self.pinned: dict[int, list[bytes]] = {}
        self.reads: list[int] = []
        self.given_s: list[float] = []
        self.released: list[int] = []
        self._ids = itertools.count(1)

    async def pin(self, hashes: bytes, first_block: int, *, timeout_s: float) -> PinBlocksReply:
        self.given_s.append(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self.answers.wait()
        except TimeoutError:
            raise Unavailable("no answer in time") from None
        if self.blocks < 0:
            raise Unavailable("gone")
        here = split_hashes(hashes)[first_block : self.blocks]
        ticket_id = next(self._ids)
        self.pinned[ticket_id] = here
        return PinBlocksReply(
            ticket_id=ticket_id,
            slots=range(len(here)),
            checksums=[block_checksum(content(each)) for each in here],
        )

    def release(self, ticket_id: int) -> None:
        self.released.append(ticket_id)

    async def read(self, ticket_id: int, remote: tuple[int, ...], local: tuple[int, ...]) -> None:
        # A cancelled read ends only when nothing writes to its slots any more.
        await until_over(self._read(ticket_id, remote, local))

    async def _read(self, ticket_id: int, remote: tuple[int, ...], local: tuple[int, ...]) -> None:
        self.reads.append(len(remote))
        await self.gate.wait()
        if len(self.reads) > self.fail_after:
            raise Unavailable("lost in the middle")
        for there, here in zip(remote, local, strict=True):
            block_hash = self.pinned[ticket_id][there]
            data = bytearray(content(block_hash))
            data[5] ^= block_hash in self.flip
            self.node.memory.block(here)[:] = data


class ListedTier:
    name = "fake"

    def __init__(self, kept: Iterable[bytes]) -> None:
        self.kept = set(kept)
        self.broken: set[bytes] = set()
        self.well = True

    def __len__(self) -> int:
        return len(self.kept)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.kept

    def is_available(self) -> bool:
        return self.well

    async def store(self, blocks: Sequence[tuple[BlockName, bytes]]) -> list[BlockName]:
        raise NotImplementedError

    async def load_slots(self, memory: PoolMemory, hashes: Sequence[bytes], slots: Sequence[int]) -> int:
        await loop_turns(1)
        async with memory.writing(slots) as targets:
            for count, (block_hash, target) in enumerate(zip(hashes, targets, strict=True)):
                if block_hash in self.broken:
                    self.kept.discard(block_hash)
                    return count
                target[:] = content(block_hash)
        return len(hashes)

    def names(self) -> Iterable[BlockName]:
        return ()

    async def close(self) -> None: ...


class FetchingNode:
    """A pool of 24 slots whose fetcher uses the fakes."""

    def __init__(self, tier: ListedTier | None = None, timeout_s: float = WITHIN_S) -> None:
        self.ledger = Ledger(itertools.count(1).__next__, 0)
        self.ledger.shape(NUM_SLOTS)
        self.gateway = self.ledger.attach("g", SESSION)
        self.memory = HostMemory(bytearray(NUM_SLOTS * BLOCK_BYTES), NUM_SLOTS, BLOCK_BYTES)
        self.sources: dict[str, FakeSource] = {}
        self._nonces = itertools.count(1)
        self.fetcher = Fetcher(
            self.ledger,
            self.memory,
            timeout_s=timeout_s,
            max_bytes=2**30,
            changed=lambda: None,
            source=self.source,
            tiers=[tier] if tier else [],
        )

    def add(self, name: str, blocks: int) -> FakeSource:
        self.sources[name] = FakeSource(self, name, blocks)
        return self.sources[name]

    def source(self, name: str) -> FakeSource:
        if name not in self.sources:
            raise NotFound("no such node")
        return self.sources[name]

    def ticket(self, hashes: Sequence[bytes] = PROMPT) -> int:
        ticket = self.ledger.admit(self.gateway, next(self._nonces), hashes, len(hashes) + 1)
        assert ticket is not None
        return ticket.ticket_id

    async def fetch_blocks(self, ticket_id: int, *sources: str, hashes: list[bytes] = PROMPT, **more: float) -> int:
        brought = await self.fetcher.fetch_blocks(self.gateway, ticket_id, hashes, sources, **more)  # type: ignore[arg-type]
        return brought.blocks

    async def bring_late(self, ticket_id: int, source: FakeSource) -> int:
        """Fetch from a source whose gate is shut, and advance the clock to the end of the fetch once the read is in
        progress."""
        bringing = asyncio.create_task(self.fetch_blocks(ticket_id, source.node_id))
        await until("a read to be under way", lambda: source.reads)
        await turn_clock(WITHIN_S)
        return await bringing

    def check(self) -> None:
        """Assert that the ledger is consistent, nothing is left, and every block has the content of its hash."""
        check_integrity(self.ledger)
        for block_hash, block in self.ledger.tree.by_hash.items():
            assert bytes(self.memory.block(block.slot)) == content(block_hash)
        assert self.ledger.holders.keys() == {self.gateway}
        for source in self.sources.values():
            assert sorted(source.released) == sorted(source.pinned)


async def test_a_whole_chain_is_fetched_and_pinned():
    node = FetchingNode()
    node.add("a", 10)
    ticket_id = node.ticket()
    assert await node.fetch_blocks(ticket_id, "a") == 10
    ticket = node.ledger.tickets[ticket_id]
    assert (ticket.blocks, ticket.reserved) == (10, 1)
    assert node.fetcher.counts.fetched_blocks == 10
    node.check()
    node.ledger.release(node.gateway, [ticket_id])
    assert node.ledger.status().committed_blocks == 10
    assert node.ledger.reserved == 0
    other = node.ticket()
    assert node.ledger.tickets[other].blocks == 10


async def test_missing_blocks_come_from_the_next_source():
    node = FetchingNode()
    node.add("gone", -1)
    node.add("short", 3)
    node.add("long", 7)
    assert await node.fetch_blocks(node.ticket(), "gone", "nobody", "short", "long") == 7
    assert node.fetcher.counts.short_fetches == 1
    node.check()


async def test_own_tiers_are_read_before_other_nodes():
    node = FetchingNode(ListedTier(PROMPT[:4]))
    source = node.add("a", 10)
    brought = await node.fetcher.fetch_blocks(node.gateway, node.ticket(), PROMPT, ["a"])
    assert (brought.blocks, brought.restored_blocks, brought.fetched_blocks) == (10, 4, 6)
    assert source.reads == [6]
    node.check()


async def test_a_broken_file_ends_in_a_shorter_chain():
    tier = ListedTier(PROMPT)
    tier.broken = {PROMPT[6]}
    node = FetchingNode(tier)
    assert await node.fetch_blocks(node.ticket()) == 6
    node.check()


async def test_a_flipped_bit_is_found_counted_and_not_committed():
    node = FetchingNode()
    source = node.add("a", 10)
    source.flip = {PROMPT[4]}
    assert await node.fetch_blocks(node.ticket(), "a") == 4
    assert node.fetcher.counts.corrupt_blocks == 1
    assert PROMPT[4] not in node.ledger.tree.by_hash
    node.check()


async def test_a_corrupt_block_is_fetched_from_another_source():
    node = FetchingNode()
    node.add("a", 10).flip = {PROMPT[4]}
    node.add("b", 10)
    assert await node.fetch_blocks(node.ticket(), "a", "b") == 10
    node.check()


async def test_a_source_lost_during_a_fetch(monkeypatch):
    monkeypatch.setattr(fetch_module, "BATCH_BYTES", 3 * BLOCK_BYTES)
    node = FetchingNode()
    node.add("a", 10).fail_after = 2
    assert await node.fetch_blocks(node.ticket(), "a") == 6
    node.check()


async def test_two_fetches_of_one_chain_are_one_transfer():
    node = FetchingNode()
    source = node.add("a", 10)
    source.gate.clear()
    calls = [asyncio.create_task(node.fetch_blocks(node.ticket(), "a")) for _ in range(2)]
    await loop_turns()
    source.gate.set()
    assert await asyncio.gather(*calls) == [10, 10]
    assert source.reads == [10]
    node.check()


async def test_bytes_and_slots_are_limited():
    node = FetchingNode()
    node.add("a", 10)
    ticket_id = node.ticket()
    assert await node.fetch_blocks(ticket_id, "a", max_bytes=4 * BLOCK_BYTES) == 4
    assert [len(pinned) for pinned in node.sources["a"].pinned.values()] == [4], "a source reads all that it pins"
    node.check()
    worker = node.ledger.attach("w", "decode")
    node.ledger.lease(worker, NUM_SLOTS)
    # What the ticket reserved is still its own, and no more.
    assert await node.fetch_blocks(ticket_id, "a") == 10
    node.ledger.end_epoch(worker)
    node.check()


async def test_nothing_is_fetched_without_slots():
    node = FetchingNode()
    node.add("a", 10)
    worker = node.ledger.attach("w", "decode")
    node.ledger.lease(worker, NUM_SLOTS)
    ticket = node.ledger.pin_chain(node.gateway, 77, PROMPT)
    assert await node.fetch_blocks(ticket.ticket_id, "a") == 0
    node.ledger.end_epoch(worker)
    node.check()


async def test_a_late_read_keeps_its_slots_until_it_ends():
    node = FetchingNode()
    source = node.add("a", 10)
    source.gate.clear()
    ticket_id = node.ticket()
    assert await node.bring_late(ticket_id, source) == 0
    node.ledger.release(node.gateway, [ticket_id])
    assert node.ledger.status().leased_blocks == 10
    check_integrity(node.ledger)
    assert source.released == []
    source.gate.set()
    await node.fetcher.close()
    await loop_turns(1)
    assert node.ledger.status().free_blocks == NUM_SLOTS
    node.check()


async def test_a_late_read_keeps_its_slots_and_no_ticket():
    node = FetchingNode()
    source = node.add("a", 10)
    source.gate.clear()
    ticket_id = node.ticket()
    assert await node.bring_late(ticket_id, source) == 0
    node.ledger.release(node.gateway, [ticket_id])
    assert not node.ledger.tickets
    assert (node.fetcher.late_blocks, node.ledger.status().leased_blocks, node.ledger.reserved) == (10, 10, 0)
    check_integrity(node.ledger)
    source.gate.set()
    await node.fetcher.close()
    await loop_turns(1)
    assert node.fetcher.late_blocks == 0
    node.check()


@pytest.mark.parametrize(("bound", "most"), [("MAX_FETCHES", 1), ("MAX_LATE_PERCENT", 40)])
async def test_late_reads_count_as_fetches(monkeypatch: pytest.MonkeyPatch, bound: str, most: int):
    """However many requests come and go, the slots kept by late reads stay within their limit."""
    monkeypatch.setattr(fetch_module, bound, most)
    node = FetchingNode()
    source = node.add("a", 10)
    source.gate.clear()
    for call in range(5):
        ticket_id = node.ticket()
        assert await (node.fetch_blocks(ticket_id, "a") if call else node.bring_late(ticket_id, source)) == 0
        node.ledger.release(node.gateway, [ticket_id])
        assert node.ledger.status().leased_blocks == 10
        check_integrity(node.ledger)
    source.gate.set()
    await node.fetcher.close()
    assert await node.fetch_blocks(node.ticket(), "a") == 10
    node.check()


async def test_an_unresponsive_tier_is_skipped():
    tier = ListedTier(PROMPT)
    tier.well = False
    node = FetchingNode(tier)
    node.add("a", 10)
    brought = await node.fetcher.fetch_blocks(node.gateway, node.ticket(), PROMPT, ["a"])
    assert (brought.restored_blocks, brought.fetched_blocks) == (0, 10)
    node.check()


async def test_a_cancelled_caller_leaks_nothing():
    node = FetchingNode()
    source = node.add("a", 10)
    source.gate.clear()
    ticket_id = node.ticket()
    call = asyncio.create_task(node.fetch_blocks(ticket_id, "a"))
    await loop_turns()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    node.ledger.release(node.gateway, [ticket_id])
    source.gate.set()
    await node.fetcher.close()
    await loop_turns(1)
    assert node.ledger.status().free_blocks == NUM_SLOTS
    node.check()


async def test_a_released_ticket_stops_its_fetch(monkeypatch):
    monkeypatch.setattr(fetch_module, "BATCH_BYTES", 3 * BLOCK_BYTES)
    node = FetchingNode()
    source = node.add("a", 10)
    source.gate.clear()
    ticket_id = node.ticket()
    call = asyncio.create_task(node.fetch_blocks(ticket_id, "a"))
    await loop_turns()
    node.ledger.release(node.gateway, [ticket_id])
    source.gate.set()
    with pytest.raises(NotFound):
        await call
    assert source.reads == [3]
    node.check()


async def test_a_worker_computes_a_chain_during_its_fetch():
    """Both end with one copy; the fetched slots that lost are returned."""
    node = FetchingNode()
    source = node.add("a", 10)
    source.gate.clear()
    call = asyncio.create_task(node.fetch_blocks(node.ticket(), "a"))
    await loop_turns()
    worker, other = node.ledger.attach("w", "decode"), node.ticket()
    slots = node.ledger.adopt(worker, other, 5).leased_slots
    for slot, block_hash in zip(slots, PROMPT[:5], strict=True):
        node.memory.block(slot)[:] = content(block_hash)
    node.ledger.commit(worker, [CommitRun(ticket_id=other, slots=slots, block_hashes=b"".join(PROMPT[:5]))])
    source.gate.set()
    assert await call == 10
    node.ledger.end_epoch(worker)
    assert node.ledger.status().committed_blocks == 10
    node.check()


@settings(max_examples=examples(60))
@given(
    has=st.lists(st.integers(-1, 10), min_size=1, max_size=3),
    tier=st.sets(st.integers(0, 9)),
    flips=st.sets(st.integers(0, 9), max_size=2),
    fail_after=st.integers(0, 3),
    calls=st.integers(1, 3),
    batch=st.integers(1, 4),
    cancel=st.booleans(),
)
def test_accounting_is_consistent_for_random_events(
    has: list[int], tier: set[int], flips: set[int], fail_after: int, calls: int, batch: int, cancel: bool
) -> None:
    async def live() -> None:
        with mock.patch.object(fetch_module, "BATCH_BYTES", batch * BLOCK_BYTES):
            node = FetchingNode(ListedTier(PROMPT[index] for index in tier))
        for number, blocks in enumerate(has):
            source = node.add(str(number), blocks)
            source.flip = {PROMPT[index] for index in flips}
            source.fail_after = fail_after
        # Two prompts fit beside each other; the third shares what they have.
        tickets = [node.ticket() for _ in range(min(calls, 2))]
        works = [asyncio.create_task(node.fetch_blocks(tickets[n % len(tickets)], *node.sources)) for n in range(calls)]
        if cancel:
            await loop_turns(1)
            works[0].cancel()
        answers = await asyncio.gather(*works, return_exceptions=True)
        assert not [each for each in answers if isinstance(each, Exception) and not isinstance(each, PillionError)]
        await node.fetcher.close()
        await loop_turns(1)
        node.check()
        node.ledger.release(node.gateway, tickets)
        assert node.ledger.reserved == 0
        node.check()

    asyncio.run(live())


async def test_the_timeout_covers_all_sources():
    node = FetchingNode(timeout_s=0.2)
    for name in "abcd":
        node.add(name, 10).answers.clear()
    assert await node.fetch_blocks(node.ticket(), *"abcd") == 0
    given_s = [time_s for source in node.sources.values() for time_s in source.given_s]
    assert 0 < sum(given_s) <= 0.2, "each source had the whole time"
    node.check()


async def test_a_timeout_counts_towards_a_sources_pace():
    node = FetchingNode()
    node.add("gone", -1)
    node.add("empty", 0)
    silent = node.add("silent", 10)
    silent.answers.clear()
    node.add("good", 10)

    async def brought(*sources: str) -> PrefetchReply:
        ticket_id = node.ticket()
        reply = await node.fetcher.fetch_blocks(node.gateway, ticket_id, PROMPT, sources)
        node.ledger.release(node.gateway, [ticket_id])
        return reply

    assert (await brought("gone", "empty")).fetched_ms == 0, "they said at once that they have nothing"
    bringing = asyncio.create_task(brought("silent"))
    await until("the silent source to be asked", lambda: silent.given_s)
    await turn_clock(WITHIN_S)
    late = await bringing
    assert (late.fetched_blocks, late.bucket_ms) == (0, 0)
    assert late.fetched_ms >= 1000 * silent.given_s[0]
    good = await brought("good")
    assert good.fetched_blocks == 10
    assert good.fetched_ms > 0
    node.check()


async def test_a_chain_with_a_repeated_block_fetches_nothing():
    node = FetchingNode()
    node.add("a", 10)
    twice = [*PROMPT[:3], PROMPT[1], *PROMPT[3:5]]
    ticket = node.ledger.pin_chain(node.gateway, 99, twice)
    assert await node.fetch_blocks(ticket.ticket_id, "a", hashes=twice) == 0
    node.check()


PAGES = [state_page(PROMPT[5], page) for page in range(2)]


def going_on(node: FetchingNode, total: int = 14) -> int:
    """Open a ticket of a model whose states have two pages."""
    ticket = node.ledger.admit(node.gateway, next(node._nonces), PROMPT, total, 2)
    assert ticket is not None
    return ticket.ticket_id


def state_of(node: FetchingNode, ticket_id: int) -> list[bytes]:
    """Return the pages of the state after a ticket's chain."""
    slots = node.ledger.chain_of(node.ledger.tickets[ticket_id]).state_slots
    return [block.hash for slot in slots for block in node.ledger.tree.by_hash.values() if block.slot == slot]


@pytest.mark.parametrize("tiered", [False, True])
async def test_a_state_is_fetched_after_its_block(tiered: bool) -> None:
    node = FetchingNode(ListedTier([*PROMPT, *PAGES]) if tiered else None)
    if not tiered:
        node.add("a", 8)
    ticket_id = going_on(node)
    assert await node.fetch_blocks(ticket_id, *node.sources, hashes=PROMPT[:6]) == 6
    ticket = node.ledger.tickets[ticket_id]
    assert (ticket.reserved, state_of(node, ticket_id)) == (8, PAGES)
    assert [block_hash for block_hash, block in node.ledger.tree.by_hash.items() if block.page] == PAGES
    assert node.ledger.tree.protected == 8
    node.check()
    node.ledger.release(node.gateway, [ticket_id])
    assert node.ledger.tree.protected == 0
    # A second prompt finds them without asking anybody.
    assert node.ledger.tickets[going_on(node)].blocks == 6


async def test_a_failed_page_loses_the_state_but_not_the_blocks() -> None:
    node = FetchingNode()
    node.add("a", 8).flip = {PAGES[1]}
    ticket_id = going_on(node)
    assert await node.fetch_blocks(ticket_id, "a", hashes=PROMPT[:6]) == 0
    assert (node.fetcher.counts.corrupt_blocks, node.ledger.tickets[ticket_id].reserved) == (1, 14)
    node.check()
    # The blocks and the first page are cached and unpinned.
    assert (len(node.ledger.tree), node.ledger.tree.protected) == (7, 0)
    node.sources["a"].flip.clear()
    assert await node.fetch_blocks(ticket_id, "a", hashes=PROMPT[:6]) == 6
    assert node.sources["a"].reads == [8, 1]
    node.check()


async def test_releasing_a_ticket_ends_the_fetch_of_its_state() -> None:
    node = FetchingNode()
    source = node.add("a", 8)
    source.gate.clear()
    ticket_id = going_on(node)
    bringing = asyncio.create_task(node.fetch_blocks(ticket_id, "a", hashes=PROMPT[:6]))
    await loop_turns(10)
    node.ledger.release(node.gateway, [ticket_id])
    source.gate.set()
    with pytest.raises(NotFound):
        await bringing
    node.check()
    assert node.ledger.tree.protected == 0
