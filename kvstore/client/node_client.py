"""Is the gRPC client of a KV node. Every call has a deadline, and errors arrive as :mod:`pillion.errors`."""

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
# A call that ended without an answer is released this often where the node does not answer the release either: for
# longer than it takes to notice that a connection is cut. The end of the caller's epoch, which comes with its end,
# releases everything.
MAX_RELEASE_TRIES = 10
PREFETCH_GRACE_S = 0.5
# A call fails with one of these.
_FAILURES = (grpc.aio.UsageError, grpc.aio.InternalError, grpc.aio.AioRpcError, asyncio.CancelledError)


class TicketDemand(TypedDict, total=False):
    """Says more of a ticket that is asked for.

    Attributes:
        resume: whether the request stands before new prompts in the node's queue.
        priority: smaller is more urgent.
        expected_blocks: blocks of the chain that the index names at this node; the node corrects the index if they are
            not there.
        state_pages: slots that a state takes, for a model whose layers carry one: what is pinned ends with one.
        known_blocks: blocks of the chain that any node has, for such a model.
    """

    resume: bool
    priority: int
    expected_blocks: int
    state_pages: int
    known_blocks: int


class NodeSession:
    """Holds a gateway's session at a node: ``epoch`` is valid while it is open. It ends with either side."""

    def __init__(self, call: Any, epoch: int) -> None:
        self._call = call
        self.epoch = epoch
        self._ended = asyncio.create_task(self._watch(), name="kv-session")

    async def closed(self) -> None:
        """Returns when the session has ended, and with it everything that its epoch held."""
        await asyncio.shield(self._ended)

    async def aclose(self) -> None:
        """Ends the session at the node. Idempotent."""
        self._call.cancel()
        await self._ended

    async def _watch(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while await self._call.read() is not grpc.aio.EOF:
                pass


class NodeClient:
    """Connects one component to one node. ``component_id`` names the component in the node's log.

    Attributes:
        channel: the connection, for stubs of the node's other services; this client closes it.
    """

    def __init__(self, address: str, component_id: str) -> None:
        self._component_id = component_id
        self.channel = open_channel(address)
        self._stub: Any = kvnode_pb2_grpc.KVNodeStub(self.channel)
        self._abandoning: dict[asyncio.Task[None], None] = {}

    async def reopen(self, address: str) -> None:
        """Connects to the node's next life at once, without waiting until gRPC would try the old connection again."""
        old = self.channel
        await old.close()
        self.channel = open_channel(address)
        self._stub = kvnode_pb2_grpc.KVNodeStub(self.channel)

    async def open_session(self, timeout_s: float = CALL_TIMEOUT_S, *, wait_for_node: bool = False) -> NodeSession:
        """Opens a session with a new epoch; ``wait_for_node`` waits for a node that does not listen yet. Raises
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
        """Pins the committed prefix of the chain and reserves slots for the rest; waits for memory up to ``timeout_s``.
        With 0 ``total_blocks`` nothing is reserved, and nothing waits.

        When this call ends without an answer, cancelled or out of time, the node is told to release the ticket: none is
        left behind, even if it was granted in that moment.

        Args:
            adopt: lease all that is reserved with the same call; for workers. Raises NotFound, with nothing opened,
                where fewer than ``expected_blocks`` are there.
            flow: the tenant whose share of the pool decides where several wait.
            on_unreleased: called where the release of such a call was not answered either.
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
        """Gives up an epoch's hold on tickets, and on tickets that calls with these nonces may still be granted.
        Idempotent."""
        request = kvnode_pb2.ReleaseTicketRequest(epoch=epoch, ticket_ids=ticket_ids, nonces=nonces)
        await call_unary(self._stub.ReleaseTicket, request)

    async def adopt(self, epoch: int, ticket_id: int, lease_blocks: int) -> AdoptTicketReply:
        """Becomes a holder of a ticket and leases exactly ``lease_blocks`` slots, the ticket's reserved ones first.
        Raises NotFound if there is no such ticket, and Overloaded, with nothing changed, if there are too few slots."""
        request = kvnode_pb2.AdoptTicketRequest(epoch=epoch, ticket_id=ticket_id, lease_blocks=lease_blocks)
        return await call_unary(self._stub.AdoptTicket, request)

    async def await_chain(self, epoch: int, ticket_id: int, blocks: int, *, timeout_s: float) -> AwaitChainReply:
        """Waits until the chain of a ticket has ``blocks`` blocks or the time is over, and returns the chain.

        Nothing is leased, and a cancelled call leaves nothing behind. Raises NotFound if the epoch does not hold the
        ticket, Overloaded if too many calls wait.
        """
        request = kvnode_pb2.AwaitChainRequest(
            epoch=epoch, ticket_id=ticket_id, blocks=blocks, timeout_ms=max(1, int(timeout_s * 1000))
        )
        # The node itself ends the wait in time, so this deadline is a little longer than the node's.
        return await call_unary(self._stub.AwaitChain, request, timeout_s + CALL_TIMEOUT_S)

    async def lease(self, epoch: int, blocks: int) -> tuple[int, ...]:
        """Leases up to ``blocks`` slots from the node, possibly none."""
        request = kvnode_pb2.LeaseSlotsRequest(epoch=epoch, blocks=blocks)
        return tuple((await call_unary(self._stub.LeaseSlots, request)).slots)

    async def give_back(self, epoch: int, slots: Sequence[int]) -> None:
        """Returns leased slots to the node: all of them or, with InvalidRequest, none."""
        await call_unary(self._stub.ReturnSlots, kvnode_pb2.ReturnSlotsRequest(epoch=epoch, slots=slots))

    async def commit(self, epoch: int, runs: Sequence[CommitRun]) -> Sequence[CommitRunResult]:
        """Commits runs of blocks, in order; see CommitRunResult for lost races (I2)."""
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
        """Makes the node bring as much of the chain as it can into its pool, under a ticket that the epoch holds; into
        free slots alone where it is ``ahead`` of their need. Raises NotFound if it holds no such ticket. A failure
        between nodes only means that fewer blocks come (I1)."""
        request = kvnode_pb2.PrefetchRequest(
            epoch=epoch,
            ticket_id=ticket_id,
            block_hashes=block_hashes,
            source_node_ids=source_node_ids,
            timeout_ms=max(1, int(timeout_s * 1000)),
            max_bytes=max_bytes,
            ahead=ahead,
        )
        # The node itself ends the fetch in time, so this deadline is a little longer than the node's.
        return await call_unary(self._stub.Prefetch, request, timeout_s + PREFETCH_GRACE_S)

    async def find_blocks(
        self, block_hashes: bytes, first_block: int, *, timeout_s: float, state_pages: int = 0
    ) -> int:
        """Returns how many blocks of the chain, from ``first_block`` on, the node's lower tiers probably have, as far
        as the node finds that out in this time. With ``state_pages``, those of a model's states, it counts them up to
        the last one that probably has a state."""
        timeout_ms = max(1, int(timeout_s * 1000))
        request = kvnode_pb2.FindBlocksRequest(
            block_hashes=block_hashes, first_block=first_block, timeout_ms=timeout_ms, state_pages=state_pages
        )
        reply: kvnode_pb2.FindBlocksReply = await call_unary(
            self._stub.FindBlocks, request, timeout_s + PREFETCH_GRACE_S
        )
        return reply.blocks

    async def pin_prefix(self, request: kvnode_pb2.PinPrefixRequest, *, timeout_s: float = CALL_TIMEOUT_S) -> PrefixPin:
        """Pins a chain for a tenant. Raises Overloaded beyond a quota, and InvalidRequest."""
        return await call_unary(self._stub.PinPrefix, request, timeout_s)

    async def unpin_prefix(self, epoch: int, owner: str, name: str) -> bool:
        """Ends a tenant's prefix pin; returns whether the pin existed. Idempotent."""
        request = kvnode_pb2.UnpinPrefixRequest(epoch=epoch, owner=owner, name=name)
        reply: kvnode_pb2.UnpinPrefixReply = await call_unary(self._stub.UnpinPrefix, request)
        return reply.found

    async def list_prefix_pins(self, epoch: int, owner: str) -> Sequence[PrefixPin]:
        """Returns a tenant's prefix pins at the node, the oldest first."""
        request = kvnode_pb2.ListPrefixPinsRequest(epoch=epoch, owner=owner)
        reply: kvnode_pb2.ListPrefixPinsReply = await call_unary(self._stub.ListPrefixPins, request)
        return reply.prefix_pins

    async def read_adapter(
        self, digest: str, timeout_s: float, *, ask_others: bool = True
    ) -> AsyncGenerator[AdapterPiece, None]:
        """Yields the files of an adapter that the node's machine has or, with ``ask_others``, another node's; nobody
        has verified them. Raises NotFound where no machine has the files, Overloaded where the node reads too many
        already."""
        request = kvnode_pb2.ReadAdapterRequest(digest=digest, ask_others=ask_others)
        call = self._stub.ReadAdapter(request, timeout=timeout_s, metadata=inject())
        try:
            while (piece := await typed(call.read())) is not grpc.aio.EOF:
                yield piece
        finally:
            call.cancel()

    async def missing_adapters(self, digests: Sequence[str]) -> Sequence[str]:
        """Returns those of the adapters that the node's machine lacks; the node counts the others as used now."""
        request = kvnode_pb2.FindAdaptersRequest(digests=digests)
        return tuple((await call_unary(self._stub.FindAdapters, request)).missing)

    async def keep_adapter(self, pieces: AsyncGenerator[AdapterPiece, None], timeout_s: float) -> None:
        """Brings the files of an adapter to the node's machine, and closes ``pieces``. Raises PillionError where the
        node does not take them; Internal if it refused the files while they were sent."""
        async with contextlib.aclosing(pieces):
            # The pieces are written here and not by gRPC, whose task may still read them when the call has ended.
            call = self._stub.KeepAdapter(timeout=timeout_s, metadata=inject())
            try:
                # A refused call cannot be written to; its error is the call's own.
                with contextlib.suppress(asyncio.InvalidStateError):
                    async for piece in pieces:
                        await typed(call.write(piece))
                    await typed(call.done_writing())
                await typed(call)
            finally:
                call.cancel()

    async def reattach(self, epoch: int) -> int:
        """Ends a worker's epoch, fenced or not, and returns a new one; no step uses the old one's slots any more.
        Raises Conflict for a session's epoch, NotFound for a void one."""
        return int((await call_unary(self._stub.Reattach, kvnode_pb2.ReattachRequest(epoch=epoch))).epoch)

    async def heartbeat(self, epoch: int) -> HeartbeatReply:
        """Sends a sign of life. Raises NotFound for a void epoch."""
        return await call_unary(self._stub.Heartbeat, kvnode_pb2.HeartbeatRequest(epoch=epoch))

    async def follow_blocks(self, log_epoch: int = 0, number: int = 0) -> AsyncGenerator[BlockChanges, None]:
        """Yields what comes into the pool and leaves it, after change ``number`` of a log, or a snapshot before; see
        docs/events.md. It never ends without an error: Overloaded where the node has no place, or this reader was too
        slow; Unavailable."""
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
        """Returns the node's status: slots by state, pins, reservations and counters."""
        return await call_unary(self._stub.GetNodeStatus, kvnode_pb2.GetNodeStatusRequest(), timeout_s)

    async def check_integrity(self) -> None:
        """Makes the node prove its integrity. Raises Conflict, which names what does not add up (I4)."""
        await call_unary(self._stub.CheckIntegrity, kvnode_pb2.CheckIntegrityRequest())

    async def aclose(self) -> None:
        """Waits for calls that release tickets, for as long as one of them may take, then closes the connection."""
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
                # If the call that releases were cancelled, it might never reach the node, and the abandoned call might
                # reach it later.
                log.debug("abandoned call: %s", error)
                if not tries_left:
                    on_unreleased(error)
            except PillionError as error:
                # The node is gone, or it ended the epoch: either way nothing is held there.
                log.debug("abandoned call: %s", error)
                on_unreleased(error)
                return
            else:
                return


async def call_unary(method: Callable[..., Awaitable[T]], request: Any, timeout_s: float = CALL_TIMEOUT_S) -> T:
    """Makes one call, with the current trace's context. A failure of the call becomes a PillionError."""
    try:
        return await method(request, timeout=timeout_s, metadata=inject())
    except _FAILURES as error:
        raise _typed_error(error) from None


async def typed(call: Awaitable[T]) -> T:
    """Awaits a call, or one message of it, and turns its failure into a PillionError."""
    try:
        return await call
    except _FAILURES as error:
        raise _typed_error(error) from None


def _typed_error(error: Any) -> BaseException:
    if isinstance(error, grpc.aio.UsageError):
        return Unavailable("the connection was closed")
    if isinstance(error, grpc.aio.InternalError):
        # A message could not be sent, and gRPC does not say yet why the call has ended.
        return Unavailable(f"the connection was lost: {error}")
    return closed_under(error) if isinstance(error, asyncio.CancelledError) else from_rpc_error(error)
