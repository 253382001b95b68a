"""The KV node as a component: memory, pool, attach socket, gRPC services, heartbeats, metrics.

start_kvnode --> serving --the first worker attaches--> the pool has its shape: storage (pillion.kvstore.node.storage)
                    +-- stop --> sessions and attachments ended --> gone
                    +-- a task of its own died --> wait_failed() returns why
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from pillion.config import KVNodeFlags, refuse_contradictions
from pillion.errors import ConfigError, Conflict, PillionError, Unavailable
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.index.advertise import advertised
from pillion.kvstore.index.announcer import Announcer, new_boot_epoch
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.index.retention_records import RetentionRecords
from pillion.kvstore.ledger.eviction import make_policy
from pillion.kvstore.ledger.records import IndexEvent, PoolShape
from pillion.kvstore.memory.domain import device_indexes
from pillion.kvstore.memory.memory import HOST
from pillion.kvstore.memory.node_memory import NodeMemory
from pillion.kvstore.node.adapter_files import NodeAdapters
from pillion.kvstore.node.attach_server import UNSEEN_PROCESS, AttachServer
from pillion.kvstore.node.keeping import Keeping
from pillion.kvstore.node.node_servicer import SERVICE_NAME, KVNodeServicer
from pillion.kvstore.node.pool import Pool
from pillion.kvstore.node.region_server import RegionServer
from pillion.kvstore.node.storage import Storage
from pillion.kvstore.tiers.disk_files import DiskFolder
from pillion.kvstore.tiers.object_store import ObjectStore, parse_object_url
from pillion.kvstore.transfer.plane_factory import choose_transport
from pillion.kvstore.transfer.plane_servicer import SERVICE_NAME as PLANE_SERVICE_NAME
from pillion.kvstore.transfer.plane_servicer import KVPlaneServicer
from pillion.net.rpc import RunningServer, internal_credentials, start_server
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Reading
from pillion.v1 import kvnode_pb2_grpc, kvplane_pb2_grpc
from pillion.v1.kvnode_pb2 import NodeStatus
from pillion.wire.attach import AttachedShard, AttachHello, AttachReply
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.kvnode")

# How long a node that bears this one's name has to answer at start.
TWIN_TIMEOUT_S = 2.0


async def start_kvnode(flags: KVNodeFlags) -> KVNode:
    """Starts a node; it serves when this returns. Raises ConfigError, with nothing left behind, if it cannot."""
    node = KVNode(flags)
    try:
        await node.start()
    except BaseException:
        await node.stop(0.0)
        raise
    return node


class KVNode:
    """The node of one memory domain.

    Attributes:
        address: where others reach its gRPC service.
        pool, regions, adapters: for tests.
    """

    def __init__(self, flags: KVNodeFlags) -> None:
        flags = _checked(flags)
        self.address = flags.node_advertise
        self.pool = Pool(
            pool_bytes=0,
            decode_reserve_percent=flags.decode_reserve_percent,
            max_waiting=flags.max_waiting_tickets,
            heartbeat_timeout_s=flags.heartbeat_timeout_ms / 1000,
            policy=make_policy(flags.eviction_policy),
            retained_percents=(flags.max_pinned_percent, flags.max_tenant_pinned_percent),
            records=RetentionRecords(flags.redis_url, flags.node_id) if flags.redis_url else None,
            announce=self._announce,
            shaped=self._shaped,
            node_id=flags.node_id,
            kv_device=flags.kv_device,
            max_log_changes=flags.kv_log_changes,
            max_followers=flags.max_kv_followers,
        )
        self.meters = self.pool.meters
        self.meters.watch(lambda: metric_readings(self.status()))
        self.meters.watch(self.pool.followers.readings)
        self._storage: Storage | None = None
        self._folder = DiskFolder(flags.disk_path) if flags.disk_path else None
        self._objects = ObjectStore(parse_object_url(flags.object_url)) if flags.object_url else None
        self._flags = flags
        self._memory = NodeMemory(flags)
        self._shaping = asyncio.Lock()
        self.regions = RegionServer(flags.node_id, self._memory)
        self.adapters = NodeAdapters(flags.node_id, self._addresses, flags.store_limits)
        self._attach = AttachServer(
            flags.attach_socket,
            self._memory.filenos,
            self._admit,
            self._ended,
            self.pool.fence,
            self.regions.serve,
            exit_is_proof=lambda: self._memory.domain.kind != HOST,
            answering=self._answering,
        )
        self._server: RunningServer | None = None
        self._announcer: Announcer | None = None
        self._registry: Registry | None = None
        self._boot_epoch = new_boot_epoch()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Starts everything; gRPC first, because a worker that attaches gets its address."""
        flags = self._flags
        await self._memory.open()
        self.pool.pool_bytes = self._memory.pool_bytes
        if flags.kv_transport == "nixl":
            # Named by the flag, so its absence is a mistake; otherwise NIXL is looked for when it is needed.
            await asyncio.to_thread(choose_transport, "nixl")
        servicer = KVNodeServicer(
            self.pool, flags.node_id, self.status, self.check_integrity, self._stopping, self.adapters
        )
        plane = KVPlaneServicer(self._source)
        try:
            self._server = await start_server(
                flags.node_listen,
                [
                    (SERVICE_NAME, lambda server: kvnode_pb2_grpc.add_KVNodeServicer_to_server(servicer, server)),
                    (PLANE_SERVICE_NAME, lambda server: kvplane_pb2_grpc.add_KVPlaneServicer_to_server(plane, server)),
                ],
                credentials=internal_credentials(flags.node_listen),
            )
        except OSError as error:
            raise ConfigError(str(error)) from None
        # Names may have to be looked up.
        listening = self._server.address
        self.address = await asyncio.to_thread(advertised, flags.node_advertise, listening, flags.redis_url)
        if flags.redis_url:
            self._registry = Registry(flags.redis_url, flags.heartbeat_timeout_ms)
            await self._refuse_twin()
        self._attach.start()
        self._spawn(self._judge_silence(), "fencing")
        if flags.redis_url:
            self._announcer = Announcer(
                flags.redis_url,
                heartbeat_s=flags.heartbeat_ms / 1000,
                ttl_ms=flags.heartbeat_timeout_ms,
                record=self.record,
                hashes=self._hashes,
            )
            self._spawn(self._announcer.run(), "announcing")
        log.info("node %s serves %s, workers attach at %s", flags.node_id, self.address, flags.attach_socket)

    async def _refuse_twin(self) -> None:
        """Raises ConfigError where another node of this name is alive: with two of them, each would take the other's
        entries in the index for its own.

        A record alone proves nothing, because that of this node's last life stays for a moment. Only a node that
        answers counts, at an address that is not this node's.
        """
        node_id = self._flags.node_id
        try:
            known = await self._addresses()
        except PillionError as error:
            log.warning("the registry does not answer, so nobody knows whether %s is taken: %s", node_id, error.message)
            return
        address = known.get(node_id, self.address)
        if address == self.address:
            return
        twin = NodeClient(address, node_id)
        try:
            found = (await twin.status(timeout_s=TWIN_TIMEOUT_S)).node_id
        except PillionError as error:
            log.info("a record of %s at %s stood for a node that is gone: %s", node_id, address, error.message)
            return
        finally:
            await twin.aclose()
        if found == node_id:
            raise ConfigError(
                f"--node-id {node_id} is taken: a KV node of this name serves at {address}; give each node a name of"
                " its own"
            )

    async def stop(self, grace_s: float = 2.0) -> None:
        """Ends sessions and attachments, by which others learn of it, and frees the memory. Idempotent."""
        self._stopping.set()
        self.pool.followers.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        announcer, self._announcer = self._announcer, None
        if announcer is not None:
            await announcer.leave()
        await self._attach.stop()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)
        # Behind the last call that may drop a pin or make one.
        await self.pool.retaining.aclose()
        storage, self._storage = self._storage, None
        if storage is not None:
            await storage.close()
        if self._folder is not None:
            self._folder.close()
        if self._registry is not None:
            await self._registry.aclose()
        self.regions.close()
        self._memory.close()

    async def wait_failed(self) -> str:
        """Returns the reason if the node dies by itself; otherwise never."""
        return await asyncio.shield(self._failure)

    def status(self) -> NodeStatus:
        """Returns the node's whole status."""
        status = self.pool.status()
        status.node_id = self._flags.node_id
        status.boot_epoch = self._current_boot()
        status.kv_device = self._flags.kv_device
        if self._storage is not None:
            self._storage.complete(status)
        return status

    # -- inside

    async def _admit(self, hello: AttachHello) -> AttachReply:
        memory = self._memory
        if hello.place and not self.pool.shaped:
            # This is noted before the lock is taken, because another worker that has the lock may wait for this one.
            memory.drained.add(hello.place)
        async with self._shaping:
            try:
                if not self.pool.shaped and hello.block_bytes > 0:
                    await memory.shape(
                        hello.block_bytes,
                        hello.kv_rows,
                        hello.kv_heads,
                        hello.namespace,
                        comes_back=bool(hello.pool_id),
                    )
                    self.pool.pool_bytes = memory.pool_bytes
                if hello.pool_id and hello.pool_id != self._pool_id:
                    raise Conflict("the pool that this worker has mapped is gone: start it again")
                epoch, num_slots = self.pool.attach(hello)
            finally:
                if not self.pool.shaped:
                    memory.unshape()
        log.info("%s (%s) attached", hello.component_id, hello.role)
        if memory.kept is not None and (reason := self._why_not_kept(hello)):
            log.warning("%s %s: this pool will not outlive the node", hello.component_id, reason)
            memory.kept.forsake()
        domain = memory.domain
        return AttachReply(
            node_id=self._flags.node_id,
            node_address=self.address,
            epoch=epoch,
            num_slots=num_slots,
            memory_kind=domain.kind,
            device_uuid=domain.device_uuids[0],
            device_index=domain.device_indexes[0],
            mapped_bytes=self._memory.segments[0].size_bytes,
            shards=self._attached_shards(),
            pool_id=self._pool_id if hello.takes_place and (domain.kind == HOST or memory.place_filenos()) else "",
        )

    def _why_not_kept(self, hello: AttachHello) -> str:
        """Says why nobody can prove the end of what this worker does with the pool; empty where that can be proven."""
        if not hello.takes_place:
            return "is of an older version"
        if self._memory.domain.kind != HOST and hello.processes > 1:
            return f"computes on GPUs with {hello.processes} processes"
        return ""

    async def _answering(self, hello: AttachHello, reply: AttachReply, process: int) -> list[int]:
        """Has the keeper know of a worker on a GPU before that is told of slots; returns the file of its place."""
        kept, keeper = self._memory.kept, self._memory.keeper
        if kept is None or keeper is None or not reply.pool_id or self._memory.domain.kind == HOST:
            return []
        if process == UNSEEN_PROCESS:
            log.warning("this pool will not outlive the node, which cannot see the process of %s", hello.component_id)
            kept.forsake()
        elif process >= 0:
            await kept.admit(keeper, self._flags.node_id, reply.epoch, hello.place or reply.epoch, process)
        return [kept.places.fileno()]

    def _ended(self, epoch: int) -> None:
        if self._memory.kept is not None:
            self._memory.kept.ended(epoch)
        self.pool.ended(epoch)

    @property
    def _pool_id(self) -> str:
        """Names a pool that outlives this node; empty for another one."""
        return self._memory.kept.pool_id if self._memory.kept is not None else ""

    def _attached_shards(self) -> tuple[AttachedShard, ...]:
        """What a worker has to know of each shard of a pool that is divided."""
        memory = self._memory
        if memory.shards is None or not memory.divided:
            return ()
        each = zip(memory.segments, memory.domain.device_uuids, memory.shards.shares, strict=True)
        return tuple(
            AttachedShard(device_uuid=uuid, mapped_bytes=segment.size_bytes, first_head=share.start, heads=len(share))
            for segment, uuid, share in each
        )

    def check_integrity(self) -> None:
        """Raises PillionError with what does not add up in the pool's slots or in its memory (I4)."""
        self.pool.check_integrity()
        self._memory.check_integrity()

    def _shaped(self, shape: PoolShape) -> None:
        assert self._memory.pool is not None
        self._storage = Storage(
            self._flags,
            shape,
            self._memory.pool,
            self.pool,
            pinned=self._memory.domain.pinned,
            announce=self._update_index,
            addresses=self._addresses,
            boot_epoch=self._current_boot,
            folder=self._folder,
            objects=self._objects,
        )
        self.pool.fetcher = self._storage.fetcher
        self._spawn(self._storage.run(), "storage")
        self._spawn(self.pool.retaining.run(), "retaining")
        kept, keeper = self._memory.kept, self._memory.keeper
        if kept is not None and keeper is not None:
            memory, ledger = self._memory.pool, self.pool.ledger
            self.pool.keeping = Keeping(self._flags.node_id, keeper, kept, ledger, memory, self.pool.changed)
            self._spawn(self.pool.keeping.run(), "keeping")

    def _source(self) -> Storage:
        if self._storage is None:
            raise Unavailable("no worker has attached to the KV node yet, so its pool has no shape")
        return self._storage

    def _announce(self, events: list[IndexEvent]) -> None:
        self._update_index(events if self._storage is None else self._storage.pool_changed(events))

    def _update_index(self, events: list[IndexEvent]) -> None:
        if self._announcer is not None and events:
            self._announcer.push(events)

    def _hashes(self) -> Iterator[tuple[bytes, bytes]]:
        lower = () if self._storage is None else self._storage.names()
        return chain(self.pool.ledger.hashes(), lower)

    def _current_boot(self) -> int:
        return self._announcer.boot_epoch if self._announcer else self._boot_epoch

    async def _addresses(self) -> Mapping[str, str]:
        """Returns node id -> address of all live nodes, of none if there is no registry."""
        components = await self._registry.components() if self._registry is not None else []
        return {component.node_id: component.address for component in components if component.role == "kvnode"}

    def record(self, boot_epoch: int) -> ComponentRecord:
        """Returns what a heartbeat writes to the registry."""
        status = self.pool.status()
        return ComponentRecord(
            component_id=self._flags.node_id,
            role="kvnode",
            address=self.address,
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
            object_url=self._object_url(),
            fenced_components=tuple(status.fenced_components),
        )

    def _object_url(self) -> str:
        """The bucket that this node can be asked about now."""
        answers = self._objects is not None and self._storage is not None and self._storage.objects_answer()
        return str(self._objects.place) if answers and self._objects is not None else ""

    async def _judge_silence(self) -> None:
        # Half a heartbeat, so that a silence is noticed soon after it became one.
        interval_s = self._flags.heartbeat_ms / 2000
        while True:
            await asyncio.sleep(interval_s)
            if self.pool.judge_silence(interval_s) and self._announcer is not None:
                # Gateways move a fenced worker's requests when they read of it in the node's record.
                self._announcer.beat_now()

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
    """Yields the metrics of a status. The four states of blocks add up to the pool."""
    for state in ("free", "leased", "committed", "quarantined"):
        yield names.KV_BLOCKS, (state,), getattr(status, f"{state}_blocks")
    held = status.leased_blocks + status.quarantined_blocks + status.pinned_blocks + status.reserved_blocks
    yield names.KV_HELD, ("pinned",), status.pinned_blocks
    yield names.KV_HELD, ("reserved",), status.reserved_blocks
    yield names.KV_USAGE, (), min(1.0, held / status.total_blocks) if status.total_blocks else 0.0
    yield names.KV_BLOCK_BYTES, (), status.block_bytes
    yield names.KV_DISK_BLOCKS, (), status.disk_blocks
    yield names.KV_OBJECT_BLOCKS, (), status.object_blocks
    yield names.KV_PAUSED, (), int(status.disk_paused) + int(status.object_paused)
    yield names.KV_LATE, (), status.late_blocks
    yield names.KV_TICKETS, ("held",), status.tickets
    yield names.KV_TICKETS, ("waiting",), status.waiting_tickets
    yield names.KV_FENCED, (), len(status.fenced_components)
    yield names.KV_COMMITTED, (), status.committed_blocks_ever
    yield names.KV_EVICTED, (), status.evicted_blocks
    for direction in ("fetched", "served", "restored", "bucket", "spilled", "taken_over"):
        yield names.KV_MOVED, (direction,), getattr(status, f"{direction}_blocks")
    yield names.KV_FETCH_BYTES, ("node",), status.fetched_blocks * status.block_bytes
    yield names.KV_FETCH_BYTES, ("disk",), status.restored_blocks * status.block_bytes
    yield names.KV_FETCH_BYTES, ("bucket",), status.bucket_blocks * status.block_bytes
    yield names.KV_USER_PINS, (), status.retentions
    yield names.KV_USER_PINNED, (), status.retained_blocks
    yield names.KV_USER_PIN_HITS, (), status.retention_hits
    yield names.KV_CORRUPT, (), status.corrupt_blocks
    yield names.KV_SHORT_FETCHES, (), status.short_fetches


def _checked(flags: KVNodeFlags) -> KVNodeFlags:
    """Returns the flags with the transport that they allow. Raises ConfigError for what makes no sense together."""
    if not 0 <= flags.decode_reserve_percent <= 90:
        raise ConfigError(f"--decode-reserve-percent {flags.decode_reserve_percent}: choose 0 to 90")
    if flags.max_waiting_tickets < 1:
        raise ConfigError(f"--max-waiting-tickets {flags.max_waiting_tickets}: must be at least 1")
    if not 0 < flags.heartbeat_ms < flags.heartbeat_timeout_ms:
        raise ConfigError("--heartbeat-ms must be positive and less than --heartbeat-timeout-ms")
    if not flags.node_id:
        raise ConfigError("--node-id must name the node")
    if len(device_indexes(flags.kv_device)) > 1:
        if flags.kv_transport == "nixl":
            raise ConfigError(
                f"--kv-transport nixl reads a block in one piece, and --kv-device {flags.kv_device} divides blocks over"
                " several GPUs; choose grpc"
            )
        flags = replace(flags, kv_transport="grpc")
    if flags.verify_blocks:
        return flags
    refuse_contradictions(flags)
    return replace(flags, kv_transport="grpc")
