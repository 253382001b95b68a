"""Goodput of `--split-policy auto` against both pure policies: the real cluster, mixed load, same machine and cores.

With the co-located policy one decode worker has all the cores; with the others a prefill and a decode worker share
them. Policies alternate over rounds, each with a fresh cluster that gets all rates; in a round all policies get the
same arrivals. The same runs are also simulated with the step costs that the workers had fitted by the end, so that one
table shows measurement and prediction. The defaults take some 11 minutes on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import save, show_table, spread
from benchmarks.split_load import add_load_flags, arrivals, figures, prompt_of
from benchmarks.split_sim import as_measured
from pillion import AsyncClient
from pillion.errors import PillionError
from pillion.kvstore.index.registry import Registry
from pillion.simulator.fleet.traffic import ClientRecord, Request

POLICIES = {
    "auto": ("--split-policy=auto",),
    "colocated": ("--split-policy=colocated", "--prefill-workers=0"),
    "disaggregated": ("--split-policy=disaggregated",),
}
WARM_UP_TOKENS = (64, 700, 64, 1500, 32, 600)
# The time to the first token of a request that was refused or lost.
NEVER_S = 1e6
# A heartbeat's period, after which the registry knows the cost of the last steps.
SETTLE_S = 1.5


async def ask(client: AsyncClient, request: Request, rate: float, seed: int) -> ClientRecord:
    """Send one request at its time; ``at_s`` is counted from now."""
    await asyncio.sleep(request.at_s)
    begun_s, last_s, first_s = time.perf_counter(), 0.0, NEVER_S
    gaps: list[float] = []
    timings = None
    try:
        async for delta in client.generate(
            prompt_of(request, rate, seed), temperature=0.0, max_tokens=request.answer_tokens, ignore_eos=True
        ):
            now = time.perf_counter()
            if delta.token_ids:
                if last_s:
                    gaps += [(now - last_s) / len(delta.token_ids)] * len(delta.token_ids)
                else:
                    first_s = now - begun_s
                last_s = now
            timings = delta.timings or timings
    except PillionError as error:
        return ClientRecord(request, NEVER_S, (), error.message)
    reason, prefilled = (timings.plan_reason, timings.prefilled_tokens) if timings else ("", 0)
    return ClientRecord(request, first_s, tuple(gaps), reason, prefilled)


async def run_load(target: str, requests: list[Request], rate: float, seed: int) -> list[ClientRecord]:
    """Send all requests at their times, however many are unanswered."""
    async with AsyncClient(target) as client:
        return list(await asyncio.gather(*(ask(client, request, rate, seed) for request in requests)))


async def step_costs(redis_url: str) -> dict[str, Any]:
    """Return the step costs that the workers have fitted, by role."""
    registry = Registry(redis_url, 5000)
    try:
        components = await registry.components()
    finally:
        await registry.aclose()
    return {
        component.role: {"step_cost_s": component.step_cost_s, "max_step_tokens": component.max_step_tokens}
        for component in components
        if component.role in ("prefill", "decode")
    }


def measure_policy(args: argparse.Namespace, name: str, number: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure a policy; return a row for each rate, and the workers' step costs."""
    from testbed.cluster import served

    rows = []
    always = (f"--target-itl-ms={args.target_itl_ms}", "--max-model-len=4096", *args.flags)
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), args.model, *POLICIES[name], *always) as cluster,
    ):
        warm = [Request(-n - 1, 0.5 * n, tokens, 16) for n, tokens in enumerate(WARM_UP_TOKENS)]
        asyncio.run(run_load(cluster.target, warm, 0.0, number))
        for rate in args.rates:
            seed = args.seed + 1000 * number
            records = asyncio.run(run_load(cluster.target, arrivals(args, rate, seed), rate, seed))
            row = {"policy": name, "rate": rate, "round": number, "seed": seed, **figures(args, records)}
            rows.append(row)
            Console().print(f"{name} at {rate}/s: {row['goodput_per_s']:.2f} good/s, {row['good_share']:.0%}")
            if args.reasons:
                for one in records:
                    Console().print(f"  {one.request.prompt_tokens} tokens, {one.ttft_s:.2f} s: {one.reason}")
        time.sleep(SETTLE_S)
        redis = next(cluster.folder.rglob("redis*.sock"))
        return rows, asyncio.run(step_costs(f"unix://{redis}"))


def show(rows: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print and return medians over rounds, beside those of the simulation of the same runs."""
    table = Table(title="median over rounds (least - most) | simulated")
    headings = ("rate/s", "policy", "good/s", "auto/better", "TTFT short p50 ms", "TTFT long p50 ms", "ITL p99 ms")
    for heading in headings:
        table.add_column(heading, justify="right")
    ratios, results = [_ratios(found) for found in (rows, simulated)], []
    for rate, policy in sorted({(row["rate"], row["policy"]) for row in rows}):
        cells, result = [f"{rate:g}", policy], {"rate": rate, "policy": policy}
        for name, value in _FIGURES.items():
            measured, invented = (
                spread([value(row) for row in found if (row["rate"], row["policy"]) == (rate, policy)])
                for found in (rows, simulated)
            )
            cells.append(f"{measured['median']:.3g} ({measured['min']:.3g} - {measured['max']:.3g})"
                         f" | {invented['median']:.3g}")  # fmt: skip
            result[name] = {"measured": measured, "simulated": invented}
        if policy == "auto" and rate in ratios[0]:
            result["auto_over_better"] = {"measured": ratios[0][rate], "simulated": ratios[1][rate]}
            cells.insert(3, f"{ratios[0][rate]['median']:.2f} | {ratios[1][rate]['median']:.2f}")
        else:
            cells.insert(3, "")
        table.add_row(*cells)
        results.append(result)
    show_table(table)
    return results


_FIGURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "goodput_per_s": lambda row: row["goodput_per_s"],
    "ttft_short_ms": lambda row: row["ttft_short_ms"]["p50"],
    "ttft_long_ms": lambda row: row["ttft_long_ms"]["p50"],
    "itl_p99_ms": lambda row: row["itl_ms"]["p99"],
}


def _ratios(rows: list[dict[str, Any]]) -> dict[float, dict[str, float]]:
    """Return, by rate, the spread over rounds of auto's goodput over the better pure policy's."""
    found: dict[float, dict[int, dict[str, float]]] = {}
    for row in rows:
        found.setdefault(row["rate"], {}).setdefault(row["round"], {})[row["policy"]] = row["goodput_per_s"]
    return {
        rate: spread([by["auto"] / max(1e-9, *(by[name] for name in by if name != "auto")) for by in rounds.values()])
        for rate, rounds in found.items()
        if all({"auto"} < set(by) for by in rounds.values())
    }


def main() -> None:
    """Measure, print, write results/split.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.8, 1.2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--target-itl-ms", type=float, default=100.0, help="of the decode workers")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--flags", nargs="*", default=[], help="more flags of pillion serve, for all policies")
    parser.add_argument("--reasons", action="store_true", help="print the planner's reason for each request")
    add_load_flags(parser)
    parser.set_defaults(seconds=35.0)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    costs: dict[str, Any] = {}
    for number in range(args.rounds):
        # The policy that is first in one round is last in the next.
        for name in args.policies if number % 2 == 0 else args.policies[::-1]:
            found, costs[name] = measure_policy(args, name, number)
            rows += found
    measured = {"load": vars(args), "rows": rows, "workers": costs}
    simulated = as_measured(measured)
    save("split", measured | {"simulated": simulated, "medians": show(rows, simulated)})


if __name__ == "__main__":
    main()
