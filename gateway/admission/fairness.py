"""The order in which waiting requests get their turn: fair between tenants by tokens, by rank within a tenant.

Each tenant has a counter: tokens it was served, over its weight. The next request is of the waiting tenant with the
least counter; an answer's tokens count OUTPUT_COST times those of a prompt. A tenant that was away begins at the
counter of the one that was served last, so nobody saves up. This is the Virtual Token Counter (Sheng et al., "Fairness
in Serving Large Language Models", OSDI 2024, arXiv 2401.00588), its lift rule as in start-time fair queuing (Goyal et
al., 1996).

Between two tenants that wait all the time, tokens over weight differ by no more than what one of them has under way.

Nothing here reads a clock or waits (I9): :mod:`pillion.gateway.admission.admission` passes ``now_s`` and does what is
decided.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from pillion.gateway.admission.tenants import Tenant

# Prompt tokens that a generated token counts for, as in the paper's evaluation.
OUTPUT_COST = 2
# The rate is a decaying mean: half of its weight is younger than this.
RATE_HALF_LIFE_S = 10.0
# Before so many departures nothing is predicted.
MIN_DEPARTURES = 3.0


@dataclass(frozen=True, slots=True, order=True)
class WaitingRequest:
    """One waiting request. Sorted by rank (:func:`pillion.priority.rank`), then by arrival."""

    rank: float
    number: int
    tokens: int = field(compare=False)
    answers: int = field(compare=False)


@dataclass(slots=True)
class _Account:
    weight: float = 1.0
    counter: float = 0.0
    waiting: list[WaitingRequest] = field(default_factory=list)


class FairQueue:
    """All waiting requests of a model. Admission bounds their number."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._floor = 0.0

    def push(self, tenant: Tenant, request: WaitingRequest) -> None:
        """Adds a request."""
        account = self._accounts.setdefault(tenant.name, _Account())
        account.weight = tenant.weight
        if not account.waiting:
            account.counter = max(account.counter, self._floor)
        bisect.insort(account.waiting, request)

    def first(self) -> WaitingRequest | None:
        """The request whose turn it is."""
        name = self._next()
        return None if name is None else self._accounts[name].waiting[0]

    def pop(self) -> WaitingRequest:
        """Takes the first one out and charges its prompt. Call only where :meth:`first` named one."""
        name = self._next()
        assert name is not None
        account = self._accounts[name]
        self._floor = max(self._floor, account.counter)
        request = account.waiting.pop(0)
        account.counter += request.tokens / account.weight
        return request

    def remove(self, tenant: Tenant, request: WaitingRequest) -> None:
        """Takes out a request that was not served."""
        self._accounts[tenant.name].waiting.remove(request)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Charges tokens that were generated for the tenant."""
        account = self._accounts.get(tenant.name)
        if account is not None:
            account.counter += OUTPUT_COST * tokens / tenant.weight

    def ahead(self, tenant: Tenant, request: WaitingRequest) -> int:
        """Answers of waiting requests that would begin before this request if no other came."""
        own = self._accounts.get(tenant.name, _Account())
        before = [other for other in own.waiting if other < request]
        start = own.counter if own.waiting else max(own.counter, self._floor)
        start += sum(other.tokens for other in before) / tenant.weight
        count = sum(other.answers for other in before)
        for name, account in self._accounts.items():
            at = account.counter
            for other in account.waiting if name != tenant.name else ():
                if at > start:
                    break
                count += other.answers
                at += other.tokens / account.weight
        return count

    def keep(self, names: Collection[str]) -> None:
        """Forgets the counters of tenants that are not among ``names`` and do not wait."""
        self._accounts = {name: one for name, one in self._accounts.items() if name in names or one.waiting}

    def _next(self) -> str | None:
        names = [name for name, account in self._accounts.items() if account.waiting]
        return min(
            names, key=lambda name: (self._accounts[name].counter, self._accounts[name].waiting[0]), default=None
        )


class DepartureRate:
    """How fast answers end while others wait for their slots, as a decaying mean."""

    def __init__(self) -> None:
        self._departures = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    def left(self, answers: int, waiting: bool, now_s: float) -> None:
        """Notes that ``answers`` ended. The time until the next ones counts only while others are ``waiting``."""
        if self._since_s is not None:
            passed_s = max(0.0, now_s - self._since_s)
            kept = math.pow(0.5, passed_s / RATE_HALF_LIFE_S)
            self._departures = self._departures * kept + answers
            self._seconds = self._seconds * kept + passed_s
        self._since_s = now_s if waiting else None

    def began(self, now_s: float) -> None:
        """Notes that a request begins to wait."""
        if self._since_s is None:
            self._since_s = now_s

    def wait_s(self, ahead: int) -> float:
        """Seconds until a slot is free for a request with ``ahead`` answers before it; 0 where that is not known."""
        if self._departures < MIN_DEPARTURES:
            return 0.0
        return (ahead + 1) * self._seconds / self._departures
