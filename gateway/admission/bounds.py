"""Bounds what the gateway holds at once, and chooses who gives way where a bound is met. Sans-IO (I9).

    newcomer --a bound is met--> is there a request that waits and may give way? --no--> the newcomer is refused
                                                     | yes: it is refused, and the newcomer has its room

Only a request that has not had its turn gives way, to a newcomer that is not in the background itself:

1. one in the background, wherever one waits;
2. one of the tenant that is furthest above its share, by what it holds of the bound over its weight, as long as the
   newcomer's tenant stays below that tenant with the newcomer;
3. one of the newcomer's own tenant, if the newcomer is more urgent.

Of a tenant's requests it is the least urgent one, and of these the newest. A tenant's own bound concerns nobody else,
so there only its own requests give way.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pillion.errors import Overloaded, QuotaViolation
from pillion.gateway.admission.permit import AdmissionPermit
from pillion.gateway.admission.tenants import Tenant, share_of
from pillion.gateway.admission.turns import BACKGROUND_SHARE


@dataclass(frozen=True, slots=True)
class BoundMet:
    """Says which bound refuses a request. ``tenant`` is "" for the gateway's own bound; ``own`` says whether it is one
    that the tenant itself has; ``lacking`` is how much has to become free; ``text`` is for the client."""

    tenant: str
    own: bool
    lacking: int
    text: str


@dataclass(slots=True)
class HeldBound:
    """Counts one kind of thing that all requests in the gateway hold together, of which there may be ``whole``.

    Attributes:
        name: the flag's name, which a tenant's own bound has too.
        what: what is counted, for people.
        of_prompts: whether it counts prompts by their weight, one of which is always admitted however long it is; else
            it counts answers.
    """

    name: str
    what: str
    whole: int
    of_prompts: bool
    total: int = 0
    of: Counter[str] = field(default_factory=Counter)

    def take(self, tenant: str, amount: int) -> None:
        """Notes that a tenant's request holds so much more."""
        self.total += amount
        self.of[tenant] += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Notes that a tenant's request holds so much less."""
        self.total -= amount
        self.of[tenant] -= amount
        if not self.of[tenant]:
            del self.of[tenant]

    def held_by(self, permit: AdmissionPermit) -> int:
        """Returns how much a request holds."""
        return permit.weight if self.of_prompts else permit.answers

    def alone(self, tenant: Tenant) -> int:
        """Returns how much a tenant may hold while nobody else holds anything."""
        return self._most(tenant, 0)

    def met(self, tenant: Tenant, amount: int, freed: Counter[str]) -> BoundMet | None:
        """Returns the bound that keeps a tenant from holding so much more, once tenants have given back what is
        ``freed``; None where there is room."""
        total, own = self.total - freed.total(), self.of[tenant.name] - freed[tenant.name]
        room, most = _room(tenant, self.whole), self._most(tenant, total - own)
        if total + amount > room and (total or not self.of_prompts):
            text = f"{self.name} ({room}) {self.what} are under way"
            return BoundMet("", False, total + amount - room, text)
        if own + amount > most and (own or not self.of_prompts):
            text = f"{self.name} ({most}) {self.what} of tenant {tenant.name!r} are under way"
            return BoundMet(tenant.name, bool(getattr(tenant, self.name)), own + amount - most, text)
        return None

    def refusal(self, met: BoundMet, text: str, retry_after_ms: int) -> Overloaded:
        """Makes the error of a request that has no room, because a bound is met or because it gave way."""
        subject = f"{met.tenant}/{self.name}" if met.tenant else self.name
        return Overloaded(text, retry_after_ms, (QuotaViolation(subject, text),))

    def check_integrity(self) -> None:
        """Raises AssertionError where the tenants' counts do not add up to the gateway's."""
        assert self.total == self.of.total(), f"{self.name}: {self.total} are held, {dict(self.of)} by tenant"
        assert all(count > 0 for count in self.of.values()), f"{self.name}: {dict(self.of)}"

    def _most(self, tenant: Tenant, others: int) -> int:
        """Returns how much a tenant may hold while other tenants hold ``others``. The only tenant of a gateway without
        keys may hold it all."""
        own: int = getattr(tenant, self.name)
        if own or not tenant.name:
            return _room(tenant, min(own or self.whole, self.whole))
        return _room(tenant, share_of(tenant, self.whole, others))


