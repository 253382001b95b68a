"""Reader's side of the data plane: this node's connections to the nodes that it reads from.

    get --> channel, session, Meet --> met --pin, read, release--> met
                                        |-- the session ends (the source died, restarted, or dropped us) --> gone
                                        +-- idle for too long, or too many peers --> gone
    get again --> a new one, with a new boot epoch if the source restarted

The end of a session releases all its pins at the source, so a lost reader pins nothing there for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc

from pillion.errors import Conflict, DeadlineExceeded, PillionError, Unavailable
from pillion.kvstore.client.node_client import CALL_TIMEOUT_S, NodeClient, NodeSession, call_unary, typed
from pillion.kvstore.exchange.plane import MAX_PIECE_BYTES, MAX_READ_SLOTS, BlockShape, DataPlane, node_id_of
from pillion.kvstore.index.registry import Addresses
from pillion.kvstore.memory.memory import CUDA, HOST
from pillion.tasks import end_tasks
from pillion.v1 import kvplane_pb2_grpc
from pillion.v1.kvnode_pb2 import PinPrefixRequest, PrefetchReply
from pillion.v1.kvplane_pb2 import MeetReply, MeetRequest, PinBlocksReply, PinBlocksRequest, ReadBlocksRequest
from pillion.wire.common import check_hello, hello_to_pb

log = logging.getLogger("pillion.kvnode")

MAX_PEERS = 256
PEER_IDLE_S = 300.0
ADDRESSES_TTL_S = 1.0
STREAM_STALL_S = 2.0
# Max pending releases while a source does not answer; older ones are dropped, and take effect when the session ends.
MAX_RELEASES = 4096
RELEASE_RETRY_DELAY_S = 0.1
# How long fetches avoid a source after a failure. A timeout below FAIR_TIMEOUT_S does not count as a failure.
AVOID_S = 1.0
FAIR_TIMEOUT_S = 0.2


class Peer:
    """Connection to one source node, with a session at it. ``pool`` describes the source's pool."""

    def __init__(self, client: NodeClient, session: NodeSession, pool: MeetReply) -> None:
        self.pool = pool
        self.node_id = node_id_of(pool)
        self.used_s = time.monotonic()
        self._client = client
        self._session = session
        self._plane: Any = kvplane_pb2_grpc.KVPlaneStub(client.channel)
        self._releases: list[tuple[int, int]] = []
        self._releasing: asyncio.Task[None] | None = None
        self._ended = asyncio.create_task(session.closed(), name=f"session at {self.node_id}")

    @property
    def alive(self) -> bool:
        """True if the session is open, hence every pin valid."""
        return not self._ended.done()

    async def pin(self, block_hashes: bytes, first_block: int, timeout_s: float) -> PinBlocksReply:
        """Pin the longest prefix of a chain that the source has; return its slots from ``first_block`` on.

        If this call ends without an answer, the pins are released. Raises the source's errors.
        """
        nonce = secrets.randbits(62) + 1
        request = PinBlocksRequest(
            epoch=self._session.epoch, nonce=nonce, block_hashes=block_hashes, first_block=first_block
        )
        self.used_s = time.monotonic()
        try:
            pinned: PinBlocksReply = await call_unary(self._plane.PinBlocks, request, timeout_s)
            if len(pinned.slots) != len(pinned.checksums):
                raise Conflict(f"the source names {len(pinned.slots)} slots and {len(pinned.checksums)} checksums")
            if max(pinned.slots, default=-1) >= self.pool.num_slots:
                raise Conflict(f"{self.node_id} names a slot that it does not have")
        except (asyncio.CancelledError, PillionError):
            self._release(0, nonce)
            raise
        return pinned

    def release(self, ticket_id: int) -> None:
        """Start releasing a ticket; never fails or waits."""
        if ticket_id:
            self._release(ticket_id, 0)

    async def read(self, plane: DataPlane, ticket_id: int, remote: tuple[int, ...], local: tuple[int, ...]) -> None:
        """Read blocks (:meth:`DataPlane.read`). Also raises Unavailable if they did not stay pinned."""
        await plane.read(self.pool, self.read_blocks, ticket_id, remote, local)
        self.used_s = time.monotonic()
        if not self.alive:
            raise Unavailable(f"the session at {self.node_id} ended during the read")

    async def read_blocks(self, ticket_id: int, slots: tuple[int, ...], targets: list[memoryview]) -> None:
        """Fill ``targets`` with pinned blocks. No write to them is pending when this returns or raises. Raises
        Unavailable if the source is silent for STREAM_STALL_S or ends the stream early, and the source's errors."""
        for start in range(0, len(slots), MAX_READ_SLOTS):
            part = slots[start : start + MAX_READ_SLOTS]
            request = ReadBlocksRequest(
                epoch=self._session.epoch, ticket_id=ticket_id, slots=part, max_piece_bytes=MAX_PIECE_BYTES
            )
            await self._stream(request, targets[start : start + len(part)])

    async def offer(self, source: str, hashes: bytes, max_bytes: int, timeout_s: float) -> PrefetchReply:
        """Make the node fetch up to ``max_bytes`` more of a chain from ``source``, under a ticket that is released at
        the end of this call. Raises the node's errors."""
        self.used_s = time.monotonic()
        ticket = await self._client.open_ticket(self._session.epoch, hashes, 0, timeout_s=timeout_s)
        try:
            return await self._client.prefetch(
                self._session.epoch, ticket.ticket_id, hashes, [source], timeout_s=timeout_s, max_bytes=max_bytes
            )
        finally:
            self.release(ticket.ticket_id)

    async def touch(self, hashes: bytes) -> None:
        """Move a chain to the end of the node's eviction order. Raises the node's errors."""
        self.release((await self._client.open_ticket(self._session.epoch, hashes, 0)).ticket_id)

    async def pin_prefixes(self, pins: Sequence[PinPrefixRequest]) -> None:
        """Pin prefixes at the node, skipping those that it refuses."""
        for pin in pins:
            pin.epoch = self._session.epoch
            try:
                await self._client.pin_prefix(pin)
            except PillionError as error:
                log.warning("node %s refuses pin %s: %s", self.node_id, pin.name, error.message)

    async def aclose(self) -> None:
        """End the session at the source, releasing all its pins. Idempotent."""
        if self._releasing is not None:
            self._releasing.cancel()
        await self._session.aclose()
        await asyncio.gather(self._ended, *filter(None, [self._releasing]), return_exceptions=True)
        await self._client.aclose()

    async def _stream(self, request: Any, targets: list[memoryview]) -> None:
        try:
            call = self._plane.ReadBlocks(request)
        except grpc.aio.UsageError:
            raise Unavailable("the connection was closed") from None
        data = memoryview(b"")
        try:
            for target in targets:
                at = 0
                while at < len(target):
                    data = data or await self._piece(call)
                    if not data:
                        raise Unavailable(f"{self.node_id} sent {at} of {len(target)} bytes of a block")
                    count = min(len(data), len(target) - at)
                    target[at : at + count], data = data[:count], data[count:]
                    at += count
            if data:
                raise Unavailable(f"{self.node_id} sent {len(data)} bytes more than the blocks have")
        finally:
            call.cancel()

    async def _piece(self, call: Any) -> memoryview:
        try:
            async with asyncio.timeout(STREAM_STALL_S):
                piece = await typed(call.read())
        except TimeoutError:
            raise Unavailable(f"{self.node_id} was silent for {STREAM_STALL_S:.1f} s") from None
        return memoryview(b"" if piece is grpc.aio.EOF else piece.data)

    def _release(self, ticket_id: int, nonce: int) -> None:
        self._releases.append((ticket_id, nonce))
        del self._releases[:-MAX_RELEASES]
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._release_all(), name=f"releases at {self.node_id}")

    async def _release_all(self) -> None:
        while self._releases and self.alive:
            batch, self._releases = self._releases, []
            tickets = [ticket for ticket, _ in batch if ticket]
            nonces = [nonce for _, nonce in batch if nonce]
            try:
                await self._client.release(self._session.epoch, tickets, nonces=nonces)
            except PillionError as error:
                log.debug("release at KV node %s failed: %s", self.node_id, error.message)
                self._releases = (batch + self._releases)[-MAX_RELEASES:]
                await asyncio.sleep(RELEASE_RETRY_DELAY_S)


