"""Line charts of the pages' pictures, by matplotlib."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

Points = Sequence[tuple[float, float]]

# Okabe and Ito's colour-blind safe colours; dashes distinguish the lines as well.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")
# Text remains text in an SVG, and output is reproducible.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "pillion"}


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: lines named by ``series``, each a list of (x, y). The y axis begins at 0.

    ``log_x``: logarithmic x axis (x > 0) with ticks at the points' x.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    log_x: bool = False


def figure_of(charts: Sequence[Chart], columns: int = 0) -> Figure:
    """Return a figure of the charts, ``columns`` side by side (0: all). Raises ValueError for a chart without
    points."""
    columns = columns or len(charts)
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(4.6 * columns, 4.2 * rows), layout="constrained")
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for cell in cells[len(charts) :]:
        cell.remove()
    for chart, axes in zip(charts, cells, strict=False):
        xs = sorted({x for line in chart.series.values() for x, _ in line})
        if not xs:
            raise ValueError(f"chart {chart.title!r} has no point")
        for (name, line), colour, dash in zip(
            chart.series.items(), itertools.cycle(COLOURS), itertools.cycle(DASHES), strict=False
        ):
            axes.plot(*zip(*line, strict=True), color=colour, ls=dash, marker="o", ms=4, label=name)
        if chart.log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator(xs))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label, ylim=(0, None))
        axes.set_title(chart.title, fontsize=11, fontweight="bold")
        axes.grid(axis="y", alpha=0.4)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    return figure


def line_charts(path: pathlib.Path, charts: Sequence[Chart], columns: int = 0) -> None:
    """Draw charts into an SVG, ``columns`` side by side (0: all). Raises ValueError for a chart without points."""
    figure = figure_of(charts, columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None})


def number(value: float) -> str:
    """Format a tick: 4096 as 4K, as in flags; other numbers with few digits."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}K"
    return f"{value:.6g}"
