"""Single rules of the ledger, each isolated from the others. Integrity is checked after each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest

from pillion.errors import Conflict, Internal, InvalidRequest, NotFound, Overloaded
from pillion.kvstore.hashing import chain_hashes, split_hashes, state_page
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import DECODE, FETCH, PREFILL, SESSION, Ledger, TicketState
from pillion.kvstore.ledger.records import IndexEvent
from pillion.v1.kvnode_pb2 import CommitRun, NodeStatus

PAGES = 2

Make = Callable[..., Ledger]
nonces = itertools.count(1)


def prompt(*tokens: int) -> list[bytes]:
    """Return the hashes of a prompt with one token per block."""
    return split_hashes(chain_hashes(bytes(32), tokens, 1))


def pages_of(block_hash: bytes) -> list[bytes]:
    return [state_page(block_hash, page) for page in range(PAGES)]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Ledger] = []

    def make_ledger(num_slots: int = 16, reserve_percent: int = 0) -> Ledger:
        made.append(Ledger(itertools.count(1).__next__, reserve_percent))
        made[-1].shape(num_slots)
        return made[-1]

    yield make_ledger
    for ledger in made:
        check_integrity(ledger)


@pytest.fixture
def ledger(make: Make) -> Ledger:
    return make()


def open_ticket(
    ledger: Ledger, epoch: int, hashes: Sequence[bytes], total_blocks: int, state_pages: int = 0
) -> TicketState:
    ticket = ledger.admit(epoch, next(nonces), hashes, total_blocks, state_pages)
    assert ticket is not None
    return ticket


def commit(ledger: Ledger, worker: int, ticket: TicketState, hashes: Sequence[bytes], after: bytes = b"") -> str:
    """Lease slots for the hashes and commit them; free slots that stay unused. Return the refusal."""
    slots = ledger.lease_some(worker, ticket.ticket_id, len(hashes))
    assert len(slots) == len(hashes)
    run = CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(hashes), after=after)
    [result] = ledger.commit(worker, [run])
    ledger.return_slots(worker, [slot for slot in slots if slot not in result.slots])
    check_integrity(ledger)
    return result.refusal


def cache(ledger: Ledger, *tokens: int, states: Sequence[int] = ()) -> None:
    """Commit a chain, with states after the given numbers of blocks, and release it."""
    worker, hashes = ledger.attach("w", DECODE), prompt(*tokens)
    ticket = open_ticket(ledger, worker, hashes, ledger.tree.longest_prefix(hashes).blocks)
    assert not commit(ledger, worker, ticket, hashes[ticket.blocks :])
    for blocks in states:
        assert not commit(ledger, worker, ticket, pages_of(hashes[blocks - 1]), hashes[blocks - 1])
    ledger.end_epoch(worker)


def attach(ledger: Ledger, *roles: str) -> list[int]:
    return [ledger.attach(f"{role} {number}", role) for number, role in enumerate(roles)]


def test_a_pool_is_empty_until_it_is_shaped_once() -> None:
    ledger = Ledger(itertools.count(1).__next__)
    [prefill] = attach(ledger, PREFILL)
    assert ledger.status() == NodeStatus(holders=1)
    assert ledger.lease(prefill, 1) == ()
    ledger.pin_chain(prefill, 1, [])
    assert ledger.shortage([], 0) == 0
    ledger.shape(200)
    assert ledger.decode_reserve == 20, "10 % by default"
    with pytest.raises(Internal):
        ledger.shape(200)


def test_status_counts_blocks_and_events_name_them(make: Make) -> None:
    ledger = make(6)
    cache(ledger, 1, 2)
    cache(ledger, 3, 4)
    worker, gateway = attach(ledger, DECODE, SESSION)
    open_ticket(ledger, gateway, prompt(3, 4), 3)
    ledger.lease(worker, 2)
    assert ledger.status() == NodeStatus(
        total_blocks=6,
        free_blocks=0,
        leased_blocks=2,
        committed_blocks=4,
        pinned_blocks=2,
        reserved_blocks=1,
        tickets=1,
        holders=2,
        committed_blocks_ever=4,
    )
    ledger.lease(worker, 1)
    assert (ledger.status().committed_blocks, ledger.status().evicted_blocks) == (3, 1)
    (first, second), (third, fourth) = prompt(1, 2), prompt(3, 4)
    assert ledger.drain_events() == [
        IndexEvent(first, here=True, segment=first, parent=b""),
        IndexEvent(second, here=True, segment=first, parent=first),
        IndexEvent(third, here=True, segment=third, parent=b""),
        IndexEvent(fourth, here=True, segment=third, parent=third),
        IndexEvent(second, here=False, segment=first),
    ]


def test_a_fenced_component_is_named_until_its_next_process_attaches(ledger: Ledger) -> None:
    first, _, third = (ledger.attach(name, DECODE) for name in "abc")
    for epoch in (first, third):
        ledger.fence(epoch)
    assert ledger.status().fenced_components == ["a", "c"]
    ledger.attach("a", DECODE)
    assert ledger.status().fenced_components == ["c"]


def test_only_unfenced_workers_that_have_called_are_overdue(ledger: Ledger) -> None:
    loading, worker = attach(ledger, DECODE, DECODE)
    ledger.touch(worker, 0.0)
    ledger.restart_silence_timers(1.0)
    assert ledger.overdue(9.0, 5.0) == [worker]
    ledger.fence(worker)
    assert ledger.overdue(9.0, 5.0) == []
    ledger.touch(loading, 2.0)
    assert ledger.overdue(9.0, 5.0) == [loading]
    ledger.end_epoch(worker)
    ledger.fence(worker)
    with pytest.raises(NotFound):
        ledger.touch(worker, 3.0)


def test_a_fence_cancels_reservations_that_no_other_holder_can_use(ledger: Ledger) -> None:
    first, second, decode = attach(ledger, PREFILL, PREFILL, DECODE)
    ticket = open_ticket(ledger, first, prompt(1), 4)
    for worker in (second, decode):
        ledger.adopt(worker, ticket.ticket_id, 0)
    ledger.fence(first)
    assert ledger.reserved == 4
    ledger.fence(second)
    assert ledger.reserved == 0


def test_slots_returned_to_a_ticket_without_a_prefill_holder_are_not_reserved(ledger: Ledger) -> None:
    prefill, decode = attach(ledger, PREFILL, DECODE)
    ticket = open_ticket(ledger, prefill, prompt(1), 4)
    slots = ledger.adopt(prefill, ticket.ticket_id, 3).leased_slots
    ledger.adopt(decode, ticket.ticket_id, 0)
    ledger.release(prefill, [ticket.ticket_id])
    ledger.return_slots(prefill, slots)
    assert (ledger.reserved, len(ledger.free)) == (0, 16)


def test_admission_counts_pinned_blocks_once_and_leaves_the_decode_reserve(make: Make) -> None:
    ledger = make(10, 30)
    [gateway] = attach(ledger, SESSION)
    assert ledger.shortage(prompt(1), 10) == 0, "without tickets, a prompt may use the whole pool"
    open_ticket(ledger, gateway, prompt(1), 4)
    assert [ledger.shortage(prompt(2), blocks) for blocks in (3, 4)] == [0, 1]
    full = make(4)
    cache(full, 1, 2, 3, 4)
    [gateway] = attach(full, SESSION)
    for _ in range(2):
        assert full.shortage(prompt(1, 2, 3, 4), 4) == 0
        open_ticket(full, gateway, prompt(1, 2, 3, 4), 4)


def test_known_blocks_are_set_only_for_models_with_states(ledger: Ledger) -> None:
    [gateway] = attach(ledger, SESSION)
    tickets = [ledger.admit(gateway, next(nonces), prompt(1, 2, 3), 3, pages, 2) for pages in (0, PAGES)]
    assert [ledger.chain_of(ticket).known_blocks for ticket in tickets if ticket is not None] == [0, 2]


def test_a_flow_claims_its_tickets_requested_blocks_or_longer_chains(ledger: Ledger) -> None:
    [worker] = attach(ledger, DECODE)
    for flow_key, total_blocks in ((b"a", 1), (b"a", 4), (b"b", 2)):
        ticket = ledger.admit(worker, next(nonces), [], total_blocks, flow_key=flow_key)
        assert ticket is not None
        assert not commit(ledger, worker, ticket, prompt(total_blocks, 7, 7))
    assert ledger.claims() == {b"a": 3 + 4, b"b": 3}


def lose_race(ledger: Ledger) -> tuple[int, TicketState]:
    """In a pool of four, let a worker lose a commit race, so that two slots are reserved but not available. Return the
    epoch of another worker, and the ticket that reserves them."""
    winner, loser, other = attach(ledger, DECODE, SESSION, SESSION)
    tickets = [open_ticket(ledger, epoch, [], 2) for epoch in (winner, loser)]
    slots = [
        ledger.adopt(epoch, ticket.ticket_id, 2).leased_slots
        for epoch, ticket in zip((winner, loser), tickets, strict=True)
    ]
    runs = [
        CommitRun(ticket_id=ticket.ticket_id, slots=own, block_hashes=b"".join(prompt(1, 2)))
        for ticket, own in zip(tickets, slots, strict=True)
    ]
    ledger.commit(winner, runs[:1])
    ledger.release(winner, [tickets[0].ticket_id])
    ticket = open_ticket(ledger, other, [], 2)
    ledger.commit(loser, runs[1:])
    return other, ticket


def test_slots_of_a_lost_race_are_missing_until_they_are_returned(make: Make) -> None:
    ledger = make(4)
    other, ticket = lose_race(ledger)
    check_integrity(ledger)
    assert (ledger.available, ledger.reserved, ledger.unreserved) == (0, 2, 0)
    assert ledger.lease_some(other, ticket.ticket_id, 2) == ()
    with pytest.raises(Overloaded):
        ledger.adopt(other, ticket.ticket_id, 2)


def test_a_lease_does_not_use_reservations_of_other_tickets(make: Make) -> None:
    ledger = make(4)
    gateway, worker = attach(ledger, SESSION, DECODE)
    ticket, _ = (open_ticket(ledger, gateway, [], 2) for _ in range(2))
    with pytest.raises(Overloaded):
        ledger.adopt(worker, ticket.ticket_id, 3)
    assert [len(ledger.lease_some(worker, ticket.ticket_id, blocks)) for blocks in (1, 9)] == [1, 1]


def test_a_ticket_extends_along_its_own_chain_only(ledger: Ledger) -> None:
    cache(ledger, 1, 2)
    gateway, worker = attach(ledger, SESSION, DECODE)
    ticket = open_ticket(ledger, gateway, prompt(1, 2), 2)
    assert ledger.extend(gateway, ticket.ticket_id, prompt(1, 2)).blocks == 2
    with pytest.raises(InvalidRequest, match="another chain"):
        ledger.extend(gateway, ticket.ticket_id, prompt(1))
    forger = open_ticket(ledger, worker, prompt(1, 2), 2)
    assert not commit(ledger, worker, forger, prompt(1, 9)[1:])
    short = open_ticket(ledger, gateway, prompt(1), 1)
    assert ledger.extend(gateway, short.ticket_id, prompt(1, 9)).blocks == 1, "its parent is another block"


@pytest.mark.parametrize(
    ("reserved", "pinned", "free", "blocks"), [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1)]
)
def test_a_block_is_pinned_from_the_reservation_or_what_is_unreserved(
    make: Make, reserved: int, pinned: int, free: int, blocks: int
) -> None:
    """Unless another ticket protects the block already."""
    ledger = make(4)
    gateway, other = attach(ledger, SESSION, SESSION)
    ticket = open_ticket(ledger, gateway, prompt(1), reserved)
    cache(ledger, 1)
    if pinned:
        open_ticket(ledger, other, prompt(1), 1)
    open_ticket(ledger, other, [], ledger.unreserved - free)
    assert ledger.unreserved == free
    assert ledger.extend(gateway, ticket.ticket_id, prompt(1)).blocks == blocks


@pytest.mark.parametrize(
    ("pinned", "reserved", "state", "blocks", "left"),
    [
        (0, 4, 3, 3, 1),
        (0, 2, 3, 3, 0),
        (0, 0, 3, 0, 0),
        (2, 4, 3, 3, 3),
        (2, 0, 3, 2, 0),
        (3, 4, 2, 3, 4),
    ],
)
def test_a_ticket_moves_to_a_later_state_for_its_reserved_slots(
    ledger: Ledger, pinned: int, reserved: int, state: int, blocks: int, left: int
) -> None:
    """``pinned`` blocks and ``reserved`` slots become ``blocks`` and ``left``; the state follows ``state`` blocks."""
    [worker] = attach(ledger, DECODE)
    hashes = prompt(1, 2, 3, 4)
    ticket = open_ticket(ledger, worker, [], pinned + reserved, PAGES)
    if pinned:
        assert not commit(ledger, worker, ticket, hashes[:pinned])
        assert ticket.reserved == reserved
    cache(ledger, 1, 2, 3, 4, states=[state])
    ledger.extend(worker, ticket.ticket_id, hashes)
    assert (ticket.blocks, ticket.reserved) == (blocks, left)
    assert (ticket.state is not None) == (blocks > pinned)
    check_integrity(ledger)
    ledger.release(worker, [ticket.ticket_id])
    assert ledger.tree.protected == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_a_later_state_is_pinned_if_all_reservations_are_still_covered(make: Make, missing: int) -> None:
    """It takes two blocks and two pages, of which two use up reserved slots and two need unreserved ones."""
    ledger = make(12)
    [gateway] = attach(ledger, SESSION)
    ticket = open_ticket(ledger, gateway, [], 3, PAGES)
    cache(ledger, 1, 2, states=[2])
    open_ticket(ledger, gateway, [], ledger.unreserved - PAGES + missing)
    ledger.extend(gateway, ticket.ticket_id, prompt(1, 2))
    assert (ticket.blocks, ticket.reserved) == ((0, 3) if missing else (2, 1))


def test_only_active_holders_use_a_ticket(ledger: Ledger) -> None:
    gateway, worker, other = attach(ledger, SESSION, DECODE, DECODE)
    ticket = open_ticket(ledger, gateway, prompt(1, 2), 9)
    for blocks in range(3):
        if blocks:
            assert not commit(ledger, worker, ticket, prompt(1, 2)[blocks - 1 : blocks])
        slots = ledger.pinned_slots(gateway, ticket.ticket_id)
        assert slots == set(ledger.chain_of(ticket).chain_slots)
        assert len(slots) == blocks
        assert ledger.pinned_slots(gateway, ticket.ticket_id) is slots, "cached"
    for epoch, ticket_id in ((other, ticket.ticket_id), (gateway, 999)):
        with pytest.raises(NotFound):
            ledger.held(epoch, ticket_id)
    slot = ledger.lease(other, 1)
    [result] = ledger.commit(
        other, [CommitRun(ticket_id=ticket.ticket_id, slots=slot, block_hashes=prompt(1, 2, 3)[2])]
    )
    assert "not held" in result.refusal
    ledger.fence(worker)
    with pytest.raises(Conflict):
        ledger.held(worker, ticket.ticket_id)


def test_a_release_by_nonce_frees_the_slots_leased_with_the_ticket(ledger: Ledger) -> None:
    [worker] = attach(ledger, PREFILL)
    kept, lost = (open_ticket(ledger, worker, [], 3) for _ in range(2))
    stay = [*ledger.adopt(worker, kept.ticket_id, 2).leased_slots, *ledger.lease(worker, 1)]
    ledger.adopt(worker, lost.ticket_id, 2)
    nonce = lost.opener[1]
    ledger.release(worker, [lost.ticket_id], [nonce, nonce])
    assert set(ledger.holders[worker].leased) == set(stay)
    assert list(ledger.tickets) == [kept.ticket_id]
    assert len(ledger.free) == 16 - len(stay)


def test_kept_blocks_are_claimed_and_restored(make: Make) -> None:
    ledger = make(3)
    hashes = prompt(1, 2, 3)
    [worker] = attach(ledger, DECODE)
    [slot] = ledger.lease(worker, 1)
    with pytest.raises(Internal):
        ledger.claim([slot])
    ledger.return_slots(worker, [slot])
    epoch = ledger.claim(range(3))
    assert ledger.free == []
    [first] = ledger.restore(epoch, None, [(0, hashes[0])])
    assert ledger.restore(epoch, None, []) == ledger.restore(epoch, first, []) == []
    check_integrity(ledger)
    ledger.restore(epoch, first, [(1, hashes[1]), (2, hashes[2])])
    check_integrity(ledger)
    assert ledger.tree.idle == 3
    assert [(event.block_hash, event.parent) for event in ledger.drain_events()] == [
        (hashes[0], b""),
        (hashes[1], hashes[0]),
        (hashes[2], hashes[1]),
    ]


def test_a_new_block_does_not_precede_a_committed_one_in_a_run(ledger: Ledger) -> None:
    """A run that starts within the chain may continue with committed blocks."""
    cache(ledger, 1, 2, 3, 4)
    [worker] = attach(ledger, DECODE)
    ticket = open_ticket(ledger, worker, prompt(1, 2), 2)
    third, fourth, new = *prompt(1, 2, 3, 4)[2:], prompt(1, 2, 9)[2]
    for run in ([new, third], [third, new, fourth]):
        assert "another parent" in commit(ledger, worker, ticket, run)
    assert ticket.blocks == 2
    assert not commit(ledger, worker, ticket, prompt(1, 2, 3)[1:])
    assert ticket.blocks == 3


def test_a_state_follows_the_tickets_chain_and_has_its_hashes(ledger: Ledger) -> None:
    cache(ledger, 1, 2, 3)
    [worker] = attach(ledger, DECODE)
    ticket = open_ticket(ledger, worker, prompt(1, 2), 2)
    second, third = prompt(1, 2, 3)[1:]
    assert "ticket's chain" in commit(ledger, worker, ticket, pages_of(third), third)
    assert "wrong hash" in commit(ledger, worker, ticket, [pages_of(second)[0], pages_of(third)[1]], second)
    assert not commit(ledger, worker, ticket, pages_of(second), second)


@pytest.mark.parametrize(("role", "pages"), [(FETCH, [False, True, True]), (DECODE, [False, False, False])])
def test_pages_of_fetched_runs_are_found_by_their_hashes(ledger: Ledger, role: str, pages: list[bool]) -> None:
    [epoch] = attach(ledger, role)
    run = [*prompt(1), *pages_of(prompt(1)[0])]
    assert not commit(ledger, epoch, open_ticket(ledger, epoch, [], 3), run)
    assert [ledger.tree.by_hash[block_hash].page for block_hash in run] == pages
