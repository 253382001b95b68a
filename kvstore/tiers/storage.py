"""Storage of a shaped pool: its memory, lower tiers, and fetches into it.

    created --> fetches possible --run--> tiers opened, their blocks announced --> blocks evicted ahead of need

A failure here costs prefix hits, never requests (I1).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from pillion.config import KVNodeFlags
from pillion.kvstore.exchange.node_exchange import NodeExchange
from pillion.kvstore.ledger.records import IndexEvent, PoolShape
from pillion.kvstore.memory.memory import PoolMemory, until_over
from pillion.kvstore.node.pool import Pool
from pillion.kvstore.tiers.disk_tier.disk import open_disk_tier
from pillion.kvstore.tiers.disk_tier.disk_files import DiskFolder
from pillion.kvstore.tiers.host_tier import HostTier
from pillion.kvstore.tiers.object_tier.object_runs import RunLayout
from pillion.kvstore.tiers.object_tier.object_store import ObjectStore
from pillion.kvstore.tiers.object_tier.object_tier import ObjectTier
from pillion.kvstore.tiers.object_tier.write_through import WriteThrough
from pillion.kvstore.tiers.spill import Spiller, lost_everywhere, without_moved
from pillion.kvstore.tiers.tiers import BlockName, Tier
from pillion.kvstore.transfer.fetch import Fetcher
from pillion.kvstore.transfer.hand_over import HandOver, LookUp, OtherNode, rooms_of, warm_tips
from pillion.settings.node_limits import NodeLimits
from pillion.v1.kvnode_pb2 import NodeStatus
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.kvnode")


class Storage:
    """Memory and tiers of a pool, created when the pool gets its shape. :meth:`run` does the background work.

    Closes ``memory``, but not the segment behind it.

    Args:
        pinned_memory: allocates memory for the tier in host memory, None without one. Raises ConfigError.
        announce: updates the index.
        exchange: connections to other nodes.
        folder, bucket: location of the disk tier and of the object tier; None without one.
    """

    def __init__(
        self,
        flags: KVNodeFlags,
        limits: NodeLimits,
        shape: PoolShape,
        memory: PoolMemory,
        pool: Pool,
        *,
        pinned_memory: Callable[[], tuple[memoryview, Callable[[], None]] | None],
        announce: Callable[[list[IndexEvent]], None],
        exchange: NodeExchange,
        folder: DiskFolder | None,
        bucket: ObjectStore | None,
    ) -> None:
        self._flags, self._shape, self._pool = flags, shape, pool
        self._announce, self._exchange = announce, exchange
        self._folder = folder
        self.memory, self._pinned_memory = memory, pinned_memory
        # All lower tiers, in the order in which blocks are stored in them; those of this machine; that in the bucket.
        self._tiers: list[Tier] = []
        self._local_tiers: list[Tier] = []
        layout = RunLayout(bytes.fromhex(shape.namespace), shape.block_bytes)
        self._bucket_tier = None if bucket is None else ObjectTier(bucket, layout)
        exchange.open_pool(shape, memory, pool)
        self.spiller = Spiller(
            pool.ledger,
            memory,
            self._tiers,
            limits.low_watermark_percent,
            limits.high_watermark_percent,
            self._blocks_lost,
            pool.changed,
        )
        self._write_through = (
            None
            if self._bucket_tier is None
            else WriteThrough(pool.ledger, memory, self._bucket_tier, self._blocks_lost)
        )
        self.fetcher = Fetcher(
            pool.ledger,
            memory,
            timeout_s=limits.fetch_timeout_s,
            max_bytes=limits.max_fetch_bytes,
            changed=pool.changed,
            source=exchange.source,
            tiers=self._local_tiers,
            bucket=self._bucket_tier,
        )

    async def run(self) -> None:
        """Open the tiers, then evict ahead of need until cancelled. Raises ConfigError for a bad disk, or if the host
        lacks memory."""
        host = await until_over(asyncio.to_thread(self._host_tier))
        if host is not None:
            self._add(host)
        if self._folder is not None:
            tier = await open_disk_tier(
                self._folder,
                namespace=bytes.fromhex(self._shape.namespace),
                block_bytes=self._shape.block_bytes,
                disk_bytes=self._flags.disk_bytes,
            )
            self._add(tier)
            log.info("%d blocks are on %s", len(tier), tier.name)
            await self._announce_tier(tier)
        if self._bucket_tier is not None:
            self._tiers.append(self._bucket_tier)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.spiller.run())
            if self._write_through is not None:
                group.create_task(self._write_through.run())
            group.create_task(self._exchange.run())

    @property
    def object_url(self) -> str:
        """URL of the bucket that this node can read now; "" for none."""
        return (
            str(self._bucket_tier.place) if self._bucket_tier is not None and self._bucket_tier.is_available() else ""
        )

    def _add(self, tier: Tier) -> None:
        self._tiers.append(tier)
        self._local_tiers.append(tier)

    def _host_tier(self) -> HostTier | None:
        pinned = self._pinned_memory()
        return None if pinned is None else HostTier(pinned[0], self._shape.block_bytes, pinned[1])

    async def close(self) -> None:
        """Close memory and tiers, after :meth:`run` has ended and with no call running. Blocks in lower tiers stay."""
        await self._exchange.leave()
        await self.fetcher.close()
        await self.spiller.close()
        for tier in self._tiers:
            await tier.close()
        await self._exchange.aclose()
        self.memory.close()

    def pool_changed(self, events: list[IndexEvent]) -> list[IndexEvent]:
        """Return the pool's events without evictions of blocks that a lower tier has."""
        if self._write_through is not None:
            self._write_through.committed(events)
        return without_moved(events, self.spiller.is_stored)

    def names(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (hash, segment) of the blocks in lower tiers."""
        return ((name.hash, name.segment) for tier in self._tiers for name in tier.names())

    async def hand_over(
        self, others: Sequence[ComponentRecord], look_up: LookUp, within_s: float, bytes_per_s: float
    ) -> None:
        """Let other nodes fetch the pool's hottest chains, and copy chains for which they have no room to disk, at
        ``bytes_per_s`` and within ``within_s`` seconds, before this node leaves."""
        ledger, began_s = self._pool.ledger, asyncio.get_running_loop().time()
        tree = ledger.tree
        idle = list(tree.policy)
        used = [block for block in tree.by_hash.values() if block.ref_count]
        hot_first = [*sorted(used, key=lambda block: block.depth), *reversed(idle)]
        tips = warm_tips(hot_first, lambda block: block.parent, lambda block: block.prefix_pins > 0)
        nodes = [
            OtherNode(one.node_id, one.free_blocks, max(0, one.committed_blocks - one.pinned_blocks)) for one in others
        ]
        plan = HandOver(
            (tuple(block.hash for block in tree.chain(tip)) for tip in tips if tree.by_hash.get(tip.hash) is tip),
            rooms_of(len(idle), nodes),
            block_bytes=self.memory.block_bytes,
            bytes_per_s=bytes_per_s,
            begun_s=began_s,
            until_s=began_s + within_s,
        )
        await self._exchange.hand_over(plan, look_up)
        leftover = dict.fromkeys(name for chain in plan.leftover() for name in chain)
        blocks = [tree.by_hash[name] for name in leftover if name in tree.by_hash]
        saved = await self.spiller.save(blocks, plan.until_s, bytes_per_s)
        log.info("of %d blocks %d went to other nodes, %d to disk", len(tree), plan.blocks, saved)

    def _blocks_lost(self, names: Iterable[BlockName]) -> None:
        events = lost_everywhere(names, self._pool.ledger.tree.by_hash, self.spiller.is_stored)
        if events:
            self._announce(events)

    async def _announce_tier(self, tier: Tier) -> None:
        names = iter(tier.names())
        while batch := list(islice(names, 4096)):
            # Blocks dropped meanwhile have already been reported as lost.
            self._announce([IndexEvent(name.hash, True, name.segment) for name in batch if name.hash in tier])
            # A batch per turn of the loop, so that other work does not wait for all of them.
            await asyncio.sleep(0)

    def complete(self, status: NodeStatus) -> None:
        """Set the counts of tiers and fetches in a node's status."""
        status.MergeFrom(self.fetcher.counts)
        status.corrupt_blocks += sum(tier.counts.corrupt for tier in self._tiers)
        status.spilled_blocks = self.spiller.spilled_blocks
        status.late_blocks = self.fetcher.late_blocks
        status.disk_short_blocks = sum(tier.short_blocks for tier in self._local_tiers)
        status.disk_paused = not all(tier.is_available() for tier in self._local_tiers)
        status.object_paused = self._bucket_tier is not None and not self._bucket_tier.is_available()
        for tier in self._tiers:
            setattr(status, f"{tier.name}_blocks", len(tier))
        status.kv_transport = self._exchange.transport
