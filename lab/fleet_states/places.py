"""Has the steps of a simulated worker end where states are kept, by the production rule for these places (I9)."""

from __future__ import annotations

from collections.abc import Callable

from pillion.engine.sampling.sampling_rows import Sampled
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_feature import StepFeature
from pillion.engine.scheduling.step_plan import StepPlan
from pillion.engine.states.state_places import StatePlaces


class PlacesOfStates(StepFeature):
    """Calls ``told`` with a sequence's id and the number of its tokens where its state, of ``pages``, is to be kept.
    The slots of states are the node's to count (:mod:`lab.fleet_states.state_store`), so a sequence has
    none here."""

    def __init__(self, told: Callable[[int, int], None], pages: int) -> None:
        self._told = told
        self._pages = pages
        self._places: dict[int, StatePlaces] = {}

    def joined(self, sequence: Sequence, now: float) -> None:
        self._places[sequence.seq_id] = StatePlaces(sequence, self._pages)

    def left(self, sequence: Sequence) -> None:
        self._places.pop(sequence.seq_id, None)

    def cut(self, sequence: Sequence, start: int, count: int) -> int:
        place = self._places[sequence.seq_id].after(start)
        return min(count, place - start) if place else count

    def landed(self, plan: StepPlan, sampled: Sampled) -> None:
        for sequence in (piece.sequence for piece in plan.pieces):
            places = self._places.get(sequence.seq_id)
            if places is not None and places.reached(sequence.num_computed):
                self._told(sequence.seq_id, sequence.num_computed)
