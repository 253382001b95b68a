"""Counting what happens, cheaply enough for the token path. :mod:`pillion.observability.metrics_export` tells the
world.

    what happens   --add, observe--> cells ----+
    a part's books (load, lines) --watchers----+--collect--> families --> Prometheus's scrape, the OTLP push

A cell belongs to one thread; whoever collects only reads. An instrument of the OpenTelemetry SDK takes 10 to 20
microseconds for a record, a cell 0.2 to 0.5: with one record for each token that is the difference between a fifth of a
core and nothing. So the SDK's readers and exporters carry what the cells hold, in its data model.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

log = logging.getLogger("pillion.observability.metrics")

# Cells of one metric, each with other label values; what comes beyond is counted together under OTHER. No client's
# word becomes a label, so this is met only where something is wrong.
MAX_CELLS = 128
OTHER = "other"

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


# Compared by identity: one is looked up for each record.
@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One thing that is measured.

    Attributes:
        name: OpenTelemetry's form, with dots.
        unit: UCUM: "s", "By", "1" for a share, a thing in braces such as "{token}", or nothing.
        labels: names of its labels, in OpenTelemetry's form.
        bounds: a histogram's upper bounds, rising, without infinity.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: Labels = ()
    bounds: tuple[float, ...] = ()


@dataclass(slots=True)
class Counter:
    """Only grows."""

    value: float = 0

    def add(self, amount: float = 1) -> None:
        """``amount`` is not negative."""
        self.value += amount


@dataclass(slots=True)
class Distribution:
    """Counts by bucket. Bucket i holds what is above bounds[i - 1] and at most bounds[i]; the last one, the rest."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0
    largest: float = -math.inf
    smallest: float = math.inf

    def observe(self, value: float, times: int = 1) -> None:
        """The same value, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        if value > self.largest:
            self.largest = value
        if value < self.smallest:
            self.smallest = value


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A distribution as it was when it was collected."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    smallest: float
    largest: float

    @property
    def count(self) -> int:
        """Of everything observed."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """One cell's value, with its labels' values."""

    labels: Labels
    value: float | Snapshot


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric with all its points."""

    metric: Metric
    points: tuple[MetricPoint, ...]


# What a watcher yields: the metric, its labels' values, and what it stands at.
Reading = tuple[Metric, Labels, float]


class Meters:
    """All cells of one part."""

    def __init__(self) -> None:
        self._counters: dict[Metric, dict[Labels, Counter]] = {}
        self._distributions: dict[Metric, dict[Labels, Distribution]] = {}
        self._watchers: list[Callable[[], Iterable[Reading]]] = []

    def counter(self, metric: Metric, *labels: str) -> Counter:
        """The cell with these label values, made when it is first asked for. Who counts often keeps it."""
        assert len(labels) == len(metric.labels), metric.name
        cells = self._counters.setdefault(metric, {})
        return cells.get(labels) or cells.setdefault(_bounded(metric, labels, len(cells)), Counter())

    def distribution(self, metric: Metric, *labels: str) -> Distribution:
        """The same for a histogram."""
        assert len(labels) == len(metric.labels), metric.name
        cells = self._distributions.setdefault(metric, {})
        found = cells.get(labels)
        if found is None:
            empty = Distribution(metric.bounds, [0] * (len(metric.bounds) + 1))
            found = cells.setdefault(_bounded(metric, labels, len(cells)), empty)
        return found

    def watch(self, watcher: Callable[[], Iterable[Reading]]) -> None:
        """``watcher`` is asked at each collection: for what is in somebody's books anyway."""
        self._watchers.append(watcher)

    def collect(self) -> list[MetricFamily]:
        """Everything now. On the thread of the part's event loop, whose books the watchers read."""
        found: dict[Metric, list[MetricPoint]] = {}
        for metric, labels, value in self._readings():
            found.setdefault(metric, []).append(MetricPoint(labels, value))
        for metric, cells in self._counters.items():
            found.setdefault(metric, []).extend(
                MetricPoint(labels, cell.value) for labels, cell in tuple(cells.items())
            )
        for metric, distributions in self._distributions.items():
            points = [MetricPoint(labels, _snapshot(each)) for labels, each in tuple(distributions.items())]
            found.setdefault(metric, []).extend(points)
        return [MetricFamily(metric, tuple(points)) for metric, points in found.items()]

    def _readings(self) -> Iterator[Reading]:
        for watcher in self._watchers:
            try:
                yield from watcher()
            except Exception:
                # A scrape that shows the rest is worth more than none.
                log.exception("a part's books could not be read")


def _bounded(metric: Metric, labels: Labels, cells: int) -> Labels:
    return labels if cells < MAX_CELLS else (OTHER,) * len(metric.labels)


def _snapshot(cell: Distribution) -> Snapshot:
    return Snapshot(cell.bounds, tuple(cell.counts), cell.total, cell.smallest, cell.largest)
