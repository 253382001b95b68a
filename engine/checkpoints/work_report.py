"""Progress lines of a long stage of a model's preparation. Imports nothing heavy."""

from __future__ import annotations

import time
from collections.abc import Callable

# Interval of progress lines.
LINE_EVERY_S = 5.0


class WorkReport:
    """Reporter of a stage of ``total`` bytes or layers: calls ``progress`` with a line at the start, and with a
    percentage every LINE_EVERY_S."""

    def __init__(
        self, progress: Callable[[str], None], stage: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress, self._stage, self._total, self._clock = progress, stage, total, clock
        self._done, self._next_s = 0, clock() + LINE_EVERY_S
        progress(stage)

    def add(self, amount: int) -> None:
        """Count ``amount`` bytes or layers as done."""
        self._done += amount
        now_s = self._clock()
        if now_s >= self._next_s and self._done < self._total:
            self._next_s = now_s + LINE_EVERY_S
            self._progress(f"{self._stage}: {self._done * 100 // self._total} %")
