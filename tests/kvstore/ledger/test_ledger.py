"""The ledger's rules one by one. Integrity is checked after each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from pillion.errors import Conflict, InvalidRequest, NotFound, Overloaded
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.integrity import IntegrityError, check_integrity
from pillion.kvstore.ledger.ledger import DECODE, FETCH, PREFILL, SESSION, Ledger, TicketState
from pillion.v1.kvnode_pb2 import CommitRun

ROOT = bytes(32)


def prompt(*tokens: int) -> list[bytes]:
    """Return the hashes of a prompt with one token per block."""
    return split_hashes(chain_hashes(ROOT, tokens, 1))


def make(num_slots: int, reserve_percent: int = 0) -> Ledger:
    ledger = Ledger(itertools.count(1).__next__, reserve_percent)
    ledger.shape(num_slots)
    return ledger


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = make(16)
    yield made
    check_integrity(made)


nonces = itertools.count(1)


def open_ticket(ledger: Ledger, epoch: int, hashes: list[bytes], total_blocks: int | None = None) -> TicketState:
    total = total_blocks or len(hashes) + 1
    ticket = ledger.admit(epoch, next(nonces), hashes, total)
    assert ticket is not None
    return ticket


def fill(ledger: Ledger, worker: int, ticket: TicketState, hashes: list[bytes]) -> tuple[int, ...]:
    """Lease and commit the blocks of ``hashes`` after the ticket's last block; return the slots that stay."""
    slots = ledger.adopt(worker, ticket.ticket_id, len(hashes)).leased_slots
    [result] = ledger.commit(
        worker, [CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(hashes))]
    )
    assert not result.refusal
    return tuple(result.slots)


def cache(ledger: Ledger, *tokens: int) -> None:
    """Commit a chain and release it."""
    gateway, worker = ledger.attach("g", SESSION), ledger.attach("w", "decode")
    hashes = prompt(*tokens)
    ticket = open_ticket(ledger, gateway, hashes)
    fill(ledger, worker, ticket, hashes[ticket.blocks :])
    ledger.end_epoch(worker)
    ledger.end_epoch(gateway)


def test_cached_blocks_are_pinned_and_the_rest_is_reserved(ledger: Ledger) -> None:
    cache(ledger, 1, 2, 3)
    gateway = ledger.attach("g", SESSION)
    ticket = open_ticket(ledger, gateway, prompt(1, 2, 9, 9), 6)
    assert (ticket.blocks, ticket.reserved) == (2, 4)
    books = ledger.status()
    assert (books.pinned_blocks, books.reserved_blocks, books.committed_blocks) == (2, 4, 3)
    assert ledger.available == 14


def test_chains_are_evicted_oldest_first_from_the_tail(ledger: Ledger) -> None:
    cache(ledger, 1, 2, 3)
    cache(ledger, 4, 5)
    cache(ledger, 1, 2, 6)  # 1 and 2 are young again
    ledger.drain_events()
    worker = ledger.attach("w", "decode")
    assert len(ledger.lease(worker, 99)) == 16
    order = [event.block_hash for event in ledger.drain_events()]
    assert order == [prompt(1, 2, 3)[2], *reversed(prompt(4, 5)), *reversed(prompt(1, 2, 6))]


def test_pinned_chains_are_not_evicted(ledger: Ledger) -> None:
    cache(ledger, 1, 2, 3)
    gateway, worker = ledger.attach("g", SESSION), ledger.attach("w", "decode")
    ticket = open_ticket(ledger, gateway, prompt(1, 2, 3))
    assert len(ledger.lease(worker, 99)) == 16 - 3 - 1, "all but the pinned and the reserved"
    assert ledger.tree.longest_prefix(prompt(1, 2, 3)).blocks == 3
    assert ledger.adopt(worker, ticket.ticket_id, 1).last_hash == prompt(1, 2, 3)[-1]


