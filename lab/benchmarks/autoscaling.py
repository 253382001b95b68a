"""A fleet that grows and shrinks by the Helm chart's rule, beside fleets of a fixed size, in simulated time.

    python -m lab.benchmarks.autoscaling --start-s 10 60 200

    trace of Mooncake's statistics, its arrivals bent to a day with bursts --> simulated fleet
    every 15 s: the rule says how many workers of each kind there should be --> some start, or drain

The fleet is that of :mod:`lab.fleets`: production planner and scheduler. A worker that starts
is paid for and serves ``--start-s`` seconds later; one that is not wanted any more drains and is paid for until it has.
The rule is applied as an HPA does it. Costs of steps are an assumption: those of a large model on a fast
machine, of none in particular.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lab.benchmarks.mooncake import WORKLOADS, generate_like
from lab.benchmarks.plot import Chart, line_charts
from lab.benchmarks.report import PICTURES, save, show_table
from lab.fleets.sim_gateway import PATIENCE_S
from lab.fleets.traffic import Request, requests_of
from lab.fleets.world import FleetConfig, FleetWorld
from pillion.config import ServeFlags
from pillion.loadgen.figures import percentile
from pillion.loadgen.slo import good, parse_slo
from pillion.loadgen.traces import TraceRequest

# Seconds of a step, token, sequence, KV token read and query-key pair: an assumption (see above).
PREFILL_COST_S = DECODE_COST_S = (20e-3, 80e-6, 20e-6, 40e-9, 5e-9)
BLOCK_BYTES, BYTES_PER_S = 5 * 2**20, 25e9
NODE_BLOCKS = 65_536
DECODE_STEP_TOKENS, PREFILL_STEP_TOKENS, SLOTS = 512, 2048, 64
TARGET_ITL_MS = 50.0
DRAIN_S = 600.0
# How often an HPA looks, and the difference from what is there that it leaves alone.
SYNC_S = 15.0
TOLERANCE = 0.1
# What the Helm chart's queries divide by, as its values say: the time of prefill workers' steps in a second, and the
# requests on decode workers; and the seconds over which the former is averaged.
BUSY_PER_POD, SEQUENCES_PER_POD = 0.5, 24
RATE_WINDOW_S = 60.0
KINDS = ("prefill", "decode")
SCALED = "by the chart's rule"
# The fleet is looked at this often.
TICK_S = 5.0


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """An HPA's behaviour. A wish counts as the least of the last ``up_window_s`` and the most of the last
    ``down_window_s``; in ``period_s`` a fleet at most doubles, and loses ``down_share`` of its workers or one."""

    up_window_s: float
    up_period_s: float
    down_window_s: float
    down_period_s: float
    down_share: float


# That of deploy/helm/pillion/templates/autoscaling.yaml.
CHART_RULE = ScalingRule(0.0, 15.0, 300.0, 60.0, 0.2)


class RuleScaler:
    """One kind's number of workers under a rule."""

    def __init__(self, rule: ScalingRule, least: int, most: int) -> None:
        self._rule = rule
        self._least, self._most = least, most
        self._wishes: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()

    def take(self, now: float, wish: int, present: int) -> int:
        """Returns how many there should be, where there are ``present``, those that start included."""
        rule = self._rule
        longest = max(rule.up_window_s, rule.down_window_s)
        self._wishes.append((now, wish))
        while self._wishes[0][0] < now - longest:
            self._wishes.popleft()
        self._changes.append((now, present))
        while self._changes[0][0] < now - max(rule.up_period_s, rule.down_period_s):
            self._changes.popleft()
        if abs(wish - present) <= TOLERANCE * present:
            return present
        up = min(each for at_s, each in self._wishes if at_s >= now - rule.up_window_s)
        down = max(each for at_s, each in self._wishes if at_s >= now - rule.down_window_s)
        if up > present:
            before = min(count for at_s, count in self._changes if at_s >= now - rule.up_period_s)
            return min(up, 2 * max(1, before), self._most)
        if down < present:
            before = max(count for at_s, count in self._changes if at_s >= now - rule.down_period_s)
            step = max(1, math.ceil(rule.down_share * before))
            return max(down, before - step, self._least)
        return present


