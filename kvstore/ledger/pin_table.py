"""Prefix pins (users call them pins): chains that are evicted after everything else, for a limited time and share.

    pinned --the chain's last block is in the pool--> complete --nothing else can be evicted--> partly in the pool
                                                          ^                                               |
                                                          +------------ the chain's last block arrives ---+
    any state --expires, is dropped or replaced, or its last block arrives at another depth than requested--> (void)

A prefix pin protects its chain only against other cached blocks, not against requests: a block pinned by a ticket is
protected, but a prefix-pinned block is evicted when there is nothing else to evict. So prefix pins do not reduce the
available slots, no request waits for one, and a fully prefix-pinned pool cannot deadlock (I5). Nor are they needed for
correct answers (I1).

A chain is identified by its last block's hash. That suffices to pin it again when its blocks return after an eviction
or a restart of the node, and reveals nothing of the prompt.

Quotas count requested blocks, including shared and absent blocks, so that a tenant's quota does not depend on others.
Sans-IO (I9). ``Block.prefix_pins`` marks chains as ``Block.ref_count`` does for pins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pillion.errors import InvalidRequest, Overloaded
from pillion.kvstore.ledger.eviction import EvictionPolicy, LruEviction
from pillion.kvstore.ledger.records import Block
from pillion.kvstore.ledger.tree import BlockTree
from pillion.v1.kvnode_pb2 import NodeStatus

# Max prefix pins per node, and per owner. The record of a pin takes some 200 bytes in Redis.
MAX_PREFIX_PINS = 1024
MAX_OWNER_PREFIX_PINS = 128
MAX_PREFIX_PIN_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class PrefixPinRequest:
    """Request for a prefix pin.

    Attributes:
        owner: the tenant, which is the namespace of ``name``.
        name: unique per owner. A later request with the same name replaces the earlier one.
        last_hash: hash of the chain's last block, which identifies the chain.
        blocks, tokens: blocks of the chain, and tokens of the whole prompt.
        until_s: expiry, on the ledger's clock.
        model: the model's name, for listings.
        ephemeral: True for a conversation in progress: it replaces the owner's ephemeral pins of prefixes of its chain.
    """

    owner: str
    name: str
    last_hash: bytes
    blocks: int
    until_s: float
    tokens: int = 0
    model: str = ""
    ephemeral: bool = False


@dataclass(slots=True, eq=False)
class PrefixPin:
    """A prefix pin: the tenant's ``request``, and the prefix of the chain that is in the pool.

    Attributes:
        end: last block of that prefix, or the last page of a state after the whole chain; None if no block is present.
        hits: number of tickets whose chain began with the whole pinned chain, found in the pool at admission.
    """

    request: PrefixPinRequest
    end: Block | None = None
    hits: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks of the chain that are in the pool, excluding a state after them."""
        return min(self.end.depth + 1, self.request.blocks) if self.end is not None else 0


