"""Compute and wait times of a worker's stages: pipeline bubbles. Sans-IO (I9), without torch.

    launched     step 0      1      2
    stage 0      [ 0 ][ 1 ][ 2 ]....          . waits: no step was left to begin, and steps were under way
    stage 1      .....[ 0 ][  1  ][ 2 ]
                 '--- a spell of work ---'

A spell of work lasts from a launch with no step in flight until no step is in flight. Within it, a stage waits whenever
it does not compute, including at the beginning, until the first rows arrive, and at the end. Times are of one clock,
shared by all processes of a machine.
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
        """Record the end of the oldest step, with each stage's interval. Returns each stage's wait since the step
        before: until it began this one, and at the end of a spell also after it."""
        self.under_way -= 1
        waits = [max(0.0, one.began_s - since) for one, since in zip(stages, self._idle_since_s, strict=True)]
        if not self.under_way:
            end_s = max(one.ended_s for one in stages)
            waits = [wait + end_s - one.ended_s for wait, one in zip(waits, stages, strict=True)]
        self._idle_since_s = [one.ended_s for one in stages]
        for stage, (one, wait) in enumerate(zip(stages, waits, strict=True)):
            self.work_s[stage] += one.ended_s - one.began_s
            self.wait_s[stage] += wait
        return waits
