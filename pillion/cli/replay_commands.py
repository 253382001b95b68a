"""`pillion replay` and `pillion canary`. Each imports what it needs when it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import click

from pillion.cli.explain_command import reads_bundles
from pillion.cli.flags import FlagCommand, option
from pillion.cli.reach import pop_reach, talks_to_gateway
from pillion.errors import ConfigError, PillionError

MODEL = option("--model", "Name of the model at the target. Default: the bundle's.", "")


def exit_status(run: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine that returns an exit status. Converts errors to ConfigError, whose exit status is 2, because 1
    means that answers differ."""
    try:
        return asyncio.run(run)
    except PillionError as error:
        raise ConfigError(error.message) from None


@click.command(cls=FlagCommand)
@click.argument("bundle")
@reads_bundles
@MODEL
@option("--any-model", "Also replay with other weights than the recorded ones.", False, is_flag=True)
@option(
    "--what-if plan",
    "Force another plan, with an operator's key: policy=..., split=TOKENS, node=ID, joined by commas.",
    "",
    metavar="PLAN",
)
@talks_to_gateway
def replay(
    bundle: str,
    record_path: str,
    record_key_file: str,
    redis_url: str,
    model: str,
    any_model: bool,
    plan: str,
    **values: Any,
) -> int:
    """Run a recorded request again, and compare the answers.

    BUNDLE is a bundle's file, or its id with --record-path. The exit status is 0 if the answers are equal, 1 if they
    differ (the last line has the first position), and 2 if the bundle could not be replayed.
    """
    from pillion.gateway.recorder.record_store import read_named
    from pillion.records.replay import run_replay

    record, verified = read_named(bundle, record_path, record_key_file, redis_url)
    return exit_status(run_replay(record, verified, pop_reach(values), model, any_model, plan, click.echo))


@click.command(cls=FlagCommand)
@reads_bundles
@MODEL
@option("--share", "Share of the bundles to replay.", 1.0, type=click.FloatRange(0, 1, min_open=True))
@option("--rule", "Limits: differs=SHARE, distance=LOGPROBS, slower=TIMES.", "differs=0")
@option("--requests", "Number of replays before the rule decides.", 200, type=click.IntRange(1, 100_000))
@option("--concurrency", "Maximum number of replays at once.", 1, type=click.IntRange(1, 16))
@option(
    "--tokens-per-second tokens_per_s",
    "Maximum tokens of prompts and answers per second.",
    100.0,
    type=click.FloatRange(1, 1_000_000),
)
@option("--existing", "Replay the existing bundles and exit, instead of following new ones.", False, is_flag=True)
@option(
    "--metrics-file",
    "Write the figures for Prometheus to this file.",
    None,
    type=click.Path(path_type=Path),
    metavar="PATH",
)
@talks_to_gateway
def canary(record_path: str, record_key_file: str, redis_url: str, rule: str, requests: int, **values: Any) -> int:
    """Judge the next version by replaying live requests on it.

    It follows the bundles of gateways with --record-content full, and replays new ones at --target, at the lowest
    priority. The exit status is 0 to promote, 1 to stop, and 2 if it could not decide.
    """
    from rich import box
    from rich.table import Table

    from pillion.cli.console import table_console
    from pillion.gateway.recorder.record_store import key_at, open_records
    from pillion.records.canary import CanaryTally, parse_rule
    from pillion.records.canary_run import Canary, table_rows

    if not record_path:
        raise ConfigError("--record-path is required: the location of the bundles")
    reach, tally = pop_reach(values), CanaryTally(parse_rule(rule), requests)
    key = key_at(record_path, record_key_file)
    try:
        with open_records(record_path, redis_url) as records:
            run = Canary(
                listed=records.listed, read=records.read, key=key, reach=reach, tally=tally, say=click.echo, **values
            )
            return exit_status(run.run())
    finally:
        if tally.all.requests:
            table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
            titles = ("model", "kind", "replayed", "equal", "differ", "prompt", "error", "first", "distance", "time")
            for title in titles:
                table.add_column(title)
            for row in table_rows(tally):
                table.add_row(*row)
            table_console(110).print(table)
