"""The bytes of a node's pool once it has a shape: memory, lower tiers, fetches from and reads by other nodes.

    shaped --> memory mapped, fetches possible --> tiers open, blocks in them announced --> evicts ahead of need
                          +-- another node lives, or the first reader asks --> the data plane is made, in a thread

A failure here costs prefix hits, never requests (I1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError, Unavailable
from pillion.kvstore.ledger.records import Block, IndexEvent, PoolShape
from pillion.kvstore.memory.cuda_memory import PinnedMemory
from pillion.kvstore.memory.memory import PoolMemory, until_over
from pillion.kvstore.node.pool import Pool
from pillion.kvstore.tiers.disk import DiskTier, open_disk_tier
from pillion.kvstore.tiers.disk_files import DiskFolder
from pillion.kvstore.tiers.host_tier import HostTier
from pillion.kvstore.tiers.object_runs import RunLayout
from pillion.kvstore.tiers.object_store import ObjectStore
from pillion.kvstore.tiers.object_tier import ObjectTier
from pillion.kvstore.tiers.spill import Spiller, lost_everywhere, without_moved
from pillion.kvstore.tiers.tiers import BlockName, FarTier, Tier
from pillion.kvstore.tiers.write_through import WriteThrough
from pillion.kvstore.transfer.fetch import Fetcher
from pillion.kvstore.transfer.peers import Peers
from pillion.kvstore.transfer.plane import BlockShape, DataPlane
from pillion.kvstore.transfer.plane_factory import choose_plane
from pillion.v1.kvnode_pb2 import NodeStatus
from pillion.v1.kvplane_pb2 import MeetReply, PinBlocksReply
from pillion.wire.common import hello_to_pb

log = logging.getLogger("pillion.kvnode")

# Blocks from disk that are announced at once when a node starts.
ANNOUNCE_BLOCKS = 4096
# How often a node without a data plane looks whether another node has come.
LOOK_AROUND_S = 1.0


class Storage:
    """Owner of the pool's memory; made when the pool gets its shape. :meth:`run` does the background work.

    It closes ``memory``, but not the segment behind it. It also serves as the :class:`SourcePool` of
    kvstore/transfer/plane_servicer.py.

    Args:
        pinned: makes memory for the host tier. Raises ConfigError.
        announce: updates the index.
        addresses: returns node id -> address of all nodes' gRPC services. Raises Unavailable.
        boot_epoch: returns this node's boot epoch, as the index knows it.
        folder: the disk tier's folder, opened and locked when the node started; None without one.
        objects: the object tier's bucket; None without one.
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
        objects: ObjectStore | None,
    ) -> None:
        self._flags, self._shape, self._pool = flags, shape, pool
        self._announce, self._addresses, self._boot_epoch = announce, addresses, boot_epoch
        self._folder = folder
        self.memory, self._pinned = memory, pinned
        # All tiers, in the order in which they get blocks; those of this machine, and those that others write to, too.
        self._tiers: list[Tier] = []
        self._near: list[Tier] = []
        layout = RunLayout(bytes.fromhex(shape.namespace), shape.block_bytes)
        self._far: list[FarTier] = [] if objects is None else [ObjectTier(objects, layout)]
        self._plane: asyncio.Task[DataPlane] | None = None
        self._block_shape = BlockShape(shape.block_bytes, bytes.fromhex(shape.namespace))
        self._peers = Peers(flags.node_id, self._block_shape, addresses, self.plane)
        self._spiller = Spiller(
            pool.ledger,
            memory,
            self._tiers,
            flags.low_watermark_percent,
            flags.high_watermark_percent,
            self._blocks_lost,
            pool.changed,
        )
        self._write_through = WriteThrough(pool.ledger, memory, self._far, self._blocks_lost)
        self.fetcher = Fetcher(
            pool.ledger,
            memory,
            timeout_s=flags.fetch_timeout_ms / 1000,
            max_bytes=flags.max_fetch_bytes,
            verify=flags.verify_blocks,
            changed=pool.changed,
            source=self._peers.source,
            tiers=self._near,
            far=self._far,
        )

    async def run(self) -> None:
        """Opens the tiers, then evicts ahead of need until it is cancelled. Raises ConfigError for a bad disk, or if
        the host has not enough memory."""
        if self._flags.host_bytes:
            pinned = await until_over(asyncio.to_thread(self._pinned, self._flags.host_bytes))
            host = HostTier(pinned.view, self._shape.block_bytes, pinned.close, verify=self._flags.verify_blocks)
            self._add(host)
        if self._folder is not None:
            disk = await open_disk_tier(
                self._folder,
                namespace=self._block_shape.namespace,
                block_bytes=self._shape.block_bytes,
                disk_bytes=self._flags.disk_bytes,
            )
            self._add(disk)
            log.info("%d blocks are on disk", len(disk))
            await self._announce_disk(disk)
        self._tiers += self._far
        async with asyncio.TaskGroup() as group:
            group.create_task(self._spiller.run())
            group.create_task(self._write_through.run())
            group.create_task(self._look_around())

    def objects_answer(self) -> bool:
        """Whether the object tier is open and not paused."""
        return bool(self._far) and all(tier.answers() for tier in self._far)

    def _add(self, tier: Tier) -> None:
        self._tiers.append(tier)
        self._near.append(tier)

    async def close(self) -> None:
        """Closes everything. No call is under way, and :meth:`run` has ended. Blocks in lower tiers stay there."""
        await self._peers.aclose()
        await self.fetcher.close()
        await self._spiller.close()
        for tier in self._tiers:
            await tier.close()
        if self._plane is not None:
            with contextlib.suppress(Exception):
                (await self._plane).close()
        self.memory.close()

    # -- updates of the index

    def pool_changed(self, events: list[IndexEvent]) -> list[IndexEvent]:
        """Returns the pool's events without blocks that only moved to a lower tier. Called after every change."""
        self._spiller.poke()
        self._write_through.committed(events)
        return without_moved(events, self._spiller.keeps)

    def names(self) -> Iterator[tuple[bytes, bytes]]:
        """Returns (hash, segment) of the blocks in lower tiers."""
        return ((name.hash, name.segment) for tier in self._tiers for name in tier.names())

    def _blocks_lost(self, names: Iterable[BlockName]) -> None:
        events = lost_everywhere(names, self._pool.ledger.tree.by_hash, self._spiller.keeps)
        if events:
            self._announce(events)

    async def _announce_disk(self, disk: DiskTier) -> None:
        names = iter(disk.names())
        while batch := list(islice(names, ANNOUNCE_BLOCKS)):
            # A block that was dropped meanwhile was reported as gone already.
            self._announce([IndexEvent(each.hash, True, each.segment) for each in batch if each.hash in disk])
            await asyncio.sleep(0)

    # -- other nodes

    async def plane(self) -> DataPlane:
        """Returns this node's data plane; the first caller waits for a second or two."""
        if self._plane is None:
            making = asyncio.to_thread(choose_plane, self._flags.kv_transport, self.memory)
            self._plane = asyncio.create_task(making, name="data plane")
        return await asyncio.shield(self._plane)

    async def describe(self) -> MeetReply:
        plane, shape = await self.plane(), self._shape
        return MeetReply(
            hello=hello_to_pb(self._flags.node_id),
            boot_epoch=self._boot_epoch(),
            num_slots=shape.num_slots,
            block_bytes=shape.block_bytes,
            kv_namespace=self._block_shape.namespace,
            pool_address=plane.pool_address,
            nixl_metadata=plane.nixl_metadata,
            memory_kind=self.memory.kind,
            device_index=self.memory.device_index,
        )

    async def pin_chain(
        self, epoch: int, nonce: int, hashes: list[bytes], first_block: int, timeout_s: float
    ) -> PinBlocksReply:
        ticket_id, chain = await self._pool.pin_chain(epoch, nonce, hashes, first_block, timeout_s)
        if not chain:
            return PinBlocksReply()
        sums = await self._checksums(chain)
        return PinBlocksReply(ticket_id=ticket_id, slots=[block.slot for block in chain], checksums=sums)

    def pinned_slots(self, epoch: int, ticket_id: int) -> frozenset[int]:
        return self._pool.pinned_slots(epoch, ticket_id)

    async def _checksums(self, chain: Sequence[Block]) -> tuple[int, ...]:
        """Returns the checksums of pinned blocks, which do not change; each is computed once."""
        if not self._flags.verify_blocks:
            return (0,) * len(chain)
        unknown = [block for block in chain if not block.checksum]
        found = await self.memory.checksums([block.slot for block in unknown])
        for block, checksum in zip(unknown, found, strict=True):
            block.checksum = checksum
        return tuple(block.checksum for block in chain)

    async def _look_around(self) -> None:
        """Makes the data plane as soon as another node lives: the first fetch should not wait for it."""
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

    # -- status

    def complete(self, status: NodeStatus) -> None:
        """Sets the counts that are kept here."""
        status.MergeFrom(self.fetcher.counts)
        status.corrupt_blocks += sum(tier.counts.corrupt for tier in self._tiers)
        status.spilled_blocks = self._spiller.spilled_blocks
        status.late_blocks = self.fetcher.late_blocks
        status.disk_paused = not all(tier.answers() for tier in self._near)
        status.object_paused = not all(tier.answers() for tier in self._far)
        for tier in self._tiers:
            setattr(status, f"{tier.name}_blocks", len(tier))
        made = self._plane is not None and self._plane.done() and not self._plane.exception()
        status.kv_transport = self._plane.result().name if self._plane and made else self._flags.kv_transport
