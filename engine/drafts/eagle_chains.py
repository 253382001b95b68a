"""Keeps the KV of an EAGLE-3 head: a draft's chain whose entries are made of states of the model, not of tokens alone.

Entry p of a head is made of the model's state at position p and of the token after it. The states come with the steps
of this worker, so a chain begins with the first of them, at ``begin``: states of a cached prefix, or of a part of the
prompt that a prefill worker has computed, are missing, and the head drafts without them. Its entries count from 0 on,
which rotary embeddings do not notice.

    text       [ cached, or computed elsewhere | states: entries with KV | states: kept for the next pass ] last token
    position   0                           begin                                                      num_tokens - 1

What a block holds depends therefore on where its chain began. So blocks of a head are never committed: a chain has no
ticket, owns all of its slots, and gives them back when it is closed. While nothing is drafted for a stream, its states
are kept; where they are more than MAX_STATES_TOKENS, the chain begins anew with the newest of them. All states of a
text are the model's: the entries of draft tokens, whose states are the head's own, are overwritten. Sans-IO (I9).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from pillion.engine.drafts.draft_chains import NO_DRAFT_TOKENS, DraftChain, DraftChains, DraftShape
from pillion.engine.scheduling.block_chain import Holding
from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.engine.scheduling.step_plan import ScheduledChunk
from pillion.kernels.step import Int32, States

# This many positions of a stream may have states that wait for a pass of the head; beyond that, the newer half of them
# is kept.
MAX_STATES_TOKENS = 512


class EagleChain(DraftChain):
    """Holds an EAGLE head's KV of one sequence, and the states that the head has not read yet."""

    def __init__(self, chain_id: int, sequence: Sequence, shape: DraftShape) -> None:
        super().__init__(chain_id, sequence, shape)
        # The chain has no ticket, and commits nothing.
        self.open(Holding(0, (), ()))
        self.refuse_commit()
        self.begin = 0
        # These are the model's states at the positions after the computed entries.
        self._states: list[States] = []
        self._num_states = 0

    @property
    def end(self) -> int:
        """Gives the number of entries of which state and token are known, once the last step has landed."""
        return self.sequence.num_tokens - 1 - self.begin

    @property
    def is_whole(self) -> bool:
        """Says whether the states of all positions from ``begin`` to the last but one are there."""
        return self.num_computed + self._num_states == self.end

    def settle(self) -> None:
        """Forgets the draft tokens once there are new tokens."""
        if self.num_computed != self.end:
            self.draft_tokens = NO_DRAFT_TOKENS

    def tokens(self, start: int, end: int) -> Int32:
        """Returns the tokens of these entries of the head, int32 [end - start], as a view."""
        return super().tokens(self.begin + 1 + start, self.begin + 1 + end)

    def keep(self, position: int, states: States) -> None:
        """Appends the model's hidden states of the positions from ``position`` on, which the head will read. After a
        gap in the positions, or where more than MAX_STATES_TOKENS wait, the older ones are dropped."""
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
        """Returns the states [count, layers * hidden] of the entries after the computed ones."""
        if len(self._states) > 1:
            self._states = [np.concatenate(self._states)]
        found: States = self._states[0][:count]
        return found

    def check_states(self) -> None:
        """Raises AssertionError where the states are not those that the chain counts, or are too many."""
        assert self._num_states == sum(map(len, self._states)) <= MAX_STATES_TOKENS

    def advance(self, end: int, draft_tokens: Int32) -> None:
        count = end - self.num_computed
        self._states = [self.states(self._num_states)[count:]] if count < self._num_states else []
        self._num_states -= count
        super().advance(end, draft_tokens)


class EagleChains(DraftChains):
    """Holds the EAGLE chains of one scheduler."""

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError where chains, their states and sequences contradict each other."""
        super().check_integrity(sequences)
        for chain in self._of.values():
            assert isinstance(chain, EagleChain)
            chain.check_states()

    def landed(self, scheduled: Seq[ScheduledChunk], states: States) -> None:
        """Keeps the states of a step's rows whose tokens belong to texts now, which those after a wrong draft token do
        not."""
        row = 0
        for chunk in scheduled:
            first, row = row, row + chunk.count
            sequence = chunk.sequence
            right = min(sequence.num_computed - chunk.start, chunk.count)
            drafts = not (sequence.is_prefill or sequence.is_prompt_only or sequence.seq_id in self._refused)
            if right > 0 and sequence.state is SequenceState.RUNNING and drafts:
                # A chain would drop the older ones of more states.
                older = max(0, right - MAX_STATES_TOKENS)
                self._begun(sequence).keep(chunk.start + older, states[first + older : first + right].copy())

    def _begun(self, sequence: Sequence) -> EagleChain:
        """Returns the sequence's chain; makes one where there is none."""
        chain = self._of.get(sequence.seq_id)
        if chain is None:
            chain = EagleChain(next(self._ids), sequence, self._shape)
            self.chains[chain.seq_id] = self._of[sequence.seq_id] = chain
        assert isinstance(chain, EagleChain)
        return chain

    def _let_go(self, chain: DraftChain) -> None:
        del self.chains[chain.seq_id]

    def _chain_of(self, sequence: Sequence) -> EagleChain | None:
        """Returns the sequence's chain, if it can be used; a chain without slots takes none while memory is short."""
        chain = self._of.get(sequence.seq_id)
        if chain is None or (not chain.num_blocks and self._now < self._paused_until_s):
            return None
        assert isinstance(chain, EagleChain)
        return chain if chain.is_whole else None
