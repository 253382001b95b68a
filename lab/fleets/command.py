"""The study of `python -m lab.fleets`, printed as tables and written as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

from lab.fleets.figures import GoodBounds
from lab.fleets.studies import CapacityPoint, FleetVariant, capacity, compare, with_flags
from lab.fleets.traffic import Request, requests_of
from lab.fleets.world import FleetConfig
from pillion.cli.console import table_console
from pillion.cli.flags import FlagType
from pillion.config import ServeFlags
from pillion.errors import ConfigError
from pillion.loadgen.traces import read_trace
from pillion.near_names import did_you_mean

TABLE_WIDTH = 80
FLEETS_OF_A_TABLE = 2
# Flags with other bounds than in production, since a simulated fleet starts no processes.
COUNTS = ("prefill_workers", "decode_workers", "gateway_workers")


class Study(NamedTuple):
    """The options of a study: a fleet and its load, objectives, values of flags as text and parsed, and all others."""

    config: FleetConfig
    requests: list[Request]
    objectives: GoodBounds
    changes: Mapping[str, list[tuple[str, Any]]]
    options: Mapping[str, Any]
    title: str


def run_simulate(values: dict[str, Any]) -> int:
    """Run the study and return the exit status. Raises ConfigError."""
    objectives = GoodBounds(values["ttft_ms"] / 1000, values["itl_ms"] / 1000, values["attainment"])
    changes = parse_changes(values["flags"])
    if values["capacity"] and not (objectives.ttft_s or objectives.itl_s):
        raise ConfigError("--capacity needs an objective: --ttft-ms, --itl-ms or both")
    config, requests = fleet_of(values, changes), load_of(values)
    title = f"{values['trace'].name}, {len(requests)} requests, {values['speed']:g} times as fast"
    study = Study(config, requests, objectives, changes, values, title)
    return run_capacity(study) if values["capacity"] else run_comparison(study)


def parse_changes(texts: tuple[str, ...]) -> dict[str, list[tuple[str, Any]]]:
    """Return the values of each flag as text and parsed. Raises ConfigError for an unknown flag or a bad value."""
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
    minimum, maximum = about["minimum"], about["maximum"]
    if minimum is not None and value < minimum:
        raise click.BadParameter(f"{text} is less than {minimum:g}")
    if maximum is not None and value > maximum and name not in COUNTS:
        raise click.BadParameter(f"{text} is more than {maximum:g}")
    return value


def load_of(values: dict[str, Any]) -> list[Request]:
    """Return the trace's requests. Raises ConfigError for an invalid file."""
    try:
        trace = read_trace(values["trace"])
    except (OSError, ValueError) as error:
        raise ConfigError(f"--trace: {error}") from None
    return requests_of(trace[: values["requests"] or None], speed=values["speed"])


def fleet_of(values: dict[str, Any], changes: Mapping[str, list[tuple[str, Any]]]) -> FleetConfig:
    """Return the fleet with the flags of one value. Raises ConfigError, also for conflicting flags."""
    decode, prefill = values["step_cost"], values["prefill_step_cost"]
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


def run_comparison(study: Study) -> int:
    """Simulate each combination of flags and print a table."""
    config, requests, objectives, changes, values, title = study
    console = table_console(TABLE_WIDTH)
    found = compare(config, requests, changes, objectives, lambda variant: console.print(f"{variant.name}: done"))
    for table in comparison_tables(found, title):
        console.print(table)
    if values["json"]:
        rows = [{"fleet": variant.name, **asdict(variant.figures)} for variant in found]
        write_json(values["json"], {"objectives": asdict(objectives), "load": title, "fleets": rows})
    return 0


def run_capacity(study: Study) -> int:
    """Search for the fewest workers and print all attempts."""
    config, requests, objectives, changes, values, title = study
    several = [name for name, listed in changes.items() if len(listed) > 1]
    if several or "prefill_workers" in changes or "decode_workers" in changes:
        raise ConfigError("--capacity chooses the numbers of workers; every other --flag has one value")
    console = table_console(TABLE_WIDTH)

    def show(point: CapacityPoint) -> None:
        word = "enough" if point.enough else "too few"
        workers = f"{point.prefills} prefill and {point.decodes} decode workers"
        console.print(f"{workers}: {point.figures.good_share:.1%} good, {word}")

    found = capacity(config, requests, objectives, show)
    console.print(capacity_table(found.tried, title))
    best = found.best
    console.print(
        "No number of workers is enough." if best is None
        else f"The fewest: {best.prefills} prefill and {best.decodes} decode workers"
    )  # fmt: skip
    if values["json"]:
        rows = [
            {"prefills": p.prefills, "decodes": p.decodes, "enough": p.enough, **asdict(p.figures)} for p in found.tried
        ]
        chosen = None if best is None else {"prefills": best.prefills, "decodes": best.decodes}
        write_json(values["json"], {"objectives": asdict(objectives), "load": title, "best": chosen, "tried": rows})
    return int(best is None)


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write the result of a study as JSON. Raises ConfigError on failure."""
    try:
        path.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None


def comparison_tables(found: list[FleetVariant], title: str) -> Iterator[Table]:
    """Yield tables of 80 columns with a column per fleet of a comparison."""
    shares = [variant.figures for variant in found]
    figures = {
        "TTFT p50 / p99, ms": [f"{one.ttft_p50_ms:.0f} / {one.ttft_p99_ms:.0f}" for one in shares],
        "ITL p50 / p99, ms": [f"{one.itl_p50_ms:.1f} / {one.itl_p99_ms:.1f}" for one in shares],
        "requests that met all objectives": [f"{one.good_share:.1%}" for one in shares],
        "  of these in a second": [f"{one.good_per_s:.3g}" for one in shares],
        "prompt tokens found in a cache": [f"{one.hit_share:.1%}" for one in shares],
        "  computed by prefill workers": [f"{one.prefilled_share:.1%}" for one in shares],
        "requests that failed": [str(one.failed) for one in shares],
        "sooner than in the first fleet": ["", *(f"{one.faster_share:.0%}" for one in shares[1:])],
        "later than in the first fleet": ["", *(f"{one.slower_share:.0%}" for one in shares[1:])],
    }
    for begin in range(0, len(found), FLEETS_OF_A_TABLE):
        table = Table(title=title)
        table.add_column("fleet")
        for variant in found[begin : begin + FLEETS_OF_A_TABLE]:
            table.add_column(variant.name, justify="right", overflow="fold")
        for name, values in figures.items():
            table.add_row(name, *values[begin : begin + FLEETS_OF_A_TABLE])
        yield table


def capacity_table(points: tuple[CapacityPoint, ...], title: str) -> Table:
    """Return a table with a row per number of workers tried."""
    table = Table(title=title)
    headings = ("prefill\nworkers", "decode\nworkers", "TTFT ms\np50 / p99", "ITL ms\np50 / p99", "met all\nobjectives")
    for heading in (*headings, "enough"):
        table.add_column(heading, justify="right")
    for point in points:
        found = point.figures
        table.add_row(
            str(point.prefills),
            str(point.decodes),
            f"{found.ttft_p50_ms:.0f} / {found.ttft_p99_ms:.0f}",
            f"{found.itl_p50_ms:.1f} / {found.itl_p99_ms:.1f}",
            f"{found.good_share:.1%}",
            "yes" if point.enough else "no",
        )
    return table
