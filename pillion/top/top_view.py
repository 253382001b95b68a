"""Draws the frame that `pillion top` shows, as a pure function of two readings of the cluster.

    readings --> :mod:`pillion.top.top_figures` --> frame(): header, components, steps, pool, flow, notes --> rich

Sans-IO (I9). An unknown figure is a dash. Bars differ by glyph as well as by colour, so that a frame can be read
without colours.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pillion.observability import metric_catalog as names
from pillion.top.top_figures import (
    SOURCES,
    USES,
    ClusterReading,
    GatewayFlow,
    Quantiles,
    all_components,
    fenced_by,
    flow,
    state_of,
    steps,
    wanted_workers,
)
from pillion.types import WORKERS, ComponentStatus

COLOURS = ("green", "cyan", "blue", "magenta", "bright_black")
GLYPHS, ASCII_GLYPHS = "█▓▒◆·", "#+=*."
MIN_BAR_CELLS, MAX_BAR_CELLS = 6, 60
# A frame has this many lines that are no rows of components: the header, three tables' heads and the flow's four lines.
FIXED_LINES = 8
MAX_NOTES = 3
ROLES = ("gateway", "kvnode", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class FrameStyle:
    """Says how a frame is drawn. ``height_lines`` is the most lines; None sets no bound."""

    height_lines: int | None = None
    ascii_only: bool = False

    @property
    def glyphs(self) -> str:
        """Gives the glyphs for a bar's five segments."""
        return ASCII_GLYPHS if self.ascii_only else GLYPHS

    @property
    def dash(self) -> str:
        """Gives the text that is shown where a figure is unknown."""
        return "-" if self.ascii_only else "–"

    @property
    def overflow(self) -> OverflowMethod:
        """Gives the way in which a text that is too long ends."""
        return "crop" if self.ascii_only else "ellipsis"


