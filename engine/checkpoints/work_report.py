"""Reports how far a stage of a model's preparation is. Imports nothing heavy."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds between two lines about one stage: soon enough to see that it goes on, and few lines in a log.
LINE_EVERY_S = 5.0


class WorkReport:
    """A stage of ``total`` bytes or layers: one line when it begins, and one with its share every LINE_EVERY_S."""

    def __init__(
        self, progress: Callable[[str], None], stage: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress, self._stage, self._total, self._clock = progress, stage, total, clock
        self._done, self._next_s = 0, clock() + LINE_EVERY_S
        progress(stage)

    def add(self, amount: int) -> None:
        """Counts finished work."""
        self._done += amount
        now_s = self._clock()
        if now_s >= self._next_s and self._done < self._total:
            self._next_s = now_s + LINE_EVERY_S
            self._progress(f"{self._stage}: {self._done * 100 // self._total} %")
