"""Decides which adapters a worker keeps ready, in which slots, and which sequences may run with them; sans-IO (I9).

    absent --has a slot--> LOADING --read and packed--> PACKED --no step reads the slot--> READY
      ^                        |                                                               |
      +------- failed ---------+          nobody holds it and another adapter needs the slot -+

A sequence with an adapter joins when it joins the scheduler's queues. From then on it either holds its adapter's slot,
or waits for one because sequences with other adapters hold them all; it may run once the adapter is READY. It lets go
when it leaves the queues: it has ended, or it was preempted and so joins again later. A slot changes hands only while
nobody holds it, the least recently held one first.

No sequence waits for ever. Slots are given in queue order. A sequence that joins an adapter with a slot is let past
those that wait for one, but not for long: for each adapter that has waited SLOT_PATIENCE_S, one slot is closed. No new
sequence may hold a closed slot, and of its holders those that have not begun and come after the waiting one go back
into the line, so it is free when the answers of the others end. Holders always get on: they wait neither for a slot
nor, because a preempted sequence lets go, for memory that others keep.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from pillion.engine.backends.backend import PackedAdapter
from pillion.engine.scheduling.in_flight import InFlightSteps
from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.engine.scheduling.step_plan import ScheduledChunk
from pillion.kernels.step import Int32

# A sequence whose adapter has no slot lets others whose adapter has one go first for this long.
SLOT_PATIENCE_S = 1.0
# The scheduler looks this often for sequences that have waited for SLOT_PATIENCE_S.
PATIENCE_CHECK_S = 0.1

# (slot, packed adapter) pairs.
Placements = tuple[tuple[int, PackedAdapter], ...]


class SlotState(Enum):
    """Names the states of an adapter slot, as this module's drawing shows them; EMPTY is a slot without an adapter."""

    EMPTY = "empty"
    LOADING = "loading"
    PACKED = "packed"
    READY = "ready"


@dataclass(slots=True)
class AdapterSlot:
    """Describes one of the backend's slots for adapters. ``last_held`` rises with every use; ``read_until`` numbers the
    last launched step that may read what the slot held before. ``packed`` is what the backend takes, between PACKED and
    READY."""

    index: int
    digest: str = ""
    state: SlotState = SlotState.EMPTY
    holders: dict[int, Sequence] = field(default_factory=dict)
    closed: bool = False
    last_held: int = 0
    read_until: int = 0
    packed: PackedAdapter | None = None


