"""A request id is a label: accepted or generated, echoed at every end of a call, never used to find a stream."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import pytest

from lab.testbed.conditions import until
from pillion.errors import Unavailable
from pillion.net.rpc import open_channel
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.fake_components import FakeCluster, running_fake_cluster
from tests.support.http import call


async def ask(
    fakes: FakeCluster, fields: dict[str, Any], *metadata: tuple[str, str]
) -> tuple[str, grpc.StatusCode, list[str]]:
    """Return the text, the status and the labels in the trailers."""
    async with open_channel(fakes.gateway.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        stream = stub.Generate(gateway_pb2.GenerateRequest(**fields), metadata=metadata)
        text = ""
        try:
            async for delta in stream:
                text += delta.text
        except grpc.aio.AioRpcError:
            pass
        found = [str(value) for name, value in await stream.trailing_metadata() or () if name == "x-request-id"]
        return text, await stream.code(), found


async def test_grpc_reads_the_id_from_message_or_metadata_or_generates_one() -> None:
    async with running_fake_cluster("abc") as fakes:
        header = ("x-request-id", "from/header:1")
        assert await ask(fakes, {"text": "x"}, header) == ("abc", grpc.StatusCode.OK, ["from/header:1"])
        assert fakes.decode.submits[-1].request_id == "from/header:1"
        assert (await ask(fakes, {"text": "x", "request_id": "mine"}, header))[2] == ["mine"]
        for fields, metadata in (
            ({"text": "x", "request_id": "a\nb"}, ()),
            ({"text": "x"}, (("x-request-id", "a b"),)),
        ):
            text, code, (found,) = await ask(fakes, fields, *metadata)
            assert (text, code) == ("abc", grpc.StatusCode.OK)
            assert re.fullmatch("req-[0-9a-f]{24}", found)
            assert fakes.decode.submits[-1].request_id == found
        (one,), (two,) = [(await ask(fakes, {"text": "x"}))[2] for _ in range(2)]
        assert one.startswith("req-")
        assert one != two
        await fakes.settled()


async def test_a_refusal_has_the_id_and_its_details(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_fake_cluster() as fakes:
        _, code, found = await ask(fakes, {"text": "x", "model": "none"}, ("x-request-id", "a"))
        assert (code, found) == (grpc.StatusCode.NOT_FOUND, ["a"])
        _, code, found = await ask(fakes, {"text": ""}, ("x-request-id", "b"))
        assert (code, found) == (grpc.StatusCode.INVALID_ARGUMENT, ["b"])
        assert not fakes.decode.submits

        async def refuse(*_: object, **__: object) -> None:
            raise Unavailable("come again", 100)

        monkeypatch.setattr(fakes.gateway.gateway, "generate", refuse)
        with pytest.raises(Unavailable) as caught:
            await anext(fakes.client.generate("x"))
        assert caught.value.retry_after_ms
        assert (await ask(fakes, {"text": "x"}, ("x-request-id", "c")))[1:] == (grpc.StatusCode.UNAVAILABLE, ["c"])


async def test_concurrent_requests_may_share_an_id() -> None:
    """On both ports; cancelling one of them ends no other."""
    async with running_fake_cluster("A longer answer than that.") as fakes:
        fakes.decode.gate.clear()
        same = ("x-request-id", "same")
        over_grpc = [asyncio.create_task(ask(fakes, {"text": "x"}, same)) for _ in range(4)]
        body = {"model": "toy", "prompt": "x", "max_tokens": 200}
        http = fakes.gateway.http_address
        over_http = [asyncio.create_task(call(http, "/v1/completions", body, dict([same]))) for _ in range(4)]
        await until("eight submits", lambda: len(fakes.decode.submits) == 8)
        assert {submit.request_id for submit in fakes.decode.submits} == {"same"}
        over_grpc[0].cancel()
        await until("one stream to be cancelled", lambda: len(fakes.decode.cancelled) == 1)
        fakes.decode.gate.set()
        for task in over_grpc[1:]:
            assert await task == ("A longer answer than that.", grpc.StatusCode.OK, ["same"])
        for other in over_http:
            reply = await other
            assert reply.headers["x-request-id"] == "same"
            assert reply.json["choices"][0]["text"] == "A longer answer than that."
        await fakes.settled()
