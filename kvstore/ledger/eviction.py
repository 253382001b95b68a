"""Eviction order of committed blocks: the interface :class:`EvictionPolicy`, and LRU for pools without states.

All policies follow one rule: a block is evicted only after all its descendants, because a prefix look-up cannot reach a
block without its parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from pillion.kvstore.ledger.records import Block


class EvictionPolicy(Protocol):
    """Eviction order of the unprotected blocks. The block tree calls it on the node's event loop, so it has no lock."""

    def add(self, block: Block) -> None:
        """Add a block that lost its last protection. Its unprotected descendants were added before it."""

    def remove(self, block: Block) -> None:
        """Remove a block that is protected again."""

    def pop(self) -> Block:
        """Remove and return the next victim, a block without children. Raises KeyError when empty."""

    def drop(self, block: Block) -> None:
        """Remove a block without children that is evicted out of order."""

    def __len__(self) -> int:
        """Return the number of unprotected blocks."""

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the blocks, next victim first."""


class LruEviction:
    """LRU order by the time at which blocks lost their protection, the last block of a chain first. O(1) per block.

    When a pin is released, the chain is added from its last block upwards, and a block with a protected descendant is
    protected itself. So descendants always precede their ancestors in the queue, and the front is always a leaf: it
    needs neither a heap nor a scan for leaves.
    """

    def __init__(self) -> None:
        # Not a plain dict: repeatedly popping its first key is quadratic, since each pop steps over all removed
        # entries.
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
