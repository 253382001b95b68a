"""Reports of a drill: a table, JSON, and metrics in Prometheus's text format for a cron job."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from pillion.drill.contract import FIGURES, StrikeCost
from pillion.observability.metrics_file import GaugeSeries, gauge_page


@dataclass(frozen=True, slots=True)
class StrikeReport:
    """Outcome of one strike.

    Attributes:
        kind, component_id: the component that was struck.
        how: "killed", or for how long it was paused.
        streams, moved: the drill's own streams in flight, and how many of these were replayed.
        broken: a sentence per exceeded limit of the contract.
        errors: why streams were lost.
    """

    kind: str
    component_id: str
    how: str
    cost: StrikeCost
    streams: int
    moved: int
    broken: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


def table_of(reports: Sequence[StrikeReport]) -> Table:
    """Return a table with one row per strike."""
    table = Table(title="Drill", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("component", "how", "streams", "moved", *FIGURES, "contract"):
        table.add_column(name.replace("_", " "), justify="left" if name in ("component", "how") else "right")
    for one in reports:
        figures = (f"{getattr(one.cost, name):,.6g}" for name in FIGURES)
        kept = "broken" if one.broken else "kept"
        table.add_row(one.component_id, one.how, str(one.streams), str(one.moved), *figures, kept)
    return table


def lines_of(reports: Sequence[StrikeReport]) -> Iterator[str]:
    """Yield a line per exceeded limit of the contract and per lost stream."""
    for one in reports:
        yield from (f"{one.component_id}: {text}" for text in one.broken)
        yield from (f"{one.component_id}: a stream was lost: {text}" for text in one.errors)


def as_json(reports: Sequence[StrikeReport]) -> str:
    """Return the reports as JSON, with infinite figures as null."""
    rows: list[dict[str, Any]] = []
    for one in reports:
        row = asdict(one)
        row["cost"] = {name: value if math.isfinite(value) else None for name, value in row["cost"].items()}
        rows.append(row)
    return json.dumps({"kept": not any(one.broken for one in reports), "strikes": rows}, indent=2) + "\n"


def as_metrics(reports: Sequence[StrikeReport], now_s: float) -> str:
    """Return the reports in Prometheus's text format: a metric per figure, with a series per kind of component.
    ``now_s`` is Unix time."""
    figures: dict[str, dict[tuple[str, ...], float]] = {
        name: {(one.kind,): float(getattr(one.cost, name)) for one in reports} for name in FIGURES
    }
    figures["contract_kept"] = {(one.kind,): float(not one.broken) for one in reports}
    gauges = {
        f"pillion_drill_{name}": GaugeSeries(f"The drill's {name.replace('_', ' ')}.", ("kind",), values)
        for name, values in figures.items()
    }
    last_run = GaugeSeries("Unix time of the drill's end.", (), {(): round(now_s)})
    return gauge_page({**gauges, "pillion_drill_last_run_timestamp_seconds": last_run})