@dataclass(frozen=True, slots=True)
class SegmentedBar:
    """Draws a bar of segments, as wide as its place. ``shares`` add up to 1, or are empty."""

    shares: Sequence[float]
    glyphs: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(MIN_BAR_CELLS, min(MAX_BAR_CELLS, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(no_wrap=True, overflow="crop")
        for cells, glyph, colour in zip(self.cells(options.max_width), self.glyphs, COLOURS, strict=False):
            text.append(glyph * cells, colour)
        yield text

    def cells(self, width: int) -> list[int]:
        """Returns the cells of each segment. A share above 0 has at least one cell, which the largest segments give
        up."""
        found = [max(1, round(share * width)) if share > 0 else 0 for share in self.shares]
        while found and sum(found) != width:
            found[found.index(max(found))] += 1 if sum(found) < width else -1
        return found


def frame(
    before: ClusterReading | None, now: ClusterReading, target: str, clock: str, style: FrameStyle
) -> RenderableType:
    """Draws the whole frame.

    Args:
        before: an earlier reading, which rates are taken from; None on the first frame.
        clock: the time of day.
    """
    streams = flow(before, now) if before else GatewayFlow(False, 0)
    notes = _notes(before, now, streams)
    fenced = fenced_by(now.status)
    components = sorted(all_components(now.status), key=lambda component: _urgency(component, fenced))
    workers = [component for component in components if component.role in WORKERS]
    nodes = [component for component in components if component.role == "kvnode"]
    room = None if style.height_lines is None else style.height_lines - FIXED_LINES - len(notes)
    rows = _share_out(room, [len(components), len(workers), len(nodes)])
    return Group(
        _header(before, now, target, clock),
        _components_table(components, rows[0], now, fenced, style),
        _steps_table(workers, rows[1], before, now, style),
        _pool_table(nodes, rows[2], now, style),
        *_flow_lines(streams, style),
        *(Text(_clean(note), "yellow", no_wrap=True, overflow=style.overflow) for note in notes),
    )


def _share_out(room: int | None, wanted: Sequence[int]) -> list[int]:
    """Returns the rows for each table, so that all of them fit: the longest gives up rows first, and each keeps one."""
    given = list(wanted)
    while room is not None and sum(given) > room and max(given) > 1:
        given[given.index(max(given))] -= 1
    return given


def _urgency(component: ComponentStatus, fenced: Container[str]) -> tuple[bool, int, str]:
    """Returns the order of rows: components in trouble first, then roles in the order in which a request meets them."""
    calm = state_of(component, fenced) == "ok"
    return calm, ROLES.index(component.role) if component.role in ROLES else len(ROLES), component.component_id


def _header(before: ClusterReading | None, now: ClusterReading, target: str, clock: str) -> Table:
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="crop")
    line.add_column(no_wrap=True, justify="right")
    over = f", rates over {now.at_s - before.at_s:.0f} s" if before else ""
    wanted = " + ".join(f"{count} {_clean(role)}" for role, count in wanted_workers(now).items())
    wanted = f", {wanted} wanted" if wanted else ""
    summary = f"  {_clean(target)}, {now.status.active_requests} active{wanted}{over}"
    line.add_row(Text.assemble((f"pillion {_clean(now.status.version)}", "bold"), summary), clock)
    return line


def _table(
    style: FrameStyle, first: str, columns: Iterable[tuple[RenderableType, bool]], *, bar: bool = False
) -> Table:
    """Makes a table without borders: a name, perhaps a bar that takes the room that is left, and columns.

    ``columns`` are headings, each with whether its column is justified to the right.
    """
    table = Table(box=None, expand=bar, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(first, no_wrap=True, overflow=style.overflow, max_width=20)
    if bar:
        table.add_column("", ratio=1)
    for heading, right in columns:
        table.add_column(heading, no_wrap=True, overflow=style.overflow, justify="right" if right else "left")
    return table


def _components_table(
    components: Sequence[ComponentStatus], rows: int, now: ClusterReading, fenced: Container[str], style: FrameStyle
) -> Table:
    # The column of adapters is left out where nobody has any.
    adapters = any(component.adapters for component in components)
    right = ("running", "waiting", "queued tok", "slots", *["adapters"] * adapters, "heartbeat")
    headings = [("role", False), ("node", False), *((name, True) for name in right), ("", False)]
    table = _table(style, "component", headings)
    for component in _fitting(table, components, rows):
        state, worker = state_of(component, fenced), component.role in WORKERS
        # A worker's page is fresher than its heartbeat.
        slots = now.gauge(component.component_id, names.FREE_SEQUENCES)
        queued = now.gauge(component.component_id, names.QUEUED_TOKENS)
        table.add_row(
            _clean(component.component_id),
            _clean(component.role) or style.dash,
            _clean(component.node_id) if component.node_id != component.component_id else "",
            *(
                [f"{component.running_requests:,}", f"{component.waiting_requests:,}"]
                if worker or component.role == "gateway"
                else ["", ""]
            ),
            _count(component.queued_tokens if queued is None else queued, style) if worker else "",
            _count(component.free_seqs if slots is None else slots, style) if worker else "",
            *[str(len(component.adapters)) if worker else ""] * adapters,
            f"{component.heartbeat_age_ms / 1000:.1f} s" if component.role else style.dash,
            {"fenced": "FENCED", "late": "late", "ok": ""}[state],
            style={"fenced": "bold red", "late": "yellow", "ok": ""}[state],
        )
    return table


def _steps_table(
    workers: Sequence[ComponentStatus], rows: int, before: ClusterReading | None, now: ClusterReading, style: FrameStyle
) -> Table:
    """Makes the table of each worker's steps, with a bar of what their budgets were used for."""
    short = ("decode", "tail", "prefill", "spec.", "idle")
    table = _table(
        style, "step budget", [*_legend(short, style), ("/s", True), ("p50", True), ("busy", True)], bar=True
    )
    for worker in _fitting(table, workers, rows):
        found = steps(before, now, worker.component_id) if before else None
        if found is None:
            cells: list[RenderableType] = ["", *[style.dash] * 8]
        elif not found.shares:
            cells = [Text("no step ran", "dim"), *[style.dash] * 5, "0", style.dash, "0%"]
        else:
            shares = [found.shares[use] for use in USES]
            cells = [SegmentedBar(shares, style.glyphs), *map(_percent, shares), _rate(found.per_second, style)]
            p50 = style.dash if found.p50_s is None else _time(found.p50_s, names.STEP_BOUNDS[-1])
            cells += [p50, _percent(found.busy)]
        table.add_row(_clean(worker.component_id), *cells)
    return table


def _pool_table(nodes: Sequence[ComponentStatus], rows: int, now: ClusterReading, style: FrameStyle) -> Table:
    """Makes the table of each pool's blocks by state. Pinned blocks are committed ones; the bar shows them once, as
    pinned."""
    short = ("cached", "pinned", "leased", "quar.", "free")
    table = _table(style, "pool, blocks", [*_legend(short, style), ("all", True), ("on disk", True)], bar=True)
    for node in _fitting(table, nodes, rows):
        # Figures from a node's page of metrics are newer than those of its last heartbeat.
        pinned = now.gauge(node.component_id, names.KV_HELD, "pinned")
        disk = now.gauge(node.component_id, names.KV_DISK_BLOCKS)
        pinned = node.pinned_blocks if pinned is None else pinned
        disk = node.disk_blocks if disk is None else disk
        shown_as_pinned = min(pinned, node.committed_blocks)
        others, total = (node.leased_blocks, node.quarantined_blocks, node.free_blocks), node.total_blocks
        blocks = (node.committed_blocks - shown_as_pinned, shown_as_pinned, *others)
        table.add_row(
            _clean(node.component_id),
            SegmentedBar([count / total for count in blocks] if total else (), style.glyphs),
            *(_count(count, style) for count in (node.committed_blocks, pinned, *others, total, disk)),
        )
    return table


def _flow_lines(streams: GatewayFlow, style: FrameStyle) -> list[Text]:
    """Writes the lines on where prompts' KV came from, latencies, rates and refusals."""
    first, later = _quantiles(streams.first_token, style), _quantiles(streams.between_tokens, style)
    times = f"first token {first}   next tokens {later}"
    requests = streams.requests
    kinds = ("answered", "cancelled", "failed")
    ended = ", ".join(
        f"{kind} {_rate(requests.get(kind, 0.0) if requests is not None else None, style)}" for kind in kinds
    )
    rates = f"tokens/s generated {_rate(streams.generated, style)}, prompts {_rate(streams.prompt, style)}"
    refused = streams.refused
    worst = sorted((refused or {}).items(), key=lambda item: -item[1])
    reasons = ", ".join(f"{_clean(reason)} {_rate(rate, style)}" for reason, rate in worst if rate)
    total = _rate(sum(refused.values()) if refused is not None else None, style)
    lines = (
        ("hits      ", _hits(streams, style)),
        ("latency   ", times),
        ("flow      ", rates),
        ("requests/s", f"{ended}, refused {total}{f' ({reasons})' if reasons else ''}"),
    )
    return [Text.assemble((name, "bold"), " ", text, no_wrap=True, overflow=style.overflow) for name, text in lines]


def _hits(streams: GatewayFlow, style: FrameStyle) -> str:
    """Says where prompts' KV came from, in percent of the prompts' tokens."""
    prompt, sources = streams.prompt, streams.sources
    if prompt == 0:
        return "no prompt ended"
    found = style.dash if streams.cached is None or prompt is None else _percent(streams.cached / prompt)
    shares = {name: tokens / prompt * 100 for name, tokens in sources.items()} if sources and prompt else {}
    parts = [f"{name} {f'{shares[name]:.0f}' if shares else style.dash}" for name in SOURCES]
    return f"{found}: {', '.join(parts[:-2])}; {', '.join(parts[-2:])}"


def _notes(before: ClusterReading | None, now: ClusterReading, streams: GatewayFlow) -> list[str]:
    """Returns remarks without which the figures would mislead, the worst first."""
    notes = [] if now.status.index_available else ["Redis does not answer: no prefix hits"]
    notes += now.troubles
    gateways = sum(component.role == "gateway" for component in now.status.components)
    if before and not streams.from_pages:
        notes.append("no gateway's page: tokens are counted when their request ends")
    elif 0 < streams.gateways < gateways:
        notes.append(f"hits, latency and flow are those of {streams.gateways} of {gateways} gateways")
    rest = len(notes) - MAX_NOTES
    return notes if rest <= 0 else [*notes[: MAX_NOTES - 1], f"and {rest + 1} notes more"]


def _legend(short: Iterable[str], style: FrameStyle) -> list[tuple[RenderableType, bool]]:
    """Returns a bar's glyphs as headings of the columns with its numbers."""
    return [
        (Text.assemble((glyph, colour), name), True)
        for glyph, colour, name in zip(style.glyphs, COLOURS, short, strict=True)
    ]


def _fitting(table: Table, items: Sequence[ComponentStatus], rows: int) -> Iterator[ComponentStatus]:
    """Yields the items that get a row. Where ``rows`` are too few, a last row is added that counts the rest."""
    shown = len(items) if rows >= len(items) else rows - 1
    yield from items[:shown]
    if shown < len(items):
        table.add_row(f"and {len(items) - shown} more", style="dim")


def _clean(text: str) -> str:
    """Returns ``text`` without control characters, which could steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _count(value: float | None, style: FrameStyle) -> str:
    return style.dash if value is None else f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _rate(value: float | None, style: FrameStyle) -> str:
    if value is None:
        return style.dash
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def _time(seconds: float, last_bound: float) -> str:
    """Writes seconds in two or three digits; an infinite value is shown as beyond the histogram's last bound."""
    beyond, seconds = (">", last_bound) if math.isinf(seconds) else ("", seconds)
    if seconds >= 1:
        return f"{beyond}{seconds:.1f} s"
    return f"{beyond}{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{beyond}{seconds * 1000:.1f} ms"


def _quantiles(found: Quantiles | None, style: FrameStyle) -> str:
    if found is None:
        return f"p50 {style.dash} p99 {style.dash}"
    return f"p50 {_time(found.p50, found.last_bound)} p99 {_time(found.p99, found.last_bound)}"