class SourceNode:
    """A node as the source of one fetch; connected at the first pin."""

    def __init__(self, node_id: str, peers: Peers) -> None:
        self.node_id = node_id
        self._peers = peers
        self._pinned_at: dict[int, Peer] = {}

    async def pin(self, hashes: bytes, first_block: int, *, timeout_s: float) -> PinBlocksReply:
        """Pin at the source node as :meth:`Peer.pin` does; ``timeout_s`` includes connecting.

        Raises Unavailable, Conflict, DeadlineExceeded.
        """
        until_s = time.monotonic() + timeout_s
        try:
            peer = await self._peers.get(self.node_id, timeout_s)
            pinned = await peer.pin(hashes, first_block, max(0.0, until_s - time.monotonic()))
        except (Unavailable, DeadlineExceeded):
            if timeout_s >= FAIR_TIMEOUT_S:
                self._peers.avoid(self.node_id)
            raise
        if pinned.ticket_id:
            self._pinned_at[pinned.ticket_id] = peer
        return pinned

    def release(self, ticket_id: int) -> None:
        """Start releasing a ticket; never fails or waits."""
        peer = self._pinned_at.pop(ticket_id, None)
        if peer is not None:
            peer.release(ticket_id)

    async def read(self, ticket_id: int, remote: tuple[int, ...], local: tuple[int, ...]) -> None:
        """Read slots pinned under a ticket into own slots (:meth:`DataPlane.read`). Raises Unavailable, Conflict."""
        peer = self._pinned_at.get(ticket_id)
        if peer is None:
            raise Unavailable(f"nothing is pinned at {self.node_id} under that ticket")
        try:
            await peer.read(await self._peers.plane(), ticket_id, remote, local)
        except Unavailable:
            self._peers.avoid(self.node_id)
            raise


