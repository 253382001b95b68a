"""A pool whose memory outlives its node: found at the keeper, proven to be nobody's, taken over; or made and kept.

    start    keeper --what this node's earlier life gave it--> found, if it can be a pool of this node's flags
    shape    found --same block bytes and namespace, and no process but those that have drained uses it--> taken over
               '-- another shape; or somebody uses it for PATIENCE_S longer --> left to its users, and a fresh one made
    fresh    pool and table --> owned --> the keeper gets both --> the first worker gets the pool

**Who may still write.** Workers of the earlier life hold slots, and write to them until they have noticed its end. They
lock a place of the pool's file before they are told of any slot, and keep it for as long as they map the pool. So a
pool is taken over when the only places that are locked are those of workers that have said, to this node, that their
last step has ended. Reading is no safer than writing: a worker that has not noticed reads blocks that it had pinned,
and they must not be evicted under it. The earlier node itself, whose threads fetch blocks, holds the place OWNER alike.

A worker of a version that takes no place makes the pool one that nobody takes over (:meth:`KeptPool.forsake`).
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import secrets
import time
from collections.abc import Collection

from pillion.errors import ConfigError, PillionError, Unavailable
from pillion.kvstore.hashing import HASH_BYTES
from pillion.kvstore.ledger.records import PoolShape
from pillion.kvstore.ledger.slot_table import POOL_ID_BYTES, WORD_BYTES, KeptBlock, SlotTable, table_bytes
from pillion.kvstore.memory.keeper import PoolKeeper
from pillion.kvstore.memory.memory import until_over
from pillion.kvstore.memory.segment import Segment, map_shared

log = logging.getLogger("pillion.kvnode")

# How long a pool may still be in use by workers of the node's earlier life: longer than a step. Without its blocks
# every stream computes its prompt again, but a worker that is stopped must not hold up those that are not.
PATIENCE_S = 5.0
LOOK_S = 0.01


def open_keeper(socket_path: str) -> PoolKeeper:
    """The keeper behind ``--keeper-socket``."""
    return PoolKeeper(socket_path)


class KeptPool:
    """A pool and its table, both owned by this process.

    Attributes:
        segment: the pool's memory.
        table: says which blocks are in it.
        entries: blocks that an earlier life of the node has left in it; empty for a fresh one.
    """

    def __init__(self, segment: Segment, table_segment: Segment, table: SlotTable, words: memoryview) -> None:
        self.segment, self.table, self.entries = segment, table, list[KeptBlock]()
        self._table_segment, self._words = table_segment, words

    @property
    def pool_id(self) -> str:
        """Names the memory for workers that mapped it."""
        return self.table.pool_id.hex()

    @property
    def segments(self) -> list[Segment]:
        """What the keeper keeps."""
        return [self.segment, self._table_segment]

    @classmethod
    def make(cls, segment: Segment, shape: PoolShape) -> KeptPool | None:
        """A fresh pool in ``segment``, which becomes its own if this succeeds. Returns None where the system has no
        locks of open files, or the shape cannot be kept."""
        if len(shape.namespace) != 2 * HASH_BYTES:
            return None
        table_segment = Segment(table_bytes(shape.num_slots))
        try:
            if not segment.own():
                raise ConfigError("a fresh pool is owned by somebody else")
        except OSError as error:
            log.info("this system has no locks of open files, so the pool goes with its node: %s", error.strerror)
            table_segment.close()
            return None
        words = table_words(table_segment)
        table = SlotTable.create(words, secrets.token_bytes(POOL_ID_BYTES), shape)
        return cls(segment, table_segment, table, words)

    @classmethod
    def found(cls, segments: list[Segment], pool_bytes: int) -> KeptPool | None:
        """The pool of an earlier life in ``segments``, which become its own or are closed. Returns None where there is
        none of ``pool_bytes``."""
        kept: KeptPool | None = None
        try:
            segment, table_segment = segments
            words = table_words(table_segment)
            kept = cls(segment, table_segment, SlotTable.found(words), words)
            shape = kept.table.shape
            if segment.size_bytes != pool_bytes or shape.num_slots * shape.block_bytes > pool_bytes:
                raise ConfigError(f"it has {segment.size_bytes} bytes, this node's pool {pool_bytes}")
        except (PillionError, OSError, ValueError) as error:
            log.warning("the pool of this node's earlier life is not taken over: %s", error)
            for one in segments:
                one.close()
            return None
        return kept

    async def freed(self, drained: Collection[int]) -> bool:
        """Owns the pool, and returns when no process uses it but those at ``drained`` places, which may grow meanwhile.
        False after PATIENCE_S, or where the system cannot tell."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                left = self.segment.users() - set(drained) if self.segment.own() else {0}
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

    def forsake(self) -> None:
        """Makes the pool one that no later life takes over."""
        self.table.forsake()

    def close(self) -> None:
        """Gives up this process's hold on the table; the pool's segment is closed by its owner. Idempotent."""
        self._words.release()
        self._table_segment.close()


def table_words(segment: Segment) -> memoryview:
    """Maps a table as words. Raises ConfigError."""
    size_bytes = segment.size_bytes // WORD_BYTES * WORD_BYTES
    mapped: mmap.mmap = map_shared(segment.fileno(), size_bytes)
    return memoryview(mapped).cast("Q")


async def keep_alive(keeper: PoolKeeper, name: str, pool: KeptPool, look_s: float) -> None:
    """Has the keeper keep the pool, and again whenever it has lost it, until cancelled."""
    told = False
    while True:
        if keeper.lost():
            try:
                await until_over(asyncio.to_thread(keeper.keep, name, pool.segments))
                told = False
            except Unavailable as error:
                if not told:
                    log.warning("nobody keeps this node's pool: %s", error.message)
                told = True
        await asyncio.sleep(look_s)
