"""A real node that leaves: its hottest chains and its pins are at another node, or on its disk, when it is gone."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest

from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.redis import RedisServer
from pillion.kvstore.exchange import exchanged_pool, node_exchange
from pillion.kvstore.hashing import HASH_BYTES, split_hashes
from pillion.kvstore.node.kv_node import KVNode
from pillion.v1.kvnode_pb2 import PinPrefixRequest, PrefetchReply
from tests.support.kv_hosts import BLOCK_BYTES, NUM_SLOTS, KVHost, hosts, prompt

LEAVING: dict[str, Any] = {"hand_over_timeout_s": WITHIN_S, "hand_over_bytes_per_s": 2**40}


def node_of(host: KVHost) -> KVNode:
    assert host.node is not None
    return host.node


def held(host: KVHost, hashes: bytes) -> int:
    """Return the number of leading blocks of a chain in a node's pool."""
    return node_of(host).pool.ledger.tree.longest_prefix(split_hashes(hashes)).blocks


async def seen(host: KVHost, *node_ids: str, blocks: int) -> None:
    """Wait until the registry tells a node that exactly these others are alive, with this many unpinned blocks."""

    async def known() -> bool:
        found = {other.node_id: other for other in await node_of(host)._directory.others()}
        # A block that is still pinned counts for neither.
        used = [NUM_SLOTS - other.free_blocks for other in found.values()]
        return (
            set(found) == set(node_ids)
            and used == [other.committed_blocks - other.pinned_blocks for other in found.values()]
            and sum(used) == blocks
        )

    await until("the other nodes in the registry", known)


