"""Simulated time: an event queue (I9)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Simulated seconds, and the event queue."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Call ``event`` after ``seconds``; events of the same time run in the order of these calls."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        """Call ``event`` at ``when_s``, which is not before now."""
        heapq.heappush(self._events, (when_s, next(self._numbers), event))

    @property
    def idle(self) -> bool:
        return not self._events

    def run(self, until_s: float) -> None:
        """Run all events up to ``until_s``, and set the clock to it."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = max(self.now, until_s)
