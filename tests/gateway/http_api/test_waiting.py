"""Keep-alives of a stream before its first token: a proxy in between closes silent answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from lab.testbed.conditions import until
from pillion.errors import InvalidRequest
from pillion.gateway.http_api.http_call import HttpCall
from tests.support.fake_components import FakeCluster, running_fake_cluster
from tests.support.http import connected, parse_reply, request_bytes

PING_MS = 50
# Idle timeout of the proxy, as of a load balancer.
SILENT_S = 10.0
ANSWER = "The answer."
USER = [{"role": "user", "content": "What is the capital of France, and which river runs through it?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "toy", "messages": USER, "stream": True},
    "/v1/completions": {"model": "toy", "prompt": USER[0]["content"], "stream": True},
    "/v1/responses": {"model": "toy", "input": USER, "stream": True},
    "/v1/messages": {"model": "toy", "messages": USER, "max_tokens": 50, "stream": True},
}
WAITING = dict.fromkeys(BODIES, b": waiting\n\n") | {"/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n'}
FAILED = {
    "/v1/chat/completions": '"code":"invalid_value"',
    "/v1/completions": '"code":"invalid_value"',
    "/v1/responses": 'event: response.failed\ndata: {"type":"response.failed",',
    "/v1/messages": 'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error"',
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fakes() -> AsyncIterator[FakeCluster]:
    flags = {"split_policy": "disaggregated", "max_running_requests": 1, "stream_ping_ms": PING_MS}
    async with running_fake_cluster(ANSWER, **flags) as running:
        yield running


@contextlib.asynccontextmanager
async def impatient_proxy(address: str) -> AsyncIterator[str]:
    """Serve an address that forwards bytes, and closes after SILENT_S of silence by the server."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with connected(address) as (answers, asked):

            async def pass_on() -> None:
                while more := await reader.read(65_536):
                    asked.write(more)

            passing = asyncio.create_task(pass_on())
            with contextlib.suppress(TimeoutError):
                while more := await asyncio.wait_for(answers.read(65_536), SILENT_S):
                    writer.write(more)
            passing.cancel()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def held(fakes: FakeCluster, where: str) -> AsyncIterator[None]:
    """Block the next prompt's prefill, or its turn, until the block exits."""
    if where == "prefill":
        fakes.prefill.gate.clear()
        yield
        fakes.prefill.gate.set()
        return
    fakes.decode.gate.clear()
    submits = len(fakes.decode.submits)
    async with connected(fakes.gateway.http_address) as (reader, writer):
        writer.write(request_bytes("POST", "/v1/completions", {"model": "toy", "prompt": "x"}))
        await until("the one place to be taken", lambda: len(fakes.decode.submits) > submits)
        yield
        fakes.decode.gate.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("where", ["prefill", "queue"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_waiting_stream_survives_a_proxy_timeout(path: str, where: str, fakes: FakeCluster) -> None:
    waiting = WAITING[path]
    async with impatient_proxy(fakes.gateway.http_address) as address, connected(address) as (reader, writer):
        async with held(fakes, where):
            writer.write(request_bytes("POST", path, BODIES[path]))
            raw = await reader.readuntil(waiting)
            assert raw.startswith(b"HTTP/1.1 200 ")
            for _ in range(3):
                raw += await reader.readuntil(waiting)
        raw += await reader.read()
    reply = parse_reply(raw)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.body.startswith(4 * waiting)
    answer = reply.body.decode()
    async with connected(fakes.gateway.http_address) as (reader, writer):
        writer.write(request_bytes("POST", path, BODIES[path]))
        whole = parse_reply(await reader.read()).body.decode()
    assert texts(answer) == texts(whole) == ANSWER
    assert names(answer).keys() == names(whole).keys()
    await fakes.settled()


def texts(stream: str) -> str:
    """Return the texts of a stream's deltas."""
    found = ""
    for event in events(stream):
        choice = (event.get("choices") or [event])[0]
        delta = choice.get("delta", choice)
        if event.get("type") in (None, "content_block_delta", "response.output_text.delta"):
            found += delta if isinstance(delta, str) else delta.get("content") or delta.get("text") or ""
    return found


def names(stream: str) -> Counter[str]:
    """Return the event types of a stream without pings, repeats merged: deltas per event depend on the machine."""
    found = Counter(event.get("type") or event["object"] for event in events(stream))
    del found["ping"]
    return found


def events(stream: str) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_the_wait_is_an_event(path: str, fakes: FakeCluster) -> None:
    async with connected(fakes.gateway.http_address) as (reader, writer):
        async with held(fakes, "queue"):
            writer.write(request_bytes("POST", path, BODIES[path]))
            raw = await reader.readuntil(WAITING[path])
            fakes.decode.refusals.append((InvalidRequest.code, False))
        reply = parse_reply(raw + await reader.read())
    assert reply.status == 200
    *_, last = reply.body.decode().strip().split("\n\n")
    assert FAILED[path] in last, last
    assert b"[DONE]" not in reply.body
    await fakes.settled()


@pytest.mark.parametrize("where", ["prefill", "queue"])
async def test_a_disconnect_while_waiting_ends_the_request(where: str, fakes: FakeCluster) -> None:
    async with held(fakes, where):
        under_way = fakes.gateway.gateway.active_requests
        async with connected(fakes.gateway.http_address) as (reader, writer):
            writer.write(request_bytes("POST", "/v1/chat/completions", BODIES["/v1/chat/completions"]))
            await reader.readuntil(WAITING["/v1/chat/completions"])
        await until("its request to end", lambda: fakes.gateway.gateway.active_requests == under_way)
    await fakes.settled()


async def test_unary_answers_get_no_keep_alives(fakes: FakeCluster) -> None:
    """They have a status once complete."""
    async with connected(fakes.gateway.http_address) as (reader, writer):
        async with held(fakes, "prefill"):
            writer.write(request_bytes("POST", "/v1/completions", BODIES["/v1/completions"] | {"stream": False}))
            await until("its prompt to be computed", lambda: fakes.prefill.running)
            async with connected(fakes.gateway.http_address) as (others, other):
                other.write(request_bytes("POST", "/v1/completions", BODIES["/v1/completions"]))
                for _ in range(3):
                    await others.readuntil(WAITING["/v1/completions"])
        reply = parse_reply(await reader.read())
    assert reply.json["choices"][0]["text"] == ANSWER
    await fakes.settled()


async def test_real_clients_ignore_comments_and_pings(fakes: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    address, heard = fakes.gateway.http_address, Counter[str]()
    before = HttpCall.write

    def write(call: HttpCall, events: bytes, last: bool = False) -> Awaitable[None]:
        heard[call.path] += events == WAITING[call.path]
        return before(call, events, last)

    monkeypatch.setattr(HttpCall, "write", write)

    async def openai_chat() -> str:
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model="toy", messages=USER, stream=True)  # type: ignore[call-overload]
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def openai_responses() -> str:
        async with (
            openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client,
            client.responses.stream(model="toy", input=USER[0]["content"]) as stream,
        ):
            return (await stream.get_final_response()).output_text

    async def anthropic_messages() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=f"http://{address}", api_key="none", max_retries=0) as client,
            client.messages.stream(model="toy", messages=USER, max_tokens=50) as stream,  # type: ignore[arg-type]
        ):
            return await stream.get_final_text()

    async with held(fakes, "queue"):
        asked = [asyncio.create_task(one()) for one in (openai_chat, openai_responses, anthropic_messages)]
        await until("three clients that hear something", lambda: [count > 2 for count in heard.values()] == [True] * 3)
    assert await asyncio.gather(*asked) == [ANSWER] * 3
    await fakes.settled()
