"""Implements the disk tier: blocks that left the pool, as files (disk_files.py), bounded in size, found again after a
restart.

    open --scan of headers--> serving --close--> writes under way end, the folder is free for another node
    a block     on its way --written--> kept --least recently used--> dropped
                    +--------failed-----> reported gone    +--read: does not fit its checksum--> removed, counted

The loop owns all state and never touches a file. One thread writes, stamps and removes files in the order of the
calls, so a block that is dropped and kept again ends up kept, and a file's stamp is that of its last use; other threads
read. Because a chain's last block leaves the pool first and is touched first, it is older here than the head and goes
first, as in the pool.

A disk may be full before the files take all of ``disk_bytes``, because others write to it, too. The tier then keeps as
many blocks as it has at that moment: new ones come into the files of the least recently used ones, which takes no more
room. It tries to grow again, by twice as much each time, and a try that fails loses no block.

A disk may hang for minutes. A read that is given up ends after the block that a thread is just reading, and one that
no thread has begun ends at once, so that few slots wait for late reads. A disk that was late is paused and probed
(:mod:`pillion.kvstore.tiers.tier_breaker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile

from pillion.kvstore.memory.memory import until_over
from pillion.kvstore.tiers.disk_tier.disk_files import NO_ROOM, SHARDS, BlockFileLayout, BlockFiles, DiskFolder
from pillion.kvstore.tiers.tiers import BlockName, Corrupt, MediumTier

log = logging.getLogger("pillion.kvnode")

READ_THREADS = 2
# This many threads read headers while the node starts, because a disk is faster with many requests at once.
SCAN_THREADS = 4
# This many bytes may wait to be written; further blocks are refused, and so forgotten.
MAX_QUEUED_BYTES = 512 * 2**20
# A read that is given up is late when threads have been at it for this long, or when no read at all has brought a block
# for this long. The time in which it waits for a thread is not the disk's.
LATE_S = 1.0
# After an error nothing is written for this long, so that a bad disk is not tried for every block; and a disk that was
# full is asked for more room after this time.
PAUSE_S = 5.0


async def open_disk_tier(folder: DiskFolder, *, namespace: bytes, block_bytes: int, disk_bytes: int) -> DiskTier:
    """Opens the disk tier. Blocks of this namespace that earlier nodes left are kept, the newest first as far as they
    fit.

    Raises ConfigError if the folder cannot be used.

    Args:
        namespace: 32 bytes that define what the blocks' bytes mean; files of other namespaces are ignored.
        disk_bytes: most bytes that the files of this namespace may take.
    """
    layout = BlockFileLayout(namespace, block_bytes)
    tier = DiskTier(folder, await asyncio.to_thread(BlockFiles, folder, layout), disk_bytes)
    await tier.restore()
    return tier


@dataclass(frozen=True, slots=True)
class _BlockWrite:
    """Describes a block that is to be written; ``stamp`` is its place in the order of use."""

    name: BlockName
    payload: memoryview
    stamp: int


@dataclass(slots=True)
class _Written:
    """Says what became of the writes of one call.

    Attributes:
        blocks: how many of them were written, the first ones; the disk was not asked for the others after an error.
        error: the error that ended it.
        spared: the dropped blocks whose files are still there after that error.
    """

    blocks: int = 0
    error: OSError | None = None
    spared: list[BlockName] = field(default_factory=list)


class DiskTier(MediumTier):
    """Implements a tier on a disk; :func:`open_disk_tier` makes it."""

    name = "disk"

    def __init__(self, folder: DiskFolder, files: BlockFiles, disk_bytes: int) -> None:
        super().__init__(files.root)
        self._folder = folder
        self._files = files
        self._block_bytes = files.layout.block_bytes
        self._max_blocks = disk_bytes // files.layout.file_bytes
        # The disk has room for this many blocks, as far as is known; the next try to grow adds ``_growth`` to it.
        self._fitting = self._max_blocks
        self._growth = 1
        self._coming: set[bytes] = set()
        self._reading = 0
        # This is when a block was last read, by time.monotonic(); threads write it.
        self._moved_s = 0.0
        self._writer = ThreadPoolExecutor(1, "kv-disk-write")
        self._readers = ThreadPoolExecutor(READ_THREADS, "kv-disk-read")
        self._work: dict[asyncio.Future[list[BlockName]], None] = {}
        self._stamp = 0
        self._paused_until_s = self._grow_at_s = 0.0

    @property
    def short_blocks(self) -> int:
        """Gives how many fewer blocks the disk has room for than the tier may keep, because others filled it."""
        return self._max_blocks - self._fitting

    def answers(self) -> bool:
        now = time.monotonic()
        if self._reading and now - self._moved_s >= LATE_S:
            self._late()
        return super().answers()

    def room_bytes(self) -> int:
        shut = self._closed or self._breaker.paused
        if shut or time.monotonic() < self._paused_until_s:
            return 0
        self._try_to_grow()
        most_blocks = min(MAX_QUEUED_BYTES // self._block_bytes, self._fitting)
        return max(0, most_blocks - len(self._coming)) * self._block_bytes

    def by_use(self) -> list[bytes]:
        """Returns the hashes of all kept blocks, least recently used first."""
        return list(self._kept)

    def touch(self, hashes: Sequence[bytes]) -> None:
        stamps = {block_hash: self._next_stamp() for block_hash in hashes if block_hash in self._kept}
        for block_hash in stamps:
            self._kept.move_to_end(block_hash)
        if stamps and not self._closed and not self._breaker.paused:
            self._writer.submit(self._stamp_files, stamps)

    async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        """Stores blocks in files; where the caller is cancelled, the writing still goes on to its end."""
        work = asyncio.ensure_future(self._store(blocks))
        self._work[work] = None
        work.add_done_callback(lambda done: self._work.pop(done, None))
        return await asyncio.shield(work)

    async def load(self, hashes: Sequence[bytes], targets: Sequence[memoryview]) -> int:
        """Reads blocks. A cancelled caller is held for at most the time to read one of them."""
        names = [self._kept[block_hash] for block_hash in takewhile(self._kept.__contains__, hashes)]
        if self._closed or not names:
            return 0
        jobs = list(zip(names, targets, strict=False))
        given_up, started_s = threading.Event(), list[float]()
        if not self._reading:
            self._moved_s = time.monotonic()
        shares = (jobs[first::READ_THREADS] for first in range(min(READ_THREADS, len(jobs))))
        reads = [self._readers.submit(self._read, share, given_up, started_s) for share in shares]

        def give_up() -> None:
            given_up.set()
            for read in reads:
                # Cancelling ends only reads that no thread has begun.
                read.cancel()
            now = time.monotonic()
            if started_s and now - started_s[0] >= LATE_S:
                self._late()

        self._reading += 1
        try:
            await until_over(asyncio.wait(list(map(asyncio.wrap_future, reads))), give_up)
        finally:
            self._reading -= 1
        if time.monotonic() - started_s[0] < LATE_S:
            self._breaker.in_time()
        failures: list[str | None] = [None] * len(jobs)
        for first, read in enumerate(reads):
            failures[first::READ_THREADS] = read.result()
        return self._came(names, failures)

    async def restore(self) -> None:
        """Reads the headers of the files that are there. It is called once, before anything else."""
        began_s = time.monotonic()
        loop = asyncio.get_running_loop()
        # Where the clock was set back, the next stamp is still above all those of the files.
        self._kept, self._stamp, surplus, broken = await loop.run_in_executor(self._writer, self._scan)
        self.counts.corrupt += broken
        self.counts.dropped += len(surplus)
        if surplus:
            self._writer.submit(self._remove_files, surplus)
        log.info(
            "%s has %d blocks (%.2f s); %d broken files, %d too many",
            self._files.root, len(self._kept), time.monotonic() - began_s, broken, len(surplus),
        )  # fmt: skip

    async def close(self) -> None:
        self._closed = True
        if self._probing is not None:
            self._probing.cancel()
        while self._work:
            await asyncio.gather(*self._work, return_exceptions=True)
        await asyncio.to_thread(self._shut_down)

    # The following methods run on the event loop.

    async def _store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        gone, self._unreported = self._unreported, []
        jobs: list[_BlockWrite] = []
        for name, payload in blocks:
            if name.hash in self._kept:
                self.touch([name.hash])
            elif name.hash in self._coming:
                continue
            elif self.room_bytes() < self._block_bytes or payload.nbytes != self._block_bytes:
                self.counts.failed += 1
                gone.append(name)
            else:
                self._coming.add(name.hash)
                jobs.append(_BlockWrite(name, payload, self._next_stamp()))
        left, error = await self._write_blocks(jobs, gone)
        if error is not None and error.errno in NO_ROOM and self._fitting:
            # They come into files of older blocks now. Of a few, the last ones are wanted most: they are nearer to the
            # heads of chains.
            first = max(0, len(left) - self._fitting)
            self._coming.update(job.name.hash for job in left[first:])
            left[first:], error = await self._write_blocks(left[first:], gone)
        if error is not None and (error.errno not in NO_ROOM or left):
            self._paused_until_s = time.monotonic() + PAUSE_S
        self.counts.failed += len(left)
        # Some of the blocks may have been stored again meanwhile.
        return [name for name in (*gone, *(job.name for job in left)) if name.hash not in self._kept]

    async def _write_blocks(
        self, jobs: list[_BlockWrite], gone: list[BlockName]
    ) -> tuple[list[_BlockWrite], OSError | None]:
        """Writes blocks, which are in ``_coming``. Returns those that were not written, and the error that is the
        reason. The blocks that made room are appended to ``gone``."""
        if not jobs:
            return [], None
        surplus = self._make_room()
        try:
            # A read that began earlier may still be in one of the old files.
            may_reuse = not self._reading
            loop = asyncio.get_running_loop()
            written = await loop.run_in_executor(self._writer, self._write, surplus, may_reuse, jobs)
        finally:
            self._coming.difference_update(job.name.hash for job in jobs)
        for job in jobs[: written.blocks]:
            self._kept[job.name.hash] = job.name
        self.counts.stored += written.blocks
        spared = {name.hash for name in written.spared}
        for name in reversed(written.spared):
            if self._kept.setdefault(name.hash, name) is name:
                self._kept.move_to_end(name.hash, last=False)
        self.counts.dropped += len(surplus) - len(spared)
        gone += [name for name in surplus if name.hash not in spared]
        if written.error is not None:
            self._note_error(written.error)
        return jobs[written.blocks :], written.error

    def _note_error(self, error: OSError) -> None:
        """Logs an error of a write. Where the disk is full, the tier keeps as many blocks as it has from now on."""
        failure = error.strerror or str(error)
        if error.errno not in NO_ROOM:
            self._warn("cannot write blocks to disk", failure)
            return
        was_short = self.short_blocks
        self._fitting, self._growth = min(self._fitting, len(self._kept)), 1
        self._grow_at_s = time.monotonic() + PAUSE_S
        if not was_short:
            self._warn(
                "the disk is full, so the disk tier keeps fewer blocks until there is room again",
                f"{failure}: {self._fitting} instead of {self._max_blocks}",
            )

    def _try_to_grow(self) -> None:
        """Takes it that a disk that was full has room for more, once in a while and where all known room is used."""
        now = time.monotonic()
        if not self.short_blocks or now < self._grow_at_s or len(self._kept) < self._fitting:
            return
        self._fitting = min(self._max_blocks, self._fitting + self._growth)
        self._growth *= 2
        self._grow_at_s = now + PAUSE_S
        if not self.short_blocks:
            log.info("the disk tier has room for all of its %d blocks again (%s)", self._max_blocks, self._files.root)

    def _make_room(self) -> list[BlockName]:
        """Drops the least recently used blocks until all kept and coming ones fit; returns the dropped ones."""
        surplus = []
        while self._kept and len(self._kept) + len(self._coming) > self._fitting:
            surplus.append(self._kept.popitem(last=False)[1])
        return surplus

    def _came(self, names: list[BlockName], failures: list[str | None]) -> int:
        """Counts a read; returns how many blocks came before the first that did not. Broken blocks are removed."""
        good = len(list(takewhile(lambda failure: failure is None, failures)))
        # The head of a chain must stay newer than the chain's other blocks. Blocks after a failed one were used, too.
        self.touch(
            [name.hash for name, failure in reversed(list(zip(names, failures, strict=True))) if failure is None]
        )
        self.counts.loaded += good
        for name, failure in zip(names, failures, strict=True):
            # The block was dropped, and perhaps written again, while it was read: it is another file now.
            if failure is None or self._kept.get(name.hash) is not name:
                continue
            del self._kept[name.hash]
            self._unreported.append(name)
            if failure == _CORRUPT:
                self.counts.corrupt += 1
            else:
                self.counts.failed += 1
            self._warn("a block on disk is lost and will be computed again", failure)
            if not self._closed:
                self._writer.submit(self._remove_files, [name])
        return good

    def _late(self) -> None:
        if self._closed or self._breaker.paused:
            return
        self._pause()
        log.warning(
            "the disk tier did not answer within %.1f s: nothing is read from it or written to it until a probe does; "
            "prompts compute what is there (%s)", LATE_S, self._files.root,
        )  # fmt: skip

    async def _answers_probe(self) -> bool:
        """Reads a block. A probe waits for a thread as every read does, so while all threads hang there is one probe,
        and it ends soon after they do."""
        oldest = next(iter(self._kept), None)
        return await asyncio.wrap_future(self._readers.submit(self._probe_s, oldest)) < LATE_S

    def _next_stamp(self) -> int:
        self._stamp = max(self._stamp + 1, time.time_ns())
        return self._stamp

    # The following methods run in threads.

    def _write(self, surplus: list[BlockName], may_reuse: bool, jobs: list[_BlockWrite]) -> _Written:
        """Writes ``jobs`` into the files of ``surplus``, as far as there are any and ``may_reuse`` says that nobody
        reads them. Ends with the first error."""
        written, old = _Written(), [name.hash for name in surplus] if may_reuse else []
        try:
            if not may_reuse:
                self._remove_files(surplus)
            for job in jobs:
                self._files.write(job.name, job.payload, job.stamp, old.pop(0) if old else b"")
                written.blocks += 1
        except OSError as error:
            written.error = error
            written.spared = [name for name in surplus if self._files.has(name.hash)]
        else:
            self._remove_files(surplus[len(surplus) - len(old) :])
        return written

    def _read(
        self, jobs: list[tuple[BlockName, memoryview]], given_up: threading.Event, started_s: list[float]
    ) -> list[str | None]:
        started_s.append(time.monotonic())
        failures: list[str | None] = []
        for name, target in jobs:
            if given_up.is_set():
                break
            try:
                self._files.read(name, target)
                failures.append(None)
            except Corrupt:
                failures.append(_CORRUPT)
            except OSError as error:
                failures.append(error.strerror or str(error))
            self._moved_s = time.monotonic()
        return failures

    def _probe_s(self, block_hash: bytes | None) -> float:
        """Returns the seconds that it took to read a block, or to learn that it cannot be read."""
        began_s = time.monotonic()
        with contextlib.suppress(OSError):
            if block_hash is not None:
                self._files.probe(block_hash)
        return time.monotonic() - began_s

    def _remove_files(self, names: Iterable[BlockName]) -> None:
        """Removes files. A block that cannot be removed comes back after a restart, and is still good then."""
        for name in names:
            self._files.remove(name.hash)

    def _stamp_files(self, stamps: dict[bytes, int]) -> None:
        for block_hash, stamp in stamps.items():
            self._files.stamp(block_hash, stamp)

    def _scan(self) -> tuple[OrderedDict[bytes, BlockName], int, list[BlockName], int]:
        """Gives the kept blocks, least recently used first; the newest stamp of a file; the blocks that do not fit; the
        number of broken files."""
        with ThreadPoolExecutor(SCAN_THREADS, "kv-disk-scan") as threads:
            found = [item for part in threads.map(self._files.scan, range(SHARDS)) for item in part]
        names = [name for _, name in sorted(found, key=lambda item: item[0]) if name is not None]
        broken = len(found) - len(names)
        surplus = names[: max(0, len(names) - self._max_blocks)]
        newest = max((stamp for stamp, _ in found), default=0)
        return OrderedDict((name.hash, name) for name in names[len(surplus) :]), newest, surplus, broken

    def _shut_down(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()
        self._folder.close()


_CORRUPT = "it does not fit its header or checksum"
