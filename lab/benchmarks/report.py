"""Shared by all benchmarks: description of the machine, medians with spread, results as JSON and as a table."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pillion.kernels.cpu.language.isa import choose_isa, host_features

TABLE_WIDTH = 110
RESULTS = pathlib.Path(__file__).resolve().parent / "results"
# Overridden by runs that only show that a benchmark works.
WRITTEN = pathlib.Path(os.environ.get("LAB_WRITTEN", RESULTS))
PICTURES = pathlib.Path(os.environ.get("LAB_WRITTEN", RESULTS.parents[1] / "docs"))


def machine() -> dict[str, Any]:
    """Describe the machine: processor, its CPU kernels, cores and versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    isa = choose_isa("auto", host_features())
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "grpcio")}
    return {
        "cpu": model,
        "kernels": isa.name if isa else "torch",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **versions,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the minimum, median and maximum of rounds."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def save(name: str, result: dict[str, Any]) -> pathlib.Path:
    """Write ``result`` with the machine's description to results/NAME.json."""
    path = WRITTEN / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **result}, indent=2, sort_keys=True) + "\n")
    return path


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with the same keys as a table."""
    table = Table(title=title)
    for heading in rows[0]:
        table.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    show_table(table)


def show_table(table: Table) -> None:
    """Print a table, with its full width if there is no terminal."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)
