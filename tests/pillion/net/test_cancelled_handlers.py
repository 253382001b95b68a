"""A handler whose wait is cancelled, but not by its caller, ends its call with an error: no caller waits forever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lab.testbed.conditions import until, within
from pillion.net import rpc

NAME = "grpc.health.v1.Health"


class _Stray(health_pb2_grpc.HealthServicer):
    """A servicer that waits for something that is cancelled when ``stray`` is set, and otherwise forever."""

    def __init__(self) -> None:
        self.stray = True
        self.waiting = 0
        self.ended: list[BaseException] = []

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._wait()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield health_pb2.HealthCheckResponse()
        await self._wait()

    async def _wait(self) -> None:
        awaited = asyncio.get_running_loop().create_future()
        if self.stray:
            awaited.cancel()
        self.waiting += 1
        try:
            await awaited
        except BaseException as error:
            self.ended.append(error)
            raise


async def _call(stub: Any, name: str) -> None:
    call = getattr(stub, name)(health_pb2.HealthCheckRequest())
    if name == "Check":
        await call
    else:
        async for _ in call:
            pass


@pytest.mark.parametrize("name", ["Check", "Watch"])
async def test_an_unrequested_cancel_is_reported_as_a_bug(name: str, caplog: pytest.LogCaptureFixture) -> None:
    servicer = _Stray()
    server = grpc.aio.server(interceptors=[rpc.ErrorInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with caplog.at_level(logging.ERROR, "pillion.wire.errors"), pytest.raises(grpc.aio.AioRpcError) as raised:
            await within("the call to end", _call(stub, name))
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert [f"/{NAME}/{name} failed"] == [record.getMessage() for record in caplog.records]
        # A disconnected caller cancels its handler, which is not a bug.
        servicer.stray = False
        leaving = asyncio.create_task(_call(stub, name))
        await until("the handler to wait", lambda: servicer.waiting == 2)
        leaving.cancel()
        await until("the handler's end", lambda: len(servicer.ended) == 2)
        assert isinstance(servicer.ended[1], asyncio.CancelledError)
        assert len(caplog.records) == 1
    await server.stop(0)