async def test_a_node_that_leaves_hands_over_chains_and_pins(short_folder: str, redis: RedisServer) -> None:
    async with hosts(short_folder, redis, "a", "b", **LEAVING) as (a, b):
        head = [*range(6)]
        cold, warm, pinned = prompt(*head, 7, 7), prompt(*head, 8, 8, 8), prompt(50, 51, 52)
        for hashes in (pinned, cold, warm):
            await a.serve(hashes)
        wish = PinPrefixRequest(
            epoch=a.session.epoch, owner="me", name="it", block_hashes=pinned[: 2 * HASH_BYTES], ttl_s=1000, tokens=33
        )
        await a.client.pin_prefix(wish)
        await seen(a, "b", blocks=0)
        await node_of(a).stop(WITHIN_S)
        for hashes in (pinned, cold, warm):
            assert held(b, hashes) == len(hashes) // HASH_BYTES
            # Nothing is fetched again, and every block holds what its hash says.
            assert await b.serve(hashes, "a") == PrefetchReply(blocks=len(hashes) // HASH_BYTES)
        (pin,) = await b.client.list_prefix_pins(b.session.epoch, "me")
        assert (pin.name, pin.tokens, pin.blocks, pin.present_blocks) == ("it", 33, 2, 2)
        assert pin.left_s > 1000 - 3 * WITHIN_S
        await b.idle()
        await b.check()


async def test_blocks_of_a_third_node_are_not_handed_over_again(short_folder: str, redis: RedisServer) -> None:
    async with hosts(short_folder, redis, "a", "b", "c", **LEAVING) as (a, b, c):
        there, here = prompt(*range(5)), prompt(*range(20, 25))
        # By room alone the second node would be asked, also when it has what comes before.
        for hashes in (there, prompt(*range(40, 50)), prompt(*range(60, 70))):
            await c.serve(hashes)
        await a.serve(there)
        await a.serve(here)

        async def announced() -> bool:
            return (await node_of(a)._directory.look_up(there)).get("c") == 5

        await until("the third node's blocks in the index", announced)
        await seen(a, "b", "c", blocks=25)
        await node_of(a).stop(WITHIN_S)
        assert (held(b, there), held(c, there)) == (0, 5)
        assert held(b, here) == 5


async def test_the_hottest_chains_are_handed_over_and_evicted_last(short_folder: str, redis: RedisServer) -> None:
    brimful = {"low_watermark_percent": 0, "high_watermark_percent": 0}
    async with hosts(short_folder, redis, "a", "b", **LEAVING, **brimful) as (a, b):
        chains = [prompt(*range(100 * at, 100 * at + 4)) for at in range(8)]
        for hashes in chains:
            await a.serve(hashes)
        # The other node is full of as many blocks as this one has slots.
        mine = [prompt(*range(5000 + 100 * at, 5004 + 100 * at)) for at in range(10)]
        for hashes in mine:
            await b.serve(hashes)
        await seen(a, "b", blocks=NUM_SLOTS)
        await node_of(a).stop(WITHIN_S)
        # 32 leave and 40 are there: 32/72 of those, 17 blocks, make room.
        assert [held(b, hashes) for hashes in chains] == [0, 0, 0, 1, 4, 4, 4, 4]
        assert [held(b, hashes) for hashes in mine[5:]] == [4] * 5
        at = [one.hash for one in node_of(b).pool.ledger.tree.policy]
        last = [at.index(split_hashes(hashes)[0]) for hashes in chains[4:]]
        assert last == sorted(last)
        await b.idle()
        await b.check()


async def test_leaving_nodes_get_no_blocks(short_folder: str, redis: RedisServer) -> None:
    async with hosts(short_folder, redis, "a", "b", **LEAVING) as (a, b):
        await seen(a, "b", blocks=0)
        node_of(b)._leaving = True
        await seen(a, blocks=0)


async def test_blocks_that_no_node_accepts_go_to_the_disk(
    short_folder: str, redis: RedisServer, tmp_path: pathlib.Path
) -> None:
    flags = {**LEAVING, "disk_path": str(tmp_path / "disk"), "disk_bytes": 2**24}
    hashes = prompt(*range(20))
    async with hosts(short_folder, redis, "a", **flags) as (a,):
        await a.serve(hashes)

        async def opened() -> bool:
            storage = node_of(a)._storage
            return storage is not None and bool(storage._local_tiers)

        await until("the disk to be opened", opened)
        await node_of(a).stop(WITHIN_S)
    async with hosts(short_folder, redis, "a", **flags) as (a,):
        await a.until(lambda status: status.disk_blocks == 20)
        assert await a.serve(hashes) == PrefetchReply(blocks=20, restored_blocks=20)
        await a.check()


async def test_a_reader_that_connects_finds_the_data_plane_open(
    short_folder: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setattr(exchanged_pool, "FIRST_CONTACT_S", 0.4)
    loop = asyncio.get_running_loop()
    async with hosts(short_folder, redis, "a", "b", kv_transport="nixl") as (a, b):
        exchange = node_of(a)._exchange
        assert isinstance(exchange, node_exchange.NodeExchange)
        plane = await exchange.require_pool().plane()
        began_s = loop.time()
        await exchange.require_pool().describe()
        close, closed_s = plane.close, []

        def closing() -> None:
            closed_s.append(loop.time())
            close()

        monkeypatch.setattr(plane, "close", closing)
        await node_of(a).stop(0.0)
        assert closed_s[0] - began_s >= 0.4
        await b.idle()


async def test_a_hand_over_ends_by_its_timeout(short_folder: str, redis: RedisServer) -> None:
    slow = {"hand_over_timeout_s": 0.2, "hand_over_bytes_per_s": BLOCK_BYTES}
    async with hosts(short_folder, redis, "a", "b", **slow) as (a, b):
        cold, warm = prompt(*range(10)), prompt(*range(20, 30))
        await a.serve(cold)
        await a.serve(warm)
        await seen(a, "b", blocks=0)
        await node_of(a).stop(WITHIN_S)
        # What went first, if anything did in this time, is ahead of the rate, and nothing follows.
        assert held(b, cold) == 0
        await b.idle()
        await b.check()
