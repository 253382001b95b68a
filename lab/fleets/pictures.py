"""Draws pictures of a fleet's studies, by matplotlib (`pip install matplotlib`): PNG, SVG or PDF by the file's
name.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab.fleets.figures import GoodBounds, all_gaps_s, curve_ms
from lab.fleets.studies import Capacity, FleetVariant
from pillion.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
# A logarithmic axis has no place for 0, so smaller times are drawn as this.
LEAST_MS = 0.01
# These are Okabe and Ito's colours, which colour-blind readers can tell apart; dashes tell the lines apart once more.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#777777"
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", "-.", ":")


def check_plot(path: Path) -> None:
    """Raises ConfigError where no picture could be written. It is called before the run starts."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path} does not end in one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install matplotlib") from None


def new_figure(width: float, height: float) -> Figure:
    """Makes an empty figure of so many inches."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    # With "none" the text in an SVG stays text, which is smaller and can be searched.
    rcParams["svg.fonttype"] = "none"
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure; its folder is made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def plain_numbers(axis: Axis) -> None:
    """Labels a logarithmic axis with plain numbers (50, not 5 x 10^1), few enough to read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(labelsize=8)


def plot_comparison(path: Path, variants: Sequence[FleetVariant], objectives: GoodBounds, title: str) -> None:
    """Plots distributions of the time to the first token and of the gaps between tokens, a line for each fleet. Raises
    OSError."""
    figure = new_figure(10, 4.2)
    figure.suptitle(title, fontsize=10)
    for axes, name, bound_s in zip(
        figure.subplots(1, 2), ("TTFT", "ITL"), (objectives.ttft_s, objectives.itl_s), strict=True
    ):
        for variant, colour, dash in zip(variants, itertools.cycle(COLOURS), itertools.cycle(DASHES), strict=False):
            ttft_s = np.array([record.ttft_s for record in variant.records])
            times, shares = curve_ms(ttft_s if name == "TTFT" else all_gaps_s(variant.records))
            axes.plot([max(time, LEAST_MS) for time in times], shares, color=colour, ls=dash, label=variant.name)
        if bound_s:
            axes.axvline(bound_s * 1000, color=GREY, lw=1, ls=":", label="objective")
        axes.set(xlabel=f"{name}, ms", ylabel="share of them", ylim=(0, 1.02), xscale="log")
        plain_numbers(axes.xaxis)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save_figure(figure, path)


def plot_capacity(path: Path, found: Capacity, objectives: GoodBounds, title: str) -> None:
    """Plots the share of good requests over the number of workers, with a mark for each fleet that was tried, by the
    share of its prefill workers. Raises OSError."""
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    points = found.tried
    marks = axes.scatter(
        [point.workers for point in points],
        [point.figures.good_share for point in points],
        c=[point.prefills / point.workers for point in points],
        cmap="viridis", vmin=0, vmax=1, zorder=3,
    )  # fmt: skip
    figure.colorbar(marks, ax=axes, label="share of prefill workers")
    axes.axhline(objectives.attainment, color=GREEN, lw=1, ls=":", label=f"{objectives.attainment:.0%} good")
    if found.best is not None:
        label = f"{found.best.prefills} prefill + {found.best.decodes} decode"
        axes.axvline(found.best.workers, color=ORANGE, lw=1, ls="--", label=label)
    axes.set(xlabel="workers", ylabel="share of good requests", ylim=(0, 1.05), xscale="log")
    plain_numbers(axes.xaxis)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    save_figure(figure, path)
