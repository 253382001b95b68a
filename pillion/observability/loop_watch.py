"""Measures how long a component's event loop is blocked.

Every stream of a component depends on its event loop, so a long callback, or a thread that holds the GIL, stops all of
them. Late ticks reveal it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Meters, Reading

log = logging.getLogger("pillion.observability.loop_watch")

# Interval of ticks; a measured delay is too short by at most this.
TICK_MS = 100
# The metric is the longest delay of the last one to two windows. A window exceeds Prometheus's scrape interval, so no
# delay is missed.
WINDOW_S = 60.0
# Delay above which a warning is logged.
LONG_S = 1.0


class RecentMax:
    """Largest value of the last one to two windows of WINDOW_S seconds. Reads no clock: callers pass ``now_s``."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._before = self._current = 0.0

    def note(self, value: float, now_s: float) -> None:
        """Add a value with its time."""
        self._rotate(now_s)
        self._current = max(self._current, value)

    def longest(self, now_s: float) -> float:
        """Return the largest value of the last one to two windows; 0 if there was none."""
        self._rotate(now_s)
        return max(self._before, self._current)

    def _rotate(self, now_s: float) -> None:
        """Start a new window if the current one has ended."""
        passed_s = now_s - self._since_s
        if passed_s >= WINDOW_S:
            self._before = self._current if passed_s < 2 * WINDOW_S else 0.0
            self._current, self._since_s = 0.0, now_s


class LoopWatch:
    """Watches the running event loop until stopped, for its component's metrics."""

    def __init__(self, meters: Meters) -> None:
        self._loop = asyncio.get_running_loop()
        self._longest = RecentMax(self._loop.time())
        meters.watch(self._readings)
        self._due_s = 0.0
        self._tick()

    def stop(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _tick(self) -> None:
        now_s = self._loop.time()
        late_s = now_s - self._due_s if self._due_s else 0.0
        self._longest.note(late_s, now_s)
        if late_s > LONG_S:
            log.warning("a callback blocked the event loop for %.1f s", late_s)
        self._due_s = now_s + TICK_MS / 1000
        self._timer = self._loop.call_at(self._due_s, self._tick)

    def _readings(self) -> Iterator[Reading]:
        yield names.LOOP_LONGEST, (), self._longest.longest(self._loop.time())
