"""Collects the story of one request: what happened to it, and when. Sans-IO (I9): times are the caller's.

    begun --waits--> turn --note, for each event of the request's machine and the actions that it caused--> ended

What is collected are the machine's own values. They are put into a bundle's words once the request has ended, and only
where it is recorded: ``what`` is then one of these.

    arrived, ready, waits, turn                  the gateway's edge; ``ready`` says how long the grammar took
    planned, retry, plan_lost                    a plan with the routes that were weighed; a further attempt
    memory, ticket, ticket_lost                  the KV node's line for memory, and what the node has pinned
    fetch, fetched                               blocks of other nodes and lower tiers
    prefill, chunk, prefilled, prefill_lost      the range of a prefill worker
    submitted, adopted, in_line, begun           the decode worker, until a step computes the prompt's rest
    first_token, decode_lost, went_on            an answer's stream, which goes on after a loss
    finished, stopped                            its end, by itself or by a stop string
    cancelled, deadline, silent, failed          why nothing more came
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
from pillion.records.bundle import GAP_BOUNDS_MS, Reason, StoryEvent, TokenTimes, WeighedRoute
from pillion.types import Timings, Usage
from pillion.v1.decode_pb2 import DecodeTimings
from pillion.wire.registry import ComponentRecord

# Of a request that moves and waits without end, so many events are kept.
MAX_MOMENTS = 4096

_GAP_BOUNDS_S = tuple(bound / 1000 for bound in GAP_BOUNDS_MS)
# These actions begin something that takes time; what ends it is an event.
_BEGINNINGS = (ev.LookUp, ev.OpenTicket, ev.Fetch, ev.RunPrefill, ev.SubmitDecode)
_NAMES: Mapping[type, str] = {
    ev.PlanFailed: "plan_lost",
    ev.TicketLost: "ticket_lost",
    ev.PrefillLost: "prefill_lost",
    ev.DecodeLost: "decode_lost",
    ev.PrefillEnded: "prefilled",
    ev.DecodeFinished: "finished",
    ev.StopStringFound: "stopped",
    ev.RequestCancelled: "cancelled",
    ev.DeadlinePassed: "deadline",
    ev.AttemptSilent: "silent",
}


@dataclass(slots=True)
class AnswerLog:
    """Gathers the tokens of one answer, and when they came, in monotonic seconds; ``first_s`` is 0.0 before the first.
    The stream is ``lost`` until it goes on elsewhere."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[int] = field(default_factory=lambda: [0] * (len(_GAP_BOUNDS_S) + 1))
    first_s: float = 0.0
    last_s: float = 0.0
    longest_s: float = 0.0
    longest_at: int = 0
    lost: bool = False
    finish_reason: str = ""
    timings: DecodeTimings | None = None

    def came(self, emitted: ev.Emit, now: float) -> None:
        """Notes tokens that came together."""
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
        """Returns when the tokens came, since the request's arrival; None where none did."""
        if not self.first_s:
            return None
        return TokenTimes(
            first_ms=_ms(self.first_s - arrived_s),
            last_ms=_ms(self.last_s - arrived_s),
            longest_gap_ms=_ms(self.longest_s),
            longest_gap_at=self.longest_at,
            gaps=tuple(self.gaps),
        )


