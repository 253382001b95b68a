"""The index of blocks and the registry of parts, in Redis. Both are hints: losing them costs prefix hits, not tokens.

    gateway --Index.longest_prefix--> buckets of the chain's segments --> entries --the table of nodes--> node ids
    every part --Registry.beat--> who lives            KV node --IndexWriter--> what it has
    (pillion.kvstore.index.redis_writer)

An *entry* is node number and boot epoch, 4 bytes each: whoever does not stand in the table of nodes with exactly this
entry is dead or has restarted, and the entry is void without a scan. A look-up meets void entries and drops them with
the table, which it keeps for a moment; nodes sweep them out bit by bit. Time is Redis's own (TIME), so clocks of
machines do not matter. Keys: kvstore/index/redis_keys.py and docs/index.md. Redis >= 6.2: one server, Sentinel or
Cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pillion.errors import Unavailable
from pillion.kvstore.hashing import HASH_BYTES, SEGMENT_BLOCKS
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.hot_prefixes import HotPrefixes
from pillion.kvstore.index.redis_link import RedisLink, ScriptCall, as_bytes
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.index")

# A look-up that takes longer than this is worth less than the prefill it saves.
LOOKUP_DEADLINE_MS = 250
# Of that, kept for the second round of a look-up in a Cluster: a shard that hangs uses up the first.
SECOND_ROUND_MS = 100
REGISTRY_DEADLINE_MS = 1000
# How long a look-up trusts the table of nodes, and how often it asks at most about an entry that is not in it.
NODES_MAX_AGE_MS = 1000
NODES_MIN_AGE_MS = 50
# Nodes that one look-up names.
MAX_ENTRIES_PER_LOOKUP = 64
# Lost parts that one heartbeat takes out of the registry.
MAX_FORGOTTEN_PARTS = 100
KVNODE = "kvnode"

_REGISTRY_KEYS = (keys.PARTS, keys.EXPIRY, keys.NUMBERS, keys.NODES)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first ``blocks`` blocks of a chain are probably at ``node_id``."""

    node_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat learns.

    Attributes:
        known: the part was registered until this beat; False after a silence longer than its time to live, or when
            Redis has lost its memory.
        node_number: a KV node's number for entries (4 bytes), empty for others.
    """

    known: bool
    node_number: bytes


class NodeTable:
    """Entry -> node id of every KV node that lived when Redis was asked. ``read_s``: then, on this machine's clock."""

    def __init__(self, said: Any = (0,), read_s: float = float("-inf")) -> None:
        now_ms, *rows = said
        self.read_s = read_s
        self._nodes: dict[bytes, tuple[str, float]] = {}
        for node_id, value in zip(rows[::2], rows[1::2], strict=True):
            lost_ms = value[keys.ENTRY_BYTES :]
            if lost_ms.isdigit() and int(lost_ms) > now_ms:
                lost_s = read_s + (int(lost_ms) - now_ms) / 1000
                self._nodes[value[: keys.ENTRY_BYTES]] = (node_id.decode(errors="replace"), lost_s)

    def entries(self) -> frozenset[bytes]:
        """All that are alive."""
        return frozenset(self._nodes)

    def entry(self, node_id: str) -> bytes | None:
        """None for a node that is not alive."""
        return next((entry for entry, (name, _) in self._nodes.items() if name == node_id), None)

    def node_id(self, entry: bytes) -> str | None:
        """None for an entry that is void."""
        found = self._nodes.get(entry)
        return found[0] if found else None

    def doubtful(self, entry: bytes, now: float) -> bool:
        """Whether a newer table may say something else: the entry is new, or its node should have beaten by now."""
        found = self._nodes.get(entry)
        return found is None or found[1] < now


