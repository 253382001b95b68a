"""The KV node as a component: memory, pool, attach socket, gRPC services, heartbeats, metrics.

start --> serving --the first worker attaches--> the pool has its shape, and storage (pillion.kvstore.tiers.storage)
             +-- stop --> sessions and attachments end --> stopped
             +-- a background task fails --> wait_failed() returns the reason
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from itertools import chain
from typing import Any

from pillion._version import VERSION
from pillion.config import KVNodeFlags
from pillion.errors import ConfigError, Conflict, PillionError
from pillion.kvstore.events.followers import Followers
from pillion.kvstore.exchange.node_exchange import NodeExchange
from pillion.kvstore.gpu.region_server import RegionServer
from pillion.kvstore.index.advertise import advertised, follow_address
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import IndexEvent, PoolShape
from pillion.kvstore.memory.memory import HOST
from pillion.kvstore.memory.node_memory import POOL_GONE, NodeMemory
from pillion.kvstore.node.attach_server import AttachServer
from pillion.kvstore.node.node_directory import NodeDirectory
from pillion.kvstore.node.node_servicer import SERVICE_NAME, KVNodeServicer
from pillion.kvstore.node.pool import Pool
from pillion.kvstore.pool_survival.survival import PoolSurvival
from pillion.kvstore.prefix_pins.node_pins import NodePrefixPins
from pillion.kvstore.tiers.disk_tier.disk_files import DiskFolder
from pillion.kvstore.tiers.object_tier.object_store import ObjectStore
from pillion.kvstore.tiers.storage import Storage
from pillion.net.rpc import RunningServer, internal_credentials, start_server
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Reading
from pillion.settings.node_limits import NodeLimits
from pillion.tasks import end_tasks
from pillion.v1 import kvnode_pb2_grpc
from pillion.v1.kvnode_pb2 import NodeStatus
from pillion.wire.attach import AttachedShard, AttachHello, AttachReply
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.kvnode")


class KVNode:
    """The KV node of one memory domain.

    Attributes:
        address: advertised address of its gRPC service.
        pool, regions, prefix_pins: public for tests.
    """

    def __init__(
        self,
        flags: KVNodeFlags,
        limits: NodeLimits,
        directory: NodeDirectory,
        memory: NodeMemory,
        exchange: NodeExchange,
        *,
        ledger: Ledger,
        prefix_pins: NodePrefixPins,
        survival: Callable[[Ledger, Callable[[], None]], PoolSurvival | None] | None,
        followers: Followers,
        calls: Mapping[str, Callable[[Any, Any], Any]],
        regions: RegionServer,
        disk: DiskFolder | None,
        bucket: ObjectStore | None,
    ) -> None:
        self.address = flags.node_advertise
        self._flags, self._limits, self._directory = flags, limits, directory
        self._memory, self._exchange = memory, exchange
        self._disk, self._bucket, self._survival = disk, bucket, survival
        self.prefix_pins, self.regions, self._calls = prefix_pins, regions, calls
        self.pool = Pool(
            ledger,
            followers,
            heartbeat_timeout_s=flags.heartbeat_timeout_ms / 1000,
            announce=self._announce,
            shaped=self._shaped,
        )
        self.meters = self.pool.meters
        self.meters.watch(lambda: metric_readings(self.status()))
        self.meters.watch(followers.readings)
        self._storage: Storage | None = None
        self._shaping = asyncio.Lock()
        self._attach = AttachServer(
            flags.attach_socket,
            memory.filenos,
            self._admit,
            self._ended,
            self.pool.fence,
            regions.serve,
            exit_is_proof=lambda: memory.domain.kind != HOST,
            answering=memory.answering,
        )
        self._server: RunningServer | None = None
        self._stopping = asyncio.Event()
        self._leaving = False
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start the node, gRPC first, because workers get its address when they attach."""
        flags = self._flags
        await self._memory.open()
        self.pool.pool_bytes = self._memory.pool_bytes
        await self._exchange.start()
        # The mapping implements the service's other methods.
        servicer = KVNodeServicer(  # type: ignore[abstract]
            self.pool, flags.node_id, self.status, self.check_integrity, self._stopping, self._calls
        )
        try:
            self._server = await start_server(
                flags.node_listen,
                [
                    (SERVICE_NAME, lambda server: kvnode_pb2_grpc.add_KVNodeServicer_to_server(servicer, server)),
                    *self._exchange.services(),
                ],
                credentials=internal_credentials(flags.node_listen),
            )
        except OSError as error:
            raise ConfigError(str(error)) from None
        listening = self._server.address
        self.address = await asyncio.to_thread(advertised, flags.node_advertise, listening, flags.redis_url)
        await self._directory.refuse_duplicate(self.address)
        self._attach.start()
        self._spawn(self._watch_silence(), "fencing")
        if flags.redis_url:
            self._spawn(self._directory.announce(self.record, self._hashes), "announcing")
            following = follow_address(self.address, flags.node_advertise, listening, flags.redis_url, self._moved)
            self._spawn(following, "following the address")
        log.info("node %s serves %s, workers attach at %s", flags.node_id, self.address, flags.attach_socket)

    async def stop(self, grace_s: float = 2.0) -> None:
        """Hand over warm blocks within ``grace_s``, end sessions and attachments, and free the memory. Idempotent."""
        if grace_s > 0:
            grace_s -= await self._hand_over(min(grace_s, self._flags.hand_over_timeout_s))
        self._stopping.set()
        self.pool.followers.close()
        tasks, self._tasks = self._tasks, []
        await end_tasks(*tasks)
        await self._directory.leave()
        await self._attach.stop()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(max(0.0, grace_s))
        # After the last call that could change a prefix pin.
        await self.prefix_pins.aclose()
        storage, self._storage = self._storage, None
        if storage is not None:
            await storage.close()
        if self._disk is not None:
            self._disk.close()
        await self._directory.aclose()
        self.regions.close()
        self._memory.close()

    async def _hand_over(self, within_s: float) -> float:
        """Hand over warm blocks to other nodes or the disk, within ``within_s``; return the seconds spent. Failures are
        logged."""
        storage, began_s = self._storage, time.monotonic()
        if storage is None or self._leaving or within_s <= 0:
            return 0.0
        self._leaving = True
        try:
            async with asyncio.timeout(within_s):
                if self._directory.beat_now():
                    await asyncio.sleep(min(self._flags.heartbeat_ms / 1000, within_s / 2))
                left_s = within_s - (time.monotonic() - began_s)
                rate = self._limits.hand_over_bytes_per_s
                await storage.hand_over(await self._directory.others(), self._directory.look_up, left_s, rate)
        except TimeoutError:
            log.warning("the warm blocks were not handed over within %g s", within_s)
        except PillionError as error:
            log.warning("the warm blocks are not handed over: %s", error.message)
        return time.monotonic() - began_s

    async def wait_failed(self) -> str:
        """Wait until the node fails; return the reason."""
        return await asyncio.shield(self._failure)

    def status(self) -> NodeStatus:
        status = self.pool.status()
        status.node_id = self._flags.node_id
        status.boot_epoch = self._directory.boot_epoch
        status.kv_device = self._flags.kv_device
        if self._storage is not None:
            self._storage.complete(status)
        return status

    async def _admit(self, hello: AttachHello) -> AttachReply:
        memory = self._memory
        if not self.pool.shaped:
            # Before the lock, because the worker that has it may wait for this one.
            memory.asked(hello)
        async with self._shaping:
            try:
                if not self.pool.shaped and hello.block_bytes > 0:
                    await memory.shape(hello)
                    self.pool.pool_bytes = memory.pool_bytes
                if hello.pool_id and hello.pool_id != memory.pool_id:
                    raise Conflict(POOL_GONE)
                epoch, num_slots = self.pool.attach(hello)
            finally:
                if not self.pool.shaped:
                    memory.unshape()
        log.info("%s (%s) attached", hello.component_id, hello.role)
        domain = memory.domain
        return AttachReply(
            node_id=self._flags.node_id,
            node_address=self.address,
            epoch=epoch,
            num_slots=num_slots,
            memory_kind=domain.kind,
            device_uuid=domain.device_uuids[0],
            device_index=domain.device_indexes[0],
            mapped_bytes=memory.segments[0].size_bytes,
            shards=self._attached_shards(),
            pool_id=memory.admitted(hello),
        )

    def _ended(self, epoch: int) -> None:
        self._memory.ended(epoch)
        self.pool.ended(epoch)

    def _attached_shards(self) -> tuple[AttachedShard, ...]:
        """Return the shards of a pool divided over GPUs; () for another pool."""
        memory = self._memory
        if memory.shards is None or not memory.divided:
            return ()
        each = zip(memory.segments, memory.domain.device_uuids, memory.shards.shares, strict=True)
        return tuple(
            AttachedShard(device_uuid=uuid, mapped_bytes=segment.size_bytes, first_head=share.start, heads=len(share))
            for segment, uuid, share in each
        )

    def check_integrity(self) -> None:
        """Raise PillionError on inconsistency in the pool's slots or its memory (I4)."""
        self.pool.check_integrity()
        self._memory.check_integrity()

    def _shaped(self, shape: PoolShape) -> None:
        assert self._memory.pool is not None
        self._storage = Storage(
            self._flags,
            self._limits,
            shape,
            self._memory.pool,
            self.pool,
            pinned_memory=self._memory.domain.pinned_memory,
            announce=self._directory.push,
            exchange=self._exchange,
            folder=self._disk,
            bucket=self._bucket,
        )
        self.pool.fetcher, self.pool.spiller = self._storage.fetcher, self._storage.spiller
        self._spawn(self._storage.run(), "storage")
        self._spawn(self.prefix_pins.run(), "prefix pins")
        if self._survival is not None:
            self.pool.survival = self._survival(self.pool.ledger, self.pool.changed)
        if (survival := self.pool.survival) is not None:
            self._spawn(survival.run(), "the pool's survival")

    def _announce(self, events: list[IndexEvent]) -> None:
        self._directory.push(events if self._storage is None else self._storage.pool_changed(events))

    def _hashes(self) -> Iterator[tuple[bytes, bytes]]:
        lower = () if self._storage is None else self._storage.names()
        return chain(self.pool.ledger.hashes(), lower)

    def record(self, boot_epoch: int) -> ComponentRecord:
        """Return the node's record for the registry, with the boot epoch of its index entries."""
        status = self.status()
        return ComponentRecord(
            component_id=self._flags.node_id,
            role="kvnode",
            address=self.address,
            version=VERSION,
            node_id=self._flags.node_id,
            boot_epoch=boot_epoch,
            running_requests=status.tickets,
            waiting_requests=status.waiting_tickets,
            total_blocks=status.total_blocks,
            free_blocks=status.free_blocks,
            leased_blocks=status.leased_blocks,
            committed_blocks=status.committed_blocks,
            quarantined_blocks=status.quarantined_blocks,
            pinned_blocks=status.pinned_blocks,
            disk_blocks=status.disk_blocks,
            object_url="" if self._storage is None else self._storage.object_url,
            leaving=self._leaving,
            fenced_components=tuple(status.fenced_components),
        )

    def _moved(self, address: str) -> None:
        log.warning("node %s is at %s now, not at %s any more", self._flags.node_id, address, self.address)
        self.address = address
        self._directory.beat_now()

    async def _watch_silence(self) -> None:
        interval_s = self._flags.heartbeat_ms / 2000
        while True:
            await asyncio.sleep(interval_s)
            if self.pool.judge_silence(interval_s):
                # Without delay, because gateways replay a worker's requests once the node's record lists it as fenced.
                self._directory.beat_now()

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._failure.done():
            return
        error = task.exception()
        log.error("%s ended", task.get_name(), exc_info=error)
        self._failure.set_result(f"{task.get_name()} ended: {error}")


