"""What differs in a fleet whose model's layers carry a state: nodes, their index, and where steps end (I9)."""

from __future__ import annotations

from collections.abc import Callable

from lab.fleets.prefix_store import NodeStore, PrefixIndex
from lab.fleets.state_store import StateIndex, StateStore
from pillion.config import KVNodeFlags
from pillion.engine.sampling.sampling_rows import Sampled
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_feature import StepFeature
from pillion.engine.scheduling.step_plan import StepPlan
from pillion.engine.states.state_places import StatePlaces
from pillion.engine.states.states import STATES


class PlacesOfStates(StepFeature):
    """Has the steps of a worker end where states are kept, by the production rule for these places. Calls ``told`` with
    a sequence's id and the number of its tokens where its state, of ``pages``, is to be kept. The slots of states are
    the node's to count (:mod:`lab.fleets.state_store`), so a sequence has none here."""

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


class FleetStates:
    """Makes the parts of a fleet that differ where the model has states of ``pages`` KV blocks each, which nodes keep
    by ``flags``. A running sequence has ``working_pages`` for its own."""

    def __init__(self, pages: int, flags: KVNodeFlags) -> None:
        self.pages = pages
        self.working_pages = STATES * pages
        self._flags = flags

    def index(self) -> PrefixIndex:
        """Returns an empty index of the blocks after which nodes have a state."""
        return StateIndex()

    def store(self, node_id: str, index: PrefixIndex, capacity: int, block_size: int) -> NodeStore:
        """Returns the empty pool of a node."""
        return StateStore(node_id, index, capacity, block_size, self.pages, self._flags)

    def places(self, told: Callable[[int, int], None]) -> StepFeature:
        """Returns what makes a worker's steps end where states are kept; ``told`` gets a sequence's id and tokens."""
        return PlacesOfStates(told, self.pages)