class Story:
    """Collects what happens to one request, in the event loop; from ``ended`` on it changes no more, and any thread may
    read it.

    Args:
        story_id: the id of the request's bundle.
        tenant: whose request it is.
        weights: how the model's weights are kept.
        answers: number of answers that are generated.
        ready_s: when it was ready to wait for its turn.
        chosen: why it is recorded, however it ends; None where that depends on its end.
        on_end: called once, when the request has ended.

    Attributes:
        error: why the request failed; None where it did not.
        ended_s: when it ended.
        usage, timings: what it took; without timings it never had its turn.
    """

    def __init__(
        self,
        story_id: str,
        admitted: AdmittedRequest,
        tenant: str,
        weights: str,
        answers: int,
        ready_s: float,
        chosen: Reason | None,
        on_end: Callable[[Story], None],
    ) -> None:
        self.id = story_id
        self.admitted = admitted
        self.tenant = tenant
        self.weights = weights
        self.chosen = chosen
        self.answers = [AnswerLog() for _ in range(answers)]
        for answer, before in zip(self.answers, admitted.resume.answers if admitted.resume else (), strict=False):
            answer.token_ids += before.token_ids
        self.error: PillionError | None = None
        self.ended_s = 0.0
        self.usage = Usage(len(admitted.own_prompt), 0, 0)
        self.timings: Timings | None = None
        self._on_end = on_end
        self._edge = [StoryEvent(at_ms=0.0, what="arrived")]
        self._tell("ready", ready_s, figures={"grammar_ms": _ms(admitted.grammar_s)} if admitted.grammar else {})
        # A moment has the time, the answer's index (None: the request's), and what happened or was begun.
        self._moments: list[tuple[float, int | None, Event | Action]] = []

    def waits(self, now: float, running: int, waiting: Mapping[str, int]) -> None:
        """Notes that the request has to wait for its turn: so many answers are at the workers, and so many requests of
        each tenant are in line, itself included."""
        before = dict(waiting) | {self.tenant: waiting.get(self.tenant, 1) - 1}
        words = ", ".join(f"{count} of tenant {name}" for name, count in before.items() if name and count)
        self._tell("waits", now, words=words, figures={"running": running, "waiting": sum(before.values())})

    def turn(self, now: float) -> None:
        """Notes that the request may go to the workers."""
        self._tell("turn", now)

    def note(self, index: int | None, event: Event, actions: Sequence[AnswerAction], now: float) -> None:
        """Notes an event of an answer (None: of all answers), and the actions that it caused."""
        if self.ended_s:
            return
        if isinstance(event, ev.TokensSampled):
            if event.timings is not None and index is not None:
                self.answers[index].timings = event.timings
        else:
            self._keep(now, index, event)
            if isinstance(event, ev.DecodeLost) and index is not None:
                self.answers[index].lost = bool(self.answers[index].first_s)
        for answer, action in actions:
            if isinstance(action, ev.Emit):
                # Nearly all actions are Emit, so it is tested first.
                log = self.answers[answer]
                log.came(action, now)
                if log.lost:
                    log.lost = False
                    self._keep(now, answer, action)
            elif isinstance(action, ev.Finish):
                self.answers[answer].finish_reason = action.reason.value
            elif isinstance(action, ev.Fail):
                self.error = action.error
            elif isinstance(action, _BEGINNINGS):
                self._keep(now, answer, action)
        if isinstance(event, ev.StopStringFound) and index is not None:
            del self.answers[index].token_ids[event.kept_tokens :]

    def ended(
        self,
        now: float,
        usage: Usage | None = None,
        timings: Timings | None = None,
        error: PillionError | None = None,
    ) -> None:
        """Notes the end of the request; ``error`` is why it failed, where no action has told it."""
        self.ended_s, self.timings = now, timings
        self.usage = usage or self.usage
        self.error = error or self.error
        self._on_end(self)

    @property
    def first_token_s(self) -> float:
        """Gives the time of the first token of any answer, 0.0 where none came."""
        return min((one.first_s for one in self.answers if one.first_s), default=0.0)

    @property
    def longest_wait_s(self) -> float:
        """Gives the longest time for which the client waited for a token: the first one, or a later one."""
        first_s = (self.first_token_s or self.ended_s) - self.admitted.arrived
        return max(first_s, *(one.longest_s for one in self.answers))

    def workers(self) -> list[ComponentRecord]:
        """Returns the workers of all plans, each once."""
        plans = [thing.plan for _, _, thing in self._moments if isinstance(thing, ev.PlanMade)]
        found = [one for plan in plans for one in (plan.prefill, plan.decode) if one is not None]
        return list({one.component_id: one for one in found}.values())

    def events(self) -> tuple[StoryEvent, ...]:
        """Tells everything in order."""
        told = [*self._edge, *self._told()]
        if self.error is not None:
            told.append(StoryEvent(at_ms=self._at(self.ended_s), what="failed", words=described(self.error)))
        return tuple(sorted(told, key=lambda one: one.at_ms))

    def _at(self, now: float) -> float:
        return _ms(now - self.admitted.arrived)

    def _tell(self, what: str, now: float, **fields: Any) -> None:
        self._edge.append(StoryEvent(at_ms=self._at(now), what=what, **fields))

    def _keep(self, now: float, index: int | None, thing: Event | Action) -> None:
        if len(self._moments) < MAX_MOMENTS:
            self._moments.append((now, index, thing))

    def _told(self) -> Iterator[StoryEvent]:
        # Each answer's events belong to its latest plan; those that follow the first answer have its plan.
        plans: dict[int, RequestPlan] = {}
        for now, index, thing in self._moments:
            answer = index or 0
            plan = getattr(thing, "plan", None) or plans.get(answer) or plans.get(0)
            if plan is not None:
                plans[answer] = plan
            fields = _fields(thing, plan)
            if fields is not None:
                attempt = getattr(thing, "attempt", 0)
                yield StoryEvent(at_ms=self._at(now), answer=answer, attempt=attempt, **fields)
        for answer, log in enumerate(self.answers):
            if log.first_s:
                worker = plans[answer if answer in plans else 0].decode.component_id if plans else ""
                figures = _timing_figures(log.timings)
                yield StoryEvent(
                    at_ms=self._at(log.first_s), what="first_token", answer=answer, worker=worker, figures=figures
                )


