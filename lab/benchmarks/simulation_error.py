"""How far the simulated fleet is from the measured cluster: the same traces on both, metric by metric.

    real cluster --replay--> what clients saw         the workers' own fits of their steps' cost
                                   |  compare                       |
                             simulated fleet <----------------------'

Two configurations of `pillion serve`, three loads each, and each load twice: what the two differ by is what no
simulation can be blamed for, and both together are what it is compared with. Before its loads a cluster answers lone
requests, one at a time: from these come what a request takes outside of all steps (HTTP/2, the gateway, the client's
own work), what each token took beside its step's cost, and the spread of a prompt's steps. The cost of steps is what
the workers told in their heartbeats while the load ran, on the average: it has in it what the gateway, the KV node and
this benchmark's client took of the same cores. Nothing else is fitted, and no latency of a load is used to simulate it.

Objectives for goodput are those of --slo. --records keeps traces, records and costs, to simulate them again. The
defaults take some twenty minutes on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import pathlib
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lab.benchmarks.closed_loop import TOKEN_RANGE, measure
from lab.benchmarks.report import save, show_table
from lab.benchmarks.traces import Mix, generate, write_trace
from lab.fleets.traffic import Request, requests_of
from lab.fleets.world import FleetConfig, lab_fleet, simulate, simulate_closed
from pillion.config import AUTO
from pillion.kvstore.index.registry import Registry
from pillion.loadgen.figures import Record, percentile, summarize
from pillion.loadgen.load import LoadConfig, LoadSession, make_sessions
from pillion.loadgen.slo import good, parse_slo
from pillion.loadgen.target import PillionTarget
from pillion.loadgen.traces import TraceRequest, read_trace

MODEL = "demo"
MAX_MODEL_LEN = 4096
# Flags of `pillion serve`; workers of each kind, and the cores that each owns of a host that they share.
CONFIGURATIONS: dict[str, tuple[tuple[str, ...], tuple[int, int, int], str]] = {
    "defaults": (("--split-policy=auto",), (1, 1, 1), AUTO),
    "colocated": (("--split-policy=colocated", "--prefill-workers=0"), (0, 1, 0), "colocated"),
}
# Short prompts that share beginnings; real lengths would take hours on a small machine.
MIX = Mix(
    sessions_per_s=1.0, chat_share=0.8, system_prompts=4, system_tokens=700, turn_tokens=120, answer_tokens=32,
    document_tokens=900, sigma=0.5, turns=3.0, questions=2.0, think_s=8.0, reread_s=6.0, max_tokens=3000,
)  # fmt: skip
LONE = LoadConfig(input_len="uniform:24,400", output_len="24", requests=24, concurrency=1, token_range=TOKEN_RANGE)
WARM = replace(LONE, input_len="uniform:64,1500", output_len="16", requests=16, concurrency=4, seed=5)
SAMPLE_S = 0.5
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class MeasuredCluster:
    """What was measured of a cluster: seconds of steps by role, of a request outside of steps, of tokens beside their
    steps' cost, and the relative standard deviation of the time of a prompt's steps."""

    cost_s: dict[str, tuple[float, ...]]
    edge_s: float
    residuals_s: tuple[float, ...]
    noise: float

    def fleet(self, name: str) -> FleetConfig:
        """Makes the fleet that stands for a configuration."""
        _, (prefills, decodes, cores), policy = CONFIGURATIONS[name]
        decode = self.cost_s["decode"]
        prefill = self.cost_s.get("prefill") or decode
        fleet = lab_fleet(prefills, decodes, prefill, decode, AUTO, split_policy=policy, shared_cores=cores)
        return replace(fleet, noise=self.noise, residuals_s=self.residuals_s)


class CostSampler:
    """Reads the workers' costs from the registry every SAMPLE_S while a load runs."""

    def __init__(self, redis_url: str) -> None:
        self._registry = Registry(redis_url, 5000)
        self._seen: dict[str, list[tuple[float, ...]]] = {role: [] for role in ROLES}

    @contextlib.asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Samples inside of the block."""
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._registry.aclose()

    def mean(self) -> dict[str, tuple[float, ...]]:
        """Returns the mean of what workers of each role told; a role that told nothing has none."""
        return {role: tuple(np.mean(found, axis=0).tolist()) for role, found in self._seen.items() if found}

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            for record in await self._registry.components():
                # An idle worker tells the cost of steps of long ago.
                if record.role in ROLES and record.step_cost_s and record.running_requests:
                    self._seen[record.role].append(record.step_cost_s)


def scaled_trace(path: pathlib.Path, rate: float, seconds: float, seed: int) -> pathlib.Path:
    """Writes a trace of ``rate`` requests a second; returns its path."""
    rows = [row for row in generate(seed, max(2, round(rate * seconds)), MIX) if fits(row)]
    factor = (len(rows) - 1) / rate * 1000 / (rows[-1].timestamp - rows[0].timestamp)
    write_trace(path, [replace(row, timestamp=(row.timestamp - rows[0].timestamp) * factor) for row in rows])
    return path


def fits(row: TraceRequest) -> bool:
    """Returns whether the cluster can serve a row."""
    return row.input_length + row.output_length <= MAX_MODEL_LEN - 64


async def replay(
    target: str, redis_url: str, sessions: Sequence[LoadSession], concurrency: int | None
) -> tuple[tuple[Record, ...], dict[str, tuple[float, ...]]]:
    """Sends sessions; returns the clients' records, and the workers' costs meanwhile. Raises RuntimeError as
    :func:`lab.benchmarks.closed_loop.measure` does."""
    sampler = CostSampler(redis_url)
    async with sampler.sampling():
        run = await measure(PillionTarget("", True, 0.0, target=target), sessions, concurrency)
    return run.records, sampler.mean()


def calibrate(name: str, records: Sequence[Record], cost_s: dict[str, tuple[float, ...]]) -> MeasuredCluster:
    """Returns what lone requests show: they are simulated too, and the difference is what happens outside of steps."""
    machine = MeasuredCluster(cost_s, 0.0, (), 0.0)
    requests = [Request(n, 0.0, one.prompt_tokens, one.asked_tokens) for n, one in enumerate(records)]
    alone, _ = simulate_closed(machine.fleet(name), requests, 1)
    pairs = [
        pair for real, made in zip(records, alone, strict=True) for pair in zip(real.itl_s, made.gaps_s, strict=False)
    ]
    machine = replace(machine, residuals_s=tuple(real - made for real, made in pairs))
    alone, _ = simulate_closed(machine.fleet(name), requests, 1)
    edge_s = statistics.median(real.ttft_s - made.ttft_s for real, made in zip(records, alone, strict=True))
    shares = [(real.ttft_s - edge_s) / made.ttft_s for real, made in zip(records, alone, strict=True)]
    return replace(machine, edge_s=edge_s, noise=(percentile(shares, 84) - percentile(shares, 16)) / 2)


def simulated(machine: MeasuredCluster, name: str, path: pathlib.Path) -> list[Record]:
    """Replays a trace on the fleet that stands for a cluster."""
    records, _ = simulate(machine.fleet(name), requests_of(read_trace(path)))
    return [replace(one, ttft_s=one.ttft_s + machine.edge_s).bench_record() for one in records]


def metrics(runs: Sequence[Sequence[Record]], slo: str) -> dict[str, float]:
    """Returns the figures that are compared, of all requests of some runs of one load."""
    records = [record for run in runs for record in run]
    seconds = sum(max(record.due_s for record in run) for run in runs)
    found = summarize(records, seconds)
    ttft, itl = found["ttft_ms"], found["itl_ms"]
    return {
        "ttft_p50_ms": ttft["p50"],
        "ttft_p99_ms": ttft["p99"],
        "itl_p50_ms": itl["p50"],
        "itl_p99_ms": itl["p99"],
        "goodput_per_s": sum(good(parse_slo(slo), records)) / seconds,
        "hit_rate": found["hit_rate"],
    }


def compared(measured: dict[str, float], made: dict[str, float]) -> dict[str, dict[str, float]]:
    """Returns each metric as measured and simulated, and the error: relative, of the hit rate the difference."""
    found = {}
    for name, value in measured.items():
        off = made[name] - value
        error = off if name == "hit_rate" else off / value if value else float(bool(off))
        found[name] = {"measured": value, "simulated": made[name], "error": error}
    return found


def mean_costs(costs: Sequence[dict[str, tuple[float, ...]]]) -> dict[str, tuple[float, ...]]:
    """Returns the mean of what workers of each role told in some runs."""
    roles = {role for cost_s in costs for role in cost_s}
    return {role: tuple(np.mean([one[role] for one in costs if role in one], axis=0).tolist()) for role in roles}


def keep(folder: pathlib.Path, row: dict[str, Any], path: pathlib.Path, records: Sequence[Record]) -> None:
    """Writes a load's trace, costs and records into ``folder``, to simulate it again."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"row": row, "trace": path.read_text().splitlines(), "records": [asdict(record) for record in records]}
    (folder / f"{row['configuration']}-{row['rate']}.json").write_text(json.dumps(kept))


