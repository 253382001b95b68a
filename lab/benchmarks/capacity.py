"""Capacity: requests per second within an objective, as Sarathi-Serve defines it, for Pillion and vLLM's CPU build.

    PILLION_VLLM=/path/to/vllm python -m lab.benchmarks.capacity --loads chat mixed --rounds 3

A rate passes if the 99th percentile of the time between tokens is within ``strict`` (5) or ``relaxed`` (25) plain
decode steps, and the 99th percentile of the time to the first token, each over its bound ``--ttft``, is at most 1. A
plain step is the median time between tokens of 8 streams while no prompt arrives; the *slowest* system's is used for
all, so that no system fails by slow kernels alone. Arrivals are a Poisson process; latencies count from the intended
arrival.

Each search doubles the rate until neither objective passes, then bisects (like ``pillion bench sweep``). One run serves
both objectives. In the first round every setting of a system searches; later rounds, with other arrivals and prompts,
use vLLM's best setting per objective. An objective that no setting met at any rate is not searched again. All rates of
a round have the same lengths in the same order, so that a higher rate is the same load in less time: with other lengths
a lower rate could be harder.

Loads have the lengths of Sarathi-Serve's data sets, Mooncake's traces, and chats, all divided by ``--scale``: two cores
compute in a second what an A100 does in milliseconds.

    chat          openchat_sharegpt4: prompts of 1,730 tokens (p50) and 5,696 (p90), answers of 415 and 834
    summaries     arxiv_summarization: prompts of 7,059 and 12,985 tokens, answers of 208 and 371
    mixed         four chats per summary
    conversation  Mooncake's shared prefixes and lengths, by ``lab.benchmarks.mooncake``
    toolagent     likewise
    turns         chats of several turns with think time; a rate counts requests
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import shlex
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Table

from lab.benchmarks.closed_loop import TOKEN_RANGE, ClosedLoad, plain_step_s
from lab.benchmarks.cpu_service import cell
from lab.benchmarks.mooncake import WORKLOADS, generate_like
from lab.benchmarks.peers import RunningSystem, System, pillion_system, vllm_system
from lab.benchmarks.plot import Chart, line_charts
from lab.benchmarks.report import PICTURES, WRITTEN, machine, show_table, spread
from pillion.loadgen.figures import Run, percentile
from pillion.loadgen.load import LoadConfig, LoadSession, Turn, arrival_times, make_sessions
from pillion.loadgen.slo import Objective, good, parse_slo
from pillion.loadgen.sweep import Tried, best_rate, next_rate
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS

MODEL = "demo"
PEER = "vllm"
# Objectives, in plain decode steps per token.
OBJECTIVES = {"strict": 5.0, "relaxed": 25.0}
PLAIN = ClosedLoad(64, 96, 8, 8)
WARM_UP = (ClosedLoad(512, 16, 1, 1), ClosedLoad(64, 16, 8, 16))
# 90th percentile of a normal distribution, in standard deviations; makes a log-normal one from two quantiles.
P90 = 1.2816
# Longest prompts and answers that both systems serve; longer draws are cut.
MAX_PROMPT_TOKENS, MAX_ANSWER_TOKENS = 3500, 400
SUMMARY_SHARE = 0.2
# Lengths of the load `turns`, from no data set.
QUESTION_TOKENS, CHAT_ANSWER_TOKENS, CHAT_SYSTEM_TOKENS, CHAT_TURNS = 800, 415, 1600, "uniform:3,6"
MAX_RUNS, TOLERANCE = 16, 0.1
# Rates below have too few requests per run; such a capacity counts as none.
MIN_RATE = 0.2


@dataclass(frozen=True, slots=True)
class LengthQuantiles:
    """Prompt and answer tokens, each by its median and 90th percentile."""

    prompt: tuple[float, float]
    answer: tuple[float, float]

    def draw(self, rng: random.Random, scale: float) -> tuple[int, int]:
        """Draw the tokens of a prompt and its answer, divided by ``scale``."""
        drawn = []
        for (p50, p90), most in ((self.prompt, MAX_PROMPT_TOKENS), (self.answer, MAX_ANSWER_TOKENS)):
            tokens = rng.lognormvariate(math.log(p50), math.log(p90 / p50) / P90) / scale
            drawn.append(max(1, min(most, round(tokens))))
        return drawn[0], drawn[1]


CHAT = LengthQuantiles((1730, 5696), (415, 834))
SUMMARIES = LengthQuantiles((7059, 12_985), (208, 371))


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """Arrivals at ``rate`` requests per second for ``seconds``. ``sessions_of`` makes sessions from a seed."""

    name: str
    rate: float
    seconds: float
    sessions_of: Callable[[int, int], list[LoadSession]]
    concurrency: None = None

    def sessions(self, seed: int) -> list[LoadSession]:
        """Return the sessions with their times, determined by load, rate and seed. With the same seed, two rates have
        the same lengths in the same order, but other tokens, so that no run hits another's KV."""
        count = max(8, round(self.rate * self.seconds))
        made = [unlike(session, self.rate) for session in self.sessions_of(count, seed)]
        # Sessions per second: fewer, since one of several turns has several requests.
        rate = self.rate * len(made) / sum(len(session.turns) for session in made)
        times = arrival_times(rate, 1.0, seed, len(made))
        return [LoadSession(at_s, one.turns, one.system) for at_s, one in zip(times, made, strict=True)]


