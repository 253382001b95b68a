"""Queues OpenTicket calls that wait for memory. Sans-IO (I9): the node asks, and polls after every change.

    asked --fits, queue is empty--> admitted
      +-----------> waiting --its turn, and it fits--> admitted
                       +--withdrawn, or its epoch is gone--> (forgotten)

Within a tenant the queue is first come, first served. A more urgent waiter counts as having come earlier
(:mod:`pillion.rules.priority`). Preempted streams (``resume``) stand before new prompts, because their readers wait
already.

Between tenants, whom the node knows by their flows (:class:`pillion.rules.priority.Flow`), shares of the pool decide:
the next waiter is of the flow whose tickets claim least of it in proportion to its weight, and where two flows claim as
much, the first in place. So a flow that claims nothing waits for the next memory that comes free, whatever others hold,
and nobody has to remember what a flow had before. As between the sequences of a worker, priority decides between flows
only at its ends, by :func:`pillion.rules.priority.rank_of`.

Only the first waiter is ever looked at. It is overtaken by flows that claim less than its own alone, and the claim of
its own falls as its streams end, so that a big prompt is not overtaken for ever.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pillion.errors import InvalidRequest, Overloaded, Unavailable
from pillion.kvstore.ledger.ledger import Ledger
from pillion.rules.priority import NO_FLOW, Flow, queue_order, rank_of
from pillion.v1.kvnode_pb2 import AdoptTicketReply

# A node lets this many new prompts wait for memory.
MAX_WAITING = 1024
# A refused caller should try again after this time.
RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """Represents one OpenTicket call that waits for memory.

    Attributes:
        nonce: the call's name, unique under ``epoch``.
        hashes: chain of the prompt's whole blocks, 32 bytes each.
        total_blocks: blocks that the prompt needs in all.
        resume: whether this is a preempted stream that comes back.
        adopt: whether the caller leases all that is reserved with the same call, if ``expected_blocks`` are here.
        state_pages: pages of a state that the prompt goes on from, 0 for a model without states.
        known_blocks: blocks of the chain that any node has, for a model with states.
        flow: the tenant's share of the pool.
        asked_s: time of the call on the node's monotonic clock.
    """

    epoch: int
    nonce: int
    hashes: tuple[bytes, ...]
    total_blocks: int
    resume: bool = False
    adopt: bool = False
    expected_blocks: int = 0
    priority: int = 0
    state_pages: int = 0
    known_blocks: int = 0
    flow: Flow = NO_FLOW
    asked_s: float = 0.0

    @property
    def place(self) -> tuple[bool, float]:
        """Returns the sort key: of one tenant's waiters, the one with the smaller key is further in front."""
        return not self.resume, queue_order(self.priority, self.asked_s)

    @property
    def key(self) -> tuple[int, int]:
        """Returns the waiter's name: (epoch, nonce)."""
        return self.epoch, self.nonce


@dataclass(frozen=True, slots=True)
class Grant:
    """Holds the ticket of a waiter that was admitted, and what it has adopted."""

    key: tuple[int, int]
    ticket_id: int
    pinned_blocks: int
    adopted: AdoptTicketReply | None = None


