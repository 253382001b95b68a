"""Counts tenants' quotas of requests and tokens per minute, as token buckets. Nothing here reads a clock: callers pass
``now_s`` (I9).

A bucket holds one minute's worth and fills evenly, so a tenant may spend a minute at once and then gets its rate. The
tokens of an answer are known only afterwards: they are taken when the request ends and may leave a debt, which has to
fill up before the next request is admitted.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from pillion.errors import Overloaded, QuotaViolation
from pillion.gateway.admission.tenants import Tenant

MINUTE_S = 60.0
# These names of quotas are fields of a tenant, in the order in which a request is judged by them.
QUOTAS = ("requests_per_minute", "tokens_per_minute")


class Bucket:
    """Counts one quota as a token bucket that holds ``per_minute`` and gains as much each minute."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def wait_s(self, amount: int, now_s: float) -> float:
        """Says how long it takes until ``amount`` may be taken, 0 for now. An amount that is larger than the bucket
        needs a full bucket."""
        missing = min(amount, self.per_minute) - self._filled(now_s)
        return max(0.0, missing) * MINUTE_S / self.per_minute

    def take(self, amount: int, now_s: float) -> None:
        """Takes ``amount`` out of the bucket, which may leave a debt."""
        self._level = self._filled(now_s) - amount
        self._at_s = now_s

    def resized(self, per_minute: int, now_s: float) -> Bucket:
        """Makes a bucket with another rate, from which as much has been spent as from this one."""
        # Without rounding, an error in the last digit of what was spent would count as one more.
        spent = round(self.per_minute - self._filled(now_s), 6)
        other = Bucket(per_minute, now_s)
        other.take(math.ceil(spent), now_s)
        return other

    def _filled(self, now_s: float) -> float:
        gained = max(0.0, now_s - self._at_s) / MINUTE_S * self.per_minute
        return min(float(self.per_minute), self._level + gained)


def used_up(tenant: Tenant, quota: str, wait_ms: int) -> Overloaded:
    """Makes the error of a request that met ``quota``, which is one of QUOTAS."""
    text = f"{quota} of tenant {tenant.name!r} ({getattr(tenant, quota)}) is used up"
    return Overloaded(text, wait_ms, (QuotaViolation(f"{tenant.name}/{quota}", text),))


class Quotas:
    """Keeps the buckets of all tenants; a bucket is made when it is first asked for."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def take_request(self, tenant: Tenant, now_s: float, count: int = 1) -> None:
        """Takes ``count`` requests from a tenant's quota, all or none. Raises Overloaded, with the time until they may
        come."""
        self._take(tenant, "requests_per_minute", count, now_s)

    def take_prompt(self, tenant: Tenant, tokens: int, now_s: float) -> None:
        """Takes a prompt's tokens from a tenant's quota. Raises Overloaded, with the time until the prompt may come
        again."""
        self._take(tenant, "tokens_per_minute", tokens, now_s)

    def spend(self, tenant: Tenant, amount: int, now_s: float, quota: str = "tokens_per_minute") -> None:
        """Takes from a tenant's quota, by default generated tokens, which may leave a debt. A negative ``amount`` gives
        back what was not served."""
        bucket = self._bucket(tenant, quota, now_s)
        if bucket is not None:
            bucket.take(amount, now_s)

    def keep(self, names: Collection[str]) -> None:
        """Forgets the quotas of tenants that are not among ``names``."""
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key[0] in names}

    def _take(self, tenant: Tenant, quota: str, amount: int, now_s: float) -> None:
        bucket = self._bucket(tenant, quota, now_s)
        if bucket is not None:
            wait_s = bucket.wait_s(amount, now_s)
            if wait_s > 0:
                raise used_up(tenant, quota, math.ceil(wait_s * 1000))
            bucket.take(amount, now_s)

    def _bucket(self, tenant: Tenant, quota: str, now_s: float) -> Bucket | None:
        per_minute, key = getattr(tenant, quota), (tenant.name, quota)
        if not per_minute:
            return None
        found = self._buckets.get(key) or Bucket(per_minute, now_s)
        if found.per_minute != per_minute:
            found = found.resized(per_minute, now_s)
        self._buckets[key] = found
        return found
