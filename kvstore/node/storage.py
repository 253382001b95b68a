"""What a node has beside its books once its pool has a shape: memory, fetches, lower tiers, the way to other nodes.

    shaped --> memory mapped, fetches possible --> tiers open, what they kept is announced --> evicts ahead of need
                          +-- another node lives, or the first reader asks --> the data plane is made, in a thread

Whatever of it fails costs hits, never requests (I1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError, Unavailable
from pillion.kvstore.ledger.pool_shape import PoolShape
from pillion.kvstore.ledger.records import IndexEvent
from pillion.kvstore.ledger.tree import Block
from pillion.kvstore.memory.memory import PoolMemory, until_over
from pillion.kvstore.memory.pinned import PinnedMemory
from pillion.kvstore.node.pool import Pool
from pillion.kvstore.tiers.disk import DiskTier, open_disk_tier
from pillion.kvstore.tiers.disk_files import DiskFolder
from pillion.kvstore.tiers.host_tier import HostTier
from pillion.kvstore.tiers.spill import Spiller
from pillion.kvstore.tiers.spill_plan import News
from pillion.kvstore.tiers.tiers import BlockName, Tier
from pillion.kvstore.transfer.fetch import Fetcher, FetchLimits
from pillion.kvstore.transfer.peers import Peers
from pillion.kvstore.transfer.plane import BlockShape, DataPlane, PeerPool, Pinned, choose_plane
from pillion.wire.kvnode import NodeStatus

log = logging.getLogger("pillion.kvnode")

# Blocks from disk that are announced at once when a node starts.
ANNOUNCE_BLOCKS = 4096
# How often a node without a data plane looks whether another node has come.
LOOK_AROUND_S = 1.0


class Storage:
    """Made when the pool gets its shape; :meth:`run` does what goes on in the background.

    Args:
        pinned: makes memory for the host tier. Raises ConfigError.
        announce: tells the index.
        addresses: of all nodes' gRPC services, by node id. Raises Unavailable.
        boot_epoch: this node's, as the index knows it.
        folder: the disk tier's, opened and locked when the node started; None without one.

    The memory becomes this class's to close, not its segment.
    """

    def __init__(
        self,
        flags: KVNodeFlags,
        shape: PoolShape,
        memory: PoolMemory,
        pool: Pool,
        *,
        pinned: Callable[[int], PinnedMemory],
        announce: Callable[[list[IndexEvent]], None],
        addresses: Callable[[], Awaitable[Mapping[str, str]]],
        boot_epoch: Callable[[], int],
        folder: DiskFolder | None,
    ) -> None:
        self._flags, self._shape, self._pool = flags, shape, pool
        self._announce, self._addresses, self._boot_epoch = announce, addresses, boot_epoch
        self._folder = folder
        self.memory, self._pinned = memory, pinned
        self._tiers: list[Tier] = []
        self._disk: DiskTier | None = None
        self._host: HostTier | None = None
        self._plane: asyncio.Task[DataPlane] | None = None
        self._block_shape = BlockShape(shape.block_bytes, bytes.fromhex(shape.namespace))
        self._peers = Peers(flags.node_id, self._block_shape, addresses, self.plane)
        self._spiller = Spiller(
            pool.ledger,
            memory,
            self._tiers,
            flags.low_watermark_percent,
            flags.high_watermark_percent,
            self._forgotten,
            pool.changed,
        )
        self._news = News(pool.ledger.tree.by_hash.__contains__, self._spiller.keeps)
        limits = FetchLimits(
            timeout_s=flags.fetch_timeout_ms / 1000, max_bytes=flags.max_fetch_bytes, verify=flags.verify_blocks
        )
        self.fetcher = Fetcher(
            pool.ledger,
            shape.block_bytes,
            limits,
            memory=memory,
            changed=pool.changed,
            source=self._peers.source,
            tiers=self._tiers,
        )

    async def run(self) -> None:
        """Opens the tiers, then evicts ahead of need, until it is cancelled.

        Raises ConfigError for a bad disk, and where the host has not so much memory.
        """
        if self._flags.host_bytes:
            pinned = await until_over(asyncio.to_thread(self._pinned, self._flags.host_bytes))
            self._host = HostTier(pinned.view, self._shape.block_bytes, pinned.close, verify=self._flags.verify_blocks)
            self._tiers.append(self._host)
        if self._folder is not None:
            self._disk = await open_disk_tier(
                self._folder,
                namespace=self._block_shape.namespace,
                block_bytes=self._shape.block_bytes,
                disk_bytes=self._flags.disk_bytes,
                verify=self._flags.verify_blocks,
            )
            self._tiers.append(self._disk)
            log.info("%d blocks are on disk", len(self._disk))
            await self._announce_disk(self._disk)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._spiller.run())
            group.create_task(self._look_around())

    async def close(self) -> None:
        """No call is under way any more, and :meth:`run` has ended. What is in lower tiers stays there."""
        await self._peers.aclose()
        await self.fetcher.close()
        await self._spiller.close()
        for tier in self._tiers:
            await tier.close()
        if self._plane is not None:
            with contextlib.suppress(Exception):
                (await self._plane).close()
        self.memory.close()

    # -- what the index hears

    def heard(self, events: list[IndexEvent]) -> list[IndexEvent]:
        """The pool's news, without blocks that only moved to a lower tier. Called after every change."""
        self._spiller.poke()
        return self._news.changed(events)

    def names(self) -> Iterator[tuple[bytes, bytes]]:
        """(hash, segment) of what is in lower tiers."""
        return ((name.hash, name.segment) for tier in self._tiers for name in tier.names())

    def _forgotten(self, names: Iterable[BlockName]) -> None:
        events = self._news.forgotten(names)
        if events:
            self._announce(events)

    async def _announce_disk(self, disk: DiskTier) -> None:
        names = iter(disk.names())
        while batch := list(islice(names, ANNOUNCE_BLOCKS)):
            # What was dropped meanwhile has been told as gone.
            self._announce([IndexEvent(each.hash, True, each.segment) for each in batch if each.hash in disk])
            await asyncio.sleep(0)

    # -- other nodes

    async def plane(self) -> DataPlane:
        """This node's data plane; the first caller waits for a second or two."""
        if self._plane is None:
            making = asyncio.to_thread(choose_plane, self._flags.kv_transport, self.memory)
            self._plane = asyncio.create_task(making, name="data plane")
        return await asyncio.shield(self._plane)

    async def describe(self) -> tuple[PeerPool, BlockShape]:
        """See :class:`pillion.kvstore.transfer.plane_servicer.Source`."""
        plane, shape = await self.plane(), self._shape
        pool = PeerPool(
            node_id=self._flags.node_id,
            boot_epoch=self._boot_epoch(),
            num_slots=shape.num_slots,
            block_bytes=shape.block_bytes,
            pool_address=plane.pool_address,
            nixl_metadata=plane.nixl_metadata,
            memory_kind=self.memory.kind,
            device_index=self.memory.device_index,
        )
        return pool, self._block_shape

    async def pin_chain(
        self, epoch: int, nonce: int, hashes: list[bytes], first_block: int, timeout_s: float
    ) -> Pinned:
        """See :class:`pillion.kvstore.transfer.plane_servicer.Source`."""
        ticket_id, chain = await self._pool.pin_chain(epoch, nonce, hashes, first_block, timeout_s)
        if not chain:
            return Pinned(0, (), ())
        sums = await self._checksums(chain)
        return Pinned(ticket_id, tuple(block.slot for block in chain), sums)

    def pinned_slots(self, epoch: int, ticket_id: int) -> frozenset[int]:
        """See :class:`pillion.kvstore.transfer.plane_servicer.Source`."""
        return self._pool.pinned_slots(epoch, ticket_id)

    async def _checksums(self, chain: Sequence[Block]) -> tuple[int, ...]:
        """Of pinned blocks, which do not change; each is computed once."""
        if not self._flags.verify_blocks:
            return (0,) * len(chain)
        unknown = [block for block in chain if not block.checksum]
        found = await self.memory.checksums([block.slot for block in unknown])
        for block, checksum in zip(unknown, found, strict=True):
            block.checksum = checksum
        return tuple(block.checksum for block in chain)

    async def _look_around(self) -> None:
        """Makes the data plane ready as soon as there is somebody to talk to: the first fetch should not wait."""
        while self._plane is None:
            with contextlib.suppress(Unavailable):
                others = set(await self._addresses()) - {self._flags.node_id}
                if others:
                    break
            await asyncio.sleep(LOOK_AROUND_S)
        try:
            await self.plane()
        except ConfigError as error:
            log.warning("no blocks from and for other nodes: %s", error.message)

    # -- books

    def complete(self, status: NodeStatus) -> NodeStatus:
        """Adds what is counted here."""
        counts = asdict(self.fetcher.counts)
        if self._disk is not None:
            counts["corrupt_blocks"] += self._disk.counts.corrupt
        if self._host is not None:
            counts["corrupt_blocks"] += self._host.counts.corrupt
        return replace(
            status,
            **counts,
            spilled_blocks=self._spiller.spilled_blocks,
            host_blocks=0 if self._host is None else len(self._host),
            disk_blocks=0 if self._disk is None else len(self._disk),
            kv_transport=self._transport(),
        )

    def _transport(self) -> str:
        """The plane's name; before there is one, what was asked for."""
        made = self._plane is not None and self._plane.done() and not self._plane.exception()
        return self._plane.result().name if made and self._plane is not None else self._flags.kv_transport
