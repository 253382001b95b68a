"""The layers' recurrent states of running sequences: a step reads one and writes another, and some are kept for other
texts.

    ticket --its table ends with slots for three states--> queued: these slots leave the block table
    step   --reads the state at the chunk's start, writes a free one--> retired
    retired step, some of whose tokens do not count --no state at the sequence's end--> recomputes from an older one
             (Sequence.compute_from)
    state at the last whole block of a prompt, answer, prefill range or preempted sequence, or where texts diverge
    (state_positions)
           --right after the commit of that block--> committed

So nothing is copied, and rejected results (after a wrong draft token or a late mask) cost nothing. A state found with a
ticket is at the end of the ticket's chain, and is read in place. A text without a state is computed from its beginning.

If steps run ahead (on GPUs, and in prefill workers of several stages), each reads what the one before will have
written. A state that no later step reads, and that is not to be kept, may be overwritten meanwhile, since each process
of the worker runs the steps in order.

Two states are enough: one to read and one to write. The third is the one at the last block boundary, kept until the
next boundary. Once it is committed, free slots replace it; without free slots no more states are kept: memory comes
first, and a missing state is recomputed (I1). Reasons: docs/decisions/states.md. Sans-IO (I9).
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
from pillion.engine.scheduling.state_positions import StatePositions
from pillion.engine.scheduling.step_plan import CommitOrder, ScheduledChunk
from pillion.kernels.step import StateSlots
from pillion.kvstore.hashing import state_page

# States per sequence: one read, one written, and one at the last block boundary.
STATES = 3
# Page chains have ids -2**40, -2**40 - 1, ..., apart from draft chains' -1, -2, ...
_FIRST_ID = 2**40


@dataclass(frozen=True, slots=True)
class StateInSlots:
    """The state after ``tokens`` tokens, in the pool. ``own``: its slots are leased to this worker."""

    tokens: int
    slots: tuple[int, ...]
    own: bool = True


class PageChain(BlockChain):
    """The pages of one state until the node has committed them."""

    def __init__(self, chain_id: int, sequence: Sequence, state: StateInSlots) -> None:
        super().__init__(chain_id, np.empty(0, np.int32), sequence.block_size, first_block=0, parent_hash=b"")
        self.take_ticket(AdoptedTicket(sequence.ticket_id, (), state.slots))
        self.sequence, self.state_tokens = sequence, state.tokens
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
        self.stored: list[StateInSlots] = []
        if sequence.state_slots:
            self.stored.append(StateInSlots(sequence.num_computed, sequence.state_slots, own=False))
        # States written by launched steps, oldest first; an overwritten state has no slots.
        self._written: deque[StateInSlots] = deque()
        self.positions = StatePositions(sequence, pages)

    def owned_slots(self) -> tuple[int, ...]:
        """Return all slots of the sequence's own states."""
        states = [*(state.slots for state in (*self.stored, *self._written) if state.own), *self.free]
        return tuple(slot for slots in states for slot in slots)

    @property
    def own_states(self) -> int:
        """Number of states whose slots are leased to this worker."""
        return len(self.owned_slots()) // self._pages

    def begin(self, chunk: ScheduledChunk) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the slots that a step with this chunk reads and writes; reads are -1 at the beginning of a text."""
        states = (*self.stored, *self._written)
        read = next((state for state in states if state.tokens == chunk.start and state.slots), None)
        assert read is not None or not chunk.start, f"no state after {chunk.start} tokens"
        if not self.free:
            self._free_worst(read)
        written = StateInSlots(chunk.start + chunk.count, self.free.pop())
        self._written.append(written)
        return (-1,) * self._pages if read is None else read.slots, written.slots

    def _free_worst(self, read: StateInSlots | None) -> None:
        """Free the slots of the own state that is needed least: oldest first, but the one at the last block boundary
        after others, those to be kept at the very last, and never the one that the next step reads."""
        own = [s for s in (*self.stored, *self._written) if s.own and s.slots and s is not read]
        boundary = max((s.tokens for s in own if s.tokens % self.block_size == 0), default=0)
        worst = min(own, key=lambda s: (self.positions.wants(s.tokens), s.tokens == boundary, s.tokens))
        if worst in self.stored:
            self.stored.remove(worst)
        else:
            self._written[self._written.index(worst)] = replace(worst, slots=())
        self.free.append(worst.slots)

    def void_steps(self) -> None:
        """Free the slots that the sequence's launched steps write; those steps are void. Steps run in order, so a later
        one may write there."""
        self.free += [state.slots for state in self._written if state.slots]
        self._written = deque(replace(state, slots=()) for state in self._written)

    def end_step(self) -> None:
        """Record the end of the oldest launched step."""
        if self._written and (written := self._written.popleft()).slots:
            self.stored.append(written)

    def end_all_steps(self) -> None:
        """Count the states of all launched steps as stored, because the sequence leaves its queue."""
        while self._written:
            self.end_step()

    def settle(self, tokens: int) -> int:
        """Accept the first ``tokens`` tokens. Return the last position up to that with a state; keep that state and the
        last one at a block boundary, and free the others."""
        last = max((state.tokens for state in self.stored if state.tokens <= tokens), default=0)
        boundaries = [s.tokens for s in self.stored if s.own and s.tokens % self.block_size == 0]
        boundary = max((position for position in boundaries if position <= tokens), default=0)
        kept = [state for state in self.stored if state.tokens in (last, boundary)]
        self.free += [state.slots for state in self.stored if state.own and state not in kept]
        self.stored = kept
        return last

    def replace_stored(self, slots: tuple[int, ...], state: StateInSlots) -> bool:
        """Replace the stored state in ``slots`` by ``state``. Return False if there is none any more."""
        indices = [index for index, stored in enumerate(self.stored) if stored.slots == slots]
        for index in indices:
            self.stored[index] = state
        return bool(indices)

    def boundary_state(self) -> StateInSlots | None:
        """Return the last of the sequence's own stored states at a block boundary; None without one."""
        own = [s for s in self.stored if s.own and s.tokens % self.block_size == 0 and s.tokens]
        return own[-1] if own else None


