"""Which adapters a worker keeps ready, in which slots, and which sequences may run with them; sans-IO (I9).

    absent --has a slot--> LOADING --read and packed--> PACKED --no step reads the slot--> READY
      ^                        |                                                               |
      +------- failed ---------+        no sequence uses it, and another adapter needs its slot+

A sequence with an adapter joins when it joins the scheduler's queues. From then on it either uses its adapter's slot,
or waits for one because sequences with other adapters use them all; it may run once the adapter is READY. It leaves
when it leaves the queues: it has ended, or was preempted and joins again later. A slot changes its adapter only while
no sequence uses it, least recently used first.

No sequence waits for ever. Slots are assigned in queue order. A sequence whose adapter has a slot overtakes those that
wait for a slot, but not for long: per adapter that has waited SLOT_PATIENCE_S, one slot is closed. A closed slot gets
no new user, and its users that have not begun and come after the waiting sequence return to the queue, so it is free
when its other users end. Users always make progress: they wait neither for a slot nor, because a preempted sequence
leaves, for memory of other sequences.
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

# Max time that sequences whose adapter has a slot overtake one whose adapter has none, and how often it is checked.
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
        users: sequences that use the slot, by seq_id.
        closed: True if the slot gets no new users.
        last_use: number of the last use, counted over all slots.
        read_until: number of the last launched step that may read the slot's previous adapter.
        packed: the packed adapter, while PACKED.
    """

    index: int
    digest: str = ""
    state: SlotState = SlotState.EMPTY
    users: dict[int, Sequence] = field(default_factory=dict)
    closed: bool = False
    last_use: int = 0
    read_until: int = 0
    packed: PackedAdapter | None = None