def test_the_loser_of_a_commit_race_gets_the_winners_slot(ledger: Ledger) -> None:
    hashes = prompt(1, 2, 3)
    gateway = ledger.attach("g", SESSION)
    workers = [ledger.attach(name, "prefill") for name in ("a", "b")]
    tickets = [open_ticket(ledger, gateway, hashes) for _ in workers]
    own = [ledger.adopt(w, t.ticket_id, 3).leased_slots for w, t in zip(workers, tickets, strict=True)]
    runs = [
        CommitRun(ticket_id=t.ticket_id, slots=s, block_hashes=b"".join(hashes))
        for t, s in zip(tickets, own, strict=True)
    ]
    [first], [second] = (ledger.commit(w, [run]) for w, run in zip(workers, runs, strict=True))
    assert first.slots == second.slots == own[0]
    check_integrity(ledger)
    assert ledger.status().leased_blocks == 3, "the loser's slots stay its own until it returns them"
    ledger.release(gateway, [tickets[0].ticket_id])
    ledger.end_epoch(workers[0])
    assert ledger.tree.protected == 3, "the loser's ticket pins the winner's blocks"
    ledger.return_slots(workers[1], own[1])
    assert ledger.reserved == 1, "a lost slot does not go back to a reservation"


def test_a_late_second_worker_commits_blocks_of_the_same_ticket(ledger: Ledger) -> None:
    """A stolen prefill range: both workers commit it, the slow one last and a bit further."""
    hashes = prompt(1, 2, 3, 4)
    gateway = ledger.attach("g", SESSION)
    fast, slow = (ledger.attach(name, "prefill") for name in ("fast", "slow"))
    ticket = open_ticket(ledger, gateway, hashes)
    late = ledger.adopt(slow, ticket.ticket_id, 3).leased_slots
    stay = fill(ledger, fast, ticket, hashes[:3])
    [result] = ledger.commit(
        slow, [CommitRun(ticket_id=ticket.ticket_id, slots=late, block_hashes=b"".join(hashes[1:4]))]
    )
    assert tuple(result.slots) == (*stay[1:], late[2])
    assert ticket.blocks == 4
    early = ledger.adopt(slow, ticket.ticket_id, 2).leased_slots
    [result] = ledger.commit(
        slow, [CommitRun(ticket_id=ticket.ticket_id, slots=early, block_hashes=b"".join(hashes[:2]))]
    )
    assert tuple(result.slots) == stay[:2]
    assert ticket.blocks == 4, "a run that ends inside the chain does not shorten it"


def test_a_pinned_cached_prefix_is_not_evictable() -> None:
    ledger = make(4)
    cache(ledger, 1, 2, 3)
    assert ledger.shortage(prompt(1, 2, 3), 4) == 0
    ledger.lease(ledger.attach("w", "decode"), 1)
    assert ledger.available == 3
    assert ledger.shortage(prompt(1, 2, 3), 4) == 1
    assert ledger.shortage(prompt(9, 9), 3) == 0
    check_integrity(ledger)


FORKS = {
    "new after the middle": [prompt(1, 2)[1], prompt(1, 2, 9)[2]],
    "known after a new one": [prompt(9)[0], prompt(1, 2, 3)[2]],
    "off the chain": prompt(1, 2, 3, 5)[1:],
    "a gap in front": [prompt(1, 2, 3, 5)[3]],
    "a gap inside": [prompt(1)[0], prompt(1, 2, 4)[2]],
}


@pytest.mark.parametrize("run", FORKS.values(), ids=FORKS)
def test_forked_runs_are_rejected_whole(ledger: Ledger, run: list[bytes]) -> None:
    """A fork that puts a block under a foreign parent is refused: the ticket holds 1 2 4, and 1 2 3 5 is cached."""
    cache(ledger, 1, 2, 3, 5)
    gateway, worker = ledger.attach("g", SESSION), ledger.attach("w", "decode")
    ticket = open_ticket(ledger, gateway, prompt(1, 2, 4))
    fill(ledger, worker, ticket, prompt(1, 2, 4)[2:])
    slots = ledger.lease(worker, len(run))
    before = ledger.status()
    [result] = ledger.commit(worker, [CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(run))])
    assert result.refusal
    assert ledger.status() == before


