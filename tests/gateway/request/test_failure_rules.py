"""Retries, patience, blame and back-off of a request against a plain model."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given

from pillion.errors import LethalRequest, NotFound, Overloaded, Unavailable
from pillion.gateway.request import events as ev
from pillion.gateway.request.request_machine import LAST_ACK_WAIT_MS, RequestMachine, RequestState
from pillion.types import FinishReason
from tests.gateway.request.test_request import ack, hold, machine, planned, to_decoding
from tests.support.scenes import random_scenes

MAX_ATTEMPTS = 3
PATIENCE_S = 10.0
PROMPT_TOKENS = 21
ERRORS = [Unavailable("gone"), Overloaded("full", 700)]
# Cancellations when an attempt is abandoned, by state.
LEAVING = {
    RequestState.PLANNING: ["StopWork"],
    RequestState.OPENING: ["CancelDecode"],
    RequestState.PINNING: ["StopWork"],
    RequestState.FETCHING: ["StopWork", "ReleaseTicket"],
}


@dataclass
class LossModel:
    """A request's losses since its last progress, and its waiting time."""

    attempt: int = 1
    # Attempts without progress, except waits for a component; includes the first one.
    fruitless: int = 1
    losses: int = 0
    tickets: int = 0
    killed: list[str] = field(default_factory=list)
    waited_s: float = 0.0
    since_s: float = 0.0
    avoid: set[str] = field(default_factory=set)

    def got_something(self) -> None:
        self.fruitless = self.losses = 0
        self.killed, self.waited_s = [], 0.0

    def wait_until(self, now: float) -> None:
        if self.attempt > 1:
            self.waited_s += now - self.since_s
        self.since_s = now

    def lose(self, loss: ev.AttemptLoss, now: float) -> tuple[Any, ...]:
        """Return the effect of a loss: a look-up after some delay, or the end."""
        if not loss.retryable:
            return "fail", loss.error
        if loss.killed:
            self.killed.append(loss.killed)
        if len(self.killed) == 2:
            return ("lethal",)
        waits = self.waited_s < loss.patience_s
        if loss.patience_s and not waits:
            return "given up", f"after {self.waited_s:.0f} s without the components that it needs; the last loss", loss
        if not waits and self.fruitless >= MAX_ATTEMPTS:
            return "given up", f"after {self.fruitless} attempts; the last one", loss
        pause_ms = min(500, 20 * 4**self.losses)
        self.attempt += 1
        self.losses += 1
        self.fruitless += not waits
        self.since_s = now
        return "look up", self.attempt, set(self.avoid), pause_ms

    def look_again(self, pause_ms: int, now: float) -> tuple[Any, ...]:
        self.since_s = now
        return "look up", self.attempt, set(self.avoid), pause_ms


def outcome(actions: list[ev.Action]) -> tuple[Any, ...]:
    last = actions[-1]
    if isinstance(last, ev.LookUp):
        return "look up", last.attempt, set(last.avoid), last.after_ms
    assert isinstance(last, ev.Fail), last
    if isinstance(last.error, LethalRequest):
        return ("lethal",)
    return "fail", last.error


def check_outcome(actions: list[ev.Action], expected: tuple[Any, ...]) -> None:
    found = outcome(actions)
    if expected[0] != "given up":
        assert found == expected
        return
    _, how, loss = expected
    kind, error = found
    assert kind == "fail"
    assert error.message == f"given up {how}: {loss.error.message}"
    assert type(error) is (Overloaded if isinstance(loss.error, Overloaded) else Unavailable)
    assert error.retry_after_ms == loss.error.retry_after_ms


