"""Decides which committed block leaves the pool first. :class:`EvictionPolicy` is the interface, LRU is the
implementation of a pool without states, and the block tree feeds it.

All policies keep one rule: a block leaves only after all its descendants, because a block whose parent is gone can
never be found by a prefix look-up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from pillion.kvstore.ledger.records import Block


class EvictionPolicy(Protocol):
    """Orders the committed blocks that no ticket protects as they are to be evicted. It is called by the block tree on
    the node's loop and has no lock."""

    def add(self, block: Block) -> None:
        """Adds a block that lost its last protection. Its descendants without protection were added before it."""

    def remove(self, block: Block) -> None:
        """Removes a known block because it is protected again."""

    def pop(self) -> Block:
        """Removes and returns the next victim, a block without children. Raises KeyError when no block is known."""

    def drop(self, block: Block) -> None:
        """Removes a known block without children that leaves the pool out of turn."""

    def __len__(self) -> int:
        """Returns the number of known blocks."""

    def __iter__(self) -> Iterator[Block]:
        """Iterates over the known blocks, next victim first."""


class LruEviction:
    """Evicts the block that lost its protection first, and the last block of a chain before its head, in O(1) for each
    block.

    When a pin is released, the chain is added from its last block upwards, and a block that still has a protected
    descendant is protected itself. So in this queue a descendant always stands before its ancestors, and the front is
    always a leaf: no heap, no scan for leaves.
    """

    def __init__(self) -> None:
        # A plain dict would not do: taking its first key again and again is quadratic, because it steps over all
        # removed entries.
        self._queue: OrderedDict[Block, None] = OrderedDict()

    def add(self, block: Block) -> None:
        self._queue[block] = None

    def remove(self, block: Block) -> None:
        del self._queue[block]

    def pop(self) -> Block:
        return self._queue.popitem(last=False)[0]

    drop = remove

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._queue)
