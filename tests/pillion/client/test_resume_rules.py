"""When a client retries after a broken stream, against a plain model of the rules, on random lives of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given

from pillion.client import resume
from pillion.client.answer_schema import answer_schema
from pillion.client.connection import RETRY_ATTEMPTS, RETRY_FIRST_BACKOFF_S, RETRY_MAX_BACKOFF_S
from pillion.client.resume import StreamProgress, should_retry
from pillion.errors import Cancelled, DeadlineExceeded, Internal, Overloaded, PillionError, Unavailable
from pillion.types import AnswerSoFar, FinishReason, GenerateRequest, Resume, SamplingParams, StreamOrigin
from pillion.v1 import common_pb2, gateway_pb2
from tests.support.scenes import random_scenes

ORIGIN = StreamOrigin(-5, bytes(32), 8)
# The share of a pause that chance leaves of it here.
LEFT = 0.75
MAX_ATTEMPTS, MAX_DELAY_S, FIRST_DELAY_S = 6, 2.0, 0.05
RESUME_TIMEOUT_S, CONNECT_TIMEOUT_S = 8.0, 6.0
ERRORS = [
    Unavailable("closed"),
    Unavailable("stopping", 300),
    Unavailable("stopping", 5000),
    Cancelled("cancelled"),
    Overloaded("full", 700),
    Overloaded("full"),
    Internal("defect"),
    Internal("received RST_STREAM"),
]


def is_lost(error: PillionError, spoken: bool) -> bool:
    """A gateway is lost if its connection ends, or if it announces when to retry because it is stopping."""
    if spoken:
        return isinstance(error, Unavailable) and error.retry_after_ms > 0
    return isinstance(error, Unavailable | Cancelled) or "RST_STREAM" in error.message


@dataclass
class ResumeModel:
    """The client's state of its stream, and the failures since its last progress."""

    addresses: int
    resume_timeout_s: float
    connect_timeout_s: float
    deadline_s: float | None
    connected: bool = False
    has_message: bool = False
    is_resumable: bool = False
    first_failure_s: float | None = None
    broke_s: float | None = None
    attempts: int = 0
    arrivals: int = 0
    resumes: int = 0
    tokens: dict[int, list[int]] = field(default_factory=lambda: {0: [], 1: []})
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    scored: int = 0

    def fail(self, error: PillionError, spoken: bool, connected: bool, now_s: float) -> float | str:
        """Return the longest pause before the next call; "final" for the error itself, "given up" for one that
        counts."""
        lost = is_lost(error, spoken)
        self.connected |= connected and not spoken
        if not self.connected:
            return self.fail_before_connection(error, lost, connected, now_s)
        if self.broke_s is None:
            self.broke_s, self.attempts, self.arrivals = now_s, 0, 0
            if not lost or (self.has_message and not self.is_resumable) or not self.resume_timeout_s:
                return "final"
        elif not lost and not isinstance(error, Overloaded | Unavailable):
            return "final"
        else:
            self.arrivals += connected
        if self.arrivals == MAX_ATTEMPTS:
            return "given up"
        if now_s >= self.broke_s + self.resume_timeout_s:
            return "given up"
        own_s = FIRST_DELAY_S * 2 ** (self.attempts - 1) if self.attempts else 0.0
        asked_s = error.retry_after_ms / 1000 if isinstance(error, Overloaded | Unavailable) else 0.0
        self.attempts += 1
        pause_s = min(max(own_s, asked_s), MAX_DELAY_S) * LEFT
        return pause_s if self.deadline_s is None else min(pause_s, max(0.0, self.deadline_s - now_s))

    def fail_before_connection(self, error: PillionError, lost: bool, connected: bool, now_s: float) -> float | str:
        self.first_failure_s = now_s if self.first_failure_s is None else self.first_failure_s
        self.attempts += 1
        may_wait = not connected and now_s < self.first_failure_s + self.connect_timeout_s
        if not lost or (self.attempts >= RETRY_ATTEMPTS * self.addresses and not may_wait):
            return "final"
        if self.attempts % self.addresses:
            return 0.0
        rounds = self.attempts // self.addresses
        own_s = min(RETRY_FIRST_BACKOFF_S * 2 ** (rounds - 1), RETRY_MAX_BACKOFF_S)
        asked_s = error.retry_after_ms / 1000 if isinstance(error, Unavailable) else 0.0
        pause_s = min(max(own_s, asked_s), MAX_DELAY_S) * LEFT
        return "final" if self.deadline_s is not None and now_s + pause_s >= self.deadline_s else pause_s