def test_a_block_under_a_wrong_parent_is_never_found(ledger: Ledger) -> None:
    """The node cannot check a new hash against tokens; a forged block must not become part of another's chain."""
    gateway, worker = ledger.attach("g", SESSION), ledger.attach("w", "decode")
    ticket = open_ticket(ledger, gateway, prompt(1, 2), 9)
    fill(ledger, worker, ticket, [*prompt(1, 2), prompt(1, 9)[1]])
    assert open_ticket(ledger, gateway, prompt(1, 9), 3).blocks == 1


def test_wrong_runs_are_rejected(ledger: Ledger) -> None:
    gateway, worker, other = (ledger.attach(n, r) for n, r in (("g", SESSION), ("w", "decode"), ("o", "decode")))
    hashes = prompt(1, 2)
    ticket = open_ticket(ledger, gateway, hashes)
    slots = ledger.adopt(worker, ticket.ticket_id, 2).leased_slots
    packed = b"".join(hashes)
    bad = [
        (other, CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=packed)),
        (worker, CommitRun(ticket_id=99, slots=slots, block_hashes=packed)),
        (worker, CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=packed[:-1])),
        (worker, CommitRun(ticket_id=ticket.ticket_id, slots=slots[:1], block_hashes=packed)),
        (worker, CommitRun(ticket_id=ticket.ticket_id, slots=(), block_hashes=b"")),
        (worker, CommitRun(ticket_id=ticket.ticket_id, slots=(slots[0], slots[0]), block_hashes=packed)),
        (worker, CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=hashes[0] * 2)),
        (worker, CommitRun(ticket_id=ticket.ticket_id, slots=(slots[0], 15), block_hashes=packed)),
    ]
    for epoch, run in bad:
        [result] = ledger.commit(epoch, [run])
        assert result.refusal
        assert not result.slots
    assert ledger.status().leased_blocks == 2


def test_a_dead_workers_reservation_is_freed(ledger: Ledger) -> None:
    """An admitted prompt can finish whoever dies (I5), even in a full pool."""
    gateway, first, greedy = (ledger.attach(n, r) for n, r in (("g", SESSION), ("w", "prefill"), ("d", "decode")))
    hashes = prompt(1, 2, 3, 4)
    ticket = open_ticket(ledger, gateway, hashes)
    ledger.adopt(first, ticket.ticket_id, 4)
    ledger.lease(greedy, 99)
    ledger.end_epoch(first)
    assert ledger.lease(greedy, 99) == ()
    second = ledger.attach("w2", "prefill")
    fill(ledger, second, ticket, hashes)


def test_slots_returned_by_prefill_are_not_reserved_for_decode(ledger: Ledger) -> None:
    """The decode worker has leased all it needs when the gateway releases the ticket."""
    gateway, prefill, decode = (ledger.attach(name, name) for name in (SESSION, PREFILL, DECODE))
    hashes = prompt(1, 2, 3)
    ticket = open_ticket(ledger, gateway, hashes, 9)
    fill(ledger, prefill, ticket, hashes)
    spare = ledger.adopt(prefill, ticket.ticket_id, 2).leased_slots
    ledger.adopt(decode, ticket.ticket_id, 3)
    ledger.return_slots(prefill, spare)
    assert ledger.reserved == 3
    ledger.release(prefill, [ticket.ticket_id])
    assert ledger.reserved == 3
    ledger.release(gateway, [ticket.ticket_id])
    assert ledger.reserved == 0
    assert ticket.holders == {decode}


def test_adopting_more_than_the_free_slots_is_rejected(ledger: Ledger) -> None:
    gateway, worker = ledger.attach("g", SESSION), ledger.attach("w", "decode")
    ticket = open_ticket(ledger, gateway, prompt(1))
    with pytest.raises(Overloaded):
        ledger.adopt(worker, ticket.ticket_id, 17)
    assert worker not in ticket.holders
    assert len(ledger.adopt(worker, ticket.ticket_id, 16).leased_slots) == 16
    with pytest.raises(NotFound):
        ledger.adopt(worker, 12345, 0)


