"""What differs in a fleet whose model's layers carry a state: nodes, their index, and where steps end (I9)."""

from __future__ import annotations

from lab.fleets.prefix_store import NodeStore, PrefixIndex
from lab.fleets.state_store import StateIndex, StateStore
from pillion.config import KVNodeFlags
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.state_places import StatePlaces
from pillion.engine.scheduling.states import STATES


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

    def places(self, sequence: Sequence) -> StatePlaces:
        """Has a worker's steps of a prompt end where states are kept, and returns these places. The slots of states are
        the node's to count (:mod:`lab.fleets.state_store`), so a sequence has none here."""
        return StatePlaces(sequence, self.pages)
