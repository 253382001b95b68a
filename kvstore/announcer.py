"""Tells the index what a node has: what is still to be said, and the task that says it.

    events --push--> AnnounceQueue --take--> Redis
                        ^   |
                        +---+ put back when Redis does not answer

Everything is said again when Redis lost its memory (another generation), or when it thought the node dead and others
may have swept its entries out. When more piles up than the queue may hold, the node gives up counting and takes a new
boot epoch instead: all it ever said is void then, without a scan, and what it has is said again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import struct
from collections.abc import Callable, Iterable
from itertools import islice

from kvstore.index import Beat, IndexWriter, Registry
from kvstore.records import IndexEvent
from pillion.errors import Unavailable
from pillion.wire.registry import PartRecord

log = logging.getLogger("pillion.kvnode")

MAX_PENDING_BLOCKS = 262_144
# One announcement keeps Redis busy for about a millisecond.
BATCH_BLOCKS = 512
RETRY_S = 0.5
# Of 65,536 buckets, after every heartbeat.
SWEEP_BUCKETS = 8
ALL_BUCKETS = 65_536


class AnnounceQueue:
    """Sans-IO. Of several events of one block only the last counts, so the queue holds each block once."""

    def __init__(self, max_blocks: int = MAX_PENDING_BLOCKS) -> None:
        self._max_blocks = self._bound_blocks = max_blocks
        self._pending: dict[bytes, bool] = {}
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, events: Iterable[IndexEvent]) -> None:
        """Adds what changed. Beyond the bound everything is forgotten and ``overflowed`` is set."""
        if self.overflowed:
            return
        for event in events:
            self._pending.pop(event.block_hash, None)
            self._pending[event.block_hash] = event.here
        self._bound()

    def say_all(self, hashes: Iterable[bytes]) -> None:
        """Starts over with everything that is here, and with what Redis may still believe in. A big pool stretches the
        bound: the queue must hold it."""
        gone = {block_hash: False for block_hash, here in self._pending.items() if not here}
        self._pending = gone | dict.fromkeys(hashes, True)
        self._bound_blocks = max(self._max_blocks, 2 * len(self._pending))
        self.overflowed = False

    def take(self, count: int) -> tuple[list[bytes], list[bytes]]:
        """The oldest events, at most ``count``: what came, what went."""
        came: list[bytes] = []
        went: list[bytes] = []
        for block_hash in list(islice(self._pending, count)):
            (came if self._pending.pop(block_hash) else went).append(block_hash)
        return came, went

    def put_back(self, came: Iterable[bytes], went: Iterable[bytes]) -> None:
        """Undoes a take whose announcement failed; newer events of the same blocks stand."""
        for hashes, here in ((came, True), (went, False)):
            for block_hash in hashes:
                self._pending.setdefault(block_hash, here)
        self._bound()

    def _bound(self) -> None:
        if len(self._pending) > self._bound_blocks:
            self._pending.clear()
            self.overflowed = True


class Announcer:
    """A node's voice in Redis: heartbeats and announcements, one task.

    Args:
        redis_url, heartbeat_s, ttl_ms: where, how often, and how long one heartbeat counts.
        record: makes the node's record for a boot epoch.
        hashes: everything that is committed now, parents before children.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        heartbeat_s: float,
        ttl_ms: int,
        record: Callable[[int], PartRecord],
        hashes: Callable[[], list[bytes]],
    ) -> None:
        self.boot_epoch = new_boot_epoch()
        self._registry = Registry(redis_url, ttl_ms)
        self._writer = IndexWriter(redis_url)
        self._heartbeat_s = heartbeat_s
        self._record = record
        self._hashes = hashes
        self._queue = AnnounceQueue()
        self._news = asyncio.Event()
        self._generation = b""
        self._entry = b""
        self._sweep_at = secrets.randbelow(ALL_BUCKETS)
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
                    await self._beat()
                    next_beat_s = loop.time() + self._heartbeat_s
                await self._announce_all(next_beat_s)
                self._note(answered=True)
            except Unavailable as error:
                self._note(answered=False, words=error.message)
                await asyncio.sleep(RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(0.0, next_beat_s - loop.time()))

    async def leave(self) -> None:
        """Says goodbye, if Redis answers, and closes."""
        with contextlib.suppress(Unavailable):
            await self._registry.leave(self._record(self.boot_epoch).part_id)
        await self._registry.aclose()
        await self._writer.aclose()

    async def _beat(self) -> None:
        if self._queue.overflowed:
            self.boot_epoch = new_boot_epoch()
            self._queue.say_all(self._hashes())
            log.warning("too much to tell Redis piled up: all is said again under boot epoch %08x", self.boot_epoch)
        beat = await self._registry.beat(self._record(self.boot_epoch))
        if beat.generation != self._generation or not beat.known:
            self._queue.say_all(self._hashes())
        self._remember(beat)
        await self._writer.sweep(self._sweep_at, SWEEP_BUCKETS)
        self._sweep_at = (self._sweep_at + SWEEP_BUCKETS) % ALL_BUCKETS

    def _remember(self, beat: Beat) -> None:
        self._generation = beat.generation
        self._entry = beat.node_number + struct.pack(">I", self.boot_epoch)

    async def _announce_all(self, until_s: float) -> None:
        """Empties the queue, but lets no heartbeat wait for it."""
        self._news.clear()
        loop = asyncio.get_running_loop()
        while len(self._queue) and loop.time() < until_s:
            came, went = self._queue.take(BATCH_BLOCKS)
            try:
                generation = await self._writer.announce(self._entry, came, went)
            except BaseException:
                self._queue.put_back(came, went)
                raise
            if generation != self._generation:
                # Redis was emptied under us: the next beat says everything again.
                self._generation = b""
                return
        if len(self._queue):
            self._news.set()

    def _note(self, *, answered: bool, words: str = "") -> None:
        """Logs changes only: a Redis that is away for an hour is one line."""
        if answered != self._answered:
            log.warning("Redis answers again" if answered else f"going on without Redis: {words}")
        self._answered = answered


def new_boot_epoch() -> int:
    """Random, and never 0, which means "not said"."""
    return secrets.randbelow(2**32 - 1) + 1
