"""A pool whose memory outlives its node.

    start    keeper --descriptors of this node's previous process--> reopened, if they fit this node's flags
    shape    reopened --same block bytes and namespace, and no process but drained ones uses it--> recovered
               '-- another shape; or still used after PATIENCE_S --> left to its users, and a fresh one created
    fresh    pool and table --> owned --> sent to the keeper --> the first worker gets the pool
    forsaken no later process recovers the pool; the keeper drops a forsaken pool on GPUs

**Which processes may still write.** Workers of the previous process write to their slots until they detect its end. A
worker locks a place of the pool's file before the node leases it any slot, and holds the lock while it maps the pool.
So a pool is recovered when only workers that have reported the end of their last step to this node have places locked.
Reading is no safer than writing: a worker that has not detected the end reads blocks that it had pinned, which must not
be evicted meanwhile. The previous node itself, whose threads fetch blocks, has the place OWNER locked likewise.

**A pool on GPUs.** GPU memory has no such locks, so the places are bytes of a separate file of one page. Locks are
not enough: a process's files are closed in any order, and a kernel that it has launched may run while the GPU's own
file is open. So the node also sends the keeper a pidfd of each worker's process before leasing it any slot, and
recovers the pool when those processes have *exited*, which the kernel reports after closing all their files. For the
same reason the node's own process is among them, for a pool in host memory as well: a network adapter that fetches
blocks for it writes to memory as long as the adapter's file is open.

No node recovers a pool (:meth:`SurvivingPool.forsake`) that was used by a worker of a version without places, or by a
worker with several processes on GPUs, of which the node learns too late.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import secrets
import select
import time
from collections.abc import Collection
from pathlib import Path

from pillion.errors import ConfigError, PillionError, Unavailable
from pillion.kvstore.hashing import HASH_BYTES
from pillion.kvstore.ledger.records import PoolShape
from pillion.kvstore.memory.memory import until_over
from pillion.kvstore.memory.segment import map_shared
from pillion.kvstore.pool_survival.keeper_client import KeeperDescriptors, PoolKeeper
from pillion.kvstore.pool_survival.keeper_messages import MAX_KEPT_PROCESSES, MIN_KEPT_MEMORIES
from pillion.kvstore.pool_survival.owned_segment import OWNER, OwnedSegment
from pillion.kvstore.pool_survival.slot_table import POOL_ID_BYTES, WORD_BYTES, SlotTable, SurvivingBlock, table_bytes
from pillion.net.private_socket import close_all

log = logging.getLogger("pillion.kvnode")

# How long to wait for workers of the previous process to stop using a pool: longer than a step. Without the pool every
# stream recomputes its prompt, but a paused worker must not delay the other workers.
PATIENCE_S = 5.0
# Interval of checks whether the pool is still used.
POLL_S = 0.01


class SurvivingPool:
    """A pool and its table, both owned by this process.

    Attributes:
        places: segment whose file has the places: the pool in host memory, or the separate file of a pool on GPUs.
        memory_fds: descriptors of GPU memory, one per shard; empty for a pool in host memory.
        table: table of the blocks in the pool.
        entries: blocks of the node's previous process; empty for a fresh pool.
        recovered: True if the previous process created the pool.
        forsaken: True if no later process can recover the pool.
        stale: True while the keeper holds pidfds of processes that no longer use the pool.
    """

    def __init__(
        self,
        memory_fds: list[int],
        places: OwnedSegment,
        table_segment: OwnedSegment,
        table: SlotTable,
        words: memoryview,
    ) -> None:
        self.memory_fds, self.places = memory_fds, places
        self.table, self.entries = table, list[SurvivingBlock]()
        self.recovered = self.forsaken = self.stale = False
        self._table_segment, self._words = table_segment, words
        # (place, pidfd) of the processes that used the pool before this node started, and by epoch of those since.
        self._before: list[tuple[int, int]] = []
        self._processes: dict[int, tuple[int, int]] = {}
        self._ended: list[int] = []
        self._sending = asyncio.Lock()

    @property
    def pool_id(self) -> str:
        """Identifies the memory to workers that have mapped it."""
        return self.table.pool_id.hex()

    @classmethod
    def make(cls, segment: OwnedSegment, shape: PoolShape, memory_fds: Collection[int] = ()) -> SurvivingPool | None:
        """Create a fresh pool. ``segment`` has its places and belongs to the pool on success; the memory is in
        ``memory_fds``, which are duplicated, or ``segment`` itself if there are none. Return None if the system has no
        open file description locks, or the shape cannot be recorded."""
        if len(shape.namespace) != 2 * HASH_BYTES:
            return None
        with contextlib.ExitStack() as undo:
            table_segment = undo.enter_context(contextlib.closing(OwnedSegment(table_bytes(shape.num_slots))))
            try:
                if not segment.own():
                    raise ConfigError("a fresh pool has another owner")
                made = cls([], segment, table_segment, *_fresh_table(table_segment, shape))
                undo.callback(made.close)
                made._name_owner(needed=bool(memory_fds))
                for descriptor in memory_fds:
                    made.memory_fds.append(os.dup(descriptor))
            except OSError as error:
                log.info(
                    "this system cannot show which processes use a pool, so the pool ends with its node: %s",
                    error.strerror,
                )
                return None
            undo.pop_all()
        return made

    @classmethod
    def reopen(cls, kept: KeeperDescriptors, shards: int) -> SurvivingPool | None:
        """Return the pool of the previous process, given its descriptors; None if it cannot be recovered. ``shards``:
        number of its shards on GPUs. Closes the descriptors that the pool does not need."""
        with contextlib.ExitStack() as undo:
            undo.callback(kept.close)
            try:
                if len(kept.memories) != shards + MIN_KEPT_MEMORIES:
                    raise ConfigError(f"it has {len(kept.memories)} memories, this node's {shards + MIN_KEPT_MEMORIES}")
                table_segment, places = (
                    undo.enter_context(contextlib.closing(OwnedSegment.from_descriptor(kept.memories.pop())))
                    for _ in range(MIN_KEPT_MEMORIES)
                )
                words = table_words(table_segment)
                undo.callback(words.release)
                pool = cls(kept.memories, places, table_segment, SlotTable.open(words), words)
            except (PillionError, OSError, ValueError) as error:
                log.warning("the pool of this node's previous process is not recovered: %s", error)
                return None
            undo.pop_all()
        pool._before = kept.processes
        return pool

    async def wait_unused(self, drained: Collection[int]) -> bool:
        """Lock the place OWNER and wait until no process uses the pool; then return True. ``drained``: places of
        workers that have ended their last step, which are ignored; it may grow during the call. Return False after
        PATIENCE_S, or if the pool's users cannot be determined."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                left = self.places.users() if self.places.own() else {OWNER}
                left |= {place for place, pidfd in self._before if place not in left and not _has_ended(pidfd)}
                left -= set(drained)
                if not left and OWNER not in {place for place, _ in self._processes.values()}:
                    self._name_owner(needed=bool(self.memory_fds))
            except OSError as error:
                log.warning(
                    "it is unknown which processes use the pool of this node's previous process: %s", error.strerror
                )
                return False
            if not left:
                return True
            if time.monotonic() >= until_s:
                log.warning(
                    "the pool of this node's previous process is not recovered: %d processes still use it", len(left)
                )
                return False
            await asyncio.sleep(POLL_S)

    async def read(self) -> None:
        """Read all entries of the table, on a thread."""
        self.entries = await until_over(asyncio.to_thread(self.table.blocks))
        self.recovered = True
        while self._before:
            os.close(self._before.pop()[1])

    def forsake(self) -> None:
        """Prevent any later process from recovering the pool."""
        self.forsaken = True
        self.table.forsake()

    async def admit(self, keeper: PoolKeeper, name: str, epoch: int, place: int, pidfd: int) -> None:
        """Register a worker's process with the keeper before the worker gets any slot; ``pidfd`` is duplicated. If the
        keeper fails, no node recovers the pool."""
        if self.forsaken:
            return
        if len(self._processes) >= MAX_KEPT_PROCESSES:
            log.warning("this pool will not outlive its node: more than %d processes use it", MAX_KEPT_PROCESSES)
            self.forsake()
            return
        self._processes[epoch] = place, os.dup(pidfd)
        try:
            await self.send(keeper, name)
        except Unavailable as error:
            log.warning("this pool will not outlive its node: %s", error.message)
            self.forsake()

    def ended(self, epoch: int) -> None:
        """Handle the end of a worker's use of the pool. Idempotent."""
        if epoch in self._processes:
            self._ended.append(self._processes.pop(epoch)[1])
            self.stale = True

    async def send(self, keeper: PoolKeeper, name: str) -> None:
        """Send the keeper the descriptors of the whole pool, unless it is a forsaken pool on GPUs. Raises
        Unavailable."""
        async with self._sending:
            # Pidfds of processes that end while the thread runs are closed next time, since the thread uses them.
            close_all(self._ended)
            self.stale = False
            if self.forsaken and self.memory_fds:
                # Forsaken while this call waited for the lock; the keeper may have dropped the pool already.
                return
            memories = [*self.memory_fds, self.places.fileno(), self._table_segment.fileno()]
            processes = list(self._processes.values())
            try:
                await until_over(asyncio.to_thread(keeper.keep, name, memories, processes))
            except Unavailable:
                self.stale = True
                raise

    async def drop(self, keeper: PoolKeeper, name: str) -> None:
        """Make the keeper drop the pool, after any pending :meth:`send`. Raises Unavailable."""
        async with self._sending:
            await until_over(asyncio.to_thread(keeper.drop, name))

    def close(self) -> None:
        """Close this process's descriptors of the pool, except that of the places for a pool in host memory, whose
        owner closes its segment. Idempotent."""
        self._words.release()
        self._table_segment.close()
        if self.memory_fds:
            self.places.close()
        descriptors = [pidfd for _, pidfd in (*self._before, *self._processes.values())]
        close_all([*self.memory_fds, *self._ended, *descriptors])
        for collection in (self.memory_fds, self._ended, self._before, self._processes):
            collection.clear()

    def _name_owner(self, *, needed: bool) -> None:
        """Add this process to those that the node's next process waits for. Raises OSError if that is ``needed`` and
        the system has no pidfds."""
        try:
            self._processes[OWNER] = OWNER, os.pidfd_open(os.getpid())
        except (AttributeError, OSError) as error:
            if needed:
                raise OSError(getattr(error, "errno", 0), f"no descriptor of a process: {error}") from None


