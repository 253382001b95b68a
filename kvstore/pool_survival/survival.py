"""Records committed blocks with their checksums in the slot table, and recovers those of the node's previous process.

    committed --checksum, on a thread, soon--> in the table
    surviving --checksum, on a thread: requested chains first, then the others one by one--> committed

A node serves at once. Surviving blocks behave like those of a lower tier: a caller that asks for a chain waits until
its surviving blocks are verified, at about memory bandwidth. A block with a wrong checksum is dropped (I1).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import IndexEvent
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.pool_survival.keeper_client import PoolKeeper
from pillion.kvstore.pool_survival.slot_table import SurvivingBlock
from pillion.kvstore.pool_survival.surviving_blocks import SurvivingBlocks
from pillion.kvstore.pool_survival.surviving_pool import SurvivingPool, keep_alive
from pillion.v1.kvnode_pb2 import NodeStatus

log = logging.getLogger("pillion.kvnode")

# Max bytes and blocks per batch of checksums.
CHECKED_BYTES = 32 * 2**20
MAX_CHECK_BLOCKS = 512
# Interval of checks whether the keeper still has the pool.
KEEPER_POLL_S = 0.5
# Interval of writes to the table; a crash may lose the blocks committed within it.
SEAL_S = 0.005


class PoolSurvival:
    """Keeps one pool's blocks recoverable, once the pool has its shape. Only the node's loop calls it.

    Args:
        changed: called after every change in the ledger.

    Attributes:
        blocks: the pool's table, and the blocks not recovered yet; for reading.
    """

    def __init__(
        self,
        node_id: str,
        keeper: PoolKeeper,
        pool: SurvivingPool,
        ledger: Ledger,
        memory: PoolMemory,
        changed: Callable[[], None],
    ) -> None:
        self.blocks = SurvivingBlocks(ledger, pool.table)
        self._node_id, self._keeper, self._pool = node_id, keeper, pool
        self._memory, self._changed = memory, changed
        self._batch_blocks = max(1, min(CHECKED_BYTES // memory.block_bytes, MAX_CHECK_BLOCKS))
        self._checking = asyncio.Lock()
        self._unsealed = asyncio.Event()

    def begin(self) -> None:
        """Claim the slots of the surviving blocks. Call in the same turn of the loop in which the pool gets its
        shape."""
        self.blocks.claim(self._pool.entries)
        if self.blocks.pending:
            log.info("checking %d blocks of this node's previous process", len(self.blocks.pending))

    def note(self, events: Iterable[IndexEvent]) -> None:
        """Handle changes of the ledger's blocks; see :meth:`SurvivingBlocks.note`."""
        events = tuple(events)
        self.blocks.note(events)
        if any(event.here for event in events):
            self._unsealed.set()

    async def run(self) -> None:
        """Compute checksums, write entries and recover blocks until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_alive(self._keeper, self._node_id, self._pool, KEEPER_POLL_S))
            group.create_task(self._recover_all())
            group.create_task(self._write_entries())

    async def restore(self, hashes: Sequence[bytes]) -> None:
        """Wait until all intact surviving blocks of a chain are committed again."""
        while self.blocks.pending and self.blocks.run_of(hashes, 1):
            async with self._checking:
                await self._recover(self.blocks.run_of(hashes, self._batch_blocks))

    def complete(self, status: NodeStatus) -> None:
        """Set the recovery counts of a node's status."""
        status.recovered_blocks, status.surviving_blocks = self.blocks.recovered, len(self.blocks.pending)

    def check_integrity(self) -> None:
        """Raise PillionError on inconsistency."""
        self.blocks.check_integrity()

    async def _recover_all(self) -> None:
        while self.blocks.pending:
            async with self._checking:
                await self._recover(self.blocks.next_run(self._batch_blocks))
            await asyncio.sleep(0)
        if self.blocks.recovered or self.blocks.dropped:
            log.info(
                "recovered %d blocks of this node's previous process, %d are lost",
                self.blocks.recovered,
                self.blocks.dropped,
            )

    async def _recover(self, run: list[SurvivingBlock]) -> None:
        sums = await self._memory.checksums([entry.slot for entry in run])
        self.blocks.resolve(run, sums)
        self._changed()

    async def _write_entries(self) -> None:
        while True:
            await self._unsealed.wait()
            blocks = self.blocks.unsealed(self._batch_blocks)
            if not blocks:
                self._unsealed.clear()
                continue
            unknown = [block for block in blocks if not block.checksum]
            computed = dict(zip(unknown, await self._memory.checksums([b.slot for b in unknown]), strict=True))
            self.blocks.seal(blocks, [computed.get(block, block.checksum) for block in blocks])
            await asyncio.sleep(SEAL_S)
