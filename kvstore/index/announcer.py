"""Tells the index what a node has: what is still to be said, and the task that says it.

    events --push--> AnnounceQueue --take--> Redis
                      ^    ^   |
    all there is -----+    +---+ put back when Redis does not answer

News goes out at once. Everything is said again, at a bounded rate and after the news, when Redis lost its memory
(another generation), when it thought the node dead and others may have swept its entries out, and every REPEAT_S, since
a Redis that is short of memory, or a replica that takes over, forgets without a sign. Saying everything goes on where
it stopped when Redis was away in between. When more news piles up than the queue may hold, the node gives up counting
and takes a new boot epoch instead: all it ever said is void then, without a scan, and what it has is said again.
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
from pillion.kvstore.index.index import Registry
from pillion.kvstore.index.redis_writer import IndexWriter, SweepPlace
from pillion.kvstore.ledger.records import IndexEvent
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.kvnode")

MAX_PENDING_BLOCKS = 262_144
# One announcement keeps Redis busy for less than a millisecond.
BATCH_BLOCKS = 256
RETRY_S = 0.5
# Saying everything again: so many blocks a second at most, and never more than this share of the time waiting for
# Redis, so that a thousand nodes that start over together leave room for look-ups.
REPEAT_BLOCKS_PER_S = 50_000
REPEAT_DUTY = 0.25
REPEAT_S = 3600.0
# Of which a heartbeat asks whether they were lost.
CHECKED_GROUPS = 16


class AnnounceQueue:
    """Sans-IO. Of several events of one block only the last counts, so the queue holds each block once."""

    def __init__(self, max_blocks: int = MAX_PENDING_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._news: dict[bytes, IndexEvent] = {}
        # Of shards that did not answer.
        self._aside: dict[bytes, IndexEvent] = {}
        self._rest: Iterator[tuple[bytes, bytes]] = iter(())
        self._went_meanwhile: set[bytes] = set()
        self.repeating = False
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._news)

    def push(self, events: Iterable[IndexEvent]) -> None:
        """Adds what changed. Beyond the bound everything is forgotten and ``overflowed`` is set."""
        if self.overflowed:
            return
        for event in events:
            self._news.pop(event.block_hash, None)
            self._aside.pop(event.block_hash, None)
            self._news[event.block_hash] = event
            if self.repeating and not event.here:
                self._went_meanwhile.add(event.block_hash)
        self._bound()

    def say_all(self, blocks: Iterable[tuple[bytes, bytes]]) -> None:
        """Starts over with everything that is here now, (hash, segment) each, after the news. ``blocks`` is read bit by
        bit. News that something went stands: Redis may still believe in it."""
        self._news = {block_hash: event for block_hash, event in self._news.items() if not event.here}
        self._rest, self.repeating = iter(blocks), True
        self._went_meanwhile.clear()
        self.overflowed = False

    def take(self, count: int) -> list[IndexEvent]:
        """The oldest news, at most ``count``."""
        return [self._news.pop(block_hash) for block_hash in list(islice(self._news, count))]

    def take_repeated(self, count: int) -> list[IndexEvent]:
        """The next of all there is, at most ``count``, without those whose news is newer."""
        taken = list(islice(self._rest, count))
        events = [
            IndexEvent(block_hash, here=True, segment=segment)
            for block_hash, segment in taken
            if block_hash not in self._went_meanwhile and block_hash not in self._news and block_hash not in self._aside
        ]
        if len(taken) < count:
            self.repeating = False
            self._went_meanwhile.clear()
        return events

    def set_aside(self, events: Iterable[IndexEvent]) -> None:
        """What one shard did not take waits apart, so that the others hear their news. Newer events stand."""
        for event in events:
            if event.block_hash not in self._news:
                self._aside[event.block_hash] = event
        self._bound()

    def try_again(self, count: int) -> None:
        """At most ``count`` of what waits apart joins the news."""
        self.put_back([self._aside.pop(block_hash) for block_hash in list(islice(self._aside, count))])

    def put_back(self, events: Iterable[IndexEvent]) -> None:
        """Undoes a take whose announcement failed; newer events of the same blocks stand."""
        for event in events:
            self._news.setdefault(event.block_hash, event)
        self._bound()

    def _bound(self) -> None:
        if len(self._news) + len(self._aside) > self._max_blocks or len(self._went_meanwhile) > self._max_blocks:
            self._news.clear()
            self._aside.clear()
            self._went_meanwhile.clear()
            self._rest, self.repeating = iter(()), False
            self.overflowed = True


class Announcer:
    """A node's voice in Redis: heartbeats and announcements, one task.

    Args:
        redis_url, heartbeat_s, ttl_ms: where, how often, and how long one heartbeat counts.
        record: makes the node's record for a boot epoch.
        hashes: everything that is committed when it is called, (hash, segment) each, parents before children; read bit
            by bit afterwards.
    """

    def __init__(
        self,
        redis_url: str,
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
        self._news = asyncio.Event()
        self._entry = b""
        # Of each group since everything was said last; another one tells that a shard has lost its memory.
        self._generations: dict[bytes, bytes] = {}
        self._lost = False
        # Whether the last batch met a shard that is away.
        self._partly = False
        self._repeat_at_s = 0.0
        self._sweep = SweepPlace(secrets.randbelow(keys.GROUPS))
        self._answered = True

    def push(self, events: list[IndexEvent]) -> None:
        """Never blocks; bounded by MAX_PENDING_BLOCKS."""
        if events:
            self._queue.push(events)
            self._news.set()

    async def run(self) -> None:
        """Beats and announces until it is cancelled. Redis's trouble is survived, here and in the ledger."""
        loop = asyncio.get_running_loop()
        next_beat_s = loop.time()
        while True:
            try:
                if loop.time() >= next_beat_s:
                    # Counted from here: what Redis takes for an answer is no reason to beat less often.
                    due_s = loop.time() + self._heartbeat_s
                    await self._beat()
                    next_beat_s = due_s
                wait_s = await self._announce(next_beat_s)
                self._note(answered=True)
            except Unavailable as error:
                self._note(answered=False, words=error.message)
                await asyncio.sleep(RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(0.0, min(wait_s, next_beat_s - loop.time())))

    async def leave(self) -> None:
        """Says goodbye, if Redis answers, and closes."""
        with contextlib.suppress(Unavailable):
            await self._registry.leave(self._record(self.boot_epoch).component_id)
        await self._registry.aclose()
        await self._writer.aclose()

    async def _beat(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._queue.overflowed:
            self.boot_epoch = new_boot_epoch()
            self._lost = True
            log.warning("too much to tell Redis piled up: all is said again under boot epoch %08x", self.boot_epoch)
        beat = await self._registry.beat(self._record(self.boot_epoch))
        self._entry = beat.node_number + struct.pack(">I", self.boot_epoch)
        if self._lost or not beat.known or (now >= self._repeat_at_s and not self._queue.repeating):
            self._lost = False
            self._generations.clear()
            self._queue.say_all(self._hashes())
            self._repeat_at_s = now + REPEAT_S
        # While a shard is away one batch a beat finds out whether it is back.
        self._queue.try_again(BATCH_BLOCKS if self._partly else MAX_PENDING_BLOCKS)
        with contextlib.suppress(Unavailable):
            self._learn(await self._writer.generations(self._some_groups()))
        try:
            self._sweep, generations = await self._writer.sweep(self._sweep, self._live)
            self._learn(generations)
        except Unavailable:
            # Another group may be on another shard.
            self._sweep = SweepPlace((self._sweep.group + 1) % keys.GROUPS)

    def _some_groups(self) -> list[bytes]:
        known = list(self._generations)
        return known if len(known) <= CHECKED_GROUPS else random.sample(known, CHECKED_GROUPS)

    async def _live(self) -> frozenset[bytes]:
        return (await self._registry.nodes()).entries()

    async def _announce(self, until_s: float) -> float:
        """Says all news, then some of what is to be repeated, and lets no heartbeat wait for it. Returns for how many
        seconds the rest may wait."""
        self._news.clear()
        loop = asyncio.get_running_loop()
        while len(self._queue):
            if loop.time() >= until_s:
                return 0.0
            await self._say(self._queue.take(BATCH_BLOCKS))
        if not self._queue.repeating:
            return self._heartbeat_s
        begun = loop.time()
        await self._say(self._queue.take_repeated(BATCH_BLOCKS))
        took_s = loop.time() - begun
        return max(BATCH_BLOCKS / REPEAT_BLOCKS_PER_S, took_s / REPEAT_DUTY) - took_s

    async def _say(self, events: list[IndexEvent]) -> None:
        """Raises Unavailable, with everything back in the queue, if nobody took any of it."""
        if not events:
            return
        try:
            told = await self._writer.announce(self._entry, events)
            self._learn(told.generations)
        except BaseException:
            self._partly = True
            self._queue.put_back(events)
            raise
        self._partly = bool(told.untold)
        self._queue.set_aside(told.untold)

    def _learn(self, generations: dict[bytes, bytes]) -> None:
        """The next beat says everything again where a group was lost."""
        for group, generation in generations.items():
            if self._generations.setdefault(group, generation) != generation:
                self._lost = True

    def _note(self, *, answered: bool, words: str = "") -> None:
        """Logs changes only: a Redis that is away for an hour is one line."""
        if answered != self._answered:
            log.warning("Redis answers again" if answered else f"going on without Redis: {words}")
        self._answered = answered


def new_boot_epoch() -> int:
    """Random, and never 0, which means "not said"."""
    return secrets.randbelow(2**32 - 1) + 1
