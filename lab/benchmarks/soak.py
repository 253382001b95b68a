"""`make soak`: a long load under which nothing may grow. MINUTES is 10 by default.

A cluster with a small KV pool, whose caches fill early, serves the mixed load repeatedly with fresh seeds. Every few
seconds the soak reads each component's private memory and open files, the node's slots and tickets, and the number of
Redis keys.

After a warm-up (the first third), the Theil-Sen slope of each series (the median slope of all pairs of points) times
the observed time must be below the larger of an absolute allowance and a share of the series' median (ALLOWED). A
slower leak needs a longer run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psutil
from redis.asyncio import Redis
from rich.console import Console

from lab.benchmarks.load_test import (
    MAX_MODEL_LEN_TOKENS,
    ROLES,
    add_flags,
    complaints,
    idle_complaints,
    pids,
    process_of,
    run_stage,
    stages,
)
from lab.benchmarks.plot import Chart, line_charts
from lab.benchmarks.report import save, show
from lab.benchmarks.traces import Mix, generate, write_trace
from pillion.kvstore.client.node_client import NodeClient

if TYPE_CHECKING:
    from lab.testbed.cluster import ServedCluster

WARM_UP_SHARE = 1 / 3
SAMPLE_PERIOD_S = 5.0
# Points of a series; more are thinned, since there is a slope per pair of points.
MAX_POINTS = 400
STAGE_S = 20.0
POOL = "128MiB"
# Allowed growth of a series in the observed time: absolute, or a share of its median.
ALLOWED = {
    "memory MiB": (24.0, 0.10),
    "open files": (8.0, 0.10),
    "held blocks": (64.0, 0.10),
    "tickets": (8.0, 0.50),
    "redis keys": (256.0, 0.10),
}

Points = list[tuple[float, float]]


def growth(points: Sequence[tuple[float, float]]) -> float:
    """Return the growth of a series of (time, value): its Theil-Sen slope times its span; 0 for fewer than two points.

    Up to 29 % of the points may be outliers without an effect (Sen 1968).
    """
    kept = points[:: len(points) // MAX_POINTS + 1]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(kept, 2) if b[0] > a[0]]
    return statistics.median(slopes) * (kept[-1][0] - kept[0][0]) if slopes else 0.0


def verdict(kind: str, points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the growth of a series after its warm-up, and its limit."""
    begin = points[0][0] + (points[-1][0] - points[0][0]) * WARM_UP_SHARE
    later = [point for point in points if point[0] >= begin]
    absolute, share = ALLOWED[kind]
    return growth(later), max(absolute, share * statistics.median(value for _, value in later))


class Watch:
    """Samples of a running cluster; ``series``: points by (kind, component)."""

    def __init__(self, cluster: ServedCluster) -> None:
        sockets = [path for path in cluster.folder.rglob("*.sock") if "attach" not in path.name]
        self._node = NodeClient(f"unix:{next(path for path in sockets if path.name.startswith('kvnode'))}", "soak")
        self._redis = Redis(unix_socket_path=str(next(path for path in sockets if path.name.startswith("redis"))))
        self._components = {role: component for role in ROLES if (component := process_of(cluster, role))}
        self.series: dict[tuple[str, str], Points] = {}

    async def run(self, until_s: float) -> None:
        """Sample until ``until_s`` (monotonic) or cancelled. Raises if a component is gone."""
        while time.monotonic() < until_s:
            await self.sample()
            await asyncio.sleep(SAMPLE_PERIOD_S)

    async def sample(self) -> None:
        for role, component in self._components.items():
            memory = component.memory_info()
            # Without the pool, shared memory that all processes map and that may fill.
            self._add("memory MiB", role, (memory.rss - getattr(memory, "shared", 0)) / 2**20)
            self._add("open files", role, component.num_fds())
        status = await self._node.status()
        self._add("held blocks", "kvnode", status.total_blocks - status.free_blocks - status.committed_blocks)
        self._add("tickets", "kvnode", status.tickets + status.waiting_tickets)
        self._add("redis keys", "redis-server", await self._redis.dbsize())

    def _add(self, kind: str, component: str, value: float) -> None:
        self.series.setdefault((kind, component), []).append((time.monotonic(), float(value)))

    async def aclose(self) -> None:
        await self._node.aclose()
        await self._redis.aclose()