def test_prefill_leaves_the_decode_reserve() -> None:
    ledger = make(20, reserve_percent=25)
    prefill, decode = ledger.attach("p", "prefill"), ledger.attach("d", "decode")
    assert len(ledger.lease(prefill, 99)) == 15
    assert len(ledger.lease(decode, 99)) == 5
    check_integrity(ledger)


def test_a_fenced_worker_changes_nothing_until_its_exit(ledger: Ledger) -> None:
    gateway, worker = ledger.attach("g", SESSION), ledger.attach("w", "decode")
    hashes = prompt(1, 2, 3)
    ticket = open_ticket(ledger, gateway, hashes)
    fill(ledger, worker, ticket, hashes[:1])
    slots = ledger.lease(worker, 2)
    ledger.fence(worker)
    run = CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(hashes[1:]))
    for call in (
        lambda: ledger.commit(worker, [run]),
        lambda: ledger.lease(worker, 1),
        lambda: ledger.return_slots(worker, slots),
        lambda: ledger.adopt(worker, ticket.ticket_id, 1),
        lambda: ledger.release(worker, [ticket.ticket_id]),
    ):
        with pytest.raises(Conflict, match="fenced"):
            call()
    ledger.release(gateway, [ticket.ticket_id])
    books = ledger.status()
    assert (books.quarantined_blocks, books.pinned_blocks, books.reserved_blocks) == (2, 1, 0)
    greedy = ledger.attach("d", "decode")
    assert len(ledger.lease(greedy, 99)) == 13, "neither quarantined nor pinned slots are reused"
    check_integrity(ledger)
    ledger.drained(worker)
    books = ledger.status()
    assert (books.quarantined_blocks, books.pinned_blocks, books.free_blocks) == (0, 0, 2)
    with pytest.raises(NotFound):
        ledger.lease(worker, 1)


def test_only_a_fenced_epoch_drains(ledger: Ledger) -> None:
    worker = ledger.attach("w", "decode")
    with pytest.raises(Conflict):
        ledger.drained(worker)
    ledger.end_epoch(worker)
    ledger.drained(worker)


def test_workers_without_heartbeats_are_overdue(ledger: Ledger) -> None:
    gateway, loading, worker = (ledger.attach(n, r) for n, r in (("g", SESSION), ("l", "decode"), ("w", "decode")))
    ledger.touch(gateway, 0.0)
    ledger.touch(worker, 0.0)
    assert ledger.overdue(5.0, 5.0) == []
    assert ledger.overdue(5.1, 5.0) == [worker], "neither a gateway nor a worker that never did anything"
    ledger.restart_silence_timers(5.1)
    assert ledger.overdue(10.0, 5.0) == []
    assert loading in ledger.holders


def test_releasing_foreign_slots_is_rejected(ledger: Ledger) -> None:
    a, b = ledger.attach("a", "decode"), ledger.attach("b", "decode")
    slots = ledger.lease(a, 2)
    for epoch, bad in ((b, slots), (a, (*slots, 15)), (a, (slots[0], slots[0]))):
        with pytest.raises(InvalidRequest):
            ledger.return_slots(epoch, bad)
    ledger.return_slots(a, slots)
    assert ledger.status().free_blocks == 16


def test_a_ticket_is_released_by_its_owners_nonce_even_twice(ledger: Ledger) -> None:
    gateway, other = ledger.attach("g", SESSION), ledger.attach("h", SESSION)
    ticket = ledger.admit(gateway, 77, prompt(1), 2)
    assert ticket is not None
    ledger.release(other, [ticket.ticket_id], [77])
    assert ledger.tickets, "not the other's to release"
    ledger.release(gateway, nonces=[77, 78])
    ledger.release(gateway, [ticket.ticket_id], [77])
    assert not ledger.tickets


