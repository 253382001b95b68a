"""Collects the story of one request: its events, with their times. Sans-IO (I9): times are the caller's.

    ready --waits--> turn --note, for each event of the request's machine and the actions that it caused--> ended

A story collects the events and actions of the request's machine. If the request is recorded, they are converted to
StoryEvents when it has ended. ``what`` is one of these:

    arrived, ready, waits, turn                  in the gateway; ``ready`` has the time taken by the grammar
    adapter_changed                              an adapter of this name served the prompt's beginning, and was replaced
    planned, retry, plan_lost                    a plan with the routes compared; a further attempt
    memory, ticket, ticket_lost                  the KV node's queue for memory, and what the node has pinned
    fetch, fetched                               blocks of other nodes and lower tiers
    prefill, chunk, prefilled, prefill_lost      a prefill worker's range
    submitted, adopted, in_line, begun           the decode worker, until a step computes the prompt's rest
    tokens, decode_lost, finished, stopped       an answer's stream starts, or goes on after a loss; its end
    still                                        the end of a worker's time without heartbeats
    cancelled, deadline, silent, failed          why no more came
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pillion.errors import InvalidRequest, PillionError
from pillion.gateway.planning.planner import RequestPlan
from pillion.gateway.planning.split_decision import Fetched
from pillion.gateway.request import events as ev
from pillion.gateway.request.admitted_request import AdmittedRequest
from pillion.gateway.request.events import Action, Event
from pillion.gateway.request.request_machine import AnswerAction
from pillion.records.bundle import GAP_BOUNDS_MS, Content, Reason, StoryEvent, TokenTimes, WeighedRoute
from pillion.types import Timings, Usage
from pillion.wire.registry import ComponentRecord

# Events per story; a request may move and wait without end.
MAX_MOMENTS = 4096

_GAP_BOUNDS_S = tuple(bound / 1000 for bound in GAP_BOUNDS_MS)
# Name of each event and action, and its component: the plan's decode or prefill worker, or its node. Of the actions,
# only those that start something lengthy are listed.
_EVENT_NAMES: Mapping[type, tuple[str, str]] = {
    ev.LookUp: ("retry", ""),
    ev.PlanMade: ("planned", "decode"),
    ev.PlanFailed: ("plan_lost", ""),
    ev.OpenTicket: ("memory", "node"),
    ev.TicketGranted: ("ticket", "node"),
    ev.TicketLost: ("ticket_lost", "node"),
    ev.Fetch: ("fetch", "node"),
    ev.BlocksFetched: ("fetched", "node"),
    ev.RunPrefill: ("prefill", "prefill"),
    ev.ChunkAcked: ("chunk", "prefill"),
    ev.PrefillEnded: ("prefilled", "prefill"),
    ev.PrefillLost: ("prefill_lost", "prefill"),
    ev.SubmitDecode: ("submitted", "decode"),
    ev.TicketAdopted: ("adopted", "decode"),
    ev.StillQueued: ("in_line", ""),
    ev.TokensSampled: ("tokens", "decode"),
    ev.DecodeLost: ("decode_lost", "decode"),
    ev.DecodeFinished: ("finished", "decode"),
    ev.StopStringFound: ("stopped", "decode"),
    ev.RequestCancelled: ("cancelled", ""),
    ev.DeadlinePassed: ("deadline", ""),
    ev.AttemptSilent: ("silent", ""),
}


@dataclass(slots=True)
class AnswerLog:
    """Tokens of one answer, and when they came.

    Attributes:
        token_ids, logprobs: the tokens, and their log probabilities if requested; None for those that another gateway
            sent before the stream moved here.
        gaps: histogram over GAP_BOUNDS_MS of the times between two messages with tokens.
        first_s, last_s: monotonic times of the first and last token; 0.0 without tokens.
        longest_s, longest_at: the longest gap, and the index of the token after it.
        waits: True until the stream starts, and after a loss until it continues.
        finish_reason: as the client gets it; "" before the end.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    gaps: list[int] = field(default_factory=lambda: [0] * (len(_GAP_BOUNDS_S) + 1))
    first_s: float = 0.0
    last_s: float = 0.0
    longest_s: float = 0.0
    longest_at: int = 0
    waits: bool = True
    finish_reason: str = ""

    def add(self, emitted: ev.Emit, now: float) -> None:
        """Record the tokens of one message."""
        if self.first_s:
            gap_s = now - self.last_s
            self.gaps[bisect_left(_GAP_BOUNDS_S, gap_s)] += 1
            if gap_s > self.longest_s:
                self.longest_s, self.longest_at = gap_s, len(self.token_ids)
        else:
            self.first_s = now
        self.last_s = now
        self.token_ids += emitted.token_ids
        if emitted.logprobs:
            self.logprobs += [one.logprob for one in emitted.logprobs]

    def times(self, arrived_s: float) -> TokenTimes | None:
        """Return the tokens' times since the request's arrival; None without tokens."""
        if not self.first_s:
            return None
        return TokenTimes(
            first_ms=_ms(self.first_s - arrived_s),
            last_ms=_ms(self.last_s - arrived_s),
            longest_gap_ms=_ms(self.longest_s),
            longest_gap_at=self.longest_at,
            gaps=tuple(self.gaps),
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Story:
    """Events of one request, collected on the event loop. After :meth:`ended` it is immutable, so any thread may read
    it.

    Attributes:
        id: id of the request's bundle.
        tenant: the request's tenant.
        content: how the bundle keeps texts and token ids.
        chosen: why it is recorded even if it neither fails nor is slow; None if it is not.
        answers: an empty log for each answer.
        on_end: called once, when the request has ended.
        error: the request's error, or None.
        ended_s: when it ended.
        usage, timings: its cost; without timings it was never scheduled.
    """

    id: str
    admitted: AdmittedRequest
    tenant: str
    content: Content
    chosen: Reason | None
    answers: list[AnswerLog]
    on_end: Callable[[Story], None]
    error: PillionError | None = None
    ended_s: float = 0.0
    usage: Usage | None = None
    timings: Timings | None = None
    _gateway_events: list[StoryEvent] = field(default_factory=list)
    _moments: list[tuple[float, int | None, Event | Action]] = field(default_factory=list)

    def ready(self, now: float) -> None:
        """Record that the request is ready to be scheduled. Its answers may begin with tokens from another gateway."""
        grammar, resume = self.admitted.grammar, self.admitted.resume
        self._add_event("arrived", self.admitted.arrived)
        self._add_event("ready", now, figures={"grammar_ms": _ms(grammar.made_s)} if grammar.text else {})
        for answer, before in zip(self.answers, resume.answers if resume else (), strict=False):
            answer.token_ids += before.token_ids
            answer.logprobs += [None] * len(before.token_ids)

    def waits(self, now: float, running: int, waiting: Mapping[str, int]) -> None:
        """Record that the request has to wait. ``running``: answers at the workers. ``waiting``: queued requests by
        tenant, this one included."""
        before = dict(waiting) | {self.tenant: waiting.get(self.tenant, 1) - 1}
        words = ", ".join(f"{count} of tenant {name}" for name, count in before.items() if name and count)
        self._add_event("waits", now, words=words, figures={"running": running, "waiting": sum(before.values())})

    def adapter_changed(self, now: float, tokens: int, digest: str, then_s: float) -> None:
        """Record that this gateway last served the first ``tokens`` of the prompt at ``then_s``, with another adapter
        (``digest``) of the same name."""
        self._add_event("adapter_changed", now, tokens=tokens, words=digest, figures={"ago_ms": _ms(now - then_s)})

    def turn(self, now: float) -> None:
        """Record that the request was scheduled."""
        self._add_event("turn", now)

    def note(self, index: int | None, event: Event, actions: Sequence[AnswerAction], now: float) -> None:
        """Record an event of answer ``index`` (None: of all answers), and the resulting actions."""
        if self.ended_s:
            return
        if not isinstance(event, ev.TokensSampled):
            self._add_moment(now, index, event)
            if isinstance(event, ev.DecodeLost) and index is not None:
                self.answers[index].waits = True
        for answer, action in actions:
            if isinstance(action, ev.Emit):
                # First, since nearly all actions are Emit.
                log = self.answers[answer]
                log.add(action, now)
                if log.waits:
                    log.waits = False
                    self._add_moment(now, answer, event)
            elif type(action) in _EVENT_NAMES:
                self._add_moment(now, answer, action)
        if isinstance(event, ev.StopStringFound) and index is not None:
            log = self.answers[index]
            del log.token_ids[event.kept_tokens :], log.logprobs[event.kept_tokens :]

    def ended(
        self,
        now: float,
        usage: Usage | None = None,
        timings: Timings | None = None,
        error: PillionError | None = None,
    ) -> None:
        """Record the request's end; ``error`` is None if it did not fail."""
        self.ended_s, self.usage, self.timings, self.error = now, usage, timings, error
        self.on_end(self)

    def stalled(self, component_id: str, from_s: float, to_s: float) -> None:
        """Record a component's time without heartbeats, if it overlaps the request."""
        if to_s > self.admitted.arrived and from_s < self.ended_s:
            self._add_event(
                "still", min(to_s, self.ended_s), worker=component_id, figures={"lasts_ms": _ms(to_s - from_s)}
            )

    @property
    def longest_wait_s(self) -> float:
        """Longest time for which the client waited for a first or later token, in seconds."""
        first_s = min((one.first_s for one in self.answers if one.first_s), default=self.ended_s)
        return max(first_s - self.admitted.arrived, *(one.longest_s for one in self.answers))

    def workers(self) -> list[ComponentRecord]:
        """Return the workers of all plans, without duplicates."""
        plans = [thing.plan for _, _, thing in self._moments if isinstance(thing, ev.PlanMade)]
        workers = [one for plan in plans for one in (plan.prefill, plan.decode) if one is not None]
        return list({one.component_id: one for one in workers}.values())

    def events(self) -> tuple[StoryEvent, ...]:
        """Return all events in order."""
        events = [*self._gateway_events, *self._moment_events()]
        if self.error is not None:
            events.append(StoryEvent(at_ms=self._at(self.ended_s), what="failed", words=described(self.error)))
        return tuple(sorted(events, key=lambda one: one.at_ms))

    def _at(self, now: float) -> float:
        return _ms(now - self.admitted.arrived)

    def _add_event(self, what: str, now: float, **fields: Any) -> None:
        self._gateway_events.append(StoryEvent(at_ms=self._at(now), what=what, **fields))

    def _add_moment(self, now: float, index: int | None, thing: Event | Action) -> None:
        if len(self._moments) < MAX_MOMENTS:
            self._moments.append((now, index, thing))

    def _moment_events(self) -> Iterator[StoryEvent]:
        # An answer's events belong to its latest plan, by default the first answer's.
        plans: dict[int, RequestPlan] = {}
        for now, index, thing in self._moments:
            answer = index or 0
            plan = getattr(thing, "plan", None) or plans.get(answer) or plans.get(0)
            if plan is not None:
                plans[answer] = plan
            if type(thing) in _EVENT_NAMES:
                yield _event(self._at(now), answer, thing, plan)


def described(error: PillionError) -> str:
    """Return an error as "Kind: message". A client error's message is omitted, because it may quote the request."""
    text = "the request was wrong" if isinstance(error, InvalidRequest) else error.message
    return f"{type(error).__name__}: {text}"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _figures_of(message: Any, *names: str) -> dict[str, float]:
    return {} if message is None else {name: float(getattr(message, name)) for name in names}


def _event(at_ms: float, answer: int, thing: Event | Action, plan: RequestPlan | None) -> StoryEvent:
    """Convert an event or action of ``answer``, under ``plan``, to a bundle's event."""
    (what, whose), worker = _EVENT_NAMES[type(thing)], ""
    if plan is not None:
        prefill = "" if plan.prefill is None else plan.prefill.component_id
        worker = {"decode": plan.decode.component_id, "prefill": prefill, "node": plan.node_id}.get(whose, "")
    size = 0 if plan is None else plan.block_size
    tokens, words, figures = 0, "", dict[str, float]()
    match thing:
        case ev.PlanMade() | ev.RunPrefill() | ev.SubmitDecode():
            tokens, words, figures = thing.plan.split_tokens, thing.plan.reason, _prices(thing.plan)
        case ev.TicketGranted() | ev.TicketAdopted():
            tokens = thing.pinned_blocks * size
        case ev.Fetch():
            tokens, words = thing.wanted.blocks * size, ", ".join(thing.wanted.source_node_ids)
            figures = {"expected_ms": _ms(thing.plan.split_decision.route.fetch_s)}
        case ev.BlocksFetched():
            tokens = thing.blocks * size
        case ev.ChunkAcked():
            tokens, figures = thing.ack.end_tokens, _figures_of(thing.ack, "queue_ms", "compute_ms")
        case ev.PrefillEnded():
            tokens = thing.end_tokens
        case ev.TokensSampled():
            figures = _figures_of(thing.timings, "queue_ms", "tail_tokens", "tail_steps")
        case ev.StillQueued():
            what, figures = what if thing.position else "begun", _figures_of(thing, "position")
        case ev.AttemptLoss():
            worker, words, figures = thing.killed or worker, described(thing.error), _figures_of(thing, "retryable")
        case ev.LookUp():
            words, figures = ", ".join(sorted(thing.avoid)), _figures_of(thing, "after_ms")
    return StoryEvent(
        at_ms=at_ms,
        what=what,
        attempt=getattr(thing, "attempt", 0),
        answer=answer,
        worker=worker,
        tokens=tokens,
        words=words,
        figures=figures,
        weighed=_weighed(thing.plan) if isinstance(thing, ev.PlanMade) else (),
    )


def _prices(plan: RequestPlan) -> dict[str, float]:
    decision, cached = plan.split_decision, plan.cached_tokens
    expected_s, alone_s = (decision.price_s(cached, split) for split in (plan.split_tokens, cached))
    line = _figures_of(plan.decode, "running_requests", "queued_tokens")
    return {"cached_tokens": cached, "expected_ms": _ms(expected_s), "alone_ms": _ms(alone_s), **line}


def _weighed(plan: RequestPlan) -> tuple[WeighedRoute, ...]:
    decision, size = plan.split_decision, plan.block_size
    return tuple(
        WeighedRoute(
            decode=route.decode.component.component_id,
            prefill="" if route.prefill is None else route.prefill.component.component_id,
            price_ms=_ms(route.price_s),
            cached_tokens=route.cached_blocks * size,
            fetch_ms=_ms(route.fetch_s),
            fetched="" if route.fetched is Fetched.NOTHING else route.fetched.name.lower(),
            chosen=route is decision.route,
        )
        for route in decision.compared
    )
