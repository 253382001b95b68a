"""The index behind Sentinels, and over TLS with an ACL user: real servers, one set per test."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from lab.testbed.conditions import until
from lab.testbed.redis_kinds import (
    SentinelSet,
    TlsServer,
    running_sentinels,
    running_tls,
    tls_server,
)
from pillion.errors import Unavailable
from pillion.kvstore.index.announcer import Announcer
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.registry import Registry
from tests.support.redis_nodes import Chain, fake_nodes, found, node_record, until_found

# What docs/index.md says that Pillion needs.
ACL = (
    "~pillion:* -@all +evalsha +eval +hello +auth +ping +select +client +time +type +exists +get +set +del "
    "+hget +hset +hdel +hexists +hmget +hlen +hscan +hgetall +zadd +zrem +zrangebyscore +pexpire"
)


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
async def test_tls_lets_nobody_else_in(tls: TlsServer, wrong: str) -> None:
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
