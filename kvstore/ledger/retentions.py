"""Retentions: chains that leave the pool behind everything else, for a while and within bounds. Users call them pins.

    retained --the chain's last block is in the pool--> whole --nothing else can be evicted--> partly in the pool
                                                          ^                                            |
                                                          +-------- the chain's last block comes ------+
    any of them --its time is over, its owner drops it, another one takes its place,
                  or its last block comes at another depth than it says--> (void)

A retention gives its chain no protection against requests, only against other cached blocks: a block that a ticket
pins is protected, one that is retained is evicted when there is nothing else to evict. So the pool has as many
available slots with retentions as without, nobody waits for one, and nothing deadlocks where everything is retained
(I5). Nor are retentions needed for correct answers (I1).

A chain is named by its last block's hash. That is enough to retain it again where it comes back after an eviction or in
a node's next life, and it tells nothing of the prompt.

Quotas count the wished blocks, also where blocks are shared or not there: what an owner may have does not depend on
what others do. Sans-IO (I9).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pillion.errors import InvalidRequest, Overloaded
from pillion.kvstore.ledger.records import Block, Retention, RetentionWish
from pillion.kvstore.ledger.tree import BlockTree

# Of one node, and of one owner there. A record of one takes some 200 bytes in Redis.
MAX_RETENTIONS = 1024
MAX_OWNER_RETENTIONS = 128
# How long one may last.
MAX_RETENTION_S = 30 * 86_400.0


class Retentions:
    """All retentions of one pool. The ledger calls it for blocks that come and go; no call waits, so it has no lock.

    Args:
        tree: the pool's blocks, which this class marks.
        percent, owner_percent: shares of the pool that all owners, and one of them, may have retained.

    Attributes:
        all: every retention by its owner and name.
        blocks: the number of blocks that all wishes have together.
        max_blocks, max_owner_blocks: the most that all owners, and one of them, may have.
        lapsed_ever: how many retentions have ended because their time was over.
        refused_ever: how many wishes were beyond a quota, or had another length than they said.
        hits_ever: how many hits all retentions have had, those that have ended included.
    """

    def __init__(self, tree: BlockTree, percent: int, owner_percent: int) -> None:
        self.all: dict[tuple[str, str], Retention] = {}
        self.blocks = 0
        self.lapsed_ever = self.refused_ever = self.hits_ever = 0
        self._tree = tree
        self._percents = percent, owner_percent
        self.max_blocks = self.max_owner_blocks = 0
        self._owner_blocks: Counter[str] = Counter()
        self._owner_counts: Counter[str] = Counter()
        self._by_tail: dict[bytes, list[Retention]] = {}
        self._ends: dict[Block, list[Retention]] = {}

    def shape(self, num_slots: int) -> None:
        """Sets the bounds in blocks."""
        percent, owner_percent = self._percents
        self.max_blocks = num_slots * percent // 100
        self.max_owner_blocks = num_slots * owner_percent // 100

    def of(self, owner: str) -> list[Retention]:
        """Returns an owner's retentions, the oldest first. O(retentions of the node)."""
        return [retention for (whose, _), retention in self.all.items() if whose == owner]

    def retain(self, wish: RetentionWish, now: float, hashes: Sequence[bytes] = (), most_blocks: int = 0) -> Retention:
        """Retains a chain as far as it is here, and the rest when it comes.

        Args:
            now: time on the same clock as the wish's; one that is over by then is refused.
            hashes: the chain, the wish's tail last and no hash twice; without them a chain that is not whole here is
                looked for by its tail alone.
            most_blocks: the owner's own bound at this node, where it is below the node's; 0: it has none.

        Raises InvalidRequest for a wish that makes no sense, Overloaded beyond a quota; nothing is changed then.
        """
        self._judge_sense(wish, now, hashes)
        replaced = self._replaced(wish, hashes)
        try:
            self._judge(wish, replaced, most_blocks)
        except Overloaded:
            self.refused_ever += 1
            raise
        hits = 0
        for old in replaced:
            hits += old.hits if old.wish.name == wish.name else 0
            self._remove(old)
        retention = Retention(wish, hits=hits)
        self.all[wish.owner, wish.name] = retention
        self._by_tail.setdefault(wish.tail_hash, []).append(retention)
        self._count(wish, 1)
        tail = self._tree.by_hash.get(wish.tail_hash) or self._tree.longest_prefix(hashes).tail
        if tail is not None:
            self._move(retention, tail)
        return retention

    def drop(self, owner: str, name: str) -> bool:
        """Ends a retention; returns whether there was one."""
        retention = self.all.get((owner, name))
        if retention is None:
            return False
        self._remove(retention)
        return True

    def expire(self, now: float) -> int:
        """Ends all whose time is over; returns how many. O(retentions)."""
        over = [retention for retention in self.all.values() if retention.wish.until_s <= now]
        for retention in over:
            self._remove(retention)
        self.lapsed_ever += len(over)
        return len(over)

    # -- called by the ledger

    def used(self, hashes: Sequence[bytes], blocks: int) -> None:
        """A ticket was admitted, and the first ``blocks`` of its chain are in the pool: a hit of each retention that
        ends among them. What a fetch brings later is none. O(blocks), nothing where nothing is retained."""
        if not self._by_tail:
            return
        # A pinned prefix is a chain of the tree, so no hash comes twice.
        for block_hash in hashes[:blocks]:
            for retention in self._by_tail.get(block_hash, ()):
                retention.hits += 1
                self.hits_ever += 1

    def came(self, block: Block) -> None:
        """A block was committed, or restored. A retention that said another length of its chain ends."""
        for retention in tuple(self._by_tail.get(block.hash, ())):
            if retention.wish.blocks == block.depth + 1:
                self._move(retention, block)
            else:
                self._remove(retention)
                self.refused_ever += 1

    def went(self, block: Block) -> None:
        """A block was evicted; the tree has passed its marks on to its parent."""
        for retention in self._ends.pop(block, ()):
            retention.end = block.parent
            if block.parent is not None:
                self._ends.setdefault(block.parent, []).append(retention)

    def check(self) -> Iterator[str]:
        """Yields what does not add up. O(blocks of the pool)."""
        blocks = self._tree.by_hash
        ends = Counter(retention.end for retention in self.all.values() if retention.end is not None)
        if {block: len(found) for block, found in self._ends.items()} != dict(ends):
            yield "the ends of retentions are not those that are filed"
        marked = Counter(block.parent for block in blocks.values() if block.parent is not None and block.retained)
        for block in blocks.values():
            if block.retained != ends[block] + marked[block]:
                yield f"block of slot {block.slot} has {block.retained} marks of {ends[block]} retentions"
        for retention in self.all.values():
            name, end, wished = retention.wish.name, retention.end, retention.wish.blocks
            if end is not None and blocks.get(end.hash) is not end:
                yield f"retention {name} ends with a block that is gone"
            if end is not None and (end.hash == retention.wish.tail_hash) != (retention.blocks == wished):
                yield f"retention {name} wishes {wished} blocks, and ends with block {retention.blocks}"
            if retention not in self._by_tail.get(retention.wish.tail_hash, ()):
                yield f"retention {name} is not found by its tail"
            if blocks.get(retention.wish.tail_hash, end) is not end:
                yield f"retention {name} does not end with its tail, which is here"
        if (
            self.blocks != sum(retention.wish.blocks for retention in self.all.values())
            or self.blocks > self.max_blocks
        ):
            yield f"{self.blocks} blocks are counted as retained, of at most {self.max_blocks}"
        if any(count > self.max_owner_blocks for count in self._owner_blocks.values()):
            yield "an owner has more retained than it may"

    # -- inside

    def _judge_sense(self, wish: RetentionWish, now: float, hashes: Sequence[bytes]) -> None:
        """Raises InvalidRequest for a wish that makes no sense. No length is believed: quotas count it."""
        if wish.blocks < 1 or not now < wish.until_s <= now + MAX_RETENTION_S:
            raise InvalidRequest(f"a pin has at least one block and lasts for up to {MAX_RETENTION_S:.0f} s")
        if hashes and (len(set(hashes)) != wish.blocks or len(hashes) != wish.blocks or hashes[-1] != wish.tail_hash):
            raise InvalidRequest("a pin names each block of its chain once, the last one last")
        tail = self._tree.by_hash.get(wish.tail_hash)
        if tail is not None and tail.depth + 1 != wish.blocks:
            raise InvalidRequest(f"the pin's last block is number {tail.depth + 1} of its chain, not {wish.blocks}")

    def _replaced(self, wish: RetentionWish, hashes: Sequence[bytes]) -> list[Retention]:
        """Those whose place the wish takes."""
        same = self.all.get((wish.owner, wish.name))
        found = [] if same is None else [same]
        for block_hash in hashes if wish.ephemeral else ():
            for other in self._by_tail.get(block_hash, ()):
                covered = other.wish.owner == wish.owner and other.wish.ephemeral and other.wish.until_s <= wish.until_s
                if covered and other is not same:
                    found.append(other)
        return found

    def _judge(self, wish: RetentionWish, replaced: Sequence[Retention], most_blocks: int) -> None:
        freed = sum(old.wish.blocks for old in replaced)
        owned, total = self._owner_blocks[wish.owner] - freed + wish.blocks, self.blocks - freed + wish.blocks
        bound = min(self.max_owner_blocks, most_blocks or self.max_owner_blocks)
        if owned > bound:
            raise Overloaded(f"the tenant's pins would have {owned} blocks at this KV node, of at most {bound}")
        if total > self.max_blocks:
            raise Overloaded(f"all pins would have {total} blocks at this KV node, of at most {self.max_blocks}")
        if not replaced and self._owner_counts[wish.owner] >= MAX_OWNER_RETENTIONS:
            raise Overloaded(f"the tenant has {MAX_OWNER_RETENTIONS} pins at this KV node already")
        if not replaced and len(self.all) >= MAX_RETENTIONS:
            raise Overloaded(f"this KV node has {MAX_RETENTIONS} pins already")

    def _move(self, retention: Retention, block: Block) -> None:
        """Lets a retention's marks end with ``block``, which is on its chain."""
        if retention.end is block:
            return
        self._tree.retain(block)
        self._unmark(retention)
        retention.end = block
        self._ends.setdefault(block, []).append(retention)

    def _unmark(self, retention: Retention) -> None:
        end, retention.end = retention.end, None
        if end is None:
            return
        found = self._ends[end]
        found.remove(retention)
        if not found:
            del self._ends[end]
        self._tree.unretain(end)

    def _remove(self, retention: Retention) -> None:
        wish = retention.wish
        del self.all[wish.owner, wish.name]
        found = self._by_tail[wish.tail_hash]
        found.remove(retention)
        if not found:
            del self._by_tail[wish.tail_hash]
        self._count(wish, -1)
        self._unmark(retention)

    def _count(self, wish: RetentionWish, sign: int) -> None:
        self.blocks += sign * wish.blocks
        self._owner_blocks[wish.owner] += sign * wish.blocks
        self._owner_counts[wish.owner] += sign
        if not self._owner_counts[wish.owner]:
            del self._owner_blocks[wish.owner], self._owner_counts[wish.owner]
