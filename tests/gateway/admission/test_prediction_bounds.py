"""Predicted answer times at the bounds that random scenes miss: empty work, equal sizes, the ends of intervals."""

from __future__ import annotations

import pytest

from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.admission.answer_times import (
    KEPT_S,
    MAX_LENGTH_RATIO,
    UPDATE_INTERVAL_S,
    AnswerLengths,
    AnswerTimes,
    DecodeFleet,
    MeasuredWork,
    ServedRequest,
    WorkTimes,
)
from pillion.gateway.planning.plan_cost import ASSUMED_POSITION, ASSUMED_STEP_TOKENS

# Each part of a step costs something.
MODEL = StepModel(0.01, 0.001, 0.0005, 0.0001, 0.00001)
FLEET = DecodeFleet(MODEL)


def served(ended_s: float, took_s: float = 1.0, tokens: int = 4) -> ServedRequest:
    """A request of 100 tokens; its first token comes after half of its time."""
    begun_s = ended_s - took_s
    return ServedRequest(100, 0, 1.0, begun_s, begun_s + took_s / 2, ended_s, ended_s, tokens, True, False)


@pytest.mark.parametrize(("tokens", "computed"), [(0, 1), (1, 1), (2, 2)])
def test_a_prompt_has_at_least_one_token(tokens: int, computed: int) -> None:
    assert FLEET.prompt_s(tokens, 0) == MODEL.range_s(0, computed, ASSUMED_STEP_TOKENS)


def test_predicted_token_time_includes_reading_all_positions() -> None:
    assert FLEET.token_s(3) == MODEL.plain_s(3, 3 * ASSUMED_POSITION)


def test_work_of_no_duration_predicts_none() -> None:
    assert WorkTimes([MeasuredWork(1.0, 1.0, 0.0, 0.5)] * 3, ()).seconds(2.0) == 0.0


def test_work_of_equal_sizes_gives_no_rate() -> None:
    """Half of the work took three times as long, and the shorter half had no delay."""
    took_s = [1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    seen = [MeasuredWork(10.0 * number, 10.0 * number + took, took, 1.0) for number, took in enumerate(took_s)]
    token_times_s = [number / 1000 for number in range(80_000)]
    assert WorkTimes(seen, token_times_s).seconds(2.0) == pytest.approx(3.0 + 1.0, abs=0.01)


@pytest.mark.parametrize(
    ("allowed", "expected"), [(2 * MAX_LENGTH_RATIO, 2 * MAX_LENGTH_RATIO), (2 * MAX_LENGTH_RATIO + 1, 2)]
)
def test_a_far_longer_token_limit_is_not_an_estimate(allowed: int, expected: int) -> None:
    assert AnswerLengths(0, 2).answer_tokens(allowed) == expected


def test_predictions_are_learnt_again_after_their_interval() -> None:
    times, token_times_s = AnswerTimes(lambda: FLEET), [-number / 100 for number in range(600)]
    for _ in range(3):
        times.ended(served(0.0))
    first_s = times.seconds(100, 0, 1, 4, 0.0, token_times_s)
    for _ in range(9):
        times.ended(served(0.0, took_s=5.0))
    assert times.seconds(100, 0, 1, 4, UPDATE_INTERVAL_S * 0.9, token_times_s) == first_s
    assert times.seconds(100, 0, 1, 4, UPDATE_INTERVAL_S, token_times_s) > first_s


def test_a_past_answer_expires_after_its_retention_time() -> None:
    times = AnswerTimes(lambda: FLEET)
    for _ in range(3):
        times.ended(served(40.0))
    assert times.seconds(100, 0, 1, 4, 40.0 + KEPT_S) > 0
    assert times.seconds(100, 0, 1, 4, 41.0 + KEPT_S) == 0.0


def test_steps_that_cost_nothing_predict_nothing() -> None:
    times = AnswerTimes(lambda: DecodeFleet(StepModel(0.0, 0.0, 0.0, 0.0, 0.0)))
    for _ in range(3):
        times.ended(served(40.0))
    assert times.seconds(100, 0, 1, 4, 40.0) == 0.0