def unlike(session: LoadSession, rate: float) -> LoadSession:
    """Return a session with other tokens at each rate; equal ones stay equal."""
    low, width = TOKEN_RANGE[0], TOKEN_RANGE[1] - TOKEN_RANGE[0]
    shift = random.Random(f"tokens {rate}").randrange(width) - low
    turns = tuple(replace(turn, ids=[low + (token + shift) % width for token in turn.ids]) for turn in session.turns)
    return replace(session, turns=turns, system=f"{rate} {session.system}" if session.system else "")


def drawn(scale: float, summary_share: float) -> Callable[[int, int], list[LoadSession]]:
    """Make prompts of random tokens, a share ``summary_share`` of them with the lengths of summaries."""

    def sessions(count: int, seed: int) -> list[LoadSession]:
        rng = random.Random(f"lengths {seed}")
        made = []
        for _ in range(count):
            quantiles = SUMMARIES if rng.random() < summary_share else CHAT
            prompt, answer = quantiles.draw(rng, scale)
            made.append(LoadSession(0.0, (Turn(answer, ids=rng.choices(range(*TOKEN_RANGE), k=prompt)),)))
        return made

    return sessions


def traced(scale: float, name: str) -> Callable[[int, int], list[LoadSession]]:
    """Make prompts with a trace's shared prefixes; its blocks of 512 tokens become 512 / ``scale``."""
    block = round(TRACE_BLOCK_TOKENS / scale)

    def sessions(count: int, seed: int) -> list[LoadSession]:
        made = []
        for row in generate_like(WORKLOADS[name], seed, count):
            ids: list[int] = []
            for number in row.hash_ids:
                if len(ids) >= MAX_PROMPT_TOKENS:
                    break
                ids += random.Random(f"{seed} block {number}").choices(range(*TOKEN_RANGE), k=block)
            prompt = ids[: max(1, min(MAX_PROMPT_TOKENS, round(row.input_length / scale)))]
            answer = max(1, min(MAX_ANSWER_TOKENS, round(row.output_length / scale)))
            made.append(LoadSession(0.0, (Turn(answer, ids=prompt),)))
        return made

    return sessions


