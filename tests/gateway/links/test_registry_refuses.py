"""With a Redis that answers but refuses heartbeats, a gateway relies on its own connections for liveness."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import pytest

from lab.testbed.conditions import until
from lab.testbed.redis import REFUSALS
from pillion.config import GatewayFlags
from pillion.errors import Unavailable
from pillion.gateway.assemble import start_gateway
from pillion.gateway.gateway_server import GatewayServer
from pillion.kvstore.index.registry import Registry
from pillion.net import rpc
from pillion.observability import metric_catalog as names
from pillion.v1 import prefill_pb2_grpc
from pillion.wire.registry import ComponentRecord
from tests.support.fake_components import BLOCK, FakeCluster, record, running_fake_cluster, toy_model
from tests.support.redis_nodes import patient

TTL_MS = 400
HEARTBEAT_MS = 50
ROLES = "kvnode prefill decode far-kvnode"
IDS = {"kvnode": "kv-0", "prefill": "prefill-0", "decode": "decode-0", "far-kvnode": "kv-1"}
GATEWAY = {"heartbeat_ms": HEARTBEAT_MS, "heartbeat_timeout_ms": TTL_MS}


@contextlib.asynccontextmanager
async def beating_cluster() -> AsyncIterator[FakeCluster]:
    """Run components whose records expire after TTL_MS and are refreshed by heartbeats."""
    async with running_fake_cluster("The answer.", ROLES, **GATEWAY) as fakes:
        registry = patient(Registry(fakes.redis.url, TTL_MS))
        patient(fakes.gateway.cluster.registry)
        records = [
            record(IDS[role], role.removeprefix("far-"), f"unix:{fakes.folder}/{role}.sock", **far)
            for role in ROLES.split()
            for far in ({"node_id": "kv-1"} if role.startswith("far-") else {},)
        ]

        async def beat(one: ComponentRecord) -> None:
            while True:
                with contextlib.suppress(Unavailable):
                    await registry.heartbeat(one)
                await asyncio.sleep(HEARTBEAT_MS / 1000)

        # Remove the cluster's records, which live for ten minutes.
        await asyncio.to_thread(fakes.redis.command, "FLUSHALL")
        tasks = [asyncio.create_task(beat(one)) for one in records]
        try:

            async def all_registered() -> bool:
                return len(await registry.components()) == len(IDS) + 1

            await until("all components and the gateway to be registered", all_registered)
            await until("all components to be known", lambda: known(fakes.gateway) == {*IDS.values()})
            yield fakes
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await registry.aclose()


def known(gateway: GatewayServer) -> set[str]:
    """Return the components that the gateway can call, without gateways."""
    cluster = gateway.cluster
    return {one.component_id for one in cluster.view.records() if cluster.answers(one)}


async def answer(fakes: FakeCluster) -> tuple[int, int]:
    """Make one request; return its replays and the tokens that the prefill worker computed."""
    deltas = [delta async for delta in fakes.client.generate("What is the capital of France?")]
    assert "".join(delta.text for delta in deltas) == "The answer."
    return deltas[-1].timings.replays, deltas[-1].timings.prefilled_tokens


async def go_on(fakes: FakeCluster, ttls: int) -> None:
    """Serve requests for ``times`` record TTLs, which include the gateway's grace period."""
    over_s = time.monotonic() + ttls * TTL_MS / 1000
    while time.monotonic() < over_s:
        assert await answer(fakes) == (0, 28)
        assert known(fakes.gateway) == {*IDS.values()}
        # Back-to-back requests would only keep a core busy.
        await asyncio.sleep(HEARTBEAT_MS / 1000)


def writable(fakes: FakeCluster) -> float:
    readings = fakes.gateway.gateway.metrics()[names.REGISTRY_WRITABLE]
    return float(readings[()])  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def another_gateway(fakes: FakeCluster) -> AsyncIterator[GatewayServer]:
    flags = GatewayFlags(redis_url=fakes.redis.url, block_size=BLOCK, chunk_size=8, http_port=0, grpc_port=0, **GATEWAY)
    gateway = await start_gateway(flags, prepared=toy_model(fakes.folder / "another"))
    try:
        yield gateway
    finally:
        await gateway.stop(0)


async def test_a_connected_component_outlasts_its_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pillion.gateway")
    async with beating_cluster() as fakes:
        for why in REFUSALS:
            caplog.clear()
            with fakes.redis.refusing(why):
                await until("a refusal", lambda: fakes.gateway.cluster.registry.refusal)
                await go_on(fakes, 3)
                assert writable(fakes) == 0
                said = [one.getMessage() for one in caplog.records if "accepts no heartbeats" in one.getMessage()]
                assert len(said) == 1, "it is said once"
                assert "Remedy: " in said[0]
            await until("a heartbeat to be taken", lambda: not fakes.gateway.cluster.registry.refusal)
            await go_on(fakes, 1)
            assert writable(fakes) == 1
        with fakes.redis.refusing("full"):
            await asyncio.to_thread(fakes.redis.command, "FLUSHALL")
            await go_on(fakes, 3)
            async with another_gateway(fakes) as late:
                # Heartbeats may be late before one is refused.
                await until("its heartbeat to be refused", lambda: "raise its maxmemory" in late.gateway.not_ready())
                assert "the registry accepts no heartbeats" in late.gateway.not_ready()
        await go_on(fakes, 1)
        await fakes.settled()


async def test_dead_components_are_dropped_and_a_new_gateway_serves(caplog: pytest.LogCaptureFixture) -> None:
    async with beating_cluster() as fakes:
        with fakes.redis.refusing("replica"):
            await until("a refusal", lambda: fakes.gateway.cluster.registry.refusal)
            await go_on(fakes, 3)
            async with another_gateway(fakes) as late:
                await until("the new gateway to serve", lambda: known(late) == {*IDS.values()})
                assert not late.gateway.not_ready()
                await until("the refusal to be told", lambda: "promote it" in caplog.text)
            await fakes.servers["prefill"].stop(0)
            await until("the prefill worker to be dropped", lambda: "prefill-0" not in known(fakes.gateway))
            assert await answer(fakes) == (0, 0)
            again = await rpc.start_server(
                f"unix:{fakes.folder}/prefill.sock",
                [("pillion.v1.Prefill", lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(fakes.prefill, s))],
            )
            fakes.servers["prefill"].server = again.server
            await until("the prefill worker to be back", lambda: "prefill-0" in known(fakes.gateway))
            assert await answer(fakes) == (0, 28)
            await fakes.servers["decode"].stop(0)
            await until("the decode worker to be dropped", lambda: "decode-0" not in known(fakes.gateway))
            await until("its pool not to count", lambda: fakes.gateway.cluster.pools_tokens("toy") == [])
            with pytest.raises(Unavailable, match="no decode worker of model 'toy' lives; the registry accepts"):
                fakes.gateway.cluster.served("toy", "")
        await fakes.settled()
