"""The index in a Redis Cluster, behind Sentinels, and over TLS with an ACL user: real servers, one set per test."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from redis.cluster import key_slot

from lab.testbed.conditions import until
from lab.testbed.redis_kinds import (
    PortServer,
    SentinelSet,
    TlsServer,
    running_cluster,
    running_sentinels,
    running_tls,
    tls_server,
)
from pillion.errors import Unavailable
from pillion.kvstore.hashing import SEGMENT_BLOCKS
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.announcer import Announcer
from pillion.kvstore.index.index import Index, PrefixHit
from pillion.kvstore.index.redis_writer import IndexWriter, SweepPlace
from pillion.kvstore.index.registry import Registry
from tests.kvstore.index.conftest import lengthen_deadlines
from tests.support.redis_nodes import TTL_MS, Chain, FakeNode, fake_nodes, found, node_record, until_found

# What docs/redis.md says that Pillion needs.
ACL = (
    "~pillion:* -@all +evalsha +eval +hello +auth +ping +select +client +time +type +exists +get +set +del "
    "+hget +hset +hdel +hexists +hmget +hlen +hscan +hgetall +zadd +zrem +zrangebyscore +zrevrange +pexpire"
)


@pytest.fixture
def cluster() -> Iterator[list[PortServer]]:
    with running_cluster() as servers:
        yield servers


@pytest.fixture
def sentinels() -> Iterator[SentinelSet]:
    with running_sentinels() as made:
        yield made


@pytest.fixture
def tls() -> Iterator[TlsServer]:
    binary = tls_server()
    if binary is None:
        pytest.skip("no redis-server with TLS found (Debian's has it: apt install redis-server)")
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program is missing, which makes the certificates")
    with running_tls(binary, ACL) as made:
        yield made


def cluster_url(servers: list[PortServer]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


def blocks_at(server: PortServer) -> int:
    """Return the keys of a shard's buckets."""
    found = server.command("KEYS", "pillion:b:*")
    assert isinstance(found, list)
    return len(found)


def without_registry(servers: list[PortServer]) -> PortServer:
    """A shard that has only blocks."""
    slot = key_slot(keys.NODES)
    return next(server for server in servers if not server.command("CLUSTER COUNTKEYSINSLOT", slot))


@pytest.mark.usefixtures("patient")
async def test_a_cluster_answers_as_one_server(cluster: list[PortServer]) -> None:
    url = cluster_url(cluster)
    a, b = await fake_nodes(url, "a", "b")
    index = Index(url)
    chain, other = Chain(range(20 * SEGMENT_BLOCKS + 5)), Chain(range(1, 40))
    await a.has(chain)
    await b.has(chain, 0, 3 * SEGMENT_BLOCKS + 7)
    expected = [PrefixHit("a", len(chain)), PrefixHit("b", 3 * SEGMENT_BLOCKS + 7)]

    async def as_expected() -> bool:
        return await index.longest_prefix(chain.packed) == expected

    # The first look-up also finds its way to every shard, and may run out of time on a busy machine.
    await until("the expected answer", as_expected)
    assert await index.longest_prefix(other.packed) == []
    assert all(blocks_at(server) for server in cluster), "every shard holds a part of the chain"
    await a.lost(chain, 2)
    assert await index.longest_prefix(chain.head(2 * SEGMENT_BLOCKS)) == [
        PrefixHit("b", 2 * SEGMENT_BLOCKS),
        PrefixHit("a", 2),
    ]
    again = FakeNode(url, "b", boot_epoch=77)
    await again.beat()
    await a.sweep_all(chain)
    await until_found(index, chain.packed, 2)
    assert [component.component_id for component in await a.registry.components()] == ["a", "b"]
    for node in (a, b, again):
        await node.aclose()
    await index.aclose()


