"""Reader's side of the index: how much of a chain of blocks each live KV node has.

    gateway --Index.longest_prefix--> buckets of the chain's segments --> entries --NodeTable--> node ids
            --Index.longest_state--> the same, then the buckets of the first pages of states after its blocks

The index is a hint: losing it costs prefix hits, not tokens. Entries of a restarted or dead node are void without a
scan (:mod:`pillion.kvstore.index.registry`): look-ups drop them by the cached table of nodes, and KV nodes sweep them
gradually. Keys: kvstore/index/redis_keys.py and docs/redis.md. Redis >= 6.2: one server, Sentinel or Cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pillion.errors import Unavailable
from pillion.kvstore.hashing import HASH_BYTES, SEGMENT_BLOCKS, split_hashes, state_page
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import RedisScripts, ScriptCall, as_bytes
from pillion.kvstore.index.redis_url import RedisServerAt
from pillion.kvstore.index.registry import REGISTRY_KEYS, NodeTable

log = logging.getLogger("pillion.index")

# A longer look-up costs more than the prefill it saves.
LOOKUP_DEADLINE_MS = 250
# Part of it reserved for the second round on a Cluster, since a hung shard can use up the first.
SECOND_ROUND_MS = 100
# Max age of the cached table of nodes, and min age before it is read again for an unknown entry.
NODES_MAX_AGE_MS = 1000
NODES_MIN_AGE_MS = 50
MAX_ENTRIES_PER_LOOKUP = 64
# Max entries of HotPrefixes, some 250 bytes each, and nodes per entry.
MAX_HOT_ENTRIES, MAX_HOT_NODES = 16_384, 4


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A node that probably has the first ``blocks`` blocks of a chain."""

    node_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Hits of a chain, longest first. In a look-up of states, ``known_blocks`` is the longest prefix that a live node
    has, whether or not a state follows."""

    hits: list[PrefixHit]
    known_blocks: int = 0


class HotPrefixes:
    """Bounded cache of earlier look-ups, for outages of Redis; LRU. Sans-IO, hints only (I3).

    A hit of n blocks is stored under the hashes of blocks 1, 2, 4, 8 ... and n of its chain. So a prompt that shares a
    prefix with an earlier one finds at least half of the shared prefix. A hit that ends with a state is useless for
    shorter prefixes, so it is stored only under its last block.
    """

    def __init__(self, max_entries: int = MAX_HOT_ENTRIES) -> None:
        self._max_entries = max_entries
        self._nodes: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def remember(self, block_hashes: bytes, hits: Iterable[tuple[str, int]], *, states: bool = False) -> None:
        """Remember the index's answer for a chain (32 bytes per hash): (node id, leading blocks), best first.
        ``states``: the hits end with a state, so shorter prefixes of them are useless and not remembered."""
        for node_id, blocks in list(hits)[:MAX_HOT_NODES][::-1]:
            length = blocks if states else 1
            while length < blocks:
                self._add(_last_hash(block_hashes, length), node_id)
                length *= 2
            self._add(_last_hash(block_hashes, blocks), node_id)
        while len(self._nodes) > self._max_entries:
            self._nodes.popitem(last=False)

    def find(self, block_hashes: bytes) -> dict[str, int]:
        """Return the leading blocks of a chain that nodes probably have, by node id."""
        hits: dict[str, int] = {}
        for blocks in range(len(block_hashes) // HASH_BYTES, 0, -1):
            last_hash = _last_hash(block_hashes, blocks)
            if last_hash in self._nodes:
                self._nodes.move_to_end(last_hash)
                for node_id in self._nodes[last_hash]:
                    hits.setdefault(node_id, blocks)
        return hits

    def _add(self, last_hash: bytes, node_id: str) -> None:
        others = (other for other in self._nodes.get(last_hash, ()) if other != node_id)
        self._nodes[last_hash] = (node_id, *others)[:MAX_HOT_NODES]
        self._nodes.move_to_end(last_hash)


class Index(RedisScripts):
    """Reader of the index. Look-ups do not raise if Redis fails; ``available`` is True if the last one was answered."""

    scripts = ("lookup", "states", "nodes")

    def __init__(self, redis_url: RedisServerAt) -> None:
        super().__init__(redis_url)
        self.available = True
        self._table = NodeTable()
        self._asked_s = float("-inf")
        self._refreshing = asyncio.Lock()
        self._hot = HotPrefixes()

    async def longest_prefix(self, block_hashes: bytes) -> list[PrefixHit]:
        """Return each live node's longest prefix of a chain (32 bytes per hash), longest first; by earlier look-ups if
        Redis does not answer."""
        return (await self._longest(block_hashes, states=False)).hits

    async def longest_state(self, block_hashes: bytes) -> PrefixHits:
        """Like :meth:`longest_prefix`, but return prefixes that are followed by a state. A state is looked up by its
        first page, which is evicted last."""
        return await self._longest(block_hashes, states=True)

    async def _longest(self, block_hashes: bytes, *, states: bool) -> PrefixHits:
        if not block_hashes:
            return PrefixHits([])
        try:
            found = await self._query(block_hashes, states)
        except Unavailable as error:
            if self.available:
                log.warning("continuing without the index: %s", error)
            self.available = False
            return PrefixHits(_sorted_hits(self._hot.find(block_hashes)))
        self.available = True
        self._hot.remember(block_hashes, ((hit.node_id, hit.blocks) for hit in found.hits), states=states)
        return found

    async def _query(self, block_hashes: bytes, states: bool) -> PrefixHits:
        """Query Redis for the leading blocks of a chain on each node; with ``states``, up to its last state. Raises
        Unavailable."""
        until_s = asyncio.get_running_loop().time() + LOOKUP_DEADLINE_MS / 1000
        if asyncio.get_running_loop().time() - self._table.read_s > NODES_MAX_AGE_MS / 1000:
            await self._refresh(NODES_MAX_AGE_MS, until_s)
        ends = await self._ends(block_hashes, until_s)
        reached = await self._states(block_hashes, ends, until_s) if states and ends else ends
        now = asyncio.get_running_loop().time()
        if any(self._table.doubtful(entry, now) for entry in ends):
            await self._refresh(NODES_MIN_AGE_MS, until_s)
        named = ((self._table.node_id(entry), blocks) for entry, blocks in reached.items())
        hits = _sorted_hits({node_id: blocks for node_id, blocks in named if node_id is not None})
        live = (blocks for entry, blocks in ends.items() if self._table.node_id(entry) is not None)
        return PrefixHits(hits, max(live, default=0))

    async def _ends(self, block_hashes: bytes, until_s: float) -> dict[bytes, int]:
        """Return, for each node entry (number and boot epoch), how many leading blocks of the chain the node has."""
        if self._link.cluster:
            return await self._ends_of_segments(block_hashes, until_s)
        call = _look_up(keys.chain_buckets(block_hashes), keys.chain_fields(block_hashes))
        return await self._link.call("lookup", call, _read_ends, deadline_ms=_left_ms(until_s))

    async def _ends_of_segments(self, block_hashes: bytes, until_s: float) -> dict[bytes, int]:
        """Query a Cluster for :meth:`_ends` in two rounds: for evenly spaced segments of the chain, then for the
        segments between two of these if a node's prefix ends there."""
        buckets, fields = keys.chain_buckets(block_hashes), keys.chain_fields(block_hashes)
        width = SEGMENT_BLOCKS * keys.FIELD_BYTES
        parts = [_look_up([key], fields[at * width : (at + 1) * width]) for at, key in enumerate(buckets)]
        reached: dict[int, dict[bytes, int]] = {}

        async def ask(numbers: Sequence[int], until_s: float) -> None:
            if not numbers:
                return
            calls = [parts[number] for number in numbers]
            ends = await self._link.call_each("lookup", calls, _read_ends, deadline_ms=_left_ms(until_s))
            reached.update((number, end) for number, end in zip(numbers, ends, strict=True) if end is not None)

        spread = sorted({*range(0, len(parts), math.isqrt(len(parts))), len(parts) - 1})
        await ask(spread, until_s - (SECOND_ROUND_MS / 1000 if len(parts) > 1 else 0.0))
        if reached.get(0) == {}:
            return {}
        between = [
            number
            for left, right in pairwise(spread)
            if reached.get(left, {}).keys() - reached.get(right, {}).keys()
            for number in range(left + 1, right)
        ]
        with contextlib.suppress(Unavailable):
            await ask(between, until_s)
        ends: dict[bytes, int] = {}
        for number in sorted(reached):
            ends |= {entry: number * SEGMENT_BLOCKS + blocks for entry, blocks in reached[number].items()}
        return ends

    async def _states(self, block_hashes: bytes, ends: dict[bytes, int], until_s: float) -> dict[bytes, int]:
        """Return, by node entry, the number of blocks before the node's last state on the chain, at most ``ends``. A
        Cluster is queried for each bucket separately."""
        runs = list(_state_runs(block_hashes[: max(ends.values()) * HASH_BYTES]))
        parts = [[run] for run in runs] if self._link.cluster else [runs]
        calls = [
            ScriptCall(
                [run.bucket for run in part],
                [b"".join(run.fields for run in part), MAX_ENTRIES_PER_LOOKUP, *(run.length for run in part)],
            )
            for part in parts
        ]
        answers = await self._link.call_each("states", calls, _read_ends, deadline_ms=_left_ms(until_s))
        found: dict[bytes, int] = {}
        for part, answer in zip(parts, answers, strict=True):
            found |= {entry: part[0].first_block + blocks for entry, blocks in (answer or {}).items()}
        return {entry: blocks for entry, blocks in found.items() if blocks <= ends.get(entry, 0)}

    async def _refresh(self, max_age_ms: int, until_s: float) -> None:
        """Read the table of nodes, unless that was tried within ``max_age_ms``. On failure, the old table is kept."""
        async with self._refreshing:
            now = asyncio.get_running_loop().time()
            if now - self._asked_s <= max_age_ms / 1000:
                return
            self._asked_s = now
            call = ScriptCall(REGISTRY_KEYS, [])
            try:
                self._table = await self._link.call(
                    "nodes", call, lambda raw: NodeTable(raw, now), deadline_ms=_left_ms(until_s)
                )
            except Unavailable as error:
                log.debug("the table of nodes is not refreshed: %s", error)