async def soak(cluster: ServedCluster, http: str, args: argparse.Namespace) -> tuple[Watch, list[str], int]:
    """Load the cluster and watch it; return the watch, the failures, and the number of requests."""
    trace = cluster.folder / "trace.jsonl"
    write_trace(trace, generate(1, 1000, Mix(system_tokens=700, turn_tokens=60, answer_tokens=12, document_tokens=500)))
    plans = list(stages(cluster.target, http, trace, STAGE_S, args.rate, tuple(args.token_range)))
    watch, wrong, requests = Watch(cluster), [], 0
    until_s = time.monotonic() + args.minutes * 60
    watching = asyncio.create_task(watch.run(until_s))
    try:
        for number in itertools.count():
            if time.monotonic() >= until_s or watching.done():
                break
            name, plan = plans[number % len(plans)]
            fresh = dataclasses.replace(plan.load, seed=1000 + number)
            result = await run_stage(dataclasses.replace(plan, load=fresh))
            wrong += complaints(name, result)
            requests += result["summary"]["requests"]
        await watching
    except (psutil.Error, OSError) as error:
        wrong.append(f"a component is gone: {error!r}")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        trace.unlink()
        with contextlib.suppress(Exception):
            await watch.aclose()
    return watch, wrong, requests


def judge(series: dict[tuple[str, str], Points]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row per series, and a failure per series that grew."""
    rows, wrong = [], []
    for (kind, component), points in sorted(series.items()):
        grew, allowed = verdict(kind, points)
        last = points[-1][1]
        rows.append(
            {"component": component, "kind": kind, "last": last, "grew": grew, "allowed": allowed, "points": points}
        )
        if grew > allowed:
            wrong.append(f"{component}: {kind} grew by {grew:.1f} to {last:.1f}, allowed are {allowed:.1f}")
    return rows, wrong


def draw(path: pathlib.Path, series: dict[tuple[str, str], Points]) -> None:
    """Draw a chart per kind, with a line per component."""
    first = min(points[0][0] for points in series.values())
    charts = []
    for kind in ("memory MiB", "open files", "redis keys"):
        lines = {
            component: [((at - first) / 60, value) for at, value in points]
            for (of, component), points in series.items()
            if of == kind
        }
        charts.append(Chart(kind, "minutes", kind, lines))
    line_charts(path, charts)


def main() -> int:
    """Start the cluster, soak it, and write results/soak.json; return 1 if a request failed or something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--plot", type=pathlib.Path, help="an SVG of the series")
    add_flags(parser)
    args = parser.parse_args()
    from lab.testbed.cluster import served
    from lab.testbed.ports import free_port

    port = free_port()
    flags = (f"--http-port={port}", f"--max-model-len={MAX_MODEL_LEN_TOKENS}", f"--kv-pool-bytes={POOL}", *args.flags)
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), args.model, "--split-policy=auto", *flags) as cluster,
    ):
        before = pids(cluster)
        watch, wrong, requests = asyncio.run(soak(cluster, f"http://127.0.0.1:{port}", args))
        wrong += idle_complaints(cluster)
        wrong += [f"{role} was started again" for role, pid in pids(cluster).items() if pid != before[role]]
    rows, grew = judge(watch.series)
    wrong += grew
    show("growth after the warm-up", [{name: row[name] for name in row if name != "points"} for row in rows])
    for line in wrong:
        Console().print(f"FAILED {line}", style="bold red", markup=False)
    if args.plot:
        draw(args.plot, watch.series)
    save("soak", {"minutes": args.minutes, "requests": requests, "series": rows, "failed": wrong})
    Console().print(f"{requests} requests in {args.minutes:g} minutes:", "passed" if not wrong else "failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
