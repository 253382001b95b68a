"""A node or worker whose host changes its address at run time is found at the new one."""

from __future__ import annotations

import threading

import pytest

from lab.testbed.conditions import until
from lab.testbed.redis import RedisServer
from pillion.errors import ConfigError
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.index import advertise
from pillion.kvstore.index.registry import Registry
from tests.kvstore.node.test_node import running
from tests.support.redis_nodes import patient
from tests.support.workers import running_workers


async def test_the_registry_follows_a_node_that_moves(
    short_folder: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advertise, "ADDRESS_CHECK_S", 0.01)
    registry, lost = patient(Registry(redis.url, 600_000)), threading.Event()

    def nowhere(*_: str) -> str:
        lost.set()
        raise ConfigError("no address that others could use")

    async def listed(address: str) -> bool:
        return [record.address for record in await registry.components()] == [address]

    wild = {"node_listen": "0.0.0.0:0", "insecure_internal": True, "node_id": "kv-0"}
    async with running(short_folder, redis_url=redis.url, **wild) as line:
        first = line.node.address
        second = f"127.0.0.2:{first.rpartition(':')[2]}"
        await until("the first address", lambda: listed(first))
        # A host has no address for a moment between two addresses.
        monkeypatch.setattr(advertise, "advertised", nowhere)
        await until("a look without an address", lost.is_set)
        assert line.node.address == first
        monkeypatch.setattr(advertise, "advertised", lambda *_: second)
        await until("the second address", lambda: listed(second))
        other = NodeClient(second, "gateway-1")
        assert (await other.status()).node_id == "kv-0"
        await other.aclose()
    await registry.aclose()


async def test_the_registry_follows_a_worker_that_moves(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advertise, "ADDRESS_CHECK_S", 0.01)
    registry = patient(Registry(redis.url, 600_000))

    async def listed(address: str) -> bool:
        return [record.address for record in await registry.components()] == [address]

    wild = {"listen": "0.0.0.0:0", "insecure_internal": True, "redis_url": redis.url}
    async with running_workers(decode=wild) as workers:
        # Only the decode worker has a registry.
        port = workers.decode.address.rpartition(":")[2]
        await until("the first address", lambda: listed(f"127.0.0.1:{port}"))
        monkeypatch.setattr(advertise, "advertised", lambda *_: f"127.0.0.2:{port}")
        await until("the second address", lambda: listed(f"127.0.0.2:{port}"))
    await registry.aclose()
