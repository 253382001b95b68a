"""How clients connect: TLS, keys, retries, idle streams, sizes, and the content of errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from lab.testbed.conditions import WITHIN_S, result_of, until
from lab.testbed.ports import free_port
from pillion import (
    AsyncClient,
    Client,
    ConfigError,
    InvalidRequest,
    Overloaded,
    PillionError,
    QuotaViolation,
    Unauthenticated,
    Unavailable,
)
from pillion.client import connection
from pillion.client.connection import RETRY_ATTEMPTS, connect, service_config
from pillion.net import rpc
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.fake_components import running_fake_cluster
from tests.support.processes import started

# Real time, because gRPC's own clock sends the pings: six of them where the machine is not busy, one more than a server
# with its defaults allows.
IDLE_S = 8.0
CONFIG = """
[req]
distinguished_name = name
[name]
[server]
subjectAltName = IP:127.0.0.1
[client]
extendedKeyUsage = clientAuth
"""


class Scripted(gateway_pb2_grpc.GatewayServicer):
    """Raises ``errors``, one per call, each after ``before`` messages; then answers with ``count`` messages."""

    def __init__(
        self, *errors: Exception, before: int = 0, count: int = 1, pause_s: float = 0.0, text: str = "x"
    ) -> None:
        self.errors = list(errors)
        self.before, self.count, self.pause_s, self.text = before, count, pause_s, text
        self.calls: list[dict[str, Any]] = []

    def _called(self, context: Any) -> None:
        self.calls.append(dict(context.invocation_metadata()))

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[gateway_pb2.GenerateResponse]:  # noqa: N802
        self._called(context)
        for n in range(self.before if self.errors else self.count):
            await asyncio.sleep(self.pause_s if n else 0)
            yield gateway_pb2.GenerateResponse(text=self.text)
        if self.errors:
            raise self.errors.pop(0)

    async def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:  # noqa: N802
        self._called(context)
        if self.errors:
            raise self.errors.pop(0)
        return gateway_pb2.ListModelsResponse()


@contextlib.asynccontextmanager
async def serving(servicer: Any, listen: str = "127.0.0.1:0", **options: Any) -> AsyncIterator[str]:
    add = gateway_pb2_grpc.add_GatewayServicer_to_server
    server = await rpc.start_server(listen, [("pillion.v1.Gateway", lambda s: add(servicer, s))], **options)
    try:
        yield server.address
    finally:
        await server.stop(0)


async def texts(client: AsyncClient, **options: Any) -> list[str]:
    return [delta.text async for delta in client.generate("x", **options)]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("certs")
    (folder / "config").write_text(CONFIG)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-config", "config")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test ca", "-days", "2")
    for name in ("server", "client"):
        openssl("req", "-new", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        issue = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            *issue,
            "-out",
            f"{name}.pem",
            "-extfile",
            "config",
            "-extensions",
            name,
        )
    return folder


def server_credentials(certs: pathlib.Path, *, mutual: bool) -> grpc.ServerCredentials:
    pair = [((certs / "server.key").read_bytes(), (certs / "server.pem").read_bytes())]
    ca = (certs / "ca.pem").read_bytes() if mutual else None
    return grpc.ssl_server_credentials(pair, ca, require_client_auth=mutual)


async def test_tls_by_scheme_and_by_option(certs: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRY_FIRST_BACKOFF_S", 0.01)
    servicer = Scripted()
    async with serving(servicer, credentials=server_credentials(certs, mutual=False)) as address:
        for target, options in [
            (f"grpcs://{address}", {"ca": certs / "ca.pem"}),
            (address, {"tls": True, "ca": (certs / "ca.pem").read_bytes()}),
            (address, {"ca": str(certs / "ca.pem")}),
        ]:
            async with AsyncClient(target, **options) as client:
                assert await texts(client) == ["x"]
        with Client(f"grpcs://{address}", ca=certs / "ca.pem") as blocking:
            assert await asyncio.to_thread(lambda: [d.text for d in blocking.generate("x")]) == ["x"]
        # The system's authorities do not know it, and plain text is not understood.
        for options in ({"tls": True}, {}):
            async with AsyncClient(address, **options) as stranger:
                with pytest.raises(Unavailable):
                    await texts(stranger, timeout_s=WITHIN_S)
        assert len(servicer.calls) == 4


async def test_mutual_tls(certs: pathlib.Path) -> None:
    async with serving(Scripted(), credentials=server_credentials(certs, mutual=True)) as address:
        own = {"cert": certs / "client.pem", "key": certs / "client.key"}
        async with AsyncClient(f"grpcs://{address}", ca=certs / "ca.pem", **own) as client:
            assert await texts(client) == ["x"]
        async with AsyncClient(f"grpcs://{address}", ca=certs / "ca.pem") as nobody:
            with pytest.raises(Unavailable):
                await texts(nobody, timeout_s=WITHIN_S)


@pytest.mark.parametrize(
    ("target", "options", "complaint"),
    [
        ("grpc://h:1", {"tls": True}, "grpc://h:1 is plain text"),
        ("h:1", {"cert": b"x"}, "cert and key belong together"),
        ("h:1", {"ca": "/nowhere/ca.pem"}, "ca: /nowhere/ca.pem: No such file"),
        ("h:1", {"api_key": "two\nlines"}, "printable ASCII"),
        ("h:1", {"api_key": " spaced"}, "printable ASCII"),
    ],
)
def test_invalid_option_combinations_are_rejected(target: str, options: dict, complaint: str) -> None:
    for cls in (Client, AsyncClient):
        with pytest.raises(ConfigError, match=complaint):
            cls(target, **options)


def test_url_schemes_are_stripped_from_the_target() -> None:
    assert (connect("grpc://h:1").targets, connect("grpcs://h:1").targets) == (("h:1",), ("h:1",))
    assert connect("grpc://h:1").credentials is None
    assert connect("grpcs://h:1").credentials is not None
    assert connect("unix:/x").targets == ("unix:/x",)
    assert connect("dns:///h:1").targets == ("dns:///h:1",)


async def test_every_call_sends_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    servicer = Scripted()
    async with serving(servicer) as address:
        for key, variable, expected in [("k-1", "k-2", "Bearer k-1"), ("", "k-2", "Bearer k-2"), ("", "", None)]:
            monkeypatch.setenv("PILLION_API_KEY", variable)
            async with AsyncClient(address, api_key=key) as client:
                await texts(client)
                await client.models()
            assert [call.get("authorization") for call in servicer.calls[-2:]] == [expected] * 2


async def test_error_details_reach_the_client() -> None:
    quotas = (QuotaViolation("tokens_per_minute", "3 over"),)
    errors = [Overloaded("full", 1500, quotas), Unauthenticated("no key")]
    async with serving(Scripted(*errors)) as address:
        with Client(address) as client:

            def fail() -> PillionError:
                with pytest.raises(PillionError) as caught:
                    list(client.generate("x"))
                return caught.value

            full = await asyncio.to_thread(fail)
            assert isinstance(full, Overloaded)
            assert (full.message, full.retry_after_ms, full.quotas) == ("full", 1500, quotas)
            assert isinstance(await asyncio.to_thread(fail), Unauthenticated)


async def test_an_overload_error_names_the_limit() -> None:
    async with running_fake_cluster("The answer.", max_inflight_requests=1) as fakes:
        fakes.decode.gate.clear()
        first = asyncio.create_task(texts(fakes.client))
        await until("the first request", lambda: fakes.gateway.gateway.active_requests)
        with pytest.raises(Overloaded) as caught:
            await texts(fakes.client)
        assert [quota.subject for quota in caught.value.quotas] == ["max_inflight_requests"]
        assert caught.value.retry_after_ms == 1000
        fakes.decode.gate.set()
        assert "".join(await first) == "The answer."
        with pytest.raises(InvalidRequest) as wrong:
            await texts(fakes.client, top_p=7)
        assert [violation.field for violation in wrong.value.violations] == ["sampling.top_p"]


async def test_retryable_errors_are_retried() -> None:
    soon = [Unavailable("stopping", 1) for _ in range(RETRY_ATTEMPTS - 1)]
    servicer = Scripted(*soon)
    async with serving(servicer) as address, AsyncClient(address) as client:
        assert await texts(client) == ["x"]
        assert len(servicer.calls) == RETRY_ATTEMPTS
        servicer.errors = list(soon)
        assert await client.models() == []
        assert len(servicer.calls) == 2 * RETRY_ATTEMPTS


DEAF = """
import asyncio, sys, grpc, grpc.aio
from pillion.v1 import gateway_pb2_grpc