class LossyRun:
    """One request and its model. ``step`` applies a random event that is possible in the request's state."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.now, self.model = rng, 0.0, LossModel()
        self.machine: RequestMachine = machine(PROMPT_TOKENS, max_tokens=50, attempts=MAX_ATTEMPTS)
        self.machine.start()
        self.beside: ev.DecodeLost | None = None

    def loss(self, kind: type[ev.AttemptLoss], killed: bool = False) -> Any:
        rng = self.rng
        patience_s = rng.choice([0.0, 0.0, PATIENCE_S])
        name = rng.choice(["", "", "decode-0", "decode-1"]) if killed else ""
        return kind(self.machine.attempt, rng.choice(ERRORS), rng.random() < 0.9, patience_s, name)

    def happen(self, event: ev.Event) -> list[ev.Action]:
        return self.machine.handle(event, self.now)

    def lost(self, event: ev.AttemptLoss, *blamed: str) -> None:
        self.model.avoid |= set(blamed)
        state, actions = self.machine.state, self.happen(event)
        check_outcome(actions, self.model.lose(event, self.now))
        if state in LEAVING:
            left = [kind for kind in LEAVING[state] if kind != "CancelDecode"]
            assert [type(action).__name__ for action in actions[:-1]] == left

    def silent(self, *blamed: str) -> None:
        self.model.avoid |= set(blamed)
        state = self.machine.state.value
        gone = ev.DecodeLost(self.machine.attempt, Unavailable(f"no progress report while {state}"), True)
        before, actions = self.machine.state, self.happen(ev.AttemptSilent(self.machine.attempt))
        check_outcome(actions, self.model.lose(gone, self.now))
        if before in LEAVING:
            assert [type(action).__name__ for action in actions[:-1]] == LEAVING[before]

    def late(self) -> None:
        """Events of earlier attempts change nothing, except that a late ticket is released."""
        rng, attempt = self.rng, self.machine.attempt - 1
        kind = rng.choice([ev.PlanFailed, ev.TicketLost, ev.PrefillLost, ev.DecodeLost])
        event = rng.choice(
            [
                kind(attempt, ERRORS[0], rng.random() < 0.5),
                ev.TokensSampled(attempt, (60,)),
                ev.TicketAdopted(attempt, 3),
                ev.BlocksFetched(attempt, 3),
                ev.PrefillEnded(attempt, 20),
                ev.DecodeFinished(attempt, FinishReason.STOP, None),
                ev.AttemptSilent(attempt),
            ]
        )
        assert self.happen(event) == []
        assert self.happen(ev.TicketGranted(attempt, hold(77), 3)) == [ev.ReleaseTicket(hold(77))]

    def step(self) -> None:
        self.now += self.rng.choice([0.0, 1.0, 2.0, 4.0])
        if self.rng.random() < 0.2:
            self.late()
        getattr(self, self.machine.state.value)(self.machine.attempt)

    def planning(self, attempt: int) -> None:
        kind = self.rng.randrange(8)
        if kind == 0:
            failed, model = self.loss(ev.PlanFailed), self.model
            model.wait_until(self.now)
            if model.attempt > 1 and model.waited_s < failed.patience_s:
                check_outcome(self.happen(failed), model.look_again(100, self.now))
            else:
                self.lost(failed)
        elif kind == 1:
            self.silent()
        else:
            self.model.wait_until(self.now)
            hits = self.rng.choice([0, 2, 99])
            (action,) = self.happen(planned(attempt, len(self.machine.tokens()), hits))
            assert isinstance(action, ev.OpenTicket | ev.SubmitDecode)
            assert not isinstance(action, ev.OpenTicket) or action.resume is (attempt > 1)

    def opening(self, attempt: int) -> None:
        kind = self.rng.randrange(4)
        if kind == 0:
            (action,) = self.happen(ev.DecodeLost(attempt, NotFound("less is pinned"), True))
            assert isinstance(action, ev.OpenTicket)
            assert action.resume
        elif kind == 1:
            self.lost(self.loss(ev.DecodeLost, killed=True), "decode-0")
        elif kind == 2:
            self.silent("decode-0")
        else:
            self.happen(ev.TicketAdopted(attempt, 99))
            self.model.tickets = 0

    def pinning(self, attempt: int) -> None:
        kind = self.rng.randrange(4)
        if kind == 0:
            lost, model = self.loss(ev.TicketLost), self.model
            if attempt > 1 and lost.retryable and model.waited_s < lost.patience_s:
                model.avoid.add("kv-0")
                pause_ms = min(500, 100 * 2**model.tickets)
                model.tickets += 1
                check_outcome(self.happen(lost), model.look_again(pause_ms, self.now))
            else:
                self.lost(lost, "kv-0")
        elif kind == 1:
            self.silent()
        else:
            self.happen(ev.TicketGranted(attempt, hold(attempt), self.rng.choice([0, 99])))
            self.model.tickets, self.beside = 0, None

    def fetching(self, attempt: int) -> None:
        if self.rng.randrange(3):
            self.happen(ev.BlocksFetched(attempt, self.rng.choice([0, 99])))
        else:
            self.silent()

    def prefilling(self, attempt: int) -> None:
        kind = self.rng.randrange(6)
        if kind == 0:
            self.lost(self.loss(ev.PrefillLost), "prefill-0")
        elif kind == 1:
            self.silent("prefill-0")
        elif kind == 2 and self.beside is None:
            lost = self.loss(ev.DecodeLost, killed=True)
            if lost.retryable:
                self.beside = lost
                self.model.avoid.add("decode-0")
                assert self.happen(lost) == []
            else:
                self.lost(lost, "decode-0")
        elif kind == 3:
            self.happen(ev.ChunkAcked(attempt, ack(0, 8)))
        elif self.beside is not None:
            check_outcome(self.happen(ev.PrefillEnded(attempt, 99)), self.model.lose(self.beside, self.now))
        else:
            self.happen(ev.PrefillEnded(attempt, 99))
            assert self.machine.state is RequestState.DECODING, "a loss of an earlier attempt is over"

    def decoding(self, attempt: int) -> None:
        kind = self.rng.randrange(4)
        if kind == 0:
            self.happen(ev.TokensSampled(attempt, (50,)))
            self.model.got_something()
        elif kind == 1:
            self.silent("decode-0")
        else:
            self.lost(self.loss(ev.DecodeLost, killed=True), "decode-0")


@given(random_scenes())
def test_losses_match_the_reference_model(scenes: list[Random]) -> None:
    for rng in scenes:
        run = LossyRun(rng)
        for _ in range(60):
            if run.machine.state is RequestState.DONE or len(run.machine.emitted) > 40:
                break
            run.step()
            assert run.machine.attempt == run.model.attempt


def to_prefilling(pinned: int = 0) -> RequestMachine:
    m = machine(PROMPT_TOKENS, attempts=MAX_ATTEMPTS)
    m.handle(planned(1, PROMPT_TOKENS), 1.0)
    m.handle(ev.TicketGranted(1, hold(), pinned), 1.0)
    assert m.state is RequestState.PREFILLING
    return m


def test_events_of_a_lost_stream_are_ignored() -> None:
    m = to_prefilling()
    assert m.handle(ev.DecodeLost(1, ERRORS[0], True), 1.0) == []
    assert m.handle(ev.DecodeLost(1, ERRORS[1], False), 1.0) == []
    assert m.handle(ev.TokensSampled(1, (5,)), 1.0) == []
    assert m.state is RequestState.PREFILLING
    assert isinstance(m.handle(ev.PrefillEnded(1, 20), 1.0)[-1], ev.LookUp)


@pytest.mark.parametrize(
    ("end", "cancelled", "after_ms"),
    [
        (ev.DecodeFinished(1, FinishReason.STOP, None), False, LAST_ACK_WAIT_MS),
        (ev.DecodeLost(1, ERRORS[0], False), False, 0),
        (ev.StopStringFound(1), True, 0),
    ],
)
def test_only_a_whole_answer_waits_for_its_last_acknowledgement(end: ev.Event, cancelled: bool, after_ms: int) -> None:
    m = to_prefilling()
    m.handle(ev.TokensSampled(1, (5,)), 1.0)
    left = [ev.StopWork(1, after_ms), ev.ReleaseTicket(hold())]
    assert m.handle(end, 2.0)[:-1] == ([ev.CancelDecode(1), *left] if cancelled else left)


def test_ticket_retry_backoff_resets_after_a_ticket() -> None:
    m, pauses = machine(attempts=9), []
    to_decoding(m)
    for attempt in (2, 3):
        m.handle(ev.DecodeLost(attempt - 1, ERRORS[0], True), 1.0)
        for _ in range(3):
            m.handle(planned(attempt, PROMPT_TOKENS), 1.0)
            (look_up,) = m.handle(ev.TicketLost(attempt, ERRORS[0], True, PATIENCE_S), 1.0)
            assert isinstance(look_up, ev.LookUp)
            pauses.append(look_up.after_ms)
        to_decoding(m, attempt)
    assert pauses == [100, 200, 400] * 2


def test_a_silent_prefill_range_is_stopped_at_once() -> None:
    left = to_prefilling().handle(ev.AttemptSilent(1), 9.0)[:-1]
    assert left == [ev.CancelDecode(1), ev.StopWork(1), ev.ReleaseTicket(hold())]


def test_a_prefill_range_that_has_ended_is_not_stopped_again() -> None:
    m = to_prefilling()
    m.handle(ev.PrefillEnded(1, 20), 1.0)
    assert m.handle(ev.PrefillLost(1, ERRORS[0], True), 1.0) == []
    assert m.handle(ev.ChunkAcked(1, ack(1, 20)), 1.0) == []
    left = m.handle(ev.RequestCancelled(), 1.0)
    assert [type(action).__name__ for action in left] == ["CancelDecode", "ReleaseTicket", "Fail"]


def test_waiting_for_a_failing_plan_is_cumulative_over_attempts() -> None:
    m = machine(attempts=2)
    m.start()
    m.handle(ev.PlanFailed(1, ERRORS[0], True), 0.0)
    for second in range(int(PATIENCE_S)):
        again = m.handle(ev.PlanFailed(2, ERRORS[0], True, PATIENCE_S), second)
        assert isinstance(again[-1], ev.LookUp)
        assert again[-1].attempt == 2
    last = m.handle(ev.PlanFailed(2, ERRORS[0], True, PATIENCE_S), PATIENCE_S)[-1]
    assert isinstance(last, ev.Fail)
    assert last.error.message == "given up after 10 s without the components that it needs; the last loss: gone"