class ScaledFleet:
    """A world, the workers that start, and what all of them cost."""

    def __init__(self, world: FleetWorld, start_s: float) -> None:
        self.world = world
        self.start_s = start_s
        self.cost_s = 0.0
        self.sizes: list[tuple[float, int, int]] = []
        self._due: dict[str, deque[float]] = {kind: deque() for kind in KINDS}
        self._counted_s = 0.0

    def present(self, kind: str) -> int:
        """Workers that serve or start."""
        return len(self.world.workers(kind)) + len(self._due[kind])

    def count(self) -> None:
        """Adds what the fleet has cost since the last call."""
        now = self.world.clock.now
        for due in self._due.values():
            while due and due[0] <= now:
                due.popleft()
        workers = len(self.world.site.workers) + sum(map(len, self._due.values()))
        self.cost_s += workers * (now - self._counted_s)
        self._counted_s = now
        self.sizes.append((now, self.present("prefill"), self.present("decode")))

    def scale(self, kind: str, wanted: int) -> None:
        """Starts workers, or drains those that came last."""
        present, serving = self.present(kind), self.world.workers(kind)
        for _ in range(wanted - present):
            self.world.start_worker(kind, self.start_s)
            self._due[kind].append(self.world.clock.now + self.start_s)
        for worker in serving[max(1, len(serving) - max(0, present - wanted)) :]:
            self.world.drain_worker(worker.record.component_id, DRAIN_S)


# Says how many workers of each kind there should be.
Wish = Callable[[ScaledFleet], dict[str, int]]


