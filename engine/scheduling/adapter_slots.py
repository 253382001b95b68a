"""Which adapters a worker keeps ready, in which slots, and which sequences may run with them; sans-IO (I9).

    absent --has a slot--> LOADING --read and packed--> PACKED --no step reads the slot--> READY
      ^                        |                                                               |
      +------- failed ---------+          nobody holds it and another adapter needs the slot -+

A sequence with an adapter joins when it joins the scheduler's queues. From then on it either uses its adapter's slot,
or waits for one because sequences with other adapters use them all; it may run once the adapter is READY. It leaves
when it leaves the queues: it has ended, or was preempted and joins again later. A slot changes its adapter only while
no sequence uses it, least recently used first.

No sequence waits for ever. Slots are assigned in queue order. A sequence that joins an adapter with a slot overtakes
those that wait for one, but not for long: per adapter that has waited SLOT_PATIENCE_S, one slot is closed. A closed
slot gets no new user, and its users that have not begun and come after the waiting one return to the queue, so it is
free when the answers of the others end. Users always make progress: they wait neither for a slot nor, because a
preempted sequence leaves, for memory that others use.
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

# How long sequences whose adapter has a slot overtake one whose adapter has none.
SLOT_PATIENCE_S = 1.0
PATIENCE_CHECK_S = 0.1

Placements = tuple[tuple[int, PackedAdapter], ...]


class SlotState(Enum):
    """The states drawn in this module's docstring; EMPTY is a slot without an adapter."""

    EMPTY = "empty"
    LOADING = "loading"
    PACKED = "packed"
    READY = "ready"


@dataclass(slots=True)
class AdapterSlot:
    """One of the backend's slots for adapters.

    Attributes:
        last_held: rises with every use.
        read_until: number of the last launched step that may read the slot's previous adapter.
        packed: what the backend takes, between PACKED and READY.
    """

    index: int
    digest: str = ""
    state: SlotState = SlotState.EMPTY
    holders: dict[int, Sequence] = field(default_factory=dict)
    closed: bool = False
    last_held: int = 0
    read_until: int = 0
    packed: PackedAdapter | None = None


class AdapterSlots:
    """The adapter slots of one scheduler.

    ``ready``, for reading, has the digests of the adapters that sequences can run with at once.
    """

    def __init__(self, slots: int, in_flight: InFlightSteps) -> None:
        self.ready: tuple[str, ...] = ()
        self._evicted = 0
        self._in_flight = in_flight
        self._slots = [AdapterSlot(index) for index in range(slots)]
        self._of: dict[str, AdapterSlot] = {}
        self._held: dict[int, AdapterSlot] = {}
        self._waiting: list[Sequence] = []
        self._since_s: dict[int, float] = {}
        self._uses = 0
        # Whether a waiting sequence may get a slot now, and when waiting times are next checked.
        self._changed = False
        self._check_s = 0.0
        self._orders: list[str] = []
        self._placements: dict[int, PackedAdapter] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def waits(self) -> int:
        """Number of sequences that cannot run yet for lack of their adapter."""
        return len(self._waiting) + sum(len(slot.holders) for slot in self._slots if slot.state is not SlotState.READY)

    def join(self, sequence: Sequence, now: float) -> None:
        """Add a sequence that joins the scheduler's queues; a no-op without an adapter."""
        if sequence.adapter:
            sequence.await_adapter()
            insort(self._waiting, sequence, key=_queue_order)
            self._since_s[sequence.seq_id] = now
            self._changed = True

    def preload(self, digest: str) -> None:
        """Load an adapter into an idle slot for a sequence that will join soon, unless another sequence waits for a
        slot."""
        if digest not in self._of and not self._waiting:
            slot = self._slot_for(digest)
            if slot is not None:
                self._use(slot)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that leaves the scheduler's queues; a no-op for others."""
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
        """Handle an ordered adapter that has been read and packed."""
        slot = self._of[digest]
        assert slot.state is SlotState.LOADING, f"{digest} was not ordered"
        slot.state, slot.packed = SlotState.PACKED, packed

    def failed(self, digest: str) -> tuple[Sequence, ...]:
        """Handle an ordered adapter that could not be loaded. Return the users of its slot, which is empty now."""
        return self._clear(self._of[digest])

    def not_placed(self, placements: Placements) -> tuple[Sequence, ...]:
        """Handle a failed step that was to place these adapters. Return all users of their slots."""
        slots = [slot for index, _ in placements if (slot := self._slots[index]).state is SlotState.READY]
        holders = tuple(sequence for slot in slots for sequence in self._clear(slot))
        self._count_ready()
        return holders

    def assign(self, now: float) -> None:
        """Assign slots to waiting sequences, in queue order, and let those run whose adapter is ready."""
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
        """Return the digests of the adapters to load; :meth:`loaded` or :meth:`failed` answers each."""
        orders, self._orders = self._orders, []
        return orders

    def take_evicted(self) -> int:
        """Return the number of adapters evicted from their slot since the last call."""
        evicted, self._evicted = self._evicted, 0
        return evicted

    def place(self, scheduled: Seq[ScheduledChunk]) -> tuple[Placements, Int32 | None]:
        """Return the adapters to place before a step of these chunks, and int32, each chunk's adapter slot or -1; None
        if no chunk has one."""
        if not (self._held or self._placements):
            return (), None
        placements, self._placements = tuple(self._placements.items()), {}
        slots = [chunk.sequence.adapter_slot for chunk in scheduled]
        return placements, np.array(slots, dtype=np.int32) if max(slots) >= 0 else None

    def _close_slots(self, now: float) -> None:
        """Close one slot per adapter that has waited too long; those with the fewest users first."""
        late: dict[str, Sequence] = {}
        for sequence in self._waiting:
            if sequence.adapter not in self._of and now - self._since_s[sequence.seq_id] >= SLOT_PATIENCE_S:
                late.setdefault(sequence.adapter, sequence)
        held = [slot for slot in self._slots if slot.holders]
        held.sort(key=lambda slot: (not slot.closed, len(slot.holders), slot.last_held))
        for slot in held:
            slot.closed = False
        # The first closed slot is for the first adapter in queue order, as in assignment.
        for slot, first in zip(held, late.values(), strict=False):
            slot.closed = True
            behind = _queue_order(first)
            for sequence in tuple(slot.holders.values()):
                if sequence.state is SequenceState.WAITING and _queue_order(sequence) > behind:
                    self._send_back(slot, sequence, now)

    def _send_back(self, slot: AdapterSlot, sequence: Sequence, now: float) -> None:
        """Return a user that has not begun to the waiting queue."""
        del slot.holders[sequence.seq_id], self._held[sequence.seq_id]
        sequence.await_adapter()
        insort(self._waiting, sequence, key=_queue_order)
        self._since_s[sequence.seq_id] = now

    def _slot_for(self, digest: str) -> AdapterSlot | None:
        """Return the slot for a waiting sequence's adapter now, loaded or not; None if there is none."""
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
        """Empty the slot. Return its users, which have still to leave it."""
        self._of.pop(slot.digest, None)
        self._placements.pop(slot.index, None)
        slot.digest, slot.state, slot.packed, slot.closed = "", SlotState.EMPTY, None, False
        self._changed = True
        return tuple(slot.holders.values())

    def _count_ready(self) -> None:
        self.ready = tuple(slot.digest for slot in self._slots if slot.state is SlotState.READY)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every queued sequence with an adapter uses its slot or waits for one, and runs
        only with a ready adapter."""
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
