"""Compute and wait times of a worker's stages: pipeline bubbles. Sans-IO (I9), without torch.

    launched     step 0      1      2
    stage 0      [ 0 ][ 1 ][ 2 ]....          . waits, while steps are in flight in other stages
    stage 1      .....[ 0 ][  1  ][ 2 ]
                 '----- busy period ----'

A busy period lasts from a launch with no step in flight until no step is in flight. Within it, a stage waits whenever
it does not compute, including until its first rows arrive, and after its last step. Times are of time.monotonic(),
which all processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StageInterval(NamedTuple):
    """Interval in which a stage computed a step, in seconds of time.monotonic()."""

    began_s: float
    ended_s: float


class StageClock:
    """Total times of ``stages`` stages. Read-only attributes: ``work_s`` and ``wait_s`` of each stage, and the number
    of steps ``under_way``."""

    def __init__(self, stages: int) -> None:
        self.work_s, self.wait_s = [0.0] * stages, [0.0] * stages
        self._idle_since_s = [0.0] * stages
        self.under_way = 0

    def launched(self, now: float) -> None:
        """Record the start of a step at the first stage."""
        if not self.under_way:
            self._idle_since_s = [now] * len(self.work_s)
        self.under_way += 1

    def finished(self, stages: Sequence[StageInterval]) -> list[float]:
        """Record the end of the oldest step, with each stage's interval. Return each stage's wait before this step and,
        at the end of a busy period, also after it."""
        self.under_way -= 1
        waits = [max(0.0, interval.began_s - since) for interval, since in zip(stages, self._idle_since_s, strict=True)]
        if not self.under_way:
            end_s = max(interval.ended_s for interval in stages)
            waits = [wait + end_s - interval.ended_s for wait, interval in zip(waits, stages, strict=True)]
        self._idle_since_s = [interval.ended_s for interval in stages]
        for stage, (interval, wait) in enumerate(zip(stages, waits, strict=True)):
            self.work_s[stage] += interval.ended_s - interval.began_s
            self.wait_s[stage] += wait
        return waits
