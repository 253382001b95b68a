"""The index and the registry against a real Redis: what they know and forget."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from lab.testbed.conditions import until
from lab.testbed.redis import RedisServer
from pillion.kvstore.hashing import SEGMENT_BLOCKS
from pillion.kvstore.index import index as index_module
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.index import HotPrefixes, Index, PrefixHit
from pillion.kvstore.index.redis_writer import SWEEP_FIELDS
from pillion.kvstore.index.registry import Registry
from pillion.wire.registry import ComponentRecord
from tests.support.redis_nodes import TTL_MS, Chain, FakeNode, fake_nodes, found, until_found

pytestmark = pytest.mark.usefixtures("patient")


async def test_longest_prefix_of_every_node(redis: RedisServer, index: Index) -> None:
    a, b, _ = await fake_nodes(redis.url, "a", "b", "idle")
    chain = Chain(range(10))
    await a.has(chain, 0, 4)
    await b.has(chain, 0, 9)
    assert await index.longest_prefix(chain.packed) == [PrefixHit("b", 9), PrefixHit("a", 4)]
    assert await index.longest_prefix(chain.head(3)) == [PrefixHit("a", 3), PrefixHit("b", 3)]
    assert await index.longest_prefix(Chain([7, 8]).packed) == []
    assert await index.longest_prefix(b"") == []
    await b.lost(chain, 3)
    assert await index.longest_prefix(chain.packed) == [PrefixHit("a", 4), PrefixHit("b", 3)]
    assert index.available


async def test_random_prefixes_match_a_plain_model(redis: RedisServer, index: Index) -> None:
    rng = random.Random(7)
    nodes = await fake_nodes(redis.url, "a", "b", "c")
    chain = Chain(range(200))
    for _ in range(30):
        ends = {node.record.node_id: rng.choice([0, 1, rng.randrange(201)]) for node in nodes}
        for node in nodes:
            end = ends[node.record.node_id]
            await node.has(chain, 0, end)
            await node.lost(chain, end)
        asked = rng.randrange(1, 201)
        hits = await index.longest_prefix(chain.head(asked))
        assert {hit.node_id: hit.blocks for hit in hits} == {n: min(e, asked) for n, e in ends.items() if e}
        assert [hit.blocks for hit in hits] == sorted((hit.blocks for hit in hits), reverse=True)


async def test_a_chain_with_missing_blocks_yields_a_valid_hint(redis: RedisServer, index: Index) -> None:
    [a] = await fake_nodes(redis.url, "a")
    chain = Chain(range(50))
    await a.has(chain)
    for hole in (10, 11, 30):
        await a.lost(chain, hole, hole + 1)
    [hit] = await index.longest_prefix(chain.packed)
    assert 1 <= hit.blocks <= 50
    await a.lost(chain, 0, 1)
    assert await index.longest_prefix(chain.packed) == []


async def test_a_look_up_is_one_round_trip(redis: RedisServer, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "NODES_MAX_AGE_MS", TTL_MS)
    [a] = await fake_nodes(redis.url, "a")
    chain = Chain(range(2048))
    for first in range(0, 2048, 512):
        await a.has(chain, first, first + 512)
    assert await found(index, chain.packed, 2048)
    redis.command("CONFIG", "RESETSTAT")
    for _ in range(3):
        assert await found(index, chain.packed, 2048)
    stats = redis.command("INFO", "commandstats")
    assert isinstance(stats, dict)
    assert stats["cmdstat_evalsha"]["calls"] == 3, "the table of nodes is fresh"
    assert stats["cmdstat_hget"]["calls"] <= 3 * 14, "bisection"


async def test_a_popular_block_keeps_its_newest_nodes(redis: RedisServer, index: Index) -> None:
    """More nodes have the beginning than the index returns: the one with the most blocks of a chain is found anyway."""
    chain, most = Chain(range(100)), keys.MAX_ENTRIES_PER_BLOCK
    deep = FakeNode(redis.url, "deep", boot_epoch=7)
    await deep.beat()
    await deep.has(chain)
    others = [FakeNode(redis.url, f"n{number:02}", boot_epoch=number + 1) for number in range(most + 4)]
    for node in others:
        await node.beat()
        await node.has(chain, 0, 10)
        await node.has(chain, 0, 1)
    value = redis.command("HGET", chain.bucket(0), chain.field(0))
    assert value == b"".join(node.entry for node in others[-most:])
    hits = await index.longest_prefix(chain.packed)
    assert hits[0] == PrefixHit("deep", 100)
    assert [hit.blocks for hit in hits[1:]] == [10] * most
    for node in (deep, *others):
        await node.aclose()


async def test_entries_of_another_boot_are_void(redis: RedisServer, index: Index) -> None:
    old, other = await fake_nodes(redis.url, "a", "b")
    chain = Chain([1, 2, 3])
    await old.has(chain)
    await other.has(chain, 0, 1)
    new = FakeNode(redis.url, "a", boot_epoch=99)
    await new.beat()
    assert await index.longest_prefix(chain.packed) == [PrefixHit("b", 1)]
    await new.has(chain, 0, 2)
    # An entry that the index does not know makes it look at the table of nodes again, though not at once.
    await until("both nodes' hits", lambda: _is(index, chain.packed, [PrefixHit("a", 2), PrefixHit("b", 1)]))
    assert new.entry[:4] == old.entry[:4], "a node keeps its number"
    # What the old boot said of the same blocks is gone: 8 bytes for each node that has the block.
    assert redis.command("HGET", chain.bucket(1), chain.field(1)) == new.entry
    assert redis.command("HGET", chain.bucket(2), chain.field(2)) == old.entry


async def test_a_silent_nodes_entries_are_void_and_swept(redis: RedisServer, index: Index) -> None:
    dying, other = await fake_nodes(redis.url, "a", "b")
    one, two = Chain([1, 2]), Chain([3])
    await dying.has(one)
    await dying.has(two)
    await other.has(two)
    assert await found(index, one.packed, 2)
    dying.registry = Registry(redis.url, ttl_ms=1)
    await dying.beat()
    await dying.until_lost()
    await until_found(index, one.packed, 0)
    await other.sweep_all(one)
    assert redis.command("EXISTS", one.bucket(0)) == 0
    assert redis.command("HGET", two.bucket(0), two.field(0)) == dying.entry + other.entry, "not visited yet"
    await other.sweep_all(two)
    assert redis.command("HGET", two.bucket(0), two.field(0)) == other.entry


async def test_a_sweep_gets_through_a_big_bucket(redis: RedisServer) -> None:
    """All chains with the same first block share a bucket; a visit checks a limited part of it."""
    [other] = await fake_nodes(redis.url, "b")
    # Its number may be reassigned as soon as it is lost, so it gets a new epoch.
    dead = FakeNode(redis.url, "dead", boot_epoch=2, ttl_ms=100)
    await dead.beat()
    chains = [Chain([0, *range(number, number + 20)]) for number in range(0, 4000, 20)]
    for chain in chains:
        assert chain.bucket(5) == chains[0].bucket(0)
        await dead.has(chain)
    await other.has(chains[0])
    assert redis.command("HLEN", chains[0].bucket(0)) == 4001
    assert SWEEP_FIELDS < 4001
    await dead.until_lost()
    await other.sweep_all(chains[0])
    assert redis.command("HLEN", chains[0].bucket(0)) == 21


async def test_the_table_of_nodes_is_not_asked_for_more_than_needed(
    redis: RedisServer, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "NODES_MAX_AGE_MS", TTL_MS)
    monkeypatch.setattr(index_module, "NODES_MIN_AGE_MS", TTL_MS)
    [a] = await fake_nodes(redis.url, "a")
    chain = Chain([1, 2])
    await a.has(chain)
    redis.command("HSET", chain.bucket(0), chain.field(0), b"noNODE!!" + a.entry)
    assert await found(index, chain.packed, 2)
    redis.command("CONFIG", "RESETSTAT")
    for _ in range(20):
        assert await found(index, chain.packed, 2)
    stats = redis.command("INFO", "commandstats")
    assert isinstance(stats, dict)
    assert stats["cmdstat_evalsha"]["calls"] == 20, "one for each look-up, and none for the entry that nobody knows"


async def test_the_registry_lists_live_components(redis: RedisServer) -> None:
    registry = Registry(redis.url, TTL_MS)
    first = await registry.heartbeat(
        ComponentRecord(component_id="d", role="decode", address="x", model="m", waiting_tokens=5)
    )
    assert not first.known
    assert first.node_number == b""
    again = await registry.heartbeat(
        ComponentRecord(component_id="d", role="decode", address="x", model="m", waiting_tokens=6)
    )
    assert again.known
    await registry.heartbeat(ComponentRecord(component_id="p", role="prefill", address="y"))
    components = sorted(await registry.components(), key=lambda component: component.component_id)
    assert [(component.component_id, component.waiting_tokens) for component in components] == [("d", 6), ("p", 0)]
    assert all(0 <= component.heartbeat_age_ms < TTL_MS for component in components)
    short = Registry(redis.url, 100)
    await short.heartbeat(ComponentRecord(component_id="p", role="prefill", address="y"))

    async def only_d() -> bool:
        return [component.component_id for component in await registry.components()] == ["d"]

    await until("the silent component to be lost", only_d)
    assert not (await short.heartbeat(ComponentRecord(component_id="p", role="prefill", address="y"))).known, (
        "it was lost meanwhile"
    )
    await registry.leave("d")
    await registry.leave("d")
    redis.command("HSET", keys.COMPONENTS, "p", b"9999999999999 not json")
    assert await registry.components() == []
    await registry.aclose()
    await short.aclose()


async def test_only_new_heartbeats_are_parsed(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer, parsed = Registry(redis.url, TTL_MS), Registry(redis.url, TTL_MS), 0
    from_json = ComponentRecord.from_json

    def counted(text: bytes) -> ComponentRecord:
        nonlocal parsed
        parsed += 1
        return from_json(text)

    monkeypatch.setattr(ComponentRecord, "from_json", counted)
    records = [ComponentRecord(component_id=f"d{n}", role="decode", address="x") for n in range(1200)]
    for record in records:
        await writer.heartbeat(record)
    first = {record.component_id: record for record in await reader.components()}
    assert (len(first), parsed) == (1200, 1200), "more than one call of Redis's HMGET takes"
    await writer.heartbeat(records[0])
    await writer.heartbeat(replace(records[1], waiting_tokens=7))
    second = {record.component_id: record for record in await reader.components()}
    assert parsed == 1201, "what is written as before is not parsed again"
    assert second["d1"].waiting_tokens == 7
    assert {name for name, record in second.items() if first[name] is not record} <= {"d0", "d1", "d1199"}
    # One leaves and one comes between two looks; one leaves alone.
    await writer.leave("d5")
    await writer.heartbeat(replace(records[0], component_id="new"))
    assert {record.component_id for record in await reader.components()} == {*first, "new"} - {"d5"}
    await writer.leave("new")
    assert {record.component_id for record in await reader.components()} == {*first} - {"d5"}
    redis.command("FLUSHALL")
    assert await reader.components() == []
    await writer.heartbeat(records[3])
    assert [record.component_id for record in await reader.components()] == ["d3"]
    await reader.aclose()
    await writer.aclose()


def test_keys_are_spread_and_groups_share_a_slot() -> None:
    chain = Chain(range(3 * SEGMENT_BLOCKS + 1))
    buckets = keys.chain_buckets(chain.packed)
    assert buckets == [chain.bucket(block) for block in range(0, len(chain), SEGMENT_BLOCKS)]
    assert len(set(buckets)) == 4
    for key in buckets:
        group = keys.group_of(key)
        assert key in keys.group_buckets(group, 0)
        assert b"{%b}" % group in key
        assert b"{%b}" % group in keys.generation(group)
    assert len({keys.group_name(number) for number in range(keys.GROUPS)}) == keys.GROUPS
    assert keys.chain_fields(chain.packed) == b"".join(chain.field(block) for block in range(len(chain)))


def test_hot_prefixes_are_limited_and_match_shared_prefixes() -> None:
    hot = HotPrefixes(max_entries=20)
    chain = Chain(range(100))
    hot.remember(chain.packed, [("a", 100), ("b", 3)])
    assert hot.find(chain.packed) == {"a": 100, "b": 3}
    shared = Chain([*range(50), 7, 7, 7])
    assert hot.find(shared.packed) == {"a": 32, "b": 3}
    assert hot.find(Chain([9]).packed) == {}
    for number in range(10):
        hot.remember(Chain([1000 + number, 1, 2, 3]).packed, [("c", 4)])
    assert len(hot) == 20
    assert hot.find(Chain([1009, 1]).packed) == {"c": 2}


async def _is(index: Index, asked: bytes, hits: list[PrefixHit]) -> bool:
    return await index.longest_prefix(asked) == hits
