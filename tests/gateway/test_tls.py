"""TLS at both public ports and between components, with certificate rotation at runtime."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pathlib
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from lab.testbed.certs import make_certs
from lab.testbed.conditions import WITHIN_S, loop_turns, until
from pillion import AsyncClient, ConfigError, Unavailable
from pillion.client import connection
from pillion.config import GatewayFlags
from pillion.gateway.assemble import start_gateway
from pillion.gateway.gateway_server import GatewayServer
from pillion.kvstore.client.node_client import NodeClient
from pillion.net import rpc, tls
from pillion.net.tls import Identity, TlsFiles
from pillion.supervisor.probes import health_behind, is_serving
from pillion.v1 import kvnode_pb2_grpc
from tests.support.fake_components import BLOCK, FakeCluster, FakeKVNode, running_fake_cluster, toy_model

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the back-off of refused clients."""
    monkeypatch.setattr(connection, "RETRY_FIRST_BACKOFF_S", 0.01)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """Create two sets of certificates."""
    folder = tmp_path_factory.mktemp("certs")
    for name in ("one", "two"):
        make_certs(folder / name)
    return folder / "one", folder / "two"


def files_in(folder: pathlib.Path, name: str, ca: str = "") -> TlsFiles:
    return TlsFiles(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / f"{ca}.pem") if ca else "")


def put(source: pathlib.Path, target: pathlib.Path, *names: str) -> None:
    """Write new files under the old names, as an update of a secret does."""
    for name in names:
        shutil.copy(source / name, target / f"{name}.new")
        os.replace(target / f"{name}.new", target / name)


async def shown(address: str) -> str:
    """Return the certificate that a server presents."""
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


@contextlib.asynccontextmanager
async def edge(fakes: FakeCluster, **flags: Any) -> AsyncIterator[GatewayServer]:
    """Run a second gateway before the line's components."""
    options = {
        "redis_url": fakes.redis.url,
        "block_size": BLOCK,
        "chunk_size": 8,
        "http_port": 0,
        "grpc_port": 0,
    } | flags
    component = await start_gateway(GatewayFlags(**options), prepared=toy_model(fakes.folder / "again"))
    try:
        yield component
    finally:
        await component.stop(0)


def edge_flags(folder: pathlib.Path, **more: str) -> dict[str, str]:
    return {"tls_cert": str(folder / "server.pem"), "tls_key": str(folder / "server.key"), **more}


async def get(address: str, ca: pathlib.Path, own: TlsFiles | None = None) -> bytes:
    """Return the status line of /health, with all checks of a client."""
    context = ssl.create_default_context(cafile=str(ca))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return await reader.readline()
    finally:
        writer.close()


async def let_in(address: str, ca: pathlib.Path, own: TlsFiles | None) -> bool:
    """A server requests a certificate after the client's part of the handshake."""
    try:
        return b" 200 " in await get(address, ca, own)
    except (ssl.SSLError, ConnectionError):
        return False


async def test_both_public_ports_use_tls(sets: tuple[pathlib.Path, pathlib.Path]) -> None:
    one, two = sets
    async with running_fake_cluster("abc") as fakes, edge(fakes, **edge_flags(one)) as component:
        async with AsyncClient(f"grpcs://{component.grpc_address}", ca=one / "ca.pem") as client:
            await until("a model to be served", client.models)
            assert "".join([delta.text async for delta in client.generate("x")]) == "abc"
        assert b" 200 " in await get(component.http_address, one / "ca.pem")
        for options in ({}, {"ca": two / "ca.pem"}):
            async with AsyncClient(component.grpc_address, **options) as stranger:
                with pytest.raises(Unavailable):
                    await stranger.models()
        with pytest.raises(ssl.SSLCertVerificationError):
            await get(component.http_address, two / "ca.pem")
        public = connection.connect(f"grpcs://{component.grpc_address}", ca=one / "ca.pem")
        assert await health_behind(public.open_async())
        assert not await is_serving(component.grpc_address)


