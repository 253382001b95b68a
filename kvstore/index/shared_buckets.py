"""Token buckets in Redis, shared by several processes.

A bucket's size is one minute's quota, and it refills evenly, by Redis's clock; lua/take_tokens.lua has the arithmetic
of :class:`pillion.gateway.admission.tenants.Bucket`. The loss of Redis forgets at most a minute's consumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import Argument, RedisScripts, ScriptCall

TAKE_DEADLINE_MS = 100


@dataclass(frozen=True, slots=True)
class BucketDemand:
    """Demand on one bucket.

    Attributes:
        per_minute: size, and refill per minute; 0 for no bucket, i.e. no limit.
        spent: earlier consumption to deduct in any case; negative to return tokens.
        wanted: tokens to take if available; None to take nothing.
    """

    per_minute: int
    spent: int = 0
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class Shortage:
    """The first bucket with too few tokens, by its index in the demands, and the time until it has enough."""

    index: int
    wait_ms: int


class SharedBuckets(RedisScripts):
    """Client of the token buckets. An owner has several, always in the same order. Raises ConfigError for an invalid
    URL."""

    scripts = ("take_tokens",)

    async def take(self, owner: str, demands: Sequence[BucketDemand]) -> Shortage | None:
        """Take the wanted tokens from all buckets, or from none if one has too few, in one call. ``spent`` is deducted
        in either case.

        Return the first bucket with too few tokens, or None. Raises Unavailable if Redis does not answer in time; the
        tokens may have been taken nevertheless.
        """
        args: list[Argument] = []
        for demand in demands:
            args += [demand.per_minute, demand.spent, -1 if demand.wanted is None else demand.wanted]
        call = ScriptCall([keys.buckets_key(owner)], args)
        index, wait_ms = await self._link.call("take_tokens", call, _read, deadline_ms=TAKE_DEADLINE_MS)
        return Shortage(index - 1, wait_ms) if index else None


def _read(raw: Sequence[int]) -> tuple[int, int]:
    index, wait_ms = raw
    return int(index), int(wait_ms)
