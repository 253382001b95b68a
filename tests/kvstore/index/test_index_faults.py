"""Redis in trouble: every call ends in time, requests continue, and lost entries return (I1, I3)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.redis import RedisServer, running_redis
from pillion.errors import Unavailable
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.index import Index, PrefixHit
from pillion.kvstore.index.redis_link import Breaker, ScriptCall, open_link
from pillion.kvstore.index.redis_writer import IndexWriter, SweepPlace
from pillion.kvstore.index.registry import Registry
from tests.kvstore.index.conftest import lengthen_deadlines, shorten_deadlines
from tests.support.redis_nodes import Chain, fake_nodes, node_record, until_found


@pytest.fixture
def second_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.mark.usefixtures("patient")
async def test_a_dead_redis_adds_little_latency_and_recovers(redis: RedisServer, index: Index) -> None:
    [node] = await fake_nodes(redis.url, "a")
    known, unknown = Chain([1, 2]), Chain([3])
    await node.has(known)
    await until_found(index, known.packed, 2)
    redis.kill()
    for _ in range(50):
        assert await index.longest_prefix(unknown.packed) == []
    assert not index.available
    assert await index.longest_prefix(known.packed) == [PrefixHit("a", 2)], "what was found before stands in"
    with pytest.raises(Unavailable):
        await node.registry.components()
    redis.start()
    await until_found(index, known.packed, 0, available=True)


async def test_a_stopped_redis_is_not_waited_for(
    redis: RedisServer, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: connections stay open and nothing answers. Then Redis continues, and so does everything else."""
    chain, tries = Chain([1, 2]), list[bool]()
    with monkeypatch.context() as patch:
        lengthen_deadlines(patch)
        [node] = await fake_nodes(redis.url, "a")
        await node.has(chain)
        await until_found(index, chain.packed, 2)
    may_try = Breaker.may_try

    def counted(breaker: Breaker, now: float) -> bool:
        tries.append(may_try(breaker, now))
        return tries[-1]

    monkeypatch.setattr(Breaker, "may_try", counted)
    with redis.stopped(), monkeypatch.context() as patch:
        shorten_deadlines(patch)
        async with asyncio.timeout(WITHIN_S):
            for _ in range(200):
                assert await index.longest_prefix(Chain([3]).packed) == []
            assert sum(tries) < 40 < len(tries), "only few of them wait for their deadline"
            with pytest.raises(Unavailable):
                await node.registry.heartbeat(node_record("a"))
            with pytest.raises(Unavailable):
                await node.has(chain)
    await until_found(index, chain.packed, 2, available=True)

    async def reported() -> bool:
        with contextlib.suppress(Unavailable):
            return not (await node.lost(chain)).unreported
        return False

    await until("the loss to be reported", reported)
    await until_found(index, chain.packed, 0)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "rediss://:secret@127.0.0.1:1", "unix:///nowhere.sock"])
async def test_an_unreachable_redis(url: str) -> None:
    await _nobody_answers(url)


@pytest.mark.parametrize("url", ["redis+cluster://127.0.0.1:1,127.0.0.1:2", "redis+sentinel://127.0.0.1:1/index"])
async def test_unreachable_clusters_and_sentinels(url: str) -> None:
    await _nobody_answers(url)


async def _nobody_answers(url: str) -> None:
    index, registry, writer = Index(url), Registry(url, 1000), IndexWriter(url)
    async with asyncio.timeout(WITHIN_S):
        for _ in range(20):
            assert await index.longest_prefix(bytes(32)) == []
        assert not index.available
        with pytest.raises(Unavailable) as caught:
            await registry.heartbeat(node_record("a"))
        assert "secret" not in caught.value.message
        with pytest.raises(Unavailable):
            await writer.announce(bytes(8), Chain([1]).events())
    for part in (index, registry, writer):
        await part.aclose()


