"""Announces to the index what a node has: a queue of updates, and the task that sends them.

    events --push--> AnnounceQueue --take--> Redis
                      ^    ^   |
    all blocks -------+    +---+ put back when Redis does not answer

Updates go out at once. All blocks are announced again, at a bounded rate and after the updates, when Redis lost its
memory (another generation), when it thought the node dead and others may have swept its entries out, and every
REPEAT_S, since a Redis that is short of memory, or a replica that takes over, forgets without a sign. Such a repetition
goes on where it stopped when Redis was away in between. When more updates pile up than the queue may hold, the node
forgets them and takes a new boot epoch instead: all its entries are void then, without a scan, and all blocks are
announced again.
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
# One announcement of this many blocks keeps Redis busy for less than a millisecond.
BATCH_BLOCKS = 256
RETRY_S = 0.5
# When a node announces all its blocks again, it announces at most REPEAT_BLOCKS_PER_S and waits for Redis during at
# most the share REPEAT_DUTY of the time, so that a thousand nodes that do so together leave room for look-ups.
REPEAT_BLOCKS_PER_S = 50_000
REPEAT_DUTY = 0.25
REPEAT_S = 3600.0
# One heartbeat checks this many groups for buckets that Redis has lost.
CHECKED_GROUPS = 16


class AnnounceQueue:
    """Holds the updates that wait for Redis, sans-IO. Only the last event of a block counts, so it holds each block
    once.

    Attributes:
        repeating: whether a repetition of all blocks is under way.
        overflowed: whether updates were lost, so that only a new boot epoch helps.
    """

    def __init__(self, max_blocks: int = MAX_PENDING_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._updates: dict[bytes, IndexEvent] = {}
        # These are the events of shards of Redis that did not answer.
        self._aside: dict[bytes, IndexEvent] = {}
        self._rest: Iterator[tuple[bytes, bytes]] = iter(())
        self._went_meanwhile: set[bytes] = set()
        self.repeating = False
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._updates)

    def push(self, events: Iterable[IndexEvent]) -> None:
        """Adds events to the queue. Beyond its bound, all updates are forgotten and ``overflowed`` is set."""
        if self.overflowed:
            return
        for event in events:
            self._updates.pop(event.block_hash, None)
            self._aside.pop(event.block_hash, None)
            self._updates[event.block_hash] = event
            if self.repeating and not event.here:
                self._went_meanwhile.add(event.block_hash)
        self._bound()

    def repeat_all(self, blocks: Iterable[tuple[bytes, bytes]]) -> None:
        """Starts a repetition of all blocks that are here now, (hash, segment) each, after the updates. ``blocks`` is
        read lazily. Updates about blocks that went stay: Redis may still have entries for them."""
        self._updates = {block_hash: event for block_hash, event in self._updates.items() if not event.here}
        self._rest, self.repeating = iter(blocks), True
        self._went_meanwhile.clear()
        self.overflowed = False

    def take(self, count: int) -> list[IndexEvent]:
        """Removes and returns the oldest updates, at most ``count``."""
        return [self._updates.pop(block_hash) for block_hash in list(islice(self._updates, count))]

    def take_repeated(self, count: int) -> list[IndexEvent]:
        """Returns the next blocks of the repetition, at most ``count``, without those that have a newer update."""
        taken = list(islice(self._rest, count))
        events = [
            IndexEvent(block_hash, here=True, segment=segment)
            for block_hash, segment in taken
            if not any(block_hash in newer for newer in (self._went_meanwhile, self._updates, self._aside))
        ]
        if len(taken) < count:
            self.repeating = False
            self._went_meanwhile.clear()
        return events

    def set_aside(self, events: Iterable[IndexEvent]) -> None:
        """Keeps the events of a shard that does not answer apart, so that other shards get theirs. Newer events win."""
        for event in events:
            if event.block_hash not in self._updates:
                self._aside[event.block_hash] = event
        self._bound()

    def try_again(self, count: int) -> None:
        """Puts at most ``count`` of the events that were set aside back among the updates."""
        self.put_back([self._aside.pop(block_hash) for block_hash in list(islice(self._aside, count))])

    def put_back(self, events: Iterable[IndexEvent]) -> None:
        """Puts events back whose announcement failed; newer events of the same blocks win."""
        for event in events:
            self._updates.setdefault(event.block_hash, event)
        self._bound()

    def _bound(self) -> None:
        if len(self._updates) + len(self._aside) > self._max_blocks or len(self._went_meanwhile) > self._max_blocks:
            self._updates.clear()
            self._aside.clear()
            self._went_meanwhile.clear()
            self._rest, self.repeating = iter(()), False
            self.overflowed = True


class Announcer:
    """Sends a node's heartbeats and announcements to Redis, in a task of its own.

    Args:
        redis_url, heartbeat_s, ttl_ms: where Redis is, how often to beat, and how long one heartbeat counts.
        record: makes the node's record for a boot epoch.
        hashes: returns all blocks that the node has when it is called, (hash, segment) each, parents before children;
            it is read lazily.
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
        # For each group this holds its generation since the last repetition; another one shows that a shard has lost
        # its data.
        self._generations: dict[bytes, bytes] = {}
        self._lost = False
        # This says whether one of Redis's servers did not take its share of the last batch.
        self._partly = False
        self._repeat_at_s = 0.0
        self._sweep = SweepPlace(secrets.randbelow(keys.GROUPS))
        self._answered = True

    @property
    def repeating(self) -> bool:
        """Returns whether all blocks are being announced again."""
        return self._queue.repeating

    def push(self, events: list[IndexEvent]) -> None:
        """Queues events for the index. It never blocks; the queue is bounded by MAX_PENDING_BLOCKS."""
        if events:
            self._queue.push(events)
            self._changed.set()

    def beat_now(self) -> None:
        """Makes a heartbeat go out at once: the node's record says something that others wait for."""
        self._next_heartbeat_s = float("-inf")
        self._changed.set()

    async def run(self) -> None:
        """Sends heartbeats and announcements until it is cancelled. It goes on whatever errors Redis gives."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                if loop.time() >= self._next_heartbeat_s:
                    # The period is counted from here, so that a slow Redis does not make heartbeats rarer.
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
        """Takes the node out of the registry, if Redis answers, and closes the connections."""
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
        # While a shard is away, one batch per heartbeat is sent, to find out whether the shard is back.
        self._queue.try_again(BATCH_BLOCKS if self._partly else MAX_PENDING_BLOCKS)
        with contextlib.suppress(Unavailable):
            self._check_generations(await self._writer.generations(self._some_groups()))
        try:
            self._sweep, generations = await self._writer.sweep(self._sweep, self._live)
            self._check_generations(generations)
        except Unavailable:
            # The next group is tried, because it may be on another Redis server.
            self._sweep = SweepPlace((self._sweep.group + 1) % keys.GROUPS)

    def _some_groups(self) -> list[bytes]:
        known = list(self._generations)
        return known if len(known) <= CHECKED_GROUPS else random.sample(known, CHECKED_GROUPS)

    async def _live(self) -> frozenset[bytes]:
        return (await self._registry.nodes()).entries()

    async def _announce(self, until_s: float) -> float:
        """Sends all updates, then a batch of the repetition, and stops at ``until_s``, when a heartbeat is due. Returns
        for how many seconds the rest may wait."""
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
        """Announces a batch of events. Raises Unavailable, after putting all of them back into the queue, if no shard
        took any."""
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
        """Makes the next heartbeat start a repetition if a group was lost."""
        for group, generation in generations.items():
            if self._generations.setdefault(group, generation) != generation:
                self._lost = True

    def _note(self, *, answered: bool, reason: str = "") -> None:
        """Logs whether Redis answers, but only when that changes, so that a Redis that is away for an hour is logged
        once."""
        if answered != self._answered:
            log.warning("Redis answers again" if answered else f"going on without Redis: {reason}")
        self._answered = answered


def new_boot_epoch() -> int:
    """Returns a random boot epoch, never 0, which means "unknown"."""
    return secrets.randbelow(2**32 - 1) + 1
