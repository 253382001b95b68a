"""The line of requests that wait for memory. Sans-IO (I9): the node asks, and polls after every change.

    asked --fits, nobody before it--> admitted
      +-----------> waiting --its turn, and it fits--> admitted
                       +--withdrawn, or its epoch is gone--> (forgotten)

First come, first served, so that a big prompt is not overtaken for ever: only the first is ever looked at. Who is more
urgent counts as having come earlier (:mod:`pillion.priority`). Streams that were preempted (``resume``) stand before
new prompts, because somebody is reading them already.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from math import inf

from pillion.errors import Conflict, InvalidRequest, Overloaded
from pillion.kvstore.ledger.ledger import Ledger
from pillion.priority import rank

# What a refused caller is told to wait before it tries again.
RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """One OpenTicket call.

    ``nonce`` is unique under ``epoch``; ``hashes`` are 32 bytes each; ``asked_s`` is the node's monotonic clock.
    """

    epoch: int
    nonce: int
    hashes: tuple[bytes, ...]
    total_blocks: int
    resume: bool = False
    priority: int = 0
    asked_s: float = 0.0

    @property
    def place(self) -> tuple[bool, float]:
        """Smaller stands further in front; among equals, who asked first."""
        return not self.resume, rank(self.priority, self.asked_s)

    @property
    def key(self) -> tuple[int, int]:
        """Names the waiter."""
        return self.epoch, self.nonce


@dataclass(frozen=True, slots=True)
class Grant:
    """A waiter's ticket."""

    key: tuple[int, int]
    ticket_id: int
    pinned_blocks: int


class WaitingLine:
    """Bounded: at most ``max_waiting`` new prompts and as many preempted streams."""

    def __init__(self, ledger: Ledger, max_waiting: int) -> None:
        self._ledger = ledger
        self._max_waiting = max_waiting
        # Sorted by place; of equals, the later one behind.
        self._line: list[Waiter] = []
        self._by_key: dict[tuple[int, int], Waiter] = {}

    def __len__(self) -> int:
        return len(self._line)

    def ask(self, waiter: Waiter) -> Grant | None:
        """Admits at once, or puts in line and returns None.

        Raises Overloaded if it can never fit or the line is full, Conflict if the pool has no shape yet or the epoch
        is fenced, NotFound for a void epoch, InvalidRequest for a demand that makes no sense.
        """
        self._judge(waiter)
        first_in_line = not self._line or waiter.place < self._line[0].place
        grant = self._admit(waiter) if first_in_line else None
        if grant is not None:
            return grant
        # Counted apart, so that new prompts do not shut out who comes back.
        resuming = bisect_left(self._line, (True, -inf), key=lambda other: other.place)
        if (resuming if waiter.resume else len(self) - resuming) >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests wait for KV memory already", RETRY_AFTER_MS)
        insort(self._line, waiter, key=lambda other: other.place)
        self._by_key[waiter.key] = waiter
        return None

    def poll(self) -> list[Grant]:
        """Admits from the front while it fits. To be called after anything changed in the ledger."""
        grants = []
        while self._line:
            grant = self._admit(self._line[0])
            if grant is None:
                break
            self.withdraw(grant.key)
            grants.append(grant)
        return grants

    def withdraw(self, key: tuple[int, int]) -> bool:
        """Takes a waiter out of the line; False if it is not in it."""
        waiter = self._by_key.pop(key, None)
        if waiter is None:
            return False
        at = bisect_left(self._line, waiter.place, key=lambda other: other.place)
        while self._line[at] is not waiter:
            at += 1
        del self._line[at]
        return True

    def withdraw_epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Takes out all waiters of an epoch that is fenced or gone; returns their keys."""
        keys = [waiter.key for waiter in self._line if waiter.epoch == epoch]
        for key in keys:
            self.withdraw(key)
        return keys

    def recall_blocks(self) -> int:
        """Slots that the first waiter lacks: workers should return what they have in stock."""
        first = self._line[0] if self._line else None
        return self._ledger.shortage(first.hashes, first.total_blocks) if first else 0

    def _admit(self, waiter: Waiter) -> Grant | None:
        ticket = self._ledger.admit(waiter.epoch, waiter.nonce, waiter.hashes, waiter.total_blocks)
        return Grant(waiter.key, ticket.ticket_id, ticket.blocks) if ticket is not None else None

    def _judge(self, waiter: Waiter) -> None:
        ledger = self._ledger
        ledger.active(waiter.epoch)
        if not ledger.num_slots:
            raise Conflict("no worker has attached to the KV node yet, so its pool has no shape")
        if waiter.total_blocks <= len(waiter.hashes):
            raise InvalidRequest("total_blocks must leave room for at least one block that is not hashed yet")
        if waiter.key in self._by_key or waiter.key in ledger.by_opener:
            raise InvalidRequest("the nonce is in use")
        if waiter.total_blocks > ledger.num_slots:
            raise Overloaded(f"the prompt needs {waiter.total_blocks} KV blocks, the pool has {ledger.num_slots}")
