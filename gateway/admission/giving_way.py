"""Chooses the waiting requests to preempt when a limit of the gateway or of a tenant is reached. Sans-IO (I9).

    new request --a limit is reached--> can a waiting request be preempted? --no--> the new request is refused
                                                    | yes: it is refused, and the new request is admitted

Only requests without slots are preempted, by a new request that is not a background request:

1. a background request, if there is any;
2. a request of the tenant with the largest usage over weight, if the new request's tenant stays below it;
3. a request of the same tenant, if the new request is more urgent.

Among a tenant's requests, the least urgent one is preempted, and among equally urgent ones the newest. For a tenant's
own limit, only that tenant's requests are preempted.
"""

from __future__ import annotations

from collections import Counter

from pillion.gateway.admission.tenants import BoundMet, ConcurrencyLimit
from pillion.gateway.admission.turns import AdmissionPermit, YieldingRequests


def quota_units(permit: AdmissionPermit, bound: ConcurrencyLimit) -> int:
    """Return the units of a limit that a request uses."""
    return permit.weight if bound.of_prompts else permit.answers


def choose(
    yielding: YieldingRequests, bound: ConcurrencyLimit, permit: AdmissionPermit, amount: int
) -> list[AdmissionPermit] | BoundMet:
    """Return the requests to preempt so that ``permit`` is admitted with ``amount`` units, or the limit if they do not
    suffice."""
    freed: Counter[str] = Counter()
    chosen: list[AdmissionPermit] = []
    ends = {key: (one for one in line if quota_units(one, bound)) for key, line in yielding.ends().items()}
    last = {key: next(line, None) for key, line in ends.items()}
    while (met := bound.met(permit.tenant, amount, freed)) is not None:
        if permit.tenant.background:
            return met
        victim = _next(bound, permit, amount, met, freed, [one for one in last.values() if one is not None])
        if victim is None:
            return met
        chosen.append(victim)
        freed[victim.tenant.name] += quota_units(victim, bound)
        key = victim.tenant.name, victim.tenant.background
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
    """Return the next request to preempt, of the ``last`` requests of each tenant, if ``freed`` units per tenant are
    freed already; None if none may be preempted."""
    tenant = permit.tenant
    if met.own:
        last = [one for one in last if one.tenant.name == tenant.name]

    def level(one: AdmissionPermit) -> float:
        return (bound.of[one.tenant.name] - freed[one.tenant.name]) / one.tenant.weight

    background = [one for one in last if one.tenant.background]
    if background:
        return max(background, key=level)
    highest = max(last, key=level, default=None)
    if highest is not None and (bound.of[tenant.name] - freed[tenant.name] + amount) / tenant.weight < level(highest):
        return highest
    return next((one for one in last if one.tenant.name == tenant.name and one.order > permit.order), None)
