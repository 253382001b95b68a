"""Makes a pool whose memory outlives its node. A node recovers its earlier life's pool, or makes one.

    start    keeper --what this node's earlier life gave it--> found, if it can be a pool of this node's flags
    shape    found --same block bytes and namespace, and no process but those that have drained uses it--> recovered
               '-- another shape; or somebody uses it for PATIENCE_S longer --> left to its users, and a fresh one made
    fresh    pool and table --> owned --> the keeper gets both --> the first worker gets the pool
    forsaken no later life recovers the pool; the keeper drops a pool on GPUs, and does not get it again

**Which processes may still write.** Workers of the earlier life hold slots, and write to them until they have noticed
its end. A worker locks a place of the pool's file before the node tells it of any slot, and keeps the lock for as long
as it maps the pool. So a pool is recovered when the only locked places are those of workers that have told this node
that their last step has ended. Reading is no safer than writing: a worker that has not noticed reads blocks that it had
pinned, and they must not be evicted under it. The earlier node itself, whose threads fetch blocks, holds the place
OWNER alike.

**A pool on GPUs.** A GPU's memory has no such locks, so the places are those of a file of one page that goes with it.
These locks are not enough: a process's files are closed in any order, and a kernel that it has launched may run for as
long as the GPU's own file is open. So the node also hands the keeper a descriptor of each worker's process (pidfd),
before that worker is told of any slot, and recovers the pool when those processes have *ended*. The kernel says so when
all files of a process are closed. For the same reason the node's own process is among them, of a pool in host memory,
too: a network adapter that fetches blocks for it writes to memory as long as the adapter's file is open.

No node recovers a pool (:meth:`SurvivingPool.forsake`) that was used by a worker of a version that takes no place, or
by one that computes on GPUs with several processes: the node learns of the others too late.
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

# Workers of the node's earlier life may still use a pool for this long, which is longer than a step. Without its blocks
# every stream computes its prompt again, but a worker that is stopped must not hold up the others.
PATIENCE_S = 5.0
LOOK_S = 0.01
# The file that has the places of a pool on GPUs has this size.
PLACES_BYTES = mmap.PAGESIZE


class SurvivingPool:
    """Represents a pool and its table, both owned by this process.

    Attributes:
        places: the segment whose file has the places: the pool's memory itself, or the file that goes with GPUs'.
        memory_fds: descriptors of GPUs' memory, one for each shard; none of a pool in host memory.
        table: table of the blocks in the pool.
        entries: blocks that an earlier life of the node has left in the pool; none for a fresh pool.
        taken: whether the pool was made by an earlier life of the node.
        forsaken: whether the pool is marked so that no later life of the node recovers it.
        stale: whether the keeper still holds descriptors of processes that no longer use the pool.
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
        self.taken = self.forsaken = self.stale = False
        self._table_segment, self._words = table_segment, words
        # These are the processes that an earlier life has named, and those of this life by epoch, each with its place
        # and descriptor.
        self._before: list[tuple[int, int]] = []
        self._processes: dict[int, tuple[int, int]] = {}
        self._ended: list[int] = []
        self._giving = asyncio.Lock()

    @property
    def pool_id(self) -> str:
        """Gives the name of the memory, for the workers that mapped it."""
        return self.table.pool_id.hex()

    @classmethod
    def make(cls, segment: OwnedSegment, shape: PoolShape, memory_fds: Collection[int] = ()) -> SurvivingPool | None:
        """Makes a fresh pool. ``segment`` has its places, and belongs to the pool if this succeeds; the pool's memory
        is ``memory_fds``, which are duplicated, or ``segment`` itself if there are none. Returns None if the system has
        no locks of open files, or the shape cannot be kept."""
        if len(shape.namespace) != 2 * HASH_BYTES:
            return None
        with contextlib.ExitStack() as undo:
            table_segment = undo.enter_context(contextlib.closing(OwnedSegment(table_bytes(shape.num_slots))))
            try:
                if not segment.own():
                    raise ConfigError("a fresh pool is owned by somebody else")
                made = cls([], segment, table_segment, *_fresh_table(table_segment, shape))
                undo.callback(made.close)
                made._name_owner(needed=bool(memory_fds))
                for descriptor in memory_fds:
                    made.memory_fds.append(os.dup(descriptor))
            except OSError as error:
                log.info("this system cannot tell who uses a pool, so the pool goes with its node: %s", error.strerror)
                return None
            undo.pop_all()
        return made

    @classmethod
    def found(cls, kept: KeeperDescriptors, shards: int) -> SurvivingPool | None:
        """Returns the pool of an earlier life in ``kept``, or None if there is none. The pool has ``shards`` memories
        on GPUs. What it does not need of ``kept`` is closed."""
        with contextlib.ExitStack() as undo:
            undo.callback(kept.close)
            try:
                if len(kept.memories) != shards + MIN_KEPT_MEMORIES:
                    raise ConfigError(f"it has {len(kept.memories)} memories, this node's {shards + MIN_KEPT_MEMORIES}")
                table_segment, places = (
                    undo.enter_context(contextlib.closing(OwnedSegment.kept(kept.memories.pop())))
                    for _ in range(MIN_KEPT_MEMORIES)
                )
                words = table_words(table_segment)
                undo.callback(words.release)
                found = cls(kept.memories, places, table_segment, SlotTable.found(words), words)
            except (PillionError, OSError, ValueError) as error:
                log.warning("the pool of this node's earlier life is not recovered: %s", error)
                return None
            undo.pop_all()
        found._before = kept.processes
        return found

    async def freed(self, drained: Collection[int]) -> bool:
        """Owns the pool, and returns True when no process uses it but those at ``drained`` places, which may grow
        meanwhile. Returns False after PATIENCE_S, or if the system cannot tell."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                left = self.places.users() if self.places.own() else {OWNER}
                left |= {place for place, pidfd in self._before if place not in left and not _has_ended(pidfd)}
                left -= set(drained)
                if not left and OWNER not in {place for place, _ in self._processes.values()}:
                    self._name_owner(needed=bool(self.memory_fds))
            except OSError as error:
                log.warning("nobody can tell who uses the pool of this node's earlier life: %s", error.strerror)
                return False
            if not left:
                return True
            if time.monotonic() >= until_s:
                log.warning(
                    "the pool of this node's earlier life is not recovered: %d processes still use it", len(left)
                )
                return False
            await asyncio.sleep(LOOK_S)

    async def read(self) -> None:
        """Reads all entries of the table of blocks, on a thread."""
        self.entries = await until_over(asyncio.to_thread(self.table.blocks))
        self.taken = True
        while self._before:
            os.close(self._before.pop()[1])

    def forsake(self) -> None:
        """Makes sure that no later life recovers the pool."""
        self.forsaken = True
        self.table.forsake()

    async def admit(self, keeper: PoolKeeper, name: str, epoch: int, place: int, pidfd: int) -> None:
        """Tells the keeper of a worker's process, whose descriptor is duplicated, before the worker learns of any slot.
        If the keeper cannot, no node recovers the pool."""
        if self.forsaken:
            return
        if len(self._processes) >= MAX_KEPT_PROCESSES:
            log.warning("this pool will not outlive its node: more than %d processes use it", MAX_KEPT_PROCESSES)
            self.forsake()
            return
        self._processes[epoch] = place, os.dup(pidfd)
        try:
            await self.give(keeper, name)
        except Unavailable as error:
            # The keeper does not know this worker's process, so a later life of the node could not wait until it has
            # ended.
            log.warning("this pool will not outlive its node: %s", error.message)
            self.forsake()

    def ended(self, epoch: int) -> None:
        """Notes that an admitted worker uses the pool no more. Idempotent."""
        if epoch in self._processes:
            self._ended.append(self._processes.pop(epoch)[1])
            self.stale = True

    async def give(self, keeper: PoolKeeper, name: str) -> None:
        """Gives the keeper the descriptors of the whole pool, unless the pool is on GPUs and no later life is to
        recover it. Raises Unavailable."""
        async with self._giving:
            # Descriptors of processes that end while the thread runs are closed the next time, because the thread still
            # uses them.
            close_all(self._ended)
            self.stale = False
            if self.forsaken and self.memory_fds:
                # The pool may have been forsaken while this thread waited, and the keeper may have dropped it already.
                return
            memories = [*self.memory_fds, self.places.fileno(), self._table_segment.fileno()]
            processes = list(self._processes.values())
            try:
                await until_over(asyncio.to_thread(keeper.keep, name, memories, processes))
            except Unavailable:
                self.stale = True
                raise

    async def drop(self, keeper: PoolKeeper, name: str) -> None:
        """Makes the keeper drop the pool, after any :meth:`give` that is under way. Raises Unavailable."""
        async with self._giving:
            await until_over(asyncio.to_thread(keeper.drop, name))

    def close(self) -> None:
        """Closes this process's descriptors of the pool except that of the places, and for a pool on GPUs that one too;
        a pool's segment is closed by its owner. Idempotent."""
        self._words.release()
        self._table_segment.close()
        if self.memory_fds:
            self.places.close()
        descriptors = [pidfd for _, pidfd in (*self._before, *self._processes.values())]
        close_all([*self.memory_fds, *self._ended, *descriptors])
        for each in (self.memory_fds, self._ended, self._before, self._processes):
            each.clear()

    def _name_owner(self, *, needed: bool) -> None:
        """Puts this process among those that the next life waits for. Raises OSError if that is ``needed`` and the
        system has no descriptors of processes."""
        try:
            self._processes[OWNER] = OWNER, os.pidfd_open(os.getpid())
        except (AttributeError, OSError) as error:
            if needed:
                raise OSError(getattr(error, "errno", 0), f"no descriptor of a process: {error}") from None


