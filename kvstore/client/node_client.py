"""gRPC client of a KV node. Every call has a deadline; failures raise :mod:`pillion.errors`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import grpc

from pillion.errors import Cancelled, DeadlineExceeded, PillionError, Unavailable
from pillion.net.rpc import closed_under, from_rpc_error, open_channel
from pillion.observability.telemetry import inject
from pillion.rules.priority import NO_FLOW, Flow
from pillion.v1 import kvnode_pb2, kvnode_pb2_grpc
from pillion.v1.kvnode_pb2 import (
    AdapterPiece,
    AdoptTicketReply,
    AwaitChainReply,
    BlockChanges,
    CommitRun,
    CommitRunResult,
    HeartbeatReply,
    NodeStatus,
    OpenTicketReply,
    PrefetchReply,
    PrefixPin,
)
from pillion.wire.common import check_hello, flow_to_pb, hello_to_pb

log = logging.getLogger("pillion.kvnode")

T = TypeVar("T")

CALL_TIMEOUT_S = 5.0
OPEN_TICKET_TIMEOUT_S = 60.0
# Max attempts to release a ticket whose opening call got no answer: enough to outlast the detection of a broken
# connection. After that, the end of the caller's epoch releases the ticket.
MAX_RELEASE_TRIES = 10
PREFETCH_GRACE_S = 0.5
_FAILURES = (grpc.aio.UsageError, grpc.aio.InternalError, grpc.aio.AioRpcError, asyncio.CancelledError)


class TicketDemand(TypedDict, total=False):
    """Optional fields of an OpenTicket request.

    Attributes:
        resume: queue the request before new prompts.
        priority: smaller is more urgent.
        expected_blocks: leading blocks of the chain at this node according to the index; the node corrects the index if
            they are missing.
        state_pages: pages per state of a model with states: the pinned prefix then ends with a state.
        known_blocks: leading blocks of the chain present on some node, for a model with states.
    """

    resume: bool
    priority: int
    expected_blocks: int
    state_pages: int
    known_blocks: int


class NodeSession:
    """A gateway's session at a node. ``epoch`` is valid while it is open; either side can end it."""

    def __init__(self, call: Any, epoch: int) -> None:
        self._call = call
        self.epoch = epoch
        self._ended = asyncio.create_task(self._watch(), name="kv-session")

    async def closed(self) -> None:
        """Wait for the session's end, which releases all tickets of its epoch."""
        await asyncio.shield(self._ended)

    async def aclose(self) -> None:
        """End the session at the node. Idempotent."""
        self._call.cancel()
        await self._ended

    async def _watch(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while await self._call.read() is not grpc.aio.EOF:
                pass


class NodeClient:
    """Connection of one component to one node. ``component_id`` is the component's, for the node's log.

    Attributes:
        channel: gRPC channel, also used for the node's other services; closed by this client.
    """

    def __init__(self, address: str, component_id: str) -> None:
        self._component_id = component_id
        self.channel = open_channel(address)
        self._stub: Any = kvnode_pb2_grpc.KVNodeStub(self.channel)
        self._abandoning: dict[asyncio.Task[None], None] = {}

    async def reopen(self, address: str) -> None:
        """Connect to the restarted node at its new address, without gRPC's reconnect backoff."""
        old = self.channel
        await old.close()
        self.channel = open_channel(address)
        self._stub = kvnode_pb2_grpc.KVNodeStub(self.channel)

    async def open_session(self, timeout_s: float = CALL_TIMEOUT_S, *, wait_for_node: bool = False) -> NodeSession:
        """Open a session with a new epoch. With ``wait_for_node``, wait for a node that does not listen yet. Raises
        Unavailable if the node does not answer."""
        request = kvnode_pb2.OpenSessionRequest(hello=hello_to_pb(self._component_id))
        call = self._stub.OpenSession(request, wait_for_ready=wait_for_node)
        try:
            async with asyncio.timeout(timeout_s):
                event = await typed(call.read())
            if event is grpc.aio.EOF:
                raise Unavailable("the KV node ended the session")
            check_hello(event.hello)
        except BaseException as error:
            call.cancel()
            if isinstance(error, TimeoutError):
                raise Unavailable("the KV node does not answer") from None
            raise
        return NodeSession(call, event.epoch)

    async def open_ticket(
        self,
        epoch: int,
        block_hashes: bytes,
        total_blocks: int,
        *,
        adopt: bool = False,
        flow: Flow = NO_FLOW,
        timeout_s: float = OPEN_TICKET_TIMEOUT_S,
        on_unreleased: Callable[[PillionError], object] = lambda error: None,
        **demand: Unpack[TicketDemand],
    ) -> OpenTicketReply:
        """Pin the committed prefix of a chain and reserve slots for the rest of ``total_blocks``; wait for memory up to
        ``timeout_s``. With 0 ``total_blocks``, nothing is reserved and the call does not wait.

        If this call is cancelled or gets no answer, the ticket is released in the background, even if it was granted
        meanwhile.

        Args:
            adopt: lease all reserved slots with the same call; for workers. Raises NotFound, with no ticket opened, if
                fewer than ``expected_blocks`` are present.
            flow: the tenant's flow, for fair sharing of the pool between waiting requests.
            on_unreleased: called with the error if the release in the background fails.
        """
        nonce = secrets.randbits(62) + 1
        request = kvnode_pb2.OpenTicketRequest(
            epoch=epoch,
            block_hashes=block_hashes,
            total_blocks=total_blocks,
            nonce=nonce,
            adopt=adopt,
            flow=flow_to_pb(flow),
            **demand,
        )
        try:
            return await call_unary(self._stub.OpenTicket, request, timeout_s)
        except (asyncio.CancelledError, Cancelled, DeadlineExceeded, Unavailable):
            self._abandon(epoch, nonce, on_unreleased)
            raise

    async def release(self, epoch: int, ticket_ids: Sequence[int] = (), *, nonces: Sequence[int] = ()) -> None:
        """Remove an epoch from the holders of tickets, given by id or by the nonce of an open_ticket call, which may
        still be waiting. Idempotent."""
        request = kvnode_pb2.ReleaseTicketRequest(epoch=epoch, ticket_ids=ticket_ids, nonces=nonces)
        await call_unary(self._stub.ReleaseTicket, request)

    async def adopt(self, epoch: int, ticket_id: int, lease_blocks: int) -> AdoptTicketReply:
        """Become a holder of a ticket and lease exactly ``lease_blocks`` slots, reserved ones first. Raises NotFound
        for an unknown ticket, and Overloaded, with nothing changed, if too few slots are available."""
        request = kvnode_pb2.AdoptTicketRequest(epoch=epoch, ticket_id=ticket_id, lease_blocks=lease_blocks)
        return await call_unary(self._stub.AdoptTicket, request)

    async def await_chain(self, epoch: int, ticket_id: int, blocks: int, *, timeout_s: float) -> AwaitChainReply:
        """Wait until a ticket's chain has ``blocks`` blocks, at most ``timeout_s``; return the chain. Leases nothing.
        Raises NotFound if the epoch does not hold the ticket, Overloaded if too many calls wait."""
        request = kvnode_pb2.AwaitChainRequest(
            epoch=epoch, ticket_id=ticket_id, blocks=blocks, timeout_ms=max(1, int(timeout_s * 1000))
        )
        return await call_unary(self._stub.AwaitChain, request, timeout_s + CALL_TIMEOUT_S)

    async def lease(self, epoch: int, blocks: int) -> tuple[int, ...]:
        """Lease up to ``blocks`` slots, possibly none."""
        request = kvnode_pb2.LeaseSlotsRequest(epoch=epoch, blocks=blocks)
        return tuple((await call_unary(self._stub.LeaseSlots, request)).slots)

    async def return_slots(self, epoch: int, slots: Sequence[int]) -> None:
        """Return leased slots: all of them, or none if it raises InvalidRequest."""
        await call_unary(self._stub.ReturnSlots, kvnode_pb2.ReturnSlotsRequest(epoch=epoch, slots=slots))

    async def commit(self, epoch: int, runs: Sequence[CommitRun]) -> Sequence[CommitRunResult]:
        """Commit runs of blocks, in order. A result has the slot that each block has from now on: another one than the
        committed slot after a lost race (I2)."""
        request = kvnode_pb2.CommitRequest(epoch=epoch, runs=runs)
        reply: kvnode_pb2.CommitReply = await call_unary(self._stub.Commit, request)
        return reply.results

    async def prefetch(
        self,
        epoch: int,
        ticket_id: int,
        block_hashes: bytes,
        source_node_ids: Sequence[str] = (),
        *,
        timeout_s: float,
        max_bytes: int = 0,
        ahead: bool = False,
    ) -> PrefetchReply:
        """Fetch as much as possible of a chain into the node's pool, under a ticket that the epoch holds. With
        ``ahead``, use only free slots. Failures between nodes only reduce the number of blocks (I1). Raises NotFound if
        the epoch does not hold the ticket."""
        request = kvnode_pb2.PrefetchRequest(
            epoch=epoch,
            ticket_id=ticket_id,
            block_hashes=block_hashes,
            source_node_ids=source_node_ids,
            timeout_ms=max(1, int(timeout_s * 1000)),
            max_bytes=max_bytes,
            ahead=ahead,
        )
        return await call_unary(self._stub.Prefetch, request, timeout_s + PREFETCH_GRACE_S)

    async def find_blocks(
        self, block_hashes: bytes, first_block: int, *, timeout_s: float, state_pages: int = 0
    ) -> int:
        """Return how many blocks of the chain, from ``first_block`` on, the node's lower tiers probably have, as far as
        the node can determine within ``timeout_s``. With ``state_pages`` (pages per state), count up to the last block
        that is probably followed by a state."""
        timeout_ms = max(1, int(timeout_s * 1000))
        request = kvnode_pb2.FindBlocksRequest(
            block_hashes=block_hashes, first_block=first_block, timeout_ms=timeout_ms, state_pages=state_pages
        )
        reply: kvnode_pb2.FindBlocksReply = await call_unary(
            self._stub.FindBlocks, request, timeout_s + PREFETCH_GRACE_S
        )
        return reply.blocks

    async def pin_prefix(self, request: kvnode_pb2.PinPrefixRequest, *, timeout_s: float = CALL_TIMEOUT_S) -> PrefixPin:
        """Pin a chain for a tenant. Raises Overloaded beyond a quota, and InvalidRequest."""
        return await call_unary(self._stub.PinPrefix, request, timeout_s)

    async def unpin_prefix(self, epoch: int, owner: str, name: str) -> bool:
        """End a tenant's prefix pin; return whether the pin existed. Idempotent."""
        request = kvnode_pb2.UnpinPrefixRequest(epoch=epoch, owner=owner, name=name)
        reply: kvnode_pb2.UnpinPrefixReply = await call_unary(self._stub.UnpinPrefix, request)
        return reply.found

    async def list_prefix_pins(self, epoch: int, owner: str) -> Sequence[PrefixPin]:
        """Return a tenant's prefix pins at the node, oldest first."""
        request = kvnode_pb2.ListPrefixPinsRequest(epoch=epoch, owner=owner)
        reply: kvnode_pb2.ListPrefixPinsReply = await call_unary(self._stub.ListPrefixPins, request)
        return reply.prefix_pins

    async def read_adapter(
        self, digest: str, timeout_s: float, *, ask_others: bool = True
    ) -> AsyncGenerator[AdapterPiece, None]:
        """Yield pieces of an adapter's files, not verified, from the node's machine or, with ``ask_others``, another
        node's. Raises NotFound if no machine has the adapter, Overloaded if the node reads too many already."""
        request = kvnode_pb2.ReadAdapterRequest(digest=digest, ask_others=ask_others)
        call = self._stub.ReadAdapter(request, timeout=timeout_s, metadata=inject())
        try:
            while (piece := await typed(call.read())) is not grpc.aio.EOF:
                yield piece
        finally:
            call.cancel()

    async def missing_adapters(self, digests: Sequence[str]) -> Sequence[str]:
        """Return those of the adapters ``digests`` that the node's machine lacks; the others count as used now."""
        request = kvnode_pb2.FindAdaptersRequest(digests=digests)
        return tuple((await call_unary(self._stub.FindAdapters, request)).missing)

    async def keep_adapter(self, pieces: AsyncGenerator[AdapterPiece, None], timeout_s: float) -> None:
        """Send the files of an adapter to the node's machine, and close ``pieces``. Raises PillionError if the node
        refuses them; Internal if it does so while they are sent."""
        async with contextlib.aclosing(pieces):
            # Not passed to gRPC, whose task may still read the iterator after the call has ended.
            call = self._stub.KeepAdapter(timeout=timeout_s, metadata=inject())
            try:
                # A refused call cannot be written to; awaiting the call raises its error.
                with contextlib.suppress(asyncio.InvalidStateError):
                    async for piece in pieces:
                        await typed(call.write(piece))
                    await typed(call.done_writing())
                await typed(call)
            finally:
                call.cancel()

    async def reattach(self, epoch: int) -> int:
        """End a worker's epoch, fenced or not, and return a new one; no running step may use slots of the old epoch.
        Raises Conflict for a session's epoch, NotFound for a void one."""
        return int((await call_unary(self._stub.Reattach, kvnode_pb2.ReattachRequest(epoch=epoch))).epoch)

    async def heartbeat(self, epoch: int) -> HeartbeatReply:
        """Send a heartbeat. Raises NotFound for a void epoch."""
        return await call_unary(self._stub.Heartbeat, kvnode_pb2.HeartbeatRequest(epoch=epoch))

    async def follow_blocks(self, log_epoch: int = 0, number: int = 0) -> AsyncGenerator[BlockChanges, None]:
        """Yield the pool's changes after change ``number`` of the log ``log_epoch``, or first a snapshot if that log is
        not available (docs/events.md). Never ends without an error: Overloaded if the node has too many followers or
        this one reads too slowly, or Unavailable."""
        request = kvnode_pb2.FollowBlocksRequest(
            hello=hello_to_pb(self._component_id), log_epoch=log_epoch, number=number
        )
        call = self._stub.FollowBlocks(request)
        try:
            while (message := await typed(call.read())) is not grpc.aio.EOF:
                yield message
            raise Unavailable("the KV node ended the stream")
        finally:
            call.cancel()

    async def status(self, *, timeout_s: float = CALL_TIMEOUT_S) -> NodeStatus:
        """Return the node's status: slots by state, pins, reservations and counters."""
        return await call_unary(self._stub.GetNodeStatus, kvnode_pb2.GetNodeStatusRequest(), timeout_s)

    async def check_integrity(self) -> None:
        """Check the node's integrity. Raises Conflict with the inconsistencies (I4)."""
        await call_unary(self._stub.CheckIntegrity, kvnode_pb2.CheckIntegrityRequest())

    async def aclose(self) -> None:
        """Wait for pending releases, up to CALL_TIMEOUT_S, then close the connection."""
        if self._abandoning:
            _, late = await asyncio.wait(self._abandoning, timeout=CALL_TIMEOUT_S)
            for task in late:
                task.cancel()
        await self.channel.close()

    def _abandon(self, epoch: int, nonce: int, on_unreleased: Callable[[PillionError], object]) -> None:
        task = asyncio.create_task(self._release_nonce(epoch, nonce, on_unreleased), name="kv-abandon")
        self._abandoning[task] = None
        task.add_done_callback(lambda done: self._abandoning.pop(done, None))

    async def _release_nonce(self, epoch: int, nonce: int, on_unreleased: Callable[[PillionError], object]) -> None:
        for tries_left in reversed(range(MAX_RELEASE_TRIES)):
            try:
                await self.release(epoch, nonces=[nonce])
            except DeadlineExceeded as error:
                # Retry, since the abandoned call may reach the node later.
                log.debug("abandoned call: %s", error)
                if not tries_left:
                    on_unreleased(error)
            except PillionError as error:
                log.debug("abandoned call: %s", error)
                on_unreleased(error)
                return
            else:
                return


async def call_unary(method: Callable[..., Awaitable[T]], request: Any, timeout_s: float = CALL_TIMEOUT_S) -> T:
    """Make a unary call with the current trace context. Raises PillionError."""
    try:
        return await method(request, timeout=timeout_s, metadata=inject())
    except _FAILURES as error:
        raise _typed_error(error) from None


async def typed(call: Awaitable[T]) -> T:
    """Await a call, or one message of it, converting failures to PillionError."""
    try:
        return await call
    except _FAILURES as error:
        raise _typed_error(error) from None


def _typed_error(error: Any) -> BaseException:
    if isinstance(error, grpc.aio.UsageError):
        return Unavailable("the connection was closed")
    if isinstance(error, grpc.aio.InternalError):
        # A message could not be sent, and gRPC does not know yet why the call has ended.
        return Unavailable(f"the connection was lost: {error}")
    return closed_under(error) if isinstance(error, asyncio.CancelledError) else from_rpc_error(error)
