"""Makes the parts of a simulated fleet that differ where its model's layers carry a state."""

from __future__ import annotations

from collections.abc import Callable

from lab.fleet_states.places import PlacesOfStates
from lab.fleet_states.state_store import StateIndex, StateStore
from lab.fleets.prefix_store import NodeStore, PrefixIndex
from pillion.config import KVNodeFlags
from pillion.engine.scheduling.step_feature import StepFeature
from pillion.engine.states.states import STATES


class FleetStates:
    """Implements ModelStates for states of ``pages`` KV blocks each, which nodes keep by ``flags``."""

    def __init__(self, pages: int, flags: KVNodeFlags) -> None:
        self.pages = pages
        self.working_pages = STATES * pages
        self._flags = flags

    def index(self) -> PrefixIndex:
        """Returns an empty index."""
        return StateIndex()

    def store(self, node_id: str, index: PrefixIndex, capacity: int, block_size: int) -> NodeStore:
        """Returns the empty pool of a node."""
        return StateStore(node_id, index, capacity, block_size, self.pages, self._flags)

    def places(self, told: Callable[[int, int], None]) -> StepFeature:
        """Returns what makes a worker's steps end where states are kept; ``told`` gets a sequence's id and tokens."""
        return PlacesOfStates(told, self.pages)
