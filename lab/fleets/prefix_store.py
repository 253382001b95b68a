"""Tracks which blocks each simulated KV node has, and the index over all of them, in blocks of 512 tokens as traces
number them (I9).

    open --(waits for memory, the first first)--> pinned and reserved --commit--> shared blocks, pinned --close--> LRU

Pools are counted in the KV blocks of the cluster, of which a trace's block is a few: a fleet's 10^8 blocks of 16 tokens
are 3 million entries at most, and only those that a trace fills take memory. What a request will write is reserved when
its ticket is opened, its answer included: preemption is not simulated. A pool evicts what nobody has pinned, the least
recently used first, the end of a chain before its beginning.

The production ledger (:mod:`pillion.kvstore.ledger`) counts slots and hashes, which a fleet does not ask about, and
would halve its speed: 3,000 conversations of 9,400 tokens on the average, on 32 workers, take 11 to 12.5 s of a core,
of which 0.9 s are spent here; the ledger takes 10.2 s for the same tickets (2026-11-23, on a loaded machine).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pillion.kvstore.index.index import MAX_ENTRIES_PER_LOOKUP
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS


class PrefixIndex:
    """Says which nodes have a block. The index is exact: asked for a moment in the past, it says what each node had
    then."""

    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = {}

    def add(self, block: int, node_id: str) -> None:
        """Note that a node has a block."""
        self._holders.setdefault(block, set()).add(node_id)

    def remove(self, block: int, node_id: str) -> None:
        """Note that a node has a block no more."""
        holders = self._holders[block]
        holders.discard(node_id)
        if not holders:
            del self._holders[block]

    def longest_prefix(self, blocks: Sequence[int]) -> dict[str, int]:
        """Return how many leading blocks of the chain nodes have, by node id: of MAX_ENTRIES_PER_LOOKUP nodes at most,
        those with the most."""
        holders, low, high = self._holders, 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in holders:
                low = middle
            else:
                high = middle - 1
        found: dict[str, int] = {}
        known = 0
        for depth in range(low, 0, -1):
            there = holders.get(blocks[depth - 1], ())
            if len(there) == known:
                continue
            known = len(there)
            # The ids are sorted, because a set's order would change from run to run.
            for node_id in sorted(there):
                if node_id not in found:
                    found[node_id] = depth
                    if len(found) == MAX_ENTRIES_PER_LOOKUP:
                        return found
        return found


@dataclass(slots=True, eq=False)
class SimTicket:
    """A request's ticket at a node: it pins the first ``pinned`` blocks of the prompt's ``blocks``, and
    reserves memory for the rest.

    The ticket has ``total`` KV blocks in all, pinned or reserved; ``own`` of them are reserved and not shared yet.
    """

    blocks: tuple[int, ...]
    total: int
    granted: Callable[[SimTicket], None]
    pinned: int = 0
    own: int = 0
    open: bool = True
    waiting: bool = False


class NodeStore:
    """The pool of one node. It has ``capacity`` KV blocks of ``block_size`` tokens, or as many as come if
    that is 0."""

    def __init__(self, node_id: str, index: PrefixIndex, capacity: int, block_size: int) -> None:
        self.node_id = node_id
        self._index = index
        self._capacity = capacity
        self._each = TRACE_BLOCK_TOKENS // block_size
        # The first one has the blocks that no ticket pins, the least recently used first; the second one says of each
        # other block how many tickets pin it.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pins: dict[int, int] = {}
        self._own = 0
        self._waiting: deque[SimTicket] = deque()
        self.evicted = 0

    @property
    def used(self) -> int:
        """Returns how many KV blocks are shared or reserved."""
        return (len(self._idle) + len(self._pins)) * self._each + self._own

    @property
    def waiting(self) -> int:
        """Number of tickets that wait for memory."""
        return len(self._waiting)

    def prefix(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks of a chain the node has."""
        count = 0
        for block in blocks:
            if block not in self._idle and block not in self._pins:
                break
            count += 1
        return count

    def open(self, ticket: SimTicket) -> None:
        """Pin those of a ticket's blocks that the node has and reserves the rest; ``granted`` is called, at once or
        when there is memory. A ticket that the empty pool could not hold is granted all the same: the caller checks
        sizes."""
        ticket.waiting = True
        self._waiting.append(ticket)
        self._grant()

    def close(self, ticket: SimTicket) -> None:
        """Close a ticket and frees its memory; its shared blocks stay until they are evicted. Closing it a second time
        does nothing."""
        if not ticket.open:
            return
        ticket.open = False
        if ticket.waiting:
            self._waiting.remove(ticket)
        else:
            self._own -= ticket.own
            for block in reversed(ticket.blocks[: ticket.pinned]):
                self._unpin(block)
        self._grant()

    def commit(self, ticket: SimTicket, count: int) -> None:
        """Share the first ``count`` blocks of the ticket's chain, which are computed or were fetched; the ticket pins
        them."""
        for block in ticket.blocks[ticket.pinned : count]:
            self._pin(block)
            ticket.own -= self._each
            self._own -= self._each
            ticket.pinned += 1

    def check_integrity(self) -> None:
        """Raise AssertionError unless pins and memory add up."""
        assert not self._idle.keys() & self._pins.keys(), "a block is idle and pinned"
        assert all(count > 0 for count in self._pins.values()), "a block is pinned by nobody"
        assert self._own >= 0, "more was given back than was reserved"
        assert not self._capacity or self.used <= self._capacity or not self._idle, "the pool is too full"

    def _grant(self) -> None:
        while self._waiting:
            ticket = self._waiting[0]
            here = self.prefix(ticket.blocks)
            pinned_only = self._own + len(self._pins) * self._each
            newly = sum(block in self._idle for block in ticket.blocks[:here]) * self._each
            fits = pinned_only + newly + ticket.total - here * self._each <= self._capacity
            if self._capacity and not fits and (self._pins or self._own):
                return
            self._waiting.popleft()
            ticket.waiting = False
            for block in ticket.blocks[:here]:
                self._pin(block)
            ticket.pinned, ticket.own = here, max(0, ticket.total - here * self._each)
            self._own += ticket.own
            self._evict()
            ticket.granted(ticket)

    def _pin(self, block: int) -> None:
        count = self._pins.get(block, 0)
        self._pins[block] = count + 1
        if not count:
            if block in self._idle:
                del self._idle[block]
            else:
                self._index.add(block, self.node_id)

    def _unpin(self, block: int) -> None:
        count = self._pins[block] - 1
        if count:
            self._pins[block] = count
        else:
            del self._pins[block]
            self._idle[block] = None

    def _evict(self) -> None:
        while self._capacity and self.used > self._capacity and self._idle:
            block, _ = self._idle.popitem(last=False)
            self._index.remove(block, self.node_id)
            self.evicted += 1
