"""Which adapters a worker keeps ready, in which of its places, and which sequences may run with them; sans-IO (I9).

    absent --has a place--> LOADING --read and packed--> PACKED --no step reads the place--> READY
      ^                        |                                                               |
      +------- failed ---------+          nobody holds it and another adapter needs the place -+

A sequence with an adapter joins when it joins the scheduler's queues. From then on it either holds its adapter's place,
or waits for one because sequences with other adapters hold them all; it may run once the adapter is READY. It lets go
when it leaves the queues: it has ended, or it was preempted and so joins again later. A place changes hands only while
nobody holds it, the least recently held one first.

Nobody waits for ever. Places are given by rank. Who joins an adapter that has a place is let past those who wait for
one, but not for long: for each adapter that has waited PLACE_PATIENCE_S, one place is closed. Nobody new may hold a
closed place, and of its holders those that have not begun and have a worse rank than the one that waits go back into
the line, so it is free when the answers of the others end. Holders always get on: they wait neither for a place nor,
because a preempted sequence lets go, for memory that others keep.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from pillion.engine.backends.backend import PackedAdapter
from pillion.engine.scheduling.in_flight import InFlightSteps
from pillion.engine.scheduling.sequence import Sequence, SequenceState

# How long sequences whose adapter has a place are let past one whose adapter has none.
PLACE_PATIENCE_S = 1.0
# How often it is looked who has waited that long.
PATIENCE_CHECK_S = 0.1


class PlaceState(Enum):
    """The states of the drawing above; EMPTY is a place without an adapter."""

    EMPTY = "empty"
    LOADING = "loading"
    PACKED = "packed"
    READY = "ready"


@dataclass(slots=True)
class AdapterPlace:
    """One of the backend's places. ``last_held`` rises with every use; ``read_until`` numbers the last launched step
    that may read what the place held before. ``packed`` is what the backend takes, between PACKED and READY."""

    index: int
    digest: str = ""
    state: PlaceState = PlaceState.EMPTY
    holders: dict[int, Sequence] = field(default_factory=dict)
    closed: bool = False
    last_held: int = 0
    read_until: int = 0
    packed: PackedAdapter | None = None


class AdapterPlaces:
    """The places of one scheduler, whose steps in flight it asks.

    Attributes for reading: ``ready``, digests of the adapters that sequences can run with at once; ``evicted``, how
    many adapters have lost their place to another one.
    """

    def __init__(self, places: int, in_flight: InFlightSteps) -> None:
        self.ready: tuple[str, ...] = ()
        self.evicted = 0
        self._in_flight = in_flight
        self._places = [AdapterPlace(index) for index in range(places)]
        self._of: dict[str, AdapterPlace] = {}
        self._held: dict[int, AdapterPlace] = {}
        # Sequences without a place, by rank, and since when each of them waits.
        self._waiting: list[Sequence] = []
        self._since_s: dict[int, float] = {}
        self._uses = 0
        # Whether somebody may get a place now, and when patience is looked at again.
        self._changed = False
        self._check_s = 0.0
        self._orders: list[str] = []
        self._placements: dict[int, PackedAdapter] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def waits(self) -> int:
        """Sequences that cannot run yet for want of their adapter."""
        return len(self._waiting) + sum(
            len(place.holders) for place in self._places if place.state is not PlaceState.READY
        )

    # Sequences come and go.

    def join(self, sequence: Sequence, now: float) -> None:
        """A sequence joins the queues; one without an adapter needs nothing here."""
        if sequence.spec.adapter:
            sequence.await_adapter()
            insort(self._waiting, sequence, key=_rank)
            self._since_s[sequence.seq_id] = now
            self._changed = True

    def preload(self, digest: str) -> None:
        """A sequence with this adapter will join soon: load it into an idle place, if nobody else waits for that."""
        if digest not in self._of and not self._waiting:
            place = self._place_for(digest)
            if place is not None:
                self._use(place)

    def leave(self, sequence: Sequence) -> None:
        """A sequence leaves the queues. One that is in none is ignored."""
        if not sequence.spec.adapter:
            return
        sequence.leave_adapter()
        if self._since_s.pop(sequence.seq_id, None) is not None:
            self._waiting.remove(sequence)
            return
        place = self._held.pop(sequence.seq_id, None)
        if place is not None:
            del place.holders[sequence.seq_id]
            self._use(place)
            self._changed = self._changed or not place.holders

    # What loading brings.

    def loaded(self, digest: str, packed: PackedAdapter) -> None:
        """An adapter that was ordered has been read and packed."""
        place = self._of[digest]
        assert place.state is PlaceState.LOADING, f"{digest} was not ordered"
        place.state, place.packed = PlaceState.PACKED, packed

    def failed(self, digest: str) -> tuple[Sequence, ...]:
        """An adapter that was ordered could not be loaded. Returns those that hold its place, which has none now."""
        return self._clear(self._of[digest])

    def not_placed(self, placements: Iterable[tuple[int, PackedAdapter]]) -> tuple[Sequence, ...]:
        """The step that was to place these adapters has failed. Returns all that hold their places."""
        # A place that was given away meanwhile is filled by a later step.
        places = [place for index, _ in placements if (place := self._places[index]).state is PlaceState.READY]
        holders = tuple(sequence for place in places for sequence in self._clear(place))
        self._count_ready()
        return holders

    # A step.

    def assign(self, now: float) -> None:
        """Give places to those that wait, by rank, and let those run whose adapter is there."""
        for place in self._places if self._of else ():
            if place.packed is not None and self._in_flight.has_landed(place.read_until):
                place.state = PlaceState.READY
                self._placements[place.index], place.packed = place.packed, None
                for sequence in place.holders.values():
                    sequence.use_adapter(place.index, now)
                self._changed = True
                self._count_ready()
        if not self._waiting or not (self._changed or now >= self._check_s):
            return
        self._changed, self._check_s = False, now + PATIENCE_CHECK_S
        self._close_places(now)
        for sequence in tuple(self._waiting):
            place_of = self._place_for(sequence.spec.adapter)
            if place_of is not None:
                self._hold(place_of, sequence, now)

    def take_orders(self) -> list[str]:
        """Digests of the adapters to be loaded from now on; each is answered by :meth:`loaded` or :meth:`failed`."""
        orders, self._orders = self._orders, []
        return orders

    def take_placements(self) -> tuple[tuple[int, PackedAdapter], ...]:
        """(place, packed adapter) pairs that the backend has to be given before the next step that is launched."""
        if not self._placements:
            return ()
        placements, self._placements = tuple(self._placements.items()), {}
        return placements

    # Inside.

    def _close_places(self, now: float) -> None:
        """Close as many places as adapters have waited for too long; those with the fewest holders come first."""
        late: dict[str, Sequence] = {}
        for sequence in self._waiting:
            if sequence.spec.adapter not in self._of and now - self._since_s[sequence.seq_id] >= PLACE_PATIENCE_S:
                late.setdefault(sequence.spec.adapter, sequence)
        held = [place for place in self._places if place.holders]
        held.sort(key=lambda place: (not place.closed, len(place.holders), place.last_held))
        for place in held:
            place.closed = False
        # The first place is for the one of the best rank, as it is when places are given.
        for place, first in zip(held, late.values(), strict=False):
            place.closed = True
            behind = _rank(first)
            for sequence in tuple(place.holders.values()):
                if sequence.state is SequenceState.WAITING and _rank(sequence) > behind:
                    self._send_back(place, sequence, now)

    def _send_back(self, place: AdapterPlace, sequence: Sequence, now: float) -> None:
        """A holder that has not begun waits in the line again."""
        del place.holders[sequence.seq_id], self._held[sequence.seq_id]
        sequence.leave_adapter()
        sequence.await_adapter()
        insort(self._waiting, sequence, key=_rank)
        self._since_s[sequence.seq_id] = now

    def _place_for(self, digest: str) -> AdapterPlace | None:
        """The place in which a sequence that waits may have its adapter now, whether it is there already or not."""
        place = self._of.get(digest)
        if place is not None:
            return None if place.closed and place.holders else place
        idle = [p for p in self._places if not p.holders and p.state in (PlaceState.EMPTY, PlaceState.READY)]
        if not idle:
            return None
        place = min(idle, key=lambda p: p.last_held)
        if place.state is PlaceState.READY:
            del self._of[place.digest]
            self._placements.pop(place.index, None)
            self.evicted += 1
        place.digest, place.state, place.closed = digest, PlaceState.LOADING, False
        place.read_until = self._in_flight.last_launched
        self._of[digest] = place
        self._orders.append(digest)
        self._count_ready()
        return place

    def _hold(self, place: AdapterPlace, sequence: Sequence, now: float) -> None:
        self._waiting.remove(sequence)
        del self._since_s[sequence.seq_id]
        place.holders[sequence.seq_id] = sequence
        self._held[sequence.seq_id] = place
        self._use(place)
        if place.state is PlaceState.READY:
            sequence.use_adapter(place.index, now)

    def _use(self, place: AdapterPlace) -> None:
        self._uses += 1
        place.last_held = self._uses

    def _clear(self, place: AdapterPlace) -> tuple[Sequence, ...]:
        """Forget the place's adapter. Returns its holders, which are still to leave."""
        self._of.pop(place.digest, None)
        self._placements.pop(place.index, None)
        place.digest, place.state, place.packed, place.closed = "", PlaceState.EMPTY, None, False
        self._changed = True
        return tuple(place.holders.values())

    def _count_ready(self) -> None:
        self.ready = tuple(place.digest for place in self._places if place.state is PlaceState.READY)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every sequence in the queues that has an adapter holds its place or waits for
        one, and runs only with an adapter that is there."""
        queued = (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PREEMPTED)
        users = {s.seq_id: s for s in sequences if s.spec.adapter and s.state in queued}
        assert self._waiting == sorted(self._waiting, key=_rank), "the line for places is out of order"
        waiting = {s.seq_id for s in self._waiting}
        assert waiting == self._since_s.keys(), "somebody waits for a place without a time, or the other way round"
        assert not waiting & self._held.keys(), "a sequence waits for a place and holds one"
        assert waiting | self._held.keys() == users.keys(), "a sequence neither waits for a place nor holds one"
        for place in self._places:
            assert (place.digest == "") == (place.state is PlaceState.EMPTY), "a place lost its adapter's name"
            assert not place.digest or self._of[place.digest] is place, "two places have one adapter"
            assert (place.packed is not None) == (place.state is PlaceState.PACKED), "a packed adapter was left over"
            for seq_id, sequence in place.holders.items():
                assert self._held[seq_id] is place, "a holder of two places"
                assert users[seq_id] is sequence, "a holder that is gone"
                assert sequence.spec.adapter == place.digest, "a sequence holds another adapter's place"
        assert len(self._of) == sum(place.digest != "" for place in self._places), "an adapter without a place"
        assert sum(len(place.holders) for place in self._places) == len(self._held), "holders do not add up"
        for seq_id, sequence in users.items():
            held = self._held.get(seq_id)
            index = held.index if held is not None and held.state is PlaceState.READY else -1
            assert sequence.awaits_adapter == (index < 0), "a sequence does not know of its adapter"
            assert sequence.adapter_place == index, "a sequence names a wrong place"
            assert index >= 0 or sequence.state is not SequenceState.RUNNING, "a sequence runs without its adapter"


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank, sequence.seq_id
