"""The restart policy: backoff that doubles, a bound on deaths in a window, no second try for a wrong configuration."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pillion.supervisor.restarts import EXIT_CONFIG, GiveUp, Restart, RestartPolicy


def test_delays_double_up_to_a_bound() -> None:
    policy = RestartPolicy(max_deaths=7, window_s=60, first_delay_ms=200, max_delay_ms=1000)
    delays = [policy.died("a", 1, now) for now in range(6)]
    # A lone death is followed at once, as somebody may be waiting.
    assert delays == [Restart(s) for s in (0.0, 0.2, 0.4, 0.8, 1.0, 1.0)]


def test_deaths_with_time_between_them_are_each_followed_at_once() -> None:
    policy = RestartPolicy(calm_s=5.0, first_delay_ms=200)
    delays = [policy.died("a", -9, now) for now in (0.0, 13.0, 26.0, 30.0, 40.0)]
    assert delays == [Restart(s) for s in (0.0, 0.0, 0.0, 0.2, 0.0)]


def test_too_many_deaths_within_the_window_end_it() -> None:
    policy = RestartPolicy(max_deaths=3, window_s=10)
    assert isinstance(policy.died("a", 1, 0.0), Restart)
    assert isinstance(policy.died("a", -9, 1.0), Restart)
    answer = policy.died("a", 1, 2.0)
    assert answer == GiveUp("a died 3 times within 10 s")


def test_old_deaths_are_forgotten() -> None:
    policy = RestartPolicy(max_deaths=3, window_s=10, first_delay_ms=100)
    assert policy.died("a", 1, 0.0) == Restart(0.0)
    assert policy.died("a", 1, 9.5) == Restart(0.0)
    assert policy.died("a", 1, 10.5) == Restart(0.1)
    assert isinstance(policy.died("a", 1, 11.0), GiveUp)


def test_parts_are_counted_apart() -> None:
    policy = RestartPolicy(max_deaths=2)
    assert isinstance(policy.died("a", 1, 0.0), Restart)
    assert isinstance(policy.died("b", 1, 0.0), Restart)


def test_a_wrong_configuration_is_not_tried_again() -> None:
    answer = RestartPolicy().died("decode-0", EXIT_CONFIG, 0.0)
    assert answer == GiveUp("decode-0 cannot work as configured")


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 8), st.floats(0.1, 60), st.integers(1, 500))
def test_never_more_restarts_in_a_window_than_allowed(
    pauses: list[float], max_deaths: int, window_s: float, first_delay_ms: int
) -> None:
    policy = RestartPolicy(max_deaths, window_s, first_delay_ms, max_delay_ms=1000)
    now = 0.0
    restarted: list[float] = []
    for pause in pauses:
        now += pause
        answer = policy.died("a", 1, now)
        recent = [then for then in restarted if now - then <= window_s]
        if isinstance(answer, GiveUp):
            assert len(recent) == max_deaths - 1
            return
        assert len(recent) < max_deaths - 1
        assert answer.delay_s <= max(1.0, first_delay_ms / 1000)
        restarted.append(now)
