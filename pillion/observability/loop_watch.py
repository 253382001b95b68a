"""Measures how long callbacks keep a component's event loop from its other work.

Every stream of a component moves by its event loop, so whatever holds it for long stops all of them, be it a callback
or another thread that holds the interpreter's lock. A tick that comes late shows it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Meters, Reading

log = logging.getLogger("pillion.observability.loop_watch")

# This is the time between two ticks. The measured delay is too short by at most this.
TICK_MS = 100
# The metric of the event loop's delay is the longest delay of the last one to two windows of this length. A window is
# longer than the time between two scrapes of Prometheus, so no delay is missed.
WINDOW_S = 60.0
# A delay from this time on is logged as well.
LONG_S = 1.0


class LongestLately:
    """Keeps the largest value that was noted lately: within the last one to two windows of WINDOW_S seconds. It reads
    no clock: callers pass ``now_s``."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._before = self._current = 0.0

    def note(self, value: float, now_s: float) -> None:
        """Add a value with its time."""
        self._turn(now_s)
        self._current = max(self._current, value)

    def longest(self, now_s: float) -> float:
        """Return the largest value of the last one to two windows of WINDOW_S seconds; 0 where there was none."""
        self._turn(now_s)
        return max(self._before, self._current)

    def _turn(self, now_s: float) -> None:
        passed_s = now_s - self._since_s
        if passed_s >= WINDOW_S:
            self._before = self._current if passed_s < 2 * WINDOW_S else 0.0
            self._current, self._since_s = 0.0, now_s


class LoopWatch:
    """Watches the running event loop until it is stopped, for the metrics of its component."""

    def __init__(self, meters: Meters) -> None:
        self._loop = asyncio.get_running_loop()
        self._longest = LongestLately(self._loop.time())
        meters.watch(self._readings)
        self._due_s = 0.0
        self._tick()

    def stop(self) -> None:
        """End the watch of the event loop."""
        self._timer.cancel()

    def _tick(self) -> None:
        now_s = self._loop.time()
        late_s = now_s - self._due_s if self._due_s else 0.0
        self._longest.note(late_s, now_s)
        if late_s > LONG_S:
            log.warning("the event loop did nothing else for %.1f s", late_s)
        self._due_s = now_s + TICK_MS / 1000
        self._timer = self._loop.call_at(self._due_s, self._tick)

    def _readings(self) -> Iterator[Reading]:
        yield names.LOOP_LONGEST, (), self._longest.longest(self._loop.time())
