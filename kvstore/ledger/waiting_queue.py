"""Queue of OpenTicket calls that wait for memory. Sans-IO (I9): the node polls it after every change.

    ask --it is first and fits--> admitted
     +------> waiting --it is first and fits--> admitted
                 +--withdrawn, or its epoch has ended--> (removed)

Within a tenant the queue is first come, first served, except that priority counts as earlier arrival
(:mod:`pillion.rules.priority`) and preempted streams (``resume``) precede new prompts, because their readers are
already waiting.

Between tenants, identified by their flows (:class:`pillion.rules.priority.Flow`), shares of the pool decide: next is
the flow whose tickets claim the least memory relative to its weight; on a tie, the earliest waiter. So a flow that
claims nothing gets the next memory that is freed, and past usage need not be recorded. Between flows, as between the
sequences of a worker, only the extremes of priority matter (:func:`pillion.rules.priority.rank_of`).

Only the first waiter can be admitted. Only flows that claim less can overtake it, and its own flow's claim falls as its
streams end, so a long prompt does not starve.
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

MAX_WAITING = 1024
RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """An OpenTicket call that waits for memory.

    Attributes:
        nonce: identifies the call under ``epoch``.
        hashes: chain of the prompt's whole blocks, 32 bytes each.
        total_blocks: blocks that the whole prompt needs.
        resume: True for a preempted stream that comes back.
        adopt: lease all reserved slots with the same call, if ``expected_blocks`` are present.
        state_pages: pages per state; 0 for a model without states.
        known_blocks: leading blocks of the chain present on some node, for a model with states.
        flow: key and weight of the tenant.
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
    def order(self) -> tuple[bool, float]:
        """Sort key within a tenant's queue; smaller is earlier."""
        return not self.resume, queue_order(self.priority, self.asked_s)

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the call."""
        return self.epoch, self.nonce


@dataclass(frozen=True, slots=True)
class Grant:
    """Ticket of an admitted waiter, with its adoption if requested."""

    key: tuple[int, int]
    ticket_id: int
    pinned_blocks: int
    adopted: AdoptTicketReply | None = None


class WaitingQueue:
    """Bounded queue: at most ``max_waiting`` new prompts, and as many preempted streams."""

    def __init__(self, ledger: Ledger, max_waiting: int = MAX_WAITING) -> None:
        self._ledger = ledger
        self.max_waiting = max_waiting
        # Nonempty queues by flow key, sorted by Waiter.order, then by arrival.
        self._queues: dict[bytes, list[Waiter]] = {}
        self._by_key: dict[tuple[int, int], Waiter] = {}
        self._counts: Counter[bool] = Counter()

    def __len__(self) -> int:
        return len(self._by_key)

    def ask(self, waiter: Waiter) -> Grant | None:
        """Admit the waiter at once, or queue it and return None. The caller must :meth:`poll` next in either case,
        because another flow's waiter may now be first and fit.

        Raises Overloaded if the prompt can never fit or the queue is full, Unavailable while the pool has no shape,
        Conflict for a fenced epoch, NotFound for a void one, InvalidRequest for an inconsistent request.
        """
        self._check_waiter(waiter)
        insort(self._queues.setdefault(waiter.flow.key, []), waiter, key=lambda other: other.order)
        self._by_key[waiter.key] = waiter
        self._counts[waiter.resume] += 1
        grant = self._admit(waiter) if self._first() is waiter else None
        # New prompts and preempted streams have separate limits, so that new prompts cannot shut out preempted streams.
        is_full = self._counts[waiter.resume] > self.max_waiting
        if grant is not None or is_full:
            self.withdraw(waiter.key)
        if grant is None and is_full:
            raise Overloaded(f"{self.max_waiting} requests wait for KV memory already", RETRY_AFTER_MS)
        return grant

    def poll(self) -> list[Grant]:
        """Admit waiters from the front while they fit. The node calls this after every change in the ledger."""
        grants = []
        while self._queues and self._ledger.unreserved:
            grant = self._admit(self._first())
            if grant is None:
                break
            self.withdraw(grant.key)
            grants.append(grant)
        return grants

    def withdraw(self, key: tuple[int, int]) -> bool:
        """Remove a waiter; return False if it is not queued."""
        waiter = self._by_key.pop(key, None)
        if waiter is None:
            return False
        self._counts[waiter.resume] -= 1
        queue = self._queues[waiter.flow.key]
        index = bisect_left(queue, waiter.order, key=lambda other: other.order)
        while queue[index] is not waiter:
            index += 1
        del queue[index]
        if not queue:
            del self._queues[waiter.flow.key]
        return True

    def withdraw_epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Remove all waiters of a fenced or ended epoch; return their keys."""
        keys = [key for key in self._by_key if key[0] == epoch]
        for key in keys:
            self.withdraw(key)
        return keys

    def recall_blocks(self) -> int:
        """Return the number of slots missing to admit the first waiter, which workers should return from their
        stocks."""
        if not self._queues:
            return 0
        first = self._first()
        return self._ledger.shortage(first.hashes, first.total_blocks, first.state_pages)

    def check_integrity(self) -> None:
        """Raise AssertionError if queues, index by key and counts are inconsistent."""
        for key, queue in self._queues.items():
            assert queue, "a queue is empty"
            assert all(waiter.flow.key == key for waiter in queue), "a waiter is in another flow's queue"
            assert queue == sorted(queue, key=lambda waiter: waiter.order), "a queue is out of order"
        waiting = [waiter for queue in self._queues.values() for waiter in queue]
        assert {waiter.key: waiter for waiter in waiting} == self._by_key, "the queues and the index differ"
        assert +self._counts == Counter(waiter.resume for waiter in waiting), "the waiters are miscounted"

    def _first(self) -> Waiter:
        """Return the next waiter. Requires a nonempty queue."""
        heads = [queue[0] for queue in self._queues.values()]
        return heads[0] if len(heads) == 1 else self._fairest(heads)

    def _fairest(self, heads: Sequence[Waiter]) -> Waiter:
        """Return the next waiter of the first waiters of several flows."""
        claims = self._ledger.claims()
        firsts: dict[int, tuple[float, tuple[bool, float], Waiter]] = {}
        for head in heads:
            rank, share = rank_of(head.priority), claims[head.flow.key] / head.flow.weight
            if rank not in firsts or (share, head.order) < firsts[rank][:2]:
                firsts[rank] = share, head.order, head
        return min(firsts.values(), key=lambda first: first[1])[2]

    def _admit(self, waiter: Waiter) -> Grant | None:
        asked = waiter.hashes, waiter.total_blocks, waiter.state_pages, waiter.known_blocks, waiter.flow.key
        ticket = self._ledger.admit(waiter.epoch, waiter.nonce, *asked)
        if ticket is None:
            return None
        adopted = None
        if waiter.adopt and ticket.blocks >= waiter.expected_blocks:
            adopted = self._ledger.adopt(waiter.epoch, ticket.ticket_id, ticket.reserved)
        return Grant(waiter.key, ticket.ticket_id, ticket.blocks, adopted)

    def _check_waiter(self, waiter: Waiter) -> None:
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
