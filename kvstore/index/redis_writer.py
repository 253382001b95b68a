"""A KV node's writes to the index: its own entries, and sweeps of dead nodes' entries.

    announce   adds and removes the node's own entry; removes its entries of earlier boots at these blocks
    sweep      reads some buckets -> reads the table of live nodes -> removes all other entries from these buckets

The order of a sweep matters. A node registers before it announces, so an entry that was read first, and whose node is
missing from a table read later, is void. Between reading the table and removing entries is one round trip; a node that
reappears with its old boot epoch in that moment may lose a few hints, no more (I3).
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import RedisScripts, ScriptCall, as_bytes
from pillion.kvstore.ledger.records import IndexEvent

ANNOUNCE_DEADLINE_MS = 2000
SWEEP_FIELDS = 512
GENERATION_BYTES = 8


@dataclass(frozen=True, slots=True)
class AnnounceResult:
    """Generation of each group that took events, and the events of shards that did not answer. A changed generation
    means that the group's buckets were lost."""

    generations: dict[bytes, bytes]
    unreported: list[IndexEvent]


@dataclass(frozen=True, slots=True)
class SweepPlace:
    """Position of a sweep: group 0 .. GROUPS - 1, bucket in the group, Redis's cursor in that bucket. A sweep handles a
    whole small group, so that it soon detects a shard that lost its memory."""

    group: int = 0
    bucket: int = 0
    cursor: bytes = b"0"


class IndexWriter(RedisScripts):
    """A KV node's writes to the index. Calls raise Unavailable when Redis does not answer."""

    scripts = ("announce", "sweep")

    async def announce(self, entry: bytes, events: Sequence[IndexEvent]) -> AnnounceResult:
        """Add and remove ``entry`` (number and boot epoch, 8 bytes) at blocks. A block has at most one event."""
        if not events:
            return AnnounceResult({}, [])
        by_group = keys.updates_by_group(events, cluster=self._link.cluster)
        generations = await self._announce(entry, by_group)
        silent = by_group.keys() - generations.keys()
        unreported = [event for event in events if silent and keys.group_of(keys.bucket(event.segment)) in silent]
        return AnnounceResult(generations, unreported)

    async def generations(self, groups: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the generations of some groups, as far as their shards answer."""
        return await self._announce(bytes(keys.ENTRY_BYTES), {group: {} for group in groups}) if groups else {}

    async def _announce(self, entry: bytes, groups: dict[bytes, dict[bytes, keys.BucketUpdates]]) -> dict[bytes, bytes]:
        calls = []
        for group, buckets in groups.items():
            args: list[bytes | int] = [entry, secrets.token_bytes(GENERATION_BYTES), keys.MAX_ENTRIES_PER_BLOCK]
            for fields in buckets.values():
                args += (bytes(fields.came), bytes(fields.went))
            calls.append(ScriptCall([keys.generation(group), *buckets], args))
        answers = await self._link.call_each("announce", calls, as_bytes, deadline_ms=ANNOUNCE_DEADLINE_MS)
        return {group: found for group, found in zip(groups, answers, strict=True) if found is not None}

    async def sweep(
        self, at: SweepPlace, live: Callable[[], Awaitable[frozenset[bytes]]]
    ) -> tuple[SweepPlace, dict[bytes, bytes]]:
        """Remove void entries from some buckets; return the position to continue at, and the visited group's
        generation.

        ``live`` reads the live entries; it is called after the buckets were read, if they have any.
        """
        name = keys.group_name(at.group)
        group = name if self._link.cluster else b""
        buckets = [keys.generation(group), *keys.group_buckets(name, at.bucket)]
        fresh = secrets.token_bytes(GENERATION_BYTES)

        async def walk(void: bytes) -> _Walk:
            call = ScriptCall(buckets, [fresh, void, at.cursor, SWEEP_FIELDS])
            return await self._link.call("sweep", call, _Walk.read, deadline_ms=ANNOUNCE_DEADLINE_MS)

        walked = await walk(b"")
        if walked.seen and (void := walked.seen - await live()):
            walked = await walk(b"".join(sorted(void)))
        return _next_place(at, walked), {group: walked.generation}


@dataclass(frozen=True, slots=True)
class _Walk:
    generation: bytes
    done: int
    cursor: bytes
    seen: frozenset[bytes]

    @classmethod
    def read(cls, raw: Any) -> _Walk:
        generation, done, cursor, seen = raw
        width = keys.ENTRY_BYTES
        entries = frozenset(seen[at : at + width] for at in range(0, len(seen), width))
        return cls(as_bytes(generation), int(done), as_bytes(cursor), entries)


def _next_place(at: SweepPlace, walked: _Walk) -> SweepPlace:
    """Return the position after the walk, or the next group."""
    bucket = at.bucket + max(0, walked.done)
    if bucket < keys.BUCKETS_PER_GROUP:
        return SweepPlace(at.group, bucket, walked.cursor)
    return SweepPlace((at.group + 1) % keys.GROUPS)