def chatted(scale: float) -> Callable[[int, int], list[LoadSession]]:
    """Make chats of several turns with a few shared system prompts."""

    def sessions(count: int, seed: int) -> list[LoadSession]:
        def lengths(tokens: float) -> str:
            return f"lognormal:{max(1, round(tokens / scale))},0.6,{MAX_ANSWER_TOKENS}"

        config = LoadConfig(
            workload="chats",
            requests=count,
            rate=1.0,
            input_len=lengths(QUESTION_TOKENS),
            output_len=lengths(CHAT_ANSWER_TOKENS),
            system_len=str(round(CHAT_SYSTEM_TOKENS / scale)),
            turns=CHAT_TURNS,
            think_s=2.0,
            seed=seed,
        )
        return make_sessions(config)

    return sessions


def loads(scale: float) -> dict[str, Callable[[int, int], list[LoadSession]]]:
    """Return each load's session maker by name."""
    return {
        "chat": drawn(scale, 0.0),
        "summaries": drawn(scale, 1.0),
        "mixed": drawn(scale, SUMMARY_SHARE),
        "conversation": traced(scale, "conversation"),
        "toolagent": traced(scale, "toolagent"),
        "turns": chatted(scale),
    }


def run_figures(run: Run, ttft: Objective, bounds_ms: dict[str, float]) -> dict[str, float]:
    """Return a run's figures, times in ms. ``ttft_of_bound_p99``: over each request's own bound; ``good_strict_per_s``:
    rate of requests that met both bounds of the objective."""
    own = {name: (ttft, Objective("itl_p99", bound / 1000)) for name, bound in bounds_ms.items()}
    gaps = [gap * 1000 for record in run.records for gap in record.itl_s] or [0.0]
    waits = [record.ttft_s for record in run.records]
    shares = [record.ttft_s / ttft.bound_s(record.prompt_tokens, record.output_tokens) for record in run.records]
    return {
        "requests": len(run.records),
        "requests_per_s": len(run.records) / run.duration_s,
        "output_tokens_per_s": sum(record.output_tokens for record in run.records) / run.duration_s,
        "itl_p50_ms": statistics.median(gaps),
        "itl_p99_ms": percentile(gaps, 99),
        "ttft_p50_ms": statistics.median(waits) * 1000,
        "ttft_p99_ms": percentile(waits, 99) * 1000,
        "ttft_of_bound_p99": percentile(shares, 99),
        "cached_share": sum(record.cached_tokens for record in run.records)
        / max(1, sum(record.prompt_tokens for record in run.records)),
        "lag_p99_ms": percentile([record.lag_s for record in run.records], 99) * 1000,
        **{f"good_{name}_per_s": sum(good(each, run.records)) / run.duration_s for name, each in own.items()},
    }


@dataclass(slots=True)
class CapacitySearch:
    """Search of one system's highest rates under one load, for all objectives by common runs.

    ``bounds_ms``: bound of the time between tokens per objective; ``runs``: figures per rate.
    """

    bounds_ms: dict[str, float]
    start: float
    runs: dict[float, dict[str, float]] = field(default_factory=dict)

    def tried(self, objective: str) -> list[Tried]:
        """Return the runs as judged by an objective. A failure below a passed rate was run for another objective and
        does not count: a longer search must not be a disadvantage."""
        bound_ms = self.bounds_ms[objective]
        found = [
            Tried(rate, run["itl_p99_ms"] <= bound_ms and run["ttft_of_bound_p99"] <= 1.0)
            for rate, run in self.runs.items()
        ]
        highest = max((one.rate for one in found if one.passed), default=0.0)
        return [one for one in found if one.passed or one.rate > highest]

    def next(self) -> float | None:
        """Return the next rate, or None when the capacities are known or all runs are used."""
        for objective in self.bounds_ms:
            rate = next_rate(self.tried(objective), self.start, TOLERANCE, MAX_RUNS)
            if rate is not None and rate >= MIN_RATE:
                return rate
        return None

    def capacities(self) -> dict[str, float]:
        """Return the highest passed rate per objective, 0 for none."""
        return {objective: best_rate(self.tried(objective)) or 0.0 for objective in self.bounds_ms}