def _look_up(buckets: list[bytes], fields: bytes) -> ScriptCall:
    """Return the call that looks up the blocks of whole segments, given their buckets and fields."""
    return ScriptCall(buckets, [fields, SEGMENT_BLOCKS, MAX_ENTRIES_PER_LOOKUP])


@dataclass(frozen=True, slots=True)
class _StateRun:
    """Consecutive blocks of a chain, from ``first_block`` on, whose states' first pages are in the same bucket;
    ``fields`` are the concatenated fields of these pages."""

    first_block: int
    bucket: bytes
    fields: bytes

    @property
    def length(self) -> int:
        return len(self.fields) // keys.FIELD_BYTES


def _state_runs(block_hashes: bytes) -> Iterator[_StateRun]:
    """Yield the runs of a chain, in order. A state's page follows its block in the chain, so after a segment's last
    block it is in another segment."""
    pages = [state_page(block, 0) for block in split_hashes(block_hashes)]
    for number, bucket_key in enumerate(keys.chain_buckets(block_hashes)):
        first = number * SEGMENT_BLOCKS
        within = pages[first : first + SEGMENT_BLOCKS - 1]
        yield _StateRun(first, bucket_key, b"".join(page[: keys.FIELD_BYTES] for page in within))
        for page in pages[first + SEGMENT_BLOCKS - 1 : first + SEGMENT_BLOCKS]:
            yield _StateRun(first + SEGMENT_BLOCKS - 1, keys.bucket(page), page[: keys.FIELD_BYTES])


def _left_ms(until_s: float) -> float:
    return max(0.0, until_s - asyncio.get_running_loop().time()) * 1000


def _sorted_hits(reached: dict[str, int]) -> list[PrefixHit]:
    hits = [PrefixHit(node_id, blocks) for node_id, blocks in reached.items()]
    return sorted(hits, key=lambda hit: (-hit.blocks, hit.node_id))


def _read_ends(raw: Any) -> dict[bytes, int]:
    return {as_bytes(entry): int(blocks) for entry, blocks in zip(raw[::2], raw[1::2], strict=True)}


def _last_hash(block_hashes: bytes, blocks: int) -> bytes:
    """Return the hash of the last of the first ``blocks`` blocks."""
    return block_hashes[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES]
