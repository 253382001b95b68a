"""Talking to a KV node. Every call has a deadline, and errors arrive as :mod:`pillion.errors`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import grpc

from pillion.errors import Cancelled, DeadlineExceeded, PillionError, Unavailable
from pillion.net.rpc import closed_under, from_rpc_error, open_channel
from pillion.observability.telemetry import inject
from pillion.v1 import kvnode_pb2, kvnode_pb2_grpc
from pillion.wire import kvnode as wire
from pillion.wire.common import check_hello, hello_to_pb
from pillion.wire.kvnode import Adopted, Brought, CommitResult, CommitRun, HeartbeatReply, NodeStatus, Ticket

log = logging.getLogger("pillion.kvnode")

T = TypeVar("T")

CALL_TIMEOUT_S = 5.0
OPEN_TICKET_TIMEOUT_S = 60.0
PREFETCH_GRACE_S = 0.5


class Session:
    """A gateway's hold at a node: while it is open, ``epoch`` is valid. The node's end or ours ends it."""

    def __init__(self, call: Any, epoch: int) -> None:
        self._call = call
        self.epoch = epoch
        self._ended = asyncio.create_task(self._watch(), name="kv-session")

    async def closed(self) -> None:
        """Returns when the session has ended: everything held under its epoch is let go."""
        await asyncio.shield(self._ended)

    async def aclose(self) -> None:
        """Ends the session. Idempotent."""
        self._call.cancel()
        await self._ended

    async def _watch(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while await self._call.read() is not grpc.aio.EOF:
                pass


class NodeClient:
    """One part's line to one node. ``component_id`` names the part in the node's log.

    Attributes:
        channel: the connection, for stubs of the node's other services; closed with this.
    """

    def __init__(self, address: str, component_id: str) -> None:
        self._component_id = component_id
        self.channel = open_channel(address)
        self._stub: Any = kvnode_pb2_grpc.KVNodeStub(self.channel)
        self._abandoning: set[asyncio.Task[None]] = set()

    async def open_session(self, timeout_s: float = CALL_TIMEOUT_S) -> Session:
        """A new epoch. Raises Unavailable if the node does not answer."""
        call = self._stub.OpenSession(kvnode_pb2.OpenSessionRequest(hello=hello_to_pb(self._component_id)))
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
        return Session(call, event.epoch)

    async def open_ticket(
        self,
        epoch: int,
        block_hashes: bytes,
        total_blocks: int,
        *,
        resume: bool = False,
        priority: int = 0,
        expected_blocks: int = 0,
        timeout_s: float = OPEN_TICKET_TIMEOUT_S,
    ) -> Ticket:
        """Pins what is there of the chain and reserves the rest, waiting in line for up to ``timeout_s``.

        ``expected_blocks`` of the chain are there, says the index; the node corrects it where they are not.

        When this call ends without an answer, cancelled or out of time, the node is told to forget it: no ticket is
        left behind, even if it was granted in that moment.
        """
        nonce = secrets.randbits(62) + 1
        request = kvnode_pb2.OpenTicketRequest(
            epoch=epoch,
            block_hashes=block_hashes,
            total_blocks=total_blocks,
            resume=resume,
            nonce=nonce,
            priority=priority,
            expected_blocks=expected_blocks,
        )
        try:
            reply = await call_unary(self._stub.OpenTicket, request, timeout_s)
        except (asyncio.CancelledError, Cancelled, DeadlineExceeded, Unavailable):
            self._abandon(epoch, nonce)
            raise
        return wire.ticket_from_pb(reply)

    async def release(
        self,
        epoch: int,
        ticket_ids: Sequence[int] = (),
        *,
        nonces: Sequence[int] = (),
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Drops the epoch's hold on tickets, and on what calls with these nonces may still be granted. Idempotent."""
        request = kvnode_pb2.ReleaseTicketRequest(epoch=epoch, ticket_ids=ticket_ids, nonces=nonces)
        await call_unary(self._stub.ReleaseTicket, request, timeout_s)

    async def adopt(
        self, epoch: int, ticket_id: int, lease_blocks: int, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> Adopted:
        """Becomes a holder of a ticket and leases exactly ``lease_blocks`` slots, the ticket's reserved ones first.

        Raises NotFound without such a ticket, Overloaded (nothing changed) if more is wanted than there is.
        """
        request = kvnode_pb2.AdoptTicketRequest(epoch=epoch, ticket_id=ticket_id, lease_blocks=lease_blocks)
        return wire.adopted_from_pb(await call_unary(self._stub.AdoptTicket, request, timeout_s))

    async def await_chain(self, epoch: int, ticket_id: int, blocks: int, *, timeout_s: float) -> Adopted:
        """The chain of a ticket that the epoch holds, once it has ``blocks`` blocks, or as far as it goes when the time
        is over. Nothing is leased; cancelling it leaves nothing behind.

        Raises NotFound where the epoch does not hold the ticket, Overloaded where too many calls wait.
        """
        request = kvnode_pb2.AwaitChainRequest(
            epoch=epoch, ticket_id=ticket_id, blocks=blocks, timeout_ms=max(1, int(timeout_s * 1000))
        )
        # The node ends it in time by itself; a little longer, so that its answer still counts.
        reply = await call_unary(self._stub.AwaitChain, request, timeout_s + CALL_TIMEOUT_S)
        return Adopted(tuple(reply.chain_slots), (), reply.tail_hash)

    async def lease(self, epoch: int, blocks: int, *, timeout_s: float = CALL_TIMEOUT_S) -> tuple[int, ...]:
        """Up to ``blocks`` slots, possibly none."""
        request = kvnode_pb2.LeaseSlotsRequest(epoch=epoch, blocks=blocks)
        return tuple((await call_unary(self._stub.LeaseSlots, request, timeout_s)).slots)

    async def give_back(self, epoch: int, slots: Sequence[int], *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Returns leased slots; all or, with InvalidRequest, none."""
        request = kvnode_pb2.ReturnSlotsRequest(epoch=epoch, slots=slots)
        await call_unary(self._stub.ReturnSlots, request, timeout_s)

    async def commit(
        self, epoch: int, runs: Sequence[CommitRun], *, timeout_s: float = CALL_TIMEOUT_S
    ) -> list[CommitResult]:
        """Seals runs of blocks, in order; see CommitResult for lost races (I2)."""
        return wire.results_from_pb(await call_unary(self._stub.Commit, wire.runs_to_pb(epoch, runs), timeout_s))

    async def prefetch(
        self,
        epoch: int,
        ticket_id: int,
        block_hashes: bytes,
        source_node_ids: Sequence[str] = (),
        *,
        timeout_s: float,
        max_bytes: int = 0,
    ) -> Brought:
        """Brings what it can of the chain into the node's pool, under a ticket that the epoch holds, within the time.

        Raises NotFound without such a ticket. Whatever goes wrong between nodes only brings less (I1).
        """
        request = kvnode_pb2.PrefetchRequest(
            epoch=epoch,
            ticket_id=ticket_id,
            block_hashes=block_hashes,
            source_node_ids=source_node_ids,
            timeout_ms=max(1, int(timeout_s * 1000)),
            max_bytes=max_bytes,
        )
        # The node ends it in time by itself; a little longer, so that its answer still counts.
        return wire.brought_from_pb(await call_unary(self._stub.Prefetch, request, timeout_s + PREFETCH_GRACE_S))

    async def reattach(self, epoch: int, *, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """A fenced worker's new epoch, for its word that no step uses anything of the old one any more.

        Raises Conflict for an epoch that is not fenced, NotFound for a void one.
        """
        reply = await call_unary(self._stub.Reattach, kvnode_pb2.ReattachRequest(epoch=epoch), timeout_s)
        return int(reply.epoch)

    async def heartbeat(self, epoch: int, *, timeout_s: float = CALL_TIMEOUT_S) -> HeartbeatReply:
        """A sign of life. Raises NotFound for a void epoch."""
        request = kvnode_pb2.HeartbeatRequest(epoch=epoch)
        return wire.heartbeat_from_pb(await call_unary(self._stub.Heartbeat, request, timeout_s))

    async def status(self, *, timeout_s: float = CALL_TIMEOUT_S) -> NodeStatus:
        """The node's books."""
        return wire.status_from_pb(
            await call_unary(self._stub.GetNodeStatus, kvnode_pb2.GetNodeStatusRequest(), timeout_s)
        )

    async def check_integrity(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Raises Conflict with what does not add up (I4)."""
        await call_unary(self._stub.CheckIntegrity, kvnode_pb2.CheckIntegrityRequest(), timeout_s)

    async def aclose(self) -> None:
        """Waits for calls that tidy up, then closes the connection."""
        await asyncio.gather(*self._abandoning, return_exceptions=True)
        await self.channel.close()

    def _abandon(self, epoch: int, nonce: int) -> None:
        task = asyncio.create_task(self._release_nonce(epoch, nonce), name="kv-abandon")
        self._abandoning.add(task)
        task.add_done_callback(self._abandoning.discard)

    async def _release_nonce(self, epoch: int, nonce: int) -> None:
        try:
            await self.release(epoch, nonces=[nonce])
        except PillionError as error:
            # The node is gone, or it ended the epoch: either way nothing is held there.
            log.debug("abandoned call: %s", error)


async def call_unary(method: Any, request: Any, timeout_s: float) -> Any:
    """One call with the trace's context; its failure is a PillionError."""
    try:
        call = method(request, timeout=timeout_s, metadata=inject())
    except grpc.aio.UsageError:
        raise Unavailable("the connection was closed") from None
    return await typed(call)


async def typed(call: Awaitable[T]) -> T:
    """Awaits a call, or one message of it, and turns its failure into a PillionError."""
    try:
        return await call
    except grpc.aio.UsageError:
        raise Unavailable("the connection was closed") from None
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError as error:
        raise closed_under(error) from None