def _room(tenant: Tenant, bound: int) -> int:
    """Returns how much of a bound may be held, by all requests, for one more request of the tenant to be admitted."""
    return max(1, int(bound * BACKGROUND_SHARE)) if tenant.background else bound


def _place(permit: AdmissionPermit) -> tuple[float, int]:
    return permit.order, permit.number


class YieldingRequests:
    """Holds the requests that have not had their turn and may give way to others, in order: those of each tenant, and
    those that it has in the background apart."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, bool], list[AdmissionPermit]] = {}

    def add(self, permit: AdmissionPermit) -> None:
        """Adds a request that has entered. One without an order never gives way."""
        if permit.order < math.inf:
            line = self._lines.setdefault((permit.tenant.name, permit.tenant.background), [])
            bisect.insort(line, permit, key=_place)

    def remove(self, permit: AdmissionPermit) -> None:
        """Takes out a request whose turn has come, or that has left; one that is not here is ignored."""
        key = permit.tenant.name, permit.tenant.background
        line = self._lines.get(key, [])
        at = bisect.bisect_left(line, _place(permit), key=_place)
        if at < len(line) and line[at] is permit:
            del line[at]
            if not line:
                del self._lines[key]

    def __iter__(self) -> Iterator[AdmissionPermit]:
        for line in self._lines.values():
            yield from line

    def choose(self, bound: HeldBound, permit: AdmissionPermit, amount: int) -> list[AdmissionPermit] | BoundMet:
        """Returns the requests that give way, so that ``permit`` has room for so much more of a bound; the bound that
        is met where there are not enough."""
        freed: Counter[str] = Counter()
        chosen: list[AdmissionPermit] = []
        ends: dict[tuple[str, bool], Iterator[AdmissionPermit]] = {}
        last: dict[tuple[str, bool], AdmissionPermit | None] = {}
        while (met := bound.met(permit.tenant, amount, freed)) is not None:
            if permit.tenant.background:
                return met
            for key, line in self._lines.items() if not ends else ():
                ends[key] = (one for one in reversed(line) if one is not permit and bound.held_by(one))
                last[key] = next(ends[key], None)
            found = _next(bound, permit, amount, met, freed, [one for one in last.values() if one is not None])
            if found is None:
                return met
            chosen.append(found)
            freed[found.tenant.name] += bound.held_by(found)
            key = found.tenant.name, found.tenant.background
            last[key] = next(ends[key], None)
        return chosen


def _next(
    bound: HeldBound,
    permit: AdmissionPermit,
    amount: int,
    met: BoundMet,
    freed: Counter[str],
    last: list[AdmissionPermit],
) -> AdmissionPermit | None:
    """Returns which of the ``last`` requests of each tenant gives way, after requests that have ``freed`` so much did;
    None where none does."""
    tenant = permit.tenant
    if met.own:
        last = [one for one in last if one.tenant.name == tenant.name]

    def level(one: AdmissionPermit) -> float:
        return (bound.of[one.tenant.name] - freed[one.tenant.name]) / one.tenant.weight

    hidden = [one for one in last if one.tenant.background]
    if hidden:
        return max(hidden, key=level)
    other = max((one for one in last if one.tenant.name != tenant.name), key=level, default=None)
    if other is not None and (bound.of[tenant.name] - freed[tenant.name] + amount) / tenant.weight < level(other):
        return other
    return next((one for one in last if one.tenant.name == tenant.name and one.order > permit.order), None)
