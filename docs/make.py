"""Writes the table of metrics in operations.md from the catalog: ``python -m docs.make``, or ``make dashboards``."""

from __future__ import annotations

import pathlib

from pillion.observability.metric_catalog import CATALOG
from pillion.observability.metrics_prometheus import prometheus_name

PAGE = pathlib.Path(__file__).resolve().parent / "operations.md"
BEGIN, END = "<!-- metrics: written by docs/make.py -->\n", "<!-- end of metrics -->\n"


def table() -> str:
    """Returns a table of all metrics by Prometheus name (histograms without ``_bucket``, ``_sum``, ``_count``)."""
    rows = ["| on the page | what |", "|---|---|"]
    for metric in CATALOG:
        name = prometheus_name(metric) + "_total" * (metric.kind == "counter")
        labels = ",".join(label.replace(".", "_") for label in metric.labels)
        rows.append(f"| `{name}{{{labels}}}` | {metric.help} |" if labels else f"| `{name}` | {metric.help} |")
    return "\n".join(rows) + "\n"


def render(text: str) -> str:
    """Returns the page ``text`` with its table of metrics made anew, between the page's markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
