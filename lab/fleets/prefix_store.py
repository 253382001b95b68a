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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from pillion.kvstore.index.index import MAX_ENTRIES_PER_LOOKUP
from pillion.kvstore.transfer.hand_over import warm_tips
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS

# An endless pool takes this many trace blocks from a node that leaves.
ENDLESS_BLOCKS = 2**40


class PrefixIndex:
    """Says which nodes have a block. The index is exact: asked for a moment in the past, it says what each node had
    then."""

    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = {}

    def add(self, block: int, node_id: str) -> None:
        """Notes that a node has a block."""
        self._holders.setdefault(block, set()).add(node_id)

    def remove(self, block: int, node_id: str) -> None:
        """Notes that a node has a block no more."""
        holders = self._holders[block]
        holders.discard(node_id)
        if not holders:
            del self._holders[block]

    def holders_of(self, block: int) -> Collection[str]:
        """Returns the ids of the nodes that have a block."""
        return self._holders.get(block, ())

    def known_blocks(self, blocks: Sequence[int]) -> int:
        """Returns how many leading blocks of the chain any node has, with or without a state after them. Returns 0 for
        a model without states, whose hits say that already."""
        return 0

    def longest_prefix(self, blocks: Sequence[int]) -> dict[str, int]:
        """Returns how many leading blocks of the chain nodes have, by node id: of MAX_ENTRIES_PER_LOOKUP nodes at most,
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


class SlotsOfState(Enum):
    """Says whose memory a state takes that is kept."""

    RUNNING = "a running sequence's, which goes on with other slots if there are some"
    ENDED = "a sequence's that has ended"
    FETCHED = "memory that nobody has promised, because the state comes from another node"


@dataclass(frozen=True, slots=True)
class StateCounts:
    """Counts a node's states: those that were kept, those for which there was no memory, those that left, and the KV
    blocks that they take now."""

    kept: int = 0
    lacking: int = 0
    evicted: int = 0
    blocks: int = 0


@dataclass(slots=True, eq=False)
class SimTicket:
    """Represents a request's ticket at a node: it pins the first ``pinned`` blocks of the prompt's ``blocks``, and
    reserves memory for the rest.

    The ticket has ``total`` KV blocks in all, pinned or reserved; ``own`` of them are reserved and not shared yet.
    Where a model has states, as many ``sequences`` run under it, and other texts part from its prompt after ``known``
    blocks, as far as the index and, once the ticket is granted, the node know.
    """

    blocks: tuple[int, ...]
    total: int
    granted: Callable[[SimTicket], None]
    pinned: int = 0
    own: int = 0
    open: bool = True
    waiting: bool = False
    sequences: int = 1
    known: int = 0


class NodeStore:
    """Represents the pool of one node. It has ``capacity`` KV blocks of ``block_size`` tokens, or as many as come if
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
        self._parents: dict[int, int | None] = {}
        # After the node has left, closing its tickets changes nothing any more.
        self._gone = False
        self._waiting: deque[SimTicket] = deque()
        self.evicted = 0

    @property
    def used(self) -> int:
        """Returns how many KV blocks are shared or reserved."""
        return self._shared() * self._each + self._own

    @property
    def waiting(self) -> int:
        """Returns the number of tickets that wait for memory."""
        return len(self._waiting)

    def prefix(self, blocks: Sequence[int]) -> int:
        """Returns how many leading blocks of a chain the node has."""
        count = 0
        for block in blocks:
            if block not in self._idle and block not in self._pins:
                break
            count += 1
        return count

    def open(self, ticket: SimTicket) -> None:
        """Pins those of a ticket's blocks that the node has and reserves the rest; ``granted`` is called, at once or
        when there is memory. A ticket that the empty pool could not hold is granted all the same: the caller checks
        sizes."""
        ticket.waiting = True
        self._waiting.append(ticket)
        self._grant()

    def close(self, ticket: SimTicket) -> None:
        """Closes a ticket and frees its memory; its shared blocks stay until they are evicted. Closing it a second time
        does nothing."""
        if not ticket.open:
            return
        ticket.open = False
        if self._gone:
            return
        if ticket.waiting:
            self._waiting.remove(ticket)
        else:
            self._own -= ticket.own
            self._unpin_all(ticket)
        self._grant()

    def commit(self, ticket: SimTicket, count: int) -> None:
        """Shares the first ``count`` blocks of the ticket's chain, which are computed or were fetched; the ticket pins
        them. A node that has left shares nothing any more."""
        if self._gone:
            return
        for block in ticket.blocks[ticket.pinned : count]:
            self._share(ticket, block)
            ticket.own -= self._each
            self._own -= self._each
            ticket.pinned += 1

    def keep(self, ticket: SimTicket, count: int, slots: SlotsOfState) -> bool:
        """Keeps the state after the first ``count`` blocks of the ticket's chain, which are shared. Returns False where
        there is no memory for it. A model without states has none to keep."""
        return True

    def finish(self, ticket: SimTicket, tokens: int) -> None:
        """Shares what a text of so many ``tokens`` has of its own when its answer has ended, with the state at its end.
        Nobody finds an answer in a trace, so a node without states shares none."""

    @property
    def states(self) -> StateCounts:
        """Returns what became of states, nothing for a model without them."""
        return StateCounts()

    @property
    def cached(self) -> int:
        """Returns how many trace blocks the node has that no ticket pins."""
        return len(self._idle)

    @property
    def free(self) -> int:
        """Returns for how many more trace blocks there is memory, of an endless pool for ENDLESS_BLOCKS."""
        return max(0, self._capacity - self.used) // self._each if self._capacity else ENDLESS_BLOCKS

    def warm_chains(self) -> Iterator[tuple[int, ...]]:
        """Yields the chains that the node has, in the order in which it would hand them over, as they are when it is
        their turn."""
        hot_first = [*self._pins, *reversed(self._idle)]
        for tip in warm_tips(hot_first, self._parents.get, lambda block: False):
            chain: list[int] = []
            at: int | None = tip
            while at is not None and (at in self._idle or at in self._pins):
                chain.append(at)
                at = self._parents.get(at)
            if at is None:
                yield tuple(reversed(chain))

    def take(self, chain: Sequence[int], most: int) -> tuple[int, int]:
        """Takes up to ``most`` further blocks of a chain from another node; returns how many of it are here then, and
        how many came. Room is made as for a prompt."""
        here = self.prefix(chain)
        came = 0 if self._gone else min(most, len(chain) - here)
        for at in range(here, here + came):
            self._idle[chain[at]] = None
            self._parents[chain[at]] = chain[at - 1] if at else None
            self._index.add(chain[at], self.node_id)
        self.touch(chain[: here + came])
        self._evict()
        return here + came, came

    def touch(self, chain: Sequence[int]) -> None:
        """Makes those blocks of a chain that the node has the last to be evicted."""
        for block in reversed(chain):
            if block in self._idle:
                self._idle.move_to_end(block)

    def leave(self) -> None:
        """Empties the node, which is gone with everything that it had, tickets included."""
        self._gone = True
        for block in (*self._idle, *self._pins):
            self._index.remove(block, self.node_id)
        self._idle.clear()
        self._pins.clear()
        self._parents.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless pins and memory add up."""
        assert not self._idle.keys() & self._pins.keys(), "a block is idle and pinned"
        assert all(count > 0 for count in self._pins.values()), "a block is pinned by nobody"
        assert self._own >= 0, "more was given back than was reserved"
        assert not self._capacity or self.used <= self._capacity or not self._idle, "the pool is too full"

    def _grant(self) -> None:
        while self._waiting:
            ticket = self._waiting[0]
            here = self.prefix(ticket.blocks)
            pinned_only = self._own + self._pinned() * self._each
            newly = self._idle_among(ticket.blocks[:here]) * self._each
            fits = pinned_only + newly + ticket.total - here * self._each <= self._capacity
            if self._capacity and not fits and (self._pinned() or self._own):
                return
            self._waiting.popleft()
            ticket.waiting = False
            self._pin_all(ticket, here)
            ticket.pinned, ticket.own = here, max(0, ticket.total - here * self._each)
            self._own += ticket.own
            self._evict()
            ticket.granted(ticket)

    # The methods below know how blocks are kept. Others may take their place (make_store of FleetWorld).

    def _shared(self) -> int:
        """Returns the number of blocks of the trace that are here."""
        return len(self._idle) + len(self._pins)

    def _pinned(self) -> int:
        """Returns how many of them tickets pin."""
        return len(self._pins)

    def _idle_among(self, blocks: Sequence[int]) -> int:
        """Returns how many of some blocks that are here no ticket pins."""
        return sum(block in self._idle for block in blocks)

    def _pin_all(self, ticket: SimTicket, count: int) -> None:
        """Pins the first blocks of a ticket, which are here."""
        for block in ticket.blocks[:count]:
            self._pin(block)

    def _share(self, ticket: SimTicket, block: int) -> None:
        """Pins the next block of a ticket, which may be new here."""
        self._pin(block)
        self._parents[block] = ticket.blocks[ticket.pinned - 1] if ticket.pinned else None

    def _unpin_all(self, ticket: SimTicket) -> None:
        """Takes all pins of a ticket back, the end of its chain first."""
        for block in reversed(ticket.blocks[: ticket.pinned]):
            self._unpin(block)

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
        while self._capacity and self.used > self._capacity and self._shared() > self._pinned():
            self._index.remove(self._victim(), self.node_id)
            self.evicted += 1

    def _victim(self) -> int:
        """Takes out the block that leaves next, and returns it."""
        block, _ = self._idle.popitem(last=False)
        self._parents.pop(block, None)
        return block
