"""Predicted time of an answer, and refusal of requests that would miss their deadline."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.scheduling.step_model import StepModel
from pillion.errors import Overloaded
from pillion.gateway.admission.answer_times import (
    KEPT_S,
    MIN_ANSWERS,
    AnswerLengths,
    AnswerTimes,
    DecodeFleet,
    PastAnswer,
    ServedRequest,
)
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.gateway.admission.turns import ANSWER_RESERVE, AdmissionPermit, ModelTurns
from tests.support.examples import examples

# 10 ms per step and 1 ms per stream; 1 ms per prompt token.
MODEL = StepModel(0.01, 0.001, 0.0, 0.0, 0.0)
A, HEAVY = Tenant(name="a"), Tenant(name="heavy", weight=3.0)


class ServedLine:
    """One model's queue before workers that follow their step model exactly, with its clock."""

    def __init__(self, slots: int = 4, workers: int = 1) -> None:
        self.now_s = 100.0
        self.fleet: DecodeFleet | None = DecodeFleet(MODEL, workers)
        self.times = AnswerTimes(lambda: self.fleet)
        self.turns = ModelTurns(lambda: slots, self.times)
        self.numbers = iter(range(10_000))
        self.granted: list[AdmissionPermit] = []

    def ask(self, left_s: float | None = None, allowed: int = 11, tokens: int = 100, **others) -> AdmissionPermit:
        number = next(self.numbers)
        permit = AdmissionPermit(others.pop("tenant", OPEN), others.pop("answers", 1), order=number, number=number)
        permit.tokens, permit.allowed_tokens = tokens, allowed
        permit.deadline_s = None if left_s is None else self.now_s + left_s
        self.turns.wait(permit, self.now_s)
        self.grant()
        return permit

    def grant(self) -> None:
        for permit in self.turns.grant(self, self.now_s, lambda number: False):
            self.granted.append(permit)

    def leave(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        self.turns.free(permit, generated_tokens)
        self.grant()
        self.turns.left(permit, self.now_s)

    def answer(
        self, permit: AdmissionPermit, first_s: float, token_s: float, tokens: int, itself: bool = False
    ) -> None:
        """Record an answer with its first token after ``first_s`` and each further one after ``token_s``."""
        came_s = permit.begun_s + first_s
        permit.first_token_s, permit.ended_itself = lambda: came_s, itself
        self.now_s = came_s + (tokens - 1) * token_s
        permit.last_token_s = lambda over_s=self.now_s: over_s
        self.leave(permit, tokens)

    def predicted_s(self, permit: AdmissionPermit, running: int, before: int = 0, later_s: float = 0.0) -> float:
        self.turns.running, running = running, self.turns.running
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.turns, "_tokens_before", lambda: before)
            found = self.turns._answer_s(permit, self.now_s + later_s)
        self.turns.running = running
        return found

    def learn(self, first_s: float = 0.11, token_s: float = 0.011, tokens: int = 11, itself: bool = False) -> None:
        """Record a few answers in sequence."""
        for _ in range(MIN_ANSWERS):
            self.answer(self.ask(), first_s, token_s, tokens, itself)


def test_nothing_is_predicted_without_observations() -> None:
    served = ServedLine()
    for _ in range(MIN_ANSWERS):
        assert served.predicted_s(served.ask(), 3) == 0.0
    served = ServedLine()
    served.learn()
    asked = AdmissionPermit(OPEN, 1, tokens=100, allowed_tokens=11)
    assert served.predicted_s(asked, 0) == 0.0
    assert served.predicted_s(asked, 1) > 0.0
    assert served.predicted_s(AdmissionPermit(OPEN, 1, tokens=100), 1) == 0.0
    assert served.predicted_s(asked, 1, later_s=KEPT_S + 1) == 0.0


def test_predictions_follow_the_load_before_any_answer_ends() -> None:
    served = ServedLine(slots=100)
    served.learn()
    asked = AdmissionPermit(OPEN, 1, tokens=100, allowed_tokens=101)
    alone_s = 0.11 + 100 * 0.012
    assert served.predicted_s(asked, 1) == pytest.approx(alone_s, rel=0.01)
    assert served.predicted_s(asked, 41) == pytest.approx(alone_s + 100 * 0.04, rel=0.01)
    served.fleet = DecodeFleet(MODEL, workers=2, others=20)
    assert served.predicted_s(asked, 21) == pytest.approx(alone_s + 100 * 0.019, rel=0.01)
    served.fleet = DecodeFleet(MODEL)
    # Prompts at the workers without a token yet are computed first.
    assert served.predicted_s(asked, 1, 3000) == pytest.approx(alone_s + 3.0, rel=0.1)
    others = [served.ask(tokens=1500) for _ in range(2)]
    with pytest.raises(Overloaded):
        served.ask(left_s=2.5)
    for one in others:
        one.first_token_s = lambda: served.now_s
    assert served.ask(left_s=2.5).queue is served


