"""The blocks of each simulated KV node, and the index over all of them, in blocks of 512 tokens as in traces (I9).

    open --(waits for memory, FIFO)--> pinned and reserved --commit--> shared blocks, pinned --close--> LRU

Pools are counted in the cluster's KV blocks, several per trace block: a fleet's 10^8 blocks of 16 tokens are at most 3
million entries. A ticket reserves the memory of a request's prompt and whole answer, since preemption is not simulated.
A pool evicts unpinned blocks, least recently used first, the end of a chain before its beginning.

The production ledger (:mod:`pillion.kvstore.ledger`) tracks slots and hashes, which a fleet does not need, and takes
10.2 s of a core for the tickets of 3,000 conversations of 9,400 tokens, instead of 0.9 s of 11 to 12.5 s in all
(2026-11-23, on a loaded machine).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pillion.kvstore.index.index import MAX_ENTRIES_PER_LOOKUP
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS


class PrefixIndex:
    """Which nodes have a block. The index is exact and never stale."""

    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = {}

    def add(self, block: int, node_id: str) -> None:
        self._holders.setdefault(block, set()).add(node_id)

    def remove(self, block: int, node_id: str) -> None:
        holders = self._holders[block]
        holders.discard(node_id)
        if not holders:
            del self._holders[block]

    def longest_prefix(self, blocks: Sequence[int]) -> dict[str, int]:
        """Return the number of leading blocks of the chain per node, for up to MAX_ENTRIES_PER_LOOKUP nodes with the
        most."""
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
            # Sorted, since the order of a set changes from run to run.
            for node_id in sorted(there):
                if node_id not in found:
                    found[node_id] = depth
                    if len(found) == MAX_ENTRIES_PER_LOOKUP:
                        return found
        return found


@dataclass(slots=True, eq=False)
class SimTicket:
    """A request's ticket at a node: it pins the first ``pinned`` blocks of the prompt's ``blocks`` and reserves memory
    for the rest.

    ``total``: KV blocks pinned or reserved; ``own``: reserved and not shared yet.
    """

    blocks: tuple[int, ...]
    total: int
    granted: Callable[[SimTicket], None]
    pinned: int = 0
    own: int = 0
    open: bool = True
    waiting: bool = False


class NodeStore:
    """The pool of one node, of ``capacity`` KV blocks of ``block_size`` tokens; 0: unlimited."""

    def __init__(self, node_id: str, index: PrefixIndex, capacity: int, block_size: int) -> None:
        self.node_id = node_id
        self._index = index
        self._capacity = capacity
        self._each = TRACE_BLOCK_TOKENS // block_size
        # Unpinned blocks, least recently used first; pins of all others.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pins: dict[int, int] = {}
        self._own = 0
        self._waiting: deque[SimTicket] = deque()
        self.evicted = 0

    @property
    def used(self) -> int:
        """Number of shared or reserved KV blocks."""
        return (len(self._idle) + len(self._pins)) * self._each + self._own

    @property
    def waiting(self) -> int:
        """Number of tickets waiting for memory."""
        return len(self._waiting)

    def prefix(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks of a chain that the node has."""
        count = 0
        for block in blocks:
            if block not in self._idle and block not in self._pins:
                break
            count += 1
        return count

    def open(self, ticket: SimTicket) -> None:
        """Pin the blocks of a ticket that the node has and reserve the rest; ``granted`` is called at once or when
        there is memory. A ticket larger than the empty pool is granted as well: the caller checks sizes."""
        ticket.waiting = True
        self._waiting.append(ticket)
        self._grant()

    def close(self, ticket: SimTicket) -> None:
        """Close a ticket and free its memory; its shared blocks stay until evicted. Idempotent."""
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
        """Share and pin the first ``count`` blocks of the ticket's chain, now computed or fetched."""
        for block in ticket.blocks[ticket.pinned : count]:
            self._pin(block)
            ticket.own -= self._each
            self._own -= self._each
            ticket.pinned += 1

    def check_integrity(self) -> None:
        """Raise AssertionError on inconsistent pins or memory."""
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
