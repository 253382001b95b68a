"""Defines the seam at which a room makes chains of the ledger leave last, as long as tenants want that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pillion.kvstore.ledger.records import Block
from pillion.v1.kvnode_pb2 import NodeStatus


class LedgerPins:
    """Takes what a ledger tells of its blocks. This class pins no prefix, so all blocks leave by the eviction policy.

    No call waits, and what is called for each block is O(1) where nothing is prefix-pinned.
    """

    def shape(self, num_slots: int) -> None:
        """Notes that the pool has ``num_slots`` slots, which never changes."""

    def used(self, hashes: Sequence[bytes], blocks: int) -> None:
        """Notes that a ticket was admitted, and that the first ``blocks`` of its chain are in the pool."""

    def came(self, block: Block) -> None:
        """Notes that a block was committed, or restored from the node's earlier life."""

    def went(self, block: Block) -> None:
        """Notes that a block was evicted, and that the tree has forgotten it."""

    def check(self) -> Iterator[str]:
        """Yields a line for each prefix pin that does not add up. O(blocks of the pool)."""
        yield from ()

    def describe(self, status: NodeStatus) -> None:
        """Adds the counts of prefix pins to a node's status."""
