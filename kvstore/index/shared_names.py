"""Keeps small values by name in Redis, which several processes read and change: of two values of a name the later one
stays.

Each process keeps all values and brings its own again where Redis lacks them, so that an emptied Redis loses nothing
that anybody still knows. lua/share_names.lua compares the stamps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import Argument, RedisScripts, ScriptCall
from pillion.kvstore.index.redis_url import RedisServerAt

SHARE_DEADLINE_MS = 500


@dataclass(frozen=True, slots=True, order=True)
class StampedValue:
    """Holds a value and when it was given, in ms. An empty value says that the name means nothing any more. Of two
    values, the greater one stays."""

    stamp_ms: int
    value: bytes


@dataclass(frozen=True, slots=True)
class SharedAnswer:
    """Holds the answer to a question for all values by name: ``values``, or None where they are those of the version
    that was asked about."""

    version: bytes
    values: Mapping[str, StampedValue] | None


class SharedNames(RedisScripts):
    """Holds at most ``max_names`` names of adapters, those with empty values included; an empty value is forgotten
    after ``forget_ms``. Raises ConfigError for a bad URL."""

    scripts = ("share_names",)

    def __init__(self, redis_url: RedisServerAt, max_names: int, forget_ms: int) -> None:
        super().__init__(redis_url)
        self._bounds = (max_names, forget_ms)

    async def share(self, known: bytes, brought: Sequence[tuple[str, StampedValue]]) -> SharedAnswer:
        """Brings values to Redis, and asks for all if its version is not ``known``. Raises Unavailable when Redis does
        not answer in time; it may have taken the values all the same."""
        args: list[Argument] = [known, *self._bounds]
        for name, given in brought:
            args += [name, given.stamp_ms, given.value]
        call = ScriptCall([keys.ADAPTERS], args)
        version, values = await self._link.call("share_names", call, _read, deadline_ms=SHARE_DEADLINE_MS)
        return SharedAnswer(version, None if version == known else values)


def _read(raw: Sequence[Any]) -> tuple[bytes, dict[str, StampedValue]]:
    version, *rows = raw
    values: dict[str, StampedValue] = {}
    for name, row in zip(rows[::2], rows[1::2], strict=True):
        stamp, _, value = row.partition(b" ")
        values[name.decode(errors="replace")] = StampedValue(int(stamp), value)
    return version, values
