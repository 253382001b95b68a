"""A KV node's writes to the index: its own entries, and sweeps of dead nodes' entries.

    announce   adds or removes the node's entry at blocks; removes its entries of earlier boots at these blocks
    sweep      reads some buckets -> reads the table of live nodes -> removes entries of other nodes from these buckets

The order of a sweep matters. A node registers before it announces, so an entry is void if its node is missing from a
table that was read later. A node that reappears with its old boot epoch between the reading of the table and the
removal, one round trip, may lose a few hints, but nothing else (I3).
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


@dataclass(frozen=True, slots=True)
class AnnounceResult:
    """Result of an announcement. Buckets are grouped, and each group has a generation that Redis loses with the
    buckets, so a changed one means that they were lost.

    Attributes:
        generations: by group, of the groups whose shards answered.
        unreported: events of shards that did not answer.
    """

    generations: dict[bytes, bytes]
    unreported: list[IndexEvent]


@dataclass(frozen=True, slots=True)
class SweepPlace:
    """Position of a sweep: group 0 .. GROUPS - 1, bucket in the group, Redis's cursor in the bucket. One call can sweep
    a whole small group, so that a shard that lost its memory is detected soon."""

    group: int = 0
    bucket: int = 0
    cursor: bytes = b"0"


class IndexWriter(RedisScripts):
    """Writer of a KV node's entries in the index. Calls raise Unavailable if Redis does not answer."""

    scripts = ("announce", "sweep")

    async def announce(self, entry: bytes, events: Sequence[IndexEvent]) -> AnnounceResult:
        """Add or remove the node's ``entry`` (number and boot epoch, 8 bytes) at the blocks of ``events``, at most one
        event per block."""
        if not events:
            return AnnounceResult({}, [])
        by_group = keys.updates_by_group(events, cluster=self._link.cluster)
        generations = await self._announce(entry, by_group)
        silent = by_group.keys() - generations.keys()
        unreported = [event for event in events if silent and keys.group_of(keys.bucket(event.segment)) in silent]
        return AnnounceResult(generations, unreported)

    async def generations(self, groups: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the generations of these groups, by group, if their shards answer."""
        return await self._announce(bytes(keys.ENTRY_BYTES), {group: {} for group in groups}) if groups else {}

    async def _announce(self, entry: bytes, groups: dict[bytes, dict[bytes, keys.BucketUpdates]]) -> dict[bytes, bytes]:
        calls = []
        for group, buckets in groups.items():
            args: list[bytes | int] = [entry, secrets.token_bytes(8), keys.MAX_ENTRIES_PER_BLOCK]
            for fields in buckets.values():
                args += (bytes(fields.arrived), bytes(fields.evicted))
            calls.append(ScriptCall([keys.generation(group), *buckets], args))
        answers = await self._link.call_each("announce", calls, as_bytes, deadline_ms=ANNOUNCE_DEADLINE_MS)
        return {group: answer for group, answer in zip(groups, answers, strict=True) if answer is not None}

    async def sweep(
        self, at: SweepPlace, live: Callable[[], Awaitable[frozenset[bytes]]]
    ) -> tuple[SweepPlace, dict[bytes, bytes]]:
        """Remove void entries from some buckets, from the position ``at`` on; return the next position, and the
        generation of the group.

        ``live`` returns the entries of live nodes; it is called after the buckets were read, if they have entries.
        """
        name = keys.group_name(at.group)
        group = name if self._link.cluster else b""
        buckets = [keys.generation(group), *keys.group_buckets(name, at.bucket)]
        fresh = secrets.token_bytes(8)

        async def walk(void: bytes) -> _Walk:
            call = ScriptCall(buckets, [fresh, void, at.cursor, SWEEP_FIELDS])
            return await self._link.call("sweep", call, _Walk.read, deadline_ms=ANNOUNCE_DEADLINE_MS)

        walked = await walk(b"")
        if walked.seen and (void := walked.seen - await live()):
            walked = await walk(b"".join(sorted(void)))
        return _next_place(at, walked), {group: walked.generation}


@dataclass(frozen=True, slots=True)
class _Walk:
    """Result of a sweep script: the group's generation, the number of finished buckets, the cursor in the next one, and
    the entries that were read."""

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
    """Return the position after a walk: in the same group, or at the next group's beginning."""
    bucket = at.bucket + max(0, walked.done)
    if bucket < keys.BUCKETS_PER_GROUP:
        return SweepPlace(at.group, bucket, walked.cursor)
    return SweepPlace((at.group + 1) % keys.GROUPS)
