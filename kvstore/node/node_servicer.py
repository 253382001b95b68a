"""The KV node's gRPC service: messages in, calls on the pool, messages out. No decision is made here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from pillion.kvstore.node.pool import Pool
from pillion.v1 import kvnode_pb2, kvnode_pb2_grpc
from pillion.v1.kvnode_pb2 import NodeStatus
from pillion.wire.common import check_hello, hello_to_pb

SERVICE_NAME = kvnode_pb2.DESCRIPTOR.services_by_name["KVNode"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class KVNodeServicer(kvnode_pb2_grpc.KVNodeServicer):
    """Serves kvnode.proto. ``status`` returns the node's whole status, and ``stopping`` ends the sessions."""

    def __init__(self, pool: Pool, node_id: str, status: Callable[[], NodeStatus], stopping: asyncio.Event) -> None:
        self._pool = pool
        self._node_id = node_id
        self._status = status
        self._stopping = stopping

    async def OpenSession(  # noqa: N802
        self, request: kvnode_pb2.OpenSessionRequest, context: Context
    ) -> AsyncIterator[kvnode_pb2.SessionEvent]:
        epoch = self._pool.open_session(check_hello(request.hello))
        # This callback runs however the call ends, and wherever this generator stands then.
        ended: Any = lambda _: self._pool.ended(epoch)  # noqa: E731
        context.add_done_callback(ended)
        yield kvnode_pb2.SessionEvent(hello=hello_to_pb(self._node_id), epoch=epoch)
        await self._stopping.wait()

    async def OpenTicket(  # noqa: N802
        self, request: kvnode_pb2.OpenTicketRequest, context: Context
    ) -> kvnode_pb2.OpenTicketReply:
        return await self._pool.open_ticket(request)

    async def ReleaseTicket(  # noqa: N802
        self, request: kvnode_pb2.ReleaseTicketRequest, context: Context
    ) -> kvnode_pb2.ReleaseTicketReply:
        self._pool.release(request.epoch, request.ticket_ids, request.nonces)
        return kvnode_pb2.ReleaseTicketReply()

    async def AdoptTicket(  # noqa: N802
        self, request: kvnode_pb2.AdoptTicketRequest, context: Context
    ) -> kvnode_pb2.AdoptTicketReply:
        return self._pool.adopt(request.epoch, request.ticket_id, request.lease_blocks)

    async def AwaitChain(  # noqa: N802
        self, request: kvnode_pb2.AwaitChainRequest, context: Context
    ) -> kvnode_pb2.AwaitChainReply:
        timeout_s = request.timeout_ms / 1000
        chain = await self._pool.await_chain(request.epoch, request.ticket_id, request.blocks, timeout_s)
        return kvnode_pb2.AwaitChainReply(chain_slots=chain.chain_slots, tail_hash=chain.tail_hash)

    async def LeaseSlots(  # noqa: N802
        self, request: kvnode_pb2.LeaseSlotsRequest, context: Context
    ) -> kvnode_pb2.LeaseSlotsReply:
        return kvnode_pb2.LeaseSlotsReply(slots=self._pool.lease(request.epoch, request.blocks))

    async def ReturnSlots(  # noqa: N802
        self, request: kvnode_pb2.ReturnSlotsRequest, context: Context
    ) -> kvnode_pb2.ReturnSlotsReply:
        self._pool.give_back(request.epoch, request.slots)
        return kvnode_pb2.ReturnSlotsReply()

    async def Commit(  # noqa: N802
        self, request: kvnode_pb2.CommitRequest, context: Context
    ) -> kvnode_pb2.CommitReply:
        return kvnode_pb2.CommitReply(results=self._pool.commit(request.epoch, request.runs))

    async def Heartbeat(  # noqa: N802
        self, request: kvnode_pb2.HeartbeatRequest, context: Context
    ) -> kvnode_pb2.HeartbeatReply:
        return self._pool.heartbeat(request.epoch)

    async def Reattach(  # noqa: N802
        self, request: kvnode_pb2.ReattachRequest, context: Context
    ) -> kvnode_pb2.ReattachReply:
        return kvnode_pb2.ReattachReply(epoch=self._pool.reattach(request.epoch))

    async def Prefetch(  # noqa: N802
        self, request: kvnode_pb2.PrefetchRequest, context: Context
    ) -> kvnode_pb2.PrefetchReply:
        return await self._pool.prefetch(request)

    async def GetNodeStatus(  # noqa: N802
        self, request: kvnode_pb2.GetNodeStatusRequest, context: Context
    ) -> kvnode_pb2.NodeStatus:
        return self._status()

    async def CheckIntegrity(  # noqa: N802
        self, request: kvnode_pb2.CheckIntegrityRequest, context: Context
    ) -> kvnode_pb2.CheckIntegrityReply:
        self._pool.check_integrity()
        return kvnode_pb2.CheckIntegrityReply()