def test_the_integrity_check_finds_ledger_damage() -> None:
    """The check is worth something only if it fails on a broken ledger."""

    def broken(damage: str) -> Ledger:
        ledger = make(8)
        cache(ledger, 1, 2)
        gateway, worker = ledger.attach("g", SESSION), ledger.attach("w", "decode")
        ticket = open_ticket(ledger, gateway, prompt(1), 3)
        ledger.adopt(worker, ticket.ticket_id, 1)
        check_integrity(ledger)
        names = {"ledger": ledger, "ticket": ticket, "worker": ledger.holders[worker]}
        exec(damage, names)
        return ledger

    damages = {
        "ledger.free.pop()": "has no state",
        "ledger.free.append(ledger.free[0])": "in 2 states",
        "worker.leased[99] = 0": "not of this pool",
        "ledger.tree.protected += 1": "counted as protected",
        "ledger.reserved += 1": "counted as reserved",
        "ticket.last_block.ref_count += 1": "references",
        "ticket.last_block.children += 1": "children",
        "ticket.holders.clear()": "has no holder",
        "ledger.by_opener.clear()": "opener",
        "ledger.tree.policy.pop()": "eviction policy",
        "worker.fenced = True; ticket.holders = {worker.epoch}": "nobody may lease",
        "ticket.reserved += 9; ledger.reserved += 9": "slots are reserved",
    }
    for damage, words in damages.items():
        with pytest.raises(IntegrityError, match=words):
            check_integrity(broken(damage))


def test_a_ticket_extends_over_blocks_committed_by_others(ledger):
    gateway, worker = ledger.attach("g", SESSION), ledger.attach("w", "decode")
    hashes = prompt(1, 2, 3)
    first, second = open_ticket(ledger, gateway, hashes), open_ticket(ledger, gateway, hashes)
    fill(ledger, worker, second, hashes[:2])
    assert ledger.extend(gateway, first.ticket_id, hashes) is first
    assert (first.blocks, first.reserved, ledger.reserved) == (2, 2, 4)
    with pytest.raises(InvalidRequest, match="another chain"):
        ledger.extend(gateway, first.ticket_id, prompt(1, 3))
    with pytest.raises(NotFound):
        ledger.extend(worker, first.ticket_id, hashes)


def test_a_reader_does_not_pin_reserved_blocks():
    ledger = make(4)
    cache(ledger, 1, 2)
    gateway, reader = ledger.attach("g", SESSION), ledger.attach("r", SESSION)
    greedy = open_ticket(ledger, gateway, prompt(9), 4)
    check_integrity(ledger)
    assert ledger.pin_chain(reader, 1, prompt(1, 2)).blocks == 0
    check_integrity(ledger)
    ledger.release(gateway, [greedy.ticket_id])
    ticket = ledger.pin_chain(reader, 2, prompt(1, 2, 3))
    assert (ticket.blocks, ticket.reserved) == (2, 0)
    with pytest.raises(InvalidRequest, match="nonce"):
        ledger.pin_chain(reader, 2, prompt(1))
    ledger.end_epoch(reader)
    assert ledger.status().pinned_blocks == 0
    check_integrity(ledger)


def test_a_fetch_leases_its_reservation_but_not_the_decode_reserve():
    ledger = make(10, reserve_percent=30)
    gateway, fetch = ledger.attach("g", SESSION), ledger.attach("f", FETCH)
    ticket = open_ticket(ledger, gateway, prompt(1, 2, 3), 4)
    # Four were reserved, six are left, three of them are the decodes'.
    assert len(ledger.lease_some(fetch, ticket.ticket_id, 9)) == 7
    assert ledger.lease_some(fetch, ticket.ticket_id, 1) == ()
    ledger.end_epoch(fetch)
    assert (ticket.reserved, len(ledger.free)) == (4, 10)
    with pytest.raises(NotFound):
        ledger.lease_some(gateway, 999, 1)
    check_integrity(ledger)
