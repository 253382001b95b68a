"""Which cached block goes first. A policy is a small class behind :class:`EvictionPolicy`; the tree feeds it.

The one rule all policies keep: a block leaves only after all its descendants, because a block whose parent is gone can
never be found by a prefix look-up. LRU gets that for free (see below); the others, in
:mod:`pillion.kvstore.ledger.eviction_frequency`, count in a way that gives it to them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from pillion.errors import ConfigError

if TYPE_CHECKING:
    from pillion.kvstore.ledger.tree import Block


class EvictionPolicy(Protocol):
    """Knows exactly the committed blocks that no ticket protects."""

    def add(self, block: Block) -> None:
        """``block`` lost its last protection. Its unprotected descendants were added before it."""

    def remove(self, block: Block) -> None:
        """``block`` is protected again. It is known."""

    def pop(self) -> Block:
        """Forgets and returns the next victim: a block without children. Raises KeyError when none is known."""

    def drop(self, block: Block) -> None:
        """Forgets ``block``, which is known and has no children: it leaves the pool out of turn."""

    def __len__(self) -> int:
        """Known blocks."""

    def __iter__(self) -> Iterator[Block]:
        """Known blocks, next victim first."""


class LruEviction:
    """Least recently protected first; of one chain the tail before its head. Every operation is O(1) a block.

    When a pin is let go, the chain is added from its tail upwards, and a block that still has a protected descendant
    is protected itself. So in this queue a descendant always stands before its ancestors, and the front is always a
    leaf: no heap, no scan for leaves.
    """

    def __init__(self) -> None:
        # Not a plain dict: taking its first key again and again is quadratic, it steps over every hole in front.
        self._queue: OrderedDict[Block, None] = OrderedDict()

    def add(self, block: Block) -> None:
        """To the back."""
        self._queue[block] = None

    def remove(self, block: Block) -> None:
        """Out of line."""
        del self._queue[block]

    def pop(self) -> Block:
        """From the front."""
        return self._queue.popitem(last=False)[0]

    def drop(self, block: Block) -> None:
        """Out of line."""
        del self._queue[block]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._queue)


def make_policy(name: str) -> EvictionPolicy:
    """A new policy by the name that ``--eviction-policy`` takes: lru, lfu or arc. Raises ConfigError for another."""
    # Here, because that module's readers come from this one.
    from pillion.kvstore.ledger.eviction_frequency import ArcEviction, LfuEviction

    policies: dict[str, type[EvictionPolicy]] = {"lru": LruEviction, "lfu": LfuEviction, "arc": ArcEviction}
    if name not in policies:
        raise ConfigError(f"--eviction-policy {name}: choose {', '.join(policies)}")
    return policies[name]()
