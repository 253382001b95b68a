"""Counts quotas that hold over all gateways of a cluster: in this gateway, and in Redis as long as that answers.

    request --local count--> refused here, or tokenized --one script in Redis--> refused there, or served
                                                              | no answer in 100 ms
                                                              '--> the local count has decided
    answer's tokens --> local count, and reported to Redis with the tenant's next call or REPORT_MS later

The local count knows only what this gateway served, so it never has less left than Redis: Redis would refuse whatever
it refuses. What a failed call carried is not sent again, as Redis may have taken it; a minute later it does not matter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection

from pillion.errors import Unavailable
from pillion.gateway.admission.quotas import QUOTAS, Quotas, used_up
from pillion.gateway.admission.tenants import Tenant
from pillion.kvstore.index.shared_buckets import BucketDemand, SharedBuckets

log = logging.getLogger("pillion.gateway")

# Tokens of answers may wait this long before they are reported, so that many answers are one call.
REPORT_MS = 100


class SharedQuotas(Quotas):
    """Counts the quotas of all tenants. Without ``buckets``, which are in Redis, this gateway counts alone. Times are
    monotonic, in seconds."""

    def __init__(self, buckets: SharedBuckets | None = None) -> None:
        super().__init__()
        self._shared = buckets
        self._unreported: Counter[str] = Counter()
        self._tenants: dict[str, Tenant] = {}
        self._reporting: asyncio.Task[None] | None = None
        self.redis_answers = True

    async def confirm(self, tenant: Tenant, tokens: int | None, now_s: float) -> None:
        """Takes a prompt's tokens (None where it is not computed) from a tenant's quotas, and the request from those
        that all gateways count together.

        Raises Overloaded; then the prompt is not taken. The tokens stay taken where the caller is cancelled in here.
        """
        if tokens is not None:
            self.take_prompt(tenant, tokens, now_s)
        short = await self._ask(tenant, 1, tokens)
        if short is None:
            return
        quota, wait_ms = short
        if quota == "requests_per_minute":
            # Redis took neither the request nor its prompt.
            super().spend(tenant, -1, now_s, quota)
        if tokens is not None:
            super().spend(tenant, -tokens, now_s)
        raise used_up(tenant, quota, wait_ms)

    def spend(self, tenant: Tenant, amount: int, now_s: float, quota: str = "tokens_per_minute") -> None:
        """Takes generated tokens from a tenant's quota here, and reports them to the other gateways."""
        super().spend(tenant, amount, now_s, quota)
        if self._shared is None or not tenant.tokens_per_minute or not amount:
            return
        self._unreported[tenant.name] += amount
        self._tenants[tenant.name] = tenant
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.get_running_loop().create_task(self._report_soon(), name="quotas")

    def keep(self, names: Collection[str]) -> None:
        """Forgets the quotas of tenants that are not among ``names``, once what they spent is reported to Redis."""
        super().keep(names)
        self._tenants = {name: one for name, one in self._tenants.items() if name in names or name in self._unreported}

    async def aclose(self) -> None:
        """Reports to Redis what tenants have spent since the last report, and closes the connections."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
        if self._shared is not None:
            await self._report()
            await self._shared.aclose()

    async def _ask(self, tenant: Tenant, requests: int | None, tokens: int | None) -> tuple[str, int] | None:
        """Returns the quota that is used up by Redis's count, and the ms until it is not; None where no quota is, or
        where Redis does not answer."""
        if self._shared is None or not (tenant.requests_per_minute or tenant.tokens_per_minute):
            return None
        spent = self._unreported.pop(tenant.name, 0)
        demands = (
            BucketDemand(tenant.requests_per_minute, 0, requests),
            BucketDemand(tenant.tokens_per_minute, spent, tokens),
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
            await self._report()

    async def _report(self) -> None:
        for name in tuple(self._unreported):
            await self._ask(self._tenants[name], None, None)
