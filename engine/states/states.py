"""Gives each running sequence two states of the model's layers: a step reads one and writes the other.

    ticket --as many slots more as two states take--> joined: they leave the block table
    step   --a state that stands where the piece begins is read, the other one is written--> landed
    landed --some of its tokens do not count: none of both stands where the sequence does--> it computes again from the
             older one (Sequence.compute_from)

So nothing is copied, and nothing is lost that a step computes in vain: tokens after a wrong guess, or after a mask
that was late. A state that no step has written yet is that of no tokens, from which a preempted sequence begins again,
and so does each of several answers to a prompt.

No state is committed, so a block of such a model would be found in vain: keys and values alone do not say how its text
goes on. Its sequences commit nothing. docs/decisions/054-states.md says how that will be otherwise. Sans-IO (I9).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from pillion.engine.backends.backend import StateSlots
from pillion.engine.sampling.sampling_rows import Sampled
from pillion.engine.scheduling.block_chain import BlockChain, Holding
from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.engine.scheduling.step_feature import StepFeature, Steps
from pillion.engine.scheduling.step_plan import SequencePiece, StepPlan
from pillion.engine.worker.worker_feature import WorkerFeature, WorkerSetup

# In a state that no step has written stand so many tokens.
_NOTHING = -1


class WorkingStates(BlockChain):
    """Holds the two states of one sequence: ``pages`` slots each, which are leased to this worker."""

    def __init__(self, block_size: int, slots: tuple[int, ...], pages: int) -> None:
        super().__init__(0, np.empty(0, np.int32), block_size, first_block=0, parent_hash=b"")
        self.take_ticket(Holding(0, (), slots))
        self._slots = slots[:pages], slots[pages:]
        self._stands = [_NOTHING, _NOTHING]
        # This is the state that a launched step writes, and the number of tokens after which it stands then.
        self._written: tuple[int, int] | None = None

    def begin(self, piece: SequencePiece) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the slots that a step with this piece reads and writes; those to read are -1 where the piece begins
        the text."""
        assert piece.start in (0, *self._stands), f"no state stands after {piece.start} tokens"
        read = self._stands.index(piece.start) if piece.start else None
        write = 0 if read is None else 1 - read
        self._written = write, piece.start + piece.count
        reads = (_NOTHING,) * len(self._slots[0]) if read is None else self._slots[read]
        return reads, self._slots[write]

    def end(self) -> None:
        """Notes that the step has ended."""
        if self._written is not None:
            written, tokens = self._written
            self._stands[written], self._written = tokens, None

    def last_before(self, tokens: int) -> int:
        """Returns the last place, at or before ``tokens``, after which a state stands."""
        return max(0, *(stands for stands in self._stands if stands <= tokens))


class States(StepFeature):
    """Holds the states of one scheduler's sequences, each of which takes ``pages`` slots."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._working: dict[int, WorkingStates] = {}

    def bind(self, steps: Steps) -> None:
        self._stock = steps.blocks.stock
        steps.blocks.beside_blocks = 2 * self._pages

    def joined(self, sequence: Sequence, now: float) -> None:
        assert not sequence.num_committed, "a block of a model with states was found"
        sequence.refuse_commit()
        # The parent's state stands behind the prompt, so a sibling computes the prompt, too.
        sequence.leave_parent()
        slots = sequence.cut(sequence.num_blocks - 2 * self._pages)
        self._working[sequence.seq_id] = WorkingStates(sequence.block_size, slots, self._pages)

    def left(self, sequence: Sequence) -> None:
        working = self._working.pop(sequence.seq_id, None)
        if working is not None:
            self._stock.give(working.owned_slots())

    def planned(self, plan: StepPlan) -> StepPlan:
        if not plan.pieces:
            return plan
        places = [self._working[piece.sequence.seq_id].begin(piece) for piece in plan.pieces]
        reads, writes = (np.array(slots, np.int32) for slots in zip(*places, strict=True))
        return replace(plan, states=StateSlots(reads, writes))

    def landed(self, plan: StepPlan, sampled: Sampled) -> None:
        for sequence in (piece.sequence for piece in plan.pieces):
            working = self._working.get(sequence.seq_id)
            if working is None:
                continue
            working.end()
            stands = working.last_before(sequence.num_computed)
            if sequence.state is SequenceState.RUNNING and stands < sequence.num_computed:
                sequence.compute_from(stands)

    def chains(self) -> Iterable[BlockChain]:
        return self._working.values()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        queued = (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PREEMPTED)
        held = {one.seq_id for one in sequences if one.state in queued}
        assert held == self._working.keys(), "a sequence without states, or states without a sequence"


class WorkerStates(WorkerFeature):
    """Lets a decode worker hold states of ``pages`` slots."""

    def __init__(self, pages: int) -> None:
        self._pages = pages

    def step_feature(self) -> StepFeature:
        return States(self._pages)


async def load_states(setup: WorkerSetup) -> WorkerFeature | None:
    """Returns the feature for a model whose layers have states."""
    pages = setup.model.backend.layout.state_pages
    return WorkerStates(pages) if pages else None
