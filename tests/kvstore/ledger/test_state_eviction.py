"""StateEviction: random lives of a ledger against an exhaustive search, and the purpose of the order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.kvstore.hashing import chain_hashes, split_hashes, state_page
from pillion.kvstore.ledger.integrity import IntegrityError, check_integrity
from pillion.kvstore.ledger.ledger import Ledger, PoolShares
from pillion.kvstore.ledger.pin_table import PrefixPinRequest, PrefixPinTable
from pillion.kvstore.ledger.records import Block
from pillion.kvstore.ledger.state_eviction import StateEviction
from pillion.v1.kvnode_pb2 import CommitRun
from tests.support.examples import examples

PAGES = 2


def prompt(*tokens: int) -> list[bytes]:
    return split_hashes(chain_hashes(bytes(32), tokens, 1))


def pages_of(block_hash: bytes) -> list[bytes]:
    return [state_page(block_hash, page) for page in range(PAGES)]


class StatePool:
    """A ledger with one worker, whose texts leave states of two pages; a block has one token. It checks at each
    eviction whether a search through all states finds the same victim."""

    def __init__(self, num_slots: int = 40, percent: int = 20, pins: bool = False) -> None:
        self.ledger = Ledger(itertools.count(1).__next__, 0, PoolShares(75, 50, percent))
        self.states = self.ledger.states
        self.ledger.shape(num_slots)
        self.max_pages = num_slots * percent // 100
        self.worker = self.ledger.attach("one", "decode")
        self.nonces = itertools.count(1)
        # This is the order in which blocks lost their protection.
        self.released: dict[Block, None] = {}
        # The first pages of states from which texts have gone on, and by last pages the kinds of states.
        self.found: set[Block] = set()
        self.kinds: dict[Block, tuple[bool, bool]] = {}
        # How many states of a kind were found, and how many left; the shares when a state last lost its protection.
        self.counts = {kind: [1, 1] for kind in itertools.product((False, True), repeat=2)}
        self.shares = dict.fromkeys(self.counts, 0.5)
        plain_add, evict, drop = self.states.plain.add, self.ledger.tree.evict, self.ledger.tree.drop

        def watched_add(block: Block) -> None:
            self.released.pop(block, None)
            self.released[block] = None
            if self.is_end(block):
                first = self.ledger.tree.by_hash[pages_of(behind(block).hash)[0]]
                self.kinds[block] = first in self.found, behind(block).children > 1
                self.shares = {kind: max(1 / 16, found / (found + left)) for kind, (found, left) in self.counts.items()}
            plain_add(block)

        def watched_evict() -> Block:
            expected = self.next_victims()
            block = evict()
            assert block in expected
            self.count(block, found=False)
            return block

        def watched_drop(block: Block) -> None:
            self.count(block, found=False)
            drop(block)

        self.states.plain.add = watched_add  # type: ignore[method-assign]
        if not pins:
            self.ledger.tree.evict = watched_evict  # type: ignore[method-assign]
            self.ledger.tree.drop = watched_drop  # type: ignore[method-assign]

    def is_end(self, block: Block) -> bool:
        """Return whether a block is the last page of a complete state."""
        return block.page and block.hash == pages_of(behind(block).hash)[-1]

    def count(self, block: Block, *, found: bool) -> None:
        """Count an unprotected state that is found or evicted, if the block is its last page."""
        if self.is_end(block):
            counts = self.counts[self.kinds[block]]
            if sum(counts) >= 256:
                counts[:] = [max(1, number // 2) for number in counts]
            counts[not found] += 1

    def state_of(self, block: Block) -> Block | None:
        """Return the last page of the complete state after a block."""
        return self.ledger.tree.by_hash.get(pages_of(block.hash)[-1])

    def next_victims(self) -> list[Block]:
        """Return the blocks that may be evicted next: one, or all useless ends of chains."""
        known = set(self.states.plain)
        leaves = [block for block in self.released if block in known and not block.children]
        ends = [block for block in leaves if self.is_end(block)]
        useless = [block for block in leaves if block not in ends]
        if useless and len(ends) * PAGES <= self.max_pages:
            return useless
        products = [
            rank * self.shares[self.kinds[end]] * self.saved(behind(end)) ** 2 for rank, end in enumerate(ends, 1)
        ]
        return [ends[products.index(min(products))]]

    def saved(self, block: Block) -> float:
        """Return the blocks that the state after a block saves, per block that it frees."""
        gap = self.gap(block)
        return gap / (PAGES + (gap if block.children == 1 else 0))

    def gap(self, block: Block) -> int:
        """Return the blocks between the state after a block and the complete state before it."""
        count, at = 1, block.parent
        while at is not None and self.state_of(at) is None:
            count, at = count + 1, at.parent
        return count

    def open(self, hashes: list[bytes], keep: list[int]) -> int | None:
        """Serve a text and keep states after the given numbers of its blocks. Return the ticket; None if memory is
        short."""
        want = len(hashes) + PAGES * len(keep)
        state = self.ledger.tree.longest_with_state(hashes, PAGES).state
        idle = state is not None and not state.ref_count
        evicted = self.ledger.evicted_ever
        ticket = self.ledger.admit(self.worker, next(self.nonces), hashes, want, PAGES)
        if ticket is None:
            return None
        assert self.ledger.evicted_ever == evicted
        if state is not None:
            if idle:
                self.count(state, found=True)
            self.found.add(self.ledger.tree.by_hash[pages_of(behind(state).hash)[0]])
        left = hashes[ticket.blocks :]
        slots = list(self.ledger.adopt(self.worker, ticket.ticket_id, ticket.reserved).leased_slots)
        runs = [(left, b""), *((pages_of(hashes[at - 1]), hashes[at - 1]) for at in keep)]
        for names, after in runs:
            if names:
                used, slots = slots[: len(names)], slots[len(names) :]
                run = CommitRun(ticket_id=ticket.ticket_id, slots=used, block_hashes=b"".join(names), after=after)
                [result] = self.ledger.commit(self.worker, [run])
                assert not result.refusal
                slots += [own for own, kept in zip(used, result.slots, strict=True) if own != kept]
        self.ledger.return_slots(self.worker, slots)
        return ticket.ticket_id

    def close(self, ticket_id: int) -> None:
        self.ledger.release(self.worker, [ticket_id])

    def serve(self, *tokens: int, keep: list[int] | None = None) -> None:
        """Serve a text, which leaves a state at its end unless ``keep`` says otherwise."""
        ticket_id = self.open(prompt(*tokens), [len(tokens)] if keep is None else keep)
        assert ticket_id is not None
        self.close(ticket_id)
        check_integrity(self.ledger)

    def need(self, slots: int) -> None:
        """Lease this many slots, and return them."""
        self.ledger.return_slots(self.worker, self.ledger.lease(self.worker, slots))
        check_integrity(self.ledger)

    def hit(self, *tokens: int) -> int:
        """Return how many blocks of a text a ticket would find with a state."""
        return self.ledger.tree.longest_with_state(prompt(*tokens), PAGES).blocks


def behind(page: Block) -> Block:
    at = page
    while at.page:
        assert at.parent is not None
        at = at.parent
    return at


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
PLACES = st.lists(st.integers(1, 7), max_size=3, unique=True)


@dataclass(frozen=True, slots=True)
class ServedText:
    """A text that is served and held for ``held`` further steps."""

    tokens: list[int]
    keep: list[int]
    held: bool


STEPS = st.lists(
    st.one_of(
        st.builds(ServedText, TEXTS, PLACES, st.booleans()),
        st.tuples(st.just("close"), st.integers(0, 3)),
        st.tuples(st.just("drop"), st.integers(0, 11)),
        st.tuples(st.just("need"), st.integers(1, 12)),
    ),
    min_size=10,
    max_size=60,
)


@given(steps=STEPS, percent=st.sampled_from([0, 10, 25, 100]))
@settings(max_examples=examples(100))
def test_eviction_matches_an_exhaustive_search(steps: list[ServedText | tuple[str, int]], percent: int) -> None:
    """Whatever is served, held, released, dropped out of turn and needed: the ledger is consistent, each victim is the
    one found by a search through all states, and blocks are evicted in the listed order."""
    pool, tickets = StatePool(30, percent), []
    for step in steps:
        if isinstance(step, ServedText):
            ticket = pool.open(prompt(*step.tokens), [at for at in step.keep if at <= len(step.tokens)])
            if ticket is not None and step.held:
                tickets.append(ticket)
            elif ticket is not None:
                pool.close(ticket)
        elif step[0] == "close" and tickets:
            pool.close(tickets.pop(step[1] % len(tickets)))
        elif step[0] == "drop" and len(pool.states):
            leaves = [block for block in pool.states if not block.children]
            pool.ledger.evict_block(leaves[step[1] % len(leaves)])
        elif step[0] == "need":
            pool.ledger.return_slots(pool.worker, pool.ledger.lease(pool.worker, step[1]))
        check_integrity(pool.ledger)
    for ticket in tickets:
        pool.close(ticket)
    shown = [block.hash for block in pool.states]
    pool.ledger.drain_events()
    pool.need(30)
    assert [event.block_hash for event in pool.ledger.drain_events()] == shown
    assert not pool.ledger.tree.by_hash
    check_integrity_of_nothing(pool.states)


def check_integrity_of_nothing(states: StateEviction) -> None:
    assert list(states.check()) == []
    assert len(states) == 0
    with pytest.raises(KeyError):
        states.pop()


def test_the_state_that_saves_least_is_evicted_first_with_its_blocks() -> None:
    """States of longer texts stay, although they are older."""
    pool = StatePool(num_slots=30, percent=100)
    pool.serve(1, 2, 3, 4, 5, 6)
    pool.serve(9, 8)
    pool.serve(7)
    pool.need(len(pool.ledger.free) + 3)
    assert [pool.hit(1, 2, 3, 4, 5, 6), pool.hit(9, 8), pool.hit(7)] == [6, 2, 0]
    assert pool.ledger.tree.longest_prefix(prompt(7)).blocks == 0
    pool.need(len(pool.ledger.free) + 4)
    assert [pool.hit(1, 2, 3, 4, 5, 6), pool.hit(9, 8)] == [6, 0]


def test_blocks_without_a_state_are_evicted_before_states() -> None:
    """Blocks after the last state are useless, however recently they were used; those before it stay with it."""
    pool = StatePool(num_slots=30, percent=100)
    pool.serve(1, 2, 3, 4)
    pool.serve(5, 6, keep=[])
    pool.serve(1, 2, 3, 4, 8, 8, keep=[])
    pool.need(len(pool.ledger.free) + 4)
    assert pool.hit(1, 2, 3, 4) == 4
    assert len(pool.ledger.tree.by_hash) == 6


def test_blocks_without_states_are_evicted_by_the_pools_policy() -> None:
    pool = StatePool(num_slots=8)
    pool.serve(1, 2, 3, keep=[])
    pool.serve(4, 5, keep=[])
    pool.serve(1, 2, 3, keep=[])
    pool.need(len(pool.ledger.free) + 2)
    assert pool.ledger.tree.longest_prefix(prompt(1, 2, 3)).blocks == 3
    assert pool.ledger.tree.longest_prefix(prompt(4, 5)).blocks == 0


def test_states_above_their_share_are_evicted_first() -> None:
    """States held by requests do not count towards the share."""
    pool = StatePool(num_slots=40, percent=5)
    held = [pool.open(prompt(first, 2, 3), [3]) for first in range(4)]
    pool.serve(6, 6, 6, keep=[])
    pool.serve(9, 8)
    pool.need(len(pool.ledger.free) + 1)
    assert pool.hit(9, 8) == 2
    assert pool.ledger.tree.longest_prefix(prompt(6, 6, 6)).blocks == 2
    for ticket_id in held:
        assert ticket_id is not None
        pool.close(ticket_id)
    # Now there are five states for one that may stay.
    pool.need(len(pool.ledger.free) + 8)
    assert sum(pool.hit(first, 2, 3) for first in range(4)) + pool.hit(9, 8) == 3
    assert pool.ledger.tree.longest_prefix(prompt(6, 6, 6)).blocks == 2


def test_a_state_in_the_middle_makes_the_next_one_worth_less() -> None:
    """Where texts diverge, a state is inserted between two others; a text that continues from the later one then saves
    less."""
    pool = StatePool(num_slots=40, percent=100)
    pool.serve(1, 2, 3, 4, 5, 6)
    pool.serve(5, 5, 5)
    pool.serve(1, 2, 3, 4, 5, 7, keep=[5])
    pool.need(len(pool.ledger.free) + 2)
    assert pool.hit(1, 2, 3, 4, 5, 6) == 5
    assert pool.hit(5, 5, 5) == 3


@pytest.mark.parametrize("goes_on_after", [3, 5])
def test_the_pool_learns_which_state_of_a_request_is_found(goes_on_after: int) -> None:
    """Each request leaves a state at its prompt's end and one at its answer's end. If texts continue from one of them,
    the other one is evicted first."""
    pool = StatePool(num_slots=40, percent=100)
    for first in range(10, 60):
        text = [first, 1, 2, 3, 4]
        pool.serve(*text, keep=[3, 5])
        pool.serve(*text[:goes_on_after], 9, 9, 9, keep=[])
    pool.need(40)
    pool.serve(1, 2, 3, 4, 5, keep=[3, 5])
    pool.need(len(pool.ledger.free) + 1)
    assert pool.hit(1, 2, 3, 4, 5) == goes_on_after
    assert pool.hit(1, 2, 3, 8, 8) == (3 if goes_on_after == 3 else 0)


def test_branch_points_outlive_their_evicted_blocks() -> None:
    """After all blocks were evicted, only texts with this branch point get it."""
    pool = StatePool(num_slots=40)

    def told(*tokens: int) -> int:
        ticket_id = pool.open(prompt(*tokens), [])
        assert ticket_id is not None
        known = pool.ledger.tickets[ticket_id].known_blocks
        pool.close(ticket_id)
        return known

    pool.serve(1, 2, 3, 4)
    assert told(1, 2, 9, 9) == 2
    pool.need(40)
    assert told(1, 2, 7, 7, 7) == 2
    pool.need(40)
    assert [told(1, 2), told(6, 2, 7), told(5, 5)] == [2, 0, 0]


def test_branch_points_of_other_nodes_are_stored() -> None:
    pool = StatePool(num_slots=40)
    text = prompt(1, 2, 3, 4)

    def told(known: int) -> int:
        ticket = pool.ledger.admit(pool.worker, next(pool.nonces), text, len(text) + 1, 2, known)
        assert ticket is not None
        pool.ledger.release(pool.worker, [ticket.ticket_id])
        return ticket.known_blocks

    # The index names no more blocks than it was asked about, and may be wrong all the same.
    assert [told(9), told(2), told(0)] == [4, 2, 2]


def test_the_integrity_check_finds_wrong_state_records() -> None:
    pool = StatePool()
    pool.serve(1, 2, 3)
    (state,) = pool.states._by_block.values()
    state.before = state
    with pytest.raises(IntegrityError, match="another state before it"):
        check_integrity(pool.ledger)


def test_restored_pages_are_found_by_their_hashes() -> None:
    pool = StatePool()
    pool.serve(1, 2, 3)
    chain = [
        block.hash
        for block in pool.ledger.tree.chain(pool.ledger.tree.state_end(pool.ledger.tree.by_hash[prompt(1, 2, 3)[-1]]))
    ]
    fresh = StatePool()
    epoch = fresh.ledger.claim(range(len(chain)))
    blocks = fresh.ledger.restore(epoch, None, list(enumerate(chain)))
    fresh.ledger.end_epoch(epoch)
    check_integrity(fresh.ledger)
    assert [block.page for block in blocks] == [False, False, False, True, True]
    assert fresh.hit(1, 2, 3) == 3


def test_a_pinned_prefix_keeps_its_state() -> None:
    """A prefix pin marks the state after its last block, whichever comes first."""
    pool = StatePool(num_slots=40, percent=10, pins=True)
    table = pool.ledger.prefix_pins
    assert isinstance(table, PrefixPinTable)
    early, late = prompt(1, 2, 3), prompt(4, 4, 4)
    table.pin_prefix(PrefixPinRequest("a", "early", early[-1], 3, 10.0), 0.0)
    pool.serve(1, 2, 3)
    pool.serve(4, 4, 4)
    table.pin_prefix(PrefixPinRequest("a", "late", late[-1], 3, 10.0), 0.0, late)
    for first in range(10, 20):
        pool.serve(first, 1, 1)
    pool.need(30)
    assert pool.hit(1, 2, 3) == pool.hit(4, 4, 4) == 3
    assert {pin.blocks for pin in table.of("a")} == {3}
    # More than that is needed: the states go first, and then the blocks.
    pool.need(33)
    assert len(pool.ledger.tree.by_hash) == 7
    pool.need(40)
    assert not pool.ledger.tree.by_hash
    pool.serve(1, 2, 3)
    pool.need(34)
    assert pool.hit(1, 2, 3) == 3
    table.expire(11.0)
    check_integrity(pool.ledger)
