"""A small pool that serves prompts of few texts, for eviction tests."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.ledger import SESSION, Ledger, PoolShares
from pillion.v1.kvnode_pb2 import CommitRun

NUM_SLOTS = 12
# Prefixes of three texts, so that most chains share blocks, and many are prefixes of each other.
TEXTS = ([0] * 7, [0, 0, 1, 1, 1, 1, 1], [2] * 7)
TOKENS = st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(1, 7))


def prompt(*tokens: int) -> list[bytes]:
    """Return the hashes of a prompt whose blocks have one token each."""
    return split_hashes(chain_hashes(bytes(32), tokens, 1))


class ServingPool:
    """A ledger with one caller, which serves prompts whole."""

    def __init__(self, num_slots: int, shares: PoolShares) -> None:
        self.ledger = Ledger(itertools.count(1).__next__, 0, shares)
        self.ledger.shape(num_slots)
        self.epoch = self.ledger.attach("one", SESSION)
        self.nonces = itertools.count(1)

    def open(self, hashes: list[bytes]) -> int | None:
        """Serve a prompt and return its ticket; None if memory is short."""
        ticket = self.ledger.admit(self.epoch, next(self.nonces), hashes, len(hashes))
        if ticket is None:
            return None
        left = hashes[ticket.blocks :]
        slots = self.ledger.adopt(self.epoch, ticket.ticket_id, len(left)).leased_slots
        if left:
            run = CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(left))
            [result] = self.ledger.commit(self.epoch, [run])
            assert not result.refusal
        return ticket.ticket_id

    def close(self, ticket_id: int) -> None:
        self.ledger.release(self.epoch, [ticket_id])

    def serve(self, *tokens: int) -> None:
        ticket_id = self.open(prompt(*tokens))
        assert ticket_id is not None
        self.close(ticket_id)

    def blocks(self, *tokens: int) -> int:
        return self.ledger.tree.longest_prefix(prompt(*tokens)).blocks