NONSENSE = {
    "silence": b"",
    "a web server": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nno\n",
    "numbers": b":7\r\n" * 200,
    "no numbers": b":seven\r\n" * 200,
    "statuses": b"+OK\r\n" * 200,
    "lists": b"*3\r\n:1\r\n$1\r\nx\r\n*0\r\n" * 200,
    "odd lists": b"*2\r\n$3\r\nabc\r\n:-5\r\n" * 200,
    "huge": b"$99999999999\r\nabc",
    "deep": b"*1\r\n" * 5000,
    "nothing": b"$-1\r\n" * 200,
    "bytes": bytes(range(256)) * 20,
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())
async def test_malformed_replies_of_a_server(
    short_folder: str, nonsense: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_deadlines(monkeypatch)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65_536):
                writer.write(nonsense)
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(talk, f"{short_folder}/odd.sock")
    url = f"unix://{short_folder}/odd.sock"
    index, registry, writer = Index(url), Registry(url, 1000), IndexWriter(url)
    chain = Chain(range(100))

    async def live() -> frozenset[bytes]:
        return frozenset()

    async with asyncio.timeout(WITHIN_S):
        for _ in range(10):
            assert [hit for hit in await index.longest_prefix(chain.packed) if hit.blocks > len(chain)] == []
        for work in (
            lambda: registry.heartbeat(node_record("a")),
            registry.components,
            registry.nodes,
            lambda: registry.leave("a"),
            lambda: writer.announce(bytes(8), chain.events()),
            lambda: writer.sweep(SweepPlace(), live),
        ):
            with contextlib.suppress(Unavailable):
                await work()
    for part in (index, registry, writer):
        await part.aclose()
    server.close()


@pytest.mark.usefixtures("patient")
async def test_wrong_types_under_our_keys_are_replaced(redis: RedisServer, index: Index) -> None:
    [node] = await fake_nodes(redis.url, "a")
    chain = Chain(range(100))
    await node.has(chain)
    for key in (chain.bucket(40), keys.COMPONENTS, keys.EXPIRY, keys.NUMBERS, keys.NODES):
        redis.command("DEL", key)
        redis.command("RPUSH", key, "not ours")
    redis.command("DEL", keys.generation(b""))
    redis.command("RPUSH", keys.generation(b""), "not ours")
    assert await index.longest_prefix(chain.packed) == []
    assert not await node.beat()

    async def rest_is_there() -> bool:
        return [hit.node_id for hit in await index.longest_prefix(chain.packed)] == ["a"]

    await until("the node to be known again", rest_is_there)
    await node.has(chain)
    await until_found(index, chain.packed, 100)
    assert [part.component_id for part in await node.registry.components()] == ["a"]


@pytest.mark.usefixtures("patient")
async def test_malformed_values_are_skipped(redis: RedisServer, index: Index) -> None:
    [node] = await fake_nodes(redis.url, "a")
    chain = Chain(range(3))
    await node.has(chain)
    redis.command("HSET", chain.bucket(1), chain.field(1), b"odd" + node.entry)
    redis.command("HSET", chain.bucket(2), chain.field(2), b"")
    redis.command("HSET", keys.NODES, b"\xff\xfe", b"short", "b", b"x" * 8 + b"later", "c", b"y" * 8 + b"1")
    redis.command("HSET", keys.COMPONENTS, "a", b"later {}")
    [hit] = await index.longest_prefix(chain.packed)
    assert 1 <= hit.blocks <= 3
    assert await node.registry.components() == []
    await node.sweep_all(chain)
    await node.has(chain)
    await until_found(index, chain.packed, 3)


@pytest.mark.usefixtures("patient")
async def test_a_replica_is_read_but_not_written(redis: RedisServer, second_redis: RedisServer, index: Index) -> None:
    [node] = await fake_nodes(redis.url, "a")
    chain = Chain([1, 2])
    await node.has(chain)
    await until_found(index, chain.packed, 2)
    redis.command("CONFIG", "SET", "replica-serve-stale-data", "yes")
    redis.command("REPLICAOF", "127.0.0.1", "1")
    for work in (lambda: node.has(chain), node.beat):
        with pytest.raises(Unavailable, match=r"READONLY|read only"):
            await work()
    await until_found(index, chain.packed, 2, available=True)
    redis.command("REPLICAOF", "NO", "ONE")
    assert await node.beat()
    assert not (await node.has(chain)).unreported


