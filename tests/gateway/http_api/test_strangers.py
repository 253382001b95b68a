"""Unauthenticated clients have bounded cost: idle connections, decompression bombs, thousands of bodies."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import threading
from collections.abc import AsyncIterator, Callable
from operator import sub
from typing import Any

import grpc
import psutil
import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until
from pillion.gateway.admission.api_keys import hash_of
from pillion.gateway.http_api import http_call
from pillion.gateway.http_api.http_call import HttpCall
from pillion.gateway.http_api.http_connection import SMALL_CHUNKS, StrictParser
from pillion.gateway.http_api.http_server import HttpServer
from pillion.gateway.tokens.tokenizer import TokenizerPool
from pillion.kvstore.index import redis_link, redis_url
from pillion.net.rpc import MAX_MESSAGE_BYTES, open_channel
from tests.support.fake_components import FakeCluster, running_fake_cluster
from tests.support.http import call, connected, request_bytes, send
from tests.support.loop_clock import turn_clock

KEY = "plk-" + "k" * 43
TIMEOUT_S = WITHIN_S
TEXT = {"prompt": "x"}


@contextlib.asynccontextmanager
async def guarded(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeCluster]:
    path = folder / "keys.toml"
    path.write_text(f'[tenant.acme]\n[[key]]\ntenant = "acme"\nhash = "{hash_of(KEY)}"\n')
    monkeypatch.setenv("PILLION_API_KEY", KEY)
    async with running_fake_cluster("abc", api_keys=str(path)) as fakes:
        yield fakes


async def closed(reader: asyncio.StreamReader) -> None:
    """Return once the server has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while await asyncio.wait_for(reader.read(2**16), TIMEOUT_S):
            pass


