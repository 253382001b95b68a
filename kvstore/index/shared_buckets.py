"""Keeps token buckets in Redis, which several processes fill and empty as if they were one.

A bucket holds one minute's worth and fills evenly, by Redis's own clock; lua/take_tokens.lua has the arithmetic, the
same as :class:`pillion.gateway.admission.tenants.Bucket`. If Redis is lost, a minute's memory is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import Argument, RedisScripts, ScriptCall

# A request waits for this call, which takes a fraction of a millisecond where Redis is well.
TAKE_DEADLINE_MS = 100


@dataclass(frozen=True, slots=True)
class BucketDemand:
    """Says what a caller wants of one bucket.

    Attributes:
        per_minute: how much the bucket holds at most, and how much it is filled by in a minute; 0 where the caller has
            no such bucket.
        spent: how much the caller has already used without asking, and only reports now; a negative number gives back.
        wanted: how much is to be taken if the bucket has it; None where nothing is to be taken.
    """

    per_minute: int
    spent: int = 0
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class Shortage:
    """Names the bucket that has too little, by its place among the demands, and the time until it has enough."""

    place: int
    wait_ms: int


class SharedBuckets(RedisScripts):
    """Keeps token buckets by owner. An owner has a few, always in the same order. Raises ConfigError for a bad URL."""

    scripts = ("take_tokens",)

    async def take(self, owner: str, demands: Sequence[BucketDemand]) -> Shortage | None:
        """Takes the wanted amounts of all buckets, or none where a bucket has too little, in one call. What was spent
        is counted in any case.

        Returns the first bucket that has too little, or None. Raises Unavailable when Redis does not answer in time; it
        may have taken all the same.
        """
        args: list[Argument] = []
        for demand in demands:
            args += [demand.per_minute, demand.spent, -1 if demand.wanted is None else demand.wanted]
        call = ScriptCall([keys.buckets_of(owner)], args)
        place, wait_ms = await self._link.call("take_tokens", call, _read, deadline_ms=TAKE_DEADLINE_MS)
        return Shortage(place - 1, wait_ms) if place else None


def _read(raw: Sequence[int]) -> tuple[int, int]:
    place, wait_ms = raw
    return int(place), int(wait_ms)