class AdapterSlots:
    """The adapter slots of one scheduler. ``ready`` (read-only): digests of the adapters that are READY."""

    def __init__(self, slots: int, in_flight: InFlightSteps) -> None:
        self.ready: tuple[str, ...] = ()
        self._evicted = 0
        self._in_flight = in_flight
        self._slots = [AdapterSlot(index) for index in range(slots)]
        # Slots by digest of their adapter, and by seq_id of their users.
        self._slot_of: dict[str, AdapterSlot] = {}
        self._used: dict[int, AdapterSlot] = {}
        # Sequences without a slot in queue order, and when each began to wait.
        self._waiting: list[Sequence] = []
        self._waiting_since_s: dict[int, float] = {}
        self._uses = 0
        # True if a waiting sequence may get a slot now; time of the next check of waiting times.
        self._changed = False
        self._check_s = 0.0
        self._orders: list[str] = []
        self._placements: dict[int, PackedAdapter] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def waits(self) -> int:
        """Number of sequences that cannot run because their adapter is not ready."""
        return len(self._waiting) + sum(len(slot.users) for slot in self._slots if slot.state is not SlotState.READY)

    def join(self, sequence: Sequence, now: float) -> None:
        """Add a sequence that joins the scheduler's queues; a no-op without an adapter."""
        if sequence.adapter:
            self._enqueue(sequence, now)
            self._changed = True

    def preload(self, digest: str) -> None:
        """Load an adapter into an idle slot, if there is one and no sequence waits for a slot, for a sequence that will
        join soon."""
        if digest not in self._slot_of and not self._waiting:
            slot = self._slot_for(digest)
            if slot is not None:
                self._touch(slot)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that leaves the scheduler's queues; a no-op without an adapter."""
        if not sequence.adapter:
            return
        sequence.leave_adapter()
        if self._waiting_since_s.pop(sequence.seq_id, None) is not None:
            self._waiting.remove(sequence)
            return
        slot = self._used.pop(sequence.seq_id, None)
        if slot is not None:
            del slot.users[sequence.seq_id]
            self._touch(slot)
            self._changed = self._changed or not slot.users

    def loaded(self, digest: str, packed: PackedAdapter) -> None:
        """Handle an ordered adapter that has been read and packed."""
        slot = self._slot_of[digest]
        assert slot.state is SlotState.LOADING, f"{digest} was not ordered"
        slot.state, slot.packed = SlotState.PACKED, packed

    def failed(self, digest: str) -> tuple[Sequence, ...]:
        """Empty the slot of an ordered adapter that could not be loaded. Return the slot's users, for the caller to
        fail."""
        return self._clear(self._slot_of[digest])

    def drop_placements(self, placements: Placements) -> tuple[Sequence, ...]:
        """Empty the slots of adapters that a failed step was to place. Return their users, for the caller to fail."""
        slots = [slot for index, _ in placements if (slot := self._slots[index]).state is SlotState.READY]
        users = tuple(sequence for slot in slots for sequence in self._clear(slot))
        self._update_ready()
        return users

    def assign(self, now: float) -> None:
        """Mark packed adapters whose slot no step reads as ready, and assign slots to waiting sequences in queue
        order."""
        for slot in self._slots if self._slot_of else ():
            if slot.packed is not None and self._in_flight.has_retired(slot.read_until):
                slot.state = SlotState.READY
                self._placements[slot.index], slot.packed = slot.packed, None
                for sequence in slot.users.values():
                    sequence.use_adapter(slot.index, now)
                self._changed = True
                self._update_ready()
        if not self._waiting or not (self._changed or now >= self._check_s):
            return
        self._changed, self._check_s = False, now + PATIENCE_CHECK_S
        self._close_slots(now)
        for sequence in tuple(self._waiting):
            available = self._slot_for(sequence.adapter)
            if available is not None:
                self._assign(available, sequence, now)

    def take_orders(self) -> list[str]:
        """Return the digests of the adapters to load; each is answered by :meth:`loaded` or :meth:`failed`."""
        orders, self._orders = self._orders, []
        return orders

    def take_evicted(self) -> int:
        """Return the number of adapters evicted from their slot since the last call."""
        evicted, self._evicted = self._evicted, 0
        return evicted

    def place(self, scheduled: Seq[ScheduledChunk]) -> tuple[Placements, Int32 | None]:
        """Return the adapters to place before a step of these chunks, and each chunk's adapter slot or -1, int32
        [chunks]; None in place of the array if no chunk has an adapter."""
        if not (self._used or self._placements):
            return (), None
        placements, self._placements = tuple(self._placements.items()), {}
        slots = [chunk.sequence.adapter_slot for chunk in scheduled]
        return placements, np.array(slots, dtype=np.int32) if max(slots) >= 0 else None

    def _close_slots(self, now: float) -> None:
        """Close one slot per adapter that has waited too long, those with the fewest users first; reopen others."""
        late: dict[str, Sequence] = {}
        for sequence in self._waiting:
            waited_s = now - self._waiting_since_s[sequence.seq_id]
            if sequence.adapter not in self._slot_of and waited_s >= SLOT_PATIENCE_S:
                late.setdefault(sequence.adapter, sequence)
        used = [slot for slot in self._slots if slot.users]
        used.sort(key=lambda slot: (not slot.closed, len(slot.users), slot.last_use))
        for slot in used:
            slot.closed = False
        # The first closed slot is for the first adapter in queue order, as in assignment.
        for slot, first in zip(used, late.values(), strict=False):
            slot.closed = True
            for sequence in tuple(slot.users.values()):
                if sequence.state is SequenceState.WAITING and _queue_order(sequence) > _queue_order(first):
                    # It has not begun, so it can wait for a slot again.
                    del slot.users[sequence.seq_id], self._used[sequence.seq_id]
                    self._enqueue(sequence, now)

    def _enqueue(self, sequence: Sequence, now: float) -> None:
        """Add a sequence to those that wait for a slot."""
        sequence.await_adapter()
        insort(self._waiting, sequence, key=_queue_order)
        self._waiting_since_s[sequence.seq_id] = now

    def _slot_for(self, digest: str) -> AdapterSlot | None:
        """Return the slot of an adapter, or an idle slot into which its loading is ordered; None if its slot is closed,
        or none is idle."""
        slot = self._slot_of.get(digest)
        if slot is not None:
            return None if slot.closed and slot.users else slot
        idle = [s for s in self._slots if not s.users and s.state in (SlotState.EMPTY, SlotState.READY)]
        if not idle:
            return None
        slot = min(idle, key=lambda s: s.last_use)
        if slot.state is SlotState.READY:
            del self._slot_of[slot.digest]
            self._placements.pop(slot.index, None)
            self._evicted += 1
        slot.digest, slot.state, slot.closed = digest, SlotState.LOADING, False
        slot.read_until = self._in_flight.last_launched
        self._slot_of[digest] = slot
        self._orders.append(digest)
        self._update_ready()
        return slot

    def _assign(self, slot: AdapterSlot, sequence: Sequence, now: float) -> None:
        self._waiting.remove(sequence)
        del self._waiting_since_s[sequence.seq_id]
        slot.users[sequence.seq_id] = sequence
        self._used[sequence.seq_id] = slot
        self._touch(slot)
        if slot.state is SlotState.READY:
            sequence.use_adapter(slot.index, now)

    def _touch(self, slot: AdapterSlot) -> None:
        """Mark the slot as the most recently used one."""
        self._uses += 1
        slot.last_use = self._uses

    def _clear(self, slot: AdapterSlot) -> tuple[Sequence, ...]:
        """Remove the slot's adapter. Return the slot's users, which the caller has to remove."""
        self._slot_of.pop(slot.digest, None)
        self._placements.pop(slot.index, None)
        slot.digest, slot.state, slot.packed, slot.closed = "", SlotState.EMPTY, None, False
        self._changed = True
        return tuple(slot.users.values())

    def _update_ready(self) -> None:
        self.ready = tuple(slot.digest for slot in self._slots if slot.state is SlotState.READY)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every queued sequence with an adapter either uses its slot or waits for one, and
        runs only with a ready adapter."""
        queued = (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PREEMPTED)
        present = {s.seq_id: s for s in sequences if s.adapter and s.state in queued}
        assert self._waiting == sorted(self._waiting, key=_queue_order), "the queue for slots is out of order"
        waiting = {s.seq_id for s in self._waiting}
        assert waiting == self._waiting_since_s.keys(), "waiting sequences and their times differ"
        assert not waiting & self._used.keys(), "a sequence waits for a slot and uses one"
        assert waiting | self._used.keys() == present.keys(), "a sequence neither waits for a slot nor uses one"
        for slot in self._slots:
            assert (slot.digest == "") == (slot.state is SlotState.EMPTY), "a slot's digest contradicts its state"
            assert not slot.digest or self._slot_of[slot.digest] is slot, "two slots have one adapter"
            assert (slot.packed is not None) == (slot.state is SlotState.PACKED), "a slot's adapter was not placed"
            for seq_id, sequence in slot.users.items():
                assert self._used[seq_id] is slot, "a sequence uses two slots"
                assert present[seq_id] is sequence, "a user is not queued"
                assert sequence.adapter == slot.digest, "a sequence uses another adapter's slot"
        assert len(self._slot_of) == sum(slot.digest != "" for slot in self._slots), "an adapter without a slot"
        assert sum(len(slot.users) for slot in self._slots) == len(self._used), "a user without a slot"
        for seq_id, sequence in present.items():
            used = self._used.get(seq_id)
            index = used.index if used is not None and used.state is SlotState.READY else -1
            assert sequence.awaits_adapter == (index < 0), "a sequence's awaits_adapter is wrong"
            assert sequence.adapter_slot == index, "a sequence's adapter_slot is wrong"
            assert index >= 0 or sequence.state is not SequenceState.RUNNING, "a sequence runs without its adapter"


def _queue_order(sequence: Sequence) -> tuple[float, int]:
    return sequence.queue_order, sequence.seq_id