async def test_a_shard_that_hangs_or_dies_costs_its_own_part(
    cluster: list[PortServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = cluster_url(cluster)
    index = Index(url)
    chain = Chain(range(2, 2 + 40 * SEGMENT_BLOCKS))
    with monkeypatch.context() as patch:
        lengthen_deadlines(patch)
        [a] = await fake_nodes(url, "a")
        await a.has(chain)
        await until_found(index, chain.packed, len(chain))
    victim = without_registry(cluster)
    victim.send_signal(signal.SIGSTOP)
    try:

        async def hinted() -> bool:
            return [hit.node_id for hit in await index.longest_prefix(chain.packed)] == ["a"] and index.available

        # The segments of the others are enough for a hint, again and again.
        for _ in range(3):
            await until("a hint of the shards that answer", hinted)
    finally:
        victim.send_signal(signal.SIGCONT)
    await until_found(index, chain.packed, len(chain))
    lengthen_deadlines(monkeypatch)
    victim.kill()
    result = await a.has(chain)
    assert result.unreported
    assert result.generations
    victim.start()
    await a.aclose()
    await index.aclose()


@pytest.mark.usefixtures("patient")
async def test_an_emptied_shard_gets_all_blocks_again(
    cluster: list[PortServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = cluster_url(cluster)
    chain = Chain(range(40 * SEGMENT_BLOCKS))
    index = Index(url)
    announcer = Announcer(
        url, heartbeat_s=0.05, ttl_ms=TTL_MS, record=lambda boot: node_record("a", boot), hashes=chain.pairs
    )

    async def elsewhere(_: IndexWriter, place: SweepPlace, live: object) -> tuple[SweepPlace, dict[bytes, bytes]]:
        """In a big index, a sweep takes an hour to reach the node's groups."""
        return place, {}

    monkeypatch.setattr(IndexWriter, "sweep", elsewhere)
    task = asyncio.create_task(announcer.run())
    await until_found(index, chain.packed, len(chain))
    victim = without_registry(cluster)
    before = blocks_at(victim)
    victim.command("FLUSHALL")

    async def whole() -> bool:
        return blocks_at(victim) == before

    await until("the shard to be whole", whole)
    await until_found(index, chain.packed, len(chain))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await announcer.leave()
    await index.aclose()


@pytest.mark.parametrize(
    "how",
    [pytest.param(signal.SIGKILL, id="dies"), pytest.param(signal.SIGSTOP, id="hangs", marks=pytest.mark.long)],
)
async def test_sentinels_lead_to_the_new_master(sentinels: SentinelSet, how: signal.Signals) -> None:
    hosts = ",".join(f"127.0.0.1:{port}" for port in sentinels.sentinels)
    url = f"redis+sentinel://{hosts}/{sentinels.service}"
    chain = Chain(range(100))
    have = chain.pairs(0, 50)
    index = Index(url)
    announcer = Announcer(
        url, heartbeat_s=0.05, ttl_ms=2000, record=lambda boot: node_record("a", boot), hashes=lambda: list(have)
    )
    task = asyncio.create_task(announcer.run())
    await until_found(index, chain.packed, 50)
    old = sentinels.master_port()
    sentinels.master.send_signal(how)
    have += chain.pairs(50)
    announcer.push(chain.events(50))

    async def moved() -> bool:
        return sentinels.master_port() != old and await found(index, chain.packed, 100, available=True)

    await until("the new master", moved)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await announcer.leave()
    await index.aclose()


@pytest.mark.usefixtures("patient")
async def test_tls_with_an_acl_user(tls: TlsServer) -> None:
    files = f"ssl_ca_certs={tls.folder}/ca.pem&ssl_certfile={tls.folder}/server.pem&ssl_keyfile={tls.folder}/server.key"
    user = f"{tls.user}:{quote(tls.password, safe='')}"
    url = f"rediss://{user}@localhost:{tls.port}?{files}"
    [a] = await fake_nodes(url, "a")
    index = Index(url)
    chain = Chain(range(100))
    await a.has(chain)
    await until_found(index, chain.packed, 100, available=True)
    await a.lost(chain, 60)
    await a.sweep_all(chain)
    await until_found(index, chain.packed, 60)
    await a.registry.leave("a")
    await a.aclose()
    await index.aclose()


@pytest.mark.parametrize("wrong", ["password", "authority", "plain"])
async def test_tls_rejects_other_clients(tls: TlsServer, wrong: str) -> None:
    files = f"ssl_ca_certs={tls.folder}/ca.pem&ssl_certfile={tls.folder}/server.pem&ssl_keyfile={tls.folder}/server.key"
    url = f"rediss://{tls.user}:{quote(tls.password, safe='')}@localhost:{tls.port}"
    url = {
        "password": f"rediss://{tls.user}:guess@localhost:{tls.port}?{files}",
        "authority": url,
        "plain": url.replace("rediss", "redis"),
    }[wrong]
    registry = Registry(url, 1000)
    with pytest.raises(Unavailable) as caught:
        await registry.components()
    assert "p@ss" not in caught.value.message
    await registry.aclose()
