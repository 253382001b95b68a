"""Drain of a gateway: on SIGTERM it finishes its streams, refuses new ones and reports that."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from lab.testbed.conditions import until
from pillion import AsyncClient, Client, Unavailable
from pillion.config import GatewayFlags
from pillion.gateway.assemble import start_gateway
from pillion.net.rpc import open_channel
from tests.support.fake_components import BLOCK, FakeCluster, impatient_client, running_fake_cluster, toy_model

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "pillion.v1.Gateway"
CLIENTS = 8


async def read(client: AsyncClient) -> str:
    return "".join([delta.text async for delta in client.generate("x")])


@contextlib.asynccontextmanager
async def health_of(fakes: FakeCluster) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    async with open_channel(fakes.gateway.grpc_address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def says(health: health_pb2_grpc.HealthStub, service: str) -> int:
    return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_a_drain_loses_no_stream() -> None:
    async with running_fake_cluster("The answer.") as fakes, health_of(fakes) as health:
        fakes.decode.gate.clear()
        streams = [asyncio.create_task(read(fakes.client)) for _ in range(5)]
        await until("five submits", lambda: len(fakes.decode.submits) == 5)
        assert [await says(health, name) for name in ("", SERVICE)] == [SERVING, SERVING]
        stopping = asyncio.create_task(fakes.gateway.stop(60.0))
        await until("the gateway to be not ready", lambda: fakes.gateway.gateway.not_ready())

        async def forgotten() -> bool:
            return all(component.role != "gateway" for component in await fakes.registry.components())

        async def nobody_listens() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return not await says(health, "")
            return True

        await until("the registry to have forgotten it", forgotten)
        await until("its port to take no connections", nobody_listens)
        async with impatient_client(fakes) as late:
            with pytest.raises(Unavailable, match="does a gateway listen at"):
                await read(late)
        assert not stopping.done()
        fakes.decode.gate.set()
        assert await asyncio.gather(*streams) == ["The answer."] * 5
        await stopping
        with pytest.raises(grpc.aio.AioRpcError):
            await says(health, "")


async def test_a_drain_refuses_no_client_of_a_shared_port() -> None:
    """Clients of both APIs send requests back to back over their connections, each with one in flight when its gateway
    is stopped."""
    async with running_fake_cluster("The answer.", share_ports=True) as fakes:
        fakes.decode.pace_s = 0.002
        address, answered, over = fakes.gateway.grpc_address, [0] * CLIENTS, threading.Event()

        async def ask(number: int) -> None:
            async with AsyncClient(address) as client:
                while not over.is_set():
                    assert await read(client) == "The answer."
                    assert await client.models()
                    answered[number] += 1

        def ask_on_thread(number: int) -> None:
            with Client(address) as client:
                while not over.is_set():
                    assert "".join(delta.text for delta in client.generate("x")) == "The answer."
                    assert client.models()
                    answered[number] += 1

        async def all_get_further() -> None:
            wanted = [count + 2 for count in answered]
            await until(
                "more answers for each client, or an error",
                lambda: all(map(operator.ge, answered, wanted)) or any(task.done() for task in asking),
            )

        ways = [asyncio.to_thread(ask_on_thread, n) if n % 2 else ask(n) for n in range(CLIENTS)]
        asking = [asyncio.create_task(way) for way in ways]
        async with contextlib.AsyncExitStack() as others:
            try:
                await all_get_further()
                port = int(address.rpartition(":")[2])
                shared = {"http_port": 0, "grpc_port": port, "share_ports": True}
                flags = GatewayFlags(redis_url=fakes.redis.url, block_size=BLOCK, chunk_size=8, **shared)
                other = await start_gateway(flags, prepared=toy_model(fakes.folder / "other"))
                others.push_async_callback(other.stop, 0)
                await until("the other gateway to serve", other.gateway.models)
                await fakes.gateway.stop(600.0)
                await all_get_further()
            finally:
                over.set()
                await asyncio.gather(*asking)


async def test_health_watchers_do_not_delay_a_drain() -> None:
    async with running_fake_cluster("The answer.") as fakes, health_of(fakes) as health:
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(fakes.gateway.stop(600.0))
        assert (await watch.read()).status == NOT_SERVING
        await stopping


async def test_a_drain_has_a_timeout_and_frees_cut_streams() -> None:
    async with running_fake_cluster("The answer.") as fakes, impatient_client(fakes) as client:
        fakes.decode.gate.clear()
        stream = asyncio.create_task(read(client))
        await until("a submit", lambda: fakes.decode.submits)
        await fakes.gateway.stop(0.1)
        with pytest.raises((Unavailable, asyncio.CancelledError)):
            await stream
        await until("everything to be released", lambda: not (fakes.decode.streams or fakes.node.held))


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_health_and_reflection_name_the_service(version: str) -> None:
    async with running_fake_cluster() as fakes, open_channel(fakes.gateway.grpc_address) as channel:
        ask: Any = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        reflections = {f"grpc.reflection.{one}.ServerReflection" for one in ("v1", "v1alpha")}
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in ask(iter([asked]))]
        names = {service.name for service in answers[0].list_services_response.service}
        assert names == {SERVICE, "grpc.health.v1.Health", *reflections}
        for name in names:
            asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
            (answer,) = [answer async for answer in ask(iter([asked]))]
            files = map(FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto)
            known = {f"{file.package}.{service.name}" for file in files for service in file.service}
            assert name in known
        async with health_of(fakes) as health:
            with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
                await says(health, "pillion.v1.Nobody")
