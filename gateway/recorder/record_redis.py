"""Keeps bundles in the Redis of --redis-url, within bounds: all gateways of a cluster have it. All functions block.

    pillion:{records}:bundles    hash: id -> bundle; "" -> the bytes of all
    pillion:{records}:times      zset: "ID BYTES" by the time of writing

One shard of a Redis Cluster has all of them. An emptied Redis has lost its bundles, and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pillion.errors import ConfigError
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import Argument, RedisScripts, ScriptCall, as_bytes

# No stream waits for this.
RECORDS_DEADLINE_MS = 2000
# Redis serves nobody else while it takes or gives a bundle. A prompt of a million tokens has some 7 MB.
MAX_REDIS_BUNDLE_BYTES = 8 * 2**20
# For one bundle it removes so many at a time, and it lists so many.
BUNDLES_AT_ONCE = 1000
T = TypeVar("T")


class RecordRedis(RedisScripts):
    """Has the bundles in Redis, at most ``max_bytes`` of them, none older than ``keep_s`` seconds; a reader needs
    neither bound. A ``runner`` runs the calls, one at a time. Methods raise Unavailable where Redis does not answer."""

    scripts = ("record_keep", "record_read")

    def __init__(self, runner: asyncio.Runner, redis_url: str, max_bytes: int = 0, keep_s: float = 0.0) -> None:
        super().__init__(redis_url)
        self._runner = runner
        self._max_bytes = max_bytes
        self._keep_ms = round(keep_s * 1000)

    def keep(self, bundle_id: str, raw: bytes) -> None:
        """Writes an encoded bundle. Raises ConfigError for one that is too large."""
        if len(raw) > (most := min(self._max_bytes, MAX_REDIS_BUNDLE_BYTES)):
            raise ConfigError(f"the bundle {bundle_id} has {len(raw)} bytes, more than the {most} that Redis may get")
        while not self._call("record_keep", int, bundle_id, raw, self._max_bytes, self._keep_ms, BUNDLES_AT_ONCE):
            pass

    def listed(self) -> Iterator[tuple[str, int]]:
        """Yields the ids of all bundles and how many bytes they have, the newest first."""
        for first in itertools.count(0, BUNDLES_AT_ONCE):
            page = self._call("record_read", _rows, "", first, first + BUNDLES_AT_ONCE - 1)
            yield from page
            if len(page) < BUNDLES_AT_ONCE:
                return

    def read(self, bundle_id: str) -> bytes:
        """Returns an encoded bundle; b"" for one that is not there any more."""
        return self._call("record_read", as_bytes, bundle_id)

    def _call(self, script: str, read: Callable[[Any], T], *args: Argument) -> T:
        call = ScriptCall(keys.RECORDS, args)
        return self._runner.run(self._link.call(script, call, read, deadline_ms=RECORDS_DEADLINE_MS))


def _rows(raw: Any) -> list[tuple[str, int]]:
    """Reads lines of "ID BYTES". Raises ValueError."""
    rows = [line.decode().split(" ") for line in raw]
    return [(bundle_id, int(size)) for bundle_id, size in rows]
