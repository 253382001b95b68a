"""Waits for servers against the textbook's exact formulas and against a simulated queue."""

from __future__ import annotations

import heapq
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.gateway.scaling import staffing
from pillion.gateway.scaling.staffing import MOST_SERVERS, least, wait_probability


def late_share(servers: int, per_s: float, seconds: list[float], slacks_s: list[float]) -> float:
    return staffing.late_share(servers, per_s, np.array(seconds), np.array(slacks_s))


def erlang_c(servers: int, load: Fraction) -> Fraction:
    """The definition, by factorials."""
    full = load**servers / math.factorial(servers) * servers / (servers - load)
    return full / (sum(load**busy / math.factorial(busy) for busy in range(servers)) + full)


@given(servers=st.integers(1, 40), percent=st.integers(1, 99))
def test_the_probability_of_a_wait_is_erlangs(servers: int, percent: int) -> None:
    load = Fraction(servers * percent, 100)
    assert wait_probability(servers, float(load)) == pytest.approx(float(erlang_c(servers, load)), rel=1e-9)


def test_without_load_nobody_waits_and_beyond_all_servers_everybody_does() -> None:
    assert wait_probability(3, 0.0) == 0.0
    assert wait_probability(3, 3.0) == 1.0
    assert late_share(3, 0.0, [1.0], [0.5]) == 0.0
    assert late_share(3, 0.0, [1.0, 1.0], [0.5, -0.1]) == 0.5
    assert late_share(0, 1.0, [1.0], [100.0]) == 1.0
    assert late_share(1, 1.0, [], []) == 0.0


@given(load=st.floats(0.05, 0.95), slack_s=st.floats(0.0, 5.0))
def test_one_server_with_exponential_times_is_exact(load: float, slack_s: float) -> None:
    # A mean of 1 and a mean square of 2, as an exponential time has.
    found = late_share(1, load, [0.0, 2.0], [slack_s, slack_s])
    assert found == pytest.approx(load * math.exp(-(1 - load) * slack_s))


@pytest.mark.parametrize("seconds", [[1.0], [0.5, 0.5, 2.0], [0.1, 4.0]])
def test_the_mean_wait_for_one_server_is_that_of_pollaczek_and_khinchine(seconds: list[float]) -> None:
    per_s = 0.7 * len(seconds) / sum(seconds)
    exact_s = per_s * sum(each * each for each in seconds) / len(seconds) / 2 / (1 - 0.7)
    # The mean of a wait is the integral of the share that waits longer.
    pace_s = 0.01
    mean_s = pace_s * sum(
        late_share(1, per_s, seconds, [(at + 0.5) * pace_s] * len(seconds)) for at in range(int(40 * exact_s / pace_s))
    )
    assert mean_s == pytest.approx(exact_s, rel=0.01)


def test_several_servers_against_a_simulated_queue() -> None:
    draw, kinds, servers, per_s, slack_s = random.Random(5), [0.2, 0.2, 1.4], 4, 5.5, 0.5
    free, now, late, jobs = [0.0] * servers, 0.0, 0, 60_000
    for _ in range(jobs):
        now += draw.expovariate(per_s)
        begun = max(now, heapq.heappop(free))
        late += begun - now > slack_s
        heapq.heappush(free, begun + draw.choice(kinds))
    assert late_share(servers, per_s, kinds, [slack_s] * 3) == pytest.approx(late / jobs, abs=0.05)


@given(least_enough=st.integers(0, 3 * MOST_SERVERS), at_least=st.integers(0, 50))
def test_the_least_number_is_found(least_enough: int, at_least: int) -> None:
    asked: list[int] = []

    def enough(number: int) -> bool:
        asked.append(number)
        return number >= least_enough

    assert least(enough, at_least) == min(MOST_SERVERS, max(least_enough, at_least))
    assert len(asked) <= 2 * MOST_SERVERS.bit_length()


@given(
    servers=st.integers(1, 30),
    per_s=st.floats(0.01, 30.0),
    more=st.floats(1.0, 3.0),
    seconds=st.lists(st.floats(0.01, 5.0), min_size=1, max_size=5),
    slack_s=st.floats(0.0, 5.0),
)
def test_more_load_makes_more_late_and_more_servers_fewer(
    servers: int, per_s: float, more: float, seconds: list[float], slack_s: float
) -> None:
    slacks_s = [slack_s] * len(seconds)
    late = late_share(servers, per_s, seconds, slacks_s)
    assert 0 <= late <= 1
    assert late_share(servers, per_s * more, seconds, slacks_s) >= late - 1e-9
    assert late_share(servers + 1, per_s, seconds, slacks_s) <= late + 1e-9
