"""Line charts as SVG, written by hand: a few dozen points need no plotting library."""

from __future__ import annotations

import html
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 18, 40, 50
LEGEND_ROW = 18
TICKS = 5
# Okabe and Ito's colours, which colour-blind readers can tell apart; the shapes say it once more.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: lines named by ``series``, each a list of (x, y). The y axis begins at 0.

    With ``log_x`` the x axis is logarithmic (every x above 0) and its ticks are the points' own x.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Point]]
    log_x: bool = False


def line_charts(path: pathlib.Path, charts: Sequence[Chart]) -> None:
    """Write charts side by side to ``path``. Raises ValueError for a chart without a point."""
    legend = max(len(chart.series) for chart in charts) * LEGEND_ROW
    width, height = WIDTH * len(charts), HEIGHT + legend
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        # Pages may be dark; the chart brings its own paper.
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, chart in enumerate(charts):
        elements += [f'<g transform="translate({index * WIDTH} 0)">', *_draw(chart), "</g>"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*elements, "</svg>"]) + "\n", "utf-8")


def _draw(chart: Chart) -> list[str]:
    points = [point for line in chart.series.values() for point in line]
    if not points:
        raise ValueError(f"chart {chart.title!r} has no point")
    xs = sorted({x for x, _ in points})
    y_ticks = _ticks(0.0, max(y for _, y in points))
    x_ticks = xs if chart.log_x else _ticks(xs[0], xs[-1])
    low, high = (xs[0], xs[-1]) if chart.log_x else (x_ticks[0], x_ticks[-1])
    bottom = HEIGHT - BOTTOM

    def at_x(x: float) -> float:
        # A single x stands in the middle.
        share = 0.5 if high == low else (x - low) / (high - low)
        if chart.log_x and high > low:
            share = math.log(x / low) / math.log(high / low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return bottom - y / y_ticks[-1] * (bottom - TOP)

    drawn = [_text(WIDTH / 2, 22, chart.title, 'font-weight="bold" font-size="13"')]
    for tick in y_ticks:
        drawn.append(_line(LEFT, at_y(tick), WIDTH - RIGHT, at_y(tick), "#dddddd"))
        drawn.append(_text(LEFT - 6, at_y(tick) + 4, _label(tick), anchor="end"))
    for tick in x_ticks:
        drawn.append(_line(at_x(tick), bottom, at_x(tick), bottom + 4, "black"))
        drawn.append(_text(at_x(tick), bottom + 18, _label(tick)))
    drawn.append(_line(LEFT, bottom, WIDTH - RIGHT, bottom, "black"))
    drawn.append(_line(LEFT, TOP, LEFT, bottom, "black"))
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, chart.x_label))
    middle = (TOP + bottom) / 2
    drawn.append(_text(16, middle, chart.y_label, f'transform="rotate(-90 16 {middle:.1f})"'))
    for index, (name, line) in enumerate(chart.series.items()):
        places = [(at_x(x), at_y(y)) for x, y in line]
        drawn += _series(index, name, places)
    return drawn


def _series(index: int, name: str, places: Sequence[Point]) -> list[str]:
    """A line with a dot at each point, and its row in the legend below the chart."""
    colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash or "none"}"'
    y = HEIGHT + index * LEGEND_ROW
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return [
        f'<polyline points="{path}" {style}/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places),
        f'<polyline points="{LEFT},{y} {LEFT + 28},{y}" {style}/>',
        _text(LEFT + 36, y + 4, name, anchor="start"),
    ]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from at most ``low`` to at least ``high``."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * TICKS >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _label(value: float) -> str:
    """4096 as 4K, as flags take sizes; other numbers as short as they are exact enough."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}K"
    return f"{value:.6g}"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, more: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{html.escape(text)}</text>'
