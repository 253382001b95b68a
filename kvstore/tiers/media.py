"""Defines the seams at which lower tiers come in: a medium of this machine, and one that other nodes write to as well.

the node starts --> a medium is taken, as its flag says --the pool has its shape--> its tier --> blocks go and come
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pillion.config import KVNodeFlags
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import IndexEvent, PoolShape
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.tiers.tiers import BlockName, FarTier, Tier
from pillion.rooms import Seam, entered_one


class NearMedium(Protocol):
    """Represents a medium of this machine that keeps blocks after the node's end."""

    async def open_tier(self, shape: PoolShape) -> Tier:
        """Opens the medium's tier, which has the blocks that earlier nodes left. Raises ConfigError."""

    def close(self) -> None:
        """Gives the medium up to other nodes; its tier is closed. Idempotent."""


class EarlyCopies:
    """Copies blocks to a far tier while they are still in the pool; this class copies none."""

    def committed(self, events: Iterable[IndexEvent]) -> None:
        """Notes the blocks that came into the pool. O(events), and never waits."""

    async def run(self) -> None:
        """Copies the blocks that are due, until it is cancelled."""
        await asyncio.Event().wait()


class FarMedium(Protocol):
    """Represents a medium that others write to as well.

    Attributes:
        place: the name by which gateways know it: nodes with the same name share it.
    """

    place: str

    def make_tier(self, shape: PoolShape) -> FarTier:
        """Makes the tier of a pool on this medium."""

    def copies(
        self,
        ledger: Ledger,
        memory: PoolMemory,
        tiers: Sequence[FarTier],
        blocks_lost: Callable[[Sequence[BlockName]], None],
    ) -> EarlyCopies:
        """Makes the object that copies a pool's blocks to its tier early; ``blocks_lost`` is called with blocks that
        the tier lost."""


NEAR = Seam[Callable[[KVNodeFlags], NearMedium]]("kvstore.tiers.near")
FAR = Seam[Callable[[KVNodeFlags], FarMedium]]("kvstore.tiers.far")
# A room's function raises ConfigError for a URL that no far medium has.
FAR_URL = Seam[Callable[[str], object]]("kvstore.tiers.far_url")


def near_medium(flags: KVNodeFlags) -> NearMedium | None:
    """Returns the medium of this machine that a node's flags name. Raises ConfigError where it cannot be had."""
    return entered_one(NEAR)(flags) if flags.disk_path else None


def far_medium(flags: KVNodeFlags) -> FarMedium | None:
    """Returns the shared medium that a node's flags name. Raises ConfigError where it cannot be had."""
    return entered_one(FAR)(flags) if flags.object_url else None
