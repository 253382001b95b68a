"""Goodput under deadlines, beyond what a cluster serves: answers that are whole in time, at multiples of its load.

    capacity: answers a second in a closed loop, without deadlines
    loads:    Poisson arrivals at LOADS times the capacity; every client gives each request --timeout-s

Goodput is the number of answers a second of arrivals that were whole in time. What counts is its share of the best
one, over all loads: whoever asks more than is served must not get less. In simulation, by default, everything follows
from the seed; with --served it is a real cluster, and the figures are those of a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import tempfile
from typing import Any

from rich.table import Table

from lab.benchmarks.closed_loop import TOKEN_RANGE, ClosedLoad
from lab.benchmarks.closed_loop import measure as measure_closed
from lab.benchmarks.report import RESULTS, save, show_table
from lab.fleets.traffic import Request
from lab.fleets.world import lab_fleet, simulate, simulate_closed
from pillion.loadgen.drive import LoadDriver
from pillion.loadgen.load import LoadSession, Turn
from pillion.loadgen.target import PillionTarget

LOADS = (0.7, 1.0, 2.0, 5.0, 10.0)
GOAL = 0.9
# A load is offered for so many times the clients' patience before its arrivals count: the first ones find an empty
# line, and a load that lasts does not.
SETTLE_TIMEOUTS = 2.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the load."""
    parser.add_argument("--input-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--timeout-s", type=float, default=3.0, help="time that a client gives a request")
    parser.add_argument("--concurrency", type=int, default=32, help="of the closed loop that finds the capacity")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the arrivals of each load")
    parser.add_argument("--workers", type=int, default=1, help="decode workers")
    parser.add_argument("--seed", type=int, default=1)


def settle_s(args: argparse.Namespace) -> float:
    """Returns the seconds after which arrivals count."""
    return SETTLE_TIMEOUTS * float(args.timeout_s)


def arrivals(args: argparse.Namespace, rate: float) -> list[float]:
    """Draws the times of Poisson arrivals of ``rate`` requests a second: until they count, and for ``args.seconds``
    after that."""
    draw, now, found = random.Random(f"{args.seed} {rate}"), 0.0, []
    while (now := now + draw.expovariate(rate)) < settle_s(args) + args.seconds:
        found.append(now)
    return found


def simulated(args: argparse.Namespace, cost_s: tuple[float, ...]) -> list[dict[str, Any]]:
    """Simulates the capacity and each load; returns a row for each load."""
    fleet = lab_fleet(0, args.workers, cost_s, cost_s, split_policy="colocated")
    each = args.input_tokens, args.output_tokens
    closed = [Request(number, 0.0, *each) for number in range(4 * args.concurrency)]
    _, seconds = simulate_closed(fleet, closed, args.concurrency)
    capacity, rows = len(closed) / seconds, []
    for load in LOADS:
        times = enumerate(arrivals(args, load * capacity))
        records, _ = simulate(fleet, [Request(n, at_s, *each, timeout_s=args.timeout_s) for n, at_s in times])
        good = sum(not record.failed for record in records if record.request.at_s >= settle_s(args))
        late = sum("deadline passed" in record.reason for record in records)
        rows.append(_row(load, capacity, len(records), good / args.seconds, late))
    return rows


async def served(args: argparse.Namespace, target: str) -> list[dict[str, Any]]:
    """Measures the capacity and each load at a running cluster; returns a row for each load."""
    closed = ClosedLoad(args.input_tokens, args.output_tokens, args.concurrency, 4 * args.concurrency)
    rates = []
    for seed in range(2):
        # The first round warms up.
        client = PillionTarget("", True, 0.0, target=target)
        run = await measure_closed(client, closed.sessions(args.seed + seed), args.concurrency)
        rates.append(len(run.records) / run.duration_s)
    rows = []
    for load in LOADS:
        draw = random.Random(f"{args.seed} {load}")
        sessions = [
            LoadSession(
                at_s, (Turn(args.output_tokens, ids=[draw.randrange(*TOKEN_RANGE) for _ in range(args.input_tokens)]),)
            )
            for at_s in arrivals(args, load * rates[-1])
        ]
        client = PillionTarget("", True, 0.0, args.timeout_s, target=target)
        try:
            # The client looks at the time itself, too: an answer that came whole and too late is no good one.
            run = await LoadDriver(client, sessions, timeout_s=args.timeout_s).run()
        finally:
            await client.aclose()
        good = sum(record.ok for record in run.records if record.due_s >= settle_s(args))
        late = sum(record.status in ("DeadlineExceeded", "timeout") for record in run.records)
        rows.append(_row(load, rates[-1], len(run.records), good / args.seconds, late))
    return rows


def _row(load: float, capacity: float, requests: int, goodput: float, late: int) -> dict[str, Any]:
    return {"load": load, "capacity_per_s": capacity, "requests": requests, "goodput_per_s": goodput, "late": late}


def with_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with each goodput's share of the best one."""
    best = max(row["goodput_per_s"] for row in rows)
    return [row | {"share_of_best": row["goodput_per_s"] / best if best else 0.0} for row in rows]


def main() -> None:
    """Simulates or measures, prints, and writes results/deadlines.json or results/deadlines_served.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--served", action="store_true", help="start a real cluster with the demo model")
    parser.add_argument("--model", default="demo")
    add_flags(parser)
    args = parser.parse_args()
    if args.served:
        from lab.testbed.cluster import served as cluster_of

        flags = ("--max-model-len=2048", f"--decode-workers={args.workers}")
        with (
            tempfile.TemporaryDirectory(prefix="pil-") as folder,
            cluster_of(pathlib.Path(folder), args.model, *flags) as cluster,
        ):
            rows = with_shares(asyncio.run(served(args, cluster.target)))
    else:
        cost_s = tuple(json.loads((RESULTS / "split_fit.json").read_text())["step_cost_s"])
        rows = with_shares(simulated(args, cost_s))
    table = Table("load", "requests/s", "in time/s", "share of the best", "too late")
    for row in rows:
        offered = f"{row['load'] * row['capacity_per_s']:.1f}"
        cells = f"{row['goodput_per_s']:.1f}", f"{row['share_of_best']:.2f}", str(row["late"])
        table.add_row(f"{row['load']:g}", offered, *cells)
    show_table(table)
    least = min(row["share_of_best"] for row in rows if row["load"] > 1)
    print(f"beyond the capacity at least {least:.2f} of the best; the goal is {GOAL}")
    save("deadlines_served" if args.served else "deadlines", {"load": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