class Peers:
    """All peers of this node, by node id.

    Args:
        addresses: returns node id -> address of all nodes' gRPC services; called at most every ADDRESSES_TTL_S.
        plane: returns this node's data plane, creating it at the first call.
    """

    def __init__(
        self, node_id: str, shape: BlockShape, addresses: Addresses, plane: Callable[[], Awaitable[DataPlane]]
    ) -> None:
        self._node_id = node_id
        self._addresses = addresses
        self._shape = shape
        self._get_plane = plane
        self._plane: DataPlane | None = None
        self._avoided_until_s: dict[str, float] = {}
        self._cached_addresses: Mapping[str, str] = {}
        self._addresses_until_s = 0.0
        self._peers: dict[str, Peer] = {}
        self._connecting: dict[str, asyncio.Task[Peer]] = {}
        self._closing: dict[asyncio.Task[None], None] = {}
        self._closed = False

    def source(self, node_id: str) -> SourceNode:
        """Return a source for one fetch. Raises Unavailable for this node, and for one that failed within AVOID_S."""
        if self._closed or node_id == self._node_id:
            raise Unavailable(f"{node_id} is not a source for this node")
        if time.monotonic() < self._avoided_until_s.get(node_id, 0.0):
            raise Unavailable(f"KV node {node_id} failed a moment ago")
        return SourceNode(node_id, self)

    async def plane(self) -> DataPlane:
        """Return this node's data plane."""
        self._plane = await self._get_plane()
        return self._plane

    def avoid(self, node_id: str) -> None:
        """Make fetches avoid a node that just failed, for AVOID_S."""
        now = time.monotonic()
        self._avoided_until_s = {name: until for name, until in self._avoided_until_s.items() if until > now}
        self._avoided_until_s[node_id] = now + AVOID_S

    async def get(self, node_id: str, timeout_s: float = CALL_TIMEOUT_S) -> Peer:
        """Return a connected peer; concurrent callers share one attempt. Raises Unavailable for a node that is unknown
        or does not answer in time, Conflict if the pools do not fit."""
        peer = self._peers.get(node_id)
        if peer is not None and peer.alive:
            peer.used_s = time.monotonic()
            return peer
        if self._closed or node_id == self._node_id:
            raise Unavailable(f"{node_id} is not a source for this node")
        task = self._connecting.get(node_id)
        if task is None:
            task = self._connecting[node_id] = asyncio.create_task(self._meet(node_id), name=f"meeting {node_id}")
            task.add_done_callback(lambda _: self._connecting.pop(node_id, None))
            # Retrieve the exception even if no caller is left.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise Unavailable(f"KV node {node_id} does not answer") from None

    def drop(self, node_id: str) -> None:
        """Disconnect a peer; the next :meth:`get` reconnects. Pending reads there fail."""
        peer = self._peers.pop(node_id, None)
        if peer is not None:
            if self._plane is not None:
                self._plane.forget(node_id)
            task = asyncio.create_task(peer.aclose(), name=f"leaving {node_id}")
            self._closing[task] = None
            task.add_done_callback(lambda done: self._closing.pop(done, None))

    async def aclose(self) -> None:
        """Disconnect all peers. Idempotent."""
        self._closed = True
        await end_tasks(*self._connecting.values())
        for node_id in list(self._peers):
            self.drop(node_id)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _meet(self, node_id: str) -> Peer:
        # State of an earlier connection is void: a restarted source has a new boot epoch.
        self.drop(node_id)
        address = await self._address(node_id)
        self._evict_peers()
        client = NodeClient(address, self._node_id)
        session: NodeSession | None = None
        try:
            session = await client.open_session()
            stub: Any = kvplane_pb2_grpc.KVPlaneStub(client.channel)
            request = MeetRequest(
                hello=hello_to_pb(self._node_id),
                block_bytes=self._shape.block_bytes,
                kv_namespace=self._shape.namespace,
            )
            pool: MeetReply = await call_unary(stub.Meet, request)
            if check_hello(pool.hello) != node_id:
                raise Unavailable(f"{address} is KV node {node_id_of(pool)}, not {node_id}")
            pool.memory_kind = pool.memory_kind or HOST
            if pool.memory_kind not in (HOST, CUDA):
                raise Conflict(f"{node_id} has its pool in memory of kind {pool.memory_kind!r}, which is unknown here")
            self._shape.check(BlockShape(pool.block_bytes, pool.kv_namespace), node_id)
        except BaseException:
            if session is not None:
                await session.aclose()
            await client.aclose()
            raise
        self._peers[node_id] = peer = Peer(client, session, pool)
        return peer

    def _evict_peers(self) -> None:
        """Drop dead and idle peers, and the least recently used ones so that one more fits."""
        now = time.monotonic()
        by_use = sorted(self._peers, key=lambda node_id: self._peers[node_id].used_s)
        for index, node_id in enumerate(by_use):
            peer = self._peers[node_id]
            too_many = len(by_use) - index >= MAX_PEERS
            if too_many or not peer.alive or now - peer.used_s > PEER_IDLE_S:
                self.drop(node_id)

    async def _address(self, node_id: str) -> str:
        now = time.monotonic()
        if now >= self._addresses_until_s:
            with contextlib.suppress(PillionError):
                addresses = await self._addresses()
                # A registry that lacks this node itself has lost its data: keep the cached addresses.
                lost = self._node_id not in addresses
                self._cached_addresses = {**self._cached_addresses, **addresses} if lost else addresses
            self._addresses_until_s = now + ADDRESSES_TTL_S
        address = self._cached_addresses.get(node_id, "")
        if not address:
            raise Unavailable(f"the registry has no address of KV node {node_id}")
        return address
