"""What a node does for its next life, and with what its last one left: checksums, the table of blocks, the takeover.

    committed --checksum, in a thread, soon--> in the table
    kept      --checksum, in a thread: a chain that somebody asks for first, the others one after the other--> committed

A node serves at once, whatever it found: the blocks of its earlier life are brought in as those of a lower tier are,
and whoever asks for a chain waits until as much of it as was kept has been looked at, which is about as fast as memory
can be read. A block that does not fit its checksum is dropped (I1).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from pillion.kvstore.ledger.kept_blocks import KeptBlocks
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import IndexEvent
from pillion.kvstore.ledger.slot_table import KeptBlock
from pillion.kvstore.memory.keeper import PoolKeeper
from pillion.kvstore.memory.kept_pool import KeptPool, keep_alive
from pillion.kvstore.memory.memory import PoolMemory

log = logging.getLogger("pillion.kvnode")

# Bytes whose checksums are computed between two turns of the node's loop.
CHECKED_BYTES = 32 * 2**20
# Blocks that are put into the ledger, or into the table, in one turn of the loop.
CHECKED_BLOCKS = 512
# How often the node looks whether its pool's keeper is there still.
KEEPER_LOOK_S = 0.5
# Between two looks for blocks without an entry: so much of what was committed a death may cost.
SEAL_S = 0.005


class Keeping:
    """The keeping of one pool that has its shape. The node's loop makes all calls.

    Args:
        changed: called after every change in the ledger.

    Attributes:
        blocks: for reading.
    """

    def __init__(
        self,
        node_id: str,
        keeper: PoolKeeper,
        pool: KeptPool,
        ledger: Ledger,
        memory: PoolMemory,
        changed: Callable[[], None],
    ) -> None:
        self.blocks = KeptBlocks(ledger, pool.table)
        self._node_id, self._keeper, self._pool = node_id, keeper, pool
        self._memory, self._changed = memory, changed
        self._batch_blocks = max(1, min(CHECKED_BYTES // memory.block_bytes, CHECKED_BLOCKS))
        self._looking = asyncio.Lock()
        self._unsealed = asyncio.Event()

    def begin(self) -> None:
        """Claims what was kept, in the same turn of the loop in which the pool has got its shape."""
        self.blocks.claim(self._pool.entries)
        if self.blocks.pending:
            log.info("%d blocks of this node's earlier life are looked at", len(self.blocks.pending))

    def note(self, events: Iterable[IndexEvent]) -> None:
        """Follows the ledger; see :meth:`KeptBlocks.note`."""
        events = tuple(events)
        self.blocks.note(events)
        if any(event.here for event in events):
            self._unsealed.set()

    async def run(self) -> None:
        """Does the background work until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_alive(self._keeper, self._node_id, self._pool, KEEPER_LOOK_S))
            group.create_task(self._take_all())
            group.create_task(self._seal_all())

    async def bring(self, hashes: Sequence[bytes]) -> None:
        """Returns when what was kept of a chain is committed, as far as it is good."""
        while self.blocks.pending and self.blocks.run_of(hashes, 1):
            async with self._looking:
                await self._take(self.blocks.run_of(hashes, self._batch_blocks))

    async def _take_all(self) -> None:
        while self.blocks.pending:
            async with self._looking:
                await self._take(self.blocks.next_run(self._batch_blocks))
            await asyncio.sleep(0)
        if self.blocks.taken_over or self.blocks.dropped:
            log.info(
                "%d blocks of this node's earlier life are here again, %d are not",
                self.blocks.taken_over,
                self.blocks.dropped,
            )

    async def _take(self, run: list[KeptBlock]) -> None:
        sums = await self._memory.checksums([entry.slot for entry in run])
        self.blocks.take(run, sums)
        self._changed()

    async def _seal_all(self) -> None:
        while True:
            await self._unsealed.wait()
            blocks = self.blocks.unsealed(self._batch_blocks)
            if not blocks:
                self._unsealed.clear()
                continue
            unknown = [block for block in blocks if not block.checksum]
            found = dict(zip(unknown, await self._memory.checksums([b.slot for b in unknown]), strict=True))
            self.blocks.seal(blocks, [found.get(block, block.checksum) for block in blocks])
            # Others wait for this loop, too, and blocks come by the chunk.
            await asyncio.sleep(SEAL_S)