async def test_an_unauthenticated_message_is_not_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal comes before any message is sent."""
    async with guarded(tmp_path, monkeypatch) as fakes, open_channel(fakes.gateway.grpc_address) as channel:
        for name in ("Generate", "ListModels", "GetStatus"):
            path = f"/pillion.v1.Gateway/{name}"
            silent = channel.stream_unary(path)(timeout=TIMEOUT_S)
            assert await silent.code() is grpc.StatusCode.UNAUTHENTICATED, name
            large = channel.unary_unary(path)(b"\xff" * (MAX_MESSAGE_BYTES - 10), timeout=TIMEOUT_S)
            assert await large.code() is grpc.StatusCode.UNAUTHENTICATED, name


async def test_a_compressed_message_is_refused_before_decompression() -> None:
    """gRPC would decompress it before checking its size."""
    message = b"\xfa\x06\x80\x80\x80\x20" + bytes(2**26)
    options = [("grpc.max_send_message_length", -1)]
    async with running_fake_cluster("abc") as fakes:
        for packing in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            address = fakes.gateway.grpc_address
            async with grpc.aio.insecure_channel(address, options=options, compression=packing) as channel:
                asked = channel.unary_unary("/pillion.v1.Gateway/ListModels")(message, timeout=TIMEOUT_S)
                assert await asked.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await fakes.client.models()


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.gateway.http_api.http_connection.HEAD_TIMEOUT_S", 0.3)
    async with running_fake_cluster("abc") as fakes:
        address = fakes.gateway.http_address
        whole = request_bytes("POST", "/v1/completions", TEXT).replace(b"Connection: close", b"X: y")
        for sent in (b"", b"GET / HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"):
            async with connected(address) as (reader, writer):
                writer.write(sent)
                await closed(reader)
        # A connection that has had a valid request is closed after the same time; an answer may take longer.
        async with connected(address) as (reader, writer):
            fakes.decode.gate.clear()
            writer.write(whole)
            await until("a submit", lambda: fakes.decode.submits)
            await turn_clock(0.5)
            fakes.decode.gate.set()
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.write(b"GET / HT")
            await closed(reader)
        async with connected(address) as (reader, writer):
            for _ in range(2):
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200 ")
                await turn_clock(0.5)
        await fakes.settled()


async def test_a_client_that_reads_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.gateway.http_api.http_connection.STALL_TIMEOUT_S", 0.3)
    async with running_fake_cluster("abc") as fakes:
        connections = fakes.gateway.http.connections
        async with connected(fakes.gateway.http_address) as (reader, writer):
            await until("a connection", lambda: connections)
            (connection,) = connections
            # Reported by the transport when written bytes are not sent: first in time, then late.
            connection.pause_writing()
            connection.resume_writing()
            await turn_clock(0.5)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200 ")
            connection.pause_writing()
            await closed(reader)


async def test_answers_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.gateway.assemble.connections_per_port", lambda _: 4)
    async with running_fake_cluster("abc") as fakes:
        address, http = fakes.gateway.http_address, fakes.gateway.http
        fakes.decode.gate.clear()
        answered = [asyncio.create_task(call(address, "/v1/completions", TEXT)) for _ in range(3)]
        await until("three submits", lambda: len(fakes.decode.submits) == 3)
        assert (await call(address, "/health")).status == 503
        fakes.decode.gate.set()
        assert {reply.status for reply in await asyncio.gather(*answered)} == {200}
        await until("all connections to end", lambda: not http.connections)
        assert (await call(address, "/health")).status == 200
        await fakes.settled()


def waiting_clients(http: HttpServer) -> tuple[int, int]:
    """Count the connections that wait for their clients: without a request, or with a partial body."""
    state = http._server.server_state
    idle, sending = (sum(map(len, waiting._by_peer.values())) for waiting in (state.idle, state.sending))
    return idle, sending


def is_open(reader: asyncio.StreamReader) -> bool:
    return not reader.at_eof() and reader.exception() is None


async def test_a_newcomer_replaces_the_longest_idle_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """First a connection without a request, then one with a partial body, of the address with the most."""
    monkeypatch.setattr("pillion.gateway.assemble.connections_per_port", lambda _: 6)
    monkeypatch.setattr("pillion.gateway.http_api.http_connection.HEAD_TIMEOUT_S", 10 * WITHIN_S)
    async with running_fake_cluster("abc") as fakes, contextlib.AsyncExitStack() as stack:
        address, http = fakes.gateway.http_address, fakes.gateway.http

        async def connect(source: str, sent: bytes = b"") -> asyncio.StreamReader:
            before = len(http.connections)
            reader, writer = await stack.enter_async_context(connected(address, source))
            writer.write(sent)
            await until("a connection", lambda: len(http.connections) == min(before + 1, 5))
            return reader

        half = request_bytes("POST", "/v1/completions", TEXT)[:-2]
        other = await connect("127.0.0.1")
        slow = await connect("127.0.0.2", half)
        await until("a body that is not whole", lambda: waiting_clients(http) == (1, 1))
        first, second, third = [await connect("127.0.0.2") for _ in range(3)]
        assert (await call(address, "/health")).status == 200
        await closed(first)
        kept = await connect("127.0.0.1", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await kept.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200 ")
        assert all(map(is_open, (other, slow, second, third, kept)))
        waiting = [other, second, kept, third]
        while waiting:
            # A slow newcomer replaces an idle connection of the address with the most.
            await connect("127.0.0.3", half)
            await closed(waiting.pop(0))
            assert all(map(is_open, (slow, *waiting)))
        assert (await call(address, "/health")).status == 200
        await stack.aclose()
        await until("all connections to end", lambda: not http.connections)
        assert waiting_clients(http) == (0, 0)
        await fakes.settled()


async def test_conflicting_content_lengths_close_the_connection() -> None:
    """Request smuggling: a proxy may use the other length (RFC 9112, 6.3)."""
    async with running_fake_cluster("abc") as fakes:
        first, second = "Content-Length: 5", "Transfer-Encoding: chunked"
        for lines in ((first, second), (second, first)):
            for path in ("/health", "/v1/completions", "/nowhere"):
                async with connected(fakes.gateway.http_address) as (reader, writer):
                    head = "\r\n".join((f"POST {path} HTTP/1.1", "Host: localhost", *lines))
                    writer.write(head.encode() + b"\r\n\r\n0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    said = await asyncio.wait_for(reader.read(), TIMEOUT_S)
                assert said.startswith(b"HTTP/1.1 400 "), said
                assert b"connection: close" in said.lower()
                assert said.count(b"HTTP/1.1") == 1, "what stands after it is no request"
        assert not fakes.decode.submits


async def test_clients_that_leave_while_sending_are_not_errors(caplog: pytest.LogCaptureFixture) -> None:
    async with running_fake_cluster("abc") as fakes:
        http = fakes.gateway.http
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"):
            async with connected(fakes.gateway.http_address) as (_, writer):
                writer.write(request_bytes("POST", path, TEXT)[:-2])
                await until("a body that is not whole", lambda: waiting_clients(http) == (0, 1))
            await until("the connection to end", lambda: not http.connections)
        await fakes.settled()
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_body_of_tiny_chunks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk costs as much as a kilobyte, and a quarter of a megabyte of them arrives at once."""
    events = 0
    before = StrictParser.next_event

    def counted(self: StrictParser) -> Any:
        nonlocal events
        events += 1
        return before(self)

    monkeypatch.setattr(StrictParser, "next_event", counted)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    body = b'{"prompt": "' + b"x" * 100 + b'", "max_tokens": 1}' + b" " * 2000

    def chunks(size: int, text: bytes) -> bytes:
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"

    async with running_fake_cluster("abc") as fakes:
        address = fakes.gateway.http_address
        assert (await send(address, head + chunks(5, body))).status == 200
        assert (await send(address, head + chunks(200, body + b" " * 500_000))).status == 200
        events = 0
        refused = await send(address, head + chunks(1, body))
        assert refused.status == 400
        assert b"chunks" in refused.body
        assert events < SMALL_CHUNKS + 100
        await fakes.settled()


