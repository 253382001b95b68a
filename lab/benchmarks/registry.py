"""`python -m lab.benchmarks.registry`: what a large cluster costs a gateway's event loop, for each look and each plan.

A real Redis holds the records of WORKERS+NODES components (``--sizes``), of which a quarter has sent a new heartbeat
before each look, as with one heartbeat a second and four looks. The way to Redis is awaited; what is measured is this
thread's processor time, which is what a look or a plan takes from the streams beside it, and Redis's own. The first
look is a gateway's start: it reads all records.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from rich.table import Table

from lab.benchmarks.report import save, show_table, spread
from lab.testbed.redis import RedisServer, running_redis
from pillion.gateway.links.cluster import LINKS, Cluster
from pillion.gateway.planning.cluster_view import ClusterSnapshot, parse_policy
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.registry import Registry
from pillion.wire.registry import ComponentRecord

TTL_MS = 3_600_000
LOOKS_PER_HEARTBEAT = 4
BLOCK_SIZE = 16
PROMPT_TOKENS = 2000
# Of nine workers, so many decode.
DECODES, OF_WORKERS = 5, 9
HIT_NODES = 8


class OpenLink:
    """A connection that stands, without a process behind it."""

    def __init__(self, record: ComponentRecord, gateway_id: str) -> None:
        self.address = record.address
        self.alive = True

    async def aclose(self) -> None:
        """Does nothing."""


def main() -> None:
    """Measure, write results/registry.json, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["135+15", "1350+150", "1000+500"], metavar="WORKERS+NODES")
    parser.add_argument("--looks", type=int, default=200)
    parser.add_argument("--plans", type=int, default=1000)
    args = parser.parse_args()
    sizes = {}
    for size in args.sizes:
        workers, nodes = map(int, size.split("+"))
        sizes[size] = asyncio.run(measure(workers, nodes, looks=args.looks, plans=args.plans))
    path = save("registry", {"sizes": sizes})
    table = Table("ms of processor time", *sizes)
    for name in next(iter(sizes.values())):
        cells = (f"{found[name]['median']:.2f} ({found[name]['min']:.2f}-{found[name]['max']:.2f})"
                 for found in sizes.values())  # fmt: skip
        table.add_row(name, *cells)
    show_table(table)
    print(f"written to {path}")


async def measure(workers: int, nodes: int, *, looks: int, plans: int) -> dict[str, dict[str, float]]:
    """Measures one size; milliseconds as the median of ten rounds, with the least and the greatest round."""
    count = workers + nodes
    for role in LINKS:
        LINKS[role] = OpenLink  # type: ignore[assignment]
    with running_redis() as redis:
        writer, cluster = (
            Registry(redis.url, TTL_MS),
            Cluster("gateway-0", Registry(redis.url, TTL_MS), Index(redis.url), 5.0),
        )
        records = [record(number, nodes) for number in range(count)]
        for one in records:
            await writer.heartbeat(one)
        rng = random.Random(1)

        async def heartbeats() -> None:
            for one in rng.sample(records, count // LOOKS_PER_HEARTBEAT):
                await writer.heartbeat(msgspec.structs.replace(one, queued_tokens=rng.randrange(4000)))

        async def nothing() -> None:
            pass

        numbers = iter(range(2**30))

        async def plan() -> None:
            plan_one(cluster, next(numbers), nodes)

        async def start() -> None:
            fresh = Cluster("gateway-1", Registry(redis.url, TTL_MS), Index(redis.url), 5.0)
            await fresh.refresh()
            await fresh.aclose()

        async def heartbeat() -> None:
            await writer.heartbeat(rng.choice(records))

        await cluster.refresh()
        found = {
            "a gateway's first look": await rounds(20, nothing, start),
            "a look": await rounds(looks, heartbeats, cluster.refresh),
            "a plan": await rounds(plans, nothing, plan),
            "Redis, a look": await rounds(looks, heartbeats, cluster.refresh, partial(server_s, redis)),
            "Redis, a heartbeat": await rounds(looks, nothing, heartbeat, partial(server_s, redis)),
        }
        await writer.aclose()
        await cluster.aclose()
    return found


async def rounds(
    count: int,
    before: Callable[[], Awaitable[None]],
    work: Callable[[], Awaitable[None]],
    clock_s: Callable[[], float] = time.thread_time,
) -> dict[str, float]:
    """Time ``work`` alone; returns milliseconds of a call, the spread over ten rounds' medians."""
    medians = []
    for _ in range(10):
        taken = []
        for _ in range(count // 10):
            await before()
            begun_s = clock_s()
            await work()
            taken.append((clock_s() - begun_s) * 1000)
        medians.append(sorted(taken)[len(taken) // 2])
    return spread(medians)


def server_s(redis: RedisServer) -> float:
    """Returns the seconds of processor time that Redis has taken."""
    info = redis.command("INFO", "cpu")
    assert isinstance(info, dict)
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def record(number: int, nodes: int) -> ComponentRecord:
    """Returns the record of a component as a busy one would write it: the nodes first, then their workers."""
    node_id = f"kvnode-{number % nodes}"
    if number < nodes:
        return ComponentRecord(
            component_id=node_id, role="kvnode", address=f"10.0.0.1:{number}", node_id=node_id, total_blocks=20_000
        )
    rng = random.Random(number)
    role = "decode" if (number - nodes) % OF_WORKERS < DECODES else "prefill"
    load: dict[str, Any] = {name: rng.randrange(30) for name in ("running_requests", "free_seqs", "decoding_requests")}
    return ComponentRecord(
        component_id=f"{role}-{number}",
        role=role,
        address=f"10.0.0.1:{number}",
        model="m",
        fingerprint="f" * 64,
        namespace="0f" * 32,
        block_size_tokens=BLOCK_SIZE,
        max_model_len_tokens=8192,
        vocab_size=128_000,
        node_id=node_id,
        max_step_tokens=512,
        target_itl_ms=50.0,
        step_cost_s=(5e-3 * rng.uniform(0.8, 1.2), 5e-4, 5e-5, 1e-7, 1e-7),
        largest_step_tokens=512,
        block_bytes=2**20,
        kernels="cpu/avx512_bf16",
        context_tokens=4000,
        queued_tokens=rng.randrange(4000),
        **load,
    )


def plan_one(cluster: Cluster, number: int, nodes: int) -> None:
    """Returns what a gateway does for one request between its arrival and its plan, the questions to Redis left out."""
    hits = {f"kvnode-{(number * 7 + n) % nodes}": 10 * n for n in range(1, HIT_NODES)}
    cluster.request_slots("m")
    max(cluster.pools_tokens("m"))
    served = cluster.served("m", "f" * 64)
    seen = ClusterSnapshot(
        model="m",
        prompt_tokens=PROMPT_TOKENS,
        hits=hits,
        components=cluster.candidates(served, PROMPT_TOKENS, hits, number),
        policy=parse_policy("auto"),
        block_size=served.block_size,
        chunk_tokens=512,
        sent_load=cluster.load.by_component,
        sent_tokens=cluster.load.tokens,
        spread=number,
    )
    cluster.routes.plan(seen, time.monotonic())


if __name__ == "__main__":
    main()
