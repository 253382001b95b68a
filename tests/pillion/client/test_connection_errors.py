"""What a client says about a connection that fails, against real servers of each kind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import grpc
import pytest
import uvicorn

from lab.testbed.certs import make_certs
from lab.testbed.otlp import collecting
from lab.testbed.ports import free_port
from pillion import AsyncClient, Client, ConfigError, DeadlineExceeded, PillionError, Unauthenticated, Unavailable
from pillion.client import connection
from pillion.client.connection import connect
from pillion.loadgen.openai_target import OpenAITarget
from pillion.loadgen.target import TargetError
from tests.pillion.client.test_connection import Scripted, server_credentials, serving


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails is retried at once."""
    monkeypatch.setattr(connection, "RETRY_FIRST_BACKOFF_S", 0.01)


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certs(folder)
    return folder


@contextlib.asynccontextmanager
async def http_server(certs: pathlib.Path | None = None):
    """An HTTP port like a gateway's, over TLS if there are certificates."""

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    files = {"ssl_certfile": certs / "server.pem", "ssl_keyfile": certs / "server.key"} if certs else {}
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", **files))
    listening = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def complaint(target: str, **options: object) -> str:
    async with AsyncClient(target, **options) as client:
        with pytest.raises(PillionError) as caught:
            await client.models()
    assert isinstance(caught.value, Unavailable), caught.value
    assert str(caught.value) == caught.value.message
    return caught.value.message


@needs_openssl
async def test_every_connection_error_suggests_a_fix(made: pathlib.Path) -> None:
    ca, nobody, unix = {"ca": made / "ca.pem"}, f"127.0.0.1:{free_port()}", f"unix:{made}/no.sock"
    pair = [((made / "internal.key").read_bytes(), (made / "internal.pem").read_bytes())]
    async with contextlib.AsyncExitStack() as stack:
        plain = await stack.enter_async_context(serving(Scripted()))
        encrypted = await stack.enter_async_context(
            serving(Scripted(), credentials=server_credentials(made, mutual=False))
        )
        mutual = await stack.enter_async_context(serving(Scripted(), credentials=server_credentials(made, mutual=True)))
        renamed = await stack.enter_async_context(serving(Scripted(), credentials=grpc.ssl_server_credentials(pair)))
        http, https = [await stack.enter_async_context(http_server(certs)) for certs in (None, made)]
        missed = {
            nobody: ({}, f"Connection refused (111); does a gateway listen at {nobody}"),
            unix: ({}, f"No such file or directory (2); does a gateway listen at {unix}"),
            "no.such.host.invalid:1": ({}, "DNS resolution failed for no.such.host.invalid:1"),
            f"grpcs://{plain}": (ca, "or omit grpcs:// if the gateway has no TLS"),
            encrypted: ({}, "This client does not use TLS: write grpcs://"),
            f"grpcs://{encrypted}": ({}, "unable to get local issuer"),
            f"grpcs://{mutual}": (ca, "This client uses TLS: check --ca, --cert and --key"),
            f"grpcs://{renamed}": ({"ca": made / "internal-ca.pem"}, "Peer name 127.0.0.1 is not in peer certificate"),
            http: ({}, "is this its gRPC port (50051"),
            f"grpcs://{http}": (ca, "is this its gRPC port (50051"),
            https: ({}, "is this its gRPC port (50051"),
            f"grpcs://{https}": (ca, "missing selected ALPN property"),
        }
        said = await asyncio.gather(*(complaint(target, **options) for target, (options, _) in missed.items()))
        for text, (_, expected) in zip(said, missed.values(), strict=True):
            assert expected in text

        # The blocking client, a stream, and two addresses of which the last one is named.
        twice = Client(f"{nobody},{nobody}", connect_timeout_s=0)
        with twice as blocking, pytest.raises(Unavailable, match="does a gateway listen at"):
            await asyncio.to_thread(lambda: list(blocking.generate("x")))

        # Clients of HTTP that meet a gRPC port, and the wrong kind of HTTP.
        for url, expected in {
            f"http://{plain}": "does it speak http",
            f"https://{encrypted}": "does it speak https",
            f"http://{https}": "does it speak http",
            f"https://{http}": "does it speak https",
            f"http://{nobody}": "Connect call failed.*is port .* HTTP port .a gateway's is 8000",
        }.items():
            target = OpenAITarget("", False, 0.0, target=url, ca=str(made / "ca.pem"))
            with pytest.raises(TargetError, match=expected):
                await target.describe()
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "pillion", "health", http], capture_output=True, text=True
        )
        assert (done.returncode, f"{http} is not serving; does a gateway listen at {http}" in done.stdout) == (1, True)


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        (
            "http://h:8000",
            {},
            "is an HTTP address, and this client uses gRPC: write h:8000, with",
        ),
        ("https://h:8000/v1", {}, "write grpcs://h:8000, with the gateway's gRPC port"),
        ("grpcs://h:1/v1", {}, "an address is HOST:PORT, without a path"),
        ("h:1", {"ca": b"x"}, "ca: these bytes are no PEM"),
        ("h:1", {"ca": __file__}, "test_connection_errors.py is no PEM"),
    ],
)
def test_invalid_addresses_and_files_are_rejected_at_once(target: str, options: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(target, **options)
    assert expected in caught.value.message


async def test_a_silent_process_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with AsyncClient(f"127.0.0.1:{silent.getsockname()[1]}") as client:
            with pytest.raises(DeadlineExceeded):
                _ = [delta async for delta in client.generate("x", timeout_s=0.2)]


async def test_errors_of_missing_and_unknown_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PILLION_API_KEY", raising=False)
    async with serving(Scripted(*[Unauthenticated("no") for _ in range(3)])) as address:
        for key, expected in [("", "none was sent: set PILLION_API_KEY in the environment"), ("k", "is unknown")]:
            async with AsyncClient(address, api_key=key) as client:
                with pytest.raises(Unauthenticated, match=expected):
                    await client.models()


async def test_a_connection_error_names_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with serving(Scripted()) as address:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
        assert "gRPC uses the proxy of http_proxy unless no_proxy has the host" in await complaint(address)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with AsyncClient(address) as client:
            assert await client.models() == []


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


async def test_spans_are_flushed_at_exit_and_a_dead_receiver_does_not_block() -> None:
    def generate(address: str, variables: dict[str, str]) -> int:
        command = [sys.executable, "-m", "pillion", "generate", "Once", "--target", address]
        environ = {**os.environ, "OTEL_BSP_SCHEDULE_DELAY": "3600000", **variables}
        return subprocess.run(command, env=environ, capture_output=True, timeout=200, check=False).returncode

    async with serving(Scripted()) as address:
        with collecting() as receiver:
            quiet = {**receiver.environ(delay_ms=0), "OTEL_TRACES_EXPORTER": "none"}
            dead = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
            ways = (receiver.environ(delay_ms=0), quiet, dead)
            done = await asyncio.gather(*(asyncio.to_thread(generate, address, variables) for variables in ways))
            assert done == [0] * 3
            ((service, span),) = receiver.spans
            assert (service, span.name) == ("pillion-client", "text_completion")
