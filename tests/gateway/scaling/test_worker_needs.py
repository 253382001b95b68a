"""How many workers a rate needs: never fewer for more load, and never fewer than the load itself keeps busy."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.scaling.objectives import Objectives
from pillion.gateway.scaling.worker_needs import (
    DecodeNeeds,
    GivenAnswer,
    PlannedPrompt,
    PrefillNeeds,
    TypicalWorker,
    range_s,
)
from tests.support.examples import examples
from tests.support.planner_components import COST

GOALS = Objectives()
MODEL = StepModel(*COST)
PREFILL = TypicalWorker(model=MODEL, step_tokens=512)
DECODE = TypicalWorker(model=MODEL, step_tokens=256, slots=64)
PROMPTS = [PlannedPrompt(0, 960, 1000), PlannedPrompt(512, 512, 530), PlannedPrompt(0, 0, 60)]
ANSWERS = [GivenAnswer(1000, 100, 1), GivenAnswer(530, 30, 1), GivenAnswer(60, 300, 2)]


def prefills(prompts: Any = PROMPTS, goals: Objectives = GOALS) -> PrefillNeeds:
    return PrefillNeeds(PREFILL, prompts, goals)


def decodes(worker: TypicalWorker = DECODE, prompts: Any = PROMPTS, answers: Any = ANSWERS) -> DecodeNeeds:
    return DecodeNeeds(worker, prompts, answers, [range_s(PREFILL, one) for one in prompts], GOALS)


prompt_lists = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 150), st.integers(1, 600)).map(
        lambda sizes: PlannedPrompt(16 * sizes[0], 16 * (sizes[0] + sizes[1]), 16 * (sizes[0] + sizes[1]) + sizes[2])
    ),
    min_size=1,
    max_size=8,
)
answer_lists = st.lists(
    st.builds(GivenAnswer, st.integers(1, 4000), st.integers(1, 900), st.integers(1, 4)), min_size=1, max_size=8
)


@settings(max_examples=examples(50))
@given(prompts=prompt_lists, per_s=st.floats(0.0, 60.0), more=st.floats(1.0, 4.0), busy=st.floats(0.0, 3.0))
def test_prefill_workers_grow_with_the_load(
    prompts: list[PlannedPrompt], per_s: float, more: float, busy: float
) -> None:
    needs = prefills(prompts)
    found = needs.workers(per_s)
    assert found >= needs.load(per_s)
    assert needs.workers(per_s * more) >= found
    assert needs.workers(per_s, busy) >= max(found, busy)


@settings(max_examples=examples(50))
@given(
    prompts=prompt_lists,
    answers=answer_lists,
    per_s=st.floats(0.0, 60.0),
    more=st.floats(1.0, 4.0),
    streams=st.integers(0, 500),
    busy=st.floats(0.0, 3.0),
)
def test_decode_workers_grow_with_the_load(
    prompts: list[PlannedPrompt],
    answers: list[GivenAnswer],
    per_s: float,
    more: float,
    streams: int,
    busy: float,
) -> None:
    needs = decodes(prompts=prompts, answers=answers)
    found = needs.workers(per_s)
    assert found >= needs.load(per_s) - 1e-9
    assert needs.workers(per_s * more) >= found
    crowded = needs.workers(per_s, streams, 500 * streams)
    assert crowded >= max(found, streams / 64)
    assert needs.workers(per_s, streams + 10, 500 * (streams + 10)) >= crowded
    assert needs.workers(per_s, streams, 500 * streams, busy) >= crowded


@settings(max_examples=examples(50))
@given(answers=answer_lists, per_s=st.floats(0.1, 60.0))
def test_streams_settle_within_the_bound(answers: list[GivenAnswer], per_s: float) -> None:
    """Little's law, step by step: each step has the streams that came in the time of the one before."""
    tails = [PlannedPrompt(0, one.prompt, one.prompt + 1) for one in answers]
    needs = decodes(prompts=tails, answers=answers)
    workers = needs.workers(per_s)
    tokens = sum(one.tokens for one in answers) / len(answers)
    reads = sum(one.tokens * (one.prompt + one.tokens / one.answers / 2) for one in answers) / len(answers)
    stream_s = MODEL.token_s + MODEL.sequence_s + (MODEL.read_s + MODEL.pair_s) * reads / tokens
    step_s = MODEL.step_s + stream_s
    for _ in range(1000):
        step_s = MODEL.step_s + stream_s * (1 + per_s * tokens * step_s / workers)
    assert step_s <= GOALS.itl_s
    assert per_s * tokens * step_s / workers <= DECODE.slots


def test_what_is_short_decides() -> None:
    free = decodes().workers(20.0)
    for less in ({"slots": 4}, {"pool_tokens": 4000.0}):
        limited = TypicalWorker(model=MODEL, step_tokens=256, **{"slots": 64, **less})
        assert decodes(limited).workers(20.0) > free


def test_tighter_objectives_take_more_workers() -> None:
    loose = prefills().workers(10.0)
    assert prefills(goals=Objectives(ttft_s=1.2, ttft_token_s=0.0)).workers(10.0) > loose
    assert prefills(goals=Objectives(attainment=0.999)).workers(10.0) >= loose
    assert loose >= math.ceil(prefills().load(10.0))


@pytest.mark.parametrize("per_s", [50.0, 200.0, 800.0])
def test_the_room_for_chance_is_the_square_root_of_the_streams(per_s: float) -> None:
    tokens = 100
    needs = DecodeNeeds(DECODE, [PlannedPrompt(0, 500, 501)], [GivenAnswer(500, tokens, 1)], [0.0], GOALS)
    streams = per_s * tokens * GOALS.itl_s
    staffed = needs.load(per_s) * (1 + GOALS.deviations / math.sqrt(streams))
    assert staffed <= needs.workers(per_s) <= staffed + 2


def test_what_no_number_can_meet_takes_no_endless_number() -> None:
    # A prompt that takes longer than its bound alone, and streams that are too slow alone.
    hopeless = [PlannedPrompt(0, 16_000, 16_010)]
    goals = Objectives(ttft_s=0.5, ttft_token_s=0.0, itl_s=0.001)
    load = PrefillNeeds(PREFILL, hopeless, goals).load(1.0)
    assert load <= PrefillNeeds(PREFILL, hopeless, goals).workers(1.0) <= load + 2
    slow = DecodeNeeds(DECODE, hopeless, ANSWERS, [0.0], goals)
    assert slow.workers(1.0) < 50


@pytest.mark.parametrize("per_s", [0.0, 1e-9])
def test_next_to_nothing_takes_next_to_nothing(per_s: float) -> None:
    assert prefills().workers(per_s) <= 1
    assert decodes().workers(per_s) <= 1
    assert prefills([PlannedPrompt(0, 0, 60)]).workers(5.0) == 0
