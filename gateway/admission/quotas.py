"""Tenants' quotas of requests and tokens per minute: local token buckets in this gateway, and shared ones in Redis for
all gateways of a cluster. Callers pass the time.

A bucket has the size of one minute's quota and fills evenly. An answer's tokens are charged when the request ends, and
may leave a debt, which must be refilled before the next request is admitted.

    request --local bucket--> refused, or tokenized --shared bucket, one script--> refused, or served
                                                              | no answer in 100 ms
                                                              '--> served
    answer's tokens --> charged to the local bucket, and to Redis with the tenant's next call or after REPORT_MS
    refused after it was charged --> refunded to the local bucket, and to Redis if charged there

A call with several prompts is charged as a whole before any of them runs.

A local bucket lacks only what this gateway served, so it is never emptier than the shared one: Redis would refuse
whatever it refuses. Charges of a failed call to Redis are not repeated, since Redis may have counted them; after a
minute they are irrelevant.
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

# Delay of reports of answers' tokens to Redis, so that one call reports many answers.
REPORT_MS = 100


class Quotas:
    """Quotas of all tenants. ``shared`` are the buckets in Redis; None if this gateway counts alone. Times are
    monotonic seconds."""

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
        """Charge prompts' ``tokens`` (None if no prompt is computed) to a tenant's local and shared quotas, and
        ``count`` requests, which :meth:`take_request` has charged locally, to the shared quota.

        Raises Overloaded, with all of these charges refunded. If cancelled, everything stays charged.
        """
        try:
            if tokens is not None:
                self.take_prompt(tenant, tokens, now_s)
        except Overloaded:
            self.refund_here(tenant, count, 0, now_s)
            raise
        short = await self._charge_shared(tenant, count, tokens)
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
        """Charge a tenant's local quota, by default with generated tokens, which may leave a debt, and report the
        charge to Redis. A negative ``amount`` is a refund."""
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
        unreported = {name for name, _ in self._unreported}
        self._tenants = {name: one for name, one in self._tenants.items() if name in names or name in unreported}

    async def aclose(self) -> None:
        """Wait until all charges are reported to Redis, and close the connections."""
        if self._reporting is not None:
            # A cancelled report may not have reached Redis, and is not repeated.
            await asyncio.gather(self._reporting, return_exceptions=True)
        if self._shared is not None:
            await self._shared.aclose()

    async def _charge_shared(self, tenant: Tenant, requests: int | None, tokens: int | None) -> tuple[str, int] | None:
        """Charge the shared quotas, including unreported charges. Return the quota that is used up and the milliseconds
        until it is refilled, with nothing but unreported charges made; None if charged, or if Redis does not answer."""
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
        return None if short is None else (QUOTAS[short.index], short.wait_ms)

    async def _report_soon(self) -> None:
        while self._unreported:
            await asyncio.sleep(REPORT_MS / 1000)
            for name in {name for name, _ in self._unreported}:
                await self._charge_shared(self._tenants[name], None, None)

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
        bucket = self._buckets.get(key) or Bucket(per_minute, now_s)
        if bucket.per_minute != per_minute:
            bucket = bucket.resized(per_minute, now_s)
        self._buckets[key] = bucket
        return bucket


@dataclass(slots=True)
class CountedCall:
    """The refundable charges of one call to its tenant's quotas. Times are monotonic seconds.

    Attributes:
        requests, tokens: requests and prompt tokens that are charged and not refunded.
        begun_tokens: tokens of prompts that were sent to workers.
        confirmed: True once the shared quotas are charged too.
    """

    quotas: Quotas
    tenant: Tenant
    requests: int = 0
    tokens: int = 0
    begun_tokens: int = 0
    confirmed: bool = False

    def take(self, requests: int, now_s: float) -> None:
        """Charge requests to the local quota. Raises Overloaded."""
        self.quotas.take_request(self.tenant, now_s, requests)
        self.requests = requests

    async def confirm(self, tokens: int | None, now_s: float) -> None:
        """Charge tokens to both quotas, and the requests to the shared quota (:meth:`Quotas.confirm`). Raises
        Overloaded."""
        count, self.requests = self.requests, 0
        await self.quotas.confirm(self.tenant, tokens, now_s, count)
        self.requests, self.tokens, self.confirmed = count, tokens or 0, True

    def refund(self, requests: int, tokens: int, now_s: float) -> None:
        """Refund requests and tokens, at most those that are still charged."""
        requests, tokens = min(requests, self.requests), max(0, min(tokens, self.tokens))
        self.requests -= requests
        self.tokens -= tokens
        if self.confirmed:
            self.quotas.spend(self.tenant, -requests, now_s, "requests_per_minute")
            self.quotas.spend(self.tenant, -tokens, now_s)
        else:
            self.quotas.refund_here(self.tenant, requests, tokens, now_s)

    def end(self, now_s: float, error: BaseException | None = None) -> None:
        """Refund everything if the call was refused (``error`` is Overloaded), else the tokens of prompts that never
        started."""
        if isinstance(error, Overloaded):
            self.refund(self.requests, self.tokens, now_s)
        else:
            self.refund(0, self.tokens - self.begun_tokens, now_s)
