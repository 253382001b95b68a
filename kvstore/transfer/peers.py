"""This node's side towards the nodes that it reads from.

    get --> channel, session, Meet --> met --pin, read, release--> met
                                        |-- the session ends (the source died, restarted, or dropped us) --> gone
                                        +-- idle for too long, or too many peers --> gone
    get again --> a new one, with a new boot epoch where the source restarted

A session's end lets go of everything that was pinned at the source, so a lost reader holds nothing there for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from pillion.errors import Conflict, DeadlineExceeded, PillionError, Unavailable
from pillion.kvstore.client.node_client import CALL_TIMEOUT_S, NodeClient, Session, call_unary, typed
from pillion.kvstore.transfer.plane import BlockShape, DataPlane, PeerPool, Pinned
from pillion.v1 import kvplane_pb2_grpc
from pillion.wire import kvplane as wire

log = logging.getLogger("pillion.kvnode")

MAX_PEERS = 256
# A peer that nobody used for so long is closed when another one is asked for.
PEER_IDLE_S = 300.0
# How old the directory's answer may be.
ADDRESSES_TTL_S = 1.0
# Longest silence of a source in the middle of a stream.
STREAM_STALL_S = 2.0
# Slots per ReadBlocks call; a longer list is several calls, one after the other.
MAX_SLOTS_PER_STREAM = 4096
# Releases wait in line while a source does not answer; beyond this the oldest are left to the session's end.
MAX_RELEASES = 4096
RELEASE_RETRY_DELAY_S = 0.1
# After a failure a source is left alone for so long. One that was given less than FAIR_TIMEOUT_S has not failed.
AVOID_S = 1.0
FAIR_TIMEOUT_S = 0.2

Addresses = Callable[[], Awaitable[Mapping[str, str]]]


class Peer:
    """One source, met. It serves as the plane's :class:`pillion.kvstore.transfer.plane.BlockStream`.

    Attributes:
        pool: what the source said of its pool.
    """

    def __init__(self, client: NodeClient, session: Session, pool: PeerPool) -> None:
        self.pool = pool
        self.used_s = time.monotonic()
        self._client = client
        self._session = session
        self._plane: Any = kvplane_pb2_grpc.KVPlaneStub(client.channel)
        self._releases: list[tuple[int, int]] = []
        self._releasing: asyncio.Task[None] | None = None
        self._ended = asyncio.create_task(session.closed(), name=f"session at {pool.node_id}")

    @property
    def alive(self) -> bool:
        """Whether the session lives, and with it every pin."""
        return not self._ended.done()

    async def pin(self, block_hashes: bytes, first_block: int, timeout_s: float) -> Pinned:
        """Pins the longest prefix of a chain that is there; names its slots from ``first_block`` on.

        Args:
            block_hashes: the chain from its first block, 32 bytes each.

        When this call ends without an answer the source is told to forget it. Raises what the source raises.
        """
        nonce = secrets.randbits(62) + 1
        request = wire.pin_to_pb(self._session.epoch, nonce, block_hashes, first_block)
        self.used_s = time.monotonic()
        try:
            pinned = wire.pinned_from_pb(await call_unary(self._plane.PinBlocks, request, timeout_s))
            if any(slot >= self.pool.num_slots for slot in pinned.slots):
                raise Conflict(f"{self.pool.node_id} names a slot that it does not have")
        except (asyncio.CancelledError, PillionError):
            self._let_go(0, nonce)
            raise
        return pinned

    def release(self, ticket_id: int) -> None:
        """Lets go of pinned blocks soon; never fails, never waits."""
        if ticket_id:
            self._let_go(ticket_id, 0)

    async def read(self, plane: DataPlane, ticket_id: int, remote: tuple[int, ...], local: tuple[int, ...]) -> None:
        """:meth:`DataPlane.read`, and that the blocks were pinned all the while: Unavailable if not."""
        await plane.read(self.pool, self, ticket_id, remote, local)
        self.used_s = time.monotonic()
        if not self.alive:
            raise Unavailable(f"the session at {self.pool.node_id} ended during the read")

    async def read_blocks(self, ticket_id: int, slots: tuple[int, ...], targets: list[memoryview]) -> None:
        """Fills ``targets`` with pinned blocks. Nobody writes to them any more when this ends, however it does.

        Raises Unavailable if the source is silent for STREAM_STALL_S or ends early, and what the source raises.
        """
        for start in range(0, len(slots), MAX_SLOTS_PER_STREAM):
            part = slots[start : start + MAX_SLOTS_PER_STREAM]
            request = wire.read_to_pb(self._session.epoch, ticket_id, part)
            await self._stream(request, targets[start : start + len(part)])

    async def aclose(self) -> None:
        """Ends the session, and with it everything that is held at the source. Idempotent."""
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
        try:
            for target in targets:
                at = 0
                while at < len(target):
                    data = await self._piece(call)
                    if not data or at + len(data) > len(target):
                        raise Unavailable(f"{self.pool.node_id} sent {at + len(data)} of {len(target)} bytes")
                    target[at : at + len(data)] = data
                    at += len(data)
        finally:
            call.cancel()

    async def _piece(self, call: Any) -> bytes:
        try:
            async with asyncio.timeout(STREAM_STALL_S):
                piece = await typed(call.read())
        except TimeoutError:
            raise Unavailable(f"{self.pool.node_id} was silent for {STREAM_STALL_S:.1f} s") from None
        return b"" if piece is grpc.aio.EOF else bytes(piece.data)

    def _let_go(self, ticket_id: int, nonce: int) -> None:
        self._releases.append((ticket_id, nonce))
        del self._releases[:-MAX_RELEASES]
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._release_all(), name=f"releases at {self.pool.node_id}")

    async def _release_all(self) -> None:
        while self._releases and self.alive:
            batch, self._releases = self._releases, []
            tickets = [ticket for ticket, _ in batch if ticket]
            nonces = [nonce for _, nonce in batch if nonce]
            try:
                await self._client.release(self._session.epoch, tickets, nonces=nonces)
            except PillionError as error:
                log.debug("release at KV node %s failed: %s", self.pool.node_id, error.message)
                self._releases = (batch + self._releases)[-MAX_RELEASES:]
                await asyncio.sleep(RELEASE_RETRY_DELAY_S)


class SourceNode:
    """A node to read from, met when it is first asked. What one peer pinned is read and released at that peer."""

    def __init__(self, node_id: str, peers: Peers) -> None:
        self.node_id = node_id
        self._peers = peers
        self._pinned_at: dict[int, Peer] = {}

    async def pin(self, hashes: bytes, first_block: int, *, timeout_s: float) -> Pinned:
        """See :meth:`Peer.pin`; the time includes meeting the node. Raises Unavailable, Conflict, DeadlineExceeded."""
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
        """Never fails, never waits."""
        peer = self._pinned_at.pop(ticket_id, None)
        if peer is not None:
            peer.release(ticket_id)

    async def read(self, ticket_id: int, remote: tuple[int, ...], local: tuple[int, ...]) -> None:
        """See :meth:`pillion.kvstore.transfer.plane.DataPlane.read`."""
        peer = self._pinned_at.get(ticket_id)
        if peer is None:
            raise Unavailable(f"nothing is pinned at {self.node_id} under that ticket")
        try:
            await peer.read(await self._peers.plane(), ticket_id, remote, local)
        except Unavailable:
            self._peers.avoid(self.node_id)
            raise


class Peers:
    """All of them, by node id.

    Args:
        node_id: this node's name, for the sources' logs.
        shape: of this node's pool.
        addresses: the directory: node id -> address of its gRPC service. Asked at most every ADDRESSES_TTL_S.
        plane: this node's data plane, which may be made when it is first asked for.
    """

    def __init__(
        self, node_id: str, shape: BlockShape, addresses: Addresses, plane: Callable[[], Awaitable[DataPlane]]
    ) -> None:
        self._node_id = node_id
        self._addresses = addresses
        self._shape = shape
        self._make_plane = plane
        self._made_plane: DataPlane | None = None
        self._avoided_until_s: dict[str, float] = {}
        self._known: Mapping[str, str] = {}
        self._known_until_s = 0.0
        self._peers: dict[str, Peer] = {}
        self._meeting: dict[str, asyncio.Task[Peer]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def source(self, node_id: str) -> SourceNode:
        """For one fetch. Raises Unavailable for this node itself, and for one that failed within AVOID_S."""
        if self._closed or node_id == self._node_id:
            raise Unavailable(f"{node_id} is no source for this node")
        if time.monotonic() < self._avoided_until_s.get(node_id, 0.0):
            raise Unavailable(f"KV node {node_id} failed a moment ago")
        return SourceNode(node_id, self)

    async def plane(self) -> DataPlane:
        """This node's."""
        self._made_plane = await self._make_plane()
        return self._made_plane

    def avoid(self, node_id: str) -> None:
        """It just failed: nobody waits for it again during AVOID_S."""
        now = time.monotonic()
        self._avoided_until_s = {name: until for name, until in self._avoided_until_s.items() if until > now}
        self._avoided_until_s[node_id] = now + AVOID_S

    async def get(self, node_id: str, timeout_s: float = CALL_TIMEOUT_S) -> Peer:
        """A peer that is met; several callers share one meeting.

        Raises Unavailable for a node that is unknown or does not answer in time, Conflict where the pools do not fit.
        """
        peer = self._peers.get(node_id)
        if peer is not None and peer.alive:
            peer.used_s = time.monotonic()
            return peer
        if self._closed or node_id == self._node_id:
            raise Unavailable(f"{node_id} is no source for this node")
        task = self._meeting.get(node_id)
        if task is None:
            task = self._meeting[node_id] = asyncio.create_task(self._meet(node_id), name=f"meeting {node_id}")
            task.add_done_callback(lambda _: self._meeting.pop(node_id, None))
            # Nobody may be left to hear of its failure.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise Unavailable(f"KV node {node_id} does not answer") from None

    def drop(self, node_id: str) -> None:
        """Ends what is known of a peer; the next :meth:`get` meets it anew. Reads under way there fail."""
        peer = self._peers.pop(node_id, None)
        if peer is not None:
            if self._made_plane is not None:
                self._made_plane.forget(node_id)
            task = asyncio.create_task(peer.aclose(), name=f"leaving {node_id}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Leaves everybody. Idempotent."""
        self._closed = True
        for task in list(self._meeting.values()):
            task.cancel()
        await asyncio.gather(*self._meeting.values(), return_exceptions=True)
        for node_id in list(self._peers):
            self.drop(node_id)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _meet(self, node_id: str) -> Peer:
        # Whatever was there is over; a restarted source has a new boot epoch, and everything of the old one is void.
        self.drop(node_id)
        address = await self._address(node_id)
        self._make_room()
        client = NodeClient(address, self._node_id)
        session: Session | None = None
        try:
            session = await client.open_session()
            stub: Any = kvplane_pb2_grpc.KVPlaneStub(client.channel)
            reply = await call_unary(stub.Meet, wire.meet_to_pb(self._node_id, self._shape), CALL_TIMEOUT_S)
            pool, theirs = wire.met_from_pb(reply)
            if pool.node_id != node_id:
                raise Unavailable(f"{address} is KV node {pool.node_id}, not {node_id}")
            self._shape.check(theirs, node_id)
        except BaseException:
            if session is not None:
                await session.aclose()
            await client.aclose()
            raise
        self._peers[node_id] = peer = Peer(client, session, pool)
        return peer

    def _make_room(self) -> None:
        now = time.monotonic()
        by_use = sorted(self._peers, key=lambda node_id: self._peers[node_id].used_s)
        for place, node_id in enumerate(by_use):
            peer = self._peers[node_id]
            too_many = len(by_use) - place >= MAX_PEERS
            if too_many or not peer.alive or now - peer.used_s > PEER_IDLE_S:
                self.drop(node_id)

    async def _address(self, node_id: str) -> str:
        now = time.monotonic()
        if now >= self._known_until_s:
            with contextlib.suppress(PillionError):
                self._known = await self._addresses()
            self._known_until_s = now + ADDRESSES_TTL_S
        address = self._known.get(node_id, "")
        if not address:
            raise Unavailable(f"nobody knows where KV node {node_id} is")
        return address
