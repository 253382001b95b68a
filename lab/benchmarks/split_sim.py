"""The planner on more workers than this machine has: the real planner and scheduler classes in simulated time.

Only time is simulated (:mod:`lab.fleets`): a step costs as much as real steps did in :mod:`lab.benchmarks.split_fit`,
with some noise. As in a worker, schedulers fit their own models to these times, publish them by heartbeats and keep to
their targets. Clusters have 2 to 16 workers with a core each; all policies get the same arrivals, of several seeds.
:mod:`lab.benchmarks.simulation_error` shows how far such a simulation is from real clusters.

With --shared, two workers lend each other the cores of a host instead, and serve the closed loops of
:mod:`lab.benchmarks.cpu_service`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.benchmarks.closed_loop import ClosedLoad
from lab.benchmarks.report import RESULTS, save, show_table, spread
from lab.benchmarks.split_load import add_load_flags, arrivals, figures
from lab.fleets.host_cores import NEXT_CORE_SPEED
from lab.fleets.traffic import Request
from lab.fleets.world import lab_fleet, simulate, simulate_closed
from pillion.config import AUTO
from pillion.loadgen.figures import percentile

POLICIES = ("auto", "colocated", "disaggregated")
# DistServe's goodput: the highest rate of arrivals at which this share of the requests is good.
SERVED_SHARE = 0.9
SHARED_LOADS = (
    ClosedLoad(256, 128, 8, 48),
    ClosedLoad(256, 128, 16, 80),
    ClosedLoad(256, 128, 32, 128),
    ClosedLoad(1024, 64, 8, 40),
    ClosedLoad(2048, 64, 4, 24),
)


def sweep(args: argparse.Namespace, cost_s: tuple[float, ...]) -> list[dict[str, Any]]:
    """Simulates each number of workers, rate, seed and policy; all policies of a seed get the same arrivals.

    With the co-located policy all workers decode; with the others a share of them prefills.
    """
    rows = []
    for workers in args.workers:
        prefills = max(1, round(workers * args.prefill_share))
        for rate in args.rates_per_worker:
            for seed, policy in itertools.product(range(args.seed, args.seed + args.seeds), POLICIES):
                prefill_workers = 0 if policy == "colocated" else prefills
                decodes = workers - prefill_workers
                fleet = lab_fleet(prefill_workers, decodes, cost_s, cost_s, args.target_itl_ms, split_policy=policy)
                records, world = simulate(fleet, arrivals(args, rate * workers, seed))
                found, plan_s = figures(args, records), world.gateways[0].plan_s
                rows.append(
                    {"workers": workers, "rate": rate * workers, "seed": seed, "policy": policy}
                    | {name: found[name] for name in ("requests", "goodput_per_s", "good_share")}
                    | {"plan_us": percentile(plan_s, 50) * 1e6}
                )
    return rows


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compares the policies for each number of workers and rate.

    A row has the median share of good requests by policy, and paired over the seeds the goodput of auto over the better
    pure policy's, and the bound of that ratio, at which all arrivals are good.
    """
    found: dict[tuple[int, float], dict[int, dict[str, float]]] = {}
    for row in rows:
        found.setdefault((row["workers"], row["rate"]), {}).setdefault(row["seed"], {})[row["policy"]] = row[
            "good_share"
        ]
    rows_by_rate = []
    for (workers, rate), by_seed in found.items():
        better = [max(by["colocated"], by["disaggregated"], 1e-9) for by in by_seed.values()]
        ratio = spread([by["auto"] / best for by, best in zip(by_seed.values(), better, strict=True)])
        rows_by_rate.append(
            {"workers": workers, "rate": rate}
            | {policy: statistics.median(by[policy] for by in by_seed.values()) for policy in POLICIES}
            | {"ratio": ratio["median"], "ratio_min": ratio["min"], "ratio_max": ratio["max"]}
            | {"ratio_bound": statistics.median(1 / best for best in better)}
        )
    return rows_by_rate