async def test_disconnected_clients_leave_a_bounded_number_of_connections(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links to Redis remain, which pool the connections of the peak."""
    for module in (redis_url, redis_link):
        monkeypatch.setattr(module, "MAX_CONNECTIONS", 4)
    async with guarded(tmp_path, monkeypatch) as fakes:
        address, http = fakes.gateway.http_address, fakes.gateway.http
        body = {"prompt": "a prompt of several blocks"}
        raw = request_bytes("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}"})

        def kept() -> tuple[int, int]:
            info: Any = fakes.redis.command("INFO", "clients")
            return psutil.Process().num_fds(), info["connected_clients"]

        assert (await send(address, raw)).status == 200
        await until("the connection to end", lambda: not http.connections)
        before = kept()
        for turns in (0, 10, 100, 1000):
            # With a slow Redis each request needs its own connection. Some clients stay.
            async with contextlib.AsyncExitStack() as stack:
                with fakes.redis.stopped():
                    staying = [asyncio.create_task(send(address, raw)) for _ in range(30)]
                    for _ in range(30):
                        _, writer = await stack.enter_async_context(connected(address))
                        writer.write(raw)
                    await loop_turns(turns)
                assert {reply.status for reply in await asyncio.gather(*staying)} == {200}
            await until("all connections to end", lambda: not http.connections)
            await fakes.settled()
            await until("few connections", lambda: max(map(sub, kept(), before)) <= 3 * 4)
        assert (await send(address, raw)).status == 200


async def test_the_total_size_of_bodies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_call, "MAX_BODIES_BYTES", 100_000)
    async with running_fake_cluster("abc") as fakes, contextlib.AsyncExitStack() as stack:
        address = fakes.gateway.http_address
        head = request_bytes("POST", "/v1/completions", b"", {"Content-Length": "500000"})
        first = (await stack.enter_async_context(connected(address)))[1]
        first.write(head + b" " * 60_000)
        await until("60,000 bytes of bodies", lambda: HttpCall.bodies_bytes >= 60_000)
        reader, second = await stack.enter_async_context(connected(address))
        second.write(head + b" " * 60_000)
        assert (await asyncio.wait_for(reader.readline(), TIMEOUT_S)).startswith(b"HTTP/1.1 429 ")
        assert (await call(address, "/v1/completions", TEXT)).status == 200
        await stack.aclose()
        await until("no body to be read any more", lambda: not HttpCall.bodies_bytes)
        await fakes.settled()


async def test_unread_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.gateway.gateway.MAX_WAITING_BYTES", 100_000)
    gate = threading.Event()
    before = TokenizerPool.run

    async def held(self: TokenizerPool, job: Callable[..., Any], *arguments: Any, **size: Any) -> Any:
        await before(self, gate.wait, TIMEOUT_S)
        return await before(self, job, *arguments, **size)

    monkeypatch.setattr(TokenizerPool, "run", held)
    async with running_fake_cluster("abc") as fakes:
        address, core = fakes.gateway.http_address, fakes.gateway.gateway
        large = {"prompt": "x" * 60_000}
        first = asyncio.create_task(call(address, "/v1/completions", large))
        try:
            await until("a body that waits", lambda: core._waiting_bytes.total() >= 60_000)
            refused = await call(address, "/v1/completions", large)
            assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
            assert "wait to be read" in refused.error["message"]
        finally:
            gate.set()
        assert (await first).status == 400, "it is longer than the model takes"
        assert not core._waiting_bytes
        assert (await call(address, "/v1/completions", TEXT)).status == 200
        await fakes.settled()