def metric_readings(status: NodeStatus) -> Iterator[Reading]:
    """Yield the metrics of a status."""
    for state in ("free", "leased", "committed", "quarantined"):
        yield names.KV_BLOCKS, (state,), getattr(status, f"{state}_blocks")
    in_use = status.leased_blocks + status.quarantined_blocks + status.pinned_blocks + status.reserved_blocks
    yield names.KV_HELD, ("pinned",), status.pinned_blocks
    yield names.KV_HELD, ("reserved",), status.reserved_blocks
    yield names.KV_USAGE, (), min(1.0, in_use / status.total_blocks) if status.total_blocks else 0.0
    yield names.KV_BLOCK_BYTES, (), status.block_bytes
    yield names.KV_DISK_BLOCKS, (), status.disk_blocks
    yield names.KV_DISK_SHORT, (), status.disk_short_blocks
    yield names.KV_OBJECT_BLOCKS, (), status.object_blocks
    yield names.KV_PAUSED, (), int(status.disk_paused) + int(status.object_paused)
    yield names.KV_LATE, (), status.late_blocks
    yield names.KV_TICKETS, ("held",), status.tickets
    yield names.KV_TICKETS, ("waiting",), status.waiting_tickets
    yield names.KV_FENCED, (), len(status.fenced_components)
    yield names.KV_COMMITTED, (), status.committed_blocks_ever
    yield names.KV_EVICTED, (), status.evicted_blocks
    for direction in ("fetched", "served", "restored", "bucket", "spilled", "recovered"):
        yield names.KV_MOVED, (direction,), getattr(status, f"{direction}_blocks")
    yield names.KV_FETCH_BYTES, ("node",), status.fetched_blocks * status.block_bytes
    yield names.KV_FETCH_BYTES, ("disk",), status.restored_blocks * status.block_bytes
    yield names.KV_FETCH_BYTES, ("bucket",), status.bucket_blocks * status.block_bytes
    yield names.KV_USER_PINS, (), status.prefix_pins
    yield names.KV_USER_PINNED, (), status.prefix_pin_blocks
    yield names.KV_USER_PIN_HITS, (), status.prefix_pin_hits
    yield names.KV_CORRUPT, (), status.corrupt_blocks
    yield names.KV_SHORT_FETCHES, (), status.short_fetches
