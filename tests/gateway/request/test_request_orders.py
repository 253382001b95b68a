"""The request state machine against a random world: no ticket leaks, each token exactly once, one end."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import NotFound, Overloaded
from pillion.gateway.request import events as ev
from pillion.gateway.request.request_machine import RequestMachine, RequestState
from pillion.types import FinishReason
from tests.gateway.request.test_request import GONE, ack, hold, machine, planned
from tests.support.examples import examples


def token_at(position: int) -> int:
    """Return the token that logits, seed and position determine on every worker (I6)."""
    return 1000 + position


@dataclass
class RequestWorld:
    """Parts that answer late, twice, for old attempts or never, with a log of their commands."""

    machine: RequestMachine
    opened: set[ev.TicketHold] = field(default_factory=set)
    released: list[ev.TicketHold] = field(default_factory=list)
    asked: list[ev.Action] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    ends: list[ev.Action] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=dict)

    def perform(self, actions) -> None:
        for action in actions:
            assert not self.ends or isinstance(action, ev.ReleaseTicket), "something was begun after the end"
            if isinstance(action, ev.ReleaseTicket):
                self.released.append(action.hold)
            elif isinstance(action, ev.Emit):
                self.emitted.extend(action.token_ids)
            elif isinstance(action, ev.Finish | ev.Fail):
                self.ends.append(action)
            elif isinstance(action, ev.SubmitDecode) and action.hold is None:
                assert self.machine.state is RequestState.OPENING
            elif isinstance(action, ev.SubmitDecode | ev.RunPrefill | ev.Fetch):
                assert action.hold in self.opened
                assert action.hold not in self.released
            if isinstance(action, ev.SubmitDecode):
                self.sent[action.attempt] = len(self.machine.tokens())
            elif isinstance(action, ev.Fetch):
                assert action.plan.cached_blocks < action.wanted.blocks <= action.plan.limit_blocks
            self.asked.append(action)

    def events(self, draw) -> ev.Event:
        attempt = draw(st.sampled_from([self.machine.attempt] * 4 + list(range(1, self.machine.attempt + 1))))
        error = draw(st.sampled_from([GONE, NotFound("ticket"), Overloaded("full")]))
        choice = draw(st.sampled_from(EVENTS))
        match choice:
            case "planned":
                return planned(
                    attempt, len(self.machine.tokens()), draw(st.integers(0, 9)), far=draw(st.integers(0, 9))
                )
            case "granted":
                made = hold(len(self.opened) + 1)
                self.opened.add(made)
                return ev.TicketGranted(attempt, made, draw(st.integers(0, 9)))
            case "fetched":
                return ev.BlocksFetched(attempt, draw(st.integers(0, 9)))
            case "acked":
                return ev.ChunkAcked(attempt, ack(0, draw(st.integers(0, 40))))
            case "tokens":
                # A worker continues its own count; without a submit it may send anything.
                at = self.sent.get(attempt, 0)
                count = draw(st.integers(1, 3))
                self.sent[attempt] = at + count
                return ev.TokensSampled(attempt, tuple(token_at(p) for p in range(at, at + count)))
            case "adopted":
                return ev.TicketAdopted(attempt, draw(st.integers(0, 9)))
            case "finished":
                return ev.DecodeFinished(attempt, FinishReason.LENGTH, None)
            case "stop":
                return ev.StopStringFound(len(self.emitted))
            case "cancelled":
                return ev.RequestCancelled()
            case "deadline":
                return ev.DeadlinePassed()
            case "silent":
                return ev.AttemptSilent(attempt)
            case "prefillended":
                return ev.PrefillEnded(attempt, draw(st.integers(0, 40)))
        lost = {
            "planfailed": partial(ev.PlanFailed, patience_s=60.0),
            "ticketlost": ev.TicketLost,
            "prefilllost": ev.PrefillLost,
            "decodelost": ev.DecodeLost,
        }
        return lost[choice](attempt, error, draw(st.booleans()))


COMMON = [
    "planned",
    "granted",
    "fetched",
    "acked",
    "acked",
    "prefillended",
    "tokens",
    "tokens",
    "tokens",
    "decodelost",
    "prefilllost",
]
EVENTS = COMMON * 3 + [
    "adopted",
    "adopted",
    "ticketlost",
    "finished",
    "stop",
    "cancelled",
    "deadline",
    "silent",
    "planfailed",
]


@given(st.data())
@settings(max_examples=examples(150))
def test_invariants_hold_in_any_order_of_events(data) -> None:
    m = machine(prompt=data.draw(st.integers(1, 30)), max_tokens=data.draw(st.integers(1, 12)), attempts=5)
    world, now = RequestWorld(m), 0.0
    world.perform(m.start())
    for _ in range(data.draw(st.integers(0, 60))):
        now += 0.1
        world.perform(m.handle(world.events(data.draw), now))
        assert world.emitted == [token_at(len(m.prompt) + n) for n in range(len(world.emitted))]
        assert len(world.ends) <= 1
        assert (m.state is RequestState.DONE) == bool(world.ends)
    world.perform(m.handle(ev.RequestCancelled(), now))
    assert len(world.ends) == 1
    assert len(world.released) == len(set(world.released))
    assert set(world.released) == world.opened, "a ticket that was opened is released exactly once"
    timings = m.timings(now)
    assert timings.cached_tokens + timings.prefilled_tokens + timings.tail_tokens == len(m.prompt)
    assert min(timings.cached_tokens, timings.prefilled_tokens, timings.tail_tokens - 1) >= 0
