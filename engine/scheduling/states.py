"""The layers' states of running sequences: a step reads one and writes another, and some are kept for other texts.

    ticket --slots for three more states--> joined: they leave the block table
    step   --reads the state where the chunk begins, writes a free one--> landed
    landed --if some of its tokens do not count, no state is at the sequence's end--> recomputes from an older one
             (Sequence.compute_from)
    at the last whole block of a prompt, of an answer, of a prefill range and of a preempted sequence, and where texts
    diverge (state_places)
           --with its last block's commit--> the state is committed after it

So nothing is copied, and rejected results (after a wrong draft token or a late mask) cost nothing. A state found with a
ticket is at the end of the ticket's chain, and is read in place. A text without a state is computed from its beginning.

If steps run ahead (on GPUs, and in prefill workers of several stages), each reads what the one before will have
written. A state that no later step reads, and that is not to be kept, may be overwritten meanwhile, since each process
of the worker runs the steps in order.

Two states are enough: one to read and one to write. The third stays after the last whole block, until the next one is
whole. Once it is committed, free slots replace it; without free slots nothing more is kept: memory comes first, and a
state that is not kept is recomputed (I1). Reasons: docs/decisions/states.md. Sans-IO (I9).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from pillion.engine.scheduling.block_chain import AdoptedTicket, BlockChain
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.engine.scheduling.state_places import StatePlaces
from pillion.engine.scheduling.step_plan import CommitOrder, ScheduledChunk
from pillion.kernels.step import StateSlots
from pillion.kvstore.hashing import state_page

STATES = 3
# Ids of page chains are above sequences' ids and below those of other features' chains.
_FIRST_ID = 2**40


@dataclass(frozen=True, slots=True)
class Standing:
    """A state after ``tokens`` tokens. ``own`` if its slots are leased to this worker."""

    tokens: int
    slots: tuple[int, ...]
    own: bool = True


class PageChain(BlockChain):
    """The pages of one state until the node has committed them."""

    def __init__(self, number: int, sequence: Sequence, state: Standing) -> None:
        super().__init__(number, np.empty(0, np.int32), sequence.block_size, first_block=0, parent_hash=b"")
        self.take_ticket(AdoptedTicket(sequence.ticket_id, (), state.slots))
        self.sequence, self.stands_after = sequence, state.tokens
        self.after = sequence.hash_before(state.tokens // sequence.block_size)
        self.ordered = False

    def order(self, now: float) -> CommitOrder:
        """Return the order to commit the pages."""
        self.send(self.num_blocks)
        self.ordered = True
        hashes = b"".join(state_page(self.after, page) for page in range(self.num_blocks))
        slots = self.slots(0, self.num_blocks)
        return CommitOrder(
            seq_id=self.seq_id,
            ticket_id=self.ticket_id,
            slots=slots,
            block_hashes=hashes,
            ordered_s=now,
            after=self.after,
        )


class WorkingStates(BlockChain):
    """The states of one sequence, each of ``pages`` slots."""

    def __init__(self, sequence: Sequence, slots: tuple[int, ...], pages: int) -> None:
        super().__init__(0, np.empty(0, np.int32), sequence.block_size, first_block=0, parent_hash=b"")
        self._pages = pages
        self.free = [slots[first : first + pages] for first in range(0, len(slots), pages)]
        self.standing: list[Standing] = []
        if sequence.state_slots:
            self.standing.append(Standing(sequence.num_computed, sequence.state_slots, own=False))
        # States written by launched steps, oldest first; one without slots was overwritten since.
        self._written: deque[Standing] = deque()
        self.places = StatePlaces(sequence, pages)

    def owned_slots(self) -> tuple[int, ...]:
        """Return all slots of the sequence's own states."""
        states = [*(one.slots for one in (*self.standing, *self._written) if one.own), *self.free]
        return tuple(slot for slots in states for slot in slots)

    @property
    def own_states(self) -> int:
        """Number of states whose slots are leased to this worker."""
        return len(self.owned_slots()) // self._pages

    def begin(self, chunk: ScheduledChunk) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the slots that a step with this chunk reads and writes; reads are -1 at the beginning of a text."""
        every = (*self.standing, *self._written)
        read = next((one for one in every if one.tokens == chunk.start and one.slots), None)
        assert read is not None or not chunk.start, f"no state stands after {chunk.start} tokens"
        if not self.free:
            self._free_one(read)
        written = Standing(chunk.start + chunk.count, self.free.pop())
        self._written.append(written)
        return (-1,) * self._pages if read is None else read.slots, written.slots

    def _free_one(self, read: Standing | None) -> None:
        """Free a state that the next step does not read: the one after the last whole block only if there is no third,
        and one that is to be kept last."""
        own = [one for one in (*self.standing, *self._written) if one.own and one.slots and one is not read]
        whole = max((one.tokens for one in own if one.tokens % self.block_size == 0), default=0)
        worst = min(own, key=lambda one: (self.places.wants(one.tokens), one.tokens == whole, one.tokens))
        if worst in self.standing:
            self.standing.remove(worst)
        else:
            self._written[self._written.index(worst)] = replace(worst, slots=())
        self.free.append(worst.slots)

    def void_steps(self) -> None:
        """Void the sequence's launched steps. Steps run in order, so a later one may write to their slots."""
        self.free += [one.slots for one in self._written if one.slots]
        self._written = deque(replace(one, slots=()) for one in self._written)

    def end(self) -> None:
        """Record the end of the oldest launched step."""
        if self._written and (written := self._written.popleft()).slots:
            self.standing.append(written)

    def give_up_steps(self) -> None:
        """End all launched steps, whose results are not needed."""
        while self._written:
            self.end()

    def settle(self, tokens: int) -> int:
        """Accept ``tokens`` tokens. Return the last position up to there with a state; keep that state and the one
        after the last whole block, and free the others."""
        stands = max((one.tokens for one in self.standing if one.tokens <= tokens), default=0)
        wholes = [one.tokens for one in self.standing if one.own and one.tokens % self.block_size == 0]
        whole = max((one for one in wholes if one <= tokens), default=0)
        kept = [one for one in self.standing if one.tokens in (stands, whole)]
        self.free += [one.slots for one in self.standing if one.own and one not in kept]
        self.standing = kept
        return stands

    def moved(self, slots: tuple[int, ...], state: Standing) -> bool:
        """Record the new place of a state that was in these slots. Return False if it is not read any more."""
        places = [at for at, one in enumerate(self.standing) if one.slots == slots]
        for at in places:
            self.standing[at] = state
        return bool(places)

    def whole_state(self) -> Standing | None:
        """Return the latest of the sequence's own states at the end of a whole block; None without one."""
        whole = [one for one in self.standing if one.own and one.tokens % self.block_size == 0 and one.tokens]
        return whole[-1] if whole else None