def _fresh_table(segment: OwnedSegment, shape: PoolShape) -> tuple[SlotTable, memoryview]:
    words = table_words(segment)
    return SlotTable.create(words, secrets.token_bytes(POOL_ID_BYTES), shape), words


def table_words(segment: OwnedSegment) -> memoryview:
    """Maps a table as words. Raises ConfigError."""
    size_bytes = segment.size_bytes // WORD_BYTES * WORD_BYTES
    mapped: mmap.mmap = map_shared(segment.fileno(), size_bytes)
    return memoryview(mapped).cast("Q")


def _has_ended(pidfd: int) -> bool:
    """Returns whether a process has ended, with all of its threads, and its files are closed. This process itself
    counts as ended, because an earlier life may have ended in it: the places say whether that life has."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        return True
    said = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    return f"Pid:\t{os.getpid()}\n" in said


async def keep_alive(keeper: PoolKeeper, name: str, pool: SurvivingPool, look_s: float) -> None:
    """Hands the pool to the keeper, and again whenever the keeper was lost or still holds descriptors of workers that
    no longer use the pool, until cancelled. Where no later life of the node may recover a pool on GPUs (``forsaken``),
    the keeper drops it instead, because a GPU seldom has room for a second pool.

    A cancel, by which a node stops, is followed by a last look: a keeper that was replaced since the one before has
    no pool yet, and the node's next life asks it for one."""
    told = over = False
    try:
        while not over:
            if keeper.lost() or pool.stale or pool.forsaken:
                try:
                    if pool.forsaken and pool.memory_fds:
                        await pool.drop(keeper, name)
                        over = True
                    elif keeper.lost() or pool.stale:
                        await pool.give(keeper, name)
                    told = False
                except Unavailable as error:
                    if not told:
                        log.warning("nobody keeps this node's pool: %s", error.message)
                    told = True
            await asyncio.sleep(look_s)
    except asyncio.CancelledError:
        if keeper.lost():
            with contextlib.suppress(Unavailable):
                await pool.give(keeper, name)
        raise