def test_observed_times_correct_the_step_model() -> None:
    served = ServedLine()
    served.learn(first_s=0.33, token_s=0.022)
    asked = AdmissionPermit(OPEN, 1, tokens=100, allowed_tokens=11)
    # Tokens beyond the observed work are predicted at the model's own pace.
    assert served.predicted_s(asked, 1) == pytest.approx(0.33 + 10 * 0.022 + 10 * 0.001, rel=0.01)


@pytest.mark.parametrize(
    ("lengths", "allowed", "expected"),
    [
        # Cut by their max_tokens: a limit is used unless it is far larger.
        ([(10, False)] * 8, 100, 100),
        ([(10, False)] * 8, 4096, 10),
        # Ended by EOS: half of them by 20 tokens.
        ([(10, True), (20, True), (30, True), (40, True)], 4096, 20),
        ([(10, True), (20, True), (30, True), (40, True)], 15, 15),
        # Short answers that were cut do not change the distribution of long ones.
        ([(10, False)] * 8 + [(200, True), (220, True)], 4096, 200),
        ([(10, False)] * 8 + [(200, True), (220, True)], 10, 10),
    ],
)
def test_expected_answer_length_is_estimated_from_past_answers(
    lengths: list[tuple[int, bool]], allowed: int, expected: int
) -> None:
    found = AnswerLengths.of(
        PastAnswer(ServedRequest(1, 0, 1.0, 0.0, 1.0, 2.0, 2.0, tokens, itself, False), 1.0, 1.0)
        for tokens, itself in lengths
    )
    assert found.answer_tokens(allowed) == expected


def test_an_answer_that_would_come_too_late_is_refused_at_once() -> None:
    served = ServedLine(slots=2)
    served.learn()
    running = [served.ask() for _ in range(2)]
    for one in running:
        one.first_token_s = lambda: served.now_s
    with pytest.raises(Overloaded, match="the answer 1") as caught:
        served.ask(left_s=1.2, allowed=101)
    assert [quota.subject for quota in caught.value.quotas] == ["deadline"]
    assert 0 < caught.value.retry_after_ms < 1000
    with pytest.raises(Overloaded):
        served.ask(left_s=1.4, allowed=101)
    served.ask(left_s=1.4 * ANSWER_RESERVE + 0.2, allowed=101)
    served.ask(allowed=101)
    served.ask(left_s=0.01, allowed=101, tenant=OPEN.in_background())


def test_a_request_too_late_at_its_turn_uses_no_slot() -> None:
    served = ServedLine(slots=1)
    served.learn()
    running = served.ask(allowed=200)
    late, other = served.ask(left_s=2.0, allowed=101), served.ask(left_s=20.0, allowed=101)
    second = served.turns
    served.now_s += 1.0
    second._slots = lambda: 2
    served.grant()
    assert late.given_up is not None
    assert late.queue is None
    assert [quota.subject for quota in late.given_up.quotas] == ["deadline"]
    assert other.queue is served
    assert running.given_up is None
    assert served.turns.running == 2
    assert not served.turns.permits
    served.turns.check_integrity()


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"), st.sampled_from([OPEN, A, HEAVY]), st.one_of(st.none(), st.floats(0.1, 20.0)),
            st.integers(1, 200), st.integers(1, 3),
        ),
        st.tuples(st.just("end"), st.integers(0, 20), st.integers(0, 60), st.booleans()),
        st.tuples(st.just("give up"), st.integers(0, 20)),
        st.tuples(st.just("pass"), st.floats(0.0, 5.0)),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=examples(100))
@given(EVENTS)
def test_each_queued_request_is_served_or_refused_once(events: list[tuple]) -> None:
    served = ServedLine(slots=3)
    asked: list[AdmissionPermit] = []
    for kind, *rest in events:
        running = [permit for permit in served.granted if permit.queue is not None]
        if kind == "ask":
            tenant, left_s, allowed, answers = rest
            with contextlib.suppress(*() if left_s is None else (Overloaded,)):
                asked.append(served.ask(left_s, allowed, tenant=tenant, answers=answers))
        elif kind == "end" and running:
            permit = running[rest[0] % len(running)]
            served.answer(permit, 0.1, 0.02, rest[1] + 1, rest[2])
        elif kind == "give up" and asked:
            served.turns.give_up(asked[rest[0] % len(asked)])
        elif kind == "pass":
            served.now_s += rest[0]
            served.grant()
        served.turns.check_integrity()
    assert len(served.granted) == len(set(served.granted))
    for permit in asked:
        assert not (permit.queue is not None and permit.given_up is not None)
        assert (permit.number in served.turns.permits) == (permit.place is not None)
    running = [permit for permit in served.granted if permit.queue is not None]
    assert sum(permit.answers for permit in running) == served.turns.running


def test_an_assumed_step_model_predicts_nothing() -> None:
    served = ServedLine()
    served.fleet = None
    served.learn(first_s=2.0)
    assert served.ask(left_s=0.01, tokens=4000).begun_s
    # Ignore answers served before the first measurement: their expected time is unknown.
    served.fleet = DecodeFleet(MODEL)
    assert served.predicted_s(served.ask(), running=1, later_s=1.0) == 0.0
    served.learn()
    assert served.predicted_s(served.ask(), running=1, later_s=2.0) > 0.1
