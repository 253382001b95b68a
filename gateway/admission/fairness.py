"""Who is next where requests wait in the gateway: fair between tenants by tokens, by rank within a tenant.

Each tenant has a counter: tokens it was served, over its weight. The next request is of the waiting tenant with the
least counter; an answer's tokens count OUTPUT_COST times those of a prompt. A tenant that was away begins at the
counter of the one that was served last, so nobody saves up. This is the Virtual Token Counter (Sheng et al., "Fairness
in Serving Large Language Models", OSDI 2024, arXiv 2401.00588), its lift rule as in start-time fair queuing (Goyal et
al., 1996).

Between two tenants that wait all the time, tokens over weight differ by no more than what one of them has under way.

No clock, no waiting in here (I9): ``now_s`` is handed in, and :mod:`pillion.gateway.admission.admission` does what
is decided.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from pillion.gateway.admission.tenants import Tenant

# Of a generated token in tokens of a prompt, as in the paper's evaluation.
OUTPUT_COST = 2
# The pace is what it was lately: half of its weight is younger than this.
PACE_HALF_LIFE_S = 10.0
# Before so many departures nothing is predicted.
MIN_DEPARTURES = 3.0


@dataclass(frozen=True, slots=True, order=True)
class WaitingRequest:
    """One request that waits. Sorted by rank (:func:`pillion.priority.rank`), then by arrival."""

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
    """All that wait. Bounded by who admits to it."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._floor = 0.0

    def __len__(self) -> int:
        return sum(len(account.waiting) for account in self._accounts.values())

    def push(self, tenant: Tenant, request: WaitingRequest) -> None:
        """It waits from now on."""
        account = self._accounts.setdefault(tenant.name, _Account())
        account.weight = tenant.weight
        if not account.waiting:
            account.counter = max(account.counter, self._floor)
        bisect.insort(account.waiting, request)

    def first(self) -> WaitingRequest | None:
        """The one whose turn it is."""
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
        """It does not wait any more, and was not served."""
        self._accounts[tenant.name].waiting.remove(request)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Tokens that were generated for the tenant."""
        account = self._accounts.get(tenant.name)
        if account is not None:
            account.counter += OUTPUT_COST * tokens / tenant.weight

    def ahead(self, tenant: Tenant, request: WaitingRequest) -> int:
        """How many answers of those that wait now would begin before this request, if nobody else came."""
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
    """How fast answers leave while others wait for their place, as a decaying mean."""

    def __init__(self) -> None:
        self._departures = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    def left(self, answers: int, waiting: bool, now_s: float) -> None:
        """So many ended; ``waiting``: whether somebody waits, so that the time until the next ones tells the pace."""
        if self._since_s is not None:
            passed_s = max(0.0, now_s - self._since_s)
            kept = math.pow(0.5, passed_s / PACE_HALF_LIFE_S)
            self._departures = self._departures * kept + answers
            self._seconds = self._seconds * kept + passed_s
        self._since_s = now_s if waiting else None

    def began(self, now_s: float) -> None:
        """Somebody waits from now on."""
        if self._since_s is None:
            self._since_s = now_s

    def wait_s(self, ahead: int) -> float:
        """How long until a place is free for who has so many before it; 0 where that is not known."""
        if self._departures < MIN_DEPARTURES:
            return 0.0
        return (ahead + 1) * self._seconds / self._departures
