"""Defines the seam at which a room decides which states of a pool stay, for models whose layers carry one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pillion.kvstore.ledger.eviction import EvictionPolicy
from pillion.kvstore.ledger.records import Block
from pillion.kvstore.ledger.tree import Match


class LedgerStates:
    """Takes what a ledger tells of pages, the blocks that states consist of. With this class they leave by the pool's
    eviction policy, like all blocks.

    Attributes:
        policy: the policy that the block tree feeds from the first page on: the pool's own, or one around it.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy

    def shape(self, num_slots: int) -> None:
        """Notes that the pool has ``num_slots`` slots, which never changes."""

    def opens(self, hashes: Sequence[bytes], match: Match) -> int:
        """Notes that a ticket begins with ``match``, which nothing pins for it yet. Returns after how many blocks the
        text is to leave a state: where texts part, as far as that is known."""
        return match.known

    def came(self, page: Block) -> None:
        """Notes that a page was committed, or restored from the node's earlier life. It is protected."""

    def went(self, block: Block) -> None:
        """Notes that a block was evicted, a page or another one, and that the tree has forgotten it."""

    def check(self) -> Iterator[str]:
        """Yields a line for each thing that does not add up. O(blocks of the pool)."""
        yield from ()
