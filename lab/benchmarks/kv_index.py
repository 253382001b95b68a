"""`python -m lab.benchmarks.kv_index`: the index in a real Redis: look-ups, announcements, memory, and hashing.

Chains of 2,048 blocks, a prompt of 32,768 tokens each, are announced until Redis holds ``--blocks``; then random chains
are looked up, one at a time. Every look-up is followed by a PING on the same connections, which shows the cost of the
way to Redis alone. The server's own time comes from INFO commandstats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import struct
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rich.table import Table

from lab.benchmarks.report import save, show_table
from lab.testbed.redis import RedisServer, running_redis
from lab.testbed.redis_kinds import running_cluster
from pillion.kvstore.hashing import HASH_BYTES, SEGMENT_BLOCKS, chain_hashes, split_hashes
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.announcer import BATCH_BLOCKS
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.redis_writer import SWEEP_FIELDS, IndexWriter, SweepPlace
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.ledger.records import IndexEvent
from pillion.loadgen.figures import percentile
from pillion.wire.registry import ComponentRecord

BLOCK_SIZE = 16
PROMPT_TOKENS = 32_768
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
TTL_MS = 3_600_000
VOCAB = 128_000
# The other shape of data: many short conversations after one system prompt.
SHARED_BLOCKS, OWN_BLOCKS = 20, 30


def main() -> None:
    """Measure, write results/kv_index.json, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--lookups", type=int, default=3000)
    parser.add_argument("--cluster-blocks", type=int, default=131_072, help="blocks in a Redis Cluster; 0: no Cluster")
    args = parser.parse_args()
    result: dict[str, Any] = {"segment_blocks": SEGMENT_BLOCKS, "prompt_tokens": PROMPT_TOKENS}
    result["hashing_ms"] = hashing(200)
    result["one_server"] = asyncio.run(one_server(args.blocks, args.lookups))
    result["one_beginning"] = asyncio.run(one_beginning(args.blocks))
    if args.cluster_blocks:
        result["cluster_of_3"] = asyncio.run(cluster(args.cluster_blocks, args.lookups))
    path = save("kv_index", result)
    show(result)
    print(f"written to {path}")


def hashing(rounds: int) -> dict[str, float]:
    """Measures the milliseconds for the block hashes of one prompt."""
    tokens = [random.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]
    root, taken = secrets.token_bytes(HASH_BYTES), []
    for _ in range(rounds):
        begun = time.perf_counter()
        chain_hashes(root, tokens, BLOCK_SIZE)
        taken.append(time.perf_counter() - begun)
    return figures(taken)


