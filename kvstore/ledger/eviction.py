"""Decides which committed block leaves the pool first. :class:`EvictionPolicy` is the interface, LRU and LFU are the
implementations, and the block tree feeds them.

All policies keep one rule: a block leaves only after all its descendants, because a block whose parent is gone can
never be found by a prefix look-up. LRU gets this for free from the order in which chains are released. LFU gets it from
the way in which it counts:

    a chain is released, last block first:    last --its uses--> parent --its uses and the last's--> ... --> head

A use of a block is a use of its whole chain, but a parent that another ticket still protects is not released yet. So
every block passes the uses that were counted for it on to its parent, and the parent adds them when it is released
itself. A block has therefore never fewer uses than any of its children, and it is always released later than they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from pillion.errors import ConfigError
from pillion.kvstore.ledger.records import Block

# Uses beyond this make no difference: what was popular an hour ago must be able to go.
MAX_USES = 15


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
    always a
    leaf: no heap, no scan for leaves.
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


class LfuEviction:
    """Evicts the least frequently used block, with dynamic aging (LFU-DA: Arlitt et al., "Evaluating content management
    techniques for Web proxy caches", 2000). A block takes O(MAX_USES) at worst.

    A block's score is its uses plus the pool's age when it was added; the pool's age is the score of the block that was
    evicted last. So a block that is not used again is overtaken by newer blocks in the end. Scores in use lie within
    MAX_USES of the age. Blocks are ordered by (score, time of adding), which keeps the chain rule without the tree.
    """

    def __init__(self) -> None:
        self._age = 0
        self._known = 0
        self._queues: dict[int, OrderedDict[Block, None]] = {}

    def add(self, block: Block) -> None:
        """Updates the block's count of uses, and appends the block to the queue of blocks with its score."""
        block.score = self._age + min(_count_uses(block), MAX_USES)
        self._known += 1
        self._queues.setdefault(block.score, OrderedDict())[block] = None

    def remove(self, block: Block) -> None:
        """Deletes the block from its queue; the count of its uses is kept."""
        queue = self._queues[block.score]
        del queue[block]
        self._known -= 1
        if not queue:
            del self._queues[block.score]

    def pop(self) -> Block:
        """Takes the block at the front of the lowest score."""
        if not self._known:
            raise KeyError("no block is known")
        block = next(iter(self._queues[self._lowest_rank()]))
        self.drop(block)
        return block

    def drop(self, block: Block) -> None:
        """Deletes the block; the pool ages as if it had been the next victim."""
        self._age = self._lowest_rank()
        self.remove(block)

    def __len__(self) -> int:
        return self._known

    def __iter__(self) -> Iterator[Block]:
        for score in sorted(self._queues):
            yield from self._queues[score]

    def _lowest_rank(self) -> int:
        """Returns the lowest score in use. At least one block must be known."""
        score = self._age
        while score not in self._queues:
            score += 1
        return score


def _count_uses(block: Block) -> int:
    """Counts a release of ``block``: one use, or those of its children if they are more. Returns all its uses."""
    fresh = max(1, block.child_uses)
    block.child_uses = 0
    block.uses += fresh
    if block.parent is not None:
        block.parent.child_uses += fresh
    return block.uses


def make_policy(name: str) -> EvictionPolicy:
    """Makes the policy that ``--eviction-policy`` names: lru or lfu. Raises ConfigError for another name."""
    policies: dict[str, type[EvictionPolicy]] = {"lru": LruEviction, "lfu": LfuEviction}
    if name == "arc":
        raise ConfigError("--eviction-policy arc: this policy was removed; choose lru or lfu")
    if name not in policies:
        raise ConfigError(f"--eviction-policy {name}: choose {', '.join(policies)}")
    return policies[name]()
