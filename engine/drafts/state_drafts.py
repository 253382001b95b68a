"""Runs a draft model whose layers carry states: where its states are, and which of them a pass reads and writes.

A chain has STATES states beside its blocks. One of them, the base, stands after the tokens that are computed. The pass
over the tokens that came since reads it and writes the next base; each pass of a draft token reads what the pass before
it has written, and writes one of the other two in turn, so the base outlives wrong draft tokens.

    tokens   read A, write B     B is the base now
    draft tokens  read B, write C     read C, write A     read A, write C   ...

So tokens that were drafted right are computed once more, as known tokens: a few rows of the next first pass. KV is
worth nothing without a state at its end, and a draft keeps none for others (docs/decisions/states.md has what that
takes of a pool). So the chain has no ticket, its blocks are not committed, and each stream's draft reads the prompt
from its beginning. Sans-IO but for the passes (I9).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from pillion.engine.drafts.draft_chains import DraftChain, DraftPlan, DraftShape, OwnChain, OwnChains
from pillion.engine.drafts.draft_model import DraftModel
from pillion.engine.scheduling.sequence import Sequence
from pillion.kernels.step import Int32, StateSlots, StepBatch

# A chain has so many states: the base, and two that drafts read and write in turn.
STATES = 3


class StateDraftChain(OwnChain):
    """Holds the KV and the states of a draft model for one sequence."""

    def __init__(self, chain_id: int, sequence: Sequence, shape: DraftShape) -> None:
        super().__init__(chain_id, sequence, shape)
        self._pages = shape.state_pages
        # The base comes first. There are none until there is memory for all of them.
        self.states: tuple[tuple[int, ...], ...] = ()

    @property
    def num_slots(self) -> int:
        return len(self.owned_slots())

    @property
    def lacking_slots(self) -> int:
        """Gives the number of slots that the chain needs for its states before it can compute anything."""
        return 0 if self.states else STATES * self._pages

    def take_states(self, slots: Seq[int]) -> None:
        """Takes the slots of all states."""
        pages = self._pages
        self.states = tuple(tuple(slots[first : first + pages]) for first in range(0, len(slots), pages))

    def owned_slots(self) -> tuple[int, ...]:
        return (*super().owned_slots(), *(slot for state in self.states for slot in state))

    def advance(self, end: int, draft_tokens: Int32) -> None:
        super().advance(end, draft_tokens)
        before, base, other = self.states
        self.states = base, other, before

    def close(self) -> tuple[int, ...]:
        given = self.owned_slots()
        self.states = ()
        super().close()
        return given


class StateDraftChains(OwnChains):
    """Holds the chains of a draft model with states, of one scheduler."""

    kind = StateDraftChain

    def _chain_of(self, sequence: Sequence) -> DraftChain | None:
        chain = self._of.get(sequence.seq_id)
        paused = self._now < self._paused_until_s
        if sequence.seq_id in self._refused or (paused and (chain is None or not chain.num_slots)):
            return None
        return self._begun(sequence)

    def _grow(self, chain: DraftChain, tokens: int) -> None:
        """Takes slots for the chain's states, all of them or none, and then for its tokens."""
        assert isinstance(chain, StateDraftChain)
        lacking, free_slots = chain.lacking_slots, self._free_slots
        if lacking and len(free_slots) >= lacking + self._block_manager.needed_blocks:
            taken = [free_slots.take() for _ in range(lacking)]
            chain.take_states([slot for slot in taken if slot is not None])
        if not chain.lacking_slots:
            super()._grow(chain, tokens)
        elif free_slots.exhausted(self._now):
            self._pause(self._now)
        elif self._now >= self._paused_until_s:
            self._lacking_blocks += lacking


class StateDraftModel(DraftModel):
    """Runs the passes of a draft model whose layers carry states."""

    # int32 [sequences of the last pass, 2, pages]: the states that the next two passes write.
    _turns: Int32

    def _first_pass(self, plan: DraftPlan) -> StepBatch:
        reads, writes, others = [], [], []
        for chunk in plan.scheduled:
            assert isinstance(chunk.chain, StateDraftChain)
            before, base, other = chunk.chain.states
            reads.append(before if chunk.start else (-1,) * len(before))
            writes.append(base)
            others.append((other, before))
        self._turns = self._places(others)
        return replace(super()._first_pass(plan), states=StateSlots(self._places(reads), self._places(writes)))

    def _next_pass(self, batch: StepBatch, seqs: Seq[int], kept: Seq[int], tokens: Seq[int]) -> StepBatch:
        assert batch.states is not None
        turns = self._turns[list(seqs)]
        self._turns = turns[:, ::-1]
        states = StateSlots(batch.states.writes[list(seqs)], np.ascontiguousarray(turns[:, 0]))
        return replace(super()._next_pass(batch, seqs, kept, tokens), states=states)

    def _places(self, slots: Seq[object]) -> Int32:
        """Returns the draft model's blocks that begin in these slots of the pool; -1 stays."""
        found = np.array(slots, np.int64)
        return np.where(found < 0, -1, self.blocks_at(found)).astype(np.int32)
