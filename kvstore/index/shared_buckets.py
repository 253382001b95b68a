"""Token buckets in Redis, which several processes fill and empty as if they were one.

A bucket holds one minute's worth and fills evenly, by Redis's own clock; lua/take_tokens.lua has the arithmetic, the
same as :class:`pillion.gateway.admission.quotas.Bucket`. If Redis is lost, a minute's memory is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import Argument, RedisLink, ScriptCall
from pillion.kvstore.index.redis_url import RedisServerAt

# A request waits for this call, which takes a fraction of a millisecond where Redis is well.
TAKE_DEADLINE_MS = 100


@dataclass(frozen=True, slots=True)
class BucketDemand:
    """What a caller wants of one bucket.

    Attributes:
        per_minute: what it holds at most, and gets in a minute; 0: there is no such bucket.
        spent: was taken before, whether it was there or not, and is only reported now; negative: given back.
        wanted: is to be taken if it is there; None: nothing.
    """

    per_minute: int
    spent: int = 0
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class Shortage:
    """The bucket that has too little, by its place among the demands, and the time until it has enough."""

    place: int
    wait_ms: int


class SharedBuckets:
    """Token buckets by owner. An owner has a few, always in the same order. Raises ConfigError for a bad URL."""

    def __init__(self, redis_url: RedisServerAt) -> None:
        self._link = RedisLink(redis_url, "take_tokens")

    async def take(self, owner: str, demands: Sequence[BucketDemand]) -> Shortage | None:
        """Takes what is wanted, bucket by bucket, up to the first one that has too little, and returns that. One call.
        Raises Unavailable when Redis does not answer in time; it may have taken all the same."""
        args: list[Argument] = []
        for demand in demands:
            args += [demand.per_minute, demand.spent, -1 if demand.wanted is None else demand.wanted]
        call = ScriptCall([keys.buckets_of(owner)], args)
        place, wait_ms = await self._link.call("take_tokens", call, _read, deadline_ms=TAKE_DEADLINE_MS)
        return Shortage(place - 1, wait_ms) if place else None

    async def aclose(self) -> None:
        """Closes the connections to Redis."""
        await self._link.aclose()


def _read(raw: Sequence[int]) -> tuple[int, int]:
    place, wait_ms = raw
    return int(place), int(wait_ms)
