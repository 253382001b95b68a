"""The soak's criterion: flat and noisy series pass, growing ones do not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.benchmarks.soak import ALLOWED, growth, judge, verdict


@given(st.floats(-5, 5), st.floats(-100, 100), st.integers(2, 900))
def test_a_line_grows_by_its_slope(slope, level, count):
    points = [(10.0 * n, level + slope * 10.0 * n) for n in range(count)]
    grew = growth(points)
    thinned = count // 400 + 1
    assert grew == pytest.approx(slope * 10.0 * ((count - 1) // thinned * thinned), rel=1e-6, abs=1e-6)


@given(st.integers(0, 999))
def test_a_fifth_of_outliers_has_no_effect(seed):
    draw = random.Random(seed)
    points = [(float(n), 100.0 + (draw.choice((1e6, -1e6)) if n % 5 == 2 else draw.uniform(-1, 1))) for n in range(100)]
    assert abs(growth(points)) < 3


def test_growth_in_the_warm_up_does_not_count():
    points = [(float(n), min(n, 30) * 10.0) for n in range(100)]
    assert growth(points) > 30
    grew, allowed = verdict("memory MiB", points)
    assert grew == 0.0
    assert allowed == 30.0


@pytest.mark.parametrize("kind", list(ALLOWED))
def test_each_kind_of_growth_is_judged(kind):
    absolute, share = ALLOWED[kind]
    level = absolute / share
    flat = [(float(n), level + n % 3) for n in range(90)]
    leaking = [(float(n), level + absolute * 3 * n / 60) for n in range(90)]
    rows, wrong = judge({(kind, "a"): flat, (kind, "b"): leaking})
    assert [row["component"] for row in rows] == ["a", "b"]
    assert len(wrong) == 1
    assert wrong[0].startswith(f"b: {kind} grew by")


def test_too_few_points_show_no_growth():
    assert growth([]) == growth([(1.0, 5.0)]) == 0.0
    assert verdict("tickets", [(1.0, 5.0)]) == (0.0, 8.0)
