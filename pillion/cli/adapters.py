"""Runs the client commands of adapters over the SDK. ``reach`` has the arguments of :class:`pillion.Client`."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from pillion.cli.console import table_console
from pillion.client.client import Client

TABLE_WIDTH = 120


def run_load(reach: dict[str, Any], name: str, path: str, in_place: bool, parent: str) -> None:
    """Loads an adapter and prints what its name means now. Raises PillionError."""
    with Client(**reach) as client:
        info = client.load_adapter(name, path, in_place=in_place, model=parent)
    print(f"loaded: {info.name}, an adapter of {info.parent}, {info.adapter}")


def run_unload(reach: dict[str, Any], name: str) -> None:
    """Unloads an adapter. Raises PillionError."""
    with Client(**reach) as client:
        client.unload_adapter(name)
    print(f"unloaded: {name}")


def run_list(reach: dict[str, Any]) -> None:
    """Prints a row for each adapter. Raises PillionError."""
    with Client(**reach) as client:
        models = client.models()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("adapter", "model", "digest"):
        table.add_column(title, overflow="fold")
    for info in models:
        if info.parent:
            table.add_row(info.name, info.parent, info.adapter)
    table_console(TABLE_WIDTH).print(table)