def described(error: PillionError) -> str:
    """Returns an error as a bundle has it. What a client was told of its mistake may have words of its request."""
    text = "the request was wrong" if isinstance(error, InvalidRequest) else error.message
    return f"{type(error).__name__}: {text}"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _timing_figures(timings: DecodeTimings | None) -> dict[str, float]:
    names = ("tail_tokens", "tail_steps", "queue_ms", "preemptions")
    return {} if timings is None else {name: getattr(timings, name) for name in names}


def _fields(thing: Event | Action, plan: RequestPlan | None) -> dict[str, Any] | None:
    """Returns the fields of the event of a bundle that tells ``thing``, which belongs to ``plan``; None where it tells
    nothing."""
    match thing:
        case ev.LookUp():
            avoided = ", ".join(sorted(thing.avoid))
            words = f"without {avoided}" if avoided else ""
            return {"what": "retry", "words": words, "figures": {"after_ms": thing.after_ms}}
        case ev.StillQueued(position=position):
            return {"what": "in_line", "figures": {"position": position}} if position else {"what": "begun"}
        case ev.AttemptLoss():
            figures = {"retryable": float(thing.retryable)}
            worker = thing.killed or _lost_worker(thing, plan)
            return {"what": _NAMES[type(thing)], "worker": worker, "words": described(thing.error), "figures": figures}
    if plan is not None and (found := _planned_fields(thing, plan)) is not None:
        return found
    name = _NAMES.get(type(thing))
    return None if name is None else {"what": name}


def _planned_fields(thing: Event | Action, plan: RequestPlan) -> dict[str, Any] | None:
    """Returns what :func:`_fields` does, for what belongs to a plan."""
    size, decode = plan.block_size, plan.decode.component_id
    prefill = "" if plan.prefill is None else plan.prefill.component_id
    match thing:
        case ev.PlanMade():
            return _plan_fields("planned", plan) | {"weighed": _weighed(plan)}
        case ev.OpenTicket():
            return {"what": "memory", "worker": plan.node_id}
        case ev.TicketGranted():
            return {"what": "ticket", "worker": plan.node_id, "tokens": thing.pinned_blocks * size}
        case ev.Fetch(wanted=wanted):
            figures = {"expected_ms": _ms(plan.split_decision.route.fetch_s)}
            words = ", ".join(wanted.source_node_ids)
            fetch = {"what": "fetch", "worker": plan.node_id, "tokens": wanted.blocks * size}
            return {**fetch, "words": words, "figures": figures}
        case ev.BlocksFetched():
            return {"what": "fetched", "worker": plan.node_id, "tokens": thing.blocks * size}
        case ev.RunPrefill():
            return _plan_fields("prefill", plan) | {"worker": prefill}
        case ev.ChunkAcked(ack=ack):
            figures = {"queue_ms": ack.queue_ms, "compute_ms": ack.compute_ms}
            return {"what": "chunk", "worker": prefill, "tokens": ack.end_tokens, "figures": figures}
        case ev.PrefillEnded():
            return {"what": "prefilled", "worker": prefill, "tokens": thing.end_tokens}
        case ev.SubmitDecode():
            return _plan_fields("submitted", plan)
        case ev.TicketAdopted():
            return {"what": "adopted", "worker": decode, "tokens": thing.pinned_blocks * size}
        case ev.Emit():
            return {"what": "went_on", "worker": decode}
    return None


def _plan_fields(what: str, plan: RequestPlan) -> dict[str, Any]:
    decision, cached, split = plan.split_decision, plan.cached_tokens, plan.split_tokens
    figures = {
        "prompt_tokens": plan.prompt_tokens,
        "cached_tokens": cached,
        "expected_ms": _ms(decision.price_s(cached, split)),
        "alone_ms": _ms(decision.price_s(cached, cached)),
    }
    worker = plan.decode.component_id
    return {"what": what, "worker": worker, "tokens": split, "words": plan.reason, "figures": figures}


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
        for route in decision.weighed
    )


def _lost_worker(loss: ev.AttemptLoss, plan: RequestPlan | None) -> str:
    """Names the component at which an attempt was lost."""
    match loss:
        case ev.TicketLost() if plan is not None:
            return plan.node_id
        case ev.PrefillLost() if plan is not None and plan.prefill is not None:
            return plan.prefill.component_id
        case ev.DecodeLost() if plan is not None:
            return plan.decode.component_id
    return ""
