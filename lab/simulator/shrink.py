"""Minimizes a failing schedule by removing faults and requests. Sans-IO.

Parts are removed one by one as long as the schedule fails without them (one-minimal in the sense of A. Zeller,
R. Hildebrandt: Simplifying and Isolating Failure-Inducing Input, 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lab.simulator.schedule import SimSchedule


def shrink(schedule: SimSchedule, fails: Callable[[SimSchedule], bool], most_runs: int = 200) -> SimSchedule:
    """Return the smallest failing schedule found in at most ``most_runs`` runs."""
    runs = 0
    while True:
        for smaller in _smaller(schedule):
            if runs >= most_runs:
                return schedule
            runs += 1
            if fails(smaller):
                schedule = smaller
                break
        else:
            return schedule


def _smaller(schedule: SimSchedule) -> Iterator[SimSchedule]:
    """Yield schedules with one part less, the largest parts first."""
    for at in range(len(schedule.faults)):
        yield replace(schedule, faults=schedule.faults[:at] + schedule.faults[at + 1 :])
    if len(schedule.requests) > 1:
        for at in range(len(schedule.requests)):
            yield replace(schedule, requests=schedule.requests[:at] + schedule.requests[at + 1 :])
    shape = schedule.shape
    if shape.drafter:
        yield replace(schedule, shape=replace(shape, drafter=""))
    if shape.runs_ahead:
        yield replace(schedule, shape=replace(shape, runs_ahead=False))
