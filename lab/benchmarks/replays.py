"""Replays requests of every kind, which one cluster recorded while its workers were killed, at a fresh cluster.

    python -m lab.benchmarks.replays [--requests 500]

The first cluster has one worker of each role, draft tokens, a pool so small that prefixes go to the disk and come back,
and a decode worker that is killed now and then. The second one has two of each, another split and other chunks, and
replays under its own load. What counts is how many answers are equal; all should be.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import pathlib
import random
import tempfile
from collections import Counter
from typing import Any

from rich.table import Table

from lab.benchmarks.report import show_table
from lab.testbed.cluster import served
from lab.testbed.recorded_requests import KINDS, ask, bundles_of, recorded_model, replayed
from lab.testbed.tiny_model import byte_prompt
from pillion import AsyncClient
from pillion.errors import PillionError
from pillion.records.bundle import read

AT_ONCE = 6
# A supervisor gives up where a component dies six times in a minute.
KILLS = 3
COMMON = ("--dtype", "float32", "--max-model-len", "1024", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
FIRST = (
    *("--kv-pool-bytes", "4MiB", "--chunk-size", "64", "--split-policy", "fraction:0.5"),
    *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    *("--record-content", "full", "--record-share", "1"),
)
FRESH = (
    *("--decode-workers", "2", "--prefill-workers", "2", "--kv-pool-bytes", "32MiB", "--chunk-size", "32"),
    *("--split-policy", "disaggregated"),
)


def run_replays(requests: int, folder: pathlib.Path) -> dict[str, Any]:
    """Records so many requests at one cluster and replays them at another; returns how many of each kind of recording
    were equal, and the last lines of those that were not."""
    model, adapter = recorded_model(folder)
    common = (*COMMON, "--lora-modules", f"red={adapter}")
    records = folder / "records"
    for name in ("first", "fresh"):
        (folder / name).mkdir()
    disk = ("--disk-path", str(folder / "disk"), "--record-path", str(records))
    with served(folder / "first", str(model), *common, *FIRST, *disk, split_policy="") as cluster:
        asyncio.run(_record(cluster, requests))
        paths = asyncio.run(bundles_of(records, requests))
    with served(folder / "fresh", str(model), *common, *FRESH, split_policy="") as cluster:
        return asyncio.run(_replay(cluster.target, paths))


async def _record(cluster: Any, requests: int) -> None:
    draw = random.Random(1)
    turns = iter(range(requests))
    kill_at = {requests * part // (KILLS + 1) for part in range(1, KILLS + 1)}

    async def work(client: AsyncClient) -> None:
        kinds = list(KINDS)
        for turn in turns:
            if turn in kill_at:
                cluster.kill("decode")
            await ask(client, kinds[turn % len(kinds)], prompt=byte_prompt(draw.randrange(8), draw.randrange(1, 300)))

    async with AsyncClient(cluster.target) as client:
        await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))


async def _replay(target: str, paths: list[pathlib.Path]) -> dict[str, Any]:
    equal: Counter[str] = Counter()
    unequal: list[str] = []
    todo, over = iter(paths), asyncio.Event()

    async def work() -> None:
        for path in todo:
            bundle, _ = read(path, None)
            timings = bundle.receipt["timings"]
            try:
                status, lines = await replayed(path, target)
            except PillionError as error:
                status, lines = 2, [error.message]
            if status:
                unequal.append(f"{bundle.id}: {lines[-1]}")
                continue
            equal["all"] += 1
            equal["replayed after a loss"] += bool(timings["replays"])
            equal["split"] += bool(timings["prefilled_tokens"])
            equal["with draft tokens"] += bool(timings["accepted_tokens"])
            equal["with a cached prefix"] += bool(timings["cached_tokens"])
            equal["of which from the disk"] += bool(timings["restored_tokens"])
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
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        result = run_replays(args.requests, pathlib.Path(name))
    table = Table("recorded", "equal", title=f"{result['requests']} requests replayed")
    for kind, count in result["equal"].items():
        table.add_row(kind, str(count))
    show_table(table)
    print("\n".join(result["unequal"]))


if __name__ == "__main__":
    main()