@pytest.mark.usefixtures("patient")
async def test_a_full_redis_is_read_but_not_written(redis: RedisServer, index: Index) -> None:
    [node] = await fake_nodes(redis.url, "a")
    chain = Chain([1, 2])
    await node.has(chain)
    redis.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(Unavailable, match=r"OOM|maxmemory"):
        await node.has(Chain([3]))
    await until_found(index, chain.packed, 2, available=True)
    redis.command("CONFIG", "SET", "maxmemory", "0")
    await node.has(Chain([3]))
    await until_found(index, Chain([3]).packed, 1)


@pytest.mark.usefixtures("patient")
async def test_missing_scripts_are_loaded_again(redis: RedisServer, index: Index) -> None:
    [node] = await fake_nodes(redis.url, "a")
    chain = Chain([1, 2])
    redis.command("SCRIPT", "FLUSH")
    await node.has(chain)
    redis.command("SCRIPT", "FLUSH")
    await until_found(index, chain.packed, 2)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancel_that_the_library_swallows_still_cancels(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    link, asked = open_link(redis.url, "components"), asyncio.Event()

    async def deaf(*_: object) -> list[bytes]:
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if fails:
            raise ConnectionResetError
        return []

    monkeypatch.setattr(Redis, "execute_command", deaf)
    question = ScriptCall([keys.COMPONENTS], [])
    call = asyncio.create_task(link.call("components", question, list[Any], deadline_ms=30_000))
    await asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    # A deadline is no cancel of the caller's.
    with contextlib.suppress(Unavailable):
        await link.call("components", question, list[Any], deadline_ms=20)
    await link.aclose()


@pytest.mark.usefixtures("patient")
async def test_a_cancel_before_the_shard_calls_leaves_no_unawaited_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard has its own task, which the cancellation of the call reaches before it starts."""
    link = open_link("redis+cluster://127.0.0.1:1")

    async def shards(*_: object) -> dict[str, list[int]]:
        return {"a": [0], "b": [1]}

    monkeypatch.setattr(link, "_shards", shards)
    asking = asyncio.create_task(link.call_each("x", [ScriptCall([], [])] * 2, str, deadline_ms=1e3))
    # The next turn of the loop runs the call until it waits for its tasks, and then this.
    asyncio.get_running_loop().call_soon(asking.cancel)
    with pytest.raises(asyncio.CancelledError):
        await asking
    # What was never awaited fails this test: Python warns of it where it is collected.
    gc.collect()
    await link.aclose()


@pytest.mark.usefixtures("patient")
async def test_concurrent_calls_are_limited_to_the_connections(redis: RedisServer, index: Index) -> None:
    [node] = await fake_nodes(redis.url, "a")
    chain = Chain(range(300))
    await node.has(chain)
    answers = await asyncio.gather(*(index.longest_prefix(chain.packed) for _ in range(100)))
    assert all(hits == [PrefixHit("a", 300)] for hits in answers)
    info = redis.command("INFO", "clients")
    assert isinstance(info, dict)
    assert info["connected_clients"] < 40


def test_the_breaker_opens_after_a_failure_and_admits_one_probe() -> None:
    breaker = Breaker(open_s=1.0)
    assert breaker.may_try(0.0)
    breaker.record_failure(0.0)
    assert [breaker.may_try(now) for now in (0.5, 1.0, 1.1, 2.0)] == [False, True, False, True]
    breaker.succeeded()
    assert breaker.may_try(2.0)
    assert breaker.may_try(2.0)


@pytest.mark.usefixtures("patient")
async def test_a_node_that_registers_again_gets_the_same_number(redis: RedisServer) -> None:
    a, b = await fake_nodes(redis.url, "a", "b")
    await a.registry.leave("a")
    assert not await a.beat()
    assert struct.unpack(">I", a.entry[:4]) == (1,)
    assert struct.unpack(">I", b.entry[:4]) == (2,)
