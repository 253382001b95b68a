"""Two and three real nodes over a real Redis: blocks move between them while workers, nodes and the index come and go.

Every block's bytes are derived from its hash, so whoever pins a chain can check its content.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import pytest

from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.redis import RedisServer
from pillion.errors import PillionError
from pillion.kvstore.client.attachment import attach
from pillion.kvstore.hashing import HASH_BYTES, split_hashes
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.redis_writer import IndexWriter
from pillion.kvstore.index.registry import Registry
from pillion.v1.kvnode_pb2 import NodeStatus, PrefetchReply
from tests.support.kv_hosts import BLOCK_BYTES, EAGER, NUM_SLOTS, KVHost, hosts, prompt
from tests.support.redis_nodes import Chain, patient


@pytest.fixture(params=["grpc", "nixl"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl")
    return str(request.param)


def spilled(status: NodeStatus) -> bool:
    """Return whether all blocks that the watermarks want out of the pool are on disk."""
    return status.free_blocks >= NUM_SLOTS * 0.8 and status.disk_blocks == status.spilled_blocks


async def until_indexed(redis: RedisServer, hashes: bytes, wanted: dict[str, int] | None = None) -> None:
    """Wait until the index has the chain: at these nodes, or at any."""
    index = Index(redis.url)

    async def known() -> bool:
        found = {hit.node_id: hit.blocks for hit in await index.longest_prefix(hashes)}
        return found == wanted or (wanted is None and bool(found))

    await until("the index to know the chain", known)
    await index.aclose()


async def test_a_chain_is_copied_between_nodes(short_folder: str, redis: RedisServer, transport: str) -> None:
    async with hosts(short_folder, redis, "a", "b", kv_transport=transport) as (a, b):
        hashes = prompt(*range(20))
        assert await a.serve(hashes) == PrefetchReply(blocks=0)
        assert await b.serve(hashes, "a") == PrefetchReply(blocks=20, fetched_blocks=20)
        assert (await b.client.status()).kv_transport == transport
        assert (await a.client.status()).served_blocks == 20
        # A replica is a block like any other: it is found in the index, and serves others.
        await until_indexed(redis, hashes, {"a": 20, "b": 20})
        for host in (a, b):
            await host.idle()
            await host.check()


async def test_a_failed_pin_removes_missing_blocks_from_the_index(short_folder: str, redis: RedisServer) -> None:
    async with hosts(short_folder, redis, "a", disk_path=f"{short_folder}/disk", **EAGER) as (a,):
        held, chain = prompt(*range(20)), Chain(range(30))
        await a.serve(held)
        await a.until(spilled)
        await until_indexed(redis, held, {"a": 20})
        # What a lost "gone" leaves behind: Redis believes in blocks that went.
        writer, registry = patient(IndexWriter(redis.url)), patient(Registry(redis.url, 60_000))
        (entry,) = (await registry.nodes()).entries()
        await writer.announce(entry, chain.events(20, 30))
        await until_indexed(redis, chain.packed, {"a": 30})
        ticket = await a.open(chain.packed, expected_blocks=30)
        assert ticket.pinned_blocks < 20
        await until_indexed(redis, chain.packed, {"a": 20})
        await a.release(ticket)
        await writer.aclose()
        await registry.aclose()
        await a.idle()
        await a.check()


async def test_only_missing_blocks_are_fetched(short_folder: str, redis: RedisServer, transport: str) -> None:
    async with hosts(short_folder, redis, "a", "b", kv_transport=transport) as (a, b):
        await a.serve(prompt(*range(20)))
        await b.serve(prompt(*range(7), 99, 98))
        assert await b.serve(prompt(*range(25)), "nobody", "a") == PrefetchReply(blocks=20, fetched_blocks=13)
        await b.idle()
        await b.check()


async def test_chunks_are_fetched_while_later_ones_are_computed(
    short_folder: str, redis: RedisServer, transport: str
) -> None:
    """The decode worker's node gets every chunk soon after it is committed elsewhere, under one ticket."""
    async with hosts(short_folder, redis, "a", "b", kv_transport=transport) as (a, b):
        hashes = prompt(*range(12))
        there, here = await a.open(hashes), await b.open(hashes)
        for end in (4, 8, 12):
            await a.fill(there, hashes[: end * HASH_BYTES])
            brought = await b.fetch(here, hashes[: end * HASH_BYTES], "a")
            assert (brought.blocks, brought.fetched_blocks) == (end, 4)
        assert await b.fill(here, hashes) == 12
        await a.release(there)
        await b.release(here)
        for host in (a, b):
            await host.idle()
            await host.check()


async def test_a_restarted_source_has_no_blocks(short_folder: str, redis: RedisServer, transport: str) -> None:
    async with hosts(short_folder, redis, "a", "b", kv_transport=transport) as (a, b):
        await a.serve(prompt(*range(10)))
        assert (await b.serve(prompt(*range(5)), "a")).fetched_blocks == 5
        await a.stop()
        assert (await b.serve(prompt(*range(10)), "a")).blocks == 5
        await a.start()
        assert (await b.serve(prompt(*range(100, 110)), "a")).blocks == 0
        # A source that failed is left alone for a moment.
        firsts = itertools.count(200, 10)

        async def fetched() -> bool:
            first = next(firsts)
            await a.serve(prompt(*range(first, first + 10)))
            return (await b.serve(prompt(*range(first, first + 10)), "a")).fetched_blocks == 10

        await until("a fetch from the restarted source", fetched)
        await b.idle()
        await b.check()


