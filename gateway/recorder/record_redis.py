"""Bundles in the Redis of --redis-url, shared by all gateways of a cluster, within limits. All functions block.

    pillion:{records}:bundles    hash: id -> bundle; "" -> total bytes
    pillion:{records}:times      zset: "ID BYTES" by the time of writing

They are all in one shard of a Redis Cluster. Flushing Redis loses only the bundles.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pillion.errors import ConfigError
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import Argument, RedisScripts, ScriptCall, as_bytes

RECORDS_DEADLINE_MS = 2000
# Redis serves no other command during a transfer. A prompt of a million tokens has about 7 MB.
MAX_REDIS_BUNDLE_BYTES = 8 * 2**20
# Bundles that a script call evicts or lists.
BUNDLES_AT_ONCE = 1000
T = TypeVar("T")


class RecordRedis(RedisScripts):
    """Bundles in Redis: at most ``max_bytes`` in total, none older than ``keep_s`` seconds; both 0 for a reader.
    ``runner`` runs the calls, one at a time. Methods raise Unavailable if Redis does not answer."""

    scripts = ("record_keep", "record_read")

    def __init__(self, runner: asyncio.Runner, redis_url: str, max_bytes: int = 0, keep_s: float = 0.0) -> None:
        super().__init__(redis_url)
        self._runner = runner
        self._max_bytes = max_bytes
        self._keep_ms = round(keep_s * 1000)

    def store(self, bundle_id: str, raw: bytes) -> None:
        """Write an encoded bundle. Raises ConfigError if it is too large."""
        if len(raw) > (max_bytes := min(self._max_bytes, MAX_REDIS_BUNDLE_BYTES)):
            raise ConfigError(
                f"the bundle {bundle_id} has {len(raw)} bytes, more than the {max_bytes} allowed in Redis"
            )
        while not self._call("record_keep", int, bundle_id, raw, self._max_bytes, self._keep_ms, BUNDLES_AT_ONCE):
            pass

    def listed(self) -> Iterator[tuple[str, int]]:
        """Yield the ids and sizes in bytes of all bundles, newest first."""
        for first in itertools.count(0, BUNDLES_AT_ONCE):
            page = self._call("record_read", _rows, "", first, first + BUNDLES_AT_ONCE - 1)
            yield from page
            if len(page) < BUNDLES_AT_ONCE:
                return

    def read(self, bundle_id: str) -> bytes:
        """Return an encoded bundle; b"" if it does not exist any more."""
        return self._call("record_read", as_bytes, bundle_id)

    def _call(self, script: str, read: Callable[[Any], T], *args: Argument) -> T:
        call = ScriptCall(keys.RECORDS, args)
        return self._runner.run(self._link.call(script, call, read, deadline_ms=RECORDS_DEADLINE_MS))


def _rows(raw: Any) -> list[tuple[str, int]]:
    """Parse lines of "ID BYTES". Raises ValueError."""
    rows = [line.decode().split(" ") for line in raw]
    return [(bundle_id, int(size)) for bundle_id, size in rows]
