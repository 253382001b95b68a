"""KV of a draft model in the pool of its main model: its slots, and what it computes next.

    ordered: a ticket that pins cached blocks --answered--> open: catches up, drafts, commits
        --its sequence ends, or memory is short--> closed: slots are returned and, once the node has answered the commit
                                                   in flight, the ticket released --> (gone, may be ordered again)

A draft model's blocks use slots like others, with as many tokens as fit, and are committed under their own namespace;
so a prompt drafted for once is a hit later, also for other workers of the node. A sequence and its draft have a ticket
and a :class:`BlockChain` each. The draft's chain is optional: nothing waits for it, and missing KV is recomputed from
the tokens (I1).

**Memory.** The draft's slots come from the worker's free slots, beyond what decodes need. When slots run short, draft
chains are closed before any sequence is preempted (:meth:`DraftChains.yield_slots`), and drafting pauses for PAUSE_S.

**Work.** The passes of a plan run between two steps, so no draft is in flight when slots change owners. The first pass
catches up with new tokens. Prompt tokens are cut to what the step's budget leaves (I5), and skipped for a stream that
ends before its draft tokens can save the time. The KV of an accepted draft token is kept; others are overwritten.
Sans-IO (I9).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pillion.engine.scheduling.block_chain import AdoptedTicket, BlockChain
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.sequence import Sequence, rope_shift
from pillion.engine.scheduling.step_plan import ChainOrder, ScheduledChunk
from pillion.kernels.step import Int32, States
from pillion.kvstore.hashing import request_root

# No new draft chains for this time after some were closed for memory or got no slots.
PAUSE_S = 2.0
NO_DRAFT_TOKENS: Int32 = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What a scheduler needs to know of a draft model.

    Attributes:
        namespace: 32 bytes from which the roots of its chains are hashed (I2).
        block_size: tokens of the draft model per slot, a multiple of the main model's block size.
        vocab_size: number of token ids; texts with other ids are not drafted for.
        max_model_len: max tokens of a text.
        num_speculative_tokens: max draft tokens per sequence and step.
        max_num_batched_tokens: max tokens per pass.
        original_tokens: max length with the rotary frequencies of training, if longer texts use others; else 0.
        reads_states: True for an EAGLE-3 head (:mod:`pillion.engine.drafts.eagle_chains`).
    """

    namespace: bytes
    block_size: int
    vocab_size: int
    max_model_len: int
    num_speculative_tokens: int
    max_num_batched_tokens: int
    original_tokens: int = 0
    reads_states: bool = False


class DraftChain(BlockChain):
    """Draft model's KV of one sequence, whose tokens it reads."""

    def __init__(self, chain_id: int, sequence: Sequence, shape: DraftShape) -> None:
        self.sequence = sequence
        text_tokens = sequence.prompt_tokens + sequence.max_tokens
        self.rope_shift = rope_shift(text_tokens, shape.original_tokens, shape.max_model_len)
        root = request_root(shape.namespace, cache_salt=sequence.parent_hash.hex(), short_text=self.rope_shift > 0)
        tokens = sequence.tokens(0, sequence.most_tokens)
        super().__init__(chain_id, tokens, shape.block_size, first_block=0, parent_hash=root)
        # Whether the node has answered with a ticket; the chain is no longer needed; it has drafted before; catching up
        # takes longer than it is worth.
        self.opened = self.closed = self.has_drafted = self.is_too_late = False
        # Tokens drafted after the first ``num_computed`` ones; the pool has the KV of all but the last.
        self.draft_tokens: Int32 = NO_DRAFT_TOKENS

    @property
    def end(self) -> int:
        """``num_computed`` once the chain has caught up with its sequence."""
        return self.sequence.num_tokens

    def settle(self) -> None:
        """Keep the KV of accepted draft tokens and drop the others; the last token is recomputed for its logits.
        Without a new token the draft tokens stay."""
        start = self.num_computed
        if self.sequence.num_tokens == start:
            return
        draft_tokens = self.draft_tokens[: max(0, min(len(self.draft_tokens), self.sequence.num_tokens - start) - 1)]
        right = draft_tokens == self.tokens(start, start + len(draft_tokens))
        self.num_computed += len(draft_tokens) if right.all() else int(right.argmin())
        self.draft_tokens = NO_DRAFT_TOKENS

    def advance(self, end: int, draft_tokens: Int32) -> None:
        """Record that the tokens before ``end`` are computed, and the ``draft_tokens`` predicted after them."""
        self.num_computed = end
        self.draft_tokens = draft_tokens
        self.has_drafted = self.has_drafted or len(draft_tokens) > 0

    def open(self, ticket: AdoptedTicket) -> None:
        """Store the ticket of the node's answer."""
        self.take_ticket(ticket)
        self.opened = True

    def close(self) -> tuple[int, ...]:
        """Close the chain. Returns its own slots that are not in a commit, removed from its block table."""
        self.closed = True
        self.draft_tokens = NO_DRAFT_TOKENS
        return self.cut(self.num_sent)