class WaitingQueue:
    """Holds a bounded queue: at most ``max_waiting`` new prompts and as many preempted streams."""

    def __init__(self, ledger: Ledger, max_waiting: int = MAX_WAITING) -> None:
        self._ledger = ledger
        self.max_waiting = max_waiting
        # These are the lines of the flows that wait, by their keys. A line is never empty, and sorted by place; of
        # equal waiters, the one that came first is in front.
        self._lines: dict[bytes, list[Waiter]] = {}
        self._by_key: dict[tuple[int, int], Waiter] = {}
        # This counts the waiters: True, those that resume, and False, the new prompts.
        self._counts: Counter[bool] = Counter()

    def __len__(self) -> int:
        return len(self._by_key)

    def ask(self, waiter: Waiter) -> Grant | None:
        """Admits the waiter at once, or queues it and returns None. Either way another flow's waiter may be the first
        one afterwards, and fit, so :meth:`poll` has to follow.

        Raises Overloaded if it can never fit or the queue is full, Unavailable as long as the pool has no shape,
        Conflict if the epoch is fenced, NotFound for a void epoch, InvalidRequest for a demand that makes no sense.
        """
        self._judge(waiter)
        insort(self._lines.setdefault(waiter.flow.key, []), waiter, key=lambda other: other.place)
        self._by_key[waiter.key] = waiter
        self._counts[waiter.resume] += 1
        grant = self._admit(waiter) if self._first() is waiter else None
        # New prompts and preempted streams are counted apart, so that new prompts do not shut out preempted streams.
        is_full = self._counts[waiter.resume] > self.max_waiting
        if grant is not None or is_full:
            self.withdraw(waiter.key)
        if grant is None and is_full:
            raise Overloaded(f"{self.max_waiting} requests wait for KV memory already", RETRY_AFTER_MS)
        return grant

    def poll(self) -> list[Grant]:
        """Admits waiters from the front as long as they fit. The node calls this after every change in the ledger."""
        grants = []
        # Each waiter needs a slot at least, so without any it need not be known which one is first.
        while self._lines and self._ledger.unpromised:
            grant = self._admit(self._first())
            if grant is None:
                break
            self.withdraw(grant.key)
            grants.append(grant)
        return grants

    def withdraw(self, key: tuple[int, int]) -> bool:
        """Removes a waiter from the queue; returns False if it does not wait."""
        waiter = self._by_key.pop(key, None)
        if waiter is None:
            return False
        self._counts[waiter.resume] -= 1
        line = self._lines[waiter.flow.key]
        at = bisect_left(line, waiter.place, key=lambda other: other.place)
        while line[at] is not waiter:
            at += 1
        del line[at]
        if not line:
            del self._lines[waiter.flow.key]
        return True

    def withdraw_epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Removes all waiters of an epoch that is fenced or gone; returns their keys."""
        keys = [key for key in self._by_key if key[0] == epoch]
        for key in keys:
            self.withdraw(key)
        return keys

    def recall_blocks(self) -> int:
        """Returns how many slots the first waiter lacks: workers should return that many of their free slots."""
        if not self._lines:
            return 0
        first = self._first()
        return self._ledger.shortage(first.hashes, first.total_blocks, first.state_pages)

    def check_integrity(self) -> None:
        """Raises AssertionError where the lines are out of order, or are not of those that wait."""
        for key, line in self._lines.items():
            assert line, "a line is empty"
            assert all(waiter.flow.key == key for waiter in line), "a waiter stands in another flow's line"
            assert line == sorted(line, key=lambda waiter: waiter.place), "a line is out of order"
        waiting = [waiter for line in self._lines.values() for waiter in line]
        assert {waiter.key: waiter for waiter in waiting} == self._by_key, "the lines have other waiters than are known"
        assert +self._counts == Counter(waiter.resume for waiter in waiting), "the waiters are miscounted"

    def _first(self) -> Waiter:
        """Returns the waiter whose turn is next. At least one waits."""
        heads = [line[0] for line in self._lines.values()]
        return heads[0] if len(heads) == 1 else self._fairest(heads)

    def _fairest(self, heads: Sequence[Waiter]) -> Waiter:
        """Returns the first of several flows' first waiters."""
        claims = self._ledger.claims()
        firsts: dict[int, tuple[float, tuple[bool, float], Waiter]] = {}
        for head in heads:
            rank, share = rank_of(head.priority), claims[head.flow.key] / head.flow.weight
            if rank not in firsts or (share, head.place) < firsts[rank][:2]:
                firsts[rank] = share, head.place, head
        return min(firsts.values(), key=lambda first: first[1])[2]

    def _admit(self, waiter: Waiter) -> Grant | None:
        asked = waiter.hashes, waiter.total_blocks, waiter.state_pages, waiter.known_blocks, waiter.flow.key
        ticket = self._ledger.admit(waiter.epoch, waiter.nonce, *asked)
        if ticket is None:
            return None
        adopted = None
        if waiter.adopt and ticket.blocks >= waiter.expected_blocks:
            # What was just reserved is there, so this never fails.
            adopted = self._ledger.adopt(waiter.epoch, ticket.ticket_id, ticket.reserved)
        return Grant(waiter.key, ticket.ticket_id, ticket.blocks, adopted)

    def _judge(self, waiter: Waiter) -> None:
        ledger = self._ledger
        ledger.active(waiter.epoch)
        if not ledger.num_slots:
            raise Unavailable("no worker has attached to the KV node yet, so its pool has no shape")
        if waiter.total_blocks <= len(waiter.hashes):
            raise InvalidRequest("total_blocks must leave room for at least one block that is not hashed yet")
        if waiter.key in self._by_key or waiter.key in ledger.by_opener:
            raise InvalidRequest("the nonce is in use")
        if waiter.total_blocks > ledger.num_slots:
            raise Overloaded(f"the prompt needs {waiter.total_blocks} KV blocks, the pool has {ledger.num_slots}")
