"""KV of an EAGLE-3 head: a draft chain whose entries are made of hidden states, not only of tokens.

Entry p of a head is made of the model's state at position p and of the token after it. States come with the steps of
this worker, so a chain begins with the first of them, at ``begin``: those of a cached prefix, or of a part of the
prompt computed by a prefill worker, are missing, and the head drafts without them. Entries count from 0, to which
rotary embeddings are invariant.

    text       [ cached, or computed elsewhere | states: entries with KV | states: kept for the next pass ] last token
    position   0                           begin                                                      num_tokens - 1

A block's content therefore depends on where its chain began, and blocks of a head are never committed: a chain has no
ticket, owns all of its slots, and returns them when closed. While nothing is drafted for a stream, its states are kept,
up to MAX_STATES_TOKENS; then the chain restarts with the newest. All states are the model's: the entries of draft
tokens, with the head's own states, are overwritten. Sans-IO (I9).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from pillion.engine.drafts.draft_chains import NO_DRAFT_TOKENS, DraftChain, DraftChains, DraftShape
from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.engine.scheduling.step_plan import ScheduledChunk
from pillion.kernels.step import Int32, States

# Max positions of a stream with states waiting for a pass of the head; beyond that, the newer half is kept.
MAX_STATES_TOKENS = 512


class EagleChain(DraftChain):
    """EAGLE head's KV of one sequence, and the states that the head has not read yet."""

    def __init__(self, chain_id: int, sequence: Sequence, shape: DraftShape) -> None:
        super().__init__(chain_id, sequence, shape)
        self.open(AdoptedTicket(0, (), ()))
        self.refuse_commit()
        self.begin = 0
        self._states: list[States] = []
        self._num_states = 0

    @property
    def end(self) -> int:
        """Number of entries with known state and token, once the last step has finished."""
        return self.sequence.num_tokens - 1 - self.begin

    @property
    def is_whole(self) -> bool:
        """True if the states of all positions from ``begin`` to the last but one are known."""
        return self.num_computed + self._num_states == self.end

    def settle(self) -> None:
        """Drop the draft tokens once there are new tokens."""
        if self.num_computed != self.end:
            self.draft_tokens = NO_DRAFT_TOKENS

    def tokens(self, start: int, end: int) -> Int32:
        """Return the tokens of entries ``start`` .. ``end``, int32, as a view."""
        return super().tokens(self.begin + 1 + start, self.begin + 1 + end)

    def keep(self, position: int, states: States) -> None:
        """Append the model's hidden states from ``position`` on. Older ones are dropped after a gap in positions, and
        above MAX_STATES_TOKENS."""
        if position != self.begin + self.num_computed + self._num_states:
            self._begin_at(position)
        self._states.append(states)
        self._num_states += len(states)
        if self._num_states > MAX_STATES_TOKENS:
            kept = self.states(self._num_states)[-(MAX_STATES_TOKENS // 2) :].copy()
            self._begin_at(position + len(states) - len(kept))
            self._states, self._num_states = [kept], len(kept)

    def _begin_at(self, position: int) -> None:
        self.begin, self.num_computed = position, 0
        self._states, self._num_states = [], 0
        self.draft_tokens = NO_DRAFT_TOKENS

    def states(self, count: int) -> States:
        """Return the states [count, layers * hidden] of the entries after the computed ones."""
        if len(self._states) > 1:
            self._states = [np.concatenate(self._states)]
        found: States = self._states[0][:count]
        return found

    def check_states(self) -> None:
        """Raise AssertionError if the states are miscounted or too many."""
        assert self._num_states == sum(map(len, self._states)) <= MAX_STATES_TOKENS

    def advance(self, end: int, draft_tokens: Int32) -> None:
        count = end - self.num_computed
        self._states = [self.states(self._num_states)[count:]] if count < self._num_states else []
        self._num_states -= count
        super().advance(end, draft_tokens)


class EagleChains(DraftChains):
    """EAGLE chains of one scheduler."""

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError on inconsistency of chains, states and sequences."""
        super().check_integrity(sequences)
        for chain in self._of.values():
            assert isinstance(chain, EagleChain)
            chain.check_states()

    def store_states(self, scheduled: Seq[ScheduledChunk], states: States) -> None:
        """Store the hidden states of a step's rows, except for rows after a rejected draft token."""
        row = 0
        for chunk in scheduled:
            first, row = row, row + chunk.count
            sequence = chunk.sequence
            right = min(sequence.num_computed - chunk.start, chunk.count)
            drafts = not (sequence.is_prefill or sequence.is_prompt_only or sequence.seq_id in self._refused)
            if right > 0 and sequence.state is SequenceState.RUNNING and drafts:
                # The chain would drop the older ones anyway.
                older = max(0, right - MAX_STATES_TOKENS)
                self._begun(sequence).keep(chunk.start + older, states[first + older : first + right].copy())

    def _begun(self, sequence: Sequence) -> EagleChain:
        """Return the sequence's chain; make one if there is none."""
        chain = self._of.get(sequence.seq_id)
        if chain is None:
            chain = EagleChain(next(self._ids), sequence, self._shape)
            self.chains[chain.seq_id] = self._of[sequence.seq_id] = chain
        assert isinstance(chain, EagleChain)
        return chain

    def _release(self, chain: DraftChain) -> None:
        del self.chains[chain.seq_id]

    def _chain_of(self, sequence: Sequence) -> EagleChain | None:
        """Return the sequence's chain, if usable; a chain without slots allocates none while memory is short."""
        chain = self._of.get(sequence.seq_id)
        if chain is None or (not chain.num_blocks and self._now < self._paused_until_s):
            return None
        assert isinstance(chain, EagleChain)
        return chain if chain.is_whole else None
