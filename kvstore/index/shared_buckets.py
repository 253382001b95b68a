"""Token buckets in Redis, which several processes fill and empty as if they were one.

A bucket holds one minute's worth and fills evenly, by Redis's own clock; kvstore/lua/take.lua has the arithmetic, the
same as :class:`pillion.gateway.admission.quotas.Bucket`. What is lost with Redis is a minute's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import Argument, RedisLink, ScriptCall

# A request waits for it; it takes a fraction of a millisecond where Redis is well.
TAKE_DEADLINE_MS = 100


@dataclass(frozen=True, slots=True)
class Ask:
    """What one bucket is asked.

    Attributes:
        per_minute: what it holds at most, and gets in a minute; 0: there is no such bucket.
        told: taken before, whether it was there or not, and only told now; negative: given back.
        wanted: to be taken if it is there; None: nothing is asked.
    """

    per_minute: int
    told: int = 0
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class Short:
    """The bucket with too little, by its place among those asked, and the time until it has enough."""

    place: int
    wait_ms: int


class SharedBuckets:
    """Every owner has a few buckets, always asked in the same order. Raises ConfigError for what is no URL of Redis."""

    def __init__(self, redis_url: str) -> None:
        self._link = RedisLink(redis_url, "take")

    async def take(self, owner: str, asks: Sequence[Ask]) -> Short | None:
        """Takes what is wanted, bucket by bucket, up to the first that has too little: the answer then. One call.

        Raises Unavailable when Redis does not answer in time; it may have taken all the same.
        """
        args: list[Argument] = []
        for ask in asks:
            args += [ask.per_minute, ask.told, -1 if ask.wanted is None else ask.wanted]
        call = ScriptCall([keys.buckets_of(owner)], args)
        place, wait_ms = await self._link.call("take", call, _read, deadline_ms=TAKE_DEADLINE_MS)
        return Short(place - 1, wait_ms) if place else None

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._link.aclose()


def _read(said: Sequence[int]) -> tuple[int, int]:
    place, wait_ms = said
    return int(place), int(wait_ms)