class PrefixPinTable:
    """All prefix pins of one pool. The ledger calls :meth:`on_commit` and :meth:`on_evict`; no call waits, so it has no
    lock.

    Args:
        tree: the pool's blocks, whose ``prefix_pins`` this class counts.
        percent, owner_percent: max share of the pool that may be prefix-pinned, in total and per owner.

    Attributes:
        all: every prefix pin by owner and name.
        blocks: requested blocks of all prefix pins.
        max_blocks, max_owner_blocks: limits on requested blocks, in total and per owner.
        lapsed_ever: number of prefix pins that have expired.
        refused_ever: number of requests beyond a quota, or with a wrong length.
        hits_ever: hits of all prefix pins, including those that have ended.
    """

    def __init__(self, tree: BlockTree, percent: int, owner_percent: int) -> None:
        self.all: dict[tuple[str, str], PrefixPin] = {}
        self.blocks = 0
        self.lapsed_ever = self.refused_ever = self.hits_ever = 0
        self._tree = tree
        tree.policy = PrefixPinEviction(tree)
        self._percents = percent, owner_percent
        self.max_blocks = self.max_owner_blocks = 0
        self._owner_blocks: Counter[str] = Counter()
        self._owner_counts: Counter[str] = Counter()
        self._by_last_hash: dict[bytes, list[PrefixPin]] = {}
        self._ends: dict[Block, list[PrefixPin]] = {}

    def shape(self, num_slots: int) -> None:
        """Set the limits in blocks, once the pool's number of slots is known."""
        percent, owner_percent = self._percents
        self.max_blocks = num_slots * percent // 100
        self.max_owner_blocks = num_slots * owner_percent // 100

    def of(self, owner: str) -> list[PrefixPin]:
        """Return an owner's prefix pins, oldest first. O(prefix pins of the node)."""
        return [pin for (pin_owner, _), pin in self.all.items() if pin_owner == owner]

    def ending_with(self, last_hash: bytes) -> Sequence[PrefixPin]:
        """Return the prefix pins of the chain that ends with ``last_hash``."""
        return tuple(self._by_last_hash.get(last_hash, ()))

    def pin_prefix(
        self, request: PrefixPinRequest, now: float, hashes: Sequence[bytes] = (), max_blocks: int = 0
    ) -> PrefixPin:
        """Pin the prefix of a chain that is in the pool; further blocks are pinned when they arrive.

        Args:
            now: time on the clock of ``request.until_s``; an expired request is refused.
            hashes: the chain without duplicates, ending with ``request.last_hash``. Without it, the chain is pinned
                once its last block is present.
            max_blocks: the owner's limit at this node if below the node's limit per owner; 0 for no such limit.

        Raises InvalidRequest for an inconsistent request, and Overloaded beyond a quota, with nothing changed.
        """
        self._check_form(request, now, hashes)
        replaced = self._replaced(request, hashes)
        try:
            self._check_limits(request, replaced, max_blocks)
        except Overloaded:
            self.refused_ever += 1
            raise
        hits = 0
        for old in replaced:
            hits += old.hits if old.request.name == request.name else 0
            self._remove(old)
        pin = PrefixPin(request, hits=hits)
        self.all[request.owner, request.name] = pin
        self._by_last_hash.setdefault(request.last_hash, []).append(pin)
        self._count(request, 1)
        last_block = self._tree.by_hash.get(request.last_hash)
        if last_block is not None:
            self._move(pin, self._tree.state_end(last_block))
        elif (present := self._tree.longest_prefix(hashes).last_block) is not None:
            self._move(pin, present)
        return pin

    def drop(self, owner: str, name: str) -> bool:
        """End a prefix pin; return False if there was none."""
        pin = self.all.get((owner, name))
        if pin is None:
            return False
        self._remove(pin)
        return True

    def expire(self, now: float) -> int:
        """End all expired prefix pins; return their number. O(prefix pins)."""
        expired = [pin for pin in self.all.values() if pin.request.until_s <= now]
        for pin in expired:
            self._remove(pin)
        self.lapsed_ever += len(expired)
        return len(expired)

    def count_hits(self, hashes: Sequence[bytes], blocks: int) -> None:
        """Count a hit for each prefix pin whose chain ends within the first ``blocks`` blocks of ``hashes``: those that
        an admitted ticket found in the pool. Blocks fetched later do not count. O(blocks)."""
        for block_hash in hashes[:blocks]:
            for pin in self._by_last_hash.get(block_hash, ()):
                pin.hits += 1
                self.hits_ever += 1

    def on_commit(self, block: Block) -> None:
        """Handle a committed or restored block. If it is the last block of a prefix pin, the whole chain is pinned, or
        the pin ends if the chain has another length than requested. The state after a whole pinned chain is pinned
        too."""
        if block.page and block.parent is not None:
            whole = [pin for pin in self._ends.get(block.parent, ()) if pin.blocks == pin.request.blocks]
            for pin in whole:
                self._move(pin, block)
        for pin in tuple(self._by_last_hash.get(block.hash, ())):
            if pin.request.blocks == block.depth + 1:
                self._move(pin, block)
            else:
                self._remove(pin)
                self.refused_ever += 1

    def on_evict(self, block: Block) -> None:
        """Handle an evicted block: pins that ended with it now end with its parent."""
        if block.prefix_pins and block.parent is not None:
            block.parent.prefix_pins += block.prefix_pins - 1
        for pin in self._ends.pop(block, ()):
            pin.end = block.parent
            if block.parent is not None:
                self._ends.setdefault(block.parent, []).append(pin)

    def describe(self, status: NodeStatus) -> None:
        """Add the table's counts to a node's status."""
        status.prefix_pins = len(self.all)
        status.prefix_pin_blocks = self.blocks
        status.prefix_pin_hits = self.hits_ever

    def check(self) -> Iterator[str]:
        """Yield a line for each inconsistency. O(blocks of the pool)."""
        blocks = self._tree.by_hash
        ends = Counter(pin.end for pin in self.all.values() if pin.end is not None)
        if {block: len(pins) for block, pins in self._ends.items()} != dict(ends):
            yield "the index of prefix pins by their ends is wrong"
        marked = Counter(block.parent for block in blocks.values() if block.parent is not None and block.prefix_pins)
        for block in blocks.values():
            if block.prefix_pins != ends[block] + marked[block]:
                yield f"block of slot {block.slot} counts {block.prefix_pins} prefix pins of {ends[block]}"
        for pin in self.all.values():
            name, end, requested = pin.request.name, pin.end, pin.request.blocks
            if end is not None and blocks.get(end.hash) is not end:
                yield f"prefix pin {name} ends with a block that is gone"
            last = end
            while last is not None and last.page:
                last = last.parent
            if last is not None and (last.hash == pin.request.last_hash) != (last.depth + 1 == requested):
                yield f"prefix pin {name} requests {requested} blocks, and ends with block {pin.blocks}"
            if pin not in self._by_last_hash.get(pin.request.last_hash, ()):
                yield f"prefix pin {name} is not found by its last block"
            if blocks.get(pin.request.last_hash, last) is not last:
                yield f"prefix pin {name} does not end with its last block, which is here"
        if self.blocks != sum(pin.request.blocks for pin in self.all.values()) or self.blocks > self.max_blocks:
            yield f"{self.blocks} blocks are counted as prefix-pinned, of at most {self.max_blocks}"
        if any(count > self.max_owner_blocks for count in self._owner_blocks.values()):
            yield "an owner has more blocks prefix-pinned than allowed"

    def _check_form(self, request: PrefixPinRequest, now: float, hashes: Sequence[bytes]) -> None:
        """Raise InvalidRequest for a request that is inconsistent by itself or with the pool, or lasts too long."""
        if request.blocks < 1 or not now < request.until_s <= now + MAX_PREFIX_PIN_S:
            raise InvalidRequest(f"a pin has at least one block and lasts for up to {MAX_PREFIX_PIN_S:.0f} s")
        if hashes and (
            len(set(hashes)) != request.blocks or len(hashes) != request.blocks or hashes[-1] != request.last_hash
        ):
            raise InvalidRequest("a pin names each block of its chain once, the last one last")
        last_block = self._tree.by_hash.get(request.last_hash)
        if last_block is not None and last_block.depth + 1 != request.blocks:
            raise InvalidRequest(
                f"the pin's last block is number {last_block.depth + 1} of its chain, not {request.blocks}"
            )

    def _replaced(self, request: PrefixPinRequest, hashes: Sequence[bytes]) -> list[PrefixPin]:
        """Return the prefix pins that a request replaces: the owner's pin of the same name and, if ephemeral, its
        ephemeral pins of prefixes of the chain that expire no later."""
        same = self.all.get((request.owner, request.name))
        replaced = [] if same is None else [same]
        for block_hash in hashes if request.ephemeral else ():
            for other in self._by_last_hash.get(block_hash, ()):
                covered = (
                    other.request.owner == request.owner
                    and other.request.ephemeral
                    and other.request.until_s <= request.until_s
                )
                if covered and other is not same:
                    replaced.append(other)
        return replaced

    def _check_limits(self, request: PrefixPinRequest, replaced: Sequence[PrefixPin], max_blocks: int) -> None:
        freed = sum(old.request.blocks for old in replaced)
        owned, total = self._owner_blocks[request.owner] - freed + request.blocks, self.blocks - freed + request.blocks
        bound = min(self.max_owner_blocks, max_blocks or self.max_owner_blocks)
        if owned > bound:
            raise Overloaded(f"the tenant's pins would have {owned} blocks at this KV node, of at most {bound}")
        if total > self.max_blocks:
            raise Overloaded(f"all pins would have {total} blocks at this KV node, of at most {self.max_blocks}")
        if not replaced and self._owner_counts[request.owner] >= MAX_OWNER_PREFIX_PINS:
            raise Overloaded(f"the tenant has {MAX_OWNER_PREFIX_PINS} pins at this KV node already")
        if not replaced and len(self.all) >= MAX_PREFIX_PINS:
            raise Overloaded(f"this KV node has {MAX_PREFIX_PINS} pins already")

    def _move(self, pin: PrefixPin, block: Block) -> None:
        """Let a prefix pin end with ``block``, which is on its chain, and update the blocks' counts."""
        if pin.end is block:
            return
        self._mark_chain(block)
        self._unmark(pin)
        pin.end = block
        self._ends.setdefault(block, []).append(pin)

    def _unmark(self, pin: PrefixPin) -> None:
        end, pin.end = pin.end, None
        if end is None:
            return
        pins = self._ends[end]
        pins.remove(pin)
        if not pins:
            del self._ends[end]
        self._unmark_chain(end)

    def _mark_chain(self, block: Block) -> None:
        """Count one more prefix pin that ends with ``block``. O(blocks of the chain)."""
        at: Block | None = block
        policy = self._tree.policy
        grows = True
        while at is not None:
            # Requeue the block even if its count stays, because ancestors must follow the blocks just requeued.
            if not at.ref_count:
                policy.remove(at)
            at.prefix_pins += grows
            grows = grows and at.prefix_pins == 1
            if not at.ref_count:
                policy.add(at)
            at = at.parent

    def _unmark_chain(self, block: Block) -> None:
        """Count one prefix pin less that ends with ``block``."""
        at: Block | None = block
        policy = self._tree.policy
        while at is not None:
            if at.prefix_pins > 1:
                at.prefix_pins -= 1
                return
            if not at.ref_count:
                policy.remove(at)
            at.prefix_pins = 0
            if not at.ref_count:
                policy.add(at)
            at = at.parent

    def _remove(self, pin: PrefixPin) -> None:
        request = pin.request
        del self.all[request.owner, request.name]
        pins = self._by_last_hash[request.last_hash]
        pins.remove(pin)
        if not pins:
            del self._by_last_hash[request.last_hash]
        self._count(request, -1)
        self._unmark(pin)

    def _count(self, request: PrefixPinRequest, sign: int) -> None:
        self.blocks += sign * request.blocks
        self._owner_blocks[request.owner] += sign * request.blocks
        self._owner_counts[request.owner] += sign
        if not self._owner_counts[request.owner]:
            del self._owner_blocks[request.owner], self._owner_counts[request.owner]


class PrefixPinEviction:
    """Eviction policy with two parts: the tree's ``plain`` policy first, then prefix-pinned blocks in LRU order.

    ``Block.prefix_pins`` determines a block's part. It changes only while the block is in neither. Ancestors of
    prefix-pinned blocks are prefix-pinned too, so descendants precede their ancestors in the whole order.
    """

    def __init__(self, tree: BlockTree) -> None:
        self._tree = tree
        self._pinned = LruEviction()

    def add(self, block: Block) -> None:
        self._part(block).add(block)

    def remove(self, block: Block) -> None:
        self._part(block).remove(block)

    def pop(self) -> Block:
        return self._tree.plain.pop() if len(self._tree.plain) else self._pinned.pop()

    def drop(self, block: Block) -> None:
        self._part(block).drop(block)

    def __len__(self) -> int:
        return len(self._tree.plain) + len(self._pinned)

    def __iter__(self) -> Iterator[Block]:
        yield from self._tree.plain
        yield from self._pinned

    def _part(self, block: Block) -> EvictionPolicy:
        return self._pinned if block.prefix_pins else self._tree.plain
