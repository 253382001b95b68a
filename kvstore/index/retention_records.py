"""The record of a KV node's retentions in Redis, for the node's next life.

The node that holds them writes it, and it is never the authority: a node without its record has none until somebody
retains again, and a Redis without the record gets it again while the node lives. It names chains by hashes, so it tells
nothing of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from pillion.kvstore.hashing import HASH_BYTES
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import RedisLink, ScriptCall, as_bytes
from pillion.kvstore.index.redis_url import RedisServerAt

RECORD_DEADLINE_MS = 500
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class RetentionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One retention; see :class:`pillion.kvstore.ledger.records.RetentionWish`. ``until_ms`` is Unix time."""

    owner: str
    name: str
    tail_hash: Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    blocks: _Number
    until_ms: _Number
    tokens: _Number = 0
    model: str = ""
    ephemeral: bool = False


class RetentionRecords:
    """The record of the node ``node_id``. Raises ConfigError for a bad URL. Its calls raise Unavailable where Redis
    does not answer in time, or refuses."""

    def __init__(self, redis_url: RedisServerAt, node_id: str) -> None:
        self._link = RedisLink(redis_url, "retentions")
        self._key = keys.retentions_of(node_id)

    async def read(self) -> list[RetentionRecord]:
        """Returns what an earlier life has written; nothing where that is no record."""
        return await self._link.call(
            "retentions", ScriptCall([self._key], [0, b""]), _read, deadline_ms=RECORD_DEADLINE_MS
        )

    async def write(self, records: Sequence[RetentionRecord], ttl_ms: int) -> None:
        """Writes all retentions of the node, for ``ttl_ms`` from now."""
        call = ScriptCall([self._key], [max(1, ttl_ms), msgspec.msgpack.encode(records)])
        await self._link.call("retentions", call, as_bytes, deadline_ms=RECORD_DEADLINE_MS)

    async def aclose(self) -> None:
        """Closes the connections to Redis."""
        await self._link.aclose()


def _read(raw: object) -> list[RetentionRecord]:
    text = as_bytes(raw)
    try:
        return msgspec.msgpack.decode(text, type=list[RetentionRecord]) if text else []
    except msgspec.DecodeError:
        # Another version's, or somebody else's: pins lapse, and nothing else depends on it.
        return []
