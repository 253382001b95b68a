"""`python -m lab.benchmarks.recording`: what recording every request costs, in processor time for each answered token.

Two gateways stand before the same workers, and one of them records all requests with their texts. Short loads go to one
and the other in turns. The result is the ratio of the processor time of each pair, for the gateway alone and for the
whole cluster: its median, and the interval in which the true median is with 95 % of certainty, by order statistics.
"added" is what recording adds to the gateway by the time of the whole cluster, whose workers know nothing of it: that
is what it takes of throughput where processors are the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import pathlib
import tempfile
import time
from typing import Any

from rich.table import Table

from lab.benchmarks.closed_loop import ClosedLoad, measure
from lab.benchmarks.report import save, show_table
from lab.testbed.hosts import Hosts, hosts
from pillion.loadgen.target import PillionTarget

RECORD = ("--record-content", "full", "--record-share", "1")
NAMES = ("plain", "recording")
PARTS = ("gateway", "cluster")
# Linux counts a process's processor time in nanoseconds by a clock with this number, made of the process's id.
CLOCK_BITS, CLOCK_KIND = 3, 2


def cpu_s(cluster: Hosts, *names: str) -> float:
    """Returns the processor time of processes of a cluster so far, in seconds; of all of them without names."""
    pids = [cluster.processes[name].pid for name in names or cluster.processes]
    return sum(time.clock_gettime((~pid << CLOCK_BITS) | CLOCK_KIND) for pid in pids)


def cost_of(cluster: Hosts, name: str, target: str, load: ClosedLoad, seed: int) -> dict[str, float]:
    """Sends a load once; returns the processor microseconds of each answered token, by part."""
    before = {"gateway": cpu_s(cluster, name), "cluster": cpu_s(cluster)}
    run = asyncio.run(measure(PillionTarget("", True, 0.0, target=target), load.sessions(seed), load.concurrency))
    tokens = sum(record.output_tokens for record in run.records)
    after = {"gateway": cpu_s(cluster, name), "cluster": cpu_s(cluster)}
    return {part: (after[part] - before[part]) / tokens * 1e6 for part in PARTS}


def median_interval(values: list[float]) -> dict[str, float]:
    """Returns the median and the bounds of its confidence interval of 95 %."""
    ordered, count = sorted(values), len(values)
    outside = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return {"median": middle, "low": ordered[outside], "high": ordered[count - 1 - outside]}


def main() -> None:
    """Measures, prints, and writes results/recording.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--requests", type=int, default=8, help="requests of each load")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    load = ClosedLoad(args.input_len, args.output_len, args.streams, args.requests)
    pairs: list[dict[str, dict[str, float]]] = []
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as name,
        hosts(pathlib.Path(name), "--model", args.model) as cluster,
    ):
        cluster.node("kv")
        workers = [cluster.worker(role, "kv") for role in ("prefill", "decode")]
        flags = {"plain": (), "recording": ("--record-path", f"{name}/records", *RECORD)}
        targets = {one: cluster.gateway(*flags[one], name=one) for one in NAMES}
        for one, target in targets.items():
            cluster.sees(target, *workers, gateway=one)
        # The first pair warms up. Each gateway comes first in every other pair.
        for number in range(args.pairs + 1):
            order = NAMES[:: -1 if number % 2 else 1]
            seeds = {one: 2 * number + place for place, one in enumerate(NAMES)}
            pairs.append({one: cost_of(cluster, one, targets[one], load, seeds[one]) for one in order})
        assert not cluster.logs().count("not recorded"), cluster.logs()
    table = Table(title=f"{load.name}, {args.pairs} pairs of {args.requests} requests")
    for title in ("", "us/token", "recording", "ratio", "from", "to"):
        table.add_column(title, justify="right" if title else "left")
    result: dict[str, Any] = {}
    for pair in pairs:
        plain, recording = pair["plain"], pair["recording"]
        plain["added"] = plain["cluster"]
        recording["added"] = plain["cluster"] + recording["gateway"] - plain["gateway"]
    for part in (*PARTS, "added"):
        sides = {one: median_interval([pair[one][part] for pair in pairs[1:]])["median"] for one in NAMES}
        ratio = median_interval([pair["recording"][part] / pair["plain"][part] for pair in pairs[1:]])
        result[part] = {"ratio": ratio, "us_per_token": sides}
        table.add_row(part, *(f"{sides[one]:.0f}" for one in NAMES), *(f"{value:.4f}" for value in ratio.values()))
    show_table(table)
    print(f"written to {save('recording', result)}")


if __name__ == "__main__":
    main()
