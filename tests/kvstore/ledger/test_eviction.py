"""Eviction against the real tree and ledger: the chain rule, and what is known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import Internal
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import SESSION, Ledger
from pillion.kvstore.ledger.records import Block
from pillion.v1.kvnode_pb2 import CommitRun
from tests.support.examples import examples


def prompt(*tokens: int) -> list[bytes]:
    return split_hashes(chain_hashes(bytes(32), tokens, 1))


class LedgerDriver:
    """A ledger with one caller, which serves whole prompts."""

    def __init__(self, num_slots: int) -> None:
        self.ledger = Ledger(itertools.count(1).__next__, 0)
        self.ledger.shape(num_slots)
        self.epoch = self.ledger.attach("one", SESSION)
        self.nonces = itertools.count(1)

    def open(self, hashes: list[bytes]) -> int:
        """Serve a prompt, and return its ticket, which is kept."""
        ticket = self.ledger.admit(self.epoch, next(self.nonces), hashes, len(hashes))
        assert ticket is not None
        left = hashes[ticket.blocks :]
        slots = self.ledger.adopt(self.epoch, ticket.ticket_id, len(left)).leased_slots
        if left:
            [result] = self.ledger.commit(
                self.epoch, [CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(left))]
            )
            assert not result.refusal
        return ticket.ticket_id

    def close(self, ticket_id: int) -> None:
        self.ledger.release(self.epoch, [ticket_id])

    def serve(self, *tokens: int) -> None:
        self.close(self.open(prompt(*tokens)))

    def has(self, *tokens: int) -> bool:
        return self.ledger.tree.longest_prefix(prompt(*tokens)).blocks == len(tokens)

    def block(self, *tokens: int) -> Block:
        return self.ledger.tree.by_hash[prompt(*tokens)[-1]]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), st.lists(st.integers(0, 1), min_size=1, max_size=6)),
        st.tuples(st.just("open"), st.lists(st.integers(0, 1), min_size=1, max_size=6)),
        st.tuples(st.just("close"), st.integers(0, 3)),
        st.tuples(st.just("drop"), st.integers(0, 11)),
    ),
    min_size=20,
    max_size=120,
)


@given(steps=STEPS)
@settings(max_examples=examples(60))
def test_a_chain_is_evicted_from_its_tail(steps: list[tuple[str, object]]) -> None:
    """Whatever is served, held, released and dropped out of turn: children are evicted before parents, only unprotected
    blocks are known, and blocks are evicted in the listed order."""
    node, tickets = LedgerDriver(12), []
    for what, value in steps:
        policy = node.ledger.tree.policy
        if what in ("serve", "open"):
            hashes = prompt(*value)  # type: ignore[misc]
            if node.ledger.shortage(hashes, len(hashes)):
                continue
            ticket = node.open(hashes)
            if what == "open":
                tickets.append(ticket)
            else:
                node.close(ticket)
        elif what == "close" and tickets:
            node.close(tickets.pop(int(value) % len(tickets)))  # type: ignore[call-overload]
        elif what == "drop" and len(policy):
            leaves = [block for block in policy if not block.children]
            node.ledger.evict_block(leaves[int(value) % len(leaves)])  # type: ignore[call-overload]
        check_integrity(node.ledger)
    shown = list(node.ledger.tree.policy)
    assert [node.ledger.tree.evict() for _ in shown] == shown
    for ticket in tickets:
        node.close(ticket)
    while len(node.ledger.tree.policy):
        node.ledger.tree.evict()
    with pytest.raises(KeyError):
        node.ledger.tree.evict()
    assert not node.ledger.tree.by_hash
    assert len(node.ledger.tree.policy) == 0


def test_evicted_blocks_leave_no_records() -> None:
    node = LedgerDriver(8)
    policy = node.ledger.tree.policy
    for first in range(100):
        node.serve(first, 1, 2)
    for block in list(policy):
        node.ledger.evict_block(block)
    assert len(policy) == len(node.ledger.tree) == 0
    assert list(policy) == []
    with pytest.raises(KeyError):
        policy.pop()


def test_only_a_cached_leaf_can_be_dropped() -> None:
    node = LedgerDriver(8)
    node.serve(1, 2)
    held = node.open(prompt(3))
    for tokens in ((1,), (3,)):
        with pytest.raises(Internal):
            node.ledger.evict_block(node.block(*tokens))
    check_integrity(node.ledger)
    node.ledger.drain_events()
    node.ledger.evict_block(node.block(1, 2))
    assert [event.here for event in node.ledger.drain_events()] == [False]
    assert len(node.ledger.free) == 6
    node.close(held)
    check_integrity(node.ledger)
