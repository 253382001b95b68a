"""Object tier: blocks of the pool, copied to a bucket that outlives nodes and that clusters may share.

    a block   copied --queued--> written --put--> known here --least recently used--> forgotten, still in the bucket
                       +--failed-----------> reported lost    ^ |
    a prompt --find: a list of its segment's objects----------+ +--get: checksum mismatch--> forgotten, counted

This node knows the objects that it wrote, and those that it found for a prompt's blocks; an object is equally good
whichever node wrote it (object_runs.py). The bucket is limited by its owner's expiry rules: a missing object is a
missing block (I1).

Only fetches wait for the service, for a limited time: blocks to be written are copied into a queue of limited size, and
while that is full, or the service fails, blocks are refused. A service that failed or was late is paused and probed
(:mod:`pillion.kvstore.tiers.tier_breaker`). The loop owns all state; bytes are copied and checked on threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Sequence
from itertools import groupby, takewhile
from typing import Any

from pillion.kvstore.hashing import SEGMENT_BLOCKS, state_page
from pillion.kvstore.memory.memory import block_checksum, until_over
from pillion.kvstore.tiers.object_tier.object_runs import (
    HEADER_BYTES,
    RunLayout,
    RunName,
    locate,
    locate_followers,
    split_runs,
)
from pillion.kvstore.tiers.object_tier.object_store import (
    MAX_LISTED_NAMES,
    MissingObject,
    ObjectStore,
    ObjectStoreFailure,
)
from pillion.kvstore.tiers.tiers import BlockName, CorruptBlock, MediumTier, heads_first
from pillion.tasks import OwnTasks

log = logging.getLogger("pillion.kvnode")

MAX_QUEUED_BYTES = 256 * 2**20
MAX_PUTS, MAX_GETS, MAX_LISTS = 4, 8, 16
MAX_WAITING_LISTS = 256
# Segment ends per look-up for which the state after the last block is looked up.
MAX_ASKED_EDGES = 2
# Max blocks known to be in the bucket, at about 300 bytes each.
MAX_KNOWN_BLOCKS = 2**18
# How long a missing block is not looked up again, and max number of such blocks.
ABSENT_MS = 5_000
MAX_ABSENT_BLOCKS = 4096


class ObjectTier(MediumTier):
    """Tier in a bucket. Other nodes write to it as well, so its contents are only known after a request. It is asked
    after other nodes' pools. Listing and writing continue if a caller is cancelled. ``place`` is the bucket's
    location."""

    name = "object"

    def __init__(self, store: ObjectStore, layout: RunLayout) -> None:
        super().__init__(store.place)
        self.place, self._store = store.place, store
        self._layout = layout
        # Run by block hash, and known block hashes by run. Checksums of blocks are in the objects.
        self._runs: dict[bytes, RunName] = {}
        self._of_run: dict[RunName, set[bytes]] = {}
        self._queued: dict[bytes, tuple[BlockName, memoryview]] = {}
        self._queued_bytes = 0
        self._puts, self._gets, self._lists = (asyncio.Semaphore(limit) for limit in (MAX_PUTS, MAX_GETS, MAX_LISTS))
        self._work = OwnTasks()
        # List requests in flight by (segment, name after which they begin). Blocks that no listed object had, with the
        # time until which they are not looked up again.
        self._listing: dict[tuple[bytes, str], asyncio.Task[tuple[list[RunName], bool]]] = {}
        self._absent: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._kept or block_hash in self._queued

    def room_bytes(self) -> int:
        return 0 if self._closed or self._breaker.paused else max(0, MAX_QUEUED_BYTES - self._queued_bytes)

    def names(self) -> Iterable[BlockName]:
        queued = {block_hash: name for block_hash, (name, _) in self._queued.items()}
        return heads_first({**self._kept, **queued})

    async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        """Queue copies of the blocks, without waiting for the writes."""
        gone, self._unreported = self._unreported, []
        fresh: list[tuple[BlockName, memoryview]] = []
        for name, payload in blocks:
            if name.hash in self._kept:
                self._kept.move_to_end(name.hash)
            elif name.hash in self._queued:
                continue
            elif self.room_bytes() < self._layout.block_bytes or payload.nbytes != self._layout.block_bytes:
                self.counts.failed += 1
                gone.append(name)
            else:
                self._queued[name.hash] = name, payload
                self._queued_bytes += self._layout.block_bytes
                fresh.append((name, payload))
        if fresh:
            try:
                await until_over(self._queue(fresh))
            except MemoryError:
                for name, _ in fresh:
                    del self._queued[name.hash]
                self._queued_bytes -= len(fresh) * self._layout.block_bytes
                gone += [name for name, _ in fresh]
        return [name for name in gone if name.hash not in self]

    async def _queue(self, fresh: Sequence[tuple[BlockName, memoryview]]) -> None:
        """Copy blocks, whose payloads the caller may reuse afterwards, and start writing them."""
        runs = split_runs(fresh, self._layout.block_bytes)
        objects = await asyncio.to_thread(lambda: [self._layout.pack(run) for run in runs])
        for run, data in zip(runs, objects, strict=True):
            names, size = [name for name, _ in run], self._layout.block_bytes
            for name, begin in zip(names, range(HEADER_BYTES, len(data), size), strict=True):
                self._queued[name.hash] = name, memoryview(data)[begin : begin + size]
            self._work.begin(self._put(names, data), "writing an object")

    async def _put(self, names: Sequence[BlockName], data: bytearray) -> None:
        run, failure = RunName.of(names), ""
        try:
            async with self._puts:
                if self._breaker.paused:
                    failure = "the service is paused"
                else:
                    await self._store.put(self._layout.path(run), data)
        except ObjectStoreFailure as error:
            failure = str(error)
            self._pause_failed("blocks were not written", failure)
        finally:
            for name in names:
                del self._queued[name.hash]
            self._queued_bytes -= len(names) * self._layout.block_bytes
        if failure:
            self.counts.failed += len(names)
            self._unreported += names
        else:
            self.counts.stored += len(names)
            for name in names:
                self._absent.pop(name.hash, None)
                self._record_block(name, run)

    async def find(self, hashes: Sequence[bytes], first: int, *, roughly: bool = False, states: bool = False) -> None:
        """Find out which blocks of a chain, given from its first block, the bucket has from block ``first`` on;
        afterwards they are ``in`` this tier. Takes a limited time and may be cancelled.

        Lists the segment of block ``first``, and if all of its blocks are present, all following segments concurrently.
        Known blocks are not looked up.

        With ``roughly``, of n following segments the last and about every √n-th are listed, then those between the
        deepest present one and the next: 16 requests in two rounds for 64 segments. With ``states``, the same lists
        also show which blocks have states, so segments are listed even if all their blocks are known.
        """
        begin = first // SEGMENT_BLOCKS * SEGMENT_BLOCKS
        end = begin + SEGMENT_BLOCKS
        await self._find_in(hashes, first, begin, states)
        if not all(block_hash in self for block_hash in hashes[first:end]):
            return
        begins = range(end, len(hashes), SEGMENT_BLOCKS)
        if not roughly:
            await self._find_at(hashes, begins, states)
            return
        probes = sorted({*begins[:: max(1, math.isqrt(len(begins)))], *begins[-1:]})
        await self._find_at(hashes, probes, states)
        deepest = next((at for at in reversed(probes) if hashes[at] in self), begin)
        after = next((at for at in probes if at > deepest), deepest)
        await self._find_at(hashes, range(deepest + SEGMENT_BLOCKS, after, SEGMENT_BLOCKS), states)
        if states:
            await self._find_at_edges(hashes, first)

    async def _find_at(self, hashes: Sequence[bytes], begins: Iterable[int], states: bool) -> None:
        await asyncio.gather(*(self._find_in(hashes, begin, begin, states) for begin in begins))

    async def _find_at_edges(self, hashes: Sequence[bytes], first: int) -> None:
        """Look up whether the last present blocks of segments have states, whose first pages begin separate
        segments."""
        deepest = next((at for at in range(len(hashes) - 1, first - 1, -1) if hashes[at] in self), first)
        last = (deepest + 1) // SEGMENT_BLOCKS * SEGMENT_BLOCKS
        ends = range(last, max(first, last - MAX_ASKED_EDGES * SEGMENT_BLOCKS), -SEGMENT_BLOCKS)
        chains = ([*hashes[:end], state_page(hashes[end - 1], 0)] for end in ends)
        await asyncio.gather(*(self._find_in(chain, len(chain) - 1, len(chain) - 1, False) for chain in chains))

    async def _find_in(self, hashes: Sequence[bytes], first: int, begin: int, states: bool) -> None:
        """Find the blocks from index ``first`` on within the segment that begins with block ``begin``, and with
        ``states`` also those that have a state."""
        chain = hashes[begin : begin + SEGMENT_BLOCKS]
        segment, wanted = chain[0], hashes[first : begin + SEGMENT_BLOCKS]
        pages = [state_page(block_hash, 0) for block_hash in chain[: SEGMENT_BLOCKS - 1]] if states else []
        absent = not wanted or self._absent.get(wanted[0], 0.0) > time.monotonic()
        known = not pages and all(block_hash in self for block_hash in wanted)
        if absent or self._closed or not self.is_available() or known:
            return
        after, more = "", True
        while more:
            runs, more = await self._runs_of(segment, after)
            for block_hash, run in locate(runs, chain).items():
                if block_hash not in self:
                    at = begin + chain.index(block_hash)
                    parent = hashes[at - 1] if at else b""
                    self._record_block(BlockName(block_hash, parent, segment, 0), run)
            for page, run in locate_followers(runs, chain, pages).items():
                if page not in self:
                    self._record_block(BlockName(page, chain[pages.index(page)], segment, 0), run)
            missing = next((block_hash for block_hash in wanted if block_hash not in self), None)
            # If the list was truncated, continue with the names that begin with the next missing block.
            more = more and missing is not None and missing.hex() != after
            after = missing.hex() if missing is not None else ""
        if wanted[0] not in self:
            self._absent[wanted[0]] = time.monotonic() + ABSENT_MS / 1000
            while len(self._absent) > MAX_ABSENT_BLOCKS:
                self._absent.popitem(last=False)

    async def _runs_of(self, segment: bytes, after: str) -> tuple[list[RunName], bool]:
        """Return the runs of a segment with names after ``after``, and whether there are more. Concurrent callers share
        one request. Empty if the service fails."""
        key = segment, after
        listing = self._listing.get(key)
        if listing is None:
            if len(self._listing) >= MAX_WAITING_LISTS:
                return [], False
            listing = self._listing[key] = asyncio.create_task(self._list(segment, after), name="listing objects")
            listing.add_done_callback(lambda _: self._listing.pop(key))
        return await asyncio.shield(listing)

    async def _list(self, segment: bytes, after: str) -> tuple[list[RunName], bool]:
        try:
            async with self._lists:
                if not self.is_available():
                    return [], False
                names = await self._store.names(self._layout.folder(segment), after)
        except ObjectStoreFailure as error:
            self._pause_failed("objects were not listed", str(error))
            return [], False
        runs = [run for name in names if (run := RunName.parse(segment, name)) is not None]
        return runs, len(names) >= MAX_LISTED_NAMES

    def _record_block(self, name: BlockName, run: RunName) -> None:
        """Record that the object of ``run`` has a block."""
        before = self._runs.get(name.hash)
        if before is not None:
            self._drop(name.hash, before, report=False)
        self._kept[name.hash], self._runs[name.hash] = name, run
        self._of_run.setdefault(run, set()).add(name.hash)
        if len(self._kept) > MAX_KNOWN_BLOCKS:
            oldest = next(iter(self._kept))
            self._drop(oldest, self._runs[oldest])
            self.counts.dropped += 1

    async def load(self, hashes: Sequence[bytes], targets: Sequence[memoryview]) -> int:
        wanted = list(takewhile(self.__contains__, hashes))
        if self._closed or not wanted:
            return 0
        jobs = zip(wanted, targets, strict=False)
        parts, loads = list[list[tuple[bytes, memoryview]]](), list[asyncio.Task[int]]()
        for run, each in groupby(jobs, lambda job: self._run_of(job[0])):
            parts.append(list(each))
            # Look up queued blocks now, since they may be written when the task starts.
            work = self._load_run(run, parts[-1]) if run is not None else self._load_queued(parts[-1])
            loads.append(asyncio.create_task(work, name="reading an object"))

        def give_up() -> None:
            for load in loads:
                load.cancel()

        await until_over(asyncio.wait(loads), give_up)
        loaded = 0
        for part, load in zip(parts, loads, strict=True):
            good = 0 if load.cancelled() else load.result()
            loaded += good
            if good < len(part):
                break
        self.counts.loaded += loaded
        return loaded

    def _run_of(self, block_hash: bytes) -> RunName | None:
        """Return the run of a block, None for a pending write."""
        return None if block_hash in self._queued else self._runs[block_hash]

    def _load_queued(self, part: Sequence[tuple[bytes, memoryview]]) -> Coroutine[Any, Any, int]:
        """Load blocks whose writes are pending; the result is how many were loaded before a failure."""
        queued = {block_hash: self._queued[block_hash] for block_hash, _ in part}
        sources = {block_hash: (name.checksum, payload) for block_hash, (name, payload) in queued.items()}
        return until_over(asyncio.to_thread(_copy, part, sources))

    async def _load_run(self, run: RunName, part: Sequence[tuple[bytes, memoryview]]) -> int:
        """Load blocks of one run; return how many were loaded before a failure."""
        try:
            async with self._gets:
                if not self.is_available():
                    return 0
                data = await self._store.get(self._layout.path(run), self._layout.size_bytes(run))
            sources = self._layout.unpack(data, run)
            count = await until_over(asyncio.to_thread(_copy, part, sources))
            if count < len(part) and part[count][0] in sources:
                raise CorruptBlock("its bytes do not match their checksum")
        except MissingObject:
            self._forget(run)
            return 0
        except CorruptBlock as error:
            self.counts.corrupt += 1
            self._warn("an object is damaged; its blocks are computed again", f"{error} ({self._layout.path(run)})")
            self._forget(run)
            return 0
        except ObjectStoreFailure as error:
            self.counts.failed += len(part)
            self._pause_failed("blocks were not read", str(error))
            return 0
        self._breaker.in_time()
        # The name of the run also matched the remaining blocks, but its object lacks them.
        for block_hash, _ in part[count:]:
            self._drop(block_hash, run)
        self.touch([block_hash for block_hash, _ in reversed(part[:count])])
        return count

    def _forget(self, run: RunName) -> None:
        """Forget the blocks of a missing or damaged object."""
        for block_hash in list(self._of_run.get(run, ())):
            self._drop(block_hash, run)

    def _drop(self, block_hash: bytes, run: RunName, *, report: bool = True) -> None:
        if self._runs.get(block_hash) == run:
            name = self._kept.pop(block_hash)
            del self._runs[block_hash]
            blocks = self._of_run[run]
            blocks.discard(block_hash)
            if not blocks:
                del self._of_run[run]
            if report:
                self._unreported.append(name)

    def _pause_failed(self, message: str, failure: str) -> None:
        """Warn, and pause the service until a probe is answered."""
        self._warn(f"{message}; the object tier is paused", failure)
        if not self._breaker.paused:
            self._pause()

    async def _answers_probe(self) -> bool:
        try:
            # No chain has this segment: listing it only probes the service.
            await self._store.names(self._layout.folder(bytes(32)))
        except ObjectStoreFailure:
            return False
        return True

    async def close(self) -> None:
        """Wait for objects queued or being written, each for a limited time."""
        self._closed = True
        for task in (self._probing, *self._listing.values()):
            if task is not None:
                task.cancel()
        while self._work:
            await asyncio.gather(*self._work, return_exceptions=True)


def _copy(part: Iterable[tuple[bytes, memoryview]], sources: dict[bytes, tuple[int, memoryview]]) -> int:
    """Copy blocks until one is missing or has a wrong checksum; return how many were copied."""
    count = 0
    for block_hash, target in part:
        checksum, payload = sources.get(block_hash, (0, None))
        if payload is None:
            break
        target[:] = payload
        # Check the target, not the source, so that the block's readers get the checked bytes.
        if block_checksum(target) != checksum:
            break
        count += 1
    return count
