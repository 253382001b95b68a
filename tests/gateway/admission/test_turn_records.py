"""What ModelTurns tells its predictor, and rules of queues that random scenes rarely isolate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from pillion.errors import Overloaded
from pillion.gateway.admission.answer_times import MAX_ANSWERS, ServedRequest
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.admission.turns import (
    MIN_SILENCE_S,
    AdmissionPermit,
    DepartureRate,
    FairQueue,
    ModelTurns,
    WaitingRequest,
    YieldingRequests,
)

A, B, C = Tenant(name="a"), Tenant(name="b"), Tenant(name="c")


# As in ModelTurns.
MAX_TOKEN_TIMES = 256
WATCHED_STREAMS = 8


class RecordingTimes:
    """A predictor that records its calls and predicts ``answer_s``."""

    def __init__(self, answer_s: float = 0.0) -> None:
        self.answer_s = answer_s
        self.served: list[ServedRequest] = []
        self.tokens_before: list[int] = []
        self.token_times_s: list[float] = []

    def ended(self, served: ServedRequest) -> None:
        self.served.append(served)

    def seconds(
        self, prompt: int, before: int, beside: int, allowed: int, now_s: float, token_times_s: Iterable[float]
    ) -> float:
        self.tokens_before.append(before)
        self.token_times_s = list(token_times_s)
        return self.answer_s


class Scene:
    """A model with ``slots``, whose requests begin at once."""

    def __init__(self, slots: int = 0, answer_s: float = 0.0) -> None:
        self.times = RecordingTimes(answer_s)
        times: Any = self.times
        self.turns = ModelTurns(lambda: slots, times)
        self.numbers = iter(range(1, 10_000))
        self.now_s = 100.0

    def permit(self, tenant: Tenant = A, answers: int = 1, tokens: int = 10, **more: Any) -> AdmissionPermit:
        permit = AdmissionPermit(tenant, answers, order=0.0, number=next(self.numbers), tokens=tokens, **more)
        permit.allowed_tokens = more.get("allowed_tokens", 8)
        return permit

    def begin(self, permit: AdmissionPermit) -> AdmissionPermit:
        owner: Any = object()
        self.turns.wait(permit, self.now_s)
        assert self.turns.grant(owner, self.now_s, lambda _: False) == [permit]
        return permit

    def end(self, permit: AdmissionPermit, tokens: int = 5) -> None:
        self.turns.free(permit, tokens)
        self.turns.left(permit, self.now_s)

    def predict(self) -> None:
        """Make the turns predict: for a request with a deadline, beside a running one."""
        running = self.begin(self.permit(allowed_tokens=0))
        self.turns.wait(probe := self.permit(deadline_s=self.now_s + 1e6), self.now_s)
        self.turns.give_up(probe)
        self.turns.free(running, 0)


@pytest.mark.parametrize(("deadline_s", "late"), [(None, False), (104.0, True), (104.5, False)])
def test_an_ended_request_is_recorded(deadline_s: float | None, late: bool) -> None:
    scene = Scene()
    scene.begin(scene.permit(answers=3, tokens=99))
    one = scene.begin(scene.permit(answers=2, first_token_s=lambda: 101.0, last_token_s=lambda: 103.0))
    one.deadline_s, one.ended_itself = deadline_s, True
    scene.now_s = 104.0
    scene.end(one, tokens=5)
    scene.predict()
    # Beside it: 5 answers when it began and 3 when it ended; 5 tokens are 3 per answer, rounded up.
    assert scene.times.served == [ServedRequest(10, 99, 4.0, 100.0, 101.0, 103.0, 104.0, 3, True, late)]


def test_a_request_that_generates_nothing_is_not_recorded() -> None:
    scene = Scene()
    scene.end(scene.begin(scene.permit(allowed_tokens=0)), tokens=0)
    scene.predict()
    assert scene.times.served == []


def test_the_last_ended_requests_are_recorded() -> None:
    scene = Scene()
    for tokens in range(MAX_ANSWERS + 3):
        scene.end(scene.begin(scene.permit(tokens=tokens)))
    scene.predict()
    assert [one.prompt_tokens for one in scene.times.served] == list(range(3, MAX_ANSWERS + 3))


def test_tokens_of_an_ended_request_precede_no_prompt() -> None:
    scene = Scene()
    scene.end(scene.begin(scene.permit(tokens=7)))
    scene.predict()
    assert scene.times.tokens_before == [10]


def test_times_of_tokens_are_sampled() -> None:
    """A request's last token when it ends; of tokens in quick succession the last; not an earlier token of another."""
    scene = Scene()
    ends_s = [0.0, 0.25, 0.375, 0.5, 0.625, 0.5, 5.0, 4.0, 5.0]
    for at_s in ends_s:
        scene.end(scene.begin(scene.permit(last_token_s=lambda at_s=100.0 + at_s: at_s)))
    scene.predict()
    # A new one is recorded MIN_SILENCE_S after the last but one; until then the last one moves.
    assert MIN_SILENCE_S == 0.5
    assert scene.times.token_times_s == [100.0, 100.375, 100.625, 105.0]


