"""HTTP connections: segments of answers, and clients of other protocols."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys

import pytest

from lab.testbed.conditions import loop_turns, until
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call, connected, data_segments, request_bytes

TEXT = {"model": "toy", "prompt": "hi"}


@pytest.mark.parametrize("path", ["/version", "/v1/completions", "/nowhere"])
async def test_an_answer_is_one_segment(path: str) -> None:
    """Twenty answers on one connection. A second segment would wait for the ACK of the first, which a client's kernel
    delays by 40 ms (Nagle)."""
    body = json.dumps(TEXT).encode() if path == "/v1/completions" else None
    asked = request_bytes("GET" if body is None else "POST", path, body, {"Connection": "keep-alive"})
    async with running_fake_cluster("abc") as fakes:
        host, _, port = fakes.gateway.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        client = writer.get_extra_info("socket")
        for answers in range(1, 21):
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            assert data_segments(client) == answers
        (connection,) = fakes.gateway.http.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await fakes.settled()


# Java's client offers HTTP/2 with the first request of each connection.
UPGRADE = {
    "Connection": "Upgrade, HTTP2-Settings",
    "Upgrade": "h2c",
    "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [0, 20, 400], ids=["one piece", "cut in the head", "cut in the body"])
async def test_a_client_that_offers_http2_is_answered_in_http1(cut: int, stream: bool) -> None:
    body = TEXT | {"prompt": "What is the capital of France?", "stream": stream, "user": "u" * 300}
    asked = request_bytes("POST", "/v1/completions", body, UPGRADE)
    async with running_fake_cluster("abc") as fakes:
        async with connected(fakes.gateway.http_address) as (reader, writer):
            writer.write(asked[:cut])
            await loop_turns(20)
            writer.write(asked[cut:])
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"data: [DONE]" if stream else b'"usage"')
            writer.write(request_bytes("GET", "/version"))
            assert b"HTTP/1.1 200 " in await reader.read()
        for where in (fakes.prefill, fakes.decode):
            where.gate.clear()
            async with connected(fakes.gateway.http_address) as (_, writer):
                writer.write(asked[:cut])
                await loop_turns(20)
                writer.write(asked[cut:])
                await until("the request to be under way", lambda: fakes.gateway.gateway.active_requests)
            await fakes.settled()
            where.gate.set()


CONTINUE = b"HTTP/1.1 100 \r\n\r\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("requests", [1, 2])
async def test_a_half_closed_client_gets_its_answers(stream: bool, requests: int) -> None:
    """Half-closed by the client, as `nc -N` does, amid the prompt; the second of two requests came with the first."""
    asked = request_bytes("POST", "/v1/completions", TEXT | {"stream": stream}, {"Connection": "keep-alive"})
    async with running_fake_cluster("abc") as fakes:
        fakes.decode.gate.clear()
        async with connected(fakes.gateway.http_address) as (reader, writer):
            writer.write(asked * requests)
            await until("the request to be under way", lambda: fakes.decode.submits)
            writer.write_eof()
            assert await reader.readexactly(len(CONTINUE)) == CONTINUE
            fakes.decode.gate.set()
            answers = await reader.read()
            assert answers.replace(CONTINUE, b"").startswith(b"HTTP/1.1 200 ")
            assert answers.count(b"HTTP/1.1 200 ") == requests
            assert answers.count(b"data: [DONE]" if stream else b'"usage"') == requests
        await fakes.settled()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_fully_closed_connection_cancels_its_stream(begun: bool) -> None:
    """Before any output, and amid a stream, whose next write the client's kernel resets."""
    async with running_fake_cluster("x" * 200) as fakes:
        fakes.decode.hold_after = 3 if begun else 0
        if not begun:
            fakes.decode.gate.clear()
        async with connected(fakes.gateway.http_address) as (reader, writer):
            writer.write(request_bytes("POST", "/v1/completions", TEXT | {"stream": True, "max_tokens": 150}))
            await until("the request to be under way", lambda: fakes.decode.submits)
            if begun:
                await reader.readuntil(b'"text":"x')
            writer.write_eof()
            if not begun:
                assert await reader.readexactly(len(CONTINUE)) == CONTINUE
            assert fakes.gateway.gateway.active_requests == 1
        if begun:
            fakes.decode.go_on()
        await until("the stream to be cancelled", lambda: len(fakes.decode.cancelled) == 1)
        await fakes.settled()
        fakes.decode.go_on()


async def test_the_keep_alive_flag_limits_idle_connections() -> None:
    async with running_fake_cluster(keep_alive_s=1) as fakes:
        async with connected(fakes.gateway.http_address) as (reader, writer):
            writer.write(request_bytes("GET", "/version", headers={"Connection": "keep-alive"}))
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
            assert await reader.read() == b""
        assert not fakes.gateway.http.connections


SERVER = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
from tests.support.fake_components import running_fake_cluster
async def main():
    async with running_fake_cluster("x" * 200) as fakes:
        fakes.decode.hold_after = 3
        print(fakes.gateway.http_address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        fakes.decode.go_on()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
asyncio.run(main())
"""


async def test_idle_connections_leave_descriptors_for_others() -> None:
    """Open twice the fd limit; newcomers and streams in flight are still served."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, **pipes)
    assert server.stdin is not None
    assert server.stdout is not None
    async with contextlib.AsyncExitStack() as stack:
        address = (await server.stdout.readline()).decode().strip()
        reader, writer = await stack.enter_async_context(connected(address))
        body = TEXT | {"stream": True, "max_tokens": 150, "ignore_eos": True}
        writer.write(request_bytes("POST", "/v1/completions", body))
        await reader.readuntil(b'"text":"x')
        for _ in range(1024):
            with contextlib.suppress(ConnectionError):
                await stack.enter_async_context(connected(address))
        assert (await call(address, "/health")).status == 200
        server.stdin.write(b"go on\n")
        assert b"data: [DONE]" in await reader.read()
    _, said = await server.communicate(b"end\n")
    assert server.returncode == 0, said.decode()
    assert b"Traceback" not in said
    assert len(said) < 10_000
