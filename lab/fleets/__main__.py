"""`python -m lab.fleets`: replays a recorded trace on a fleet in simulated time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from lab.fleets.command import run_simulate
from pillion.cli.app import run_command
from pillion.cli.flags import FlagCommand, option, options

FILE = click.Path(dir_okay=False, path_type=Path)
COSTS = "STEP,TOKEN,SEQUENCE,READ,PAIR"
COST_HELP = "Seconds of a step, and of each token, sequence, KV token read and query-key pair in it"


def step_cost(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[float, ...]:
    """Parse five comma-separated numbers; return () without text."""
    if not text:
        return ()
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    sound = all(math.isfinite(one) and one >= 0 for one in found) and sum(found[:2]) > 0
    if len(found) != len(COSTS.split(",")) or not sound:
        raise click.BadParameter(f"{text!r} is not {COSTS}, such as 5e-3,4e-5,5e-5,2e-8,1e-9", ctx, param)
    return found


@click.command(cls=FlagCommand)
@options(
    option("--trace", "File: Mooncake's JSON lines, BurstGPT's or Azure's CSV.", type=FILE, required=True),
    option(
        "--flag flags",
        "A flag of `pillion serve` with a value, or with several to compare: max-num-seqs=32,64. Repeat it for more.",
        (), multiple=True, metavar="NAME=VALUE[,VALUE...]",
    ),
    option("--step-cost", f"{COST_HELP}.", callback=step_cost, required=True, metavar=COSTS),
    option("--prefill-step-cost", "The same for prefill workers, where it differs.", callback=step_cost, metavar=COSTS),
    option(
        "--block-bytes",
        "Bytes of a KV block, for pools and transfers. 0: transfers take no time.",
        0, type=click.IntRange(min=0),
    ),
    option("--gigabytes-per-s", "Pace of blocks between nodes.", 1.0, type=click.FloatRange(min=0.001)),
    option("--speed", "Replay the trace so many times as fast.", 1.0, type=click.FloatRange(min=1e-6)),
    option("--requests", "The first so many requests of the trace; 0: all.", 0, type=click.IntRange(min=0)),
    option("--ttft-ms", "Objective: the longest time to the first token; 0: none.", 0.0, type=click.FloatRange(min=0)),
    option(
        "--itl-ms", "Objective: the 99th percentile of a request's gaps between tokens; 0: none.", 0.0,
        type=click.FloatRange(min=0),
    ),
    option("--attainment", "Share of requests that must meet them.", 0.9, type=click.FloatRange(0.01, 1.0)),
)  # fmt: skip
@click.option("--capacity", is_flag=True, help="Find the fewest workers of each kind that meet the objectives.")
@options(option("--json", "Write the result to PATH.", type=FILE, metavar="PATH"))
def simulate(**values: Any) -> int:
    """Replay a trace on a simulated fleet, to see the effect of a flag or the number of workers needed.

    The gateways' decisions and the workers' schedulers are those of `pillion serve`; only time is simulated. Pools are
    unlimited unless --flag kv-pool-bytes=SIZE is set. Exits with 1 if no number of workers is enough.
    """
    return run_simulate(values)


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Errors other than defects are one line on standard error."""
    run_command(simulate, argv, "python -m lab.fleets")


if __name__ == "__main__":
    main()