class Index:
    """Gateways ask it. Never raises for Redis's trouble; ``available`` says whether the last call was answered."""

    def __init__(self, redis_url: str) -> None:
        self.available = True
        self._link = RedisLink(redis_url, "lookup", "nodes")
        self._table = NodeTable()
        self._asked_s = float("-inf")
        self._refreshing = asyncio.Lock()
        self._hot = HotPrefixes()

    async def longest_prefix(self, block_hashes: bytes) -> list[PrefixHit]:
        """Longest known prefix of a chain (32 bytes per hash, from its first block) per live node, longest first; []
        when nobody knows. While Redis does not answer, what earlier look-ups found stands in."""
        if not block_hashes:
            return []
        try:
            reached = await self._reached(block_hashes)
        except Unavailable as error:
            if self.available:
                log.warning("going on without the index: %s", error)
            self.available = False
            return _sorted_hits(self._hot.find(block_hashes))
        self.available = True
        hits = _sorted_hits(reached)
        self._hot.remember(block_hashes, ((hit.node_id, hit.blocks) for hit in hits))
        return hits

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._link.aclose()

    # -- inside

    async def _reached(self, block_hashes: bytes) -> dict[str, int]:
        """Node id -> blocks. Raises Unavailable."""
        until_s = time.monotonic() + LOOKUP_DEADLINE_MS / 1000
        if time.monotonic() - self._table.read_s > NODES_MAX_AGE_MS / 1000:
            await self._refresh(NODES_MAX_AGE_MS, until_s)
        ends = await self._ends(block_hashes, until_s)
        now = time.monotonic()
        if any(self._table.doubtful(entry, now) for entry in ends):
            await self._refresh(NODES_MIN_AGE_MS, until_s)
        named = ((self._table.node_id(entry), blocks) for entry, blocks in ends.items())
        return {node_id: blocks for node_id, blocks in named if node_id is not None}

    async def _ends(self, block_hashes: bytes, until_s: float) -> dict[bytes, int]:
        """Entry -> blocks. One server is asked once. A Cluster is asked about segments, in two rounds: some, evenly
        spread, and then those between two of them where somebody's chain ends."""
        pieces = list(_pieces(block_hashes, SEGMENT_BLOCKS if self._link.cluster else 0))
        reached: dict[int, dict[bytes, int]] = {}

        async def ask(numbers: Sequence[int], until_s: float) -> None:
            if not numbers:
                return
            calls = [pieces[number].call for number in numbers]
            said = await self._link.call_each("lookup", calls, _read_ends, deadline_ms=_left_ms(until_s))
            reached.update((number, answer) for number, answer in zip(numbers, said, strict=True) if answer is not None)

        spread = sorted({*range(0, len(pieces), math.isqrt(len(pieces))), len(pieces) - 1})
        await ask(spread, until_s - (SECOND_ROUND_MS / 1000 if len(pieces) > 1 else 0.0))
        if reached.get(0) == {}:
            return {}
        between = [
            number
            for left, right in pairwise(spread)
            if reached.get(left, {}).keys() - reached.get(right, {}).keys()
            for number in range(left + 1, right)
        ]
        # What is known by now is a hint as well.
        with contextlib.suppress(Unavailable):
            await ask(between, until_s)
        ends: dict[bytes, int] = {}
        for number in sorted(reached):
            ends |= {entry: pieces[number].first_block + blocks for entry, blocks in reached[number].items()}
        return ends

    async def _refresh(self, max_age_ms: int, until_s: float) -> None:
        """Reads the table of nodes if nobody asked for it within ``max_age_ms``. If Redis is silent, the old one
        stands: it may name the dead, and so may any hint."""
        async with self._refreshing:
            now = time.monotonic()
            if now - self._asked_s <= max_age_ms / 1000:
                return
            self._asked_s = now
            call = ScriptCall(_REGISTRY_KEYS, [])
            try:
                self._table = await self._link.call(
                    "nodes", call, lambda said: NodeTable(said, now), deadline_ms=_left_ms(until_s)
                )
            except Unavailable as error:
                log.debug("the table of nodes is not refreshed: %s", error)


