"""A Redis that rejects writes for longer than records live loses no component."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from lab.testbed.conditions import until
from lab.testbed.redis import REFUSALS, RedisServer
from pillion.errors import Unavailable
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.registry import Registry
from tests.support.redis_nodes import Chain, FakeNode, found, until_found

TTL_MS = 500
HEARTBEAT_S = 0.05

pytestmark = pytest.mark.usefixtures("patient")


@contextlib.asynccontextmanager
async def beating(*nodes: FakeNode) -> AsyncIterator[list[bool]]:
    """Send the nodes' heartbeats meanwhile; yield whether they were known each time that Redis accepted one."""
    known: list[bool] = []

    async def beat() -> None:
        while True:
            for node in nodes:
                with contextlib.suppress(Unavailable):
                    known.append(await node.beat())
            await asyncio.sleep(HEARTBEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield known
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def redis_ms(redis: RedisServer) -> int:
    seconds, micros = await asyncio.to_thread(redis.command, "TIME")  # type: ignore[misc]
    return int(seconds) * 1000 + int(micros) // 1000


async def later(redis: RedisServer, ms: int) -> None:
    """Wait until the server's clock has advanced by a duration."""
    over = await redis_ms(redis) + ms

    async def passed() -> bool:
        return await redis_ms(redis) >= over

    await until(f"{ms} ms of Redis's time", passed)


# OOM represents all rejections; test_redis_model.py covers each.
@pytest.mark.parametrize(
    "why", [pytest.param(why, marks=() if why == "full" else pytest.mark.long) for why in REFUSALS]
)
async def test_a_rejecting_redis_loses_no_component(redis: RedisServer, index: Index, why: str) -> None:
    nodes = [FakeNode(redis.url, name, boot_epoch=n + 1, ttl_ms=TTL_MS) for n, name in enumerate("ab")]
    reader, chain = Registry(redis.url, TTL_MS), Chain([1, 2])

    async def listed() -> list[str]:
        return sorted(record.component_id for record in await reader.components())

    async with beating(*nodes):
        await until("both nodes to be listed", lambda: all(node.entry for node in nodes))
        await nodes[0].has(chain)
        with redis.refusing(why):
            await until("a refusal", lambda: nodes[0].registry.refusal)
            assert "Remedy: " in nodes[0].registry.refusal
            await later(redis, 3 * TTL_MS)
            assert await listed() == ["a", "b"]
            assert (await reader.nodes()).entries() == {node.entry for node in nodes}
            assert await found(index, chain.packed, 2, available=True)
            ages = [record.heartbeat_age_ms for record in await reader.components()]
            assert min(ages) >= 2 * TTL_MS, "their age is told as it is"
    # The first heartbeat that is taken again makes nobody else lost, and no node's entries void. No second one comes
    # meanwhile, so silence is not judged by how long this takes.
    known: list[bool] = []

    async def taken() -> bool:
        with contextlib.suppress(Unavailable):
            known.append(await nodes[1].beat())
        return bool(known)

    await until("a heartbeat to be taken", taken)
    assert known == [True]
    await nodes[1].sweep_all(chain)
    assert redis.command("HGET", chain.bucket(0), chain.field(0)) == nodes[0].entry
    async with beating(nodes[1]):
        # One that has died meanwhile is lost a time to live later.
        async def only_b() -> bool:
            return await listed() == ["b"]

        await until("the dead node to be lost", only_b)
        await until_found(index, chain.packed, 0)
    for node in nodes:
        await node.aclose()
    await reader.aclose()


async def test_components_stay_registered_through_a_redis_refusal(redis: RedisServer) -> None:
    a, b = (FakeNode(redis.url, name, boot_epoch=n + 1, ttl_ms=TTL_MS) for n, name in enumerate("ab"))
    for node in (a, b):
        await node.beat()
    with redis.refusing("full"):
        await later(redis, 2 * TTL_MS)
        with pytest.raises(Unavailable, match="raise its maxmemory"):
            await b.beat()
    # Redis applies both at once, so no component is silent in between, however busy the machine is.
    assert await asyncio.gather(b.beat(), a.beat()) == [True, True], "a node that is not known announces all again"
    async with beating(b):
        await a.until_lost()
    assert not await a.beat()
    for node in (a, b):
        await node.aclose()
