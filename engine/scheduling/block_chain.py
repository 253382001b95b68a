"""A text's blocks on one worker: the slots in order, how far they are computed, and how far committed.

The table, left to right; counts are in blocks, and num_committed and num_sent never shrink under one ticket, except
that a refused commit resets num_sent to num_committed:

    [ committed: the ticket's chain | in commit: sent to the KV node | owned: leased, being written or still empty ]
    0                        num_committed                        num_sent                                  num_blocks

Only one run of blocks is sent to the node at a time, so that a refusal cannot leave a hole in the chain. A subclass
provides the tokens: a sequence its own, a draft model's chain those of its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from pillion.kernels.step import Int32
from pillion.kvstore.hashing import HASH_BYTES, chain_hashes


@dataclass(slots=True, kw_only=True)
class ChunkDone:
    """A committed chunk of a prefill range, with the start of its first step and the end of its last one, in seconds of
    the scheduler's clock. Both are the range's arrival if the chunk was committed before."""

    seq_id: int
    index: int
    end_tokens: int
    started_s: float = 0.0
    computed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AdoptedTicket:
    """An adopted ticket.

    Attributes:
        chain_slots: slots of its pinned chain.
        leased_slots: slots leased for the blocks that the sequence will write.
        state_slots: slots of the state after the chain, for a model with states.
        known_blocks: in a model with states, number of blocks after which other texts are expected to diverge.
    """

    ticket_id: int
    chain_slots: tuple[int, ...]
    leased_slots: tuple[int, ...]
    state_slots: tuple[int, ...] = ()
    known_blocks: int = 0


class BlockChain:
    """A text's blocks of ``block_size`` tokens each. A chain belongs to one scheduler, and only its methods and those
    of subclasses write its fields.

    Args:
        seq_id: id in CommitOrders.
        tokens: int32 [max tokens], memory of the text's tokens.
        first_block: index of the first block to hash.
        parent_hash: hash of the block before ``first_block``; the root if that is 0.
        hashes: 32 bytes for each block from ``first_block`` on whose hash is known.
    """

    def __init__(
        self, seq_id: int, tokens: Int32, block_size: int, *, first_block: int, parent_hash: bytes, hashes: bytes = b""
    ) -> None:
        self.seq_id = seq_id
        self.block_size = block_size
        self._tokens = tokens
        self._table: Int32 = np.zeros(len(tokens) // block_size + 2, dtype=np.int32)
        self._first_block = first_block
        self.parent_hash = parent_hash
        self._hashes = bytearray(hashes)
        self.take_ticket(AdoptedTicket(0, (), ()))

    def take_ticket(self, ticket: AdoptedTicket) -> None:
        """Start from an adopted ticket: only its pinned chain counts as computed."""
        slots = (*ticket.chain_slots, *ticket.leased_slots)
        self.ticket_id, self.state_slots = ticket.ticket_id, ticket.state_slots
        self.known_blocks = ticket.known_blocks
        self.num_blocks = len(slots)
        if self.num_blocks > len(self._table):
            self._table = np.zeros(self.num_blocks, dtype=np.int32)
        self._table[: self.num_blocks] = slots
        self.num_committed = self.num_sent = len(ticket.chain_slots)
        self.num_computed = self.num_committed * self.block_size
        # False after a refused commit: the node has no parent for further blocks.
        self.may_commit = True

    def tokens(self, start: int, end: int) -> Int32:
        """Return tokens ``start`` .. ``end`` of the text as a view, int32 [end - start]."""
        return self._tokens[start:end]

    def table(self) -> Int32:
        """Return the chain's slots in order as a view, int32 [num_blocks]."""
        return self._table[: self.num_blocks]

    def slots(self, start: int, end: int) -> tuple[int, ...]:
        return tuple(self._table[start:end].tolist())

    def owned_slots(self) -> tuple[int, ...]:
        """Return the slots leased to this worker, those in commit included."""
        return self.slots(self.num_committed, self.num_blocks)

    def add_slot(self, slot: int) -> None:
        self._table[self.num_blocks] = slot
        self.num_blocks += 1

    def cut(self, block: int) -> tuple[int, ...]:
        """Truncate the block table to ``block`` blocks; return the removed slots."""
        dropped = self.slots(block, self.num_blocks)
        self.num_blocks = min(self.num_blocks, block)
        return dropped

    @property
    def full_blocks(self) -> int:
        """Number of leading blocks all of whose tokens have their KV."""
        return min(self.num_computed // self.block_size, self.num_blocks)

    @property
    def in_commit(self) -> bool:
        """True if a run of blocks awaits the node's answer."""
        return self.num_sent > self.num_committed

    def send(self, end: int) -> None:
        """Record the blocks before ``end`` as sent to the KV node."""
        self.num_sent = end

    def commit(self, slots: Seq[int]) -> list[int]:
        """Record the sent blocks as committed in ``slots``, which replace the own ones (I2). Return own slots replaced
        by another committer's; launched steps may still read them."""
        start = self.num_committed
        own = self._table[start : start + len(slots)].tolist()
        self._table[start : start + len(slots)] = slots
        self.num_committed = self.num_sent
        return [old for old, new in zip(own, slots, strict=True) if old != new]

    def refuse_commit(self) -> None:
        """Record a refused commit; no further run is sent under this ticket."""
        self.num_sent = self.num_committed
        self.may_commit = False

    def extend_hashes(self, num_tokens: int) -> None:
        """Hash the unhashed whole blocks among the first ``num_tokens`` tokens."""
        start = (self._first_block + len(self._hashes) // HASH_BYTES) * self.block_size
        end = num_tokens // self.block_size * self.block_size
        if end > start:
            parent = bytes(self._hashes[-HASH_BYTES:]) or self.parent_hash
            self._hashes += chain_hashes(parent, self._tokens[start:end].tolist(), self.block_size)

    def hash_before(self, block: int) -> bytes:
        """Return the hash of the block before ``block``, or the parent hash at the start of hashing."""
        return self.block_hashes(block - 1, block) if block > self._first_block else self.parent_hash

    def block_hashes(self, start: int, end: int) -> bytes:
        """Return the hashes of blocks ``start`` .. ``end``, 32 bytes each; ``start`` is at least ``first_block``."""
        first = self._first_block
        return bytes(self._hashes[(start - first) * HASH_BYTES : (end - first) * HASH_BYTES])
