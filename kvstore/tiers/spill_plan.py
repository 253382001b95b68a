"""Which blocks to evict ahead of need, and which of these the index loses. Sans-IO (I9);
:mod:`pillion.kvstore.tiers.spill` carries it out.

free slots    high ------\\                /----- evicting ends
                          \\              /
              low  ---------\\-- begins--/
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from pillion.errors import ConfigError
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import Block, IndexEvent
from pillion.kvstore.tiers.tiers import BlockName


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Free shares of the pool, in percent, at which evicting begins and ends. A low one of 0 turns it off.

    Raises ConfigError for shares that make no sense.
    """

    low_percent: int
    high_percent: int

    def __post_init__(self) -> None:
        if not 0 <= self.low_percent <= self.high_percent <= 90:
            raise ConfigError(
                f"--low-watermark-percent {self.low_percent} and --high-watermark-percent {self.high_percent}: "
                "choose 0 to 90, the low one not above the high one"
            )

    def reached(self, ledger: Ledger) -> bool:
        """Whether evicting should begin. O(1)."""
        return len(ledger.free) * 100 < self.low_percent * ledger.num_slots

    def missing(self, ledger: Ledger) -> int:
        """Returns how many slots should become free before evicting ends."""
        return max(0, -(-self.high_percent * ledger.num_slots // 100) - len(ledger.free))


def next_victims(ledger: Ledger, count: int) -> list[Block]:
    """Returns the policy's next victims, at most ``count``; of a chain the tail before its head."""
    return list(islice(ledger.tree.policy, count))


def evict_still_unused(ledger: Ledger, block: Block) -> bool:
    """Evicts ``block`` if it is still the very block that was chosen, unprotected and a leaf; returns whether it
    was."""
    if ledger.tree.by_hash.get(block.hash) is not block or block.holds or block.children:
        return False
    ledger.evict_block(block)
    return True


class IndexFilter:
    """Keeps a block in the index as long as the pool or a lower tier has it, or is about to have it.

    Args:
        in_pool: whether a hash is in the pool.
        in_tier: whether a hash is in a tier or on its way there.
    """

    def __init__(self, in_pool: Callable[[bytes], bool], in_tier: Callable[[bytes], bool]) -> None:
        self._in_pool = in_pool
        self._in_tier = in_tier

    def pool_changed(self, events: Iterable[IndexEvent]) -> list[IndexEvent]:
        """Returns the pool's events without those of blocks that only moved to a tier."""
        return [event for event in events if event.here or not self._in_tier(event.block_hash)]

    def blocks_lost(self, names: Iterable[BlockName]) -> list[IndexEvent]:
        """Returns events for blocks that a tier no longer keeps, without those that the pool or another tier has."""
        return [
            IndexEvent(name.hash, here=False, segment=name.segment)
            for name in names
            if not self._in_pool(name.hash) and not self._in_tier(name.hash)
        ]
