"""`pillion cache`. Each command imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pillion.cli.flags import FILE, CommandGroup, option, options
from pillion.cli.reach import pop_reach, talks_to_gateway


def parse_seconds(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """Parse a duration such as 90s, 5m, 1h or 7d; "" is 0."""
    from pillion.cli.cache import parse_duration

    try:
        return parse_duration(text) if text else 0
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@click.group(cls=CommandGroup)
def cache() -> None:
    """Precompute prompts and pin them.

    FILE is the text of one prompt or, if it ends in .jsonl, has an object per line with "text", "messages" or
    "tokens", and optionally "model", "adapter", "cache_salt", "tools", "name" and "ttl_s".
    """


prompt_options = options(
    option("--model", "Served model or adapter; optional if one model is served.", ""),
    option("--cache-salt", "The salt of the requests that use the prompts.", ""),
)


@cache.command("warm")
@click.argument("file", type=FILE)
@prompt_options
@talks_to_gateway
def cache_warm(file: Path, model: str, cache_salt: str, **values: Any) -> None:
    """Compute the KV of the prompts in FILE at the lowest priority, without generating."""
    from pillion.cli.cache import run_warm

    run_warm(pop_reach(values), file, {"model": model, "cache_salt": cache_salt})


@cache.command("pin")
@click.argument("file", type=FILE)
@option("--name", "The pin's name, for one prompt. Default: derived from the prompt.", "")
@option("--ttl ttl_s", "Duration, such as 5m, 1h or 7d; at most 30d. Default: a day.", "", callback=parse_seconds)
@prompt_options
@talks_to_gateway
def cache_pin(file: Path, name: str, ttl_s: int, model: str, cache_salt: str, **values: Any) -> None:
    """Compute the prompts in FILE and pin them: their KV is evicted after everything unpinned."""
    from pillion.cli.cache import run_warm

    common = {"model": model, "cache_salt": cache_salt, "pin": True, "name": name, "ttl_s": ttl_s}
    run_warm(pop_reach(values), file, common)


@cache.command("list")
@talks_to_gateway
def cache_list(**values: Any) -> None:
    """List your own pins: names, tokens, blocks, nodes, expiry, and number of prompts served."""
    from pillion.cli.cache import run_list

    run_list(pop_reach(values))


@cache.command("drop")
@click.argument("name")
@talks_to_gateway
def cache_drop(name: str, **values: Any) -> None:
    """Remove your own pin NAME. Its blocks stay in memory until they are evicted."""
    from pillion.client.client import Client

    with Client(**pop_reach(values)) as client:
        client.drop_prefix(name)
    print(f"dropped: {name}")