def _fresh_table(segment: OwnedSegment, shape: PoolShape) -> tuple[SlotTable, memoryview]:
    words = table_words(segment)
    return SlotTable.create(words, secrets.token_bytes(POOL_ID_BYTES), shape), words


def table_words(segment: OwnedSegment) -> memoryview:
    """Map the whole words of a table's segment."""
    size_bytes = segment.size_bytes // WORD_BYTES * WORD_BYTES
    mapped: mmap.mmap = map_shared(segment.fileno(), size_bytes)
    return memoryview(mapped).cast("Q")


def _has_ended(pidfd: int) -> bool:
    """Return whether a process has exited, with its files closed. The calling process counts as exited, since an
    earlier node may have run in it; the places show whether that node has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        return True
    info = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    return f"Pid:\t{os.getpid()}\n" in info


async def keep_alive(keeper: PoolKeeper, name: str, pool: SurvivingPool, look_s: float) -> None:
    """Send the pool to the keeper, and again whenever the keeper was lost or holds stale pidfds, until cancelled. A
    forsaken pool on GPUs is dropped there instead, because a GPU seldom has room for a second pool.

    Cancelling, i.e. the node's stop, is followed by a last check: a keeper started since the previous check has no pool
    yet, and the node's next process asks it for one."""
    warned = done = False
    try:
        while not done:
            if keeper.lost() or pool.stale or pool.forsaken:
                try:
                    if pool.forsaken and pool.memory_fds:
                        await pool.drop(keeper, name)
                        done = True
                    elif keeper.lost() or pool.stale:
                        await pool.send(keeper, name)
                    warned = False
                except Unavailable as error:
                    if not warned:
                        log.warning("this node's pool is not stored at the keeper: %s", error.message)
                    warned = True
            await asyncio.sleep(look_s)
    except asyncio.CancelledError:
        if keeper.lost():
            with contextlib.suppress(Unavailable):
                await pool.send(keeper, name)
        raise