class States:
    """The recurrent states of one scheduler's sequences; a state takes ``pages`` slots of ``blocks``."""

    def __init__(self, pages: int, blocks: BlockManager) -> None:
        self._pages = pages
        self._blocks = blocks
        self._free_slots = blocks.free_slots
        blocks.extra_blocks = STATES * pages
        blocks.state_pages = pages
        self._working: dict[int, WorkingStates] = {}
        # States to commit, until the node's answer, by chain id.
        self._to_commit: dict[int, PageChain] = {}
        self._ids = itertools.count(_FIRST_ID)

    def join(self, sequence: Sequence) -> None:
        """Cut the slots for states off the block table of a sequence that has joined the queues."""
        assert bool(sequence.state_slots) == bool(sequence.num_committed), "a chain without its state"
        # A parallel sample does not copy the parent's partial block: the parent has no state at its start.
        sequence.leave_parent()
        slots = sequence.cut(sequence.num_blocks - STATES * self._pages)
        self._working[sequence.seq_id] = WorkingStates(sequence, slots, self._pages)

    def keep(self, sequence: Sequence) -> None:
        """Commit the state at the last block boundary of a running sequence that ends or is preempted: a later turn, or
        the resumed sequence, starts from it unless it is evicted."""
        working = self._working[sequence.seq_id]
        working.end_all_steps()
        working.settle(sequence.num_computed)
        state = working.boundary_state()
        if state is not None and sequence.may_commit:
            working.stored.remove(state)
            self._keep(sequence, state)

    def leave(self, sequence: Sequence) -> None:
        """Free the states of a sequence that has left the queues."""
        working = self._working.pop(sequence.seq_id, None)
        if working is not None:
            self._free_slots.free(working.owned_slots())

    def begin(self, scheduled: Seq[ScheduledChunk]) -> StateSlots:
        """Return the slots of the states that a step of these chunks reads and writes."""
        slots = [self._working[chunk.sequence.seq_id].begin(chunk) for chunk in scheduled]
        reads, writes = (np.array(slots_of, np.int32) for slots_of in zip(*slots, strict=True))
        return StateSlots(reads, writes)

    def end_step(self, scheduled: Seq[ScheduledChunk]) -> None:
        """Record the end of a step of these chunks, after its results were applied to the sequences."""
        for sequence in (chunk.sequence for chunk in scheduled):
            working = self._working.get(sequence.seq_id)
            if working is None or sequence.state is not SequenceState.RUNNING:
                continue
            self._complete(working)
            working.end_step()
            if not sequence.num_in_flight:
                working.void_steps()
            last = working.settle(sequence.num_computed)
            if last < sequence.num_computed:
                # With a step in flight the state may only have been overwritten; that step continues from a later one.
                if not sequence.num_in_flight:
                    sequence.compute_from(last)
            elif working.positions.reached(last) and sequence.may_commit and working.own_states == STATES:
                self._keep_current(sequence, working)

    def _keep_current(self, sequence: Sequence, working: WorkingStates) -> None:
        """Commit the state at the last block boundary of a running sequence, which only reads it from then on."""
        state = working.boundary_state()
        if state is None:
            return
        working.stored = [replace(s, own=False) if s is state else s for s in working.stored if s.own]
        self._keep(sequence, state)

    def _complete(self, working: WorkingStates) -> None:
        """Allocate slots in place of a committed state's, if enough are free."""
        if working.own_states < STATES and len(self._free_slots) >= self._pages + self._blocks.needed_blocks:
            slots = [self._free_slots.allocate() for _ in range(self._pages)]
            working.free.append(tuple(slot for slot in slots if slot is not None))

    @property
    def lacking_blocks(self) -> int:
        """Number of slots that sequences lack for their third states."""
        return self._pages * sum(working.own_states < STATES for working in self._working.values())

    def yield_slots(self, blocks: int, now: float) -> bool:
        """Free at least ``blocks`` unused slots of third states, or all. Return False if there were none."""
        freed = 0
        for working in self._working.values():
            if freed < blocks and working.own_states == STATES and working.free:
                self._free_slots.free(working.free.pop())
                freed += self._pages
        return freed > 0

    def _keep(self, sequence: Sequence, state: StateInSlots) -> None:
        """Queue a state to be committed after its sequence's block."""
        chain = PageChain(-next(self._ids), sequence, state)
        self._to_commit[chain.seq_id] = chain

    def take_orders(self, releases: Collection[int]) -> list[CommitOrder]:
        """Return the orders to commit states whose preceding block is sent or committed. States that can no longer be
        committed, e.g. because their ticket is one of ``releases``, are dropped."""
        orders = []
        for chain in [chain for chain in self._to_commit.values() if not chain.ordered]:
            sequence = chain.sequence
            # In one message with the last block, so that a request that waits for the block finds the state.
            is_sent = sequence.num_sent * sequence.block_size >= chain.state_tokens
            has_ticket = sequence.ticket_id == chain.ticket_id
            if has_ticket and is_sent:
                orders.append(chain.order(0.0))
            elif not has_ticket or not sequence.may_commit or chain.ticket_id in releases:
                del self._to_commit[chain.seq_id]
                self._free_slots.free(chain.cut(0))
        return orders

    def committed(self, chain_id: int, slots: Seq[int], refusal: str) -> bool:
        """Handle the node's answer to the commit of a state. Return False if ``chain_id`` is another feature's."""
        chain = self._to_commit.pop(chain_id, None)
        if chain is None:
            return False
        own = chain.slots(0, chain.num_blocks)
        working = self._working.get(chain.sequence.seq_id)
        # Later steps read the state from the slots of its first committer or, if refused, from the own ones.
        state = StateInSlots(chain.state_tokens, own if refusal else tuple(slots), own=bool(refusal))
        is_read = working is not None and working.replace_stored(own, state)
        if not refusal:
            self._blocks.accept(chain, slots)
        elif not is_read:
            self._free_slots.free(chain.cut(0))
        return True

    def side_chains(self) -> Iterable[BlockChain]:
        """Return the chains of the sequences' states, and of states to commit."""
        return (*self._working.values(), *self._to_commit.values())

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless exactly the queued sequences have states."""
        queued = (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PREEMPTED)
        seq_ids = {sequence.seq_id for sequence in sequences if sequence.state in queued}
        assert seq_ids == self._working.keys(), "a sequence without states, or states without a sequence"
