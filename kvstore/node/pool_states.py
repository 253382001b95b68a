"""Defines the seam at which a room decides which states of a KV node's pool stay."""

from __future__ import annotations

from collections.abc import Callable

from pillion.config import KVNodeFlags
from pillion.kvstore.ledger.eviction import EvictionPolicy
from pillion.kvstore.ledger.ledger_states import LedgerStates
from pillion.rooms import Seam, entered_one

# This makes what a ledger tells of its pages, from the pool's eviction policy.
StatesMaker = Callable[[EvictionPolicy], LedgerStates]
STATES = Seam[Callable[[KVNodeFlags], StatesMaker]]("kvstore.node.states")


def states_of(flags: KVNodeFlags) -> StatesMaker:
    """Returns the maker by a node's flags."""
    return entered_one(STATES)(flags)