def served_rates(ratios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each number of workers and policy the highest rate at which SERVED_SHARE of the requests is good.

    Shares between two simulated rates are interpolated linearly; the result is 0.0 below the lowest rate.
    """
    rates = []
    for workers in sorted({row["workers"] for row in ratios}):
        rows = [row for row in ratios if row["workers"] == workers]
        found: dict[str, Any] = {"workers": workers}
        for policy in POLICIES:
            found[policy] = rows[0]["rate"] if rows[0][policy] >= SERVED_SHARE else 0.0
            for low, high in itertools.pairwise(rows):
                if low[policy] < SERVED_SHARE:
                    break
                fall = low[policy] - high[policy]
                share = min(1.0, (low[policy] - SERVED_SHARE) / fall) if fall > 0 else 1.0
                found[policy] = low["rate"] + share * (high["rate"] - low["rate"])
        rates.append(found)
    return rates


def shared(cost_s: tuple[float, ...]) -> list[dict[str, Any]]:
    """Simulates closed loops on a host of two cores that workers share; a co-located decode worker owns both."""
    rows = []
    both_s = tuple(weight_s / (1 + NEXT_CORE_SPEED) for weight_s in cost_s)
    for load, policy in itertools.product(SHARED_LOADS, POLICIES):
        apart = lab_fleet(1, 1, cost_s, cost_s, AUTO, shared_cores=1, split_policy=policy)
        alone = lab_fleet(0, 1, (), both_s, AUTO, shared_cores=2, split_policy=policy)
        requests = [Request(number, 0.0, load.input_tokens, load.output_tokens) for number in range(load.requests)]
        records, seconds = simulate_closed(alone if policy == "colocated" else apart, requests, load.concurrency)
        gaps_ms = [gap * 1000 for record in records for gap in record.gaps_s]
        prefilled = sum(record.prefilled_tokens for record in records)
        rows.append(
            {"load": load.name, "policy": policy, "tok/s": load.requests * load.output_tokens / seconds}
            | {"itl_p50_ms": percentile(gaps_ms, 50), "itl_p99_ms": percentile(gaps_ms, 99)}
            | {"ttft_p50_s": statistics.median(record.ttft_s for record in records)}
            | {"prefilled_share": prefilled / (load.requests * load.input_tokens)}
        )
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows as a table."""
    table = Table(title=title)
    for heading in rows[0]:
        table.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    show_table(table)


def main() -> None:
    """Simulate, print, write results/split_sim.json, or results/split_sim_shared.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rates-per-worker", type=float, nargs="+", default=[0.7, 0.9, 1.0, 1.1])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from --seed on")
    parser.add_argument(
        "--prefill-share", type=float, default=0.5, help="share of the workers that prefill, except for co-located"
    )
    parser.add_argument("--target-itl-ms", type=float, default=100.0)
    parser.add_argument("--shared", action="store_true", help="closed loops on one host whose workers share two cores")
    add_load_flags(parser)
    args = parser.parse_args()
    cost_s = tuple(json.loads((RESULTS / "split_fit.json").read_text())["step_cost_s"])
    if args.shared:
        rows = shared(cost_s)
        show("closed loops on two shared cores", rows)
        save("split_sim_shared", {"step_cost_s": cost_s, "rows": rows})
        return
    rows = sweep(args, cost_s)
    ratios = compared(rows)
    show("share of good requests, and auto over the better of both", ratios)
    served = served_rates(ratios)
    show(f"highest rate at which {SERVED_SHARE:.0%} are good", served)
    slowest = max(row.pop("plan_us") for row in rows if row["workers"] == max(args.workers))
    Console().print(f"a plan takes up to {slowest:.0f} us (p50) with {max(args.workers)} workers")
    result = {"load": vars(args), "step_cost_s": cost_s, "rows": rows, "ratios": ratios, "served_per_s": served}
    save("split_sim", result)


if __name__ == "__main__":
    main()