class StreamLife:
    """One stream and its model."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.now_s, self.opening, self.over = rng, 50.0, True, False
        timeout_s = rng.choice([None, None, 4.0, 30.0])
        resume_timeout_s = rng.choice([0.0, 0.5, RESUME_TIMEOUT_S, RESUME_TIMEOUT_S, RESUME_TIMEOUT_S])
        connect_timeout_s = rng.choice([0.0, CONNECT_TIMEOUT_S])
        addresses = rng.randint(1, 2)
        deadline_s = None if timeout_s is None else 50.0 + timeout_s
        self.model = ResumeModel(addresses, resume_timeout_s, connect_timeout_s, deadline_s)
        self.answers = rng.choice([None, 2, 2])
        sampling = SamplingParams(n=self.answers)
        self.asked = GenerateRequest(text="x", sampling=sampling, request_id="mine")
        # Some gateways cannot be reached, and some break often without anything between.
        self.errors, self.share = ERRORS, 0.35
        self.connected, self.pauses_s = 0.5, [0.0, 0.25, 1.0, 2.0]
        if rng.random() < 0.5:
            self.errors, self.share = ERRORS[:4], rng.choice([0.0, 0.15])
            self.connected, self.pauses_s = rng.choice([0.0, 0.1, 0.9]), rng.choice([[0.0, 0.25], [0.25, 1.0]])
        self.stream = StreamProgress(self.asked, timeout_s, resume_timeout_s, connect_timeout_s, addresses, self.now_s)
        # A gateway of an older version names no origin.
        self.has_origin = rng.random() < 0.9

    def step(self) -> None:
        self.now_s += self.rng.choice(self.pauses_s)
        self.check_time()
        if self.rng.random() < self.share:
            self.bring()
        else:
            self.fail()

    def check_time(self) -> None:
        deadline_s = self.model.deadline_s
        if deadline_s is None:
            assert self.stream.timeout_s(self.now_s) is None
        elif self.now_s >= deadline_s and self.model.attempts:
            with pytest.raises(DeadlineExceeded):
                self.stream.timeout_s(self.now_s)
        else:
            assert self.stream.timeout_s(self.now_s) == deadline_s - self.now_s

    def bring(self) -> None:
        rng, model = self.rng, self.model
        index, opens = rng.randrange(self.answers or 1), self.opening
        ids, scored = ([7, 8], 0) if rng.random() < 0.5 else ([], rng.randint(0, 1))
        ends = rng.random() < 0.2
        message = gateway_pb2.GenerateResponse(
            request_id="theirs",
            index=index,
            token_ids=ids,
            prompt_logprobs=[common_pb2.TokenLogprob(token_id=1)] * scored,
            origin=gateway_pb2.StreamOrigin(seed=-5, digest=bytes(32), cached_tokens=8)
            if opens and self.has_origin
            else None,
            finish_reason=common_pb2.FINISH_REASON_STOP if ends else common_pb2.FINISH_REASON_UNSPECIFIED,
            timings=common_pb2.Timings(replays=3),
        )
        delta = self.stream.accept(message)
        if opens:
            model.resumes += model.is_resumable
            model.is_resumable, model.has_message, model.connected = self.has_origin, True, True
            self.opening = False
        assert delta.timings is not None
        assert delta.timings.replays == 3 + model.resumes
        assert (delta.token_ids, delta.index) == (tuple(ids), index)
        if ids or ends or scored:
            model.attempts, model.broke_s = 0, None
        model.scored += scored
        model.tokens[index] += ids
        if ends:
            model.reasons[index] = FinishReason.STOP

    def fail(self) -> None:
        error, spoken = self.rng.choice(self.errors), self.rng.random() < (0.3 if self.share else 0.0)
        connected = spoken or self.rng.random() < self.connected
        expected = self.model.fail(error, spoken, connected, self.now_s)
        if isinstance(expected, float):
            assert self.stream.delay_s(error, spoken, connected, self.now_s) == pytest.approx(expected)
            if self.model.connected:
                self.opening = True
            self.check_request()
            return
        self.over = True
        with pytest.raises(type(error)) as caught:
            self.stream.delay_s(error, spoken, connected, self.now_s)
        assert (caught.value is error) is (expected == "final")
        if expected == "given up":
            tried_s = self.now_s - (self.model.broke_s or 0.0)
            tried = f"was not resumed in {self.model.attempts} attempts within {tried_s:.1f} s"
            assert tried in caught.value.message

    def check_request(self) -> None:
        model = self.model
        if not model.is_resumable:
            assert self.stream.request() == self.asked
            return
        answers = tuple(AnswerSoFar(tuple(model.tokens[n]), model.reasons.get(n)) for n in range(self.answers or 1))
        found = self.stream.request()
        assert found.resume == Resume(ORIGIN, answers, model.scored)
        assert (found.request_id, found.text) == ("theirs", "x")


@given(random_scenes())
def test_a_broken_stream_is_resumed_by_the_rules(scenes: list[Random]) -> None:
    bounds: set[tuple[float, float]] = set()

    def chance(low: float, high: float) -> float:
        bounds.add((low, high))
        return LEFT

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "MAX_RESUME_ATTEMPTS", MAX_ATTEMPTS)
        patch.setattr(resume.random, "uniform", chance)
        for rng in scenes:
            life = StreamLife(rng)
            for _ in range(40):
                life.step()
                if life.over:
                    break
    assert bounds <= {(0.5, 1)}, "pauses are shortened by up to half"


def test_a_gateway_that_sends_no_origin_cannot_resume_a_stream() -> None:
    stream = StreamProgress(GenerateRequest(text="x"), None, 9.0, 9.0, 1, 0.0)
    origin = gateway_pb2.StreamOrigin(seed=-5, digest=bytes(32), cached_tokens=8)
    stream.accept(gateway_pb2.GenerateResponse(token_ids=[1], origin=origin))
    stream.delay_s(ERRORS[0], False, True, 1.0)
    with pytest.raises(Unavailable, match="too old"):
        stream.accept(gateway_pb2.GenerateResponse(token_ids=[2]))


def test_a_resumed_stream_continues_without_timings_and_ids() -> None:
    """A message may have no timings, and may name no request."""
    stream = StreamProgress(GenerateRequest(text="x", request_id="mine"), None, 9.0, 9.0, 1, 0.0)
    origin = gateway_pb2.StreamOrigin(seed=-5, digest=bytes(32), cached_tokens=8)
    for token_id in (1, 2):
        delta = stream.accept(gateway_pb2.GenerateResponse(token_ids=[token_id], origin=origin))
        assert (delta.token_ids, delta.timings) == ((token_id,), None)
        stream.delay_s(ERRORS[0], False, True, 1.0)
        assert stream.request().request_id == "mine"


def test_pauses_before_a_connection_stay_bounded() -> None:
    stream = StreamProgress(GenerateRequest(text="x"), None, 9.0, 9.0, 1, 0.0)
    # 2 ** 1024 exceeds a float.
    pauses_s = [stream.delay_s(ERRORS[0], False, False, 1.0) for _ in range(1100)]
    assert max(pauses_s) <= RETRY_MAX_BACKOFF_S


def test_stopping_gateways_are_retried_for_only_a_few_rounds() -> None:
    """The time to wait for a connection is for gateways that have none."""
    stream = StreamProgress(GenerateRequest(text="x"), None, 9.0, 9.0, 1, 0.0)
    stopping = Unavailable("stopping", 300)
    for _ in range(RETRY_ATTEMPTS - 1):
        stream.delay_s(stopping, True, True, 1.0)
    with pytest.raises(Unavailable, match="stopping"):
        stream.delay_s(stopping, True, True, 1.0)


def test_any_retry_delay_marks_a_stopping_gateway() -> None:
    assert should_retry(Unavailable("stopping", 1), True, 1, 2)
    assert not should_retry(Unavailable("no worker"), True, 1, 2)


def test_a_usage_message_ends_a_stream() -> None:
    stream = StreamProgress(GenerateRequest(text="x"), None, 9.0, 9.0, 1, 0.0)
    assert not stream.over
    stream.accept(gateway_pb2.GenerateResponse(token_ids=[1]))
    assert not stream.over
    stream.accept(gateway_pb2.GenerateResponse(usage=common_pb2.Usage()))
    assert stream.over


@pytest.mark.parametrize("spoken", [False, True])
@pytest.mark.parametrize("error", ERRORS)
def test_a_call_without_a_stream_is_sent_once_to_each_address(error: PillionError, spoken: bool) -> None:
    """Once more if a gateway has ended the connection itself, because others may share its address."""
    addresses = 2
    most = addresses if isinstance(error, Unavailable) else addresses + 1
    sent = 1
    while should_retry(error, spoken, sent, addresses):
        sent += 1
        assert sent < 9
    assert sent == (most if is_lost(error, spoken) else 1)


def test_an_answer_of_a_schema_is_parsed() -> None:
    stream = StreamProgress(GenerateRequest(text="x"), None, 9.0, 9.0, 1, 0.0, answer_schema("true"))
    stop = common_pb2.FINISH_REASON_STOP
    assert stream.accept(gateway_pb2.GenerateResponse(text="[1,")).parsed is None
    assert stream.accept(gateway_pb2.GenerateResponse(text="2]", finish_reason=stop)).parsed == [1, 2]
