"""Small values by name in Redis, read and changed by several processes; of two values of a name, the later one wins.

Each process keeps all values and writes its own again if Redis lacks them, so that an emptied Redis regains all values
that some process has. lua/share_names.lua compares the timestamps.
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
    """A value with its timestamp in ms; empty for a deleted name. Of two values, the greater one by (timestamp, value)
    wins."""

    stamp_ms: int
    value: bytes


@dataclass(frozen=True, slots=True)
class SharedAnswer:
    """All values by name; None if the caller knows this version."""

    version: bytes
    values: Mapping[str, StampedValue] | None


class SharedNames(RedisScripts):
    """Client of the adapters' names: at most ``max_names``, including deleted ones, which are forgotten after
    ``forget_ms``. Raises ConfigError for an invalid URL."""

    scripts = ("share_names",)

    def __init__(self, redis_url: RedisServerAt, max_names: int, forget_ms: int) -> None:
        super().__init__(redis_url)
        self._bounds = (max_names, forget_ms)

    async def share(self, known: bytes, brought: Sequence[tuple[str, StampedValue]]) -> SharedAnswer:
        """Write the values ``brought``; return all values, unless their version in Redis is ``known``. Raises
        Unavailable if Redis does not answer in time; the values may have been written nevertheless."""
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