@dataclass(frozen=True, slots=True)
class DraftChunk:
    """Tokens ``start`` .. ``start + count`` of a chain, computed in one pass, and the number of tokens to draft after
    them; 0 if the chain only catches up."""

    chain: DraftChain
    start: int
    count: int
    draft_tokens: int


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft model's work before a step: a pass over all chunks, then passes of one token for each."""

    scheduled: tuple[DraftChunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the first pass."""
        return sum(chunk.count for chunk in self.scheduled)


class DraftPasses(Protocol):
    """Passes of a draft model, on the worker's step thread."""

    @property
    def took_s(self) -> float:
        """Duration of the last run."""

    def run(self, plan: DraftPlan) -> list[Int32] | None:
        """Run a plan's passes and return each chunk's draft tokens, possibly fewer than planned; None on failure."""

    @property
    def seconds_to_read(self) -> float:
        """Seconds per token of a long text; 0.0 if unknown."""

    def seconds_per_token(self, sequences: int) -> float:
        """Return the seconds of a pass of one token for each of ``sequences``; 0.0 if unknown."""


class DraftChains:
    """Implements Drafter: the draft model's KV block chains, one per sequence. ``passes`` runs the forward passes."""

    def __init__(self, shape: DraftShape, passes: DraftPasses, block_manager: BlockManager) -> None:
        self._shape = shape
        self._passes = passes
        self._block_manager = block_manager
        self._free_slots = block_manager.free_slots
        self._ids = itertools.count(-1, -1)
        # Existing chains by chain id, and unclosed chains by sequence id.
        self.chains: dict[int, DraftChain] = {}
        self._of: dict[int, DraftChain] = {}
        self._refused: set[int] = set()
        self._paused_until_s = 0.0
        self._now = 0.0
        self._spare_tokens = 0
        self._lacking_blocks = 0
        self.took_s = 0.0

    @property
    def lacking_blocks(self) -> int:
        """Further slots that the last plan could have used."""
        return self._lacking_blocks if self._of else 0

    def catches_up(self, sequence: Sequence) -> bool:
        """Return whether a sequence's chain has a ticket but has not drafted yet. It has to read the sequence's tokens
        first, so steps may not run ahead."""
        chain = self._of.get(sequence.seq_id)
        if chain is None or not chain.opened or chain.is_too_late:
            return False
        return not chain.has_drafted and self._now >= self._paused_until_s

    def store_states(self, scheduled: Seq[ScheduledChunk], states: States) -> None:
        """Ignore the hidden states that a step produced; a draft model only reads tokens."""

    def begin_step(self, spare_tokens: int, now: float) -> None:
        """Begin planning a step whose budget leaves ``spare_tokens``."""
        self._spare_tokens, self._now = max(spare_tokens, 0), now
        self._lacking_blocks, self.took_s = 0, 0.0

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """Run the draft model's passes; returns up to the wanted number of draft tokens per decode."""
        plan = self._plan(wanted)
        if plan.scheduled:
            draft_tokens = self._passes.run(plan)
            self.took_s += self._passes.took_s
            for place, chunk in enumerate(plan.scheduled):
                self._take(chunk, None if draft_tokens is None else draft_tokens[place])
        return [self._draft_tokens_of(sequence)[:most] for sequence, most in wanted]

    def seconds_per_token(self, sequences: int) -> float:
        """Return the seconds per draft token for each of ``sequences``."""
        return self._passes.seconds_per_token(sequences)

    def _plan(self, wanted: Seq[tuple[Sequence, int]]) -> DraftPlan:
        scheduled, left = [], self._shape.max_num_batched_tokens
        for sequence, most in wanted:
            chain = self._chain_of(sequence)
            if chain is not None:
                chain.settle()
                chunk = self._chunk(chain, min(most, self._shape.num_speculative_tokens), left)
                if chunk is not None:
                    left -= chunk.count
                    scheduled.append(chunk)
        return DraftPlan(tuple(scheduled))

    def _chain_of(self, sequence: Sequence) -> DraftChain | None:
        """Return the sequence's chain, if usable. If there is none and memory is not short, order a ticket for one."""
        chain = self._of.get(sequence.seq_id)
        if chain is not None:
            return chain if chain.opened else None
        if self._now < self._paused_until_s or sequence.seq_id in self._refused:
            return None
        chain = DraftChain(next(self._ids), sequence, self._shape)
        self.chains[chain.seq_id] = self._of[sequence.seq_id] = chain
        whole = (sequence.num_tokens - 1) // chain.block_size
        chain.extend_hashes(whole * chain.block_size)
        self._block_manager.out.chain_orders.append(ChainOrder(chain.seq_id, chain.block_hashes(0, whole)))
        return None

    def _chunk(self, chain: DraftChain, draft_tokens: int, left: int) -> DraftChunk | None:
        """Return a chain's next chunk, of up to ``left`` tokens; None if there is nothing to do, or no slot."""
        start, end = chain.num_computed, chain.end
        if start == end:
            return None
        # Tokens since the last draft are computed at once, prompt tokens within the step's budget.
        is_near = end - start <= self._shape.num_speculative_tokens + 1
        chain.is_too_late = (
            not is_near and self._passes.seconds_to_read * (end - start) > chain.sequence.draft_tokens.worth_s
        )
        if chain.is_too_late:
            return None
        reach = min(end, start + (left if is_near else min(self._spare_tokens, left)))
        longest = min(self._shape.max_model_len, chain.sequence.most_tokens)
        after = max(0, min(draft_tokens, longest - chain.sequence.num_tokens)) if reach == end else 0
        if end > self._shape.max_model_len or (
            reach > start and int(chain.tokens(start, reach).max()) >= self._shape.vocab_size
        ):
            self.refuse(chain.sequence)
            return None
        self._grow(chain, reach + max(after - 1, 0))
        room = chain.num_blocks * chain.block_size
        count = min(reach, room) - start
        if count <= 0:
            return None
        if not is_near:
            self._spare_tokens -= count
        if start + count < end:
            return DraftChunk(chain, start, count, 0)
        return DraftChunk(chain, start, count, min(after, room - end + 1))

    def _grow(self, chain: DraftChain, tokens: int) -> None:
        """Allocate slots for ``tokens`` tokens of a chain and its next draft, as far as free slots exceed what decodes
        need soon."""
        ahead = tokens + self._shape.num_speculative_tokens + 1
        wanted = -(-min(ahead, chain.sequence.most_tokens) // chain.block_size)
        while chain.num_blocks < wanted and len(self._free_slots) > self._block_manager.needed_blocks:
            slot = self._free_slots.take()
            assert slot is not None
            chain.add_slot(slot)
        if chain.num_blocks * chain.block_size < tokens and self._free_slots.exhausted(self._now):
            self._pause(self._now)
        elif self._now >= self._paused_until_s:
            self._lacking_blocks += max(0, wanted - chain.num_blocks)

    def _take(self, chunk: DraftChunk, draft_tokens: Int32 | None) -> None:
        """Store the draft tokens of a chunk; None means failure, and its sequence continues without drafts."""
        chain = chunk.chain
        if draft_tokens is None:
            self.refuse(chain.sequence)
            return
        chain.advance(chunk.start + chunk.count, draft_tokens)
        if chain.may_commit:
            chain.extend_hashes(chain.full_blocks * chain.block_size)
            self._block_manager.order_commit(chain, self._now)

    def _draft_tokens_of(self, sequence: Sequence) -> Int32:
        chain = self._of.get(sequence.seq_id)
        return NO_DRAFT_TOKENS if chain is None or chain.num_computed != chain.end else chain.draft_tokens

    def ended(self, sequence: Sequence) -> None:
        """Close the chain of a sequence that ends or is preempted."""
        self._refused.discard(sequence.seq_id)
        chain = self._of.pop(sequence.seq_id, None)
        if chain is not None:
            self._close(chain)

    def refuse(self, sequence: Sequence) -> None:
        """Stop drafting for a sequence."""
        self.ended(sequence)
        self._refused.add(sequence.seq_id)

    def yield_slots(self, blocks: int, now: float) -> bool:
        """Close draft chains, newest sequences first, until ``blocks`` slots are freed. Returns False if none had
        slots."""
        given = 0
        for seq_id in sorted(self._of, reverse=True):
            chain = self._of[seq_id]
            if given >= blocks:
                break
            if chain.num_blocks:
                given += chain.num_blocks
                self._close(self._of.pop(seq_id))
        if given:
            self._pause(now)
        return given > 0

    def _pause(self, now: float) -> None:
        self._paused_until_s = now + PAUSE_S
        self._lacking_blocks = 0

    def _close(self, chain: DraftChain) -> None:
        self._free_slots.give(chain.close())
        if chain.opened and not chain.in_commit:
            self._release(chain)

    def _release(self, chain: DraftChain) -> None:
        self._free_slots.give(chain.cut(chain.num_committed))
        self._block_manager.release(chain.ticket_id)
        del self.chains[chain.seq_id]

    def opened(self, chain_id: int, ticket: AdoptedTicket | None, now: float) -> None:
        """Handle the node's answer to a ChainOrder; None means no ticket."""
        chain = self.chains[chain_id]
        if ticket is None:
            del self.chains[chain_id]
            if not chain.closed:
                del self._of[chain.sequence.seq_id]
            self._pause(now)
            return
        chain.open(ticket)
        if chain.closed:
            self._release(chain)

    def committed(self, chain_id: int, slots: Seq[int], refusal: str) -> None:
        """Handle the node's answer to a commit."""
        chain = self.chains[chain_id]
        if refusal:
            chain.refuse_commit()
        else:
            self._block_manager.accept(chain, slots)
        if chain.closed:
            self._release(chain)

    def side_chains(self) -> Iterable[BlockChain]:
        """Return all existing chains."""
        return self.chains.values()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError on inconsistency of draft chains and sequences."""
        alive = {sequence.seq_id: sequence for sequence in sequences}
        for seq_id, chain in self._of.items():
            assert alive.get(seq_id) is chain.sequence, "a draft outlived its sequence"
            assert not chain.closed
            assert self.chains[chain.seq_id] is chain
            assert chain.num_computed <= chain.num_blocks * chain.block_size
            assert chain.num_computed <= chain.sequence.num_tokens, "a draft is ahead of its sequence"
        for chain in self.chains.values():
            assert chain.closed or chain.sequence.seq_id in self._of
            assert not chain.closed or not chain.opened or chain.in_commit, "a closed draft waits for nothing"
        assert self._refused <= alive.keys()
