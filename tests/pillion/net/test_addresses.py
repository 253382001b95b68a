"""Listening at both families of addresses, and reaching parts of a cluster despite proxies in the environment."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from lab.testbed.ports import free_port
from pillion.net import addresses, rpc
from pillion.net.addresses import LOOPBACK, listening_host, spare_loopback
from pillion.observability.metrics import Meters
from pillion.observability.metrics_export import Exports
from pillion.supervisor.probes import is_serving, reachable_host
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call

NAMES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "no_proxy", "no_grpc_proxy")


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A proxy in the environment that accepts connections and never answers."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield listener


def untouched(trap: socket.socket) -> bool:
    try:
        trap.accept()[0].close()
    except BlockingIOError:
        return True
    return False


async def test_internal_channels_bypass_the_proxy(trap: socket.socket) -> None:
    server = await rpc.start_server("127.0.0.1:0", [])
    try:
        assert await is_serving(server.address)
        assert untouched(trap)
    finally:
        await server.stop(0)


def test_loopback_is_added_to_no_proxy(trap: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "intern.example.org, 127.0.0.1")
    spare_loopback()
    for name in ("no_proxy", "NO_PROXY"):
        assert os.environ[name] == "intern.example.org,127.0.0.1,localhost,::1"
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("NO_PROXY")
    spare_loopback()
    assert (os.environ["no_proxy"], "NO_PROXY" in os.environ) == ("*", False)


def test_no_proxy_is_not_set_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    spare_loopback()
    assert "no_proxy" not in os.environ
    assert set(LOOPBACK) == {"localhost", "127.0.0.1", "::1"}


@pytest.mark.skipif(listening_host("::") != "::", reason="no IPv6")
async def test_one_listening_host_serves_ipv4_and_ipv6() -> None:
    async with running_fake_cluster(host="::") as fakes:
        gateway, port = fakes.gateway, free_port()
        exports = Exports(Meters(), "x", "gateway", host="::", port=port, not_ready=lambda: "")
        try:
            for host in ("127.0.0.1", "[::1]"):
                http, grpc = (address.rpartition(":")[2] for address in (gateway.http_address, gateway.grpc_address))
                for address in (f"{host}:{http}", f"{host}:{port}"):
                    reply = await call(address.replace("[::1]", "::1"), "/health")
                    assert reply.status == 200
                assert await is_serving(f"{host}:{grpc}")
        finally:
            await asyncio.to_thread(exports.close)


def test_a_machine_without_ipv6_serves_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(addresses.socket, "socket", refuse)
    assert (listening_host("::"), listening_host("::1"), reachable_host("::")) == ("0.0.0.0", "::1", "127.0.0.1")
