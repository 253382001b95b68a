"""Eviction policies that count how often a block was used: LFU with aging, and an ARC.

    a chain is let go, tail first:    tail --its uses--> parent --its uses and the tail's--> ... --> head

A use of a block is a use of its whole chain, but a parent that another ticket protects meanwhile is not seen here until
that is let go too. So every block hands the uses that were counted for it on to its parent, and the parent counts them
when it comes itself. A block has therefore never fewer uses than any of its children, and it always comes later than
they. Both policies rank by (uses, time of coming), hence keep the chain rule without looking at the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pillion.kvstore.ledger.tree import Block

# Uses beyond this make no difference: what was popular an hour ago must be able to go.
MAX_USES = 15


def count_use(block: Block, least: int = 1) -> int:
    """``block`` was let go after one use, after ``least``, or after those of its children. Returns all its uses."""
    fresh = max(least, block.child_uses)
    block.child_uses = 0
    block.uses += fresh
    if block.parent is not None:
        block.parent.child_uses += fresh
    return block.uses


class LfuEviction:
    """Least frequently used first, with dynamic aging (LFU-DA: Arlitt et al., "Evaluating content management techniques
    for Web proxy caches", 2000). O(MAX_USES) a block at worst.

    A block's rank is its uses plus the pool's age when it came; the pool's age is the rank of what was evicted last.
    So what is not used again is overtaken by newer blocks in the end. Ranks in use lie within MAX_USES of the age.
    """

    def __init__(self) -> None:
        self._age = 0
        self._known = 0
        self._lines: dict[int, OrderedDict[Block, None]] = {}

    def add(self, block: Block) -> None:
        """To the back of its rank's line."""
        block.rank = self._age + min(count_use(block), MAX_USES)
        self._known += 1
        line = self._lines.get(block.rank)
        if line is None:
            line = self._lines[block.rank] = OrderedDict()
        line[block] = None

    def remove(self, block: Block) -> None:
        """Out of line; its uses stay."""
        line = self._lines[block.rank]
        del line[block]
        self._known -= 1
        if not line:
            del self._lines[block.rank]

    def pop(self) -> Block:
        """From the front of the lowest rank."""
        if not self._known:
            raise KeyError("no block is known")
        self._age = self._lowest()
        block = next(iter(self._lines[self._age]))
        self.remove(block)
        return block

    def drop(self, block: Block) -> None:
        """Out of line, and the pool ages as if it had been its turn."""
        self._age = self._lowest()
        self.remove(block)

    def __len__(self) -> int:
        return self._known

    def __iter__(self) -> Iterator[Block]:
        for rank in sorted(self._lines):
            yield from self._lines[rank]

    def _lowest(self) -> int:
        """The lowest rank in use. There is one."""
        rank = self._age
        while rank not in self._lines:
            rank += 1
        return rank


class ArcEviction:
    """Balances recency against frequency by its own mistakes, after ARC (Megiddo and Modha, FAST 2003). O(1) a block.

        once   blocks used once, oldest first          ghosts of these: "should have waited longer"  -> more for once
        often  blocks used twice or more, oldest first  ghosts of these: "should have stayed"         -> less for once

    ``once`` may hold ``_target`` blocks before it has to give. One change to the original: a block of ``often`` goes
    only if it is older than all of ``once``, because only then none of its children, which came before it, can be
    there. Ghosts are hashes of evicted blocks, at most as many of a kind as blocks were ever known at once.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._most = 0
        self._target = 0.0
        # Block -> when it came.
        self._once: OrderedDict[Block, int] = OrderedDict()
        self._often: OrderedDict[Block, int] = OrderedDict()
        self._once_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._often_ghosts: OrderedDict[bytes, None] = OrderedDict()

    def add(self, block: Block) -> None:
        """To the back of its list. One that was evicted not long ago counts as used before."""
        returned = not block.uses and self._learn(block.hash)
        block.rank = min(2, count_use(block, least=2 if returned else 1))
        self._clock += 1
        (self._often if block.rank > 1 else self._once)[block] = self._clock
        self._most = max(self._most, len(self._once) + len(self._often))

    def remove(self, block: Block) -> None:
        """Out of its list; its uses stay."""
        del (self._often if block.rank > 1 else self._once)[block]

    def pop(self) -> Block:
        """The oldest of one of the lists. Raises KeyError when none is known."""
        once, often = next(iter(self._once.items()), None), next(iter(self._often.items()), None)
        chosen = often if self._often_gives(once, often, len(self._once)) else once
        if chosen is None:
            raise KeyError("no block is known")
        self.drop(chosen[0])
        return chosen[0]

    def drop(self, block: Block) -> None:
        """Out of its list; its ghost stays for a while."""
        self.remove(block)
        ghosts = self._often_ghosts if block.rank > 1 else self._once_ghosts
        ghosts[block.hash] = None
        if len(ghosts) > self._most:
            ghosts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def __iter__(self) -> Iterator[Block]:
        once, often = iter(self._once.items()), iter(self._often.items())
        left = len(self._once)
        next_once, next_often = next(once, None), next(often, None)
        while next_once is not None or next_often is not None:
            if next_often is not None and self._often_gives(next_once, next_often, left):
                yield next_often[0]
                next_often = next(often, None)
            elif next_once is not None:
                yield next_once[0]
                next_once, left = next(once, None), left - 1

    def _often_gives(self, once: tuple[Block, int] | None, often: tuple[Block, int] | None, left: int) -> bool:
        """Whether the oldest of ``often`` goes, rather than the oldest of ``left`` blocks of ``once``."""
        if once is None or often is None:
            return once is None
        return left <= self._target and often[1] < once[1]

    def _learn(self, block_hash: bytes) -> bool:
        """Whether it was evicted not long ago; then that was a mistake, and the lists' shares move a little."""
        once, often = self._once_ghosts, self._often_ghosts
        if block_hash in once:
            self._target = min(float(self._most), self._target + max(1.0, len(often) / len(once)))
            del once[block_hash]
            return True
        if block_hash in often:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(often)))
            del often[block_hash]
            return True
        return False