def test_token_times_of_running_streams_are_sampled_when_a_request_ends() -> None:
    scene, last_s = Scene(), [100.5]
    scene.begin(scene.permit(first_token_s=lambda: 100.5, last_token_s=lambda: last_s[0]))
    other = scene.begin(scene.permit(last_token_s=lambda: 100.0))
    last_s[0] = 103.0
    scene.end(other)
    last_s[0] = 105.0
    scene.predict()
    assert 103.0 in scene.times.token_times_s


def test_only_the_latest_token_times_are_kept() -> None:
    scene = Scene()
    for at_s in range(1, MAX_TOKEN_TIMES + 4):
        scene.end(scene.begin(scene.permit(last_token_s=lambda at_s=float(at_s): at_s)))
    scene.predict()
    assert scene.times.token_times_s == [float(at_s) for at_s in range(4, MAX_TOKEN_TIMES + 4)]


def test_running_streams_are_watched_until_they_end() -> None:
    scene = Scene()
    last_s = [100.0] * (WATCHED_STREAMS + 1)
    streams = [
        scene.begin(scene.permit(first_token_s=lambda: 99.0, last_token_s=lambda n=number: last_s[n]))
        for number in range(len(last_s))
    ]
    last_s[0], last_s[-1] = 101.0, 150.0
    scene.predict()
    assert scene.times.token_times_s == [100.0, 101.0]
    # The first is watched no longer, so the last one is.
    scene.turns.free(streams[0], 1)
    scene.predict()
    assert scene.times.token_times_s == [100.0, 101.0, 150.0]


@pytest.mark.parametrize(("answer_s", "text"), [(0.0, "5.0 s, longer"), (2.0, "5.0 s and the answer 2.0 s, longer")])
def test_a_refusal_names_the_answers_time_if_it_is_known(answer_s: float, text: str) -> None:
    scene = Scene(slots=1, answer_s=answer_s)
    scene.begin(scene.permit())
    # 2.5 s per answer, besides the longest gap; one other is ahead.
    scene.turns.began(scene.permit(), 0.0)
    scene.turns.wait(scene.permit(allowed_tokens=0), 0.0)
    for answers, now_s in ((2, 5.0), (2, 15.0)):
        scene.turns.left(scene.permit(answers=answers, allowed_tokens=0), now_s)
    with pytest.raises(Overloaded, match=text):
        scene.turns.wait(scene.permit(deadline_s=101.0), 100.0)


def test_a_rate_needs_exactly_the_minimum_number_of_departures() -> None:
    rate = DepartureRate()
    rate.began(0.0)
    rate.left(2, True, 5.0)
    # In a half-life, the two become one.
    rate.left(2, True, 15.0)
    assert rate.wait_s(0) == 2.5


def test_giving_up_twice_or_after_the_grant_changes_nothing() -> None:
    scene = Scene()
    running = scene.begin(scene.permit())
    scene.turns.give_up(running)
    assert scene.turns.running == 1
    scene.turns.wait(waiting := scene.permit(), 100.0)
    scene.turns.give_up(waiting)
    assert waiting.place is None
    scene.turns.give_up(waiting)
    scene.turns.check_integrity()


def test_a_waiting_request_is_not_ahead_of_itself() -> None:
    queue, own = FairQueue(), WaitingRequest(0.0, 1, 5, 1)
    queue.push(A, own)
    assert queue.ahead(A, own) == 0


def test_a_skipped_tenant_keeps_its_own_counter() -> None:
    """One that waits keeps its counter, although another that was served instead has a higher one."""
    queue = FairQueue()
    for number, (tenant, tokens) in enumerate([(A, 1), (B, 10), (B, 10), (C, 5), (C, 5)]):
        queue.push(tenant, WaitingRequest(0.0, number, tokens, 1))
    for but in ({"a", "c"}, {"a", "c"}, {"a", "b"}):
        queue.pop(but)
    # a: 0; c: 5, so that its second request comes after those of a with less than 5 tokens before them.
    assert queue.ahead(A, WaitingRequest(1.0, 9, 1, 1)) == 1


def test_empty_queues_of_displaceable_requests_are_removed() -> None:
    yielding, one = YieldingRequests(), AdmissionPermit(A, 1, order=0.0)
    yielding.add(one)
    yielding.remove(one)
    assert yielding.ends() == {}
