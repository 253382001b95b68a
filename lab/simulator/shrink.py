"""Finds a small schedule that fails as a given one does, by leaving out faults and requests. Sans-IO.

One part after another is left out, and stays out where the schedule fails without it, until none can go any more
(a one-minimal schedule in the sense of A. Zeller, R. Hildebrandt: Simplifying and Isolating Failure-Inducing Input,
2002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lab.simulator.schedule import SimSchedule


def shrink(schedule: SimSchedule, fails: Callable[[SimSchedule], bool], most_runs: int = 200) -> SimSchedule:
    """Returns the smallest schedule that was tried and fails, after at most ``most_runs`` runs."""
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
    """Yields schedules with one part less, the largest parts first."""
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
