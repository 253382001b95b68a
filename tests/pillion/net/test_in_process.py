"""Calls within a process behave like calls over a connection: replies, errors, deadlines, cancelled calls, ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns
from pillion.errors import DeadlineExceeded, InvalidRequest, Overloaded, PillionError, QuotaViolation, Unavailable
from pillion.net.rpc import RunningServer, from_rpc_error, open_channel, start_server


class Echo:
    """A servicer whose requests say what to do."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.both_ended = asyncio.Event()
        self.sent = 0

    async def one(self, request: Any, context: Any) -> Any:
        context.add_done_callback(lambda _: self._end("one"))
        if isinstance(request, Exception):
            raise request
        if request == "wait":
            await asyncio.Event().wait()
        return request, dict(context.invocation_metadata())

    async def many(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        context.add_done_callback(lambda _: self._end("many"))
        async for request in requests:
            if isinstance(request, Exception):
                raise request
            if request == "end":
                return
            yield request

    async def sum(self, requests: AsyncIterator[Any], context: Any) -> int:
        context.add_done_callback(lambda _: self._end("sum"))
        return sum([request async for request in requests])

    async def count(self, request: int, context: Any) -> AsyncIterator[int]:
        for self.sent in range(1, request + 1):
            yield self.sent

    def _end(self, name: str) -> None:
        self.ended.append(name)
        if len(self.ended) == 2:
            self.both_ended.set()


@contextlib.asynccontextmanager
async def serving(address: str = "in-process:echo") -> AsyncIterator[tuple[Echo, grpc.aio.Channel, RunningServer]]:
    echo = Echo()
    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(echo.one),
        "Many": grpc.stream_stream_rpc_method_handler(echo.many),
        "Sum": grpc.stream_unary_rpc_method_handler(echo.sum),
        "Count": grpc.unary_stream_rpc_method_handler(echo.count),
    }

    def add(server: Any) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", handlers),))
        server.add_registered_method_handlers("Echo", handlers)

    server = await start_server(address, [("Echo", add)])
    async with open_channel(address) as channel:
        yield echo, channel, server
    await server.stop(0.0)


async def error_of(call: Any) -> PillionError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_a_handler_reads_a_stream_of_requests_and_replies_once() -> None:
    async def requests() -> AsyncIterator[int]:
        for request in range(4):
            yield request

    async def broken() -> AsyncIterator[int]:
        yield 1
        raise Overloaded("no more")

    async with serving() as (echo, channel, _):
        total = channel.stream_unary("/Echo/Sum")
        assert await total(requests()) == 6
        assert isinstance(await error_of(total(broken())), Overloaded)
        assert echo.ended == ["sum", "sum"]


async def test_a_call_returns_the_handlers_reply() -> None:
    async with serving() as (echo, channel, _):
        assert await channel.unary_unary("/Echo/One")("x", metadata=[("a", "b")]) == ("x", {"a": "b"})
        assert echo.ended == ["one"]


async def test_errors_arrive_with_their_details() -> None:
    async with serving() as (echo, channel, server):
        one = channel.unary_unary("/Echo/One")
        error = await error_of(one(Overloaded("full", 70, (QuotaViolation("slots", "all are used"),))))
        assert isinstance(error, Overloaded)
        assert (error.retry_after_ms, error.quotas) == (70, (QuotaViolation("slots", "all are used"),))
        assert (await error_of(one(ValueError("a defect")))).message == "internal error; see the server's log"
        assert isinstance(await error_of(one("wait", timeout=0.01)), DeadlineExceeded)
        assert echo.ended == ["one"] * 3
        await server.stop(0.0)
        assert (await error_of(one("x"))).message == "nothing serves in-process:echo"
        assert (await error_of(channel.stream_stream("/Echo/Many")().read())).code == Unavailable.code


async def test_a_cancelled_call_ends_its_handler() -> None:
    async with serving() as (echo, channel, _):
        waiting = asyncio.ensure_future(channel.unary_unary("/Echo/One")("wait"))
        await loop_turns(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        stream = channel.stream_stream("/Echo/Many")()
        await stream.wait_for_connection()
        assert stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream.read()
        async with asyncio.timeout(WITHIN_S):
            await echo.both_ended.wait()
        assert echo.ended == ["one", "many"]
        with pytest.raises(asyncio.InvalidStateError):
            await stream.write("late")


async def test_a_bidirectional_stream() -> None:
    async with serving() as (echo, channel, _):
        stream = channel.stream_stream("/Echo/Many")()
        await stream.wait_for_connection()
        for word in ("a", "b"):
            await stream.write(word)
            assert await stream.read() == word
        await stream.write("end")
        assert await stream.read() is grpc.aio.EOF
        assert not stream.cancel()
        failing = channel.stream_stream("/Echo/Many")()
        await failing.write(InvalidRequest("wrong"))
        assert (await error_of(failing.read())).message == "wrong"
        assert echo.ended == ["many", "many"]


async def test_a_sender_waits_for_its_receiver() -> None:
    async with serving() as (echo, channel, _):
        numbers = channel.unary_stream("/Echo/Count")(1000)
        assert await numbers.read() == 1
        await loop_turns(20)
        assert echo.sent <= 3
        assert [number async for number in numbers] == list(range(2, 1001))


async def test_closing_the_server_or_the_channel_ends_streams() -> None:
    async with serving() as (_, channel, server):
        stream = channel.stream_stream("/Echo/Many")()
        reading = asyncio.ensure_future(stream.read())
        await stream.wait_for_connection()
        await server.stop(0.0)
        assert (await error_of(reading)).message == "the server has ended the call"
    async with serving() as (_, channel, _):
        stream = channel.stream_stream("/Echo/Many")()
        await stream.wait_for_connection()
        await channel.close()
        with pytest.raises(asyncio.CancelledError):
            await stream.read()
        with pytest.raises(grpc.aio.UsageError):
            channel.unary_unary("/Echo/One")("x")


async def test_an_address_is_served_once() -> None:
    async with serving():
        with pytest.raises(OSError, match="is in use"):
            await start_server("in-process:echo", [])
