"""Announcement of a node's blocks to the index: a queue of updates, and the task that sends them.

    events --push--> AnnounceQueue --take--> Redis
                      ^    ^   |
    all blocks -------+    +---+ put back if Redis does not answer

Updates are sent at once. All blocks are announced again, at a limited rate and after the updates: when Redis has lost
its data (the generation changed); when the node's record had expired, so that other nodes may have swept its entries;
and every REPEAT_S, since a Redis short of memory, or a promoted replica, loses entries silently. Such a repetition
resumes after an outage of Redis. If the queue overflows, the node drops its updates and changes its boot epoch, which
voids all its entries without a scan, and all blocks are announced again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from pillion.errors import Unavailable
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_url import RedisServerAt
from pillion.kvstore.index.redis_writer import IndexWriter, SweepPlace
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.ledger.records import IndexEvent
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.kvnode")

MAX_PENDING_BLOCKS = 262_144
# Max blocks per announcement, which takes less than a millisecond of Redis's time.
BATCH_BLOCKS = 256
RETRY_S = 0.5
# Rate limits of a repetition: blocks per second, and the share of time spent waiting for Redis. Look-ups must stay fast
# while a thousand nodes repeat at once.
REPEAT_BLOCKS_PER_S = 50_000
REPEAT_DUTY = 0.25
REPEAT_S = 3600.0
# Max groups whose generation is checked per heartbeat.
CHECKED_GROUPS = 16


class AnnounceQueue:
    """Updates that wait for Redis. Each block is queued once, with its last event. Sans-IO.

    Attributes:
        repeating: True during a repetition of all blocks.
        overflowed: True if updates were dropped, which requires a new boot epoch.
    """

    def __init__(self, max_blocks: int = MAX_PENDING_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._updates: dict[bytes, IndexEvent] = {}
        self._aside: dict[bytes, IndexEvent] = {}
        self._remaining: Iterator[tuple[bytes, bytes]] = iter(())
        self._evicted_meanwhile: set[bytes] = set()
        self.repeating = False
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._updates)

    def push(self, events: Iterable[IndexEvent]) -> None:
        """Queue events. On overflow, drop all updates and set ``overflowed``."""
        if self.overflowed:
            return
        for event in events:
            self._updates.pop(event.block_hash, None)
            self._aside.pop(event.block_hash, None)
            self._updates[event.block_hash] = event
            if self.repeating and not event.here:
                self._evicted_meanwhile.add(event.block_hash)
        self._limit()

    def repeat_all(self, blocks: Iterable[tuple[bytes, bytes]]) -> None:
        """Start a repetition of all current blocks, given as (hash, segment) and read lazily, after the updates. Queued
        evictions stay, since Redis may still have these entries."""
        self._updates = {block_hash: event for block_hash, event in self._updates.items() if not event.here}
        self._remaining, self.repeating = iter(blocks), True
        self._evicted_meanwhile.clear()
        self.overflowed = False

    def take(self, count: int) -> list[IndexEvent]:
        """Remove and return up to ``count`` of the oldest updates."""
        return [self._updates.pop(block_hash) for block_hash in list(islice(self._updates, count))]

    def take_repeated(self, count: int) -> list[IndexEvent]:
        """Return up to ``count`` blocks of the repetition, without those that have a newer update."""
        taken = list(islice(self._remaining, count))
        events = [
            IndexEvent(block_hash, here=True, segment=segment)
            for block_hash, segment in taken
            if not any(block_hash in newer for newer in (self._evicted_meanwhile, self._updates, self._aside))
        ]
        if len(taken) < count:
            self.repeating = False
            self._evicted_meanwhile.clear()
        return events

    def set_aside(self, events: Iterable[IndexEvent]) -> None:
        """Set aside events for a shard that does not answer, so that other shards get theirs. Newer events win."""
        for event in events:
            if event.block_hash not in self._updates:
                self._aside[event.block_hash] = event
        self._limit()

    def try_again(self, count: int) -> None:
        """Queue up to ``count`` of the events that were set aside."""
        self.put_back([self._aside.pop(block_hash) for block_hash in list(islice(self._aside, count))])

    def put_back(self, events: Iterable[IndexEvent]) -> None:
        """Requeue events whose announcement failed; newer events of the same blocks win."""
        for event in events:
            self._updates.setdefault(event.block_hash, event)
        self._limit()

    def _limit(self) -> None:
        if len(self._updates) + len(self._aside) > self._max_blocks or len(self._evicted_meanwhile) > self._max_blocks:
            self._updates.clear()
            self._aside.clear()
            self._evicted_meanwhile.clear()
            self._remaining, self.repeating = iter(()), False
            self.overflowed = True


class Announcer:
    """Task that sends a node's heartbeats and announcements to Redis.

    Args:
        heartbeat_s, ttl_ms: interval of heartbeats, and silence after which the node counts as lost.
        record: returns the node's record for a boot epoch.
        hashes: returns (hash, segment) of all current blocks, parents before children; read lazily.
    """

    def __init__(
        self,
        redis_url: RedisServerAt,
        *,
        heartbeat_s: float,
        ttl_ms: int,
        record: Callable[[int], ComponentRecord],
        hashes: Callable[[], Iterable[tuple[bytes, bytes]]],
    ) -> None:
        self.boot_epoch = new_boot_epoch()
        self._registry = Registry(redis_url, ttl_ms)
        self._writer = IndexWriter(redis_url)
        self._heartbeat_s = heartbeat_s
        self._record = record
        self._hashes = hashes
        self._queue = AnnounceQueue()
        self._changed = asyncio.Event()
        self._next_heartbeat_s = float("-inf")
        self._entry = b""
        # Generations by group, as first read since the last repetition; a change shows that a shard lost its data.
        self._generations: dict[bytes, bytes] = {}
        self._lost = False
        self._partly = False
        self._repeat_at_s = 0.0
        self._sweep = SweepPlace(secrets.randbelow(keys.GROUPS))
        self._answered = True

    @property
    def repeating(self) -> bool:
        """True while all blocks are being announced again."""
        return self._queue.repeating

    def push(self, events: list[IndexEvent]) -> None:
        """Queue events for the index, up to MAX_PENDING_BLOCKS. Never blocks."""
        if events:
            self._queue.push(events)
            self._changed.set()

    def beat_now(self) -> None:
        """Send a heartbeat at once, with a changed record."""
        self._next_heartbeat_s = float("-inf")
        self._changed.set()

    async def run(self) -> None:
        """Send heartbeats and announcements until cancelled, despite any errors of Redis."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                if loop.time() >= self._next_heartbeat_s:
                    # From the start of a heartbeat to the next, so that a slow Redis does not make them rarer.
                    self._next_heartbeat_s = loop.time() + self._heartbeat_s
                    try:
                        await self._heartbeat()
                    except BaseException:
                        self._next_heartbeat_s = float("-inf")
                        raise
                wait_s = await self._announce(self._next_heartbeat_s)
                self._note(answered=True)
            except Unavailable as error:
                self._note(answered=False, reason=error.message)
                await asyncio.sleep(RETRY_S)
                continue
            wait_s = max(0.0, min(wait_s, self._next_heartbeat_s - loop.time()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def leave(self) -> None:
        """Remove the node from the registry, if Redis answers, and close the connections."""
        with contextlib.suppress(Unavailable):
            await self._registry.leave(self._record(self.boot_epoch).component_id)
        await self._registry.aclose()
        await self._writer.aclose()

    async def _heartbeat(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._queue.overflowed:
            self.boot_epoch = new_boot_epoch()
            self._lost = True
            log.warning(
                "too many updates for Redis piled up: all blocks are announced again under boot epoch %08x",
                self.boot_epoch,
            )
        answer = await self._registry.heartbeat(self._record(self.boot_epoch))
        self._entry = answer.node_number + struct.pack(">I", self.boot_epoch)
        if self._lost or not answer.known or (now >= self._repeat_at_s and not self._queue.repeating):
            self._lost = False
            self._generations.clear()
            self._queue.repeat_all(self._hashes())
            self._repeat_at_s = now + REPEAT_S
        # While a shard does not answer, probe it with one batch per heartbeat.
        self._queue.try_again(BATCH_BLOCKS if self._partly else MAX_PENDING_BLOCKS)
        with contextlib.suppress(Unavailable):
            self._check_generations(await self._writer.generations(self._some_groups()))
        try:
            self._sweep, generations = await self._writer.sweep(self._sweep, self._live)
            self._check_generations(generations)
        except Unavailable:
            # Continue with the next group, which may be on another server.
            self._sweep = SweepPlace((self._sweep.group + 1) % keys.GROUPS)

    def _some_groups(self) -> list[bytes]:
        known = list(self._generations)
        return known if len(known) <= CHECKED_GROUPS else random.sample(known, CHECKED_GROUPS)

    async def _live(self) -> frozenset[bytes]:
        return (await self._registry.nodes()).entries()

    async def _announce(self, until_s: float) -> float:
        """Send all updates, then a batch of the repetition; stop at ``until_s``, when a heartbeat is due. Return the
        seconds to wait before the next call."""
        self._changed.clear()
        loop = asyncio.get_running_loop()
        while len(self._queue):
            if loop.time() >= until_s:
                return 0.0
            await self._send(self._queue.take(BATCH_BLOCKS))
        if not self._queue.repeating:
            return self._heartbeat_s
        begun = loop.time()
        await self._send(self._queue.take_repeated(BATCH_BLOCKS))
        elapsed_s = loop.time() - begun
        return max(BATCH_BLOCKS / REPEAT_BLOCKS_PER_S, elapsed_s / REPEAT_DUTY) - elapsed_s

    async def _send(self, events: list[IndexEvent]) -> None:
        """Announce a batch of events. If no shard answers, requeue all of them and raise Unavailable."""
        if not events:
            return
        try:
            result = await self._writer.announce(self._entry, events)
            self._check_generations(result.generations)
        except BaseException:
            self._partly = True
            self._queue.put_back(events)
            raise
        self._partly = bool(result.unreported)
        self._queue.set_aside(result.unreported)

    def _check_generations(self, generations: dict[bytes, bytes]) -> None:
        """Schedule a repetition if a generation changed, i.e. the group's buckets were lost."""
        for group, generation in generations.items():
            if self._generations.setdefault(group, generation) != generation:
                self._lost = True

    def _note(self, *, answered: bool, reason: str = "") -> None:
        """Log whether Redis answers, once per change."""
        if answered != self._answered:
            log.warning("Redis answers again" if answered else f"continuing without Redis: {reason}")
        self._answered = answered


def new_boot_epoch() -> int:
    """Return a random boot epoch, never 0, which means "unknown"."""
    return secrets.randbelow(2**32 - 1) + 1
