"""Times of stages computing and waiting, by hand."""

from __future__ import annotations

from pillion.engine.stages.stage_clock import StageClock, StageInterval


def test_equal_steps_wait_only_at_the_start_and_end_of_a_run():
    clock = StageClock(2)
    clock.launched(10.0)
    clock.launched(11.0)
    assert clock.finished([StageInterval(10.0, 11.0), StageInterval(11.0, 12.0)]) == [0.0, 1.0]
    clock.launched(12.0)
    assert clock.finished([StageInterval(11.0, 12.0), StageInterval(12.0, 13.0)]) == [0.0, 0.0]
    assert clock.finished([StageInterval(12.0, 13.0), StageInterval(13.0, 14.0)]) == [1.0, 0.0], (
        "the first stage had no other step"
    )
    assert clock.work_s == [3.0, 3.0]
    assert clock.wait_s == [1.0, 1.0]


def test_a_long_step_makes_the_stages_wait_for_each_other():
    clock = StageClock(2)
    clock.launched(0.0)
    clock.launched(4.0)
    assert clock.finished([StageInterval(0.0, 4.0), StageInterval(4.0, 8.0)]) == [0.0, 4.0]
    assert clock.finished([StageInterval(4.0, 5.0), StageInterval(8.0, 9.0)]) == [4.0, 0.0]
    assert clock.work_s == [5.0, 5.0]
    assert clock.wait_s == [4.0, 4.0]


def test_idle_time_is_not_waiting():
    clock = StageClock(2)
    for start in (0.0, 100.0):
        clock.launched(start)
        assert clock.finished([StageInterval(start, start + 1), StageInterval(start + 1, start + 2)]) == [1.0, 1.0]
    assert clock.wait_s == clock.work_s == [2.0, 2.0]
