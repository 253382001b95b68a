"""Counters cheap enough for the token path; :mod:`pillion.observability.metrics_export` publishes them.

    events  --add, observe--> cells -----------+
    a component's own state  --watchers--------+--collect--> values --> Prometheus's scrape

A cell is written by one thread; collecting only reads. An OpenTelemetry SDK instrument takes 10 to 20 microseconds per
record, a cell 0.2 to 0.5: at one record per token that is the difference between a fifth of a core and nothing.
"""

from __future__ import annotations

import logging
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

log = logging.getLogger("pillion.observability.metrics")

# Max cells per metric, i.e. combinations of label values; values with further ones are counted under OTHER. Labels
# never contain clients' text, so only a bug can exceed the limit.
MAX_CELLS = 128
OTHER = "other"

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """Definition of one metric.

    Attributes:
        name: name in OpenTelemetry's form, with dots.
        unit: UCUM unit: "s", "By", "1" for a share, a noun in braces such as "{token}", or "".
        labels: names of its labels, in OpenTelemetry's form.
        bounds: a histogram's upper bounds, increasing, without infinity.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: Labels = ()
    bounds: tuple[float, ...] = ()


@dataclass(slots=True)
class Counter:
    """One value of a counter, which only grows."""

    value: float = 0

    def add(self, amount: float = 1) -> None:
        """Add a nonnegative amount."""
        self.value += amount

    def now(self) -> float:
        """Return the current value, to be collected."""
        return self.value


@dataclass(slots=True)
class Distribution:
    """One histogram. Bucket i counts values above bounds[i - 1] and at most bounds[i]; the last bucket counts larger
    values."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def now(self) -> Distribution:
        """Return a copy, to be collected."""
        return Distribution(self.bounds, self.counts.copy(), self.total)

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self.counts)

    def __add__(self, other: Distribution) -> Distribution:
        """Add two histograms with the same bounds."""
        counts = list(map(operator.add, self.counts, other.counts))
        return Distribution(self.bounds, counts, self.total + other.total)


# Collected values by metric and label values: a Distribution for a histogram, else a float.
Values = dict[Metric, dict[Labels, Any]]
Reading = tuple[Metric, Labels, float]


class Meters:
    """All counters and histograms of one component, by metric and label values."""

    def __init__(self) -> None:
        self._cells: dict[Metric, dict[Labels, Any]] = {}
        self._watchers: list[Callable[[], Iterable[Reading]]] = []

    def counter(self, metric: Metric, *labels: str) -> Counter:
        """Return the counter with these label values, created on first use. Hot paths should cache it."""
        cell: Counter = self._cell(metric, labels)
        return cell

    def distribution(self, metric: Metric, *labels: str) -> Distribution:
        """Return the histogram with these label values, created on first use."""
        cell: Distribution = self._cell(metric, labels)
        return cell

    def _cell(self, metric: Metric, labels: Labels) -> Any:
        assert len(labels) == len(metric.labels), metric.name
        cells = self._cells.setdefault(metric, {})
        cell = cells.get(labels)
        if cell is None:
            histogram = metric.kind == "histogram"
            empty = Distribution(metric.bounds, [0] * (len(metric.bounds) + 1)) if histogram else Counter()
            key = labels if len(cells) < MAX_CELLS else (OTHER,) * len(labels)
            cell = cells.setdefault(key, empty)
        return cell

    def watch(self, watcher: Callable[[], Iterable[Reading]]) -> None:
        """Call ``watcher`` at each collection, for values that are part of a component's own state."""
        self._watchers.append(watcher)

    def collect(self) -> Values:
        """Return all current values. Call on the component's event loop, whose state the watchers read."""
        values: Values = {}
        for metric, labels, value in self._readings():
            values.setdefault(metric, {})[labels] = value
        for metric, cells in self._cells.items():
            values.setdefault(metric, {}).update((labels, cell.now()) for labels, cell in tuple(cells.items()))
        return values

    def _readings(self) -> Iterator[Reading]:
        for watcher in self._watchers:
            try:
                yield from watcher()
            except Exception:
                log.exception("a metric's current value could not be read")
