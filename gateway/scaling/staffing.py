"""Computes how long jobs wait for one of some servers, and how many servers are enough (I9).

Jobs arrive at random (Poisson), and whichever server is free takes the next one. The probability of a wait is Erlang's
C ("Solution of some problems in the theory of probabilities of significance in automatic telephone exchanges", 1917),
computed by the recursion over his B. The time of a job that waits is taken as exponential, as it is where service times
are, with the mean of Lee and Longton ("Queueing processes associated with airline passenger check-in", 1959) for other
service times: longer by half of 1 + the square of their coefficient of variation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

# No number of servers that is computed here is larger than this.
MOST_SERVERS = 4096


def wait_probability(servers: int, load: float) -> float:
    """Returns the share of jobs that wait at all. ``load`` is the mean number of busy servers (Erlang)."""
    if load <= 0:
        return 0.0
    if load >= servers:
        return 1.0
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return servers * blocked / (servers - load * (1 - blocked))


def late_share(servers: int, per_s: float, seconds: Float64, slacks_s: Float64) -> float:
    """Returns the share of jobs that wait longer than they may.

    Args:
        per_s: number of jobs a second.
        seconds: [n], how long each job of a sample keeps a server; none is below 0.
        slacks_s: [n], how long each job may wait. A job with less than 0 is late without any wait.
    """
    if not len(seconds):
        return 0.0
    mean_s = float(seconds.mean())
    load = per_s * mean_s
    if load <= 0:
        return float((slacks_s < 0).mean())
    if load >= servers:
        return 1.0
    variation = float(seconds @ seconds) / len(seconds) / (mean_s * mean_s)
    # The squared variation about the mean is one less than that about zero, so the expression is half of 1 + the square
    # of the variation about the mean.
    fading_per_s = (servers - load) / (mean_s * variation / 2)
    waits = wait_probability(servers, load)
    late = np.where(slacks_s < 0, 1.0, waits * np.exp(-fading_per_s * np.maximum(slacks_s, 0.0)))
    return float(late.mean())


def least(enough: Callable[[int], bool], at_least: int = 0) -> int:
    """Returns the smallest number from ``at_least`` on that is enough, MOST_SERVERS where none is. ``enough`` must not
    change from true to false as the number grows."""
    if at_least >= MOST_SERVERS or enough(at_least):
        return min(at_least, MOST_SERVERS)
    low, high = at_least, max(1, 2 * at_least)
    while high < MOST_SERVERS and not enough(high):
        low, high = high, 2 * high
    high = min(high, MOST_SERVERS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
