"""Goodput of `--split-policy auto` against both pure policies: the real cluster, mixed load, same machine and cores.

Co-located, one decode worker has all the cores; the other policies have one prefill and one decode worker that share
them. Policies alternate over rounds, each with a fresh cluster that sees all rates. The step costs that the workers had
fitted by the end are kept: :mod:`benchmarks.split_sim` computes with them, and is compared with what is measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import tempfile
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import save, show_table
from benchmarks.split_load import Request, Seen, add_load_flags, arrivals, figures
from kvstore.index import Registry
from pillion import AsyncClient
from pillion.errors import PillionError

POLICIES = {
    "auto": ("--split-policy=auto",),
    "colocated": ("--split-policy=colocated", "--prefill-workers=0"),
    "disaggregated": ("--split-policy=disaggregated",),
}
WARM_UP_TOKENS = (64, 700, 64, 1500, 32, 600)
# A request that was refused or lost: it never had a first token.
NEVER_S = 1e6
# A heartbeat's period, so that the registry knows of the last steps.
SETTLE_S = 1.5


async def ask(client: AsyncClient, request: Request, seed: int) -> Seen:
    """One request at its time; ``at_s`` is counted from now."""
    await asyncio.sleep(request.at_s)
    begun_s, last_s, first_s = time.perf_counter(), 0.0, NEVER_S
    gaps: list[float] = []
    timings = None
    try:
        async for delta in client.generate(
            request.prompt(seed), temperature=0.0, max_tokens=request.answer_tokens, ignore_eos=True
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
        return Seen(request, NEVER_S, (), error.message)
    reason, prefilled = (timings.plan_reason, timings.prefilled_tokens) if timings else ("", 0)
    return Seen(request, first_s, tuple(gaps), reason, prefilled)


async def run_load(target: str, requests: list[Request], seed: int) -> list[Seen]:
    """All of them, whether or not the ones before are answered."""
    async with AsyncClient(target) as client:
        return list(await asyncio.gather(*(ask(client, request, seed) for request in requests)))


async def step_costs(redis_url: str) -> dict[str, Any]:
    """What the workers say that their steps cost, by role."""
    registry = Registry(redis_url, 5000)
    try:
        parts = await registry.parts()
    finally:
        await registry.aclose()
    return {
        part.role: {"step_cost_s": part.step_cost_s, "max_step_tokens": part.max_step_tokens}
        for part in parts
        if part.role in ("prefill", "decode")
    }


def measure_policy(args: argparse.Namespace, name: str, number: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each rate, and the workers' step costs."""
    from tests.support.cluster import served

    rows = []
    always = (f"--target-itl-ms={args.target_itl_ms}", "--max-model-len=4096", *args.flags)
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), args.model, *POLICIES[name], *always) as cluster,
    ):
        warm = [Request(-n - 1, 0.0, 0.5 * n, tokens, 16) for n, tokens in enumerate(WARM_UP_TOKENS)]
        asyncio.run(run_load(cluster.target, warm, number))
        for rate in args.rates:
            seed = args.seed + 1000 * number
            seen = asyncio.run(run_load(cluster.target, arrivals(args, rate, seed), seed))
            row = {"policy": name, "rate": rate, "round": number, "seed": seed, **figures(args, seen)}
            rows.append(row)
            Console().print(f"{name} at {rate}/s: {row['goodput_per_s']:.2f} good/s, {row['good_share']:.0%}")
            if args.reasons:
                for one in seen:
                    Console().print(f"  {one.request.prompt_tokens} tokens, {one.ttft_s:.2f} s: {one.reason}")
        time.sleep(SETTLE_S)
        redis = next(cluster.folder.rglob("redis*.sock"))
        return rows, asyncio.run(step_costs(f"unix://{redis}"))


def show(rows: list[dict[str, Any]]) -> None:
    """The table on the terminal."""
    table = Table(title="goodput: requests/s that met both targets")
    for heading in ("rate/s", "policy", "goodput/s", "good", "TTFT short p50/p99", "TTFT long p50/p99", "ITL p50/p99"):
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: (row["rate"], row["policy"], row["round"])):
        table.add_row(
            f"{row['rate']:g}",
            row["policy"],
            f"{row['goodput_per_s']:.2f}",
            f"{row['good_share']:.0%}",
            "{p50:.0f} / {p99:.0f}".format(**row["ttft_short_ms"]),
            "{p50:.0f} / {p99:.0f}".format(**row["ttft_long_ms"]),
            "{p50:.0f} / {p99:.0f}".format(**row["itl_ms"]),
        )
    show_table(table)


def main() -> None:
    """Measure, print, write results/split.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--target-itl-ms", type=float, default=100.0, help="of the decode workers")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--flags", nargs="*", default=[], help="more flags of pillion serve, for all policies")
    parser.add_argument("--reasons", action="store_true", help="print why each request went where it went")
    add_load_flags(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    costs: dict[str, Any] = {}
    for number in range(args.rounds):
        for name in args.policies:
            found, costs[name] = measure_policy(args, name, number)
            rows += found
    show(rows)
    save("split", {"load": vars(args), "rows": rows, "workers": costs})


if __name__ == "__main__":
    main()
