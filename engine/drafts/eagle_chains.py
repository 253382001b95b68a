"""KV of an EAGLE-3 head: a draft chain whose entries are computed from hidden states, not only from tokens.

A head's entry for position p is computed from the model's hidden state at p and the token at p + 1. Hidden states come
with this worker's steps, so a chain begins at ``begin``, the first position with one: those of a cached prefix, or of
tokens computed by a prefill worker, are missing, and the head drafts without them. Entries are numbered from 0 at
``begin``; rotary embeddings are invariant to the shift.

    text       [ cached, or computed elsewhere | states: entries with KV | states: kept for the next pass ] last token
    position   0                           begin                                                      num_tokens - 1

A block's content therefore depends on where its chain began, and blocks of a head are never committed: a chain has no
ticket, owns all of its slots, and frees them when closed. While nothing is drafted for a stream, its hidden states are
kept, up to MAX_STATES_TOKENS; then the chain restarts with the newer half. Entries of draft tokens are computed from
the head's own hidden states, and overwritten by entries from the model's. Sans-IO (I9).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from pillion.engine.drafts.acceptance import NO_TOKENS
from pillion.engine.drafts.draft_chains import DraftChain, DraftChains, DraftShape
from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.engine.scheduling.step_plan import ScheduledChunk
from pillion.kernels.step import Int32, States

# Max hidden states per stream that wait for a pass of the head; beyond that, only the newer half is kept.
MAX_STATES_TOKENS = 512


class EagleChain(DraftChain):
    """An EAGLE head's KV of one sequence, and the hidden states that the head has not read yet."""

    def __init__(self, chain_id: int, sequence: Sequence, shape: DraftShape) -> None:
        super().__init__(chain_id, sequence, shape)
        self.open(AdoptedTicket(0, (), ()))
        self.refuse_commit()
        self.begin = 0
        self._states: list[States] = []
        self._num_states = 0

    @property
    def end(self) -> int:
        """Number of entries whose hidden state and token are known after the last step."""
        return self.sequence.num_tokens - 1 - self.begin

    @property
    def is_whole(self) -> bool:
        """True if the hidden states of all positions from ``begin`` to the last but one are known."""
        return self.num_computed + self._num_states == self.end

    def settle(self) -> None:
        """Drop the draft tokens if the sequence has new tokens."""
        if self.num_computed != self.end:
            self.draft_tokens = NO_TOKENS

    def tokens(self, start: int, end: int) -> Int32:
        """Return the tokens of entries ``start`` .. ``end`` as a view, int32 [end - start]."""
        return super().tokens(self.begin + 1 + start, self.begin + 1 + end)

    def keep(self, position: int, states: States) -> None:
        """Append the model's hidden states [count, layers * hidden] from ``position`` on. After a gap in positions, or
        above MAX_STATES_TOKENS states, the chain restarts without older ones."""
        if position != self.begin + self.num_computed + self._num_states:
            self._restart_at(position)
        self._states.append(states)
        self._num_states += len(states)
        if self._num_states > MAX_STATES_TOKENS:
            kept = self.states(self._num_states)[-(MAX_STATES_TOKENS // 2) :].copy()
            self._restart_at(position + len(states) - len(kept))
            self._states, self._num_states = [kept], len(kept)

    def _restart_at(self, position: int) -> None:
        self.begin, self.num_computed = position, 0
        self._states, self._num_states = [], 0
        self.draft_tokens = NO_TOKENS

    def states(self, count: int) -> States:
        """Return the hidden states [count, layers * hidden] of the next ``count`` entries to compute."""
        if len(self._states) > 1:
            self._states = [np.concatenate(self._states)]
        states: States = self._states[0][:count]
        return states

    def check_states(self) -> None:
        """Raise AssertionError if the states are miscounted or too many."""
        assert self._num_states == sum(map(len, self._states)) <= MAX_STATES_TOKENS

    def advance(self, end: int, draft_tokens: Int32) -> None:
        count = end - self.num_computed
        self._states = [self.states(self._num_states)[count:]] if count < self._num_states else []
        self._num_states -= count
        super().advance(end, draft_tokens)


class EagleChains(DraftChains):
    """Implements Drafter by an EAGLE head, with one :class:`EagleChain` per sequence."""

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError on inconsistency of chains, states and sequences."""
        super().check_integrity(sequences)
        for chain in self._chain_by_seq.values():
            assert isinstance(chain, EagleChain)
            chain.check_states()

    def store_states(self, scheduled: Seq[ScheduledChunk], states: States) -> None:
        """Store the hidden states [tokens of the step, layers * hidden] that a step produced, except those of rejected
        draft tokens."""
        row = 0
        for chunk in scheduled:
            first, row = row, row + chunk.count
            sequence = chunk.sequence
            computed = min(sequence.num_computed - chunk.start, chunk.count)
            is_drafted_for = not (sequence.is_prefill or sequence.is_prompt_only or sequence.seq_id in self._refused)
            if computed > 0 and sequence.state is SequenceState.RUNNING and is_drafted_for:
                # The chain would drop the older ones.
                skipped = max(0, computed - MAX_STATES_TOKENS)
                kept = states[first + skipped : first + computed].copy()
                self._get_or_make(sequence).keep(chunk.start + skipped, kept)

    def _get_or_make(self, sequence: Sequence) -> EagleChain:
        chain = self._chain_by_seq.get(sequence.seq_id)
        if chain is None:
            chain = EagleChain(next(self._ids), sequence, self._shape)
            self.chains[chain.seq_id] = self._chain_by_seq[sequence.seq_id] = chain
        assert isinstance(chain, EagleChain)
        return chain

    def _release(self, chain: DraftChain) -> None:
        del self.chains[chain.seq_id]

    def _chain_of(self, sequence: Sequence) -> EagleChain | None:
        """Return the sequence's chain if its hidden states are complete, else None; also None for a chain without slots
        while drafting pauses."""
        chain = self._chain_by_seq.get(sequence.seq_id)
        if chain is None or (not chain.num_blocks and self._now < self._paused_until_s):
            return None
        assert isinstance(chain, EagleChain)
        return chain if chain.is_whole else None
