"""The planner on more workers than this machine has: the real planner and scheduler classes in simulated time.

Only time is invented (:mod:`benchmarks.split_world`): a step takes what :mod:`benchmarks.split_fit` found real steps to
cost, with some noise. Schedulers fit their own models to these times, publish them by heartbeats and keep to their
targets, as in a worker. Where :mod:`benchmarks.split` has left its runs they are simulated first, with the costs that
their own workers had fitted, so that the error is known; then clusters of 2 to 16 workers with a core each.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, percentile, save, show_table
from benchmarks.split_load import add_load_flags, arrivals, figures
from benchmarks.split_world import Cluster, simulate


def as_measured(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of results/split.json again, with the step costs that their own workers had fitted."""
    load = argparse.Namespace(**measured["load"])
    rows = []
    for row in measured["rows"]:
        workers = measured["workers"][row["policy"]]
        decode = tuple(workers["decode"]["step_cost_s"])
        prefill = tuple(workers.get("prefill", {}).get("step_cost_s", ()))
        cluster = Cluster(1 if prefill else 0, 1, prefill, decode, load.target_itl_ms)
        seen, _ = simulate(cluster, row["policy"], arrivals(load, row["rate"], row["seed"]))
        found = figures(load, seen)
        rows.append(
            {
                "policy": row["policy"],
                "rate": row["rate"],
                "measured_goodput_per_s": row["goodput_per_s"],
                "simulated_goodput_per_s": found["goodput_per_s"],
                "measured_ttft_long_p50_ms": row["ttft_long_ms"]["p50"],
                "simulated_ttft_long_p50_ms": found["ttft_long_ms"]["p50"],
                "measured_itl_p50_ms": row["itl_ms"]["p50"],
                "simulated_itl_p50_ms": found["itl_ms"]["p50"],
            }
        )
    return rows


def sweep(args: argparse.Namespace, cost_s: tuple[float, ...]) -> list[dict[str, Any]]:
    """Each number of workers, policy and rate. Co-located, all workers decode; else a share of them prefills."""
    rows = []
    for workers in args.workers:
        prefills = max(1, round(workers * args.prefill_share))
        for rate in args.rates_per_worker:
            for policy in ("auto", "colocated", "disaggregated"):
                spans = 0 if policy == "colocated" else prefills
                cluster = Cluster(spans, workers - spans, cost_s, cost_s, args.target_itl_ms)
                seen, plan_s = simulate(cluster, policy, arrivals(args, rate * workers, args.seed))
                row = {"workers": workers, "rate": rate * workers, "policy": policy, **figures(args, seen)}
                row["plan_us"] = {"p50": percentile(plan_s, 50) * 1e6, "p99": percentile(plan_s, 99) * 1e6}
                rows.append(row)
    return rows


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Goodput of auto over that of the better pure policy, for each number of workers and rate."""
    found: dict[tuple[int, float], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["workers"], row["rate"]), {})[row["policy"]] = row["goodput_per_s"]
    return [
        {"workers": workers, "rate": rate, **by, "ratio": by["auto"] / max(1e-9, by["colocated"], by["disaggregated"])}
        for (workers, rate), by in found.items()
    ]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table of plain numbers and words."""
    table = Table(title=title)
    for heading in rows[0]:
        table.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    show_table(table)


def main() -> None:
    """Simulate, print, write results/split_sim.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rates-per-worker", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0, 1.25])
    parser.add_argument("--prefill-share", type=float, default=0.5, help="of the workers, but when co-located")
    parser.add_argument("--target-itl-ms", type=float, default=100.0)
    add_load_flags(parser)
    args = parser.parse_args()
    measured = RESULTS / "split.json"
    checked = as_measured(json.loads(measured.read_text())) if measured.exists() else []
    if checked:
        show("as measured", checked)
    cost_s = tuple(json.loads((RESULTS / "split_fit.json").read_text())["step_cost_s"])
    rows = sweep(args, cost_s)
    ratios = compared(rows)
    show("goodput/s, and auto over the better of both", ratios)
    slowest = max(row["plan_us"]["p50"] for row in rows)
    Console().print(f"a plan takes {slowest:.0f} us (p50) with {max(args.workers)} workers")
    save(
        "split_sim", {"load": vars(args), "step_cost_s": cost_s, "as_measured": checked, "rows": rows, "ratios": ratios}
    )


if __name__ == "__main__":
    main()
