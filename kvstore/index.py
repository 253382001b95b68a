"""The index of blocks and the registry of parts, in Redis. Both are hints: losing them costs prefix hits, not tokens.

All keys, under the prefix ``pillion:``; every change and every question is one script (kvstore/lua), one round trip:

| key          | type   | holds                                                                                     |
|--------------|--------|-------------------------------------------------------------------------------------------|
| generation   | string | random, set by the first heartbeat that finds none: a new one tells that Redis lost it all |
| parts        | hash   | part id -> "beat time in ms, space, PartRecord as JSON"                                   |
| expiry       | zset   | part id, scored by the time in ms at which it counts as lost                              |
| numbers      | hash   | node id -> node number (4 bytes, big-endian); never reused, so that entries can be short  |
| nodes        | hash   | node id -> entry (8 bytes), then the time in ms at which it counts as lost                |
| b:<2 bytes>  | hash   | the blocks whose hash begins with these bytes: first 16 bytes of the hash -> entries      |

An *entry* is node number and boot epoch, 4 bytes each: whoever does not stand in ``nodes`` with exactly this entry is
dead or has restarted, and the entry is void without a scan. Nodes sweep void entries out bit by bit. Time is Redis's
own (TIME), so clocks of machines do not matter. Buckets stay small (a few hundred fields for some ten million blocks),
which Redis keeps in its packed form at about 30 bytes a block; above that, raise ``hash-max-listpack-entries``.
Needs Redis >= 6.2, and one server: keys are computed inside the scripts.
"""

from __future__ import annotations

import logging
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.hashing import HASH_BYTES
from kvstore.redis_link import RedisLink
from pillion.errors import Unavailable
from pillion.wire.registry import PartRecord

log = logging.getLogger("pillion.index")

# A look-up that takes longer than this is worth less than the prefill it saves.
LOOKUP_DEADLINE_MS = 250
REGISTRY_DEADLINE_MS = 1000
ANNOUNCE_DEADLINE_MS = 2000
FIELD_BYTES = 16
KVNODE = "kvnode"


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first ``blocks`` blocks of a chain are probably at ``node_id``."""

    node_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat learns.

    Attributes:
        generation: differs once Redis has lost its memory.
        known: the part was registered until this beat; False after a silence longer than its time to live.
        node_number: a KV node's number for entries (4 bytes), empty for others.
    """

    generation: bytes
    known: bool
    node_number: bytes


class Index:
    """Gateways ask it. Never raises for Redis's trouble; ``available`` says whether the last call was answered."""

    def __init__(self, redis_url: str) -> None:
        self.available = True
        self._link = RedisLink(redis_url, "lookup")

    async def longest_prefix(self, block_hashes: bytes) -> list[PrefixHit]:
        """Longest known prefix of a chain (32 bytes per hash) per live node, longest first; [] when nobody knows."""
        if not block_hashes:
            return []
        try:
            answer = await self._link.call("lookup", packed_fields(block_hashes), deadline_ms=LOOKUP_DEADLINE_MS)
        except Unavailable as error:
            if self.available:
                log.warning("going on without the index: %s", error)
            self.available = False
            return []
        self.available = True
        hits = [PrefixHit(node_id.decode(), blocks) for node_id, blocks in zip(answer[::2], answer[1::2], strict=True)]
        return sorted(hits, key=lambda hit: (-hit.blocks, hit.node_id))

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._link.aclose()


class Registry:
    """Who lives. ``ttl_ms``: silence after which a part that beats here counts as lost."""

    def __init__(self, redis_url: str, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self._link = RedisLink(redis_url, "beat", "leave", "parts")

    async def beat(self, record: PartRecord) -> Beat:
        """Registers ``record`` until its time is over. Raises Unavailable when Redis does not answer."""
        epoch = struct.pack(">I", record.boot_epoch) if record.role == KVNODE else b""
        generation, known, number = await self._link.call(
            "beat",
            record.part_id,
            record.to_json(),
            self._ttl_ms,
            secrets.token_bytes(8),
            epoch,
            deadline_ms=REGISTRY_DEADLINE_MS,
        )
        return Beat(generation, bool(known), number)

    async def leave(self, part_id: str) -> None:
        """Takes a part out at once. Raises Unavailable when Redis does not answer."""
        await self._link.call("leave", part_id, deadline_ms=REGISTRY_DEADLINE_MS)

    async def parts(self) -> list[PartRecord]:
        """Live parts with their heartbeat's age, by id. Raises Unavailable when Redis does not answer."""
        now_ms, *rows = await self._link.call("parts", deadline_ms=REGISTRY_DEADLINE_MS)
        records = []
        for row in rows:
            beat_ms, _, text = row.partition(b" ")
            try:
                record = PartRecord.from_json(text)
            except ValueError as error:
                log.warning("dropped a broken part record: %s", error)
                continue
            records.append(replace(record, heartbeat_age_ms=max(0, now_ms - int(beat_ms))))
        return sorted(records, key=lambda record: record.part_id)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._link.aclose()


class IndexWriter:
    """A KV node's side of the index: its entries, and sweeping those of the dead."""

    def __init__(self, redis_url: str) -> None:
        self._link = RedisLink(redis_url, "announce", "sweep")

    async def announce(self, entry: bytes, came: Sequence[bytes], went: Sequence[bytes]) -> bytes:
        """Adds and removes ``entry`` at block hashes; returns the generation. Raises Unavailable."""
        fields = [b"".join(block_hash[:FIELD_BYTES] for block_hash in hashes) for hashes in (came, went)]
        generation: bytes = await self._link.call("announce", entry, *fields, deadline_ms=ANNOUNCE_DEADLINE_MS)
        return generation

    async def sweep(self, first_bucket: int, buckets: int) -> None:
        """Drops void entries from some buckets. Raises Unavailable."""
        await self._link.call("sweep", first_bucket, buckets, deadline_ms=ANNOUNCE_DEADLINE_MS)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._link.aclose()


def packed_fields(block_hashes: bytes) -> bytes:
    """The leading half of each hash."""
    starts = range(0, len(block_hashes) - HASH_BYTES + 1, HASH_BYTES)
    return b"".join([block_hashes[start : start + FIELD_BYTES] for start in starts])
