"""Tree of committed blocks by parent. A pin on a chain's last block protects the whole chain.

    added (pinned) --unpin--> cached --evict--> removed
          ^                     |
          +--------pin----------+

``Block.ref_count`` counts the pins on the block itself plus its protected children, so "protected" means that it is not
0, and a pin or unpin walks only the ancestors whose protection changes. Every block is either protected or in the
eviction policy, so the number of evictable blocks is exact at any time, in O(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pillion.errors import Internal
from pillion.kvstore.hashing import SEGMENT_BLOCKS, state_page
from pillion.kvstore.ledger.eviction import EvictionPolicy
from pillion.kvstore.ledger.records import Block


@dataclass(frozen=True, slots=True)
class Match:
    """Longest committed prefix of a chain.

    Attributes:
        last_block: the prefix's last block, None for an empty prefix.
        blocks: length of the prefix.
        newly_pinned: number of its blocks, and of the state's pages, that are unprotected: a pin makes them
            unavailable.
        state: last page of the state after the last block, if a state was requested.
        known: length of the longest prefix with or without a state, if a state was requested.
    """

    last_block: Block | None
    blocks: int
    newly_pinned: int
    state: Block | None = None
    known: int = 0


class BlockTree:
    """All committed blocks of a pool. Only the ledger changes it, on the node's event loop, so it has no lock.

    Attributes:
        by_hash: the blocks by hash.
        policy: eviction order of the unprotected blocks.
        plain: eviction order without prefix pins; ``policy`` wraps it to evict prefix-pinned blocks last
            (:mod:`pillion.kvstore.ledger.pin_table`). It is replaced when the pool gets its first state
            (:mod:`pillion.kvstore.ledger.state_eviction`).
        protected: number of protected blocks.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.by_hash: dict[bytes, Block] = {}
        self.policy: EvictionPolicy = policy
        self.plain: EvictionPolicy = policy
        self.protected = 0

    def __len__(self) -> int:
        return len(self.by_hash)

    @property
    def idle(self) -> int:
        """Number of unprotected blocks, which are exactly those in the policy."""
        return len(self.by_hash) - self.protected

    def order_by(self, plain: EvictionPolicy) -> None:
        """Replace the plain eviction policy by ``plain``, which must contain the same blocks. Idempotent."""
        if self.policy is self.plain:
            self.policy = plain
        self.plain = plain

    def longest_prefix(self, hashes: Sequence[bytes]) -> Match:
        """Return the longest prefix of ``hashes`` whose blocks are committed, each as the child of the previous."""
        last_block: Block | None = None
        blocks = newly_pinned = 0
        for block_hash in hashes:
            block = self.by_hash.get(block_hash)
            if block is None or block.parent is not last_block:
                break
            last_block = block
            blocks += 1
            newly_pinned += not block.ref_count
        return Match(last_block, blocks, newly_pinned)

    def longest_with_state(self, hashes: Sequence[bytes], pages: int) -> Match:
        """Return the longest prefix of ``hashes`` that is followed by a state of ``pages`` pages."""
        longest = self.longest_prefix(hashes)
        at, known = longest.last_block, longest.blocks
        while at is not None:
            state = self.by_hash.get(state_page(at.hash, pages - 1))
            if state is not None:
                newly_pinned = sum(not block.ref_count for block in self.chain(state))
                return Match(at, at.depth + 1, newly_pinned, state, known)
            at = at.parent
        return Match(None, 0, 0, known=known)

    def state_after(self, block: Block | None, state: Block | None, pages: int) -> list[Block]:
        """Return the pages, in order, of the state whose last page is ``state``; empty if it does not follow
        ``block``."""
        state_pages: list[Block] = []
        while state is not None and len(state_pages) < pages:
            state_pages.append(state)
            state = state.parent
        state_pages.reverse()
        return state_pages if state is block else []

    def state_end(self, block: Block) -> Block:
        """Return the last page present of the state after ``block``, or ``block`` if no page is present."""
        end, page = block, 0
        while (next_page := self.by_hash.get(state_page(block.hash, page))) is not None:
            end, page = next_page, page + 1
        return end

    def chain(self, last_block: Block | None) -> list[Block]:
        """Return the blocks of a chain from its first block to ``last_block``."""
        blocks = []
        while last_block is not None:
            blocks.append(last_block)
            last_block = last_block.parent
        blocks.reverse()
        return blocks

    def on_chain(self, block: Block, last_block: Block | None) -> bool:
        """Return whether ``block`` is ``last_block`` or one of its ancestors."""
        while last_block is not None and last_block.depth > block.depth:
            last_block = last_block.parent
        return last_block is block

    def add(self, slot: int, block_hash: bytes, last_block: Block | None, page: bool = False) -> Block:
        """Add a block, or a page of a state, after ``last_block``, and move a pin of ``last_block`` to it."""
        depth = last_block.depth + 1 if last_block is not None else 0
        segment = last_block.segment if last_block is not None and depth % SEGMENT_BLOCKS else block_hash
        block = Block(slot, block_hash, last_block, depth, segment, ref_count=1, page=page)
        self.by_hash[block_hash] = block
        self.protected += 1
        if last_block is not None:
            last_block.children += 1
        return block

    def pin(self, block: Block | None) -> None:
        """Add a pin to ``block``, which protects its whole chain; None is an empty chain."""
        at = block
        while at is not None:
            at.ref_count += 1
            if at.ref_count > 1:
                return
            self.protected += 1
            self.policy.remove(at)
            at = at.parent

    def unpin(self, block: Block | None) -> None:
        """Remove a pin from ``block``. Blocks that lose their protection become evictable, the last one first."""
        at = block
        while at is not None:
            at.ref_count -= 1
            if at.ref_count:
                return
            self.protected -= 1
            self.policy.add(at)
            at = at.parent

    def evict(self) -> Block:
        """Remove and return the policy's next victim. Raises Internal if the policy chose a protected block."""
        block = self.policy.pop()
        self._forget(block)
        return block

    def drop(self, block: Block) -> None:
        """Remove a block that is not the policy's next victim. Raises Internal if it is protected or has children."""
        self._forget(block)
        self.policy.drop(block)

    def _forget(self, block: Block) -> None:
        if block.ref_count or block.children:
            raise Internal(f"eviction chose slot {block.slot}: {block.ref_count} references, {block.children} children")
        del self.by_hash[block.hash]
        if block.parent is not None:
            block.parent.children -= 1
