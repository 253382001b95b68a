"""A text's blocks on one worker: the slots in order, how far they are computed, and how far committed.

The table, left to right; every count is in blocks and none of them shrinks while the ticket is held:

    [ committed: the ticket's chain | in commit: sent to the KV node | owned: leased, being written or still empty ]
    0                        num_committed                        num_sent                                  num_blocks

Only one run of blocks is sent to the node at a time, so that a refusal cannot leave a hole in the chain. The tokens
belong to the subclass: a draft model's chain reads those of its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from pillion.kernels.step import Int32
from pillion.kvstore.hashing import HASH_BYTES, chain_hashes


@dataclass(slots=True, kw_only=True)
class ChunkDone:
    """A chunk of a prefill range: start of its first step and end of its last, by the scheduler's clock.

    A chunk is reported when computed, and committed by its CommitOrder. A chunk committed before the range came has the
    range's arrival for both times.
    """

    seq_id: int
    index: int
    end_tokens: int
    started_s: float = 0.0
    computed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AdoptedTicket:
    """An adopted ticket: the slots of its pinned chain, those leased for what the sequence will write, and those of the
    state after the chain, for a model with states, where other texts diverge after ``known_blocks`` blocks."""

    ticket_id: int
    chain_slots: tuple[int, ...]
    leased_slots: tuple[int, ...]
    state_slots: tuple[int, ...] = ()
    known_blocks: int = 0


class BlockChain:
    """Blocks of ``block_size`` tokens each. A chain belongs to one scheduler, and only its methods and those of
    subclasses write its fields.

    Args:
        seq_id: the chain's name in a CommitOrder.
        tokens: int32, memory for all tokens of the text.
        first_block, parent_hash: where hashing begins, and the hash of the block before, or the root.
        hashes: those of leading whole blocks from there on, if known.
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
        # False after a refused run, because the next block would not follow the chain's tail.
        self.may_commit = True

    def tokens(self, start: int, end: int) -> Int32:
        """Return some of the text's tokens as a view, int32 [end - start]."""
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
        """Blocks whose every token has its KV."""
        return min(self.num_computed // self.block_size, self.num_blocks)

    @property
    def in_commit(self) -> bool:
        """True if a run of blocks awaits the node's answer."""
        return self.num_sent > self.num_committed

    def send(self, end: int) -> None:
        """Record the blocks before ``end`` as sent to the KV node."""
        self.num_sent = end

    def commit(self, slots: Seq[int]) -> list[int]:
        """Record the run as committed in ``slots``, which are read from now on (I2). Return own slots replaced by
        another committer's; launched steps may still read them."""
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
        """Return 32 bytes per block of start .. end, none before the start of hashing."""
        first = self._first_block
        return bytes(self._hashes[(start - first) * HASH_BYTES : (end - first) * HASH_BYTES])
