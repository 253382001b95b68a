"""Disk tier: evicted blocks as files (disk_files.py), limited in size, which survive restarts.

    open --scan of headers--> serving --close--> pending writes end, the folder is free for another node
    a block     queued --written--> kept --least recently used--> dropped
                  +------failed-----> reported lost   +--read: checksum mismatch--> removed, counted

The loop owns all state and never touches a file. One thread writes, stamps and removes files in the order of the calls,
so a block that is dropped and stored again ends up stored, and a file's stamp is that of its last use; other threads
read. A chain's last block leaves the pool and is touched first, so it is older here than the head and is dropped first,
as in the pool.

A disk may be full before the files use ``disk_bytes``, because others write to it. The tier is then limited to its
current number of blocks: new ones reuse the files of the least recently used ones, which needs no more space. It
tries to grow again, by doubling steps, and a failed attempt loses no block.

A disk may hang for minutes. An abandoned read ends after the block that a thread is currently reading, and one that no
thread has started ends at once, so that few slots wait for late reads. A late disk is paused and probed
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
from pillion.kvstore.tiers.tiers import BlockName, CorruptBlock, MediumTier

log = logging.getLogger("pillion.kvnode")

READ_THREADS = 2
MAX_QUEUED_BYTES = 512 * 2**20
# An abandoned read is late if it has run for this long, not counting its wait for a thread, or if no read has finished
# a block for this long.
LATE_S = 1.0
# Pause of writes after an error, so that a bad disk is not tried for every block; also the interval of attempts to grow
# on a full disk.
PAUSE_S = 5.0


async def open_disk_tier(folder: DiskFolder, *, namespace: bytes, block_bytes: int, disk_bytes: int) -> DiskTier:
    """Open the disk tier. Blocks of this namespace that earlier nodes left are kept, newest first as far as they fit.

    Raises ConfigError if the folder cannot be used.

    Args:
        namespace: 32 bytes that determine the meaning of the blocks' bytes; files of other namespaces are ignored.
        disk_bytes: limit for the files of this namespace.
    """
    layout = BlockFileLayout(namespace, block_bytes)
    tier = DiskTier(folder, await asyncio.to_thread(BlockFiles, folder, layout), disk_bytes)
    await tier.restore()
    return tier


@dataclass(frozen=True, slots=True)
class _BlockWrite:
    """A block to write, with its LRU stamp."""

    name: BlockName
    payload: memoryview
    stamp: int


@dataclass(slots=True)
class _Written:
    """Result of one batch of writes.

    Attributes:
        blocks: number of blocks written before the first error.
        error: that error.
        spared: blocks to be dropped whose files still exist after that error.
    """

    blocks: int = 0
    error: OSError | None = None
    spared: list[BlockName] = field(default_factory=list)


class DiskTier(MediumTier):
    """Tier on a disk. Created by :func:`open_disk_tier`."""

    name = "disk"

    def __init__(self, folder: DiskFolder, files: BlockFiles, disk_bytes: int) -> None:
        super().__init__(files.root)
        self._folder = folder
        self._files = files
        self._block_bytes = files.layout.block_bytes
        self._max_blocks = disk_bytes // files.layout.file_bytes
        # Blocks for which the disk probably has room; the next attempt to grow adds ``_growth``.
        self._capacity = self._max_blocks
        self._growth = 1
        self._writing: set[bytes] = set()
        self._reading = 0
        self._progress_s = 0.0
        self._writer = ThreadPoolExecutor(1, "kv-disk-write")
        self._readers = ThreadPoolExecutor(READ_THREADS, "kv-disk-read")
        self._work: dict[asyncio.Future[list[BlockName]], None] = {}
        self._stamp = 0
        self._paused_until_s = self._grow_at_s = 0.0

    @property
    def short_blocks(self) -> int:
        """Blocks by which the disk's room falls short of the tier's limit, because other programs fill it."""
        return self._max_blocks - self._capacity

    def is_available(self) -> bool:
        now = time.monotonic()
        if self._reading and now - self._progress_s >= LATE_S:
            self._pause_late()
        return super().is_available()

    def room_bytes(self) -> int:
        shut = self._closed or self._breaker.paused
        if shut or time.monotonic() < self._paused_until_s:
            return 0
        self._try_to_grow()
        most_blocks = min(MAX_QUEUED_BYTES // self._block_bytes, self._capacity)
        return max(0, most_blocks - len(self._writing)) * self._block_bytes

    def by_use(self) -> list[bytes]:
        """Return the hashes of all kept blocks, least recently used first."""
        return list(self._kept)

    def touch(self, hashes: Sequence[bytes]) -> None:
        stamps = {block_hash: self._next_stamp() for block_hash in hashes if block_hash in self._kept}
        for block_hash in stamps:
            self._kept.move_to_end(block_hash)
        if stamps and not self._closed and not self._breaker.paused:
            self._writer.submit(self._stamp_files, stamps)

    async def store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        """Store blocks in files; writing continues even if the caller is cancelled."""
        work = asyncio.ensure_future(self._store(blocks))
        self._work[work] = None
        work.add_done_callback(lambda done: self._work.pop(done, None))
        return await asyncio.shield(work)

    async def load(self, hashes: Sequence[bytes], targets: Sequence[memoryview]) -> int:
        """Read blocks. A cancelled caller waits for at most one block's read."""
        names = [self._kept[block_hash] for block_hash in takewhile(self._kept.__contains__, hashes)]
        if self._closed or not names:
            return 0
        jobs = list(zip(names, targets, strict=False))
        given_up, started_s = threading.Event(), list[float]()
        if not self._reading:
            self._progress_s = time.monotonic()
        shares = (jobs[first::READ_THREADS] for first in range(min(READ_THREADS, len(jobs))))
        reads = [self._readers.submit(self._read, share, given_up, started_s) for share in shares]

        def give_up() -> None:
            given_up.set()
            for read in reads:
                # Only ends reads that no thread has started.
                read.cancel()
            now = time.monotonic()
            if started_s and now - started_s[0] >= LATE_S:
                self._pause_late()

        self._reading += 1
        try:
            await until_over(asyncio.wait(list(map(asyncio.wrap_future, reads))), give_up)
        finally:
            self._reading -= 1
        if time.monotonic() - started_s[0] < LATE_S:
            self._breaker.in_time()
        failures: list[CorruptBlock | OSError | None] = [None] * len(jobs)
        for first, read in enumerate(reads):
            failures[first::READ_THREADS] = read.result()
        return self._record_reads(names, failures)

    async def restore(self) -> None:
        """Read the headers of existing files. Call once, before anything else."""
        began_s = time.monotonic()
        loop = asyncio.get_running_loop()
        # New stamps exceed the newest file's even if the clock was set back.
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

    async def _store(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[BlockName]:
        gone, self._unreported = self._unreported, []
        jobs: list[_BlockWrite] = []
        for name, payload in blocks:
            if name.hash in self._kept:
                self.touch([name.hash])
            elif name.hash in self._writing:
                continue
            elif self.room_bytes() < self._block_bytes or payload.nbytes != self._block_bytes:
                self.counts.failed += 1
                gone.append(name)
            else:
                self._writing.add(name.hash)
                jobs.append(_BlockWrite(name, payload, self._next_stamp()))
        left, error = await self._write_blocks(jobs, gone)
        if error is not None and error.errno in NO_ROOM and self._capacity:
            # Retry, reusing the files of older blocks. If only some fit, prefer the last ones, which are nearer to the
            # heads of chains.
            first = max(0, len(left) - self._capacity)
            self._writing.update(job.name.hash for job in left[first:])
            left[first:], error = await self._write_blocks(left[first:], gone)
        if error is not None and (error.errno not in NO_ROOM or left):
            self._paused_until_s = time.monotonic() + PAUSE_S
        self.counts.failed += len(left)
        return [name for name in (*gone, *(job.name for job in left)) if name.hash not in self._kept]

    async def _write_blocks(
        self, jobs: list[_BlockWrite], gone: list[BlockName]
    ) -> tuple[list[_BlockWrite], OSError | None]:
        """Write blocks, which are in ``_writing``. Return those not written, with the error. Appends the blocks dropped
        to make room to ``gone``."""
        if not jobs:
            return [], None
        surplus = self._drop_surplus()
        try:
            # An earlier read may still be using an old file.
            may_reuse = not self._reading
            loop = asyncio.get_running_loop()
            written = await loop.run_in_executor(self._writer, self._write, surplus, may_reuse, jobs)
        finally:
            self._writing.difference_update(job.name.hash for job in jobs)
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
        """Log a write error. If the disk is full, limit the tier to its current number of blocks."""
        failure = error.strerror or str(error)
        if error.errno not in NO_ROOM:
            self._warn("cannot write blocks to disk", failure)
            return
        was_short = self.short_blocks
        self._capacity, self._growth = min(self._capacity, len(self._kept)), 1
        self._grow_at_s = time.monotonic() + PAUSE_S
        if not was_short:
            self._warn(
                "the disk is full, so the disk tier keeps fewer blocks until there is room again",
                f"{failure}: {self._capacity} instead of {self._max_blocks}",
            )

    def _try_to_grow(self) -> None:
        """Every PAUSE_S, assume that a full disk has room for more blocks, if all known room is used."""
        now = time.monotonic()
        if not self.short_blocks or now < self._grow_at_s or len(self._kept) < self._capacity:
            return
        self._capacity = min(self._max_blocks, self._capacity + self._growth)
        self._growth *= 2
        self._grow_at_s = now + PAUSE_S
        if not self.short_blocks:
            log.info("the disk tier has room for all of its %d blocks again (%s)", self._max_blocks, self._files.root)

    def _drop_surplus(self) -> list[BlockName]:
        """Drop the least recently used blocks until all kept and queued ones fit; return the dropped ones."""
        surplus = []
        while self._kept and len(self._kept) + len(self._writing) > self._capacity:
            surplus.append(self._kept.popitem(last=False)[1])
        return surplus

    def _record_reads(self, names: list[BlockName], failures: list[CorruptBlock | OSError | None]) -> int:
        """Record the results of a read: touch the intact blocks, remove the others. Return how many were read before
        the first failure. ``failures``: of each block, None for an intact one."""
        good = len(list(takewhile(lambda failure: failure is None, failures)))
        # In reverse order, since a chain's head must stay more recent than its other blocks. Blocks read after a failed
        # one count as used.
        self.touch(
            [name.hash for name, failure in reversed(list(zip(names, failures, strict=True))) if failure is None]
        )
        self.counts.loaded += good
        for name, failure in zip(names, failures, strict=True):
            # A block dropped during the read may have been rewritten since, as another file.
            if failure is None or self._kept.get(name.hash) is not name:
                continue
            del self._kept[name.hash]
            self._unreported.append(name)
            if isinstance(failure, CorruptBlock):
                self.counts.corrupt += 1
                reason = "it does not match its header or checksum"
            else:
                self.counts.failed += 1
                reason = failure.strerror or str(failure)
            self._warn("a block on disk is lost and will be computed again", reason)
            if not self._closed:
                self._writer.submit(self._remove_files, [name])
        return good

    def _pause_late(self) -> None:
        if self._closed or self._breaker.paused:
            return
        self._pause()
        log.warning(
            "the disk tier did not answer within %.1f s: nothing is read from it or written to it until a probe does; "
            "its blocks are computed again (%s)", LATE_S, self._files.root,
        )  # fmt: skip

    async def _answers_probe(self) -> bool:
        """Read a block; return whether that took less than LATE_S. A probe waits for a thread as a read does, so it
        ends soon after the threads stop hanging."""
        oldest = next(iter(self._kept), None)
        return await asyncio.wrap_future(self._readers.submit(self._probe_s, oldest)) < LATE_S

    def _next_stamp(self) -> int:
        self._stamp = max(self._stamp + 1, time.time_ns())
        return self._stamp

    # The methods below run on worker threads.

    def _write(self, surplus: list[BlockName], may_reuse: bool, jobs: list[_BlockWrite]) -> _Written:
        """Write ``jobs``, into the files of the dropped blocks ``surplus`` as long as there are some, if ``may_reuse``.
        Stops at the first error."""
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
    ) -> list[CorruptBlock | OSError | None]:
        """Read blocks until ``given_up`` is set; return the failure of each block read, None for an intact one."""
        started_s.append(time.monotonic())
        failures: list[CorruptBlock | OSError | None] = []
        for name, target in jobs:
            if given_up.is_set():
                break
            try:
                self._files.read(name, target)
                failures.append(None)
            except (CorruptBlock, OSError) as error:
                # Without its traceback, whose frames would keep the target alive.
                failures.append(error.with_traceback(None))
            self._progress_s = time.monotonic()
        return failures

    def _probe_s(self, block_hash: bytes | None) -> float:
        """Return the seconds taken to read a block, or to fail."""
        began_s = time.monotonic()
        with contextlib.suppress(OSError):
            if block_hash is not None:
                self._files.probe(block_hash)
        return time.monotonic() - began_s

    def _remove_files(self, names: Iterable[BlockName]) -> None:
        """Remove files. The block of a file that cannot be removed is in the tier again after a restart."""
        for name in names:
            self._files.remove(name.hash)

    def _stamp_files(self, stamps: dict[bytes, int]) -> None:
        for block_hash, stamp in stamps.items():
            self._files.stamp(block_hash, stamp)

    def _scan(self) -> tuple[OrderedDict[bytes, BlockName], int, list[BlockName], int]:
        """Read all headers. Return the blocks to keep, least recently used first; the newest stamp; the blocks beyond
        the limit; the number of broken files."""
        # More than READ_THREADS, since a disk is faster with many requests at once.
        with ThreadPoolExecutor(4, "kv-disk-scan") as threads:
            scanned = [item for part in threads.map(self._files.scan, range(SHARDS)) for item in part]
        names = [name for _, name in sorted(scanned, key=lambda item: item[0]) if name is not None]
        broken = len(scanned) - len(names)
        surplus = names[: max(0, len(names) - self._max_blocks)]
        newest = max((stamp for stamp, _ in scanned), default=0)
        return OrderedDict((name.hash, name) for name in names[len(surplus) :]), newest, surplus, broken

    def _shut_down(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()
        self._folder.close()