async def one_server(blocks: int, lookups: int) -> dict[str, Any]:
    """Measures look-ups, announcements, sweeps and memory of one Redis that holds ``blocks``."""
    with running_redis() as redis:
        async with components(redis.url) as (index, writer, registry):
            entry = await register(registry, "a", 1)
            empty = used_bytes(redis)
            redis.command("CONFIG", "RESETSTAT")
            begun = time.perf_counter()
            chains = [await announce(writer, entry, whole_chain()) for _ in range(-(-blocks // PROMPT_BLOCKS))]
            took_s = time.perf_counter() - begun
            announce_us = server_us(redis)
            total = len(chains) * PROMPT_BLOCKS
            found: dict[str, Any] = {
                "blocks": total,
                "announced_blocks_per_s": round(total / took_s),
                "announce_server_us": round(announce_us, 1),
                "announce_batch_blocks": BATCH_BLOCKS,
                "bytes_per_block": round((used_bytes(redis) - empty) / total, 1),
            }
            redis.command("CONFIG", "RESETSTAT")
            hit, ping = await look_up(index, chains, lookups, PROMPT_BLOCKS)
            found |= {"hit_ms": figures(hit), "ping_ms": figures(ping), "hit_server_us": server_us(redis)}
            miss, _ = await look_up(index, [whole_chain() for _ in range(20)], lookups // 4, 0)
            found["miss_ms"] = figures(miss)
            await popular(registry, writer, chains[0])
            hot, _ = await look_up(index, chains[:1], lookups // 4, PROMPT_BLOCKS)
            found["hit_of_32_nodes_ms"] = figures(hot)
            found |= await sweeping(redis, registry, writer)
            return found


async def popular(registry: Registry, writer: IndexWriter, chain: bytes) -> None:
    """Announces the first half of ``chain`` for as many other nodes as the index keeps for a block."""
    for number in range(keys.MAX_ENTRIES_PER_BLOCK - 1):
        entry = await register(registry, f"n{number}", 100 + number)
        await announce(writer, entry, chain, PROMPT_BLOCKS // 2 - 7 * number)


async def sweeping(redis: RedisServer, registry: Registry, writer: IndexWriter) -> dict[str, Any]:
    """Measures the server's time of sweeps that find nothing to do."""

    async def live() -> frozenset[bytes]:
        return (await registry.nodes()).entries()

    redis.command("CONFIG", "RESETSTAT")
    at, visits = SweepPlace(), 200
    for _ in range(visits):
        at, _ = await writer.sweep(at, live)
    stats = redis.command("INFO", "commandstats")
    assert isinstance(stats, dict)
    us = stats["cmdstat_evalsha"]["usec"] / visits
    return {"sweep_server_us": round(us, 1), "sweep_groups_per_visit": at.group / visits, "sweep_fields": SWEEP_FIELDS}


async def one_beginning(blocks: int) -> dict[str, Any]:
    """Measures the memory where all chains share their first blocks, and so one bucket."""
    with running_redis() as redis:
        async with components(redis.url) as (_, writer, registry):
            entry = await register(registry, "a", 1)
            empty, chains = used_bytes(redis), blocks // OWN_BLOCKS
            common = [random.randrange(VOCAB) for _ in range(SHARED_BLOCKS)]
            for _ in range(chains):
                own = [random.randrange(VOCAB) for _ in range(OWN_BLOCKS)]
                await announce(writer, entry, chain_hashes(bytes(HASH_BYTES), common + own, 1), first=SHARED_BLOCKS)
            total = chains * OWN_BLOCKS
            first_bucket = keys.chain_buckets(chain_hashes(bytes(HASH_BYTES), common, 1))[0]
            fields = redis.command("HLEN", first_bucket)
            assert isinstance(fields, int)
            return {
                "blocks": total,
                "shared_blocks": SHARED_BLOCKS,
                "own_blocks": OWN_BLOCKS,
                "bytes_per_block": round((used_bytes(redis) - empty) / total, 1),
                "share_of_one_bucket": round(fields / total, 3),
            }


async def cluster(blocks: int, lookups: int) -> dict[str, Any]:
    """Measures look-ups in a Redis Cluster: a call for every segment, pipelined to each shard."""
    with running_cluster() as servers:
        async with components("redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)) as made:
            index, writer, registry = made
            entry = await register(registry, "a", 1)
            begun = time.perf_counter()
            chains = [await announce(writer, entry, whole_chain()) for _ in range(blocks // PROMPT_BLOCKS)]
            took_s = time.perf_counter() - begun
            hit, _ = await look_up(index, chains, lookups // 3, PROMPT_BLOCKS)
            miss, _ = await look_up(index, [whole_chain() for _ in range(20)], lookups // 4, 0)
    rate = round(len(chains) * PROMPT_BLOCKS / took_s)
    return {"blocks": blocks, "announced_blocks_per_s": rate, "hit_ms": figures(hit), "miss_ms": figures(miss)}


# Helpers of all measurements


@contextlib.asynccontextmanager
async def components(url: str) -> AsyncIterator[tuple[Index, IndexWriter, Registry]]:
    """Connects to Redis as a gateway (index), as a node (index writer), and as the registry."""
    made = (Index(url), IndexWriter(url), Registry(url, TTL_MS))
    yield made
    for component in made:
        await component.aclose()


async def register(registry: Registry, node_id: str, boot_epoch: int) -> bytes:
    """Registers a node; returns its entry."""
    record = ComponentRecord(component_id=node_id, role="kvnode", address="x", node_id=node_id, boot_epoch=boot_epoch)
    return (await registry.heartbeat(record)).node_number + struct.pack(">I", boot_epoch)


def whole_chain() -> bytes:
    """Returns the hashes of a prompt that is new."""
    return chain_hashes(secrets.token_bytes(HASH_BYTES), range(PROMPT_BLOCKS), 1)


async def announce(
    writer: IndexWriter, entry: bytes, chain: bytes, blocks: int = PROMPT_BLOCKS, first: int = 0
) -> bytes:
    """Announces the blocks ``first`` .. ``blocks`` of a chain to the index; returns the chain."""
    hashes = split_hashes(chain)[:blocks]
    segments = [hashes[i // SEGMENT_BLOCKS * SEGMENT_BLOCKS] for i in range(len(hashes))]
    events = [IndexEvent(block, True, segment) for block, segment in zip(hashes, segments, strict=True)][first:]
    for at in range(0, len(events), BATCH_BLOCKS):
        await writer.announce(entry, events[at : at + BATCH_BLOCKS])
    return chain


async def look_up(index: Index, chains: Sequence[bytes], times: int, blocks: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each look-up, which must find ``blocks``, and of the PING after each."""
    client: Any = index._link._client
    taken, pings = [], []
    await index.longest_prefix(chains[0])
    for _ in range(times):
        chain = random.choice(chains)
        begun = time.perf_counter()
        hits = await index.longest_prefix(chain)
        answered = time.perf_counter()
        taken.append(answered - begun)
        if not index._link.cluster:
            await client.ping()
            pings.append(time.perf_counter() - answered)
        if (hits[0].blocks if hits else 0) != blocks:
            raise RuntimeError(f"the index found {hits[:1]}, not {blocks} blocks")
    return taken, pings


def figures(seconds: Sequence[float]) -> dict[str, float]:
    """Returns percentiles in milliseconds."""
    marks = {"min": 0.0, "p50": 50.0, "p99": 99.0}
    return {name: round(percentile(seconds, mark) * 1e3, 3) for name, mark in marks.items()}


def used_bytes(redis: RedisServer) -> int:
    """Returns the bytes that Redis has allocated."""
    info = redis.command("INFO", "memory")
    assert isinstance(info, dict)
    return int(info["used_memory"])


def server_us(redis: RedisServer) -> float:
    """Returns the server's microseconds per script since the last RESETSTAT."""
    stats = redis.command("INFO", "commandstats")
    assert isinstance(stats, dict)
    return float(stats["cmdstat_evalsha"]["usec_per_call"])


def show(result: dict[str, Any]) -> None:
    """Prints a table of look-ups and a table of announcements and memory."""
    times = Table("milliseconds", "min", "p50", "p99", title=f"a prompt of {PROMPT_TOKENS} tokens")
    one, other = result["one_server"], result.get("cluster_of_3")
    rows = {"hashing": result["hashing_ms"], "look-up, all known": one["hit_ms"], "PING": one["ping_ms"]}
    rows |= {"look-up, nothing known": one["miss_ms"], "look-up, 32 nodes": one["hit_of_32_nodes_ms"]}
    if other:
        rows |= {"Cluster of 3, all known": other["hit_ms"], "Cluster of 3, nothing known": other["miss_ms"]}
    for name, row in rows.items():
        times.add_row(name, *(f"{row[mark]:.3f}" for mark in ("min", "p50", "p99")))
    show_table(times)
    announcements = Table(
        "index", "blocks", "bytes per block", "announced per s", "server us: look-up", "announcement", "sweep"
    )
    server = [f"{one[name]:.0f}" for name in ("hit_server_us", "announce_server_us", "sweep_server_us")]
    rate = f"{one['announced_blocks_per_s']:,}"
    announcements.add_row("prompts of their own", f"{one['blocks']:,}", str(one["bytes_per_block"]), rate, *server)
    shared = result["one_beginning"]
    announcements.add_row("one system prompt", f"{shared['blocks']:,}", str(shared["bytes_per_block"]))
    if other:
        announcements.add_row("Cluster of 3", f"{other['blocks']:,}", "", f"{other['announced_blocks_per_s']:,}")
    show_table(announcements)


if __name__ == "__main__":
    main()
