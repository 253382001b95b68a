"""Queues OpenTicket calls that wait for memory. Sans-IO (I9): the node asks, and polls after every change.

    asked --fits, queue is empty--> admitted
      +-----------> waiting --its turn, and it fits--> admitted
                       +--withdrawn, or its epoch is gone--> (forgotten)

The queue is first come, first served and only its first waiter is ever looked at, so that a big prompt is not overtaken
for ever. A more urgent waiter counts as having come earlier (:mod:`pillion.priority`). Preempted streams (``resume``)
stand before new prompts, because their readers wait already.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from math import inf

from pillion.errors import InvalidRequest, Overloaded, Unavailable
from pillion.kvstore.ledger.ledger import Ledger
from pillion.priority import queue_order
from pillion.v1.kvnode_pb2 import AdoptTicketReply

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
    asked_s: float = 0.0

    @property
    def place(self) -> tuple[bool, float]:
        """Returns the sort key: the waiter with the smaller key is further in front."""
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

    def __init__(self, ledger: Ledger, max_waiting: int) -> None:
        self._ledger = ledger
        self._max_waiting = max_waiting
        # The queue is sorted by place; of equal waiters, the one that came first is in front.
        self._queue: list[Waiter] = []
        self._by_key: dict[tuple[int, int], Waiter] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def ask(self, waiter: Waiter) -> Grant | None:
        """Admits the waiter at once, or queues it and returns None.

        Raises Overloaded if it can never fit or the queue is full, Unavailable as long as the pool has no shape,
        Conflict if the epoch is fenced, NotFound for a void epoch, InvalidRequest for a demand that makes no sense.
        """
        self._judge(waiter)
        is_first = not self._queue or waiter.place < self._queue[0].place
        grant = self._admit(waiter) if is_first else None
        if grant is not None:
            return grant
        # New prompts and preempted streams are counted apart, so that new prompts do not shut out preempted streams.
        resuming = bisect_left(self._queue, (True, -inf), key=lambda other: other.place)
        if (resuming if waiter.resume else len(self) - resuming) >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests wait for KV memory already", RETRY_AFTER_MS)
        insort(self._queue, waiter, key=lambda other: other.place)
        self._by_key[waiter.key] = waiter
        return None

    def poll(self) -> list[Grant]:
        """Admits waiters from the front as long as they fit. The node calls this after every change in the ledger."""
        grants = []
        while self._queue:
            grant = self._admit(self._queue[0])
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
        at = bisect_left(self._queue, waiter.place, key=lambda other: other.place)
        while self._queue[at] is not waiter:
            at += 1
        del self._queue[at]
        return True

    def withdraw_epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Removes all waiters of an epoch that is fenced or gone; returns their keys."""
        keys = [waiter.key for waiter in self._queue if waiter.epoch == epoch]
        for key in keys:
            self.withdraw(key)
        return keys

    def recall_blocks(self) -> int:
        """Returns how many slots the first waiter lacks: workers should return that many from their stock."""
        first = self._queue[0] if self._queue else None
        return self._ledger.shortage(first.hashes, first.total_blocks, first.state_pages) if first else 0

    def _admit(self, waiter: Waiter) -> Grant | None:
        asked = waiter.hashes, waiter.total_blocks, waiter.state_pages, waiter.known_blocks
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