class ChartQueries:
    """Says how many workers the Helm chart's queries ask for. It has to be called every TICK_S."""

    def __init__(self) -> None:
        # For each prefill worker, by its id, these are times of calls and the time that its steps had taken until then.
        self._worked: dict[str, deque[tuple[float, float]]] = {}

    def __call__(self, fleet: ScaledFleet) -> dict[str, int]:
        world, now = fleet.world, fleet.world.clock.now
        busy = 0.0
        for worker in world.workers("prefill"):
            seen = self._worked.setdefault(worker.record.component_id, deque())
            seen.append((now, worker.worked_s))
            while seen[0][0] < now - RATE_WINDOW_S:
                seen.popleft()
            if len(seen) > 1:
                busy += (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
        records = {kind: [worker.seen(now) for worker in world.workers(kind)] for kind in KINDS}
        sequences = sum(one.running_requests + one.waiting_requests for one in records["decode"])
        # Requests that a gateway has and no worker: those wait.
        ranges = sum(one.running_requests for one in records["prefill"])
        waiting = max(0, sum(world.site.running.values()) - sequences - ranges)
        return {
            "prefill": max(1, math.ceil(busy / BUSY_PER_POD)),
            "decode": max(1, math.ceil((sequences + waiting) / SEQUENCES_PER_POD)),
        }


def bent(
    trace: Sequence[TraceRequest], swing: float, bursts: Sequence[tuple[float, float]], factor: float
) -> list[TraceRequest]:
    """Returns the requests of ``trace`` at other times.

    Their rate is a sine from 1 - ``swing`` to 1 + ``swing`` times the mean, lowest at both ends, and ``factor`` times
    that in ``bursts``. A burst begins at a share of the day and lasts so many seconds."""
    day_s = trace[-1].timestamp / 1000 + 1.0
    grid_s = np.arange(0.0, day_s + 1.0)
    rate = 1 - swing * np.cos(2 * np.pi * grid_s / day_s)
    for share, seconds in bursts:
        rate[(grid_s >= share * day_s) & (grid_s < share * day_s + seconds)] *= factor
    come = np.concatenate([[0.0], np.cumsum(rate)[:-1]])
    times_s = np.array([row.timestamp / 1000 for row in trace])
    moved = np.interp(times_s / day_s * come[-1], come, grid_s)
    return [
        TraceRequest(round(float(at_s) * 1000), row.input_length, row.output_length, row.hash_ids)
        for at_s, row in zip(moved, trace, strict=True)
    ]


def load_of(args: argparse.Namespace, seed: int) -> list[Request]:
    """A day of requests. Those of one stamp of the trace come at random times until the next one."""
    workload, draw = WORKLOADS[args.workload], random.Random(seed)
    trace = generate_like(workload, seed, round(args.rate * args.day_s))
    stretch = args.day_s * 1000 / (trace[-1].timestamp + workload.stamp_s * 1000)
    spread = sorted(row.timestamp + draw.random() * workload.stamp_s * 1000 for row in trace)
    even = [
        TraceRequest(round(at_ms * stretch), row.input_length, row.output_length, row.hash_ids)
        for at_ms, row in zip(spread, trace, strict=True)
    ]
    return requests_of(bent(even, args.swing, [(share, args.burst_s) for share in args.bursts], args.burst_factor))


def fleet_config(args: argparse.Namespace, sizes: tuple[int, int]) -> FleetConfig:
    """Makes the fleet at its start, with so many prefill and decode workers."""
    flags = ServeFlags(
        prefill_workers=sizes[0],
        decode_workers=sizes[1],
        gateway_workers=args.gateways,
        split_policy=args.policy,
        target_itl_ms=TARGET_ITL_MS,
        max_num_batched_tokens=DECODE_STEP_TOKENS,
        max_num_batched_prefill_tokens=PREFILL_STEP_TOKENS,
        chunk_size=PREFILL_STEP_TOKENS,
        max_num_seqs=SLOTS,
        max_inflight_requests=100_000,
        max_inflight_tokens=10**12,
    )
    return FleetConfig(
        flags=flags,
        prefill_cost_s=PREFILL_COST_S,
        decode_cost_s=DECODE_COST_S,
        node_blocks=NODE_BLOCKS,
        block_bytes=BLOCK_BYTES,
        bytes_per_s=BYTES_PER_S,
        known_costs=True,
        macro_steps=True,
    )


def run(
    args: argparse.Namespace,
    requests: Sequence[Request],
    sizes: tuple[int, int],
    start_s: float,
    wish: Wish | None,
    rule: ScalingRule = CHART_RULE,
) -> dict[str, Any]:
    """Simulates one day; returns the figures. Without ``wish`` the fleet stays as large as it is."""
    world = FleetWorld(fleet_config(args, sizes))
    fleet = ScaledFleet(world, start_s)
    held = {kind: RuleScaler(rule, 1, args.most) for kind in KINDS}
    world.send(requests)
    last_s = requests[-1].at_s
    ticks = 0
    while world.clock.now < last_s or (world.open_requests() and world.clock.now < last_s + PATIENCE_S):
        world.clock.run(world.clock.now + TICK_S)
        fleet.count()
        if wish is None or world.clock.now > last_s:
            continue
        ticks += 1
        wishes = wish(fleet)
        if ticks % round(SYNC_S / TICK_S) == 0:
            for kind in KINDS:
                fleet.scale(kind, held[kind].take(world.clock.now, wishes[kind], fleet.present(kind)))
    world.check_integrity()
    records = world.records()
    bench = [record.bench_record() for record in records]
    ttfts = [record.ttft_s for record in records]
    met = good(parse_slo(args.slo), bench)
    day = [size for size in fleet.sizes if size[0] <= last_s]
    return {
        "good_share": sum(met) / len(met),
        "failed": sum(record.failed for record in records),
        "answered": sum(not record.failed for record in records),
        "replayed": sum(record.replays > 0 for record in records),
        "worker_s": round(fleet.cost_s),
        "mean_workers": fleet.cost_s / fleet.sizes[-1][0],
        "mean_sizes": [sum(size[1] for size in day) / len(day), sum(size[2] for size in day) / len(day)],
        "peak_sizes": [max(size[1] for size in day), max(size[2] for size in day)],
        "ttft_p50_s": percentile(ttfts, 50),
        "ttft_p99_s": percentile(ttfts, 99),
        "sizes": [[round(at_s), prefills, decodes] for at_s, prefills, decodes in day[:: round(60 / TICK_S)]],
    }


def add_run(args: argparse.Namespace, seed: int, fleet: str, start_s: float, sizes: tuple[int, int]) -> dict[str, Any]:
    """Returns the row of one kind of fleet, which begins with some prefill and decode workers."""
    wish = ChartQueries() if fleet == SCALED else None
    row = {"seed": seed, "fleet": fleet, "start_s": start_s} | run(args, load_of(args, seed), sizes, start_s, wish)
    Console().print({name: value for name, value in row.items() if name != "sizes"})
    return row


def compare(args: argparse.Namespace, seed: int, start_s: float) -> list[dict[str, Any]]:
    """Simulates the fleets of one start-up time on the day of one seed."""
    scaled = add_run(args, seed, SCALED, start_s, tuple(args.first))
    prefills, decodes = (math.ceil(size) for size in scaled["mean_sizes"])
    return [scaled, add_run(args, seed, "fixed, its mean", start_s, (prefills, decodes))]


def days(args: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Simulates every kind of fleet with every start-up time on the day of one seed, and returns a row for each."""
    with ProcessPoolExecutor(args.jobs) as pool:
        found = pool.map(compare, *zip(*((args, seed, start_s) for start_s in args.start_s), strict=True))
        rows = [row for each in found for row in each]
    prefills, decodes = (max(row["peak_sizes"][at] for row in rows if row["fleet"] == SCALED) for at in (0, 1))
    return [*rows, add_run(args, seed, "fixed, its peak", 0.0, (prefills, decodes))]


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the medians over the seeds, by kind of fleet and start-up time."""
    figures = ("good_share", "worker_s", "mean_workers", "ttft_p50_s", "ttft_p99_s")
    found = []
    for fleet, start_s in dict.fromkeys((row["fleet"], row["start_s"]) for row in rows):
        mine = [row for row in rows if (row["fleet"], row["start_s"]) == (fleet, start_s)]
        middle = {name: statistics.median(row[name] for row in mine) for name in figures}
        found.append({"fleet": fleet, "start_s": start_s, "lost": sum(row["failed"] for row in mine)} | middle)
    return found


def picture(rows: Sequence[dict[str, Any]], seed: int) -> None:
    """Draws the sizes of the fleets over the first seed's day, and what each start-up time costs."""
    by_fleet = medians(rows)
    start_s = sorted({row["start_s"] for row in rows if row["fleet"] == SCALED})[-2:][0]
    over_time = {
        row["fleet"]: [(at_s / 60, prefills + decodes) for at_s, prefills, decodes in row["sizes"]]
        for row in rows
        if row["seed"] == seed and row["start_s"] in (start_s, 0.0)
    }
    names = list(dict.fromkeys(row["fleet"] for row in by_fleet if row["start_s"]))
    peak = next(row for row in by_fleet if not row["start_s"])
    starts = sorted({row["start_s"] for row in by_fleet if row["start_s"]})

    def lines(figure: str, factor: float) -> dict[str, list[tuple[float, float]]]:
        found = {
            name: [(row["start_s"], factor * row[figure]) for row in by_fleet if row["fleet"] == name] for name in names
        }
        return found | {peak["fleet"]: [(at_s, factor * peak[figure]) for at_s in starts]}

    line_charts(
        PICTURES / "autoscaling.svg",
        [
            Chart(f"Workers, start-up of {start_s:g} s", "minute", "workers, those that start included", over_time),
            Chart("Good requests", "start-up, s", "share, %", lines("good_share", 100.0), log_x=True),
            Chart("What it costs", "start-up, s", "worker-hours", lines("worker_s", 1 / 3600), log_x=True),
        ],
    )


def main() -> None:
    """Simulate, print, write results/autoscaling.json and docs/autoscaling.svg."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="conversation")
    parser.add_argument("--start-s", type=float, nargs="+", default=[10.0, 60.0, 200.0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from --seed on")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--day-s", type=float, default=3600.0)
    parser.add_argument("--rate", type=float, default=2.0, help="mean arrivals a second")
    parser.add_argument("--swing", type=float, default=0.6, help="how far the rate is above and below its mean")
    parser.add_argument("--bursts", type=float, nargs="*", default=[0.3, 0.7], help="when, as shares of the day")
    parser.add_argument("--burst-s", type=float, default=60.0)
    parser.add_argument("--burst-factor", type=float, default=1.8)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--first", type=int, nargs=2, default=[4, 2], help="prefill and decode workers at the begin")
    parser.add_argument("--most", type=int, default=64, help="most workers of a kind")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--slo", default="ttft=1.5+0.0004*n,itl_p99=0.06")
    args = parser.parse_args()
    rows = [row for seed in range(args.seed, args.seed + args.seeds) for row in days(args, seed)]
    table = Table("fleet", "start-up s", "good", "worker-hours", "mean workers", "TTFT p50 s", "TTFT p99 s", "lost")
    found = medians(rows)
    for row in found:
        table.add_row(
            row["fleet"],
            f"{row['start_s']:g}" if row["start_s"] else "",
            f"{row['good_share']:.3f}",
            f"{row['worker_s'] / 3600:.2f}",
            f"{row['mean_workers']:.1f}",
            f"{row['ttft_p50_s']:.2f}",
            f"{row['ttft_p99_s']:.1f}",
            str(row["lost"]),
        )
    show_table(table)
    picture(rows, args.seed)
    costs = {"prefill_cost_s": PREFILL_COST_S, "decode_cost_s": DECODE_COST_S}
    save("autoscaling", {"load": vars(args), **costs, "rows": rows, "medians": found})


if __name__ == "__main__":
    main()
