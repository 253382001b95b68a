"""Tenants' quotas of requests and tokens per minute: token buckets in this gateway, and in Redis, where available, for
all gateways of a cluster. Callers pass the time.

A bucket has the size of one minute's quota and fills evenly. The tokens of an answer are charged when the request ends
and may leave a debt, which must be refilled before the next request is admitted.

    request --local count--> refused here, or tokenized --one script in Redis--> refused there, or served
                                                              | no answer in 100 ms
                                                              '--> the local count has decided
    answer's tokens --> local count, and reported to Redis with the tenant's next call or REPORT_MS later
    refused after it was counted --> refunded here, and in Redis if counted there

A call with several prompts is counted as a whole before any of them runs.

The local count has only what this gateway served, so never less left than Redis: Redis would refuse whatever it
refuses. What a failed call carried is not sent again, as Redis may have counted it; after a minute it is irrelevant.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from pillion.errors import Overloaded, Unavailable
from pillion.gateway.admission.tenants import QUOTAS, Bucket, Tenant, used_up
from pillion.kvstore.index.shared_buckets import BucketDemand, SharedBuckets

log = logging.getLogger("pillion.gateway")

# Delay before answers' tokens are reported, so that one call reports many answers.
REPORT_MS = 100


class Quotas:
    """Quotas of all tenants, with buckets made on demand. ``shared`` buckets are in Redis; without them this gateway
    counts alone. Times are monotonic seconds."""

    def __init__(self, shared: SharedBuckets | None = None) -> None:
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._shared = shared
        self._unreported: Counter[tuple[str, str]] = Counter()
        self._tenants: dict[str, Tenant] = {}
        self._reporting: asyncio.Task[None] | None = None
        self.redis_answers = True

    def take_request(self, tenant: Tenant, now_s: float, count: int = 1) -> None:
        """Charge ``count`` requests to a tenant's local quota, all or none. Raises Overloaded with the retry time."""
        self._take(tenant, "requests_per_minute", count, now_s)

    def take_prompt(self, tenant: Tenant, tokens: int, now_s: float) -> None:
        """Charge a prompt's tokens to a tenant's local quota. Raises Overloaded with the retry time."""
        self._take(tenant, "tokens_per_minute", tokens, now_s)

    async def confirm(self, tenant: Tenant, tokens: int | None, now_s: float, count: int = 1) -> None:
        """Charge the tokens of prompts (None if none is computed) to a tenant's quotas, and ``count`` requests, which
        :meth:`take_request` has charged here, to the shared quota.

        Raises Overloaded, and refunds all of it. If cancelled, everything stays charged.
        """
        try:
            if tokens is not None:
                self.take_prompt(tenant, tokens, now_s)
        except Overloaded:
            self.refund_here(tenant, count, 0, now_s)
            raise
        short = await self._ask(tenant, count, tokens)
        if short is not None:
            self.refund_here(tenant, count, tokens or 0, now_s)
            raise used_up(tenant, *short)

    def refund_here(self, tenant: Tenant, requests: int, tokens: int, now_s: float) -> None:
        """Refund requests and tokens to the local quotas, but not to the shared ones."""
        for quota, amount in zip(QUOTAS, (requests, tokens), strict=True):
            bucket = self._bucket(tenant, quota, now_s)
            if bucket is not None:
                bucket.take(-amount, now_s)

    def spend(self, tenant: Tenant, amount: int, now_s: float, quota: str = "tokens_per_minute") -> None:
        """Charge a tenant's quota here, by default generated tokens, which may leave a debt, and report it to the
        other gateways. A negative ``amount`` is a refund."""
        bucket = self._bucket(tenant, quota, now_s)
        if bucket is None:
            return
        bucket.take(amount, now_s)
        if self._shared is None or not amount:
            return
        self._unreported[tenant.name, quota] += amount
        self._tenants[tenant.name] = tenant
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.get_running_loop().create_task(self._report_soon(), name="quotas")

    def retain(self, names: Collection[str]) -> None:
        """Drop the quotas of tenants that are not in ``names``, once reported to Redis."""
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key[0] in names}
        left = {name for name, _ in self._unreported}
        self._tenants = {name: one for name, one in self._tenants.items() if name in names or name in left}

    async def aclose(self) -> None:
        """Wait until all charges are reported to Redis, and close the connections."""
        if self._reporting is not None:
            # A cancelled report may not have reached Redis, and is not repeated.
            await asyncio.gather(self._reporting, return_exceptions=True)
        if self._shared is not None:
            await self._shared.aclose()

    async def _ask(self, tenant: Tenant, requests: int | None, tokens: int | None) -> tuple[str, int] | None:
        """Return the quota that is used up in Redis, and the milliseconds until it is not; None if there is none, or
        no answer."""
        if self._shared is None or not tenant.has_quotas:
            return None
        demands = tuple(
            BucketDemand(getattr(tenant, quota), self._unreported.pop((tenant.name, quota), 0), wanted)
            for quota, wanted in zip(QUOTAS, (requests, tokens), strict=True)
        )
        try:
            short = await self._shared.take(tenant.name, demands)
        except Unavailable as error:
            if self.redis_answers:
                log.warning("quotas are counted by this gateway alone: %s", error.message)
            self.redis_answers = False
            return None
        self.redis_answers = True
        return None if short is None else (QUOTAS[short.place], short.wait_ms)

    async def _report_soon(self) -> None:
        while self._unreported:
            await asyncio.sleep(REPORT_MS / 1000)
            for name in {name for name, _ in self._unreported}:
                await self._ask(self._tenants[name], None, None)

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


@dataclass(slots=True)
class CountedCall:
    """What a call has charged to its tenant's quotas and may get refunded. Times are monotonic seconds.

    Attributes:
        requests, tokens: charged and not refunded; tokens are those of prompts.
        begun_tokens: tokens of prompts that were sent to workers.
        confirmed: whether the shared quotas have it too.
    """

    quotas: Quotas
    tenant: Tenant
    requests: int = 0
    tokens: int = 0
    begun_tokens: int = 0
    confirmed: bool = False

    def take(self, requests: int, now_s: float) -> None:
        """Charge requests here. Raises Overloaded."""
        self.quotas.take_request(self.tenant, now_s, requests)
        self.requests = requests

    async def confirm(self, tokens: int | None, now_s: float) -> None:
        """Charge tokens, and the requests to the shared quota, see :meth:`Quotas.confirm`. Raises Overloaded."""
        count, self.requests = self.requests, 0
        await self.quotas.confirm(self.tenant, tokens, now_s, count)
        self.requests, self.tokens, self.confirmed = count, tokens or 0, True

    def refund(self, requests: int, tokens: int, now_s: float) -> None:
        """Refund at most what is still charged."""
        requests, tokens = min(requests, self.requests), max(0, min(tokens, self.tokens))
        self.requests -= requests
        self.tokens -= tokens
        if self.confirmed:
            self.quotas.spend(self.tenant, -requests, now_s, "requests_per_minute")
            self.quotas.spend(self.tenant, -tokens, now_s)
        else:
            self.quotas.refund_here(self.tenant, requests, tokens, now_s)

    def end(self, now_s: float, error: BaseException | None = None) -> None:
        """Refund everything if ``error`` refuses the call, and else the tokens of prompts that never started."""
        if isinstance(error, Overloaded):
            self.refund(self.requests, self.tokens, now_s)
        else:
            self.refund(0, self.tokens - self.begun_tokens, now_s)
