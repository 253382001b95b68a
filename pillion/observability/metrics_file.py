"""Gauges of commands that end, such as drills and canaries, as a file for Prometheus' node exporter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class GaugeSeries(NamedTuple):
    """A gauge's description, its labels, and its value per tuple of label values."""

    about: str
    labels: Sequence[str]
    values: Mapping[tuple[str, ...], float]


def gauge_page(gauges: Mapping[str, GaugeSeries]) -> str:
    """Return gauges by name in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    for name, series in gauges.items():
        gauge = Gauge(name, series.about, series.labels, registry=registry)
        for row, value in series.values.items():
            (gauge.labels(*row) if row else gauge).set(value)
    return generate_latest(registry).decode()


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
