"""`pillion bench`, which puts load on a running service. Imports what it needs when it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import click

from pillion.cli.console import table_console
from pillion.cli.flags import CA, CERT, FILE, KEY, CommandGroup, gone_option, option, options
from pillion.errors import ConfigError

if TYPE_CHECKING:
    from pillion.loadgen.run import BenchPlan

TABLE_WIDTH = 100


class RunByDefault(CommandGroup):
    """Group whose default command is ``run``: ``bench --rate 2`` is ``bench run --rate 2``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert ``run`` if the arguments name no command."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


def token_range(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, int]:
    """Parse LOW,HIGH."""
    low, _, high = text.partition(",")
    try:
        return int(low), int(high)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not LOW,HIGH, such as 1000,30000", ctx, param) from None


LENGTHS = "N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MAX]"
SERVER_OPTIONS = (
    option("--backend", "gRPC of Pillion, or OpenAI's HTTP.", "pillion", type=click.Choice(("pillion", "openai"))),
    option("--target", "Gateway's HOST:PORT (grpcs:// for TLS), or a URL.  [default: port 50051 or 8000 here]"),
    option("--model", "The server's name of the model; optional if one model is served.", ""),
    option(
        "--endpoint",
        "Prompts as token ids or as messages.",
        "completions",
        type=click.Choice(("completions", "chat")),
    ),
    option("--temperature", "0 is greedy.", 0.0),
    option("--ignore-eos/--no-ignore-eos", "Whether answers continue to the requested length.", True),
    *(CA, CERT, KEY),
    option("--api-key-variable", "Environment variable with the API key.", "PILLION_API_KEY"),
    option("--timeout-s", "Timeout of one request.", 600.0),
)  # fmt: skip
LOAD_OPTIONS = (
    option(
        "--workload",
        "Random prompts, chats of several turns, or a trace.",
        "random",
        type=click.Choice(("random", "chats", "trace")),
    ),
    option("--rate", "Sessions per second (open loop); a trace is scaled to it.", type=float),
    option("--arrivals", "Arrival process.", "poisson", type=click.Choice(("poisson", "constant", "gamma"))),
    option("--burstiness", "Shape of gamma arrivals; below 1 is burstier than Poisson.", 1.0),
    option("--requests", "Maximum number of requests of a run; the minimum of a run in a sweep.", 100),
    option("--duration-s", "No arrivals after this many seconds.", type=float),
    option("--max-concurrency", "Maximum requests in flight; later ones wait; that counts as latency.", type=int),
    option("--input-len", f"Tokens of a prompt, words of a chat's message: {LENGTHS}.", "256"),
    option("--output-len", "Tokens of an answer, in the same form.", "64"),
    option("--system-prompts", "Number of system prompts of chats.", 4),
    option("--system-len", "Words of each system prompt.", "256"),
    option("--turns", "Of a chat.", "uniform:2,5"),
    option("--think-s", "Mean pause between an answer and the next turn.", 1.0),
    option("--trace", "File: JSON lines in Mooncake's form.", ""),
    option("--max-model-len", "Skip rows of a trace that need more tokens.", type=int),
    option("--token-range", "Token ids of random prompts.", "1000,30000", callback=token_range, metavar="LOW,HIGH"),
    option("--seed", "Determines the whole load.", 0),
    option("--slo", "Objectives in seconds, such as ttft=1.0+0.002*n,itl_p99=0.1 (n: prompt tokens).", ""),
    option("--warm-up", "Requests before the clock starts.", 0),
)  # fmt: skip
OUTPUT_OPTIONS = (
    option("--json", "Write the result to this file.", type=FILE, metavar="PATH"),
    gone_option("plot", "plot the records and runs of --json with your own program"),
    option("--progress/--no-progress", "Show a progress bar.", True),
)  # fmt: skip


@click.group(cls=RunByDefault)
def bench() -> None:
    """Measure a running service under load.

    It shows latencies, goodput, and the highest rate that meets objectives.

    Without a command it is `pillion bench run`; the options are in `pillion bench run --help`.
    """


