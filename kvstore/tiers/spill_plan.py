"""What to evict ahead of need, and what the index should hear of it. Sans-IO (I9);
:mod:`pillion.kvstore.tiers.spill` does it.

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
from pillion.kvstore.ledger.records import IndexEvent
from pillion.kvstore.ledger.tree import Block
from pillion.kvstore.tiers.tiers import BlockName


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Percent of the pool's slots that are free. ``low`` 0: never evict ahead of need. Raises ConfigError."""

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
        """Slots that should become free before evicting ends."""
        return max(0, -(-self.high_percent * ledger.num_slots // 100) - len(ledger.free))


def next_victims(ledger: Ledger, count: int) -> list[Block]:
    """The policy's next ``count`` victims, where there are so many: of a chain the tail before its head."""
    return list(islice(ledger.tree.policy, count))


def evict_still_unused(ledger: Ledger, block: Block) -> bool:
    """Evicts ``block`` if it is what it was when it was chosen: the very block, unprotected, a leaf."""
    if ledger.tree.by_hash.get(block.hash) is not block or block.holds or block.children:
        return False
    ledger.evict_block(block)
    return True


class News:
    """A block is known to the index as long as the pool or a lower tier has it, or is about to.

    Args:
        in_pool, below: whether a hash is in the pool; whether it is in a tier or on its way there.
    """

    def __init__(self, in_pool: Callable[[bytes], bool], below: Callable[[bytes], bool]) -> None:
        self._in_pool = in_pool
        self._below = below

    def changed(self, events: Iterable[IndexEvent]) -> list[IndexEvent]:
        """The pool's events, less those of blocks that only moved down."""
        return [event for event in events if event.here or not self._below(event.block_hash)]

    def forgotten(self, names: Iterable[BlockName]) -> list[IndexEvent]:
        """What a tier no longer keeps, as events, less what the pool or another tier has."""
        return [
            IndexEvent(name.hash, here=False, segment=name.segment)
            for name in names
            if not self._in_pool(name.hash) and not self._below(name.hash)
        ]
