"""Committed blocks as a tree by parent, pinned by tails.

    born (pinned) --unpin--> cached --evict--> gone
         ^                     |
         +--------pin----------+

A pin on a chain's last block protects the whole chain. ``Block.holds`` counts the pins on the block itself plus its
protected children, so "protected" means ``holds > 0``, and a pin or unpin walks only those ancestors whose protection
really changes. Every block is either protected or known to the eviction policy, so what could be evicted is counted
exactly, at any time, in O(1).

A retention marks a chain in the same way, by ``Block.retained``. A marked block can be evicted, too, but only after all
blocks that are not marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pillion.errors import Internal
from pillion.kvstore.hashing import SEGMENT_BLOCKS
from pillion.kvstore.ledger.eviction import EvictionPolicy, RetainingEviction
from pillion.kvstore.ledger.records import Block


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a chain that the pool has.

    Attributes:
        tail: its last block, None where there is none.
        blocks: its length.
        newly: how many of its blocks are unprotected now, so that a pin would take them from the eviction policy.
    """

    tail: Block | None
    blocks: int
    newly: int


class BlockTree:
    """All committed blocks of a pool by hash. Only the ledger changes it, on the node's loop, so it has no lock. It
    feeds ``policy`` with every block that loses or regains its protection."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.by_hash: dict[bytes, Block] = {}
        self.policy = RetainingEviction(policy)
        self.protected = 0

    def __len__(self) -> int:
        return len(self.by_hash)

    def longest_prefix(self, hashes: Sequence[bytes]) -> Match:
        """Walks ``hashes`` as long as each is committed as the child of the one before."""
        tail: Block | None = None
        blocks = newly = 0
        for block_hash in hashes:
            block = self.by_hash.get(block_hash)
            if block is None or block.parent is not tail:
                break
            tail = block
            blocks += 1
            newly += not block.holds
        return Match(tail, blocks, newly)

    def chain(self, tail: Block | None) -> list[Block]:
        """Returns the blocks of a chain from its first one to ``tail``."""
        blocks = []
        while tail is not None:
            blocks.append(tail)
            tail = tail.parent
        blocks.reverse()
        return blocks

    def on_chain(self, block: Block, tail: Block | None) -> bool:
        """Whether ``block`` is ``tail`` or an ancestor of it."""
        while tail is not None and tail.depth > block.depth:
            tail = tail.parent
        return tail is block

    def add(self, slot: int, block_hash: bytes, tail: Block | None) -> Block:
        """Adds a block behind ``tail`` and moves the pin of ``tail``, which its new child protects, to it."""
        depth = tail.depth + 1 if tail is not None else 0
        segment = tail.segment if tail is not None and depth % SEGMENT_BLOCKS else block_hash
        block = Block(slot, block_hash, tail, depth, segment, holds=1)
        self.by_hash[block_hash] = block
        self.protected += 1
        if tail is not None:
            tail.children += 1
        return block

    def pin(self, block: Block) -> None:
        """Adds a hold to ``block``, which protects its whole chain."""
        at: Block | None = block
        while at is not None:
            at.holds += 1
            if at.holds > 1:
                return
            self.protected += 1
            self.policy.remove(at)
            at = at.parent

    def unpin(self, block: Block) -> None:
        """Takes a hold from ``block``. What nothing protects any more can be evicted, tail first."""
        at: Block | None = block
        while at is not None:
            at.holds -= 1
            if at.holds:
                return
            self.protected -= 1
            self.policy.add(at)
            at = at.parent

    def retain(self, block: Block) -> None:
        """Marks the chain that ends with ``block``. O(blocks of the chain)."""
        at: Block | None = block
        grows = True
        while at is not None:
            # Also where nothing grows any more: an ancestor has to stand behind what was just marked.
            if not at.holds:
                self.policy.remove(at)
            at.retained += grows
            grows = grows and at.retained == 1
            if not at.holds:
                self.policy.add(at)
            at = at.parent

    def unretain(self, block: Block) -> None:
        """Takes a mark back. What nothing marks any more is evicted like everything else."""
        at: Block | None = block
        while at is not None:
            if at.retained > 1:
                at.retained -= 1
                return
            if not at.holds:
                self.policy.remove(at)
            at.retained = 0
            if not at.holds:
                self.policy.add(at)
            at = at.parent

    def evict(self) -> Block:
        """Removes the policy's next victim and returns it. Raises Internal if the policy broke its rule."""
        block = self.policy.pop()
        self._forget(block)
        return block

    def drop(self, block: Block) -> None:
        """Removes a block out of turn. Raises Internal if it is protected or has children."""
        self._forget(block)
        self.policy.drop(block)

    def _forget(self, block: Block) -> None:
        if block.holds or block.children:
            raise Internal(f"eviction chose slot {block.slot}: {block.holds} holds, {block.children} children")
        del self.by_hash[block.hash]
        if block.parent is not None:
            block.parent.children -= 1
            if block.retained:
                # The marks of those that ended here are the parent's from now on.
                block.parent.retained += block.retained - 1