class AdapterSlots:
    """Manages the slots of one scheduler, whose steps in flight it asks.

    ``ready``, which is for reading, has digests of the adapters that sequences can run with at once.
    """

    def __init__(self, slots: int, in_flight: InFlightSteps) -> None:
        self.ready: tuple[str, ...] = ()
        self._evicted = 0
        self._in_flight = in_flight
        self._slots = [AdapterSlot(index) for index in range(slots)]
        self._of: dict[str, AdapterSlot] = {}
        self._held: dict[int, AdapterSlot] = {}
        # These are the sequences whose adapter has no slot, in queue order, and since when each of them waits.
        self._waiting: list[Sequence] = []
        self._since_s: dict[int, float] = {}
        self._uses = 0
        # These say whether a waiting sequence may get a slot now, and when the waiting times are looked at again.
        self._changed = False
        self._check_s = 0.0
        self._orders: list[str] = []
        self._placements: dict[int, PackedAdapter] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def waits(self) -> int:
        """Gives the number of sequences that cannot run yet for want of their adapter."""
        return len(self._waiting) + sum(len(slot.holders) for slot in self._slots if slot.state is not SlotState.READY)

    def join(self, sequence: Sequence, now: float) -> None:
        """Takes a sequence that joins the scheduler's queues; one without an adapter needs nothing here."""
        if sequence.adapter:
            sequence.await_adapter()
            insort(self._waiting, sequence, key=_queue_order)
            self._since_s[sequence.seq_id] = now
            self._changed = True

    def preload(self, digest: str) -> None:
        """Loads an adapter into an idle slot, because a sequence with it will join soon, unless another sequence waits
        for a slot."""
        if digest not in self._of and not self._waiting:
            slot = self._slot_for(digest)
            if slot is not None:
                self._use(slot)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence that leaves the scheduler's queues. A sequence that is in none is ignored."""
        if not sequence.adapter:
            return
        sequence.leave_adapter()
        if self._since_s.pop(sequence.seq_id, None) is not None:
            self._waiting.remove(sequence)
            return
        slot = self._held.pop(sequence.seq_id, None)
        if slot is not None:
            del slot.holders[sequence.seq_id]
            self._use(slot)
            self._changed = self._changed or not slot.holders

    def loaded(self, digest: str, packed: PackedAdapter) -> None:
        """Notes that an adapter that was ordered has been read and packed."""
        slot = self._of[digest]
        assert slot.state is SlotState.LOADING, f"{digest} was not ordered"
        slot.state, slot.packed = SlotState.PACKED, packed

    def failed(self, digest: str) -> tuple[Sequence, ...]:
        """Notes that an adapter that was ordered could not be loaded. Returns the sequences that hold its slot, which
        has no adapter now."""
        return self._clear(self._of[digest])

    def not_placed(self, placements: Placements) -> tuple[Sequence, ...]:
        """Notes that the step that was to place these adapters has failed. Returns all holders of their slots."""
        # A slot that was given away meanwhile is filled by a later step.
        slots = [slot for index, _ in placements if (slot := self._slots[index]).state is SlotState.READY]
        holders = tuple(sequence for slot in slots for sequence in self._clear(slot))
        self._count_ready()
        return holders

    def assign(self, now: float) -> None:
        """Gives slots to sequences that wait, in queue order, and lets those run whose adapter is there."""
        for slot in self._slots if self._of else ():
            if slot.packed is not None and self._in_flight.has_landed(slot.read_until):
                slot.state = SlotState.READY
                self._placements[slot.index], slot.packed = slot.packed, None
                for sequence in slot.holders.values():
                    sequence.use_adapter(slot.index, now)
                self._changed = True
                self._count_ready()
        if not self._waiting or not (self._changed or now >= self._check_s):
            return
        self._changed, self._check_s = False, now + PATIENCE_CHECK_S
        self._close_slots(now)
        for sequence in tuple(self._waiting):
            found = self._slot_for(sequence.adapter)
            if found is not None:
                self._hold(found, sequence, now)

    def take_orders(self) -> list[str]:
        """Returns the digests of the adapters to be loaded from now on; :meth:`loaded` or :meth:`failed` answers
        each."""
        orders, self._orders = self._orders, []
        return orders

    def take_evicted(self) -> int:
        """Returns how many adapters have lost their slot to another one since the last call."""
        evicted, self._evicted = self._evicted, 0
        return evicted

    def place(self, scheduled: Seq[ScheduledChunk]) -> tuple[Placements, Int32 | None]:
        """Returns the adapters that the backend must get before a step of these chunks, and int32, the slot of the
        adapter of each chunk's sequence, or -1; None where no chunk has one."""
        if not (self._held or self._placements):
            return (), None
        placements, self._placements = tuple(self._placements.items()), {}
        slots = [chunk.sequence.adapter_slot for chunk in scheduled]
        return placements, np.array(slots, dtype=np.int32) if max(slots) >= 0 else None

    def _close_slots(self, now: float) -> None:
        """Closes as many slots as adapters have waited for too long; those with the fewest holders come first."""
        late: dict[str, Sequence] = {}
        for sequence in self._waiting:
            if sequence.adapter not in self._of and now - self._since_s[sequence.seq_id] >= SLOT_PATIENCE_S:
                late.setdefault(sequence.adapter, sequence)
        held = [slot for slot in self._slots if slot.holders]
        held.sort(key=lambda slot: (not slot.closed, len(slot.holders), slot.last_held))
        for slot in held:
            slot.closed = False
        # The first slot to be closed is for the first adapter in queue order, as when slots are given.
        for slot, first in zip(held, late.values(), strict=False):
            slot.closed = True
            behind = _queue_order(first)
            for sequence in tuple(slot.holders.values()):
                if sequence.state is SequenceState.WAITING and _queue_order(sequence) > behind:
                    self._send_back(slot, sequence, now)

    def _send_back(self, slot: AdapterSlot, sequence: Sequence, now: float) -> None:
        """Makes a holder that has not begun wait in the line again."""
        del slot.holders[sequence.seq_id], self._held[sequence.seq_id]
        sequence.await_adapter()
        insort(self._waiting, sequence, key=_queue_order)
        self._since_s[sequence.seq_id] = now

    def _slot_for(self, digest: str) -> AdapterSlot | None:
        """Returns the slot in which a waiting sequence may have its adapter now, whether or not the adapter is there
        already."""
        slot = self._of.get(digest)
        if slot is not None:
            return None if slot.closed and slot.holders else slot
        idle = [p for p in self._slots if not p.holders and p.state in (SlotState.EMPTY, SlotState.READY)]
        if not idle:
            return None
        slot = min(idle, key=lambda p: p.last_held)
        if slot.state is SlotState.READY:
            del self._of[slot.digest]
            self._placements.pop(slot.index, None)
            self._evicted += 1
        slot.digest, slot.state, slot.closed = digest, SlotState.LOADING, False
        slot.read_until = self._in_flight.last_launched
        self._of[digest] = slot
        self._orders.append(digest)
        self._count_ready()
        return slot

    def _hold(self, slot: AdapterSlot, sequence: Sequence, now: float) -> None:
        self._waiting.remove(sequence)
        del self._since_s[sequence.seq_id]
        slot.holders[sequence.seq_id] = sequence
        self._held[sequence.seq_id] = slot
        self._use(slot)
        if slot.state is SlotState.READY:
            sequence.use_adapter(slot.index, now)

    def _use(self, slot: AdapterSlot) -> None:
        self._uses += 1
        slot.last_held = self._uses

    def _clear(self, slot: AdapterSlot) -> tuple[Sequence, ...]:
        """Forgets the slot's adapter. Returns its holders, which have still to leave the slot."""
        self._of.pop(slot.digest, None)
        self._placements.pop(slot.index, None)
        slot.digest, slot.state, slot.packed, slot.closed = "", SlotState.EMPTY, None, False
        self._changed = True
        return tuple(slot.holders.values())

    def _count_ready(self) -> None:
        self.ready = tuple(slot.digest for slot in self._slots if slot.state is SlotState.READY)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every sequence in the queues that has an adapter holds its slot or waits for
        one, and runs only with an adapter that is there."""
        queued = (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PREEMPTED)
        users = {s.seq_id: s for s in sequences if s.adapter and s.state in queued}
        assert self._waiting == sorted(self._waiting, key=_queue_order), "the line for slots is out of order"
        waiting = {s.seq_id for s in self._waiting}
        assert waiting == self._since_s.keys(), "somebody waits for a slot without a time, or the other way round"
        assert not waiting & self._held.keys(), "a sequence waits for a slot and holds one"
        assert waiting | self._held.keys() == users.keys(), "a sequence neither waits for a slot nor holds one"
        for slot in self._slots:
            assert (slot.digest == "") == (slot.state is SlotState.EMPTY), "a slot lost its adapter's name"
            assert not slot.digest or self._of[slot.digest] is slot, "two slots have one adapter"
            assert (slot.packed is not None) == (slot.state is SlotState.PACKED), "a packed adapter was left over"
            for seq_id, sequence in slot.holders.items():
                assert self._held[seq_id] is slot, "a holder of two slots"
                assert users[seq_id] is sequence, "a holder that is gone"
                assert sequence.adapter == slot.digest, "a sequence holds another adapter's slot"
        assert len(self._of) == sum(slot.digest != "" for slot in self._slots), "an adapter without a slot"
        assert sum(len(slot.holders) for slot in self._slots) == len(self._held), "holders do not add up"
        for seq_id, sequence in users.items():
            held = self._held.get(seq_id)
            index = held.index if held is not None and held.state is SlotState.READY else -1
            assert sequence.awaits_adapter == (index < 0), "a sequence does not know of its adapter"
            assert sequence.adapter_slot == index, "a sequence names a wrong slot"
            assert index >= 0 or sequence.state is not SequenceState.RUNNING, "a sequence runs without its adapter"


def _queue_order(sequence: Sequence) -> tuple[float, int]:
    return sequence.queue_order, sequence.seq_id