def measure_configuration(args: argparse.Namespace, name: str, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Starts a cluster, calibrates, and compares each load; returns a row for each."""
    from lab.testbed.cluster import served

    flags, rows, seeds = CONFIGURATIONS[name][0], [], itertools.count()
    own = folder / name
    own.mkdir()
    with served(own, MODEL, *flags, f"--max-model-len={MAX_MODEL_LEN}", split_policy="") as cluster:
        redis_url = f"unix://{next(cluster.folder.rglob('redis*.sock'))}"
        asyncio.run(replay(cluster.target, redis_url, make_sessions(WARM), WARM.concurrency))
        lone = asyncio.run(replay(cluster.target, redis_url, make_sessions(LONE), 1))
        machine = calibrate(name, *lone)
        for rate in args.rates:
            path = scaled_trace(folder / f"{name}-{rate}.jsonl", rate, args.seconds, args.seed)
            runs, costs = [], []
            for _ in range(args.repeats):
                # A seed of its own: what one load has left in the cache is nothing to the next.
                seed = next(seeds)
                load = LoadConfig(workload="trace", trace=str(path), requests=10**6, token_range=TOKEN_RANGE, seed=seed)
                records, cost_s = asyncio.run(replay(cluster.target, redis_url, make_sessions(load), None))
                runs.append(records)
                costs.append(cost_s)
            rows.append(compare_load(args, name, rate, path, machine, runs, costs))
            Console().print(f"{name} at {rate:g}/s: {sum(map(len, runs))} requests")
    return rows


def compare_load(
    args: argparse.Namespace,
    name: str,
    rate: float,
    path: pathlib.Path,
    machine: MeasuredCluster,
    runs: Sequence[Sequence[Record]],
    costs: Sequence[dict[str, tuple[float, ...]]],
) -> dict[str, Any]:
    """One load's row: all runs of the cluster beside as many of the simulation, and the runs beside each other."""
    # A kind of worker that had nothing to do keeps what lone requests have shown.
    at_load = replace(machine, cost_s=machine.cost_s | mean_costs(costs))
    made = metrics([simulated(at_load, name, path)], args.slo)
    records = [record for run in runs for record in run]
    each = [metrics([run], args.slo) for run in runs]
    row = {
        "configuration": name,
        "rate": rate,
        "requests": len(records),
        "noise": machine.noise,
        "edge_ms": machine.edge_s * 1000,
        "residuals_ms": [seconds * 1000 for seconds in machine.residuals_s],
        "step_cost_s": at_load.cost_s,
        "metrics": compared(metrics(runs, args.slo), made),
        "again": compared(each[0], each[-1]),
    }
    if args.records:
        keep(args.records, row, path, records)
    return row


def show(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Prints every figure; returns for each metric the median and the largest error by size, of the simulation and of
    the cluster's last run against its first."""
    table = Table(title="measured | simulated (error)")
    table.add_column("configuration, rate/s")
    names = list(rows[0]["metrics"])
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        cells = [
            f"{one['measured']:.3g} | {one['simulated']:.3g} ({one['error']:+.1%})" for one in row["metrics"].values()
        ]
        table.add_row(f"{row['configuration']}, {row['rate']:g}", *cells)
    show_table(table)
    found: dict[str, dict[str, float]] = {}
    for name in names:
        sizes = [abs(row["metrics"][name]["error"]) for row in rows]
        again = [abs(row["again"][name]["error"]) for row in rows]
        found[name] = {"median": statistics.median(sizes), "max": max(sizes)}
        found[name] |= {"again_median": statistics.median(again), "again_max": max(again)}
        words = "{median:.1%} in the middle, {max:.1%} at most; the cluster itself {again_median:.1%}, {again_max:.1%}"
        Console().print(f"{name}: error {words.format(**found[name])}")
    return found


def main() -> None:
    """Measure, simulate, print, write results/simulation_error.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 1.5], help="arrivals a second")
    parser.add_argument("--seconds", type=float, default=90.0, help="length of each load")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each load on the cluster")
    parser.add_argument("--slo", default="ttft=2.5+0.002*n,itl_p99=0.1", help="objectives in seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=pathlib.Path, help="folder for what was recorded")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        for name in args.configurations:
            rows += measure_configuration(args, name, pathlib.Path(folder))
    load = {name: value for name, value in vars(args).items() if name != "records"}
    save("simulation_error", {"load": load, "rows": rows, "errors": show(rows)})


if __name__ == "__main__":
    main()
