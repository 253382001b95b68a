"""Predicted answer times against a plain model: times of the last answers, less the longest pause, by size."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from random import Random
from statistics import median

import pytest
from hypothesis import given

from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.admission import answer_times
from pillion.gateway.admission.answer_times import (
    KEPT_DURATIONS,
    KEPT_S,
    MAX_LENGTH_RATIO,
    UPDATE_INTERVAL_S,
    AnswerTimes,
    DecodeFleet,
    ServedRequest,
)
from tests.support.scenes import random_scenes

# 10 ms per step and 1 ms per stream; 1 ms per prompt token.
MODEL = StepModel(0.01, 0.001, 0.0, 0.0, 0.0)
MAX_ANSWERS = 12
# Observed work: begin, end, seconds elapsed, seconds by the step model.
Work = tuple[float, float, float, float]


def prompt_s(fleet: DecodeFleet, tokens: int, before: int) -> float:
    return fleet.model.range_s(0, max(1, tokens + before // fleet.workers), answer_times.ASSUMED_STEP_TOKENS)


def token_s(fleet: DecodeFleet, running: float) -> float:
    streams = max(1, round((running + fleet.others) / fleet.workers))
    return fleet.model.plain_s(streams, streams * answer_times.ASSUMED_POSITION)


def without_silence(seen: list[Work], token_times_s: list[float]) -> list[Work]:
    """Subtract the one interval between two events in which the most work (by expected time) was stalled."""
    edges = sorted({min(work[0] for work in seen), *token_times_s, max(work[1] for work in seen)})

    def within(work: Work, begin_s: float, end_s: float) -> float:
        return max(0.0, min(work[1], end_s) - max(work[0], begin_s))

    gaps = list(pairwise(edges))
    worst = max(gaps, key=lambda gap: sum(within(work, *gap) / work[3] for work in seen))
    left = [
        (begin, over, took - within((begin, over, took, model), *worst), model) for begin, over, took, model in seen
    ]
    return [work for work in left if work[2] > 0]


def pace_of(seen: list[Work]) -> float:
    half = len(seen) // 2
    if half < 3:
        return 1.0
    by_size = sorted(seen, key=lambda work: work[3])
    shorter, longer = by_size[:half], by_size[half:]
    took = median(work[2] for work in shorter)
    size = median(work[3] for work in shorter)
    delay = max(0.0, took - size)
    apart = median(work[3] for work in longer) - size + delay
    return max(1.0, (median(work[2] for work in longer) - took + delay) / apart) if apart > 0 else 1.0


def work_s(seen: list[Work], token_times_s: list[float], model_s: float) -> float:
    """Return the median estimate over observations: a share for shorter work, the pace beyond them for longer."""
    if len(seen) < 2:
        return 0.0
    left = without_silence(seen, token_times_s)
    trusted, pace = len(left) >= 2, pace_of(left)
    suggested = []
    for _, _, took, size in left if trusted else seen:
        ratio = took / size
        suggested.append(ratio * min(model_s, size) + min(pace, ratio) * max(0.0, model_s - size))
    found = median(suggested)
    return found if trusted else min(found, model_s)


def usual_tokens(answers: list[ServedRequest]) -> int:
    """Return the Kaplan-Meier median length; 0 if too many answers were cut short."""
    longer = Fraction(1)
    for tokens in sorted({one.tokens for one in answers}):
        at_risk = [one for one in answers if one.tokens >= tokens]
        ended = sum(one.tokens == tokens and one.ended_itself for one in at_risk)
        longer *= 1 - Fraction(ended, len(at_risk))
        if longer <= Fraction(1, 2):
            return tokens
    return 0


def predicted_s(
    answers: list[tuple[ServedRequest, float, float]],
    fleet: DecodeFleet,
    asked: tuple[int, int, int, int],
    token_times_s: list[float],
    now_s: float,
) -> float:
    recent = [
        one
        for one in answers
        if now_s - one[0].ended_s <= max(KEPT_S, KEPT_DURATIONS * (one[0].ended_s - one[0].begun_s))
    ]
    if len(recent) < 3:
        return 0.0
    tokens, before, beside, allowed = asked
    usual, most = usual_tokens([one for one, _, _ in recent]), max(one.tokens for one, _, _ in recent)
    length = min(allowed, usual) if usual else allowed if allowed <= MAX_LENGTH_RATIO * most else most
    prompts, further = [], []
    for one, prompt, rest in recent:
        first_s = one.first_s or one.ended_s
        if prompt > 0:
            prompts.append((one.begun_s, first_s, first_s - one.begun_s, prompt))
        if rest > 0:
            further.append((first_s, one.last_s, one.last_s - first_s, rest))
    first = work_s(prompts, token_times_s, prompt_s(fleet, tokens, before))
    return first + work_s(further, token_times_s, (length - 1) * token_s(fleet, beside))


@given(random_scenes(8))
def test_a_prediction_is_the_median_of_the_last_answers(scenes: list[Random]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_times, "MAX_ANSWERS", MAX_ANSWERS)
        for rng in scenes:
            check_predictions(rng)


def check_predictions(rng: Random) -> None:
    fleet: DecodeFleet | None = DecodeFleet(MODEL, rng.randint(1, 2), rng.randint(0, 3))
    times, now_s = AnswerTimes(lambda: fleet), 100.0
    answers: list[tuple[ServedRequest, float, float]] = []
    learnt: tuple[float, list[tuple[ServedRequest, float, float]], list[float]] | None = None
    token_times_s: list[float] = []
    long, itself = rng.random() < 0.2, rng.choice([0.0, 0.3, 0.8])
    for _ in range(rng.randint(1, 20)):
        now_s += rng.uniform(0.01, 90.0 if rng.random() < 0.1 else 0.5)
        begun_s = now_s - rng.uniform(1.0, 60.0 if long else 4.0)
        first_s, last_s = sorted(rng.uniform(begun_s, now_s) for _ in range(2))
        late = rng.random() < 0.2
        if rng.random() < 0.15:
            first_s = last_s = 0.0
        tokens = 1 if not first_s else rng.choice([1, 2, 5, rng.randint(2, 40)])
        token_times_s += [last_s] if last_s else []
        one = ServedRequest(
            rng.randint(1, 500), rng.randint(0, 99), rng.uniform(0, 9), begun_s, first_s, last_s, now_s, tokens,
            rng.random() < itself, late,
        )  # fmt: skip
        times.ended(one)
        if first_s or late:
            further = (one.tokens - 1) * token_s(fleet, one.beside)
            answers.append((one, prompt_s(fleet, one.prompt_tokens, one.tokens_before), further))
            if len(answers) > MAX_ANSWERS:
                gaps = [answers[n][0].ended_s - answers[n - 1][0].ended_s for n in range(1, MAX_ANSWERS)]
                del answers[gaps.index(min(gaps)) + 1]
        if rng.random() < 0.4:
            continue
        now_s += rng.choice([0.0, 0.02])
        if learnt is None or now_s - learnt[0] >= UPDATE_INTERVAL_S:
            learnt = now_s, list(answers), sorted(token_times_s)
            limits = [max(KEPT_S, KEPT_DURATIONS * (seen.ended_s - seen.begun_s)) for seen, _, _ in answers]
            answers = [
                seen for seen, limit_s in zip(answers, limits, strict=True) if now_s - seen[0].ended_s <= limit_s
            ]
            if len(answers) < 3:
                learnt = None
        asked = rng.randint(1, 900), rng.randint(0, 99), rng.randint(1, 9), rng.choice([1, 10, 60, 2000])
        expected = 0.0 if learnt is None else predicted_s(learnt[1], fleet, asked, learnt[2], learnt[0])
        assert times.seconds(*asked, now_s, sorted(token_times_s)) == pytest.approx(expected)


def test_without_a_measured_step_nothing_is_learnt() -> None:
    fleet: DecodeFleet | None = None
    times = AnswerTimes(lambda: fleet)
    served = ServedRequest(10, 0, 1.0, 1.0, 2.0, 3.0, 3.0, 5, True, False)
    for _ in range(3):
        times.ended(served)
    fleet = DecodeFleet(MODEL)
    assert times.seconds(10, 0, 1, 5, 4.0) == 0.0
    for _ in range(3):
        times.ended(served)
    assert times.seconds(10, 0, 1, 5, 4.0) > 0.0
    fleet = None
    assert times.seconds(10, 0, 1, 5, 4.0) == 0.0
