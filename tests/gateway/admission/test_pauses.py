"""A worker paused for some seconds: no request that could meet its deadline is refused afterwards."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pillion.engine.scheduling.step_model import StepModel
from pillion.errors import Overloaded
from pillion.gateway.admission.answer_times import AnswerTimes, DecodeFleet
from pillion.gateway.admission.tenants import OPEN
from pillion.gateway.admission.turns import AdmissionPermit, ModelTurns
from tests.support.examples import examples

MODEL = StepModel(0.01, 0.001, 0.0, 0.0, 0.0)
STEP_TOKENS = 64
SLOTS = 8
# Time after its end during which a pause may have effects.
AFTER_S = 2.0
NEVER = (0.0, 0.0)


@dataclass(frozen=True)
class Asked:
    """A request: arrival, tokens, timeout."""

    at_s: float
    prompt: int
    tokens: int
    timeout_s: float | None


@dataclass(eq=False)
class Stream:
    asked: Asked
    permit: AdmissionPermit
    left: int
    times_s: list[float] = field(default_factory=list)


class PausedService:
    """A queue before one worker whose steps last ``pace`` times the step model's prediction, paused from ``pause_s[0]``
    to ``pause_s[1]``. The request ``forced`` is never refused."""

    def __init__(self, pause_s: tuple[float, float], pace: float = 1.0, forced: int = -1) -> None:
        self.pause_s, self.pace, self.forced = pause_s, pace, forced
        self.turns = ModelTurns(lambda: SLOTS, AnswerTimes(lambda: DecodeFleet(MODEL)))
        self.refused: dict[int, tuple[float, Overloaded]] = {}
        self.ended_s: dict[int, float] = {}
        self.running: list[Stream] = []
        self.waiting: dict[int, Asked] = {}

    def run(self, requests: list[Asked]) -> PausedService:
        coming = deque(sorted(enumerate(requests), key=lambda each: each[1].at_s))
        now_s = 0.0
        while coming or self.running:
            if not self.running:
                now_s = coming[0][1].at_s
                self._arrive(*coming.popleft())
                continue
            step = self._planned()
            ends_s = self._ends(now_s, sum(step.values()))
            while coming and coming[0][1].at_s < ends_s:
                self._arrive(*coming.popleft())
            now_s = ends_s
            self._end(step, now_s)
        assert not self.waiting
        return self

    def _planned(self) -> dict[Stream, int]:
        """Return the tokens of the next step by stream: one for each decode, then those of prompts."""
        step = {one: 1 for one in self.running if not one.left}
        room = STEP_TOKENS
        for one in self.running:
            if one.left and room:
                step[one] = min(room, one.left)
                room -= step[one]
        return step

    def _ends(self, now_s: float, tokens: int) -> float:
        ends_s = now_s + self.pace * (MODEL.step_s + tokens * MODEL.token_s)
        from_s, to_s = self.pause_s
        return ends_s + to_s - max(from_s, now_s) if now_s < to_s and ends_s > from_s else ends_s

    def _end(self, step: dict[Stream, int], now_s: float) -> None:
        for one, tokens in step.items():
            one.left -= min(tokens, one.left)
            if not one.left:
                one.times_s.append(now_s)
        for one in list(self.running):
            deadline_s = one.permit.deadline_s
            if len(one.times_s) == one.asked.tokens or (deadline_s is not None and deadline_s <= now_s):
                self._leave(one, now_s)

    def _arrive(self, number: int, asked: Asked) -> None:
        now_s = asked.at_s
        permit = AdmissionPermit(OPEN, 1, order=number, number=number)
        permit.tokens, permit.allowed_tokens = asked.prompt, asked.tokens
        if asked.timeout_s is not None and number != self.forced:
            permit.deadline_s = now_s + asked.timeout_s
        try:
            self.turns.wait(permit, now_s)
        except Overloaded as error:
            self.refused[number] = now_s, error
            return
        self.waiting[number] = asked
        self._grant(now_s)
        if number in self.waiting:
            self.turns.began(permit, now_s)

    def _grant(self, now_s: float) -> None:
        for permit in self.turns.grant(self, now_s, lambda number: False):
            asked = self.waiting.pop(permit.number)
            if permit.given_up is not None:
                self.refused[permit.number] = now_s, permit.given_up
                continue
            stream = Stream(asked, permit, asked.prompt)
            permit.first_token_s = lambda stream=stream: stream.times_s[0] if stream.times_s else 0.0
            permit.last_token_s = lambda stream=stream: stream.times_s[-1] if stream.times_s else 0.0
            self.running.append(stream)

    def _leave(self, one: Stream, now_s: float) -> None:
        self.running.remove(one)
        if len(one.times_s) == one.asked.tokens:
            self.ended_s[one.permit.number] = now_s
        self.turns.free(one.permit, len(one.times_s))
        self._grant(now_s)
        self.turns.left(one.permit, now_s)

    def leave(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        raise NotImplementedError


def refused_for_the_pause(requests: list[Asked], pause_s: tuple[float, float], pace: float) -> list[int]:
    """Return requests that were refused long after the pause, needed under a third of their time, and are served
    without a pause."""
    found = []
    for number, (at_s, _) in PausedService(pause_s, pace).run(requests).refused.items():
        asked = requests[number]
        if at_s > pause_s[1] + AFTER_S and asked.timeout_s is not None:
            ended_s = PausedService(pause_s, pace, forced=number).run(requests).ended_s[number]
            if ended_s <= asked.at_s + asked.timeout_s / 3:
                found.append(number)
    return [number for number in found if number not in PausedService(NEVER, pace).run(requests).refused]


SHORT = st.builds(Asked, st.floats(0.0, 30.0), st.integers(1, 40), st.integers(1, 30), st.none() | st.floats(1.0, 30.0))
LONG = st.builds(Asked, st.floats(0.0, 30.0), st.integers(500, 4000), st.integers(1, 50), st.just(30.0))
# Six short prompts during the pause beside a stream, then prompts of 4 s.
AT_ONCE = [
    Asked(0.0, 5, 3000, None),
    *(Asked(1.0 + number / 10, 2, 2, None) for number in range(6)),
    *(Asked(7.0 + 6 * number, 4000, 10, 30.0) for number in range(3)),
]


@settings(max_examples=examples(100))
@given(
    st.lists(SHORT, min_size=3, max_size=25),
    st.lists(LONG, max_size=4),
    st.floats(0.0, 15.0),
    st.floats(1.0, 6.0),
    st.sampled_from([1.0, 3.0]),
)
@example(AT_ONCE, [], 1.0, 3.5, 1.0)
def test_a_pause_refuses_no_request_that_could_be_served(
    short: list[Asked], long: list[Asked], from_s: float, lasts_s: float, pace: float
) -> None:
    assert not refused_for_the_pause(short + long, (from_s, from_s + lasts_s), pace)


@pytest.mark.parametrize("pace", [1.0, 5.0])
def test_an_overloaded_service_refuses_late_answers(pace: float) -> None:
    timeout_s, pause_s = pace, (5.0, 8.0)
    requests = [Asked(number * 0.02 * pace, 40, 20, timeout_s) for number in range(int(1000 / pace))]
    service = PausedService(pause_s, pace).run(requests)
    after = {number for number, asked in enumerate(requests) if asked.at_s > pause_s[1] + AFTER_S}
    refused, served = after & set(service.refused), after & set(service.ended_s)
    in_time = {number for number in served if service.ended_s[number] <= requests[number].at_s + timeout_s}
    assert len(refused) > len(after) / 2
    assert len(in_time) > len(after - refused) * 0.8
    for number in itertools.islice(sorted(refused), 3):
        ended_s = PausedService(pause_s, pace, forced=number).run(requests).ended_s[number]
        assert service.refused[number][1].retry_after_ms / 1000 <= 2 * (ended_s - requests[number].at_s)
