"""Chooses the requests that give way when a limit of the gateway or of a tenant is met. Sans-IO (I9).

    newcomer --a limit is met--> is there a waiting request that may give way? --no--> the newcomer is refused
                                                    | yes: it is refused, and the newcomer is admitted

Only a request without slots gives way, to a newcomer that is not in the background:

1. a background request, if there is one;
2. one of the tenant with the largest usage over weight, if the newcomer's tenant would stay below it with the newcomer;
3. one of the newcomer's tenant, if the newcomer is more urgent.

Among a tenant's requests it is the least urgent one, of these the newest. For a tenant's own limit, only that tenant's
requests give way.
"""

from __future__ import annotations

from collections import Counter

from pillion.gateway.admission.tenants import BoundMet, ConcurrencyLimit
from pillion.gateway.admission.turns import AdmissionPermit, YieldingRequests


def quota_units(permit: AdmissionPermit, bound: ConcurrencyLimit) -> int:
    """Return the quota units used by this request."""
    return permit.weight if bound.of_prompts else permit.answers


def choose(
    yielding: YieldingRequests, bound: ConcurrencyLimit, permit: AdmissionPermit, amount: int
) -> list[AdmissionPermit] | BoundMet:
    """Return the requests that give way to admit ``permit`` with ``amount`` units, or the limit if they do not
    suffice."""
    freed: Counter[str] = Counter()
    chosen: list[AdmissionPermit] = []
    ends = {key: (one for one in line if quota_units(one, bound)) for key, line in yielding.ends().items()}
    last = {key: next(line, None) for key, line in ends.items()}
    while (met := bound.met(permit.tenant, amount, freed)) is not None:
        if permit.tenant.background:
            return met
        found = _next(bound, permit, amount, met, freed, [one for one in last.values() if one is not None])
        if found is None:
            return met
        chosen.append(found)
        freed[found.tenant.name] += quota_units(found, bound)
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
    """Choose the next to give way among the ``last`` requests of each tenant, after ``freed`` units; None if there is
    none."""
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