class States:
    """The states of one scheduler's sequences, each of ``pages`` slots of ``blocks``."""

    def __init__(self, pages: int, blocks: BlockManager) -> None:
        self._pages = pages
        self._blocks = blocks
        self._free_slots = blocks.free_slots
        blocks.beside_blocks = STATES * pages
        blocks.state_pages = pages
        self._working: dict[int, WorkingStates] = {}
        # States that wait for their blocks' commit, or for the node's answer, by the ids of their chains.
        self._leaving: dict[int, PageChain] = {}
        self._ids = itertools.count(_FIRST_ID)

    def join(self, sequence: Sequence) -> None:
        """Take the slots for states from a sequence that has joined the queues."""
        assert bool(sequence.state_slots) == bool(sequence.num_committed), "a chain without its state"
        # The parent's state is after the prompt, so a parallel sample computes what it has not found.
        sequence.leave_parent()
        slots = sequence.cut(sequence.num_blocks - STATES * self._pages)
        self._working[sequence.seq_id] = WorkingStates(sequence, slots, self._pages)

    def keep(self, sequence: Sequence) -> None:
        """Keep the state after the last whole block of a running sequence that ends or is preempted, which resumes from
        there while the pool has room."""
        working = self._working[sequence.seq_id]
        working.give_up_steps()
        working.settle(sequence.num_computed)
        state = working.whole_state()
        if state is not None and sequence.may_commit:
            working.standing.remove(state)
            self._keep(sequence, state)

    def leave(self, sequence: Sequence) -> None:
        """Free the states of a sequence that has left the queues."""
        working = self._working.pop(sequence.seq_id, None)
        if working is not None:
            self._free_slots.give(working.owned_slots())

    def begin(self, scheduled: Seq[ScheduledChunk]) -> StateSlots:
        """Return the slots of states that a step of these chunks reads and writes."""
        places = [self._working[chunk.sequence.seq_id].begin(chunk) for chunk in scheduled]
        reads, writes = (np.array(slots, np.int32) for slots in zip(*places, strict=True))
        return StateSlots(reads, writes)

    def landed(self, scheduled: Seq[ScheduledChunk]) -> None:
        """Record that all results of a step of these chunks are applied."""
        for sequence in (chunk.sequence for chunk in scheduled):
            working = self._working.get(sequence.seq_id)
            if working is None or sequence.state is not SequenceState.RUNNING:
                continue
            self._complete(working)
            working.end()
            if not sequence.num_in_flight:
                working.void_steps()
            stands = working.settle(sequence.num_computed)
            if stands < sequence.num_computed:
                # A step that runs ahead may have overwritten the state, and continues from a later one.
                if not sequence.num_in_flight:
                    sequence.compute_from(stands)
            elif working.places.reached(stands) and sequence.may_commit and working.own_states == STATES:
                self._keep_place(sequence, working)

    def _keep_place(self, sequence: Sequence, working: WorkingStates) -> None:
        """Commit the current state, which is from then on read where it was committed."""
        state = working.whole_state()
        if state is None:
            return
        working.standing = [replace(one, own=False) if one is state else one for one in working.standing if one.own]
        self._keep(sequence, state)

    def _complete(self, working: WorkingStates) -> None:
        """Replace a sequence's third state after a commit, if there are free slots."""
        if working.own_states < STATES and len(self._free_slots) >= self._pages + self._blocks.needed_blocks:
            taken = [self._free_slots.take() for _ in range(self._pages)]
            working.free.append(tuple(slot for slot in taken if slot is not None))

    @property
    def lacking_blocks(self) -> int:
        """Slots that sequences lack for their third states."""
        return self._pages * sum(working.own_states < STATES for working in self._working.values())

    def yield_slots(self, blocks: int, now: float) -> bool:
        """Free at least ``blocks`` slots of third states. Return False if there were none."""
        given = 0
        for working in self._working.values():
            if given < blocks and working.own_states == STATES and working.free:
                self._free_slots.give(working.free.pop())
                given += self._pages
        return given > 0

    def _keep(self, sequence: Sequence, state: Standing) -> None:
        chain = PageChain(-next(self._ids), sequence, state)
        self._leaving[chain.seq_id] = chain

    def take_orders(self, releases: Collection[int]) -> list[CommitOrder]:
        """Return the orders to commit states whose last block is sent or committed. States under one of the tickets
        ``releases``, which the worker releases, are dropped."""
        orders = []
        for chain in [one for one in self._leaving.values() if not one.ordered]:
            sequence = chain.sequence
            # Ordered after the last block and carried out with it: whoever waits for the block finds the state.
            sent = sequence.num_sent * sequence.block_size >= chain.stands_after
            same = sequence.ticket_id == chain.ticket_id
            if same and sent:
                orders.append(chain.order(0.0))
            elif not same or not sequence.may_commit or chain.ticket_id in releases:
                del self._leaving[chain.seq_id]
                self._free_slots.give(chain.cut(0))
        return orders

    def committed(self, chain_id: int, slots: Seq[int], refusal: str) -> bool:
        """Handle the node's answer to a CommitOrder. Return False if the chain is none of these."""
        chain = self._leaving.pop(chain_id, None)
        if chain is None:
            return False
        own = chain.slots(0, chain.num_blocks)
        working = self._working.get(chain.sequence.seq_id)
        # The next step may still have to read the state, now in the slots of its first committer.
        stays = Standing(chain.stands_after, own if refusal else tuple(slots), own=bool(refusal))
        read = working is not None and working.moved(own, stays)
        if not refusal:
            self._blocks.accept(chain, slots)
        elif not read:
            self._free_slots.give(chain.cut(0))
        return True

    def side_chains(self) -> Iterable[BlockChain]:
        """Return the states of sequences, and those that wait for their commit."""
        return (*self._working.values(), *self._leaving.values())

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless exactly the queued sequences have states."""
        queued = (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PREEMPTED)
        held = {one.seq_id for one in sequences if one.state in queued}
        assert held == self._working.keys(), "a sequence without states, or states without a sequence"
