"""The restart policy: doubling backoff, a limit of deaths in a window, no second try for a wrong configuration."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pillion.supervisor.restarts import EXIT_CONFIG, Restart, RestartPolicy
from tests.support.scenes import random_scenes


def test_delays_double_up_to_a_limit() -> None:
    policy = RestartPolicy(max_deaths=7, window_s=60, first_delay_ms=200, max_delay_ms=1000)
    delays = [policy.died("a", 1, now) for now in range(6)]
    # A lone death is followed at once, as somebody may be waiting.
    assert delays == [Restart(s) for s in (0.0, 0.2, 0.4, 0.8, 1.0, 1.0)]


def test_deaths_far_apart_are_each_restarted_at_once() -> None:
    policy = RestartPolicy(calm_s=5.0, first_delay_ms=200)
    delays = [policy.died("a", -9, now) for now in (0.0, 13.0, 26.0, 30.0, 40.0)]
    assert delays == [Restart(s) for s in (0.0, 0.0, 0.0, 0.2, 0.0)]


def test_too_many_deaths_within_the_window_are_flapping() -> None:
    """Each restart is then later than the previous one, until the component has lived for the window's time."""
    policy = RestartPolicy(max_deaths=3, window_s=10, flap_delay_s=8.0, max_flap_delay_s=20.0)
    assert policy.died("a", 1, 0.0) == Restart(0.0)
    assert policy.died("a", -9, 1.0).flapping == ""
    assert policy.died("a", 1, 2.0) == Restart(8.0, "a died 3 times within 10 s")
    # However long it waits, that is no time in which it lived.
    assert policy.died("a", 1, 19.0) == Restart(16.0, "a keeps dying")
    assert policy.died("a", 1, 44.9) == Restart(20.0, "a keeps dying")
    assert policy.died("a", 1, 75.0) == Restart(0.0)


def test_old_deaths_are_forgotten() -> None:
    policy = RestartPolicy(max_deaths=3, window_s=10, first_delay_ms=100)
    assert policy.died("a", 1, 0.0) == Restart(0.0)
    assert policy.died("a", 1, 9.5) == Restart(0.0)
    assert policy.died("a", 1, 10.5) == Restart(0.1)
    assert policy.died("a", 1, 11.0).flapping


def test_components_are_counted_separately() -> None:
    policy = RestartPolicy(max_deaths=2)
    assert policy.died("a", 1, 0.0) == Restart(0.0)
    assert policy.died("b", 1, 0.0) == Restart(0.0)


def test_a_wrong_configuration_is_not_tried_again_at_once() -> None:
    answer = RestartPolicy(flap_delay_s=8.0).died("decode-0", EXIT_CONFIG, 0.0)
    assert answer == Restart(8.0, "decode-0 cannot work as configured")


def test_a_component_that_flaps_for_ever_waits_the_longest_delay() -> None:
    policy = RestartPolicy(flap_delay_s=8.0, max_flap_delay_s=20.0)
    # 2 ** 1024 exceeds a float.
    delays_s = [policy.died("a", EXIT_CONFIG, 0.0).delay_s for _ in range(1100)]
    assert delays_s == [8.0, 16.0] + [20.0] * 1098


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 8), st.floats(0.1, 60), st.integers(1, 500))
def test_quick_restarts_per_window_are_bounded(
    pauses: list[float], max_deaths: int, window_s: float, first_delay_ms: int
) -> None:
    policy = RestartPolicy(max_deaths, window_s, first_delay_ms, max_delay_ms=1000)
    begins_s, flap_delay_s = 0.0, 0.0
    quick: list[float] = []
    for pause in pauses:
        # Its time is the difference of two readings of the clock, which rounds otherwise than the pause.
        now = begins_s + pause
        flap_delay_s = flap_delay_s if now - begins_s < window_s else 0.0
        answer = policy.died("a", 1, now)
        recent = [then for then in quick if now - then <= window_s]
        if answer.flapping:
            assert 10.0 <= answer.delay_s <= 120.0
            assert answer.delay_s >= flap_delay_s
            flap_delay_s = answer.delay_s
        else:
            assert len(recent) < max_deaths - 1
            assert answer.delay_s <= max(1.0, first_delay_ms / 1000)
            quick.append(now)
            flap_delay_s = 0.0
        begins_s = now + answer.delay_s


@given(random_scenes())
def test_restart_delays_match_the_reference_model(scenes: list[Random]) -> None:
    """Delays double with deaths in a row, and with each one while the component flaps, for a window after its start."""
    for rng in scenes:
        most, window_s, calm_s = rng.randint(2, 5), float(rng.randint(4, 20)), float(rng.randint(1, 4))
        policy = RestartPolicy(most, window_s, 200, 1000, calm_s, 8.0, 20.0)
        now, begins_s, flaps = 100.0, float("-inf"), 0
        deaths: list[float] = []
        for _ in range(rng.randint(1, 14)):
            now += rng.choice([0.5, 1.0, calm_s, calm_s - 0.5, window_s, begins_s - now + window_s, 1.0, 2.0])
            if now == float("-inf") or (deaths and now < deaths[-1]):
                now = deaths[-1] if deaths else 100.0
            exit_code = rng.choice([1, 1, 1, -9, -9, EXIT_CONFIG])
            flaps = 0 if now - begins_s >= window_s else flaps
            deaths = [at for at in deaths if now - at <= window_s] + [now]
            if exit_code == EXIT_CONFIG:
                why = "a cannot work as configured"
            elif flaps:
                why = "a keeps dying"
            elif len(deaths) >= most:
                why = f"a died {most} times within {window_s:g} s"
            else:
                why = ""
            if why:
                flaps += 1
                expected = Restart(min(8.0 * 2 ** (flaps - 1), 20.0), why)
            else:
                in_a_row = 0
                while in_a_row + 1 < len(deaths) and deaths[-1 - in_a_row] - deaths[-2 - in_a_row] < calm_s:
                    in_a_row += 1
                expected = Restart(min(0.2 * 2 ** (in_a_row - 1), 1.0) if in_a_row else 0.0)
            assert policy.died("a", exit_code, now) == expected
            begins_s = now + expected.delay_s