async def test_client_certificates_can_be_required(
    sets: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    one, two = sets
    probe = f"unix:{tmp_path}/probe.sock"
    flags = edge_flags(one, tls_ca=str(one / "ca.pem"), probe_listen=probe)
    async with running_fake_cluster("abc") as fakes, edge(fakes, **flags) as component:
        target = f"grpcs://{component.grpc_address}"
        own = {"cert": one / "client.pem", "key": one / "client.key"}
        async with AsyncClient(target, ca=one / "ca.pem", **own) as client:
            await until("a model to be served", client.models)
        assert b" 200 " in await get(component.http_address, one / "ca.pem", files_in(one, "client"))
        other = {"cert": two / "client.pem", "key": two / "client.key"}
        for options in ({}, other):
            async with AsyncClient(target, ca=one / "ca.pem", **options) as stranger:
                with pytest.raises(Unavailable):
                    await stranger.models()
        for files in (None, files_in(two, "client"), files_in(one, "internal")):
            assert not await let_in(component.http_address, one / "ca.pem", files)
        await until("the probe to say that requests are served", lambda: is_serving(probe))


async def test_certificates_are_reloaded_without_a_restart(
    sets: tuple[pathlib.Path, pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = sets
    at_once(monkeypatch)
    put(one, tmp_path, "server.pem", "server.key")
    async with running_fake_cluster("abc") as fakes, edge(fakes, **edge_flags(tmp_path)) as component:
        for address in (component.grpc_address, component.http_address):
            assert await shown(address) == (one / "server.pem").read_text()
        fakes.decode.gate.clear()
        async with AsyncClient(f"grpcs://{component.grpc_address}", ca=one / "ca.pem") as client:
            await until("a model to be served", client.models)
            asked = asyncio.create_task(anext(client.generate("x")))
            await until("a submit", lambda: fakes.decode.submits)
            # Certificate and key do not match yet.
            put(two, tmp_path, "server.pem")
            with caplog.at_level(logging.WARNING, "pillion.net.watched"):
                for address in (component.grpc_address, component.http_address):
                    assert await shown(address) == (one / "server.pem").read_text()
            assert "the previous content stays in use" in caplog.text
            put(two, tmp_path, "server.key")
            for address in (component.grpc_address, component.http_address):
                assert await shown(address) == (two / "server.pem").read_text()
            fakes.decode.gate.set()
            assert (await asked).text
        async with AsyncClient(f"grpcs://{component.grpc_address}", ca=two / "ca.pem") as client:
            assert await client.models()
        assert b" 200 " in await get(component.http_address, two / "ca.pem")


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait until the next handshake uses the changed files."""
    monkeypatch.setattr(tls.Identity.__init__, "__defaults__", (0.0,))
    monkeypatch.setattr("pillion.net.watched.AT_REST_S", -1.0)


@pytest.fixture
def identity(
    sets: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pathlib.Path]:
    """Run the components with the first set's certificate and both CAs."""
    one, two = sets
    at_once(monkeypatch)
    put(one, tmp_path, "internal.pem", "internal.key")
    both = (one / "internal-ca.pem").read_text() + (two / "internal-ca.pem").read_text()
    (tmp_path / "internal-ca.pem").write_text(both)
    rpc.use_identity(Identity(files_in(tmp_path, "internal", "internal-ca")))
    yield tmp_path
    rpc.use_identity(None)


@contextlib.asynccontextmanager
async def serving_node(node: FakeKVNode, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    add = kvnode_pb2_grpc.add_KVNodeServicer_to_server
    credentials = rpc.internal_credentials(listen)
    server = await rpc.start_server(listen, [("pillion.v1.KVNode", lambda s: add(node, s))], credentials=credentials)
    try:
        yield server.address
    finally:
        await server.stop(0)


class CertifiedNode(FakeKVNode):
    """A node that records the certificate of each ticket's caller."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: list[str] = []

    async def OpenTicket(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.callers.append(context.auth_context()["x509_pem_cert"][0].decode())
        return await super().OpenTicket(request, context)


async def test_a_replaced_ca_is_no_longer_accepted(
    sets: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even with session resumption from before."""
    one, two = sets
    at_once(monkeypatch)
    put(one, tmp_path, "server.pem", "server.key", "ca.pem")
    async with (
        running_fake_cluster("abc") as fakes,
        edge(fakes, **edge_flags(tmp_path, tls_ca=str(tmp_path / "ca.pem"))) as component,
    ):
        own = files_in(one, "client")
        for address, protocol, question in (
            (
                component.http_address,
                "http/1.1",
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
            ),
            (component.grpc_address, "h2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"),
        ):
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                put(one, tmp_path, "ca.pem")
                context = ssl.create_default_context(cafile=str(one / "ca.pem"))
                context.maximum_version = version
                context.set_alpn_protocols([protocol])
                context.load_cert_chain(own.cert, own.key)
                received, session = await asyncio.to_thread(asked_again, context, address, question, None)
                assert received or (protocol, version) == ("http/1.1", ssl.TLSVersion.TLSv1_2)
                put(two, tmp_path, "ca.pem")
                received, _ = await asyncio.to_thread(asked_again, context, address, question, session)
                assert not received, (protocol, version)
        target = f"grpcs://{component.grpc_address}"
        async with AsyncClient(target, ca=one / "ca.pem", cert=own.cert, key=own.key) as client:
            with pytest.raises(Unavailable):
                await client.models()
        other = files_in(two, "client")
        async with AsyncClient(target, ca=one / "ca.pem", cert=other.cert, key=other.key) as client:
            assert await client.models()


def asked_again(
    context: ssl.SSLContext, address: str, question: bytes, session: ssl.SSLSession | None
) -> tuple[bytes, ssl.SSLSession | None]:
    """Return the server's answer (empty if it refuses the client) and the session to resume."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=host, session=session) as connection:
                connection.sendall(question)
                return connection.recv(100), connection.session
        except (ssl.SSLError, ConnectionError):
            return b"", None


async def test_components_use_mutual_tls(sets: tuple[pathlib.Path, pathlib.Path], identity: pathlib.Path) -> None:
    one, two = sets
    node = CertifiedNode()
    async with serving_node(node) as address:
        client = NodeClient(address, "test")
        session = await client.open_session()
        ticket = await client.open_ticket(session.epoch, b"", 1)
        assert node.callers == [(one / "internal.pem").read_text()]
        put(two, identity, "internal.pem", "internal.key")
        other = await client.open_ticket(session.epoch, b"", 1)
        assert node.callers[1:] == [(two / "internal.pem").read_text()]
        assert await shown(address) == (two / "internal.pem").read_text()
        for number, source in enumerate((one, two) * 3):
            put(source, identity, "internal.pem", "internal.key")
            more = await client.open_ticket(session.epoch, b"", 1)
            assert node.callers[2 + number] == (source / "internal.pem").read_text()
            await client.release(session.epoch, [more.ticket_id])
            gc.collect()
        await client.release(session.epoch, [ticket.ticket_id, other.ticket_id])
        ended = asyncio.create_task(session.closed())
        await loop_turns()
        assert not ended.done()
        assert not node.held
        await session.aclose()
        await ended
        await client.aclose()


async def test_foreign_certificates_are_refused(
    sets: tuple[pathlib.Path, pathlib.Path], identity: pathlib.Path
) -> None:
    one, _ = sets
    async with serving_node(FakeKVNode()) as address:
        trusted = (one / "internal-ca.pem").read_bytes()
        named = [("grpc.ssl_target_name_override", tls.INTERNAL_NAME)]
        edge_own = ((one / "client.key").read_bytes(), (one / "client.pem").read_bytes())
        strangers = [
            grpc.aio.insecure_channel(address),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trusted), named),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trusted, *edge_own), named),
        ]
        for channel in strangers:
            async with channel:
                method = channel.unary_unary("/grpc.health.v1.Health/Check")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await method(b"", timeout=WITHIN_S)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await is_serving(address)


async def test_a_component_does_not_connect_to_an_impostor(
    sets: tuple[pathlib.Path, pathlib.Path], identity: pathlib.Path
) -> None:
    """A server of the edge's CA, and one of ours without a component's name."""
    one, _ = sets
    wrong = tls.server_credentials(Identity(files_in(one, "server")))
    server = await rpc.start_server("127.0.0.1:0", [], credentials=wrong)
    try:
        assert not await is_serving(server.address)
    finally:
        await server.stop(0)


async def test_unix_sockets_stay_plain(identity: pathlib.Path) -> None:
    async with serving_node(FakeKVNode(), f"unix:{identity}/n.sock") as address:
        assert rpc.internal_credentials(address) is None
        assert await is_serving(address)


@pytest.mark.parametrize(
    ("cert", "key", "ca", "complaint"),
    [
        ("server", "", "", "both"),
        ("server", "client", "", "client.key does not match the certificate"),
        ("none", "server", "", "No such file"),
        ("server", "server", "none", "No such file"),
    ],
)
def test_unusable_files(sets: tuple[pathlib.Path, pathlib.Path], cert: str, key: str, ca: str, complaint: str) -> None:
    folder = sets[0]
    paths = [
        str(folder / f"{name}.{kind}") if name else "" for name, kind in ((cert, "pem"), (key, "key"), (ca, "pem"))
    ]
    with pytest.raises(ConfigError) as caught:
        tls.identity_of(*paths)
    assert complaint.lower() in caught.value.message.lower()
    assert "\n" not in caught.value.message
    assert tls.identity_of("", "", "") is None
