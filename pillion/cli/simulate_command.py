"""`pillion simulate`: a recorded trace on a fleet in simulated time. What it needs is imported when it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pillion.cli.console import table_console
from pillion.cli.flags import FlagType, did_you_mean, option, options
from pillion.config import ServeFlags
from pillion.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from pillion.simulator.fleet.figures import FleetFigures, GoodBounds
    from pillion.simulator.fleet.studies import CapacityPoint, FleetVariant
    from pillion.simulator.fleet.traffic import Request
    from pillion.simulator.fleet.world import FleetConfig

TABLE_WIDTH = 130
FILE = click.Path(dir_okay=False, path_type=Path)
# Numbers of processes have bounds of their own here: a simulated fleet starts none.
COUNTS = ("prefill_workers", "decode_workers", "gateway_workers")
COSTS = "STEP,TOKEN,SEQUENCE,READ,PAIR"
COST_HELP = "Seconds of a step, and of each token, sequence, KV token read and query-key pair in it"
OUTPUT = (
    option("--json", "Write the result there.", type=FILE, metavar="PATH"),
    option("--plot", "Draw it there: .png, .svg or .pdf.", type=FILE, metavar="PATH"),
)


def step_cost(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[float, ...]:
    """Parses five numbers separated by commas; empty without any."""
    if not text:
        return ()
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    if len(found) != len(COSTS.split(",")) or min(found) < 0 or not sum(found[:2]) > 0 or sum(found) == float("inf"):
        raise click.BadParameter(f"{text!r} is not {COSTS}, such as 5e-3,4e-5,5e-5,2e-8,1e-9", ctx, param)
    return found


@click.command()
@options(
    option("--trace", "File: Mooncake's JSON lines, BurstGPT's or Azure's CSV.", type=FILE, required=True),
    option(
        "--flag flags",
        "A flag of `pillion serve` with a value, or with several to compare: max-num-seqs=32,64. Repeat it for more.",
        (), multiple=True, metavar="NAME=VALUE[,VALUE...]",
    ),
    option("--step-cost", f"{COST_HELP}.", callback=step_cost, metavar=COSTS),
    option("--prefill-step-cost", "The same for prefill workers, where it differs.", callback=step_cost, metavar=COSTS),
    option("--redis-url", "Take these costs from the workers of this Redis' cluster, which have fitted them.", ""),
    option("--block-bytes", "Bytes of a KV block, for pools and transfers. 0: transfers take no time.", 0, type=int),
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
@options(*OUTPUT)
def simulate(**values: Any) -> int:
    """Replay a trace on a simulated fleet: what a change of a flag costs, or how many workers it takes.

    The gateways' decisions and the workers' schedulers are those of `pillion serve`; time alone is simulated. Pools are
    endless unless --flag kv-pool-bytes=SIZE says otherwise. The exit status is 1 where no number of workers is enough.
    """
    from pillion.simulator.fleet.figures import GoodBounds

    objectives = GoodBounds(values["ttft_ms"] / 1000, values["itl_ms"] / 1000, values["attainment"])
    changes = parse_changes(values["flags"])
    if values["capacity"] and not (objectives.ttft_s or objectives.itl_s):
        raise ConfigError("--capacity needs an objective: --ttft-ms, --itl-ms or both")
    if values["plot"]:
        from pillion.loadgen.plots import check_plot

        check_plot(values["plot"])
    config, requests = fleet_of(values, changes), load_of(values)
    title = f"{values['trace'].name}, {len(requests)} requests, {values['speed']:g} times as fast"
    if values["capacity"]:
        return run_capacity(config, requests, objectives, changes, values, title)
    return run_comparison(config, requests, objectives, changes, values, title)


def parse_changes(texts: tuple[str, ...]) -> dict[str, list[tuple[str, Any]]]:
    """The values of each flag, as text and parsed. Raises ConfigError for what is no flag or none of its values."""
    found: dict[str, list[tuple[str, Any]]] = {}
    known = {field.name: field.metadata for field in fields(ServeFlags)}
    for text in texts:
        word, equals, listed = text.partition("=")
        name = word.strip().removeprefix("--").replace("-", "_")
        if not equals or not listed:
            raise ConfigError(f"--flag {text!r} is not NAME=VALUE[,VALUE...], such as max-num-seqs=32,64")
        if name not in known:
            raise ConfigError(f"--flag {word}: `pillion serve` has no such flag{did_you_mean(name, known)}")
        if name in found:
            raise ConfigError(f"--flag {word} is given twice; its values are separated by commas")
        about = known[name]
        try:
            found[name] = [(one, _parsed(name, about, one)) for one in listed.split(",")]
        except click.ClickException as error:
            raise ConfigError(f"--flag {text}: {error.message}") from None
    return found


def _parsed(name: str, about: Mapping[str, Any], text: str) -> Any:
    if about["kind"] is bool:
        return click.BOOL.convert(text, None, None)
    value = FlagType(about["kind"], about["choices"]).convert(text, None, None)
    least, most = about["least"], about["most"]
    if least is not None and value < least:
        raise click.BadParameter(f"{text} is less than {least:g}")
    if most is not None and value > most and name not in COUNTS:
        raise click.BadParameter(f"{text} is more than {most:g}")
    return value


def load_of(values: dict[str, Any]) -> list[Request]:
    """The trace's requests. Raises ConfigError for a file that is no trace."""
    from pillion.loadgen.traces import read_trace
    from pillion.simulator.fleet.traffic import requests_of

    try:
        trace = read_trace(values["trace"])
    except (OSError, ValueError) as error:
        raise ConfigError(f"--trace: {error}") from None
    return requests_of(trace[: values["requests"] or None], speed=values["speed"])


