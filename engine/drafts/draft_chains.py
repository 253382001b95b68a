"""KV of a draft model in the pool of its main model: its slots, and what it computes next.

    ordered: a ticket that pins cached blocks --answered--> open: catches up, drafts, commits
        --its sequence ends, or memory is short--> closed: slots are returned and, once the node has answered the commit
                                                   in flight, the ticket released --> (gone, may be ordered again)

A draft model's block fills a slot of the main model's pool with as many tokens as fit, and is committed under a
namespace of its own; so a prompt drafted for once is a hit later, also for other workers of the node. A sequence and
its draft have a ticket and a :class:`BlockChain` each. The draft's chain is optional: nothing waits for it, and missing
KV is recomputed from the tokens (I1).

**Memory.** The draft's slots come from the worker's free slots, beyond what decodes need. When slots run short, draft
chains are closed before any sequence is preempted (:meth:`DraftChains.yield_slots`), and drafting pauses for PAUSE_S.

**Work.** The passes of a plan run between two steps, so no draft is in flight when slots change owners. The first pass
catches up with new tokens. Prompt tokens are limited to what the step's budget leaves (I5), and skipped for a stream
that ends before its draft tokens can save the time. The KV of accepted draft tokens is kept, that of rejected ones
overwritten. Sans-IO (I9).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from pillion.engine.drafts.acceptance import NO_TOKENS
from pillion.engine.scheduling.block_chain import AdoptedTicket, BlockChain
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.sequence import Sequence, rope_shift
from pillion.engine.scheduling.step_plan import ChainOrder, ScheduledChunk
from pillion.kernels.step import Int32, States
from pillion.kvstore.hashing import request_root

# Pause of drafting after chains were closed to free memory, or got no slots or ticket.
PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes and limits of a draft model, for the scheduler.

    Attributes:
        namespace: 32 bytes from which the roots of its chains are hashed (I2).
        block_size: tokens of the draft model per slot, a multiple of the main model's block size.
        vocab_size: number of token ids; texts with larger ids are not drafted for.
        max_model_len: max tokens of a text.
        num_speculative_tokens: max draft tokens per sequence and step.
        max_num_batched_tokens: max tokens per pass.
        original_tokens: max tokens of a text with the rotary frequencies of training, if longer texts use different
            ones; else 0.
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
    """A draft model's KV of one sequence."""

    def __init__(self, chain_id: int, sequence: Sequence, shape: DraftShape) -> None:
        self.sequence = sequence
        text_tokens = sequence.prompt_tokens + sequence.max_tokens
        self.rope_shift = rope_shift(text_tokens, shape.original_tokens, shape.max_model_len)
        root = request_root(shape.namespace, cache_salt=sequence.parent_hash.hex(), short_text=self.rope_shift > 0)
        tokens = sequence.tokens(0, sequence.max_length)
        super().__init__(chain_id, tokens, shape.block_size, first_block=0, parent_hash=root)
        # opened: the node has answered with a ticket. closed: the chain is no longer needed. is_too_late: catching up
        # takes longer than drafting can save.
        self.opened = self.closed = self.has_drafted = self.is_too_late = False
        # Drafted after the first ``num_computed`` tokens; the pool has the KV of all but the last draft token.
        self.draft_tokens: Int32 = NO_TOKENS

    @property
    def end(self) -> int:
        """``num_computed`` once the chain has caught up with its sequence."""
        return self.sequence.num_tokens

    def settle(self) -> None:
        """Count the KV of accepted draft tokens as computed, and drop the draft tokens. The sequence's last token is
        recomputed for its logits. A no-op if the sequence has no new tokens."""
        start = self.num_computed
        if self.sequence.num_tokens == start:
            return
        draft_tokens = self.draft_tokens[: max(0, min(len(self.draft_tokens), self.sequence.num_tokens - start) - 1)]
        accepted = draft_tokens == self.tokens(start, start + len(draft_tokens))
        self.num_computed += len(draft_tokens) if accepted.all() else int(accepted.argmin())
        self.draft_tokens = NO_TOKENS

    def advance(self, end: int, draft_tokens: Int32) -> None:
        """Record that the KV of the tokens before ``end`` is computed, and the tokens drafted after them."""
        self.num_computed = end
        self.draft_tokens = draft_tokens
        self.has_drafted = self.has_drafted or len(draft_tokens) > 0

    def open(self, ticket: AdoptedTicket) -> None:
        """Start from the ticket of the node's answer."""
        self.take_ticket(ticket)
        self.opened = True

    def close(self) -> tuple[int, ...]:
        """Close the chain, and cut the owned slots that are not in commit off its table; return them."""
        self.closed = True
        self.draft_tokens = NO_TOKENS
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
    """A draft model's passes before a step: one over all chunks, then passes of one token for each chunk that drafts
    further tokens."""

    scheduled: tuple[DraftChunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the first pass."""
        return sum(chunk.count for chunk in self.scheduled)


class DraftPasses(Protocol):
    """Passes of a draft model, on the worker's step thread."""

    @property
    def last_run_s(self) -> float:
        """Duration of the last :meth:`run`."""

    def run(self, plan: DraftPlan) -> list[Int32] | None:
        """Run a plan's passes and return the draft tokens, int32, of each chunk, possibly fewer than planned; None on
        failure."""

    @property
    def seconds_to_read(self) -> float:
        """Seconds per token of a pass over many tokens of a text; 0.0 if unknown."""

    def seconds_per_token(self, sequences: int) -> float:
        """Return the seconds of a pass of one token for each of ``sequences`` sequences; 0.0 if unknown."""


class DraftChains:
    """Implements Drafter by a draft model, with one KV block chain per sequence. ``passes`` runs its forward passes."""

    def __init__(self, shape: DraftShape, passes: DraftPasses, block_manager: BlockManager) -> None:
        self._shape = shape
        self._passes = passes
        self._block_manager = block_manager
        self._free_slots = block_manager.free_slots
        self._ids = itertools.count(-1, -1)
        # All chains by chain id, and unclosed ones by seq_id.
        self.chains: dict[int, DraftChain] = {}
        self._chain_by_seq: dict[int, DraftChain] = {}
        # seq_ids that are not drafted for.
        self._refused: set[int] = set()
        self._paused_until_s = 0.0
        self._now = 0.0
        # Prompt tokens that the next pass may still compute.
        self._spare_tokens = 0
        self._lacking_blocks = 0
        # Seconds of this step's passes.
        self.drafting_s = 0.0

    @property
    def lacking_blocks(self) -> int:
        """Number of further slots that the last plan could have used."""
        return self._lacking_blocks if self._chain_by_seq else 0

    def catches_up(self, sequence: Sequence) -> bool:
        """Return whether a sequence's chain has a ticket but has not drafted yet: it computes the sequence's tokens
        first, between steps."""
        chain = self._chain_by_seq.get(sequence.seq_id)
        if chain is None or not chain.opened or chain.is_too_late:
            return False
        return not chain.has_drafted and self._now >= self._paused_until_s

    def store_states(self, scheduled: Seq[ScheduledChunk], states: States) -> None:
        """Do nothing; only EAGLE heads read a step's hidden states."""

    def begin_step(self, spare_tokens: int, now: float) -> None:
        """Begin planning a step whose token budget leaves ``spare_tokens``."""
        self._spare_tokens, self._now = max(spare_tokens, 0), now
        self._lacking_blocks, self.drafting_s = 0, 0.0

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """Run the draft model's passes; return up to the given number of draft tokens, int32, per sequence."""
        plan = self._plan(wanted)
        if plan.scheduled:
            drafts = self._passes.run(plan)
            self.drafting_s += self._passes.last_run_s
            for index, chunk in enumerate(plan.scheduled):
                self._store(chunk, None if drafts is None else drafts[index])
        return [self._draft_tokens_of(sequence)[:limit] for sequence, limit in wanted]

    def seconds_per_token(self, sequences: int) -> float:
        """Return the seconds to draft one more token for each of ``sequences`` sequences."""
        return self._passes.seconds_per_token(sequences)

    def _plan(self, wanted: Seq[tuple[Sequence, int]]) -> DraftPlan:
        scheduled, left = [], self._shape.max_num_batched_tokens
        for sequence, limit in wanted:
            chain = self._chain_of(sequence)
            if chain is not None:
                chain.settle()
                chunk = self._chunk(chain, min(limit, self._shape.num_speculative_tokens), left)
                if chunk is not None:
                    left -= chunk.count
                    scheduled.append(chunk)
        return DraftPlan(tuple(scheduled))

    def _chain_of(self, sequence: Sequence) -> DraftChain | None:
        """Return the sequence's chain if it has a ticket, else None. If there is no chain, make one and order its
        ticket, unless drafting pauses or the sequence is refused."""
        chain = self._chain_by_seq.get(sequence.seq_id)
        if chain is not None:
            return chain if chain.opened else None
        if self._now < self._paused_until_s or sequence.seq_id in self._refused:
            return None
        chain = DraftChain(next(self._ids), sequence, self._shape)
        self.chains[chain.seq_id] = self._chain_by_seq[sequence.seq_id] = chain
        whole = (sequence.num_tokens - 1) // chain.block_size
        chain.extend_hashes(whole * chain.block_size)
        self._block_manager.out.chain_orders.append(ChainOrder(chain.seq_id, chain.block_hashes(0, whole)))
        return None

    def _chunk(self, chain: DraftChain, draft_tokens: int, left: int) -> DraftChunk | None:
        """Return a chain's next chunk, of up to ``left`` tokens, and of ``draft_tokens`` draft tokens once it has
        caught up; None if it is too late, refused or without slots, or everything is computed."""
        start, end = chain.num_computed, chain.end
        if start == end:
            return None
        # A few new tokens since the last draft are computed at once, a long text within the step's token budget.
        is_near = end - start <= self._shape.num_speculative_tokens + 1
        chain.is_too_late = (
            not is_near and self._passes.seconds_to_read * (end - start) > chain.sequence.draft_tokens.worth_s
        )
        if chain.is_too_late:
            return None
        chunk_end = min(end, start + (left if is_near else min(self._spare_tokens, left)))
        max_length = min(self._shape.max_model_len, chain.sequence.max_length)
        draft_tokens = max(0, min(draft_tokens, max_length - chain.sequence.num_tokens)) if chunk_end == end else 0
        if end > self._shape.max_model_len or (
            chunk_end > start and int(chain.tokens(start, chunk_end).max()) >= self._shape.vocab_size
        ):
            self.refuse(chain.sequence)
            return None
        self._grow(chain, chunk_end + max(draft_tokens - 1, 0))
        capacity = chain.num_blocks * chain.block_size
        count = min(chunk_end, capacity) - start
        if count <= 0:
            return None
        if not is_near:
            self._spare_tokens -= count
        if start + count < end:
            return DraftChunk(chain, start, count, 0)
        return DraftChunk(chain, start, count, min(draft_tokens, capacity - end + 1))

    def _grow(self, chain: DraftChain, tokens: int) -> None:
        """Allocate slots for ``tokens`` tokens of a chain and its next draft, as far as there are more free slots than
        decodes need soon."""
        with_draft = tokens + self._shape.num_speculative_tokens + 1
        wanted = -(-min(with_draft, chain.sequence.max_length) // chain.block_size)
        while chain.num_blocks < wanted and len(self._free_slots) > self._block_manager.needed_blocks:
            slot = self._free_slots.allocate()
            assert slot is not None
            chain.add_slot(slot)
        if chain.num_blocks * chain.block_size < tokens and self._free_slots.exhausted(self._now):
            self._pause(self._now)
        elif self._now >= self._paused_until_s:
            self._lacking_blocks += max(0, wanted - chain.num_blocks)

    def _store(self, chunk: DraftChunk, draft_tokens: Int32 | None) -> None:
        """Store a chunk's draft tokens and commit its full blocks. On failure (None), refuse its sequence."""
        chain = chunk.chain
        if draft_tokens is None:
            self.refuse(chain.sequence)
            return
        chain.advance(chunk.start + chunk.count, draft_tokens)
        if chain.may_commit:
            chain.extend_hashes(chain.full_blocks * chain.block_size)
            self._block_manager.order_commit(chain, self._now)

    def _draft_tokens_of(self, sequence: Sequence) -> Int32:
        chain = self._chain_by_seq.get(sequence.seq_id)
        return NO_TOKENS if chain is None or chain.num_computed != chain.end else chain.draft_tokens

    def sequence_finished(self, sequence: Sequence) -> None:
        """Close the chain of a sequence that ends or is preempted."""
        self._refused.discard(sequence.seq_id)
        chain = self._chain_by_seq.pop(sequence.seq_id, None)
        if chain is not None:
            self._close(chain)

    def refuse(self, sequence: Sequence) -> None:
        """Stop drafting for a sequence."""
        self.sequence_finished(sequence)
        self._refused.add(sequence.seq_id)

    def yield_slots(self, blocks: int, now: float) -> bool:
        """Close draft chains, newest sequences first, until they had ``blocks`` slots together. Return False if none
        had slots."""
        freed = 0
        for seq_id in sorted(self._chain_by_seq, reverse=True):
            chain = self._chain_by_seq[seq_id]
            if freed >= blocks:
                break
            if chain.num_blocks:
                freed += chain.num_blocks
                self._close(self._chain_by_seq.pop(seq_id))
        if freed:
            self._pause(now)
        return freed > 0

    def _pause(self, now: float) -> None:
        self._paused_until_s = now + PAUSE_S
        self._lacking_blocks = 0

    def _close(self, chain: DraftChain) -> None:
        self._free_slots.free(chain.close())
        if chain.opened and not chain.in_commit:
            self._release(chain)

    def _release(self, chain: DraftChain) -> None:
        """Free a closed chain's own slots, release its ticket, and forget it."""
        self._free_slots.free(chain.cut(chain.num_committed))
        self._block_manager.release(chain.ticket_id)
        del self.chains[chain.seq_id]

    def opened(self, chain_id: int, ticket: AdoptedTicket | None, now: float) -> None:
        """Handle the node's answer to a ChainOrder. Without a ticket, drop the chain and pause ordering new ones."""
        chain = self.chains[chain_id]
        if ticket is None:
            del self.chains[chain_id]
            if not chain.closed:
                del self._chain_by_seq[chain.sequence.seq_id]
            self._pause(now)
            return
        chain.open(ticket)
        if chain.closed:
            self._release(chain)

    def committed(self, chain_id: int, slots: Seq[int], refusal: str) -> None:
        """Handle the node's answer to a chain's CommitOrder."""
        chain = self.chains[chain_id]
        if refusal:
            chain.refuse_commit()
        else:
            self._block_manager.accept(chain, slots)
        if chain.closed:
            self._release(chain)

    def side_chains(self) -> Iterable[BlockChain]:
        """Return all draft chains, including closed ones whose tickets are not released yet."""
        return self.chains.values()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError on inconsistency of draft chains and sequences."""
        alive = {sequence.seq_id: sequence for sequence in sequences}
        for seq_id, chain in self._chain_by_seq.items():
            assert alive.get(seq_id) is chain.sequence, "a draft outlived its sequence"
            assert not chain.closed
            assert self.chains[chain.seq_id] is chain
            assert chain.num_computed <= chain.num_blocks * chain.block_size
            assert chain.num_computed <= chain.sequence.num_tokens, "a draft is ahead of its sequence"
        for chain in self.chains.values():
            assert chain.closed or chain.sequence.seq_id in self._chain_by_seq
            assert not chain.closed or not chain.opened or chain.in_commit, "a closed draft's ticket is not released"
        assert self._refused <= alive.keys()
