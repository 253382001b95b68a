"""Keeps the record of a KV node's prefix pins in Redis, for the node's next life.

The node that holds them writes it, and it is never the authority: a node without its record has none until somebody
pins again, and a Redis without the record gets it again while the node lives. It names chains by hashes, so it tells
nothing of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from pillion.kvstore.hashing import HASH_BYTES
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import RedisScripts, ScriptCall, as_bytes
from pillion.kvstore.index.redis_url import RedisServerAt

RECORD_DEADLINE_MS = 500
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class PrefixPinRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Records one prefix pin, a :class:`pillion.kvstore.ledger.pin_table.PrefixPinWish`. ``until_ms`` is Unix
    time."""

    owner: str
    name: str
    last_hash: Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    blocks: _Number
    until_ms: _Number
    tokens: _Number = 0
    model: str = ""
    ephemeral: bool = False


class PrefixPinRecords(RedisScripts):
    """Reads and writes the record of the node ``node_id``. Raises ConfigError for a bad URL. Its calls raise
    Unavailable where Redis does not answer in time, or refuses."""

    scripts = ("prefix_pins",)

    def __init__(self, redis_url: RedisServerAt, node_id: str) -> None:
        super().__init__(redis_url)
        self._key = keys.prefix_pins_of(node_id)

    async def read(self) -> list[PrefixPinRecord]:
        """Returns the pins that an earlier life has written; nothing where there is no record that can be read."""
        return await self._link.call(
            "prefix_pins", ScriptCall([self._key], [0, b""]), _read, deadline_ms=RECORD_DEADLINE_MS
        )

    async def write(self, records: Sequence[PrefixPinRecord], ttl_ms: int) -> None:
        """Writes all prefix pins of the node, for ``ttl_ms`` from now."""
        call = ScriptCall([self._key], [max(1, ttl_ms), msgspec.msgpack.encode(records)])
        await self._link.call("prefix_pins", call, as_bytes, deadline_ms=RECORD_DEADLINE_MS)


def _read(raw: object) -> list[PrefixPinRecord]:
    text = as_bytes(raw)
    try:
        return msgspec.msgpack.decode(text, type=list[PrefixPinRecord]) if text else []
    except msgspec.DecodeError:
        # Another version or program wrote the record: then the pins lapse, and nothing else depends on them.
        return []
