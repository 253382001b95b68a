"""`pillion drill`, which strikes components of a live cluster. Imports what it needs when it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pillion.cli.console import table_console
from pillion.cli.flags import FILE, FlagCommand, option
from pillion.cli.reach import DEFAULT_TARGET, pop_reach, talks_to_gateway
from pillion.drill.contract import KINDS, read_contract
from pillion.errors import ConfigError

if TYPE_CHECKING:
    from pillion.drill.drill import DrillPlan

CONSENT = "drill"


@click.command(cls=FlagCommand)
@option("--contract", "TOML or JSON file with the limits of a strike's costs.", type=FILE)
@option("--yes", "Do not ask for consent.", False, is_flag=True)
@option("--kill", "Command that strikes, with {component}, {role}, {signal}. Default: local processes.", "")
@option("--start", "Command that restarts what --kill has killed, with {component} and {role}.", "")
@option("--supervised", "Something else restarts what --kill has killed.", False, is_flag=True)
@option("--kind kinds", "Strike only this kind. Repeatable.", (), type=click.Choice(KINDS), multiple=True)
@option("--pause-s", "Stop each component for this long instead of killing it.", 0.0, type=click.FloatRange(0, 3600))
@option("--streams", "Streams of the drill's own load.", 4, type=click.IntRange(1, 256))
@option("--input-len prompt_tokens", "Tokens of their prompts.", 256, type=click.IntRange(1))
@option("--output-len answer_tokens", "Average number of tokens of their answers.", 128, type=click.IntRange(2))
@option("--model", "Served model name; optional if one model is served.", "")
@option("--within-s", "Maximum wait for the cluster and for its streams.", 120.0, type=click.FloatRange(1))
@option("--json", "Write the result to this file.", type=FILE, metavar="PATH")
@option("--metrics-file", "Write metrics for Prometheus's text file collector to this file.", type=FILE, metavar="PATH")
@talks_to_gateway
def drill(yes: bool, json: Path | None, metrics_file: Path | None, **values: Any) -> int:
    """Kill one component of each kind, and compare the cost to a contract.

    The drill streams answers meanwhile. It refuses to start if a kind has a single component and nothing restarts it.
    The exit status is 0 if the contract was kept, 1 if it was broken, and 2 if the drill was refused.
    """
    from pillion.drill.drill import choose_victims, run_drill
    from pillion.drill.report import StrikeReport, as_json, as_metrics, lines_of, table_of
    from pillion.observability.metrics_file import write_whole

    for name, file in (("--json", json), ("--metrics-file", metrics_file)):
        if file and not file.parent.is_dir():
            raise ConfigError(f"{name}: there is no folder {file.parent}")
    plan = _plan_of(**values)
    victims = choose_victims(plan)
    names = ", ".join(victim.component_id for victim in victims)
    click.echo(f"{plan.reach['target']}: {names} will be {plan.how} one after the other", err=True)
    if not yes:
        _ask_for_consent()
    reports: list[StrikeReport] = []
    try:
        for report in run_drill(plan, victims):
            reports.append(report)
            click.echo(f"{report.component_id} was {report.how}", err=True)
    finally:
        if reports:
            table_console(120).print(table_of(reports))
        for line in lines_of(reports):
            click.echo(line, err=True)
    if json:
        write_whole(json, as_json(reports))
    if metrics_file:
        write_whole(metrics_file, as_metrics(reports, time.time()))
    return int(any(report.broken for report in reports))


def _plan_of(contract: Path | None, kill: str, start: str, supervised: bool, **values: Any) -> DrillPlan:
    """Build the plan from the options' values. Raises ConfigError for an invalid contract or combination."""
    from pillion.drill.drill import DrillPlan
    from pillion.drill.strikes import Striker

    if (start or supervised) and not kill:
        raise ConfigError("--start and --supervised need --kill")
    reach = {"target": DEFAULT_TARGET} | pop_reach(values)
    return DrillPlan(reach=reach, contract=read_contract(contract), striker=Striker(kill, start, supervised), **values)


def _ask_for_consent() -> None:
    """Raise ConfigError unless the user types CONSENT."""
    try:
        typed = click.prompt(f"type {CONSENT} to start", default="", show_default=False, err=True)
    except click.Abort:
        typed = ""
    if typed != CONSENT:
        raise ConfigError("the drill does not start without consent (--yes)")
