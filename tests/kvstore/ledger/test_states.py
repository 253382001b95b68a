"""States in the ledger: pages after a block of a chain, pinned by tickets, evicted before the block, found with it."""

from __future__ import annotations

import itertools

import pytest

from pillion.kvstore.hashing import chain_hashes, split_hashes, state_page
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import Ledger, TicketState
from pillion.v1.kvnode_pb2 import CommitRun, CommitRunResult

PAGES = 3
HASHES = split_hashes(chain_hashes(b"\7" * 32, list(range(24)), 4))


class Node:
    """A ledger with ``slots`` slots and one worker."""

    def __init__(self, slots: int = 24) -> None:
        self.ledger = Ledger(itertools.count(1000).__next__, decode_reserve_percent=0)
        self.ledger.shape(slots)
        self.worker = self.ledger.attach("worker", "decode")
        self.nonces = itertools.count(1)

    def open(self, blocks: int, total: int, pages: int = PAGES) -> TicketState:
        ticket = self.ledger.admit(self.worker, next(self.nonces), HASHES[:blocks], total, pages)
        assert ticket is not None
        check_integrity(self.ledger)
        return ticket

    def commit(self, ticket: TicketState, hashes: list[bytes], after: bytes = b"") -> CommitRunResult:
        slots = self.ledger.lease(self.worker, len(hashes))
        run = CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(hashes), after=after)
        (result,) = self.ledger.commit(self.worker, [run])
        lost = [slot for slot, kept in zip(slots, result.slots or [-1] * len(slots), strict=True) if slot != kept]
        self.ledger.return_slots(self.worker, lost)
        check_integrity(self.ledger)
        return result

    def keep(self, ticket: TicketState, block: int) -> CommitRunResult:
        """Commit the state after a block."""
        return self.commit(ticket, pages_of(block), HASHES[block])

    def release(self, ticket: TicketState) -> None:
        self.ledger.release(self.worker, [ticket.ticket_id])
        check_integrity(self.ledger)


def pages_of(block: int) -> list[bytes]:
    return [state_page(HASHES[block], page) for page in range(PAGES)]


def test_a_hit_ends_with_a_state() -> None:
    node = Node()
    first = node.open(0, 6)
    node.commit(first, HASHES[:5])
    kept = node.keep(first, 2)
    assert not kept.refusal
    node.release(first)
    again = node.open(5, 6)
    assert again.blocks == 3
    adopted = node.ledger.chain_of(again)
    assert list(adopted.state_slots) == list(kept.slots)
    assert len(adopted.chain_slots) == 3
    assert adopted.last_hash == HASHES[2]
    # Without a state nothing is found, and blocks alone are found as before.
    assert node.open(2, 6).blocks == 0
    assert node.open(5, 6, pages=0).blocks == 5


def test_a_ticket_pins_the_last_committed_state() -> None:
    node = Node(11)
    ticket = node.open(0, 0)
    node.commit(ticket, HASHES[:2])
    node.keep(ticket, 0)
    node.keep(ticket, 1)
    assert list(node.ledger.chain_of(ticket).state_slots) == [
        node.ledger.tree.by_hash[page].slot for page in pages_of(1)
    ]
    # All but the first state is protected, and its pages leave from the last one on.
    assert [block.hash for block in node.ledger.tree.policy] == pages_of(0)[::-1]
    node.ledger.lease(node.worker, 4)
    assert pages_of(0)[2] not in node.ledger.tree.by_hash
    check_integrity(node.ledger)


def test_a_state_is_evicted_before_its_block() -> None:
    node = Node(8)
    ticket = node.open(0, 0)
    node.commit(ticket, HASHES[:2])
    node.keep(ticket, 1)
    node.release(ticket)
    left = [block.hash for block in node.ledger.tree.policy]
    assert left == [*pages_of(1)[::-1], HASHES[1], HASHES[0]]
    node.ledger.lease(node.worker, 4)
    assert node.open(2, 3).blocks == 0


def test_the_first_committer_of_a_state_wins() -> None:
    node = Node()
    ticket, other = node.open(0, 3), node.open(0, 3)
    node.commit(ticket, HASHES[:2])
    node.commit(other, HASHES[:2])
    first, second = node.keep(ticket, 1), node.keep(other, 1)
    assert list(first.slots) == list(second.slots)
    node.release(ticket)
    assert list(node.ledger.chain_of(other).state_slots) == list(first.slots)
    node.release(other)
    assert node.ledger.tree.protected == 0


@pytest.mark.parametrize(
    ("hashes", "after", "words"),
    [
        (pages_of(3), HASHES[3], "does not belong to the ticket's chain"),
        (pages_of(1), HASHES[0], "wrong hash"),
        (pages_of(1)[1:], HASHES[1], "wrong hash"),
    ],
)
def test_states_of_other_chains_are_rejected(hashes: list[bytes], after: bytes, words: str) -> None:
    node = Node()
    ticket = node.open(0, 3)
    node.commit(ticket, HASHES[:2])
    assert words in node.commit(ticket, hashes, after).refusal
    assert ticket.state is None


def test_only_a_state_after_the_whole_chain_is_named() -> None:
    node = Node()
    ticket = node.open(0, 6)
    node.commit(ticket, HASHES[:2])
    kept = node.keep(ticket, 1)
    assert list(node.ledger.chain_of(ticket).state_slots) == list(kept.slots)
    node.commit(ticket, HASHES[2:3])
    assert not node.ledger.chain_of(ticket).state_slots


def test_extending_a_ticket_to_a_state_frees_reserved_slots() -> None:
    node = Node(16)
    ticket, other = node.open(4, 6), node.open(0, 0)
    node.commit(other, HASHES[:4])
    kept = node.keep(other, 1)
    node.release(other)
    node.ledger.extend(node.worker, ticket.ticket_id, HASHES[:4])
    check_integrity(node.ledger)
    assert (ticket.blocks, ticket.reserved, node.ledger.reserved) == (2, 4, 4)
    assert list(node.ledger.chain_of(ticket).state_slots) == list(kept.slots)
    # Only what the ticket holds is protected, and a second look finds no more.
    assert node.ledger.tree.protected == 2 + PAGES
    node.ledger.extend(node.worker, ticket.ticket_id, HASHES[:4])
    assert ticket.blocks == 2
    node.release(ticket)
    assert (node.ledger.tree.protected, node.ledger.reserved) == (0, 0)


def test_a_state_in_reserved_slots_is_not_pinned() -> None:
    node = Node(7)
    other = node.open(0, 0)
    node.commit(other, HASHES[:2])
    node.keep(other, 1)
    ticket = node.open(0, 1)
    node.release(other)
    # Two slots are free, five may be freed, and six are promised to the second prompt.
    assert node.ledger.admit(node.worker, 99, [], 6) is not None
    node.ledger.extend(node.worker, ticket.ticket_id, HASHES[:2])
    check_integrity(node.ledger)
    assert (ticket.blocks, ticket.state) == (0, None)