class Deaf(gateway_pb2_grpc.GatewayServicer):
    async def Generate(self, request, context):
        print("called", flush=True)
        await asyncio.sleep(60)
        yield

async def main():
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServicer_to_server(Deaf(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination(60)

asyncio.run(main())
"""


def test_a_gateway_killed_before_the_first_message_ends_the_stream() -> None:
    with started([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with Client(f"127.0.0.1:{port}", resume_timeout_s=0.1) as client, ThreadPoolExecutor(1) as threads:
            asked = threads.submit(lambda: list(client.generate("x")))
            assert process.stdout.readline() == "called\n"
            process.kill()
            with pytest.raises(Unavailable):
                result_of("the call", asked)


PATIENT = """
import sys
from pillion import Client
from pillion.client.resume import StreamProgress

refused, delay_s = [], StreamProgress.delay_s

def counted(*words):
    refused.append(words)
    print("refused", flush=True)
    return delay_s(*words)

StreamProgress.delay_s = counted
with Client(sys.argv[1], connect_timeout_s=float(sys.argv[2])) as client:
    print("answered", [delta.text for delta in client.generate("x")], flush=True)
"""


async def test_a_blocking_client_connects_while_it_waits_for_its_gateway() -> None:
    """Without the 5 s poll by which gRPC would hide that nobody drives the connection: on a busy machine the client
    misses that poll for a minute."""
    address, refused = f"127.0.0.1:{free_port()}", 0
    command = [sys.executable, "-c", PATIENT, address, str(WITHIN_S / 2)]
    environ = {**os.environ, "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "0"}
    with started(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        while refused <= RETRY_ATTEMPTS:
            assert await asyncio.to_thread(process.stdout.readline) == "refused\n"
            refused += 1
        async with serving(Scripted(), address):
            said = await asyncio.to_thread(process.stdout.read)
        assert said.splitlines()[-1:] == ["answered ['x']"]


@pytest.mark.parametrize(
    ("error", "before"),
    [(Unavailable("looked for long"), 0), (Overloaded("full", 1), 0), (Unavailable("in the middle", 1), 1)],
    ids=["the gateway has tried", "load", "something was received"],
)
async def test_other_errors_are_not_retried(error: PillionError, before: int) -> None:
    servicer = Scripted(error, error, before=before)
    async with serving(servicer) as address, AsyncClient(address) as client:
        stream = client.generate("x")
        assert [(await anext(stream)).text for _ in range(before)] == ["x"] * before
        with pytest.raises(type(error), match=error.message):
            await anext(stream)
        assert len(servicer.calls) == 1


async def test_a_client_reconnects_to_a_restarted_server() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with serving(Scripted(), address):
        client = AsyncClient(address, connect_timeout_s=0)
        assert await texts(client) == ["x"]
    with pytest.raises(Unavailable):
        await texts(client)

    async def answered() -> bool:
        with contextlib.suppress(Unavailable):
            assert await texts(client) == ["x"]
            return True
        return False

    async with serving(Scripted(), address):
        await until("an answer", answered)
        await client.close()


def test_the_service_config_names_real_methods() -> None:
    (entry,) = json.loads(service_config())["methodConfig"]
    methods = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods_by_name
    assert {name["method"] for name in entry["name"]} <= set(methods)
    assert entry["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]


def test_servers_allow_the_pings_that_clients_send() -> None:
    client, server = dict(rpc.client_options()), dict(rpc.server_options(rpc.MAX_MESSAGE_BYTES, 1))
    assert client["grpc.keepalive_time_ms"] > server["grpc.http2.min_ping_interval_without_data_ms"]
    for options in (client, server):
        assert options["grpc.keepalive_permit_without_calls"] == 1
        assert options["grpc.http2.max_pings_without_data"] == 0


@pytest.mark.long
async def test_an_idle_stream_survives_its_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ping per second, gRPC's maximum, and no data: a server with gRPC's default of five minutes ends it at the
    fifth."""
    monkeypatch.setattr(rpc, "KEEPALIVE_TIME_MS", 100)

    started = asyncio.Event()

    async def idle(allowed_ms: int, pause_s: float) -> list[str]:
        monkeypatch.setattr(rpc, "MIN_PING_INTERVAL_MS", allowed_ms)
        async with serving(Scripted(count=2, pause_s=pause_s)) as address, AsyncClient(address) as client:
            started.set()
            return await texts(client)

    allowed = asyncio.create_task(idle(50, IDLE_S))
    await started.wait()
    forbidden = asyncio.create_task(idle(300_000, 2 * WITHIN_S))
    assert await allowed == ["x", "x"]
    with pytest.raises(Unavailable, match="Too many pings"):
        await forbidden


class InterruptedCall:
    """A blocking call interrupted by Ctrl-C while it holds its lock: gRPC then sometimes leaves the lock taken."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        next(self._call)
        self._call._state.condition.acquire()
        raise KeyboardInterrupt

    def cancel(self) -> None:
        self._call.cancel()


async def test_a_blocking_client_works_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Client._call

    def interrupted(client: Client, *words: Any) -> tuple[int, Any]:
        number, call = begin(client, *words)
        return number, InterruptedCall(call)

    def talk(target: str) -> list[str]:
        with Client(target) as client:
            with monkeypatch.context() as patched:
                patched.setattr(Client, "_call", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    list(client.generate("x"))
            return [delta.text for delta in client.generate("x", timeout_s=WITHIN_S)]

    async with serving(Scripted(count=2)) as target:
        # The thread of the first channel waits for the lock until the thread here ends, which does not let go of it.
        assert await asyncio.to_thread(talk, target) == ["x", "x"]


async def test_message_size_limits_are_configurable() -> None:
    big = 5 * 2**20
    async with serving(Scripted(text="y" * big), max_message_bytes=2**20) as address, AsyncClient(address) as client:
        with pytest.raises(Overloaded, match="larger than max"):
            _ = [delta async for delta in client.generate("x" * 2**21)]
        with pytest.raises(Overloaded, match="larger than max"):
            await texts(client)
    async with serving(Scripted(text="y" * big)) as address:
        async with AsyncClient(address, max_message_bytes=2**20) as client:
            with pytest.raises(Overloaded, match="larger than max"):
                await texts(client)
        async with AsyncClient(address) as client:
            assert await texts(client) == ["y" * big]
