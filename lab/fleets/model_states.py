"""Defines the seam at which a room adds models whose layers carry a state to simulated fleets (I9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lab.fleets.prefix_store import NodeStore, PrefixIndex
from pillion.config import KVNodeFlags
from pillion.engine.scheduling.step_feature import StepFeature
from pillion.rooms import Seam, entered_one


class ModelStates(Protocol):
    """Describes what differs in a fleet whose model has states of ``pages`` KV blocks. A running sequence has
    ``working_pages`` for its own."""

    pages: int
    working_pages: int

    def index(self) -> PrefixIndex:
        """Returns an empty index of the blocks after which nodes have a state."""

    def store(self, node_id: str, index: PrefixIndex, capacity: int, block_size: int) -> NodeStore:
        """Returns the empty pool of a node."""

    def places(self, told: Callable[[int, int], None]) -> StepFeature:
        """Returns what makes a worker's steps end where states are kept; ``told`` gets a sequence's id and tokens."""


STATES = Seam[Callable[[int, KVNodeFlags], ModelStates]]("simulator.fleet.states")


def states_of(pages: int, flags: KVNodeFlags) -> ModelStates | None:
    """Returns what differs in a fleet whose states have so many pages, None for a model without states. Raises
    ConfigError where the room is gone."""
    return entered_one(STATES)(pages, flags) if pages else None
