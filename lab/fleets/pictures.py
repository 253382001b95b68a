"""Draws pictures of a fleet's studies, by matplotlib (`pip install 'pillion[bench]'`): PNG, SVG or PDF by the file's
name.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lab.fleets.figures import GoodBounds, all_gaps_s, curve_ms
from lab.fleets.studies import Capacity, FleetVariant
from pillion.loadgen.plots import BLUE, GREEN, GREY, LEAST_MS, ORANGE, new_figure, plain_numbers, save_figure

# These are Okabe and Ito's colours, which colour-blind readers can tell apart; dashes tell the lines apart once more.
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", "-.", ":")


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
