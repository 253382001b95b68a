"""Which silent connections of a gRPC port are closed, and which are not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from lab.testbed.conditions import WITHIN_S, until
from pillion.net import rpc
from pillion.net.rpc import BusyPeers
from pillion.net.silent_connections import PortConnection, most_silent

PLACES = 16
HOSTS = st.sampled_from(["10.0.0.1", "10.0.0.2", "fe80::1"])


@given(
    st.lists(st.builds(PortConnection, st.just(3), HOSTS, st.integers(1, 9), st.integers(0, 99))), st.integers(-1, 20)
)
def test_the_host_with_most_connections_loses_its_longest_silent_one(idle: list[PortConnection], count: int) -> None:
    chosen = most_silent(idle, count)
    assert len(chosen) == min(len(idle), max(count, 0))
    left = Counter(idle)
    for one in chosen:
        sizes = Counter(connection.host for connection in left.elements())
        assert sizes[one.host] == max(sizes.values())
        assert one.silent_ms == max(other.silent_ms for other in left if other.host == one.host)
        left -= Counter([one])


def test_peers_of_both_families_are_found_among_sockets() -> None:
    busy = BusyPeers()
    with contextlib.ExitStack() as stack:
        for peer in ("ipv4:127.0.0.1:80", "ipv6:%5B::1%5D:81", "ipv4:127.0.0.1:80", "unix:"):
            stack.enter_context(busy.call(mock.Mock(peer=lambda peer=peer: peer)))
        assert busy.peers() == {("127.0.0.1", 80), ("::1", 81), ("", 0)}
    assert not busy.peers()


@contextlib.asynccontextmanager
async def echoing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[rpc.RunningServer]:
    """A port of a component with PLACES places and an endless call, at which no handshake times out."""
    monkeypatch.setattr(rpc, "HANDSHAKE_TIMEOUT_MS", 600_000)

    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    echoes = grpc.method_handlers_generic_handler("test.Echo", handlers)
    services = [("test.Echo", lambda server: server.add_generic_rpc_handlers((echoes,)))]
    server = await rpc.start_server("127.0.0.1:0", services, max_connections=PLACES)
    try:
        yield server
    finally:
        await server.stop(0)


@contextlib.contextmanager
def silent(address: str, count: int, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    host, port = address.split(":")
    with contextlib.ExitStack() as stack:
        where = (host, int(port)), WITHIN_S, (source, 0)
        yield [stack.enter_context(socket.create_connection(*where)) for _ in range(count)]


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


async def healthy(address: str) -> bool:
    async with rpc.open_channel(address) as channel:
        asked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        with contextlib.suppress(grpc.aio.AioRpcError):
            return (await asked).status == health_pb2.HealthCheckResponse.SERVING
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are found in /proc")
async def test_active_calls_continue_and_new_connections_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a component's own port: other programs on its machine can reach it."""
    async with echoing(monkeypatch) as server, rpc.open_channel(server.address) as channel:
        call = channel.stream_stream("/test.Echo/Echo")()
        await call.write(b"first")
        assert await call.read() == b"first"
        with silent(server.address, 2, "127.0.0.2") as others, silent(server.address, PLACES) as many:
            await until("an answer", lambda: healthy(server.address))
            assert any(map(is_open, many)), "as many stay as there are places for"
            assert all(map(is_open, others)), "of another host"
            await call.write(b"second")
            assert await call.read() == b"second"
        await call.done_writing()


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are found in /proc")
async def test_a_health_watch_does_not_protect_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone may watch the health forever."""
    async with echoing(monkeypatch) as server, contextlib.AsyncExitStack() as stack:
        watches = []
        for _ in range(PLACES):
            options = [*rpc.component_options(), ("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=options))
            watches.append(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        await asyncio.gather(*(watch.read() for watch in watches[: PLACES // 2]))
        await until("an answer", lambda: healthy(server.address))


def test_a_handshake_times_out_within_seconds() -> None:
    """The only limit if /proc shows no sockets, and at Unix sockets."""
    assert dict(rpc.server_options(rpc.MAX_MESSAGE_BYTES, 1))["grpc.server_handshake_timeout_ms"] <= 5_000