async def test_a_block_with_a_flipped_bit_is_recomputed(short_folder: str, redis: RedisServer, transport: str) -> None:
    async with hosts(short_folder, redis, "a", "b", kv_transport=transport) as (a, b):
        hashes = prompt(*range(10))
        await a.serve(hashes)
        assert (await b.serve(hashes, "a")).fetched_blocks == 10
        assert a.node is not None
        block = a.node.pool.ledger.tree.by_hash[split_hashes(hashes)[6]]
        a.slot(block.slot)[100] ^= 1
        c = KVHost("c", short_folder, redis.url, {"kv_transport": transport})
        await c.start()
        try:
            assert (await c.serve(hashes, "a")).fetched_blocks == 6
            assert (await c.client.status()).corrupt_blocks == 1
            await c.idle()
            await c.check()
        finally:
            await c.stop()


async def test_other_namespaces_share_no_blocks(short_folder: str, redis: RedisServer, transport: str) -> None:
    async with hosts(short_folder, redis, "a", "b", kv_transport=transport) as (a, _):
        await a.serve(prompt(1, 2, 3))
        with pytest.raises(PillionError, match="another model"):
            await asyncio.to_thread(
                attach,
                f"{short_folder}/b.attach",
                component_id="foreign",
                role="decode",
                block_bytes=BLOCK_BYTES,
                timeout_s=WITHIN_S,
                namespace="cd" * HASH_BYTES,
            )


async def test_blocks_survive_on_disk_and_are_announced(
    short_folder: str, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = {"disk_path": str(tmp_path_factory.mktemp("disk")), "disk_bytes": 2**24, **EAGER}
    async with hosts(short_folder, redis, "a", kv_transport="grpc", **flags) as (a,):
        hashes = prompt(*range(30))
        await a.serve(hashes)
        # Two more prompts of thirty push it out of forty slots.
        for first in (1000, 2000):
            await a.serve(prompt(*range(first, first + 30)))
            await a.until(spilled)
        ticket = await a.open(hashes)
        assert ticket.pinned_blocks < 30
        await a.release(ticket)
        status = await a.client.status()
        kept = status.disk_blocks
        assert kept > 0
        await a.stop()
        await a.start()
        await a.until(lambda status: status.disk_blocks >= kept)
        await until_indexed(redis, hashes)
        brought = await a.serve(hashes)
        assert brought.restored_blocks > 0
        assert brought.blocks == brought.restored_blocks
        await a.idle()
        await a.check()


async def test_another_node_fetches_blocks_that_are_only_on_disk(
    short_folder: str, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with hosts(short_folder, redis, "b", kv_transport="grpc") as (b,):
        disk = {"disk_path": str(tmp_path_factory.mktemp("disk")), "kv_transport": "grpc", **EAGER}
        a = KVHost("a", short_folder, redis.url, disk)
        await a.start()
        try:
            hashes = prompt(*range(10))
            await a.serve(hashes)
            for first in (1000, 2000, 3000):
                await a.serve(prompt(*range(first, first + 30)))
                await a.until(spilled)
            ticket = await a.open(hashes)
            assert ticket.pinned_blocks == 0
            await a.release(ticket)
            brought = await b.serve(hashes, "a")
            assert brought.fetched_blocks > 0
            await b.check()
        finally:
            await a.stop()


@pytest.mark.parametrize(("seed", "rounds"), [(1, 25), pytest.param(2, 60, marks=pytest.mark.long)])
async def test_three_nodes_survive_random_faults(
    short_folder: str,
    redis: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
    transport: str,
    seed: int,
    rounds: int,
) -> None:
    """Three nodes, one with a disk; workers die, nodes restart, Redis is emptied, callers disconnect."""
    draw = random.Random(seed)
    async with hosts(short_folder, redis, "a", "b", kv_transport=transport) as (a, b):
        disk = {"disk_path": str(tmp_path_factory.mktemp("disk")), "kv_transport": transport, **EAGER}
        c = KVHost("c", short_folder, redis.url, disk)
        await c.start()
        everybody = [a, b, c]
        try:
            for _ in range(rounds):
                await asyncio.gather(*(_request(draw, everybody) for _ in range(4)))
                await _mischief(draw, everybody, redis)
            for host in everybody:
                await host.idle()
                await host.check()
        finally:
            await c.stop()


async def _request(draw: random.Random, everybody: list[KVHost]) -> None:
    host = draw.choice(everybody)
    length = draw.randrange(1, 14)
    # Few stems, so that prefixes are shared.
    hashes = prompt(draw.randrange(4), *(draw.randrange(2) for _ in range(length)))
    sources = [other.name for other in draw.sample(everybody, 3) if other is not host]
    hurry_s = draw.random() * 0.01 if draw.random() < 0.2 else 10.0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(hurry_s):
            await host.serve(hashes, *sources)


async def _mischief(draw: random.Random, everybody: list[KVHost], redis: RedisServer) -> None:
    host, kind = draw.choice(everybody), draw.random()
    if kind < 0.05:
        await host.stop()
        await host.start()
    elif kind < 0.15:
        async with host.working:
            host.worker.close()
            await host.new_worker()
    elif kind < 0.2:
        redis.command("FLUSHALL")
