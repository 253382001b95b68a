"""Two KV nodes with one name: the second one reports it and does not start; remains of a crash prevent no start."""

from __future__ import annotations

import pytest

from lab.testbed.conditions import until
from lab.testbed.ports import free_port
from lab.testbed.redis import RedisServer
from pillion.config import KVNodeFlags
from pillion.errors import ConfigError
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.index import redis_url
from pillion.kvstore.index import registry as registry_module
from pillion.kvstore.index.registry import Registry
from pillion.wire.registry import ComponentRecord
from tests.support.redis_nodes import PATIENT_DEADLINE_MS, patient


@pytest.fixture(autouse=True)
def _patient_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node asks the registry once, at its start, who has its name."""
    monkeypatch.setattr(redis_url, "CONNECT_TIMEOUT_MS", PATIENT_DEADLINE_MS)
    monkeypatch.setattr(registry_module, "REGISTRY_DEADLINE_MS", PATIENT_DEADLINE_MS)


def flags_of(folder: str, redis: RedisServer, node_id: str, host: str) -> KVNodeFlags:
    return KVNodeFlags(
        node_id=node_id,
        node_listen="127.0.0.1:0",
        attach_socket=f"{folder}/{host}.attach",
        kv_pool_bytes=2**16,
        redis_url=redis.url,
        heartbeat_ms=50,
        heartbeat_timeout_ms=600_000,
    )


async def test_a_node_with_a_duplicate_name_is_rejected(short_folder: str, redis: RedisServer) -> None:
    registry = patient(Registry(redis.url, 600_000))
    first = await start_kvnode(flags_of(short_folder, redis, "kv-a", "one"))
    try:
        await until("its record", registry.components)
        with pytest.raises(ConfigError, match=f"--node-id kv-a is taken: .* serves at {first.address};"):
            await start_kvnode(flags_of(short_folder, redis, "kv-a", "two"))
        assert [record.address for record in await registry.components()] == [first.address]
        other = await start_kvnode(flags_of(short_folder, redis, "kv-b", "two"))
        await other.stop(0)
    finally:
        await first.stop(0)
        await registry.aclose()


async def test_a_crashed_nodes_record_does_not_block_its_restart(short_folder: str, redis: RedisServer) -> None:
    """Its address does not answer any more, or another node answers there."""
    registry = patient(Registry(redis.url, 600_000))
    other = await start_kvnode(flags_of(short_folder, redis, "kv-b", "other"))
    try:
        for left in (f"127.0.0.1:{free_port()}", other.address):
            await registry.heartbeat(ComponentRecord(component_id="kv-a", role="kvnode", address=left, node_id="kv-a"))
            again = await start_kvnode(flags_of(short_folder, redis, "kv-a", "again"))

            async def known(address: str = again.address) -> bool:
                return address in {record.address for record in await registry.components()}

            await until("its record", known)
            await again.stop(0)
    finally:
        await other.stop(0)
        await registry.aclose()
