"""gRPC service of the KV node: converts messages, and calls the pool."""

# ruff: noqa: N802

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from pillion.kvstore.node.pool import Pool
from pillion.v1 import kvnode_pb2 as pb
from pillion.v1 import kvnode_pb2_grpc
from pillion.v1.kvnode_pb2 import NodeStatus
from pillion.wire.common import check_hello, hello_to_pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["KVNode"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class KVNodeServicer(kvnode_pb2_grpc.KVNodeServicer):
    """Servicer of kvnode.proto's KVNode.

    Args:
        status: returns the node's status.
        check_integrity: raises PillionError on inconsistency.
        stopping: ends all sessions when set.
        calls: implementations of the methods of other features, by name.
    """

    def __init__(
        self,
        pool: Pool,
        node_id: str,
        status: Callable[[], NodeStatus],
        check_integrity: Callable[[], None],
        stopping: asyncio.Event,
        calls: Mapping[str, Callable[[Any, Any], Any]],
    ) -> None:
        self._pool = pool
        self._node_id = node_id
        self._status = status
        self._check_integrity = check_integrity
        self._stopping = stopping
        for name, call in calls.items():
            setattr(self, name, call)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> AsyncIterator[pb.SessionEvent]:
        epoch = self._pool.open_session(check_hello(request.hello))
        # A callback, since this generator may be suspended when the call ends.
        ended: Any = lambda _: self._pool.ended(epoch)  # noqa: E731
        context.add_done_callback(ended)
        yield pb.SessionEvent(hello=hello_to_pb(self._node_id), epoch=epoch)
        await self._stopping.wait()

    async def OpenTicket(self, request: pb.OpenTicketRequest, context: Context) -> pb.OpenTicketReply:
        return await self._pool.open_ticket(request)

    async def ReleaseTicket(self, request: pb.ReleaseTicketRequest, context: Context) -> pb.ReleaseTicketReply:
        self._pool.release(request.epoch, request.ticket_ids, request.nonces)
        return pb.ReleaseTicketReply()

    async def AdoptTicket(self, request: pb.AdoptTicketRequest, context: Context) -> pb.AdoptTicketReply:
        return self._pool.adopt(request.epoch, request.ticket_id, request.lease_blocks)

    async def AwaitChain(self, request: pb.AwaitChainRequest, context: Context) -> pb.AwaitChainReply:
        timeout_s = request.timeout_ms / 1000
        chain = await self._pool.await_chain(request.epoch, request.ticket_id, request.blocks, timeout_s)
        return pb.AwaitChainReply(
            chain_slots=chain.chain_slots, last_hash=chain.last_hash, state_slots=chain.state_slots
        )

    async def LeaseSlots(self, request: pb.LeaseSlotsRequest, context: Context) -> pb.LeaseSlotsReply:
        return pb.LeaseSlotsReply(slots=self._pool.lease(request.epoch, request.blocks))

    async def ReturnSlots(self, request: pb.ReturnSlotsRequest, context: Context) -> pb.ReturnSlotsReply:
        self._pool.return_slots(request.epoch, request.slots)
        return pb.ReturnSlotsReply()

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitReply:
        return pb.CommitReply(results=self._pool.commit(request.epoch, request.runs))

    # Writes to the context instead of yielding, so that writing to a follower that does not read can time out.
    async def FollowBlocks(self, request: pb.FollowBlocksRequest, context: Context) -> None:  # type: ignore[override]
        check_hello(request.hello)
        await self._pool.followers.follow(request, context.write)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:
        return self._pool.heartbeat(request.epoch)

    async def Reattach(self, request: pb.ReattachRequest, context: Context) -> pb.ReattachReply:
        return pb.ReattachReply(epoch=self._pool.reattach(request.epoch))

    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchReply:
        return await self._pool.prefetch(request)

    async def FindBlocks(self, request: pb.FindBlocksRequest, context: Context) -> pb.FindBlocksReply:
        return await self._pool.find_blocks(request)

    async def GetNodeStatus(self, request: pb.GetNodeStatusRequest, context: Context) -> pb.NodeStatus:
        return self._status()

    async def CheckIntegrity(self, request: pb.CheckIntegrityRequest, context: Context) -> pb.CheckIntegrityReply:
        self._check_integrity()
        return pb.CheckIntegrityReply()