class Registry:
    """Who lives. ``ttl_ms``: silence after which a part that beats here counts as lost."""

    def __init__(self, redis_url: str, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self._link = RedisLink(redis_url, "beat", "leave", "components", "nodes")

    async def beat(self, record: ComponentRecord) -> Beat:
        """Registers ``record`` until its time is over. Raises Unavailable when Redis does not answer."""
        epoch = struct.pack(">I", record.boot_epoch) if record.role == KVNODE else b""
        args: list[bytes | str | int] = [
            record.component_id,
            record.to_json(),
            self._ttl_ms,
            epoch,
            MAX_FORGOTTEN_PARTS,
        ]
        call = ScriptCall(_REGISTRY_KEYS, args)
        return await self._link.call("beat", call, _read_beat, deadline_ms=REGISTRY_DEADLINE_MS)

    async def leave(self, component_id: str) -> None:
        """Takes a part out at once. Raises Unavailable when Redis does not answer."""
        await self._link.call(
            "leave", ScriptCall(_REGISTRY_KEYS, [component_id]), int, deadline_ms=REGISTRY_DEADLINE_MS
        )

    async def components(self) -> list[ComponentRecord]:
        """Live parts with their heartbeat's age, by id. Raises Unavailable when Redis does not answer."""
        call = ScriptCall(_REGISTRY_KEYS, [])
        return await self._link.call("components", call, _read_components, deadline_ms=REGISTRY_DEADLINE_MS)

    async def nodes(self) -> NodeTable:
        """Live KV nodes by entry. Raises Unavailable when Redis does not answer."""
        call, now = ScriptCall(_REGISTRY_KEYS, []), time.monotonic()
        return await self._link.call("nodes", call, lambda said: NodeTable(said, now), deadline_ms=REGISTRY_DEADLINE_MS)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._link.aclose()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some whole segments of a chain, and the question about them."""

    first_block: int
    call: ScriptCall


def _pieces(block_hashes: bytes, piece_blocks: int) -> Iterator[_Piece]:
    """In order; one piece with ``piece_blocks`` 0."""
    fields, buckets = keys.chain_fields(block_hashes), keys.chain_buckets(block_hashes)
    blocks = piece_blocks or len(block_hashes) // HASH_BYTES
    per_piece = -(-blocks // SEGMENT_BLOCKS)
    for start in range(0, len(fields) // keys.FIELD_BYTES, blocks):
        piece = fields[start * keys.FIELD_BYTES : (start + blocks) * keys.FIELD_BYTES]
        first = start // SEGMENT_BLOCKS
        args: list[bytes | int] = [piece, SEGMENT_BLOCKS, MAX_ENTRIES_PER_LOOKUP]
        yield _Piece(start, ScriptCall(buckets[first : first + per_piece], args))


def _left_ms(until_s: float) -> float:
    return max(0.0, until_s - time.monotonic()) * 1000


def _sorted_hits(reached: dict[str, int]) -> list[PrefixHit]:
    hits = [PrefixHit(node_id, blocks) for node_id, blocks in reached.items()]
    return sorted(hits, key=lambda hit: (-hit.blocks, hit.node_id))


def _read_ends(said: Any) -> dict[bytes, int]:
    return {as_bytes(entry): int(blocks) for entry, blocks in zip(said[::2], said[1::2], strict=True)}


def _read_beat(said: Any) -> Beat:
    known, number = said
    return Beat(bool(int(known)), as_bytes(number))


def _read_components(said: Any) -> list[ComponentRecord]:
    now_ms, *rows = said
    records = []
    for row in rows:
        beat_ms, _, text = row.partition(b" ")
        try:
            record = ComponentRecord.from_json(text)
            records.append(replace(record, heartbeat_age_ms=max(0, now_ms - int(beat_ms))))
        except ValueError as error:
            log.warning("dropped a broken part record: %s", error)
    return sorted(records, key=lambda record: record.component_id)
