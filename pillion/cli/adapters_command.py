"""Declares the commands of `pillion adapters`. Each imports what it needs when it runs."""

from __future__ import annotations

from typing import Any

import click

from pillion.cli.flags import CommandGroup, option
from pillion.cli.reach import pop_reach, talks_to_gateway


@click.group(cls=CommandGroup)
def adapters() -> None:
    """Load, unload and list LoRA adapters."""


@adapters.command("load")
@click.argument("name")
@click.argument("path")
@option("--in-place", "Let the name lose the adapter that it has.", False, is_flag=True)
@option("--parent", "The model that the adapter is for. Default: that of the gateway's --model.", "", metavar="MODEL")
@talks_to_gateway
def adapters_load(name: str, path: str, in_place: bool, parent: str, **values: Any) -> None:
    """Give NAME to the adapter in the folder PATH of the gateway's machine, inside of one of its --lora-path."""
    from pillion.cli.adapters import run_load

    run_load(pop_reach(values), name, path, in_place, parent)


@adapters.command("unload")
@click.argument("name")
@talks_to_gateway
def adapters_unload(name: str, **values: Any) -> None:
    """Take NAME away. Answers that run with its adapter go on."""
    from pillion.cli.adapters import run_unload

    run_unload(pop_reach(values), name)


@adapters.command("list")
@talks_to_gateway
def adapters_list(**values: Any) -> None:
    """List the adapters that requests may name, with their models."""
    from pillion.cli.adapters import run_list

    run_list(pop_reach(values))