@bench.command()
@options(*SERVER_OPTIONS, *LOAD_OPTIONS)
@option("--concurrency", "Number of concurrent sessions (closed loop), instead of a rate.", type=int)
@options(*OUTPUT_OPTIONS)
@click.option("--records", is_flag=True, help="With --json: also one object per request.")
def run(**values: Any) -> int:
    """Measure one run. The exit status is 1 if a request failed."""
    return asyncio.run(_run(plan_of(values), values))


async def _run(plan: BenchPlan, values: dict[str, Any]) -> int:
    from pillion.client.batch import progress_bar
    from pillion.loadgen import report
    from pillion.loadgen.run import opened, run_plan, sessions_of

    console, sessions = table_console(TABLE_WIDTH), sessions_of(plan)
    requests = sum(len(session.turns) for session in sessions)
    async with opened(plan.server) as (target, about):
        with progress_bar(requests, values["progress"], "requests") as advance:
            load_run, result = await run_plan(target, plan, advance, sessions)
    console.print(report.tables(result))
    if values["json"]:
        records = {"records": [asdict(record) for record in load_run.records]} if values["records"] else {}
        report.write_json(values["json"], result | records, about)
    return int(result["summary"]["ok"] < result["summary"]["requests"])


@bench.command()
@options(*SERVER_OPTIONS, *LOAD_OPTIONS)
@option("--attainment", "Share of the requests that must meet all objectives.", 0.9)
@option("--run-s", "Minimum duration of arrivals in each run, in seconds.", 30.0)
@option("--max-runs", "Most runs.", 8, type=click.IntRange(1, 50))
@option("--tolerance", "Precision of the answer; 0.1 is 10 %.", 0.1)
@options(*OUTPUT_OPTIONS)
def sweep(**values: Any) -> int:
    """Find the highest rate that meets --slo.

    It begins at --rate, doubles, then bisects; each run has its own seed. The exit status is 1 if no rate met them.
    """
    return asyncio.run(_sweep(plan_of(values), values))


async def _sweep(plan: BenchPlan, values: dict[str, Any]) -> int:
    from pillion.client.batch import progress_bar
    from pillion.loadgen import report
    from pillion.loadgen.run import check_sweep, opened, run_sweep

    check_sweep(plan)
    console = table_console(TABLE_WIDTH)

    def show(row: dict[str, Any]) -> None:
        goodput, word = row["goodput"], "passed" if row["passed"] else "failed"
        line = f"{row['rate']:.3g}/s: {goodput['attainment']:.1%} good, {goodput['requests_per_s']:.2f}/s: {word}"
        console.print(f"{line}\n{row['warning']}" if row["warning"] else line, highlight=False)

    def bar(rate: float, count: int) -> AbstractContextManager[Callable[[], None]]:
        return progress_bar(count, values["progress"], f"{rate:.3g}/s")

    search = {name: values[name] for name in ("attainment", "run_s", "max_runs", "tolerance")}
    async with opened(plan.server) as (target, about):
        result = await run_sweep(target, plan, bar=bar, on_result=show, **search)
    console.print(report.sweep_table(result["runs"]))
    best = result["best_rate"]
    console.print(f"highest rate that meets the objectives: {best:.3g}/s" if best else "no rate met the objectives")
    if values["json"]:
        report.write_json(values["json"], result, about)
    return int(not best)


def plan_of(values: dict[str, Any]) -> BenchPlan:
    """Build the plan from the options' values. Raises ConfigError for an invalid --slo."""
    from pillion.loadgen.load import LoadConfig
    from pillion.loadgen.run import BenchPlan, Server
    from pillion.loadgen.slo import parse_slo

    def fields_of(cls: type) -> dict[str, Any]:
        return {f.name: values[f.name] for f in fields(cls) if f.name in values and values[f.name] is not None}

    try:
        objectives = parse_slo(values["slo"])
    except ValueError as error:
        raise ConfigError(f"--slo: {error}") from None
    return BenchPlan(
        server=Server(**fields_of(Server)),
        load=LoadConfig(**fields_of(LoadConfig)),
        objectives=objectives,
        max_concurrency=values["max_concurrency"],
        warm_up_requests=values["warm_up"],
    )
