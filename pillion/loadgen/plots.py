"""Draws pictures of a run and of a sweep with matplotlib (`pip install 'pillion[bench]'`): PNG or SVG, by the file's
name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pillion.errors import ConfigError
from pillion.loadgen.figures import Record, percentile
from pillion.loadgen.slo import Objective

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
# These colours of Okabe and Ito's palette are ones that colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#777777"
MAX_DOTS = 20_000
# A logarithmic axis has no place for 0, so smaller times are drawn as this.
LEAST_MS = 0.01


def check_plot(path: Path) -> None:
    """Raises ConfigError where no picture could be written. It is called before the run starts."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path} does not end in one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'pillion[bench]'") from None


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


def plot_run(path: Path, records: Sequence[Record], objectives: Sequence[Objective], title: str) -> None:
    """Draws the distributions of the latencies, and the gaps between tokens over time above the prompts that
    arrived."""
    figure = new_figure(10, 6.4)
    figure.suptitle(title, fontsize=10)
    grid = figure.add_gridspec(3, 2, height_ratios=(3, 2.6, 1.3))
    answered = [record for record in records if record.ok]
    bounds = {objective.measure: objective for objective in objectives}
    first, gaps = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    first.set_title("from the intended arrival", fontsize=10)
    gaps.set_title("between tokens", fontsize=10)
    _cdf(first, [record.ttft_s for record in answered], "TTFT", BLUE, "-")
    _cdf(first, [record.e2e_s for record in answered], "e2e", ORANGE, "--")
    _cdf(gaps, [gap for record in answered for gap in record.itl_s], "ITL (every gap)", BLUE, "-")
    _cdf(gaps, [record.tpot_s for record in answered if len(record.messages) > 1], "TPOT (a request)", ORANGE, "--")
    for axes, names in ((first, ("ttft", "e2e")), (gaps, tuple(name for name in bounds if name.startswith("itl")))):
        for name in names:
            # A bound that grows with the prompt cannot be drawn as one line.
            if name in bounds and not (bounds[name].per_prompt_token_s or bounds[name].per_answer_token_s):
                axes.axvline(bounds[name].fixed_s * 1000, color=GREY, lw=1, ls=":", label=f"objective {name}")
        axes.set(xlabel="ms", ylabel="share of them", ylim=(0, 1.02))
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    between = [gap for record in answered for gap in record.itl_s]
    if between:
        # Messages that were read together have gaps of almost nothing, which would take most of a logarithmic axis.
        gaps.set_xlim(left=max(percentile(between, 2) * 1000, LEAST_MS) / 2)
    _timeline(figure.add_subplot(grid[1, :]), figure.add_subplot(grid[2, :]), records)
    save_figure(figure, path)


def plain_numbers(axis: Axis) -> None:
    """Labels a logarithmic axis with plain numbers (50, not 5 x 10^1), few enough to read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(labelsize=8)


def _cdf(axes: Axes, seconds: Sequence[float], label: str, colour: str, style: str) -> None:
    ordered = sorted(max(value * 1000, LEAST_MS) for value in seconds)
    # The line of a distribution begins at share 0, so that a single value is visible too.
    shares = [rank / len(ordered) for rank in range(len(ordered) + 1)] if ordered else []
    axes.step([*ordered[:1], *ordered], shares, where="post", color=colour, ls=style, label=label)


def _timeline(gaps: Axes, prompts: Axes, records: Sequence[Record]) -> None:
    dots = [
        (after[0], max((after[0] - before[0]) * 1000, LEAST_MS))
        for record in records
        for before, after in zip(record.messages, record.messages[1:], strict=False)
    ]
    dots = dots[:: len(dots) // MAX_DOTS + 1]
    gaps.plot([at for at, _ in dots], [gap for _, gap in dots], ".", ms=3, color=BLUE, alpha=0.5)
    gaps.set(ylabel="ITL, ms", yscale="log")
    if dots:
        gaps.set_ylim(bottom=percentile([gap for _, gap in dots], 2) / 2)
    plain_numbers(gaps.yaxis)
    gaps.set_title("gaps between tokens, and tokens to compute of the prompts that were sent", fontsize=10)
    gaps.grid(alpha=0.3)
    gaps.sharex(prompts)
    gaps.tick_params(labelbottom=False)
    times = [record.sent_s for record in records]
    new = [record.prompt_tokens - record.cached_tokens for record in records]
    prompts.vlines(times, 0, new, color=ORANGE, lw=1.5)
    for at in times:
        gaps.axvline(at, color=ORANGE, lw=0.6, alpha=0.35, zorder=0)
    failed = [record.ended_s for record in records if not record.ok]
    if failed:
        prompts.plot(failed, [0] * len(failed), "x", color="black", label="failed")
        prompts.legend(fontsize=8)
    # Limits are set last, because they end the axes' own choice.
    prompts.set(xlabel="seconds", ylabel="new tokens", ylim=(0, None), xlim=(0, None))
    prompts.grid(alpha=0.3)


def plot_sweep(path: Path, rows: Sequence[dict[str, Any]], attainment: float, title: str) -> None:
    """Draws goodput and the share of requests that met the objectives, over the rate. ``rows`` have a ``rate`` and a
    run's result each."""
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    rows = sorted(rows, key=lambda row: float(row["rate"]))
    rates = [row["rate"] for row in rows]
    offered = [row["summary"]["offered_requests_per_s"] for row in rows]
    axes.plot(rates, offered, color=GREY, lw=1, ls=":", label="arrived")
    axes.plot(rates, [row["summary"]["requests_per_s"] for row in rows], "s--", color=ORANGE, label="answered")
    axes.plot(rates, [row["goodput"]["requests_per_s"] for row in rows], "o-", color=BLUE, label="goodput")
    axes.set(xlabel="rate, requests/s", ylabel="requests/s", xlim=(0, None), ylim=(0, None))
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    share = axes.twinx()
    share.plot(rates, [row["goodput"]["attainment"] for row in rows], "^-.", color=GREEN, label="share good (right)")
    share.axhline(attainment, color=GREEN, lw=1, ls=":")
    share.set(ylabel="share that met all objectives", ylim=(0, 1.05))
    lines = [*axes.get_lines(), share.get_lines()[0]]
    axes.legend(lines, [str(line.get_label()) for line in lines], fontsize=8, loc="lower left")
    save_figure(figure, path)
