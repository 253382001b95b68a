"""Chooses who gives way where a bound of the gateway or of a tenant is met. Sans-IO (I9).

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

from collections import Counter

from pillion.gateway.admission.tenants import BoundMet, ConcurrencyLimit
from pillion.gateway.admission.turns import AdmissionPermit, YieldingRequests


def held_by(permit: AdmissionPermit, bound: ConcurrencyLimit) -> int:
    """Returns how much of a bound a request holds."""
    return permit.weight if bound.of_prompts else permit.answers


def choose(
    yielding: YieldingRequests, bound: ConcurrencyLimit, permit: AdmissionPermit, amount: int
) -> list[AdmissionPermit] | BoundMet:
    """Returns the requests that give way, so that ``permit`` has room for so much more of a bound; the bound that is
    met where there are not enough."""
    freed: Counter[str] = Counter()
    chosen: list[AdmissionPermit] = []
    ends = {key: (one for one in line if held_by(one, bound)) for key, line in yielding.ends().items()}
    last = {key: next(line, None) for key, line in ends.items()}
    while (met := bound.met(permit.tenant, amount, freed)) is not None:
        if permit.tenant.background:
            return met
        found = _next(bound, permit, amount, met, freed, [one for one in last.values() if one is not None])
        if found is None:
            return met
        chosen.append(found)
        freed[found.tenant.name] += held_by(found, bound)
        key = found.tenant.name, found.tenant.background
        last[key] = next(ends[key], None)
    return chosen


def _next(
    bound: ConcurrencyLimit,
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
    highest = max(last, key=level, default=None)
    if highest is not None and (bound.of[tenant.name] - freed[tenant.name] + amount) / tenant.weight < level(highest):
        return highest
    return next((one for one in last if one.tenant.name == tenant.name and one.order > permit.order), None)
