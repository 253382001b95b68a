"""Replays of requests of every kind, recorded at two nodes while their workers were killed, on a fresh cluster.

    python -m lab.benchmarks.replays [--requests 500]

Each node has one worker per role and draft tokens. Pools are so small that prefixes are evicted and fetched back: at
kv-a from the disk, at kv-b from a bucket, and at both from each other. Two thirds of the requests are forced to a node;
between these thirds kv-b restarts with an empty pool. During the last third kv-a's decode worker is killed now and
then. The fresh cluster has two workers per role at one node, another split and other chunks, and replays under its own
load. All answers should be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import pathlib
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lab.benchmarks.report import show
from lab.testbed import defaults
from lab.testbed.cluster import served
from lab.testbed.conditions import wait_for
from lab.testbed.hosts import Hosts, hosts
from lab.testbed.recorded_requests import KINDS, ask, bundles_of, recorded_model, replayed
from lab.testbed.s3_service import s3_service
from lab.testbed.tiny_model import byte_prompt
from pillion import AsyncClient
from pillion.errors import PillionError
from pillion.records.bundle import read
from pillion.types import Timings

AT_ONCE = 6
ROLES = ("prefill", "decode")
KILLS = 3
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
MODEL = ("--dtype", "float32", "--max-model-len", "1024")
NODES = ("kv-a", "kv-b")
FORCED = [f"node={node_id}" for node_id in NODES]
NODE = ("--kv-transport", "grpc")
# A long timeout, since late fetches would be computed and not meet the tiers.
FETCHING = {defaults.NODE: {"fetch_timeout_s": 60.0}}
DECODE = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
EDGE = (
    *("--chunk-size", "64", "--split-policy", "fraction:0.5", "--heartbeat-timeout-ms", "10000"),
    *("--record-content", "full", "--record-share", "1"),
)
TIERS = {
    "restored": "with a prefix from the disk",
    "bucket": "with a prefix from the bucket",
    "fetched": "with a prefix from the other node",
}
FRESH = (
    *("--decode-workers", "2", "--prefill-workers", "2", "--kv-pool-bytes", "32MiB", "--chunk-size", "32"),
    *("--split-policy", "disaggregated"),
)


def run_replays(requests: int, folder: pathlib.Path) -> dict[str, Any]:
    """Record ``requests`` requests at one cluster and replay them at another; return the number of equal ones per kind,
    and the last lines of the others."""
    model, adapter = recorded_model(folder)
    modules = ("--lora-modules", f"red={adapter}")
    records = folder / "records"
    for name in ("first", "fresh"):
        (folder / name).mkdir()
    with s3_service(folder / "s3") as service, hosts(folder / "first", "--model", str(model), *MODEL) as cluster:
        cluster.defaults = FETCHING
        flags = {
            "kv-a": ("--kv-pool-bytes", "512KiB", "--disk-path", str(folder / "disk")),
            "kv-b": ("--kv-pool-bytes", "1MiB", "--object-url", service.direct_url()),
        }
        target = cluster.gateway(*EDGE, *LORA, *modules, "--record-path", str(records))
        for node_id in NODES:
            _begin_node(cluster, node_id, flags[node_id])
        cluster.sees(target, *(f"{role}-{node_id}" for node_id in NODES for role in ROLES))
        third = requests // 3
        asyncio.run(_record(target, range(third), FORCED))
        _begin_anew(cluster, target, flags["kv-b"])
        asyncio.run(_record(target, range(third, 2 * third), FORCED))
        with cluster.supervised():
            asyncio.run(_record(target, range(2 * third, requests), [""], cluster))
        paths = asyncio.run(bundles_of(records, requests))
    with served(folder / "fresh", str(model), *MODEL, *LORA, *modules, *FRESH, split_policy="") as fresh:
        return asyncio.run(_replay(fresh.target, paths))


def _begin_node(cluster: Hosts, node_id: str, flags: tuple[str, ...]) -> None:
    cluster.node(node_id, *NODE, *flags)
    for role in ROLES:
        cluster.worker(role, node_id, *LORA, *(DECODE if role == "decode" else ()))


def _begin_anew(cluster: Hosts, target: str, flags: tuple[str, ...]) -> None:
    """End kv-b once its bucket has all of its blocks, and restart it with an empty pool."""

    def all_written() -> bool:
        status = cluster.node_status("kv-b")
        return status.object_blocks >= status.committed_blocks

    wait_for("the bucket to have all blocks", all_written)
    for role in ROLES:
        cluster.stop(f"{role}-kv-b")
    cluster.stop("kv-b")
    left = [f"{role}-kv-a" for role in ROLES]
    cluster.sees(target, *left)
    _begin_node(cluster, "kv-b", flags)
    cluster.sees(target, *left, *(f"{role}-kv-b" for role in ROLES))


async def _record(target: str, turns: range, plans: Sequence[str], victim: Hosts | None = None) -> None:
    """Send these turns, each by one of the plans ("": free). With a ``victim``, kill kv-a's decode worker KILLS
    times."""
    # All thirds have the same prompts, so that later ones hit the first one's blocks.
    draw, todo = random.Random(1), iter(turns)
    kill_at = {turns.start + len(turns) * part // (KILLS + 1) for part in range(1, KILLS + 1)}

    async def work(clients: list[AsyncClient]) -> None:
        kinds = list(KINDS)
        for turn in todo:
            if victim is not None and turn in kill_at:
                victim.processes["decode-kv-a"].kill()
            prompt = byte_prompt(draw.randrange(8), draw.randrange(1, 300))
            await ask(draw.choice(clients), kinds[turn % len(kinds)], prompt=prompt)

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(target, plan=plan)) for plan in plans]
        await asyncio.gather(*(work(clients) for _ in range(AT_ONCE)))


async def _replay(target: str, paths: list[pathlib.Path]) -> dict[str, Any]:
    equal: Counter[str] = Counter()
    unequal: list[str] = []
    todo, over = iter(paths), asyncio.Event()

    async def work() -> None:
        for path in todo:
            bundle, _ = read(path, None)
            timings = bundle.timings or Timings()
            try:
                status, lines = await replayed(path, target)
            except PillionError as error:
                status, lines = 2, [error.message]
            if status:
                unequal.append(f"{bundle.id}: {lines[-1]}")
                continue
            equal["all"] += 1
            equal["replayed after a loss"] += bool(timings.replays)
            equal["split"] += bool(timings.prefilled_tokens)
            equal["with draft tokens"] += bool(timings.accepted_tokens)
            equal["with a cached prefix"] += bool(timings.cached_tokens)
            brought = [getattr(timings, f"{tier}_tokens") for tier in TIERS]
            for tier, tokens in zip(TIERS, brought, strict=True):
                equal[TIERS[tier]] += bool(tokens)
            equal["with a prefix in the pool"] += timings.cached_tokens > sum(brought)
            equal["with an adapter"] += bool(bundle.model.adapter)
            equal["with a grammar"] += bool(bundle.request.grammar)
            equal["of several answers"] += len(bundle.answers) > 1

    async def load(client: AsyncClient) -> None:
        for seed in itertools.count(100):
            if over.is_set():
                return
            await ask(client, "drawn", prompt=byte_prompt(seed, 200))

    async with AsyncClient(target) as client:
        loads = [asyncio.create_task(load(client)) for _ in range(2)]
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        over.set()
        await asyncio.gather(*loads)
    return {"requests": len(paths), "equal": dict(equal), "unequal": unequal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        result = run_replays(args.requests, pathlib.Path(name))
    rows = [{"recorded": kind, "equal": count} for kind, count in result["equal"].items()]
    show(f"{result['requests']} requests replayed", rows)
    print("\n".join(result["unequal"]))


if __name__ == "__main__":
    main()
