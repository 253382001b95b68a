"""Result of a run as JSON (``schema`` 1) and as tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pillion._version import VERSION
from pillion.loadgen.figures import Run, bottleneck, client_figures, summarize
from pillion.loadgen.slo import Objective, good, meets

SCHEMA = 1
LATENCIES = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("e2e", "e2e_ms"))
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def summarize_run(run: Run, objectives: Sequence[Objective], config: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one run as JSON fields; "warning" is "" if there is none."""
    summary = summarize(run.records, run.duration_s)
    if config["load"]["concurrency"]:
        summary["offered_requests_per_s"] = None
    client = client_figures(run)
    met = good(objectives, run.records)
    attainment = sum(met) / len(met) if met else 0.0
    why = bottleneck(client, summary["ttft_ms"])
    return {
        "schema": SCHEMA,
        "config": config,
        "summary": {**summary, "unsent_turns": run.unsent},
        "goodput": {
            "objectives": [asdict(objective) for objective in objectives],
            "good": sum(met),
            "attainment": attainment,
            "requests_per_s": sum(met) / max(run.duration_s, 1e-9),
            "met": {o.measure: sum(meets(o, record) for record in run.records) for o in objectives},
        },
        "client": client,
        "warning": f"the client may have been the bottleneck: {why}" if why else "",
    }


def environment() -> dict[str, Any]:
    """Return the client's machine and versions."""
    cpuinfo, names = Path("/proc/cpuinfo"), []
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    return {
        "pillion": VERSION,
        "grpcio": grpc.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_json(path: Path, result: dict[str, Any], server: dict[str, Any]) -> None:
    """Write the result with the client's environment and the server's self-description. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = result | {"environment": environment(), "server": server}
    path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")


def tables(result: dict[str, Any]) -> Group:
    """Return the tables and warnings of a run, for the terminal."""
    latency = Table(
        title="latency in ms, from the intended arrival",
        caption=(
            "TTFT: time to the first token. ITL: gap between two tokens.\n"
            "TPOT: an answer's mean gap. e2e: time to the last token."
        ),
        caption_justify="left",
    )
    latency.add_column("")
    for column in COLUMNS:
        latency.add_column(column, justify="right")
    for name, key in LATENCIES:
        figures = result["summary"][key]
        latency.add_row(name, *(f"{figures[column]:,.1f}" if figures else "-" for column in COLUMNS))
    parts = [latency, _totals(result)]
    lines = [
        f"{status}: {failure['count']} ({failure['first']})" for status, failure in result["summary"]["errors"].items()
    ]
    lines += [f"warning: {result['warning']}"] if result["warning"] else []
    return Group(*parts, *(Text(line, style="bold red") for line in lines))


def _totals(result: dict[str, Any]) -> Table:
    summary, goodput, client = result["summary"], result["goodput"], result["client"]
    rows = {
        "requests": f"{summary['ok']} of {summary['requests']} answered in {summary['duration_s']:.1f} s",
        "rate": f"{summary['requests_per_s']:.2f} requests/s"
        + (f", {summary['offered_requests_per_s']:.2f} offered" if summary["offered_requests_per_s"] else ""),
        "tokens in": f"{summary['input_tokens']:,}, {summary['input_tokens_per_s']:,.0f} tokens/s, "
        f"{summary['hit_rate']:.1%} cached",
        "tokens out": f"{summary['output_tokens']:,}, {summary['output_tokens_per_s']:,.0f} tokens/s",
    }
    for name, key in LATENCIES:
        if name in ("TTFT", "TPOT") and summary[key]:
            rows[f"P90 {name}"] = f"{summary[key]['p90']:,.1f} ms"
    if summary["short_answers"]:
        rows["short answers"] = f"{summary['short_answers']} ended before the requested length"
    if goodput["objectives"]:
        single = ", ".join(f"{measure} {count}" for measure, count in goodput["met"].items())
        rows["goodput"] = f"{goodput['requests_per_s']:.2f} requests/s, {goodput['attainment']:.1%} met all ({single})"
    if client["held_requests"]:
        rows["held by the cap"] = f"{client['held_requests']} requests, p99 {client['held_ms']['p99']:,.0f} ms"
    per_token = client["cpu_us_per_token"]
    lag = client["lag_ms"] or {"p99": 0.0, "max": 0.0}
    rows["client"] = (
        f"sent late by {lag['p99']:.1f} ms (p99), {lag['max']:.1f} ms (max); used {client['cpu_share']:.0%} of a core"
        + (f", {per_token:.0f} µs a token" if per_token else "")
    )
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def sweep_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of a sweep: one row per run, in order of the rate."""
    table = Table(title="rate and goodput")
    for heading in ("rate/s", "goodput/s", "met", "TTFT p99 ms", "ITL p99 ms", "errors", ""):
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: float(row["rate"])):
        summary, goodput = row["summary"], row["goodput"]
        table.add_row(
            f"{row['rate']:.3g}",
            f"{goodput['requests_per_s']:.2f}",
            f"{goodput['attainment']:.1%}",
            *(f"{summary[key]['p99']:,.0f}" if summary[key] else "-" for key in ("ttft_ms", "itl_ms")),
            str(summary["requests"] - summary["ok"]),
            "passed" if row["passed"] else "failed",
        )
    return table
