"""Counts when the stages of a worker computed and when they waited: its bubbles. Sans-IO (I9), without torch.

    launched     step 0      1      2
    stage 0      [ 0 ][ 1 ][ 2 ]....          . waits: no step was left to begin, and steps were under way
    stage 1      .....[ 0 ][  1  ][ 2 ]
                 '--- a spell of work ---'

A spell of work lasts from a launch with no step under way until no step is under way any more. All of it in which a
stage computes nothing is a wait, also the beginning, until the first rows come, and the end. Times are those of one
clock, which all processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Worked(NamedTuple):
    """Says when a stage computed its part of a step, in seconds of time.monotonic()."""

    began_s: float
    ended_s: float


class StageClock:
    """Adds up the times of ``stages`` stages. Attributes are for reading: ``work_s`` and ``wait_s`` of each stage, and
    how many steps are ``under_way``."""

    def __init__(self, stages: int) -> None:
        self.work_s, self.wait_s = [0.0] * stages, [0.0] * stages
        # This is when each stage had nothing to compute any more, within the spell.
        self._idle_since_s = [0.0] * stages
        self.under_way = 0

    def launched(self, now: float) -> None:
        """Note that a step begins at the first stage now."""
        if not self.under_way:
            self._idle_since_s = [now] * len(self.work_s)
        self.under_way += 1

    def landed(self, stages: Sequence[Worked]) -> list[float]:
        """Note that the oldest step has ended, by the times of each stage. Returns how long each stage has waited
        since the step before: until it began with this one, and at the end of a spell also after it."""
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
