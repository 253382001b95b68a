"""Search for the highest rate that meets the objectives: doubles until one fails, then bisects. Sans-IO.

start --passes--> 2x --passes--> 4x --fails--> between the two, until they are close
start --fails---> /2 --fails---> /4 --passes-> likewise
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tried:
    """One run: its rate, and whether enough of its requests met the objectives."""

    rate: float
    passed: bool


def next_rate(tried: Sequence[Tried], start: float, tolerance: float, max_runs: int) -> float | None:
    """Return the next rate to try; None when the answer is within ``tolerance`` (0.1: 10 %) or ``max_runs`` are spent.

    Bisects at the geometric mean, because a rate's error is relative.
    """
    if len(tried) >= max_runs:
        return None
    if not tried:
        return start
    low, high = best_rate(tried), lowest_failed(tried)
    if high is None:
        return 2 * max(run.rate for run in tried)
    if low is None:
        return high / 2
    return math.sqrt(low * high) if high > low * (1 + tolerance) else None


def best_rate(tried: Sequence[Tried]) -> float | None:
    """Return the highest passed rate below all failed ones; None if there is none."""
    failed = lowest_failed(tried)
    return max((run.rate for run in tried if run.passed and (failed is None or run.rate < failed)), default=None)


def lowest_failed(tried: Sequence[Tried]) -> float | None:
    """Return the lowest failed rate; None if there is none."""
    return min((run.rate for run in tried if not run.passed), default=None)