@dataclass(slots=True)
class CapacityBench:
    """The systems, their plain steps, and the results.

    ``found``: a row per load, system and round.
    """

    args: argparse.Namespace
    ttft: Objective
    running: dict[str, RunningSystem] = field(default_factory=dict)
    plain_ms: dict[str, float] = field(default_factory=dict)
    found: list[dict[str, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def turn_of(self, system: System) -> Iterator[RunningSystem]:
        """Start or resume a system and warm it up; stop or pause it after the block."""
        with contextlib.ExitStack() as stack:
            running = self.running.get(system.name) or stack.enter_context(system.running())
            running.resume()
            for number, load in enumerate(WARM_UP):
                running.measure(load, 10_000 + number)
            yield running
            running.pause()

    def measure_plain_step(self, system: System) -> None:
        """Measure the median time between tokens of streams whose prompts are done."""
        with self.turn_of(system) as running:
            run = running.measure(PLAIN, 1)
        self.plain_ms[system.name] = plain_step_s(PLAIN, run) * 1000
        print(f"{system.name}: a plain step takes {self.plain_ms[system.name]:.1f} ms", flush=True)

    def bounds_ms(self) -> dict[str, float]:
        """Return the bound of the time between tokens per objective."""
        plain_ms = self.args.plain_step_ms or max(self.plain_ms.values())
        return {name: steps * plain_ms for name, steps in OBJECTIVES.items()}

    def search(self, system: System, load: str, round_: int, wanted: Sequence[str]) -> None:
        """Search a system's capacities under a load in one round, for the objectives ``wanted``."""
        make = loads(self.args.scale)[load]
        bounds_ms = {name: bound for name, bound in self.bounds_ms().items() if name in wanted}
        found = CapacitySearch(bounds_ms, self.start(system.name, load, wanted))
        seed = random.Random(f"{load} {round_}").getrandbits(30)
        with self.turn_of(system) as running:
            while (rate := found.next()) is not None:
                run = running.measure(OpenLoad(load, rate, self.args.seconds, make), seed)
                found.runs[rate] = row = run_figures(run, self.ttft, self.bounds_ms())
                passed = [one for one in bounds_ms if Tried(rate, True) in found.tried(one)]
                print(
                    f"  {load}, {system.name}, {rate:.2f}/s: between tokens {row['itl_p99_ms']:.0f} ms, first "
                    f"{row['ttft_of_bound_p99']:.2f} of its bound: {', '.join(passed) or 'neither'}",
                    flush=True,
                )
        runs = [{"rate": rate, **figures} for rate, figures in found.runs.items()]
        self.found.append(
            {"load": load, "system": system.name, "round": round_, "capacity": found.capacities(), "runs": runs}
        )

    def start(self, system: str, load: str, wanted: Sequence[str]) -> float:
        """Return the first rate of a search: the last round's result, or the flag."""
        known = [
            row["capacity"][wanted[0]]
            for row in self.found
            if (row["load"], row["system"]) == (load, system) and row["capacity"].get(wanted[0])
        ]
        return known[-1] if known else float(self.args.start)

    def best(self, load: str, objective: str, names: Sequence[str]) -> str | None:
        """Return the setting with the highest capacity in the first round, or None."""
        first = [row for row in self.found if row["load"] == load and row["round"] == 1 and row["system"] in names]
        best = max(first, key=lambda row: row["capacity"][objective])
        return str(best["system"]) if best["capacity"][objective] else None

    def all_rounds(self, systems: Sequence[System], load: str) -> None:
        """Measure a load in all rounds, rotating the order of the systems."""
        peers = [system.name for system in systems if system.name.startswith(PEER)]
        for round_ in range(1, self.args.rounds + 1):
            turn = round_ % len(systems)
            for system in (*systems[turn:], *systems[:turn]):
                wanted = list(OBJECTIVES)
                if round_ > 1 and system.name in peers:
                    wanted = [one for one in wanted if self.best(load, one, peers) == system.name]
                if wanted:
                    self.search(system, load, round_, wanted)


def systems_of(args: argparse.Namespace, folder: pathlib.Path, dtype: str) -> list[System]:
    """Return the systems that are wanted and installed."""
    found = []
    for setting in args.pillion or ["auto=", "colocated=--split-policy colocated"]:
        name, _, flags = setting.partition("=")
        found.append(pillion_system(f"pillion {name}", str(folder), ("--dtype", dtype, *shlex.split(flags))))
    program = shutil.which(args.vllm) if args.vllm else None
    if program is None:
        print("vLLM is left out: --vllm (PILLION_VLLM) names no `vllm` program")
        return found
    for tokens in args.vllm_budgets:
        flags = ("--enable-prefix-caching", "--max-num-batched-tokens", str(tokens), *shlex.split(args.vllm_flags))
        found.append(vllm_system(f"{PEER} {tokens}", program, folder, dtype, flags, lambda _: True))
    return found


def rows_of(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each load and objective: each system's capacities over the rounds, and Pillion's best system's
    over the best setting of vLLM."""
    rows = []
    for load in dict.fromkeys(row["load"] for row in found):
        for objective in OBJECTIVES:
            rates: dict[str, list[float]] = {}
            for row in found:
                if row["load"] == load and objective in row["capacity"]:
                    rates.setdefault(row["system"], []).append(row["capacity"][objective])
            spreads = {name: spread(each) for name, each in rates.items()}
            made: dict[str, Any] = {"load": load, "objective": objective, "systems": spreads}
            medians = {name: statistics.median(each) for name, each in rates.items()}
            ours = medians.get("pillion auto", 0.0)
            pure = [rate for name, rate in medians.items() if name.startswith("pillion") and name != "pillion auto"]
            theirs = [rate for name, rate in medians.items() if name.startswith(PEER)]
            for title, rivals in (("over_peer", theirs), ("over_better_policy", pure)):
                if any(rivals):
                    made[title] = ours / max(rivals)
            rows.append(made)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the capacities."""
    table = Table("load", "objective", "system", "requests/s", title="Capacity: medians of the rounds (least-greatest)")
    for row in rows:
        for name, rates in row["systems"].items():
            table.add_row(row["load"], row["objective"], name, cell(rates, 2))
        for name, title in (("over_peer", "auto over vLLM's best"), ("over_better_policy", "auto over other policies")):
            if name in row:
                table.add_row("", "", title, f"{row[name]:.2f}")
    show_table(table)


def picture(path: pathlib.Path, found: Sequence[dict[str, Any]], bounds_ms: dict[str, float]) -> None:
    """Draw three charts for each load into an SVG; lines are medians of the rounds."""
    charts = []
    for load in dict.fromkeys(row["load"] for row in found):
        runs: dict[str, list[dict[str, float]]] = {}
        for row in found:
            if row["load"] == load:
                runs.setdefault(row["system"], []).extend(row["runs"])
        charts += charts_of(load, runs, bounds_ms)
    line_charts(path, charts, columns=3)


def charts_of(load: str, runs: dict[str, list[dict[str, float]]], bounds_ms: dict[str, float]) -> list[Chart]:
    """Return three charts against the rate of arrivals: p99 of the time between tokens, p99 of the time to the first
    one over its bound, and requests a second that met the strict objective. ``runs`` has those of each system."""
    rates = [run["rate"] for each in runs.values() for run in each]
    arrive, strict = "requests/s that arrive", next(iter(OBJECTIVES))

    def lines(figure: str, bounds: dict[str, float]) -> dict[str, Any]:
        drawn = {name: by_rate(each, figure) for name, each in runs.items()}
        return drawn | {one: [(min(rates), bound), (max(rates), bound)] for one, bound in bounds.items()}

    gaps, waits = lines("itl_p99_ms", bounds_ms), lines("ttft_of_bound_p99", {"bound": 1.0})
    return [
        Chart(f"{load}: p99 between tokens", arrive, "ms", gaps),
        Chart(f"{load}: p99 to the first token", arrive, "times its bound", waits),
        Chart(f"{load}: answered within {strict} bounds", arrive, "requests/s", lines(f"good_{strict}_per_s", {})),
    ]


def by_rate(runs: Sequence[dict[str, float]], figure: str) -> list[tuple[float, float]]:
    """Return the median of a figure at each rate that was run, in order of the rates. Rates that differ by
    rounding errors alone count as one."""
    found: dict[float, list[float]] = {}
    for run in runs:
        found.setdefault(round(run["rate"], 3), []).append(run[figure])
    return [(rate, statistics.median(each)) for rate, each in sorted(found.items())]


def write(name: str, result: dict[str, Any], loads_: Sequence[str]) -> pathlib.Path:
    """Write the result; what the file has of loads that this run did not measure stays, with its own machine."""
    path = WRITTEN / f"{name}.json"
    known = json.loads(path.read_text())["loads"] if path.exists() else {}
    for load in loads_:
        own = {key: [row for row in result[key] if row["load"] == load] for key in ("rows", "found")}
        known[load] = {"machine": machine(), **{k: v for k, v in result.items() if k not in own}, **own}
    path.write_text(json.dumps({"loads": known}, indent=1, sort_keys=True) + "\n")
    return path


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=list(loads(1.0)), default=["chat", "summaries", "mixed"])
    parser.add_argument("--scale", type=float, default=8.0, help="lengths of the data sets are divided by it")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the arrivals of each run")
    parser.add_argument("--start", type=float, default=1.0, help="the first rate of the first round")
    parser.add_argument("--ttft", default="2.0+0.004*n", help="bound of the time to the first token, in seconds")
    parser.add_argument(
        "--plain-step-ms", type=float, default=0.0, help="the plain step of the bounds; default: the slowest system's"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pillion", action="append", metavar="NAME=FLAGS", help="repeatable; default: auto, colocated")
    parser.add_argument("--vllm", default=os.environ.get("PILLION_VLLM"), metavar="PATH", help="a `vllm` program")
    parser.add_argument("--vllm-budgets", type=int, nargs="+", default=[128, 256, 512, 2048], help="its chunk sizes")
    parser.add_argument("--vllm-flags", default="", metavar="FLAGS", help="more flags of `vllm serve`")
    parser.add_argument("--dtype", default="bfloat16", help="the type that all systems serve")
    parser.add_argument("--name", default="capacity", help="name of the result's file")
    return parser.parse_args()


def main() -> None:
    """Measure; after each load, print, write results/capacity.json and draw docs/capacity.svg."""
    args = arguments()
    # Without this, paused processes would outlive a driver that gets SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from lab.testbed.plain_model import plain_folder

    [ttft] = parse_slo(f"ttft={args.ttft}")
    bench, begin, busy = CapacityBench(args, ttft), time.perf_counter(), os.getloadavg()[0]
    systems = systems_of(args, plain_folder(MODEL), args.dtype)
    with contextlib.ExitStack() as stack:
        for system in systems:
            if system.stays:
                bench.running[system.name] = stack.enter_context(system.running())
                bench.running[system.name].pause()
        for system in systems:
            bench.measure_plain_step(system)
        flags = {system.name: " ".join(system.flags) for system in systems}
        # Do not record where the peer's program is.
        asked = {name: value for name, value in vars(args).items() if name != "vllm"}
        about = {"systems": flags, "flags": asked, "load_average_at_start": busy, "bounds_ms": bench.bounds_ms()}
        for number, load in enumerate(args.loads, start=1):
            bench.all_rounds(systems, load)
            rows = rows_of(bench.found)
            show([row for row in rows if row["load"] == load])
            result = {**about, "plain_ms": bench.plain_ms, "found": bench.found, "rows": rows}
            path = write(args.name, result, args.loads[:number])
            picture(PICTURES / f"{args.name}.svg", bench.found, bench.bounds_ms())
            print(f"{time.perf_counter() - begin:.0f} s until now; written to {path}", flush=True)


if __name__ == "__main__":
    main()
