"""Single rules of StateEviction. Integrity is checked after each text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from pillion.kvstore.hashing import chain_hashes, split_hashes, state_page
from pillion.kvstore.ledger import state_eviction
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import Ledger, PoolShares, TicketState
from pillion.kvstore.ledger.pin_table import PrefixPinRequest
from pillion.kvstore.ledger.state_eviction import MIN_HIT_RATE, StateKind
from pillion.v1.kvnode_pb2 import CommitRun


def prompt(*tokens: int) -> list[bytes]:
    return split_hashes(chain_hashes(bytes(32), tokens, 1))


class LedgerWithStates:
    """A ledger with one worker, whose texts leave states of ``pages`` pages; a block has one token."""

    def __init__(self, percent: int = 100, pages: int = 2, num_slots: int = 100) -> None:
        self.ledger = Ledger(itertools.count(1).__next__, 0, PoolShares(75, 50, percent))
        self.ledger.shape(num_slots)
        self.pages = pages
        self.worker = self.ledger.attach("w", "decode")
        self.nonces = itertools.count(1)

    def open(self, *tokens: int, states: Sequence[int] = ()) -> TicketState:
        """Serve a text that leaves states after the given numbers of its blocks."""
        hashes = prompt(*tokens)
        ticket = self.ledger.admit(self.worker, next(self.nonces), hashes, len(hashes), self.pages)
        assert ticket is not None
        self.commit(ticket, hashes[ticket.blocks :])
        for blocks in states:
            self.commit_state(ticket, hashes[blocks - 1], range(self.pages))
        return ticket

    def commit_state(self, ticket: TicketState, after: bytes, pages: Sequence[int]) -> None:
        self.commit(ticket, [state_page(after, page) for page in pages], after)

    def commit(self, ticket: TicketState, hashes: Sequence[bytes], after: bytes = b"") -> None:
        if hashes:
            slots = self.ledger.lease_some(self.worker, ticket.ticket_id, len(hashes))
            run = CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(hashes), after=after)
            [result] = self.ledger.commit(self.worker, [run])
            assert not result.refusal
            self.ledger.return_slots(self.worker, [slot for slot in slots if slot not in result.slots])
        check_integrity(self.ledger)

    def close(self, ticket: TicketState) -> None:
        self.ledger.release(self.worker, [ticket.ticket_id])
        check_integrity(self.ledger)

    def serve(self, *tokens: int, states: Sequence[int] | None = None) -> int:
        """Serve a text, which leaves a state at its end unless ``states`` says otherwise; return its known blocks."""
        ticket = self.open(*tokens, states=[len(tokens)] if states is None else states)
        self.close(ticket)
        return ticket.known_blocks

    def evict(self, blocks: int) -> list[bytes]:
        """Evict blocks, which the policy must have listed first. Return their hashes."""
        listed = [block.hash for block in self.ledger.tree.policy][:blocks]
        self.ledger.drain_events()
        slots = self.ledger.lease(self.worker, len(self.ledger.free) + blocks)
        self.ledger.return_slots(self.worker, slots)
        check_integrity(self.ledger)
        evicted = [event.block_hash for event in self.ledger.drain_events()]
        assert evicted == listed
        return evicted

    def last_page(self, *tokens: int) -> bytes:
        return state_page(prompt(*tokens)[-1], self.pages - 1)


@pytest.mark.parametrize("hit", [True, False])
def test_counts_of_a_kind_are_halved_at_256(hit: bool) -> None:
    def counted(one: int, other: int) -> tuple[int, int]:
        """Count one more, and return both counts in the order of the arguments."""
        kind = StateKind(one, other) if hit else StateKind(other, one)
        kind.count(hit=hit)
        return (kind.hits, kind.misses) if hit else (kind.misses, kind.hits)

    assert counted(200, 55) == (201, 55)
    assert counted(201, 55) == (101, 27)
    assert counted(55, 201) == (28, 100)
    assert counted(1, 255) == (2, 127)
    assert counted(255, 1) == (128, 1)


def test_the_hit_rate_of_a_kind_has_a_minimum() -> None:
    assert StateKind().hit_rate == 1 / 2
    assert StateKind(1, 99).hit_rate == MIN_HIT_RATE


def test_a_state_hit_twice_is_a_branch_point() -> None:
    """Also after it was evicted."""
    pool = LedgerWithStates()
    for text in ([1, 2, 3], [5, 6, 7]):
        pool.serve(*text)
        pool.serve(*text, 8, states=[])
    pool.serve(1, 2, 3, 9, states=[])
    pool.evict(pool.ledger.tree.idle)
    assert [pool.serve(1, 2, 3, 4, states=[]), pool.serve(5, 6, 7, 4, states=[])] == [3, 0]


def test_a_branch_point_before_the_known_blocks_is_not_named() -> None:
    pool = LedgerWithStates()
    pool.serve(1, 2, 3, 4, states=[])
    pool.serve(1, 2, 9, states=[])
    assert pool.serve(1, 2, 3, 4, states=[]) == 4


@pytest.mark.parametrize(("limit", "known"), [(2, [2, 0, 2]), (3, [2, 2, 2])])
def test_the_least_recent_branch_points_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, limit: int, known: list[int]
) -> None:
    monkeypatch.setattr(state_eviction, "MAX_BRANCH_POINTS", limit)
    pool = LedgerWithStates()
    for first in (1, 2):
        pool.serve(first, 1, 1, states=[])
        pool.serve(first, 1, 2, states=[])
    pool.serve(1, 1, 3, states=[])
    pool.serve(3, 1, 1, states=[])
    pool.serve(3, 1, 2, states=[])
    pool.evict(pool.ledger.tree.idle)
    assert [pool.serve(first, 1, 5, states=[]) for first in (1, 2, 3)] == known


def test_blocks_from_before_the_first_state_are_useless() -> None:
    pool = LedgerWithStates()
    pool.serve(1, 2, states=[])
    pool.serve(1, 3, states=[])
    pool.serve(5, 6)
    assert set(pool.evict(3)) == {*prompt(1, 2), *prompt(1, 3)}


@pytest.mark.parametrize("pages", [[0], [0, 1]])
def test_a_state_is_useless_until_all_its_pages_are_back(pages: list[int]) -> None:
    pool = LedgerWithStates(pages=3)
    pool.serve(1)
    assert pool.evict(2) == [state_page(prompt(1)[0], 2), state_page(prompt(1)[0], 1)]
    pool.serve(9)
    ticket = pool.open(1)
    pool.commit_state(ticket, prompt(1)[0], pages)
    pool.close(ticket)
    assert pool.evict(len(pages)) == [state_page(prompt(1)[0], page) for page in reversed(pages)]


def test_a_pin_of_the_first_page_does_not_protect_the_last() -> None:
    pool = LedgerWithStates()
    pool.serve(1)
    ticket = pool.ledger.pin_chain(pool.worker, 0, prompt(1))
    pool.commit_state(ticket, prompt(1)[0], [0])
    assert pool.ledger.tree.idle == 1
    assert pool.evict(1) == [pool.last_page(1)]


@pytest.mark.parametrize("prefix_pin", [False, True])
def test_a_protected_block_is_not_useless_without_children(prefix_pin: bool) -> None:
    pool = LedgerWithStates()
    pool.serve(5)
    pool.serve(1, 2, 3, states=[])
    hashes = prompt(1, 2)
    if prefix_pin:
        pool.ledger.prefix_pins.pin_prefix(PrefixPinRequest("owner", "name", hashes[-1], 2, 10.0), 0.0, hashes)
    else:
        pool.ledger.pin_chain(pool.worker, 0, hashes)
    check_integrity(pool.ledger)
    assert pool.evict(2) == [prompt(1, 2, 3)[2], pool.last_page(5)]


def test_useless_blocks_are_evicted_before_a_full_share_of_states() -> None:
    """With one more state, a state is evicted first."""
    pool = LedgerWithStates(percent=2)
    pool.serve(1)
    pool.serve(2, 2, states=[])
    assert pool.evict(1) == prompt(2, 2)[1:]
    pool.serve(3)
    assert pool.evict(1) == [pool.last_page(1)]


def chain(first: int, blocks: int) -> list[int]:
    """Return the tokens of a text of ``blocks`` blocks, which shares none with texts of other first tokens."""
    return [first, *range(1, blocks)]


def test_the_square_of_the_saved_blocks_counts() -> None:
    """A state of n blocks at a chain's end saves n / (n + 2) blocks per block. By squares, 4 / 6 at rank 1 is less than
    2 / 4 at rank 2, and by cubes more. It equals 1 / 3 at rank 4, and the older state is evicted."""
    for texts in ((4, 2), (4, 10, 10, 1)):
        pool = LedgerWithStates()
        for first, blocks in enumerate(texts, 10):
            pool.serve(*chain(first, blocks))
        assert pool.evict(1) == [pool.last_page(*chain(10, 4))]


@pytest.mark.parametrize(("limit", "victim"), [(2, chain(10, 10)), (3, chain(30, 1))])
def test_a_search_examines_a_limited_number_of_states(
    monkeypatch: pytest.MonkeyPatch, limit: int, victim: list[int]
) -> None:
    monkeypatch.setattr(state_eviction, "MAX_EXAMINED", limit)
    pool = LedgerWithStates()
    for first, blocks in ((10, 10), (20, 10), (30, 1)):
        pool.serve(*chain(first, blocks))
    assert pool.evict(1) == [pool.last_page(*victim)]


def test_a_search_goes_on_while_a_later_state_can_have_a_lower_value() -> None:
    """At the lowest hit rate, a state of one block has a lower value than an older one of two."""
    pool = LedgerWithStates()
    for first in range(100, 120):
        pool.serve(first)
    pool.evict(pool.ledger.tree.idle)
    pool.serve(1, 1)
    pool.serve(2)
    assert pool.evict(1) == [pool.last_page(2)]


@pytest.mark.parametrize("percent", [0, 100])
def test_a_gap_grows_once_a_page_of_the_state_before_it_is_evicted(percent: int) -> None:
    """The state of two blocks at a chain's end is older than the state whose gap grows from one block to two."""
    pool = LedgerWithStates(percent)
    ticket = pool.open(1, 2, states=[1, 2])
    pool.serve(7, 8)
    pool.close(ticket)
    ends = [pool.last_page(1), pool.last_page(7, 8), pool.last_page(1, 2)]
    assert [block for block in pool.evict(pool.ledger.tree.idle) if block in ends] == ends


