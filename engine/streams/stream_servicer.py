"""Decode.Connect over a worker: commands in, batches of deltas out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from pillion.engine.streams.stream_session import DecodeSession, StreamLimits
from pillion.engine.worker import worker_epoch
from pillion.engine.worker.worker import Worker
from pillion.engine.worker.worker_server import Service
from pillion.errors import InvalidRequest
from pillion.v1 import decode_pb2, decode_pb2_grpc
from pillion.wire.common import check_hello

log = logging.getLogger("pillion.decode")

SERVICE_NAME = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Servicer of the gateways' connections, whose streams share ``limits``."""

    def __init__(self, worker: Worker, limits: StreamLimits) -> None:
        self._worker = worker
        self._limits = limits
        self._adopting: dict[asyncio.Task[None], int] = {}
        self._sessions: dict[DecodeSession, None] = {}

    @property
    def service(self) -> Service:
        return Service(SERVICE_NAME, partial(decode_pb2_grpc.add_DecodeServicer_to_server, self), self.finish)

    def finish(self) -> None:
        """End each connection once its last deltas are sent."""
        for session in self._sessions:
            session.finish()

    async def Connect(  # noqa: N802
        self,
        request_iterator: AsyncIterator[decode_pb2.DecodeCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[decode_pb2.DecodeBatch]:
        """Serve one gateway's connection."""
        session = DecodeSession(self._worker, self._limits, self._adopting)
        self._sessions[session] = None
        # If the connection ends while a message is being sent, only this callback notices; otherwise finally does.
        context.add_done_callback(lambda *_: session.close())  # type: ignore[arg-type]  # the stubs name its arguments
        await context.send_initial_metadata(())
        reader = asyncio.create_task(_read(request_iterator, session))
        heartbeats = asyncio.create_task(_send_heartbeats(session))
        try:
            async for batch in session.deltas():
                yield batch
            if reader.done():
                await reader
        finally:
            session.close()
            self._sessions.pop(session, None)
            reader.cancel()
            heartbeats.cancel()


async def _send_heartbeats(session: DecodeSession) -> None:
    """Send heartbeats for waiting streams as long as the connection lasts."""
    while True:
        await asyncio.sleep(worker_epoch.QUEUE_HEARTBEAT_MS / 1000)
        try:
            await session.report_queued()
        except Exception:
            # Without these heartbeats, a gateway would mistake a long queue for a hung worker.
            log.exception("heartbeats of waiting streams failed")


async def _read(commands: AsyncIterator[decode_pb2.DecodeCommand], session: DecodeSession) -> None:
    """Pass the gateway's commands to the session, and close it when the gateway closes its side. Raises InvalidRequest
    for a connection without a hello."""
    try:
        has_hello = False
        async for command in commands:
            kind = command.WhichOneof("command")
            if not has_hello:
                if kind != "hello":
                    raise InvalidRequest("the first command of a connection must be a hello")
                check_hello(command.hello)
                has_hello = True
            elif kind == "submit":
                await session.submit(command.submit)
            elif kind == "cancel":
                session.cancel(command.cancel.key)
    finally:
        session.close()
