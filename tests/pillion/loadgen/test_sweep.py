"""The search for the highest good rate, as a pure function over a service that is never measured."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pillion.loadgen.sweep import Tried, best_rate, next_rate


def search(start, tolerance, max_runs, passes):
    tried = []
    while (rate := next_rate(tried, start, tolerance, max_runs)) is not None:
        tried.append(Tried(rate, passes(rate)))
    return tried


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.01, 0.5))
def test_a_threshold_is_found_within_the_tolerance(start, threshold, tolerance):
    tried = search(start, tolerance, 60, lambda rate: rate <= threshold)
    best = best_rate(tried)
    assert best <= threshold <= best * (1 + tolerance)
    # Doublings to bracket it, then halvings of the logarithm.
    doublings = abs(math.log2(threshold / start)) + 2
    assert len(tried) <= doublings + math.log2(math.log(2) / math.log1p(tolerance)) + 2


@given(st.floats(0.01, 100), st.integers(1, 12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_runs_are_limited_and_no_rate_is_tried_twice(start, max_runs, outcomes):
    left = iter(outcomes)
    tried = search(start, 0.05, max_runs, lambda rate: next(left))
    assert 1 <= len(tried) <= max_runs
    assert len({run.rate for run in tried}) == len(tried)
    failed = [run.rate for run in tried if not run.passed]
    passed = [run.rate for run in tried if run.passed]
    assert best_rate(tried) == max(passed, default=None)
    if passed and failed:
        assert max(passed) < min(failed)


def test_the_order_of_a_search():
    assert [run.rate for run in search(1.0, 0.5, 10, lambda rate: rate <= 5)] == [1.0, 2.0, 4.0, 8.0, math.sqrt(32)]
    assert [run.rate for run in search(8.0, 0.5, 10, lambda rate: rate <= 1)] == [8.0, 4.0, 2.0, 1.0, math.sqrt(2)]
    assert best_rate(search(8.0, 0.5, 3, lambda rate: False)) is None