def fleet_of(values: dict[str, Any], changes: Mapping[str, list[tuple[str, Any]]]) -> FleetConfig:
    """The fleet, with the flags that have one value. Raises ConfigError, also for flags that cannot work together."""
    from pillion.simulator.fleet.studies import with_flags
    from pillion.simulator.fleet.world import FleetConfig

    decode, prefill = values["step_cost"], values["prefill_step_cost"]
    if values["redis_url"]:
        from pillion.simulator.fleet.measured import measured_costs

        measured = measured_costs(values["redis_url"])
        decode, prefill = decode or measured.decode_cost_s, prefill or measured.prefill_cost_s
        values["block_bytes"] = values["block_bytes"] or measured.block_bytes
    if not decode:
        raise ConfigError(
            "the cost of a step is not known: give --step-cost, or --redis-url of a cluster that has served"
        )
    config = FleetConfig(
        flags=replace(ServeFlags(), prefill_workers=1, decode_workers=1),
        prefill_cost_s=prefill or decode,
        decode_cost_s=decode,
        block_bytes=values["block_bytes"],
        bytes_per_s=values["gigabytes_per_s"] * 1e9,
        known_costs=True,
        macro_steps=True,
    )
    single = {name: listed[0][1] for name, listed in changes.items()}
    config = with_flags(config, single)
    config.check()
    return config


def run_comparison(
    config: FleetConfig,
    requests: list[Request],
    objectives: GoodBounds,
    changes: Mapping[str, list[tuple[str, Any]]],
    values: dict[str, Any],
    title: str,
) -> int:
    """Simulates each combination of flags and prints a table."""
    from pillion.simulator.fleet.pictures import plot_comparison
    from pillion.simulator.fleet.studies import compare

    console = table_console(TABLE_WIDTH)
    found = compare(config, requests, changes, objectives, lambda variant: console.print(f"{variant.name}: done"))
    console.print(comparison_table(found, title))
    if values["json"]:
        rows = [{"fleet": variant.name, **asdict(variant.figures)} for variant in found]
        write_json(values["json"], {"objectives": asdict(objectives), "load": title, "fleets": rows})
    if values["plot"]:
        plot_comparison(values["plot"], found, objectives, title)
    return 0


def run_capacity(
    config: FleetConfig,
    requests: list[Request],
    objectives: GoodBounds,
    changes: Mapping[str, list[tuple[str, Any]]],
    values: dict[str, Any],
    title: str,
) -> int:
    """Looks for the fewest workers and prints what was tried."""
    from pillion.simulator.fleet.pictures import plot_capacity
    from pillion.simulator.fleet.studies import capacity

    several = [name for name, listed in changes.items() if len(listed) > 1]
    if several or "prefill_workers" in changes or "decode_workers" in changes:
        raise ConfigError("--capacity chooses the numbers of workers; every other --flag has one value")
    console = table_console(TABLE_WIDTH)

    def show(point: CapacityPoint) -> None:
        word = "enough" if point.enough else "too few"
        console.print(f"{point.prefills} + {point.decodes}: {point.figures.good_share:.1%} good, {word}")

    found = capacity(config, requests, objectives, show)
    console.print(capacity_table(found.tried, title))
    best = found.best
    console.print(
        "no number of workers is enough" if best is None
        else f"{best.prefills} prefill and {best.decodes} decode workers: {best.figures.good_share:.1%} good"
    )  # fmt: skip
    if values["json"]:
        rows = [
            {"prefills": p.prefills, "decodes": p.decodes, "enough": p.enough, **asdict(p.figures)} for p in found.tried
        ]
        chosen = None if best is None else {"prefills": best.prefills, "decodes": best.decodes}
        write_json(values["json"], {"objectives": asdict(objectives), "load": title, "best": chosen, "tried": rows})
    if values["plot"]:
        plot_capacity(values["plot"], found, objectives, title)
    return int(best is None)


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes a result. Raises ConfigError where it cannot."""
    try:
        path.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None


def comparison_table(found: list[FleetVariant], title: str) -> Table:
    """A row for each fleet of a comparison."""
    table = _table(title, "fleet", "sooner", "later")
    for number, variant in enumerate(found):
        against = (f"{variant.figures.faster_share:.0%}", f"{variant.figures.slower_share:.0%}") if number else ("", "")
        table.add_row(variant.name, *_cells(variant.figures), *against)
    return table


def capacity_table(points: tuple[CapacityPoint, ...], title: str) -> Table:
    """A row for each number of workers that was tried."""
    table = _table(title, "prefill + decode", "enough")
    for point in points:
        table.add_row(f"{point.prefills} + {point.decodes}", *_cells(point.figures), "yes" if point.enough else "no")
    return table


def _table(title: str, first: str, *last: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column(first, overflow="fold")
    middle = ("TTFT p50/p99 ms", "ITL p50/p99 ms", "good", "good/s", "hits", "prefilled", "failed")
    for heading in (*middle, *last):
        table.add_column(heading, justify="right")
    return table


def _cells(found: FleetFigures) -> tuple[str, ...]:
    return (
        f"{found.ttft_p50_ms:.0f} / {found.ttft_p99_ms:.0f}",
        f"{found.itl_p50_ms:.1f} / {found.itl_p99_ms:.1f}",
        f"{found.good_share:.1%}",
        f"{found.good_per_s:.3g}",
        f"{found.hit_share:.1%}",
        f"{found.prefilled_share:.1%}",
        str(found.failed),
    )
