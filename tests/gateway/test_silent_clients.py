"""Thousands of silent connections at both ports of a gateway in its own process: other clients are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import resource
import shutil
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lab.testbed.certs import make_certs
from lab.testbed.conditions import WITHIN_S, until
from pillion import AsyncClient, PillionError
from pillion.net.descriptors import MAX_CONNECTIONS
from tests.support.http import request_bytes

SERVER = """
import asyncio, json, resource, sys
limit, flags = int(sys.argv[1]), json.loads(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from pillion.gateway.http_api import http_connection
from pillion.net import rpc
# No connection is cut for another reason.
rpc.HANDSHAKE_TIMEOUT_MS = rpc.KEEPALIVE_TIME_MS = 600_000
asyncio.constants.SSL_HANDSHAKE_TIMEOUT = http_connection.HEAD_TIMEOUT_S = 600
from tests.support.fake_components import running_fake_cluster
async def main():
    async with running_fake_cluster("abc", **flags) as fakes:
        print(fakes.gateway.grpc_address, fakes.gateway.http_address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
asyncio.run(main())
"""
MAX_DESCRIPTORS = 2 * MAX_CONNECTIONS
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Empty SETTINGS, and the ACK of the server's.
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)) + bytes((0, 0, 0, 4, 1, 0, 0, 0, 0))
# Bytes sent before the silence: none, half of HTTP/2's preface, the whole handshake, the first bytes of a TLS record.
SILENT, HALF, SETTLED, HELLO = b"", PREFACE[:10], PREFACE + SETTINGS, b"\x16\x03\x01\x02\x00\x01"


@pytest.fixture(autouse=True)
def _many_descriptors() -> Iterator[None]:
    """Raise the attacker's own fd limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < MAX_DESCRIPTORS:
        pytest.skip(f"the hard limit of open files is below {MAX_DESCRIPTORS}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], MAX_DESCRIPTORS), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def rarely(sent: bytes) -> Any:
    return pytest.param(sent, marks=pytest.mark.long)


@dataclass(frozen=True)
class GatewayPorts:
    grpc: str
    http: str
    ca: pathlib.Path | None = None


@contextlib.asynccontextmanager
async def running_gateway(limit: int, folder: pathlib.Path | None = None) -> AsyncIterator[GatewayPorts]:
    """Start a gateway with this fd limit, and with TLS if there is a certificate folder."""
    secured = {} if folder is None else {"tls_cert": f"{folder}/server.pem", "tls_key": f"{folder}/server.key"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(limit), json.dumps(secured), **pipes
    )
    assert server.stdout is not None
    said = (await server.stdout.readline()).decode().split()
    if not said:
        raise AssertionError((await server.communicate())[1].decode()[-3000:])
    try:
        yield GatewayPorts(said[0], said[1], None if folder is None else folder / "ca.pem")
    finally:
        _, errors = await server.communicate(b"end\n")
    assert server.returncode == 0, errors.decode()[-3000:]
    assert b"Traceback" not in errors


@contextlib.contextmanager
def attack(address: str, count: int, sent: bytes) -> Iterator[None]:
    """Open ``count`` connections that send this and stay silent."""
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            with contextlib.suppress(OSError):
                one = stack.enter_context(socket.create_connection((host, int(port)), timeout=WITHIN_S))
                one.sendall(sent)
        yield


async def served(ports: GatewayPorts) -> None:
    """Wait until new clients of both ports are answered: gRPC's need Redis, the node and the workers."""
    secured = {} if ports.ca is None else {"ca": ports.ca}
    target = ports.grpc if ports.ca is None else f"grpcs://{ports.grpc}"

    async def generated() -> bool:
        with contextlib.suppress(PillionError):
            async with AsyncClient(target, **secured) as client:
                return "".join([delta.text async for delta in client.generate("hello", timeout_s=5)]) == "abc"
        return False

    context = None if ports.ca is None else ssl.create_default_context(cafile=str(ports.ca))
    host, port = ports.http.split(":")

    async def healthy() -> bool:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
                writer.write(request_bytes("GET", "/health"))
                return b" 200 " in await reader.readline()
        return False

    await until("an answer over gRPC", generated)
    await until("an answer over HTTP", healthy)


@pytest.mark.parametrize("sent", [SETTLED, rarely(SILENT), rarely(HALF)], ids=["settled", "silent", "half"])
async def test_silent_connections_leave_grpc_slots_for_others(sent: bytes) -> None:
    async with running_gateway(MAX_DESCRIPTORS) as ports:
        with attack(ports.grpc, MAX_CONNECTIONS, sent):
            await served(ports)


@pytest.mark.parametrize("sent", [SILENT, rarely(SETTLED)], ids=["silent", "settled"])
async def test_silent_connections_leave_descriptors_for_others(sent: bytes) -> None:
    """Twice the process's fd limit, at either port."""
    async with running_gateway(1024) as ports:
        for address in (ports.grpc, ports.http):
            with attack(address, 2400, sent):
                await served(ports)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
@pytest.mark.parametrize("sent", [HELLO, rarely(SILENT)], ids=["hello", "silent"])
async def test_unfinished_tls_handshakes_leave_slots_for_others(sent: bytes, tmp_path: pathlib.Path) -> None:
    make_certs(tmp_path / "certs")
    async with running_gateway(1024, tmp_path / "certs") as ports:
        for address in (ports.grpc, ports.http):
            with attack(address, 2400, sent):
                await served(ports)
