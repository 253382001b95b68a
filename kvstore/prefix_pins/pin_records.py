"""Record of a KV node's prefix pins in Redis, for a restarted node.

The node that has the pins writes the record, which is never the authority. A node without a record starts without pins;
while the node lives, it writes its record again to an emptied Redis. Chains are stored as hashes, which reveal nothing
of prompts.
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
    """One prefix pin in the record, with the fields of :class:`pillion.kvstore.ledger.pin_table.PrefixPinRequest`, but
    ``until_ms`` is Unix time."""

    owner: str
    name: str
    last_hash: Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    blocks: _Number
    until_ms: _Number
    tokens: _Number = 0
    model: str = ""
    ephemeral: bool = False


class PrefixPinRecords(RedisScripts):
    """Record of the node ``node_id``. Raises ConfigError for a bad URL. Calls raise Unavailable if Redis does not
    answer in time, or refuses."""

    scripts = ("prefix_pins",)

    def __init__(self, redis_url: RedisServerAt, node_id: str) -> None:
        super().__init__(redis_url)
        self._key = keys.prefix_pins_key(node_id)

    async def read(self) -> list[PrefixPinRecord]:
        """Return the pins of the node's previous process; empty if there is no readable record."""
        return await self._link.call(
            "prefix_pins", ScriptCall([self._key], [0, b""]), _read, deadline_ms=RECORD_DEADLINE_MS
        )

    async def write(self, records: Sequence[PrefixPinRecord], ttl_ms: int) -> None:
        """Write all prefix pins of the node, to expire after ``ttl_ms``."""
        call = ScriptCall([self._key], [max(1, ttl_ms), msgspec.msgpack.encode(records)])
        await self._link.call("prefix_pins", call, as_bytes, deadline_ms=RECORD_DEADLINE_MS)


def _read(raw: object) -> list[PrefixPinRecord]:
    text = as_bytes(raw)
    try:
        return msgspec.msgpack.decode(text, type=list[PrefixPinRecord]) if text else []
    except msgspec.DecodeError:
        # Written by another version or program: drop its pins.
        return []
