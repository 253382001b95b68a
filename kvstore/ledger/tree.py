"""Holds committed blocks as a tree by parent, each chain pinned by its last block.

    born (pinned) --unpin--> cached --evict--> gone
         ^                     |
         +--------pin----------+

A pin on a chain's last block protects the whole chain. ``Block.holds`` counts the pins on the block itself plus its
protected children, so "protected" means ``holds > 0``, and a pin or unpin walks only those ancestors whose protection
really changes. Every block is either protected or known to the eviction policy, so what could be evicted is counted
exactly, at any time, in O(1).
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
    """Describes the longest prefix of a chain that the pool has.

    Attributes:
        last_block: its last block, None where there is none.
        blocks: its length.
        newly: how many of its blocks are unprotected now, so that a pin would take them from the eviction policy; with
            those of the state.
        state: the last page of the state after the last block, where one was asked for.
        known: the blocks of the longest prefix without regard to states, where one was asked for.
    """

    last_block: Block | None
    blocks: int
    newly: int
    state: Block | None = None
    known: int = 0


class BlockTree:
    """Holds all committed blocks of a pool by hash. Only the ledger changes it, on the node's loop, so it has no lock.
    It feeds ``policy`` with every block that loses or regains its protection.

    ``plain`` knows the blocks among them that may leave ahead of need: all of them, unless another policy is put around
    it that makes some blocks leave last (:mod:`pillion.kvstore.ledger.pin_table`). Another one takes its place when
    the pool gets its first state (:mod:`pillion.kvstore.ledger.state_eviction`).
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
        """Gives the number of blocks that nothing protects: the policy knows exactly these."""
        return len(self.by_hash) - self.protected

    def order_by(self, plain: EvictionPolicy) -> None:
        """Replaces the eviction policy by ``plain``, which has to know the same blocks. Idempotent."""
        if self.policy is self.plain:
            self.policy = plain
        self.plain = plain

    def longest_prefix(self, hashes: Sequence[bytes]) -> Match:
        """Walks ``hashes`` as long as each is committed as the child of the one before."""
        last_block: Block | None = None
        blocks = newly = 0
        for block_hash in hashes:
            block = self.by_hash.get(block_hash)
            if block is None or block.parent is not last_block:
                break
            last_block = block
            blocks += 1
            newly += not block.holds
        return Match(last_block, blocks, newly)

    def longest_with_state(self, hashes: Sequence[bytes], pages: int) -> Match:
        """Returns the longest prefix of ``hashes`` after whose last block stands a state of so many pages."""
        longest = self.longest_prefix(hashes)
        at, known = longest.last_block, longest.blocks
        while at is not None:
            state = self.by_hash.get(state_page(at.hash, pages - 1))
            if state is not None:
                newly = sum(not block.holds for block in self.chain(state))
                return Match(at, at.depth + 1, newly, state, known)
            at = at.parent
        return Match(None, 0, 0, known=known)

    def state_behind(self, block: Block | None, state: Block | None, pages: int) -> list[Block]:
        """Returns the pages of the state whose last page is ``state``, in order; none where it does not stand after
        ``block``."""
        found: list[Block] = []
        while state is not None and len(found) < pages:
            found.append(state)
            state = state.parent
        found.reverse()
        return found if state is block else []

    def state_end(self, block: Block) -> Block:
        """Returns the last page of the state after ``block``, or ``block`` where no page of one is here."""
        end, page = block, 0
        while (found := self.by_hash.get(state_page(block.hash, page))) is not None:
            end, page = found, page + 1
        return end

    def chain(self, last_block: Block | None) -> list[Block]:
        """Returns the blocks of a chain from its first one to ``last_block``."""
        blocks = []
        while last_block is not None:
            blocks.append(last_block)
            last_block = last_block.parent
        blocks.reverse()
        return blocks

    def on_chain(self, block: Block, last_block: Block | None) -> bool:
        """Returns whether ``block`` is ``last_block`` or an ancestor of it."""
        while last_block is not None and last_block.depth > block.depth:
            last_block = last_block.parent
        return last_block is block

    def add(self, slot: int, block_hash: bytes, last_block: Block | None, page: bool = False) -> Block:
        """Adds a block, or a page of a state, after ``last_block`` and moves the pin of ``last_block``, which its new
        child protects, to it."""
        depth = last_block.depth + 1 if last_block is not None else 0
        segment = last_block.segment if last_block is not None and depth % SEGMENT_BLOCKS else block_hash
        block = Block(slot, block_hash, last_block, depth, segment, holds=1, page=page)
        self.by_hash[block_hash] = block
        self.protected += 1
        if last_block is not None:
            last_block.children += 1
        return block

    def pin(self, block: Block) -> None:
        """Adds a pin to ``block``, which protects its whole chain."""
        at: Block | None = block
        while at is not None:
            at.holds += 1
            if at.holds > 1:
                return
            self.protected += 1
            self.policy.remove(at)
            at = at.parent

    def unpin(self, block: Block) -> None:
        """Takes a pin from ``block``. What nothing protects any more can be evicted, the last block first."""
        at: Block | None = block
        while at is not None:
            at.holds -= 1
            if at.holds:
                return
            self.protected -= 1
            self.policy.add(at)
            at = at.parent

    def evict(self) -> Block:
        """Removes the policy's next victim and returns it. Raises Internal if the policy broke its rule."""
        block = self.policy.pop()
        self._forget(block)
        return block

    def drop(self, block: Block) -> None:
        """Removes a block that is not the policy's next victim. Raises Internal if it is protected or has children."""
        self._forget(block)
        self.policy.drop(block)

    def _forget(self, block: Block) -> None:
        if block.holds or block.children:
            raise Internal(f"eviction chose slot {block.slot}: {block.holds} holds, {block.children} children")
        del self.by_hash[block.hash]
        if block.parent is not None:
            block.parent.children -= 1