def test_hits_raise_the_value_of_a_kind() -> None:
    """A state whose chain continues is older than one at a chain's end, and saves more."""
    for hits, victim in ((0, chain(10, 8)), (8, chain(20, 5))):
        pool = LedgerWithStates()
        for first in range(100, 100 + hits):
            pool.serve(first, 1, 1, states=[2])
            pool.serve(first, 1, 2, states=[])
        pool.evict(pool.ledger.tree.idle)
        pool.serve(*chain(10, 9), states=[8])
        pool.serve(*chain(20, 5))
        assert pool.evict(2)[1] == pool.last_page(*victim)


@pytest.mark.parametrize(("whole", "newer_blocks", "newer_is_evicted"), [(True, 1, True), (False, 2, False)])
def test_an_evicted_state_is_one_miss(whole: bool, newer_blocks: int, newer_is_evicted: bool) -> None:
    """Three misses make a hit rate of 1 / 5, for a state at a chain's end that is older than one whose chain continues.
    A miss counts when the first page is evicted."""
    pool = LedgerWithStates()
    for _ in range(3):
        pool.serve(50)
        pool.evict(3 if whole else 1)
    left = pool.ledger.tree.idle
    pool.serve(*chain(10, 10))
    pool.serve(*chain(20, newer_blocks + 1), states=[newer_blocks])
    victim = chain(20, newer_blocks) if newer_is_evicted else chain(10, 10)
    assert pool.evict(left + 2)[-1] == pool.last_page(*victim)
