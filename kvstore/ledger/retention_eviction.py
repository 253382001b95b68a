"""Evicts the block that is worth least, where gateways have said what chains are worth until their next turns.

    retained   until a time; it has a worth, which changes in steps      plain      nothing is known of it
    let go     nobody is expected to come back for it

A worth is in uses a second: how many uses are expected for each second that a block stays, where it leaves at the best
moment (Gittins' index; :mod:`pillion.gateway.retentions.turn_gaps` computes it). A plain block that has rested for some
time is worth one use in as much time again, as for gaps without a scale.

What was let go leaves first, the ends of chains before their heads. Then the plain block that leaves next by the pool's
own policy is compared with the retention that is worth least. The retention that loses ends, and those blocks of its
chain that no other one holds are let go. So what is retained is a guess about time and no protection: as many slots are
available with retentions as without, and no allocation fails because of them (I5).

Bounds: a share of the pool for all owners and one for each. Where an owner's share is full, its own retention of least
worth gives way; where that of all is full, that of the owner that has the most, if that is more than the new one's
owner would have. So no owner is kept out by the others. A block counts for the owner that retained it first.

A retention marks its chain by ``Block.retained``, as a pin holds one by ``Block.holds``; an ancestor of a marked block
is marked. It ends when its last block is used again, at its time, or when another one of its owner covers it.
Sans-IO (I9).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from pillion.kvstore.ledger.eviction import EvictionPolicy
from pillion.kvstore.ledger.records import Block
from pillion.kvstore.ledger.tree import BlockTree

# Conversations whose next turns are expected may have so much of the pool, and those of one tenant so much.
MAX_RETAINED_PERCENT, MAX_TENANT_RETAINED_PERCENT = 90, 50
# One node has at most so many retentions, of some 300 bytes each, and one owner at most MAX_OWNER_RETENTIONS of them.
MAX_RETENTIONS = 4096
MAX_OWNER_RETENTIONS = 1024
# A chain may not be whole in the pool when it is retained, or not released when it is let go: the policy waits for so
# many of its blocks, and for MAX_LET_GO_LATER blocks of all chains that are let go.
MAX_WAITS = 64
MAX_LET_GO_LATER = 8192
# Whoever expects a chain's use later than this expects nothing.
MAX_RETENTION_S = 3600.0
# A worth changes so often at most.
MAX_WORTH_STEPS = 64


@dataclass(slots=True, eq=False)
class Retention:
    """Says until when an owner's chain is kept.

    Attributes:
        number: tells retentions of the same time apart.
        waits: hashes of its next blocks, as far as they were not in the pool when it was made.
        steps: from what time on it is worth how many uses a second, on the policy's clock; the first step holds from
            its beginning.
        until_s: when it is given up.
        at: the step that holds now.
        end: the last block of the chain that is in the pool; None while it has no marks.
    """

    number: int
    owner: str
    waits: tuple[bytes, ...]
    steps: tuple[tuple[float, float], ...]
    until_s: float
    at: int = 0
    end: Block | None = None

    @property
    def by_worth(self) -> tuple[float, int]:
        """Gives its place in the order of worth."""
        return self.steps[self.at][1], self.number

    @property
    def by_change(self) -> tuple[float, int]:
        """Gives its place in the order of times at which a worth changes, or a retention is given up."""
        later = self.steps[self.at + 1][0] if self.at + 1 < len(self.steps) else self.until_s
        return min(later, self.until_s), self.number


class RetentionEviction:
    """Implements an eviction policy around ``plain``, which knows the blocks that are neither retained nor let go.

    Args:
        plain: the pool's own policy.
        percent, owner_percent: shares of the pool that all owners, and one of them, may retain.
        clock: gives the time in seconds.

    Attributes:
        used_ever, revoked_ever, expired_ever: how many retentions ended because their chain was used, because the pool
            needed the room or an owner had too many, and because their time was over.
        refused_ever: how many were too large for a share.
    """

    def __init__(self, plain: EvictionPolicy, percent: int, owner_percent: int, clock: Callable[[], float]) -> None:
        self.used_ever = self.revoked_ever = self.expired_ever = self.refused_ever = 0
        self._plain = plain
        self._clock = clock
        self._percents = percent, owner_percent
        self._max_blocks = self._max_owner_blocks = 0
        self._tree: BlockTree | None = None
        self._numbers = itertools.count()
        self._all: dict[int, Retention] = {}
        self._by_worth: list[tuple[float, int]] = []
        self._by_change: list[tuple[float, int]] = []
        # The order by worth for each owner.
        self._worth_of: dict[str, list[tuple[float, int]]] = {}
        self._ends: dict[Block, list[Retention]] = {}
        # For blocks that are waited for: their retention, or how many leading blocks others have use for where their
        # chain is let go.
        self._awaited: dict[bytes, Retention] = {}
        self._going: OrderedDict[bytes, int] = OrderedDict()
        # For each marked block, its owner; and how many each owner has.
        self._owners: dict[Block, str] = {}
        self._owned: Counter[str] = Counter()
        # The known blocks that are marked, and those that were let go; those in front leave first.
        self._kept: OrderedDict[Block, None] = OrderedDict()
        self._first: OrderedDict[Block, None] = OrderedDict()
        # The block that is let go if it is the next one to be added, and the least depth of such a block.
        self._letting: tuple[Block | None, int] = None, 0
        # A block is in no place yet while it is being added.
        self._adding: Block | None = None

    def bind(self, tree: BlockTree, num_slots: int) -> None:
        """Sets the tree that calls this policy, and the bounds in blocks."""
        self._tree = tree
        tree.on_retained_gone = self._shorten
        percent, owner_percent = self._percents
        self._max_blocks = num_slots * percent // 100
        self._max_owner_blocks = num_slots * owner_percent // 100

    @property
    def retentions(self) -> int:
        """Gives the number of retentions."""
        return len(self._all)

    # Gateways make the following calls.

    def retain(self, owner: str, hashes: Sequence[bytes], steps: Sequence[tuple[float, float]], until_s: float) -> bool:
        """Retains a chain until ``until_s``, its blocks as far as they are in the pool and the rest when the last one
        comes. ``steps`` has the times from which it is worth so many uses a second, in order, at least one of them and
        MAX_WORTH_STEPS at most. Earlier retentions of the owner that it covers end. Returns whether it is within the
        bounds. O(blocks of the chain)."""
        assert self._tree is not None, "the policy has no tree yet"
        assert 0 < len(steps) <= MAX_WORTH_STEPS, "a worth has a step"
        now = self._clock()
        self._change(now)
        until_s = min(until_s, now + MAX_RETENTION_S)
        if not hashes or until_s <= now:
            return False
        self._end_covered(owner, hashes)
        found = self._tree.longest_prefix(hashes)
        if found.last_block is None:
            return False
        number = next(self._numbers)
        waits = tuple(hashes[found.blocks : found.blocks + MAX_WAITS])
        made = Retention(number, owner, waits, tuple(steps), until_s)
        self._all[number] = made
        for keys, key in self._orders(made):
            insort(keys, key)
        self._bound_counts(made)
        if not self._attach(made, found.last_block):
            self._forget(made)
            self.refused_ever += 1
            return False
        self._awaited.update(dict.fromkeys(waits, made))
        for block_hash in hashes if self._going else ():
            self._going.pop(block_hash, None)
        return True

    def let_go(self, owner: str, hashes: Sequence[bytes], shared_blocks: int = 0) -> None:
        """Lets a chain's end leave first: its blocks up to the first one that has another successor, that is retained,
        or that is one of the first ``shared_blocks``. Retentions of the owner on it end. O(blocks of the chain)."""
        assert self._tree is not None, "the policy has no tree yet"
        if not hashes:
            return
        self._end_covered(owner, hashes[shared_blocks:])
        block = self._tree.by_hash.get(hashes[-1])
        if block is None or block.holds:
            # Which of the last blocks is committed last is not known yet.
            self._going.update(dict.fromkeys(hashes[-MAX_WAITS:], shared_blocks))
            while len(self._going) > MAX_LET_GO_LATER:
                self._going.popitem(last=False)
        else:
            self._let_go_idle(block, shared_blocks)

    # The block tree calls the following methods: they are those of an eviction policy.

    def add(self, block: Block) -> None:
        block.idle_since_s = self._clock()
        retention = self._awaited.pop(block.hash, None) if self._awaited else None
        wish = self._going.pop(block.hash, None) if self._going else None
        going, shared_blocks = self._letting
        self._letting = None, 0
        if retention is not None and retention.end is not None and retention.end.depth < block.depth:
            self._adding = block
            self._attach(retention, block)
            self._adding = None
        elif wish is not None and not block.children:
            going, shared_blocks = block, wish
        if block.retained:
            self._kept[block] = None
        elif block is going and self._may_go(block, shared_blocks):
            self._first[block] = None
            self._letting = block.parent, shared_blocks
        else:
            self._plain.add(block)

    def remove(self, block: Block) -> None:
        if block in self._kept:
            del self._kept[block]
            # The pin that calls this goes on to the ancestors, so they need not change their places.
            for retention in tuple(self._ends.get(block, ())):
                self.used_ever += 1
                self._forget(retention, stays=True)
        elif block in self._first:
            del self._first[block]
        else:
            self._plain.remove(block)

    def pop(self) -> Block:
        now = self._clock()
        self._change(now)
        while not self._first:
            least = self._least()
            front = next(iter(self._plain), None)
            if least is None or (front is not None and (now - front.idle_since_s) * least.by_worth[0] >= 1.0):
                return self._plain.pop()
            self.revoked_ever += 1
            self._forget(least)
        return self._first.popitem(last=False)[0]

    def drop(self, block: Block) -> None:
        if block in self._kept:
            del self._kept[block]
        elif block in self._first:
            del self._first[block]
        else:
            self._plain.drop(block)

    def __len__(self) -> int:
        return len(self._first) + len(self._plain) + len(self._kept)

    def __iter__(self) -> Iterator[Block]:
        yield from self._first
        yield from self._plain
        yield from self._kept

    def check(self) -> Iterator[str]:
        """Yields a line for each thing that does not add up. It takes O(blocks of the pool)."""
        blocks = self._tree.by_hash.values() if self._tree is not None else ()
        ends = Counter(one.end for one in self._all.values() if one.end is not None)
        if {block: len(found) for block, found in self._ends.items()} != dict(ends):
            yield "the ends of retentions are not those that are filed"
        marked = Counter(block.parent for block in blocks if block.parent is not None and block.retained)
        for block in blocks:
            if block.retained != ends[block] + marked[block]:
                yield f"block of slot {block.slot} has {block.retained} marks of {ends[block]} retentions"
            if (block in self._owners) != (block.retained > 0):
                yield f"block of slot {block.slot} is retained, and counts for nobody, or the reverse"
        if any(not block.retained for block in self._kept) or any(block.retained for block in self._first):
            yield "a block is among those of another kind"
        if Counter(self._owners.values()) != +self._owned or len(self._owners) > self._max_blocks:
            yield f"{len(self._owners)} blocks are retained, of at most {self._max_blocks}"
        if any(count > self._max_owner_blocks for count in self._owned.values()):
            yield "an owner retains more than it may"
        if len(self._all) > MAX_RETENTIONS or any(len(keys) > MAX_OWNER_RETENTIONS for keys in self._worth_of.values()):
            yield f"there are {len(self._all)} retentions"
        worths = sorted(one.by_worth for one in self._all.values())
        changes = sorted(one.by_change for one in self._all.values())
        if (worths, changes) != (self._by_worth, self._by_change) or sorted(chain(*self._worth_of.values())) != worths:
            yield "the orders of retentions are not those of their worths and times"
        known = {block for block in blocks if not (block.holds or block.prefix_pins)}
        if {*self} != known or len(self) != len(known):
            yield "the policy does not know exactly the blocks that nothing protects"

    def _change(self, now: float) -> None:
        """Gives up the retentions whose time is over, and files those whose worth has changed."""
        while self._by_change and self._by_change[0][0] <= now:
            retention = self._all[self._by_change[0][1]]
            if retention.until_s <= now:
                self.expired_ever += 1
                self._forget(retention)
                continue
            for keys, key in self._orders(retention):
                del keys[bisect_left(keys, key)]
            retention.at += 1
            for keys, key in self._orders(retention):
                insort(keys, key)

    def _least(self) -> Retention | None:
        """Returns the retention of least worth of those whose chains nobody uses."""
        ordered = (self._all[number] for _, number in self._by_worth)
        return next((one for one in ordered if one.end is not None and not one.end.holds), None)

    def _end_covered(self, owner: str, hashes: Sequence[bytes]) -> None:
        """Ends the owner's retentions whose chains end within another one."""
        assert self._tree is not None
        for block_hash in hashes if owner in self._worth_of else ():
            block = self._tree.by_hash.get(block_hash)
            if block is None:
                break
            for retention in [one for one in self._ends.get(block, ()) if one.owner == owner]:
                self._forget(retention, leaves=False)

    def _bound_counts(self, made: Retention) -> None:
        """Ends a retention where there are too many: the least one of the owner, or of the owner that has most."""
        if len(self._worth_of[made.owner]) > MAX_OWNER_RETENTIONS:
            self._revoke_of(made.owner, made)
        elif len(self._all) > MAX_RETENTIONS:
            self._revoke_of(max(self._worth_of, key=lambda one: len(self._worth_of[one])), made)

    def _revoke_of(self, owner: str, spared: Retention) -> bool:
        """Ends the retention of an owner that is worth least, but not ``spared``; returns whether there was one."""
        keys = self._worth_of.get(owner, ())
        found = next((self._all[number] for _, number in keys if number != spared.number), None)
        if found is None:
            return False
        self.revoked_ever += 1
        self._forget(found)
        return True

    def _attach(self, retention: Retention, block: Block) -> bool:
        """Lets a retention end with ``block``, which is on its chain, where the bounds allow it. Returns whether they
        do."""
        if retention.end is block:
            return True
        if not self._make_room(retention, block):
            return False
        self._mark(block, retention.owner)
        self._detach(retention, leaves=False)
        retention.end = block
        self._ends.setdefault(block, []).append(retention)
        return True

    def _make_room(self, retention: Retention, block: Block) -> bool:
        """Ends retentions until one that ends with ``block`` is within the bounds; returns whether it is."""
        owner, fresh = retention.owner, _unmarked(block)
        while fresh <= self._max_owner_blocks:
            wanted = self._owned[owner] + fresh
            if wanted > self._max_owner_blocks:
                gives = owner
            elif len(self._owners) + fresh > self._max_blocks:
                gives = max(self._owned, key=lambda one: self._owned[one], default=owner)
                gives = gives if self._owned[gives] > wanted else owner
            elif (again := _unmarked(block)) > fresh:
                # Retentions that ended have marked some of its blocks.
                fresh = again
                continue
            else:
                return True
            if not self._revoke_of(gives, retention):
                return False
        return False

    def _mark(self, block: Block, owner: str) -> None:
        at: Block | None = block
        grows = True
        while at is not None:
            known = not (at.holds or at.prefix_pins) and self._take_out(at)
            at.retained += grows
            grows = grows and at.retained == 1
            if grows:
                self._owners[at] = owner
                self._owned[owner] += 1
            if known:
                # An ancestor has to stand after the blocks that were just marked.
                self._kept[at] = None
            at = at.parent

    def _take_out(self, block: Block) -> bool:
        """Takes a known block out of its place. Returns False for one that is only about to be added."""
        if block in self._kept:
            del self._kept[block]
        elif block in self._first:
            del self._first[block]
        elif block is self._adding:
            return False
        else:
            self._plain.remove(block)
        return True

    def _forget(self, retention: Retention, *, leaves: bool = True, stays: bool = False) -> None:
        """Ends a retention; ``_detach`` describes the rest."""
        self._detach(retention, leaves=leaves, stays=stays)
        del self._all[retention.number]
        for keys, key in self._orders(retention):
            del keys[bisect_left(keys, key)]
        if not self._worth_of[retention.owner]:
            del self._worth_of[retention.owner]
        for block_hash in retention.waits:
            if self._awaited.get(block_hash) is retention:
                del self._awaited[block_hash]

    def _detach(self, retention: Retention, *, leaves: bool, stays: bool = False) -> None:
        """Takes a retention's marks back. Blocks without any mark are let go where ``leaves`` and nothing else stands
        after them, and else are plain; where they ``stay``, the caller takes them out of their places at once."""
        at, retention.end = retention.end, None
        if at is None:
            return
        found = self._ends[at]
        found.remove(retention)
        if not found:
            del self._ends[at]
        goes = leaves
        under = 0
        while at is not None:
            at.retained -= 1
            if at.retained:
                return
            self._disown(at)
            if at in self._kept and not stays:
                goes = goes and at.children == under and not at.parted
                del self._kept[at]
                if goes:
                    self._first[at] = None
                else:
                    self._plain.add(at)
            else:
                goes = False
            under = 1
            at = at.parent

    def _shorten(self, block: Block) -> None:
        """Notes that a marked block without children leaves: its retentions end with its parent from now on."""
        self._disown(block)
        parent = block.parent
        if parent is not None:
            parent.retained += block.retained - 1
        block.retained = 0
        for retention in self._ends.pop(block, ()):
            retention.end = parent
            if parent is None:
                self._forget(retention)
            else:
                self._ends.setdefault(parent, []).append(retention)

    def _disown(self, block: Block) -> None:
        owner = self._owners.pop(block)
        self._owned[owner] -= 1
        if not self._owned[owner]:
            del self._owned[owner]

    def _orders(self, retention: Retention) -> tuple[tuple[list[tuple[float, int]], tuple[float, int]], ...]:
        """Returns the ordered lists that have a retention, with its place in each."""
        of_owner = self._worth_of.setdefault(retention.owner, [])
        worth = retention.by_worth
        return (self._by_worth, worth), (of_owner, worth), (self._by_change, retention.by_change)

    def _may_go(self, block: Block, shared_blocks: int) -> bool:
        """Returns whether a block may be let go: the only block after it, if any, was let go just now."""
        free = not (block.retained or block.prefix_pins or block.holds or block.parted)
        return free and block.depth >= shared_blocks and block.children <= 1

    def _let_go_idle(self, block: Block, shared_blocks: int) -> None:
        at: Block | None = block
        under = 0
        while at is not None and at.children == under and self._may_go(at, shared_blocks):
            if at not in self._first:
                self._plain.remove(at)
                self._first[at] = None
            under, at = 1, at.parent


def _unmarked(block: Block) -> int:
    """Returns how many blocks of the chain that ends with ``block`` no retention marks."""
    count, at = 0, block
    while not at.retained:
        count += 1
        if at.parent is None:
            break
        at = at.parent
    return count
