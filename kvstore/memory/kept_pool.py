"""A pool whose memory outlives its node. A node takes over the pool of its earlier life, or makes one that is kept.

    start    keeper --what this node's earlier life gave it--> found, if it can be a pool of this node's flags
    shape    found --same block bytes and namespace, and no process but those that have drained uses it--> taken over
               '-- another shape; or somebody uses it for PATIENCE_S longer --> left to its users, and a fresh one made
    fresh    pool and table --> owned --> the keeper gets both --> the first worker gets the pool
    forsaken no later life takes it over; the keeper drops one on GPUs, and does not get it again

**Who may still write.** Workers of the earlier life hold slots, and write to them until they have noticed its end. They
lock a place of the pool's file before they are told of any slot, and keep it for as long as they map the pool. So a
pool is taken over when the only places that are locked are those of workers that have said, to this node, that their
last step has ended. Reading is no safer than writing: a worker that has not noticed reads blocks that it had pinned,
and they must not be evicted under it. The earlier node itself, whose threads fetch blocks, holds the place OWNER alike.

**A pool on GPUs.** A GPU's memory has no such locks, so the places are those of a file of one page that goes with it.
They are not enough: a process's files are closed in any order, and a kernel that it has launched may run for as long as
the GPU's own file is open. So the node also hands the keeper a descriptor of each worker's process (pidfd), before that
worker is told of any slot, and takes the pool over when those processes have *ended*. The kernel says so when all files
of a process are closed. For the same reason the node's own process is among them, of a pool in host memory, too: a
network adapter that fetches blocks for it writes to memory as long as the adapter's file is open.

A worker of a version that takes no place makes the pool one that nobody takes over (:meth:`KeptPool.forsake`), and so
does one that computes on GPUs with several processes: the node learns of the others too late.
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
from pillion.kvstore.ledger.slot_table import POOL_ID_BYTES, WORD_BYTES, KeptBlock, SlotTable, table_bytes
from pillion.kvstore.memory.keeper import KeptDescriptors, PoolKeeper
from pillion.kvstore.memory.memory import until_over
from pillion.kvstore.memory.segment import OWNER, Segment, map_shared
from pillion.net.private_socket import close_all
from pillion.wire.keeper import MAX_KEPT_PROCESSES, MIN_KEPT_MEMORIES

log = logging.getLogger("pillion.kvnode")

# How long a pool may still be in use by workers of the node's earlier life: longer than a step. Without its blocks
# every stream computes its prompt again, but a worker that is stopped must not hold up those that are not.
PATIENCE_S = 5.0
LOOK_S = 0.01
# The file that has the places of a pool on GPUs.
PLACES_BYTES = mmap.PAGESIZE


def open_keeper(socket_path: str) -> PoolKeeper:
    """The keeper behind ``--keeper-socket``."""
    return PoolKeeper(socket_path)


class KeptPool:
    """A pool and its table, both owned by this process.

    Attributes:
        places: the segment whose file has the places: the pool's memory itself, or the file that goes with GPUs'.
        memory_fds: descriptors of GPUs' memory, one for each shard; none of a pool in host memory.
        table: says which blocks are in it.
        entries: blocks that an earlier life of the node has left in it; empty for a fresh one.
        taken: whether it is an earlier life's.
        forsaken: whether no later life takes it over.
    """

    def __init__(
        self, memory_fds: list[int], places: Segment, table_segment: Segment, table: SlotTable, words: memoryview
    ) -> None:
        self.memory_fds, self.places = memory_fds, places
        self.table, self.entries = table, list[KeptBlock]()
        self.taken = self.forsaken = False
        self._table_segment, self._words = table_segment, words
        # Processes that an earlier life has named, and those of this one: place and descriptor, by epoch.
        self._before: list[tuple[int, int]] = []
        self._processes: dict[int, tuple[int, int]] = {}
        self._ended: list[int] = []
        self._stale = False
        self._giving = asyncio.Lock()

    @property
    def pool_id(self) -> str:
        """Names the memory for workers that mapped it."""
        return self.table.pool_id.hex()

    @property
    def stale(self) -> bool:
        """Whether the keeper has processes that do not matter any more."""
        return self._stale

    @classmethod
    def make(cls, segment: Segment, shape: PoolShape, memory_fds: Collection[int] = ()) -> KeptPool | None:
        """A fresh pool. ``segment`` has its places, and becomes its own if this succeeds; it is the pool's memory, or
        ``memory_fds`` are, of which duplicates are kept. Returns None where the system has no locks of open files, or
        the shape cannot be kept."""
        if len(shape.namespace) != 2 * HASH_BYTES:
            return None
        with contextlib.ExitStack() as undo:
            table_segment = undo.enter_context(contextlib.closing(Segment(table_bytes(shape.num_slots))))
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
    def found(cls, kept: KeptDescriptors, shards: int) -> KeptPool | None:
        """The pool of an earlier life in ``kept``, which becomes its own or is closed; it has ``shards`` memories on
        GPUs. Returns None where there is none."""
        with contextlib.ExitStack() as undo:
            undo.callback(kept.close)
            try:
                if len(kept.memories) != shards + MIN_KEPT_MEMORIES:
                    raise ConfigError(f"it has {len(kept.memories)} memories, this node's {shards + MIN_KEPT_MEMORIES}")
                table_segment, places = (
                    undo.enter_context(contextlib.closing(Segment.kept(kept.memories.pop())))
                    for _ in range(MIN_KEPT_MEMORIES)
                )
                words = table_words(table_segment)
                undo.callback(words.release)
                found = cls(kept.memories, places, table_segment, SlotTable.found(words), words)
            except (PillionError, OSError, ValueError) as error:
                log.warning("the pool of this node's earlier life is not taken over: %s", error)
                return None
            undo.pop_all()
        found._before = kept.processes
        return found

    async def freed(self, drained: Collection[int]) -> bool:
        """Owns the pool, and returns when no process uses it but those at ``drained`` places, which may grow meanwhile.
        False after PATIENCE_S, or where the system cannot tell."""
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
                    "the pool of this node's earlier life is not taken over: %d processes still use it", len(left)
                )
                return False
            await asyncio.sleep(LOOK_S)

    async def read(self) -> None:
        """Reads the table, in a thread."""
        self.entries = await until_over(asyncio.to_thread(self.table.blocks))
        self.taken = True
        while self._before:
            os.close(self._before.pop()[1])

    def forsake(self) -> None:
        """Makes the pool one that no later life takes over."""
        self.forsaken = True
        self.table.forsake()

    async def admit(self, keeper: PoolKeeper, name: str, epoch: int, place: int, pidfd: int) -> None:
        """Has the keeper know of a worker's process, of which this takes a duplicate, before the worker is told of any
        slot. Where that cannot be, nobody takes the pool over."""
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
            # Whatever it has of this pool lacks this process.
            log.warning("this pool will not outlive its node: %s", error.message)
            self.forsake()

    def ended(self, epoch: int) -> None:
        """A worker that was admitted uses the pool no more. Idempotent."""
        if epoch in self._processes:
            self._ended.append(self._processes.pop(epoch)[1])
            self._stale = True

    async def give(self, keeper: PoolKeeper, name: str) -> None:
        """Has the keeper keep all of it; nothing is done for a pool on GPUs that is forsaken. Raises Unavailable."""
        async with self._giving:
            # What ends meanwhile is closed the next time: the thread has these numbers.
            close_all(self._ended)
            self._stale = False
            if self.forsaken and self.memory_fds:
                # It may have been forsaken while this waited, and the keeper may have dropped it already.
                return
            memories = [*self.memory_fds, self.places.fileno(), self._table_segment.fileno()]
            processes = list(self._processes.values())
            try:
                await until_over(asyncio.to_thread(keeper.keep, name, memories, processes))
            except Unavailable:
                self._stale = True
                raise

    async def drop(self, keeper: PoolKeeper, name: str) -> None:
        """Has the keeper drop it, behind any :meth:`give` that is under way. Raises Unavailable."""
        async with self._giving:
            await until_over(asyncio.to_thread(keeper.drop, name))

    def close(self) -> None:
        """Gives up this process's hold on all but the places, and on those, too, of a pool on GPUs; a pool's segment is
        closed by its owner. Idempotent."""
        self._words.release()
        self._table_segment.close()
        if self.memory_fds:
            self.places.close()
        descriptors = [pidfd for _, pidfd in (*self._before, *self._processes.values())]
        close_all([*self.memory_fds, *self._ended, *descriptors])
        for each in (self.memory_fds, self._ended, self._before, self._processes):
            each.clear()

    def _name_owner(self, *, needed: bool) -> None:
        """Puts this process among those that the next life waits for. Raises OSError where that is ``needed`` and the
        system has no descriptors of processes."""
        try:
            self._processes[OWNER] = OWNER, os.pidfd_open(os.getpid())
        except (AttributeError, OSError) as error:
            if needed:
                raise OSError(getattr(error, "errno", 0), f"no descriptor of a process: {error}") from None


def _fresh_table(segment: Segment, shape: PoolShape) -> tuple[SlotTable, memoryview]:
    words = table_words(segment)
    return SlotTable.create(words, secrets.token_bytes(POOL_ID_BYTES), shape), words


def table_words(segment: Segment) -> memoryview:
    """Maps a table as words. Raises ConfigError."""
    size_bytes = segment.size_bytes // WORD_BYTES * WORD_BYTES
    mapped: mmap.mmap = map_shared(segment.fileno(), size_bytes)
    return memoryview(mapped).cast("Q")


def _has_ended(pidfd: int) -> bool:
    """Whether a process has ended, with all of its threads, and its files are closed. This process itself, in which an
    earlier life may have ended as well, counts as ended: the places say whether that life has."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        return True
    said = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    return f"Pid:\t{os.getpid()}\n" in said


async def keep_alive(keeper: PoolKeeper, name: str, pool: KeptPool, look_s: float) -> None:
    """Has the keeper keep the pool, and again whenever it has lost it or has too much, until cancelled; no pool on GPUs
    that is forsaken, for which there is no room beside another one."""
    told = over = False
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
