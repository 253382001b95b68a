"""`pillion adapters`. Each command imports what it needs when it runs."""

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
@option("--in-place", "Replace the adapter that has this name.", False, is_flag=True)
@option("--parent", "The adapter's model. Default: the gateway's --model.", "", metavar="MODEL")
@talks_to_gateway
def adapters_load(name: str, path: str, in_place: bool, parent: str, **values: Any) -> None:
    """Load the adapter in the folder PATH as NAME. PATH is on the gateway's machine, inside one of its --lora-path."""
    from pillion.client.client import Client

    with Client(**pop_reach(values)) as client:
        info = client.load_adapter(name, path, in_place=in_place, model=parent)
    print(f"loaded: {info.name}, an adapter of {info.parent}, {info.adapter}")


@adapters.command("unload")
@click.argument("name")
@talks_to_gateway
def adapters_unload(name: str, **values: Any) -> None:
    """Unload the adapter NAME. Running answers that use it continue."""
    from pillion.client.client import Client

    with Client(**pop_reach(values)) as client:
        client.unload_adapter(name)
    print(f"unloaded: {name}")


@adapters.command("list")
@talks_to_gateway
def adapters_list(**values: Any) -> None:
    """List the adapters that requests may name, with their models."""
    from rich import box
    from rich.table import Table

    from pillion.cli.console import table_console
    from pillion.client.client import Client

    with Client(**pop_reach(values)) as client:
        models = client.models()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("adapter", "model", "digest"):
        table.add_column(title, overflow="fold")
    for info in models:
        if info.parent:
            table.add_row(info.name, info.parent, info.adapter)
    table_console(120).print(table)
