"""State machines of one answer to a request, and of several answers to one prompt. Sans-IO (I9): they get events with
the time, and return actions.

                 +------------------- attempt + 1, tokens = prompt + emitted -------------------+
                 |    +-PlanMade-> OPENING -TicketAdopted------------------------------+        |
                 |    |              | less is pinned than planned                     |        |
                 v    |              v                 PrefillEnded, or the stream     v        |
    start -> PLANNING -PlanMade-> PINNING -TicketGranted-> PREFILLING -tokens first-> DECODING  |
               |  ^                |  |                       ^   |                    |  |     |
               |  | no live        |  +-> FETCHING            |   |                    |  |     |
               |  | worker yet     |        +--BlocksFetched--+   |                    |  |     |
               +--+ (bounded)      | TicketLost          PrefillLost |         DecodeLost |  |     |
                                   +------------------------------+--------------------+--|-----+
                                                                                          |
                  DecodeFinished, StopStringFound -> Finish -+                            |
    any state:    RequestCancelled, DeadlinePassed,          +--> DONE <------------------+
                  attempts used up -> Fail ------------------+

    each further answer to a request for several:
    start -> FOLLOWING -own TokensSampled, or LeaderStarted-> DECODING, and on as above
               |   ^   -LeaderStarted, but its stream is lost already-> PLANNING, attempt + 1
               +---+ LeaderSubmitted, LeaderRetried: the first answer's attempts, until it has a token

A further answer (:class:`ParallelSamples`) has no ticket and no calls while it follows the first answer, the leader:
its stream starts with the leader's submit, and until the leader's first token, losses are handled by the leader. From
then on the answer is replayed by itself, with its own attempts.

OPENING is entered if the plan neither splits nor fetches: the decode worker opens the ticket itself, in the node's
queue for memory. If at least the planned blocks are cached at the node (I3), the worker keeps the ticket and computes
the rest, even if the plan would be split now. If fewer are, the worker gets no ticket, and the gateway opens one in
PINNING, in the same attempt, since it may fetch or split. This ticket precedes new prompts in the queue, since the
request has waited in it before.

FETCHING is entered if the index lists more of the prompt, on any node, than the ticket has pinned. A fetch never fails:
it may return fewer blocks, and the rest is computed (I1). Likewise a prefill range that ends early does not fail the
attempt.

A prefill range on the decode worker's own node is sent together with the submit: the decode worker waits at the node
for the range's last block, which saves a message by the gateway. Its stream may then send tokens before the range's
last acknowledgement, which shows that all chunks are committed. A prefill range on another node ends before the submit,
because not all of its blocks may arrive. If the decode worker is lost meanwhile, the range continues, and the next
attempt uses its blocks.

Attempts without progress are limited in number, except those that fail because a component is expected to return: then
the time in PLANNING is limited, counted from the last token. A request fails if two workers in a row died in a step
with it, without progress in between (``MAX_WORKERS_KILLED``).

A plan that fetches but has no chunks skips PREFILLING. Events of an older attempt are dropped (I6), except a granted
ticket, which is released. The gateway's ticket is released when the decode worker has adopted it, or when the attempt
ends before. The end of an attempt cancels its calls and its stream, including a ticket that the worker opens (I8).
Every answer has one terminal action, except that a ``Fail`` ends the other answers without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum
from typing import ClassVar

from msgspec import structs

from pillion.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    LethalRequest,
    NotFound,
    Overloaded,
    PillionError,
    Unavailable,
)
from pillion.gateway.planning.planner import RequestPlan, plan_fetch, replan, shorten
from pillion.gateway.request import events as ev
from pillion.gateway.request.admitted_request import AdmittedRequest
from pillion.gateway.request.events import Action, Event, TicketHold
from pillion.types import FinishReason, Timings, Usage
from pillion.v1.decode_pb2 import DecodeTimings

# Delay of the second attempt, quadrupled for each further one. Known losses are excluded by the planner at once; the
# delay is for undetected ones.
FIRST_RETRY_DELAY_MS = 20
MAX_RETRY_DELAY_MS = 500
COMPONENT_POLL_MS = 100
# Number of workers that died in a step with a request, without progress in between, at which it fails.
MAX_WORKERS_KILLED = 2
# Grace period for the last acknowledgement of a prefill range after its answer has ended.
LAST_ACK_WAIT_MS = 1000


class RequestState(Enum):
    """State of a RequestMachine; see the module's docstring."""

    FOLLOWING = "following"
    PLANNING = "planning"
    OPENING = "opening"
    PINNING = "pinning"
    FETCHING = "fetching"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


_UNFINISHED = frozenset(RequestState) - {RequestState.DONE}


@dataclass(eq=False)
class RequestMachine:
    """State machine of answer ``index`` to a request. Times (``now``) are monotonic seconds.

    Answers after the first get LeaderSubmitted, LeaderRetried and LeaderStarted about its progress. An answer that
    another gateway began continues after its tokens. ``scored_tokens`` is the number of prompt tokens, after the first,
    whose log probabilities were emitted or are not requested.
    """

    _admitted: AdmittedRequest
    index: InitVar[int] = 0
    scored_tokens: int = 0
    state: RequestState = RequestState.PLANNING
    attempt: int = 1
    emitted: list[int] = field(default_factory=list)
    plan: RequestPlan | None = None
    hold: TicketHold | None = None
    # Number of attempts since the last progress (tokens or scores), except those that failed because a component was
    # lost that is expected to return. It is limited; a stream that makes progress may move any number of times.
    _attempts_without_progress: int = 1
    # For the back-off.
    _losses_since_progress: int = 0
    _consecutive_ticket_losses: int = 0
    _avoid: frozenset[str] = frozenset()
    _killed: tuple[str, ...] = ()
    # Wait for lost components: start of the current wait, and earlier waits since the last progress. The total is
    # limited.
    _wait_began_s: float = 0.0
    _waited_s: float = 0.0
    _prefill_open: bool = False
    _stream_open: bool = False
    # Loss of the stream, handled later: in FOLLOWING when the leader has started, in PREFILLING when the range ends.
    _deferred_loss: ev.DecodeLost | None = None
    held: HeldKv = field(init=False)
    _timeline: _Timeline = field(init=False)

    def __post_init__(self, index: int) -> None:
        admitted, resume = self._admitted, self._admitted.resume
        # Cached, since they are compared for every token.
        self._max_tokens, self._stop_ids = admitted.max_tokens, frozenset(admitted.sampling.stop_token_ids)
        self._timeline, self.held = _Timeline(admitted.arrived), HeldKv()
        last = len(self.prompt) - 1
        scores = index == 0 and admitted.reads_prompt_rows
        self.scored_tokens = min(0 if resume is None else resume.scored_tokens, last) if scores else last
        if resume is not None:
            so_far = resume.answers[index]
            self.emitted.extend(so_far.token_ids)
            self._timeline.has_cached_tokens, self._timeline.cached_tokens = True, resume.origin.cached_tokens
            if so_far.finish_reason is not None:
                self.state = RequestState.DONE
        elif index:
            self.state = RequestState.FOLLOWING

    @property
    def prompt(self) -> tuple[int, ...]:
        return self._admitted.prompt

    def start(self) -> list[Action]:
        """Return the first actions: a look-up; none for a follower; Finish for a resumed answer that is complete."""
        if self.state is not RequestState.PLANNING:
            return []
        reason = self._finished_reason()
        return [self._look_up(0)] if reason is None else self._end(ev.Finish(reason), self._timeline.arrived)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Return the actions for ``event``, in order; none for an event of an older attempt."""
        if isinstance(event, ev.TokensSampled) and self.state is RequestState.DECODING:
            return self._decoding(event, now) if event.attempt == self.attempt else []
        if isinstance(event, ev.TicketGranted):
            return self._granted(event, now)
        handler = self._HANDLERS.get((self.state, type(event)))
        late = isinstance(event, ev.AttemptEvent) and event.attempt != self.attempt
        return [] if handler is None or late else handler(self, event, now)

    def usage(self) -> Usage:
        """Return the token counts so far."""
        drafted, accepted = self._timeline.draft_tokens
        usage = Usage(len(self.prompt), self._timeline.cached_tokens, len(self.emitted))
        return replace(usage, guessed_tokens=drafted, accepted_tokens=accepted) if drafted else usage

    def timings(self, now: float) -> Timings:
        """Return the timings so far. Cached, prefilled and tail tokens add up to the prompt."""
        return self._timeline.timings(len(self.prompt), self.plan, self.attempt, now)

    def _stopped(self, event: ev.RequestCancelled | ev.DeadlinePassed | ev.StopStringFound, now: float) -> list[Action]:
        if isinstance(event, ev.RequestCancelled):
            return self._end(ev.Fail(Cancelled("the client went away")), now)
        if isinstance(event, ev.DeadlinePassed):
            return self._end(ev.Fail(DeadlineExceeded("the request's deadline passed")), now)
        del self.emitted[event.kept_tokens :]
        return self._end(ev.Finish(FinishReason.STOP), now)

    def _follow(self, event: ev.LeaderSubmitted | ev.LeaderRetried | ev.LeaderStarted, now: float) -> list[Action]:
        if isinstance(event, ev.LeaderStarted):
            if not self._max_tokens:
                return self._end(ev.Finish(FinishReason.LENGTH), now)
            self.state = RequestState.DECODING
            self.held.begin_following(self.plan, now)
            return [] if self._deferred_loss is None else self._decoding(self._deferred_loss, now)
        cancel: list[Action] = [] if self.plan is None else [ev.CancelDecode(self.attempt)]
        self.attempt, self._deferred_loss = event.attempt, None
        self.plan = event.plan if isinstance(event, ev.LeaderSubmitted) else None
        return cancel

    def _following(self, event: ev.TokensSampled | ev.DecodeFinished | ev.DecodeLost, now: float) -> list[Action]:
        if self.plan is None:
            return []
        if isinstance(event, ev.DecodeLost):
            # Wait for the next event, which shows whether the leader's stream is lost too and will be retried.
            self._deferred_loss = event
            return []
        self.state = RequestState.DECODING
        self.held.begin_following(self.plan, now)
        return self._decoding(event, now)

    def _unplanned(self, event: ev.PlanFailed, now: float) -> list[Action]:
        self._count_wait(now)
        if self.attempt > 1 and self._waited_s < event.patience_s:
            return [self._look_up(COMPONENT_POLL_MS)]
        return self._retry_or_fail(event, now)

    def _planned(self, event: ev.PlanMade, now: float) -> list[Action]:
        self.plan = event.plan
        self._count_wait(now)
        if event.plan.decode_only:
            self.state = RequestState.OPENING
            return [self._submit()]
        self.state = RequestState.PINNING
        return [ev.OpenTicket(self.attempt, event.plan, resume=self.attempt > 1)]

    def _count_wait(self, now: float) -> None:
        """Add the time since the last look-up to the wait for lost components."""
        if self.attempt > 1:
            self._waited_s += now - self._wait_began_s
        self._wait_began_s = now

    def _lost_in_opening(self, event: ev.DecodeLost, now: float) -> list[Action]:
        """Handle the loss of a stream in OPENING. NotFound: fewer blocks are pinned than planned, so the gateway opens
        the ticket, in the same attempt."""
        if not isinstance(event.error, NotFound):
            return self._stream_lost(event, now, stream_over=True)
        self.state, self._stream_open = RequestState.PINNING, False
        return [ev.OpenTicket(self.attempt, self._plan(), resume=True)]

    def _opened(self, event: ev.TicketAdopted, now: float) -> list[Action]:
        self.state = RequestState.DECODING
        self._memory_granted(now)
        plan = replan(self._plan(), event.pinned_blocks)
        late = "; no longer split: the decode worker already has the ticket" if plan.chunks else ""
        self.plan = replace(plan, split_tokens=plan.cached_tokens, chunks=(), reason=plan.reason + late)
        self._timeline.set_cached(self.plan)
        self.held.settle(self.plan)
        return []

    def _tokens_in_opening(self, event: ev.AttemptEvent, now: float) -> list[Action]:
        """Handle a stream's first message if TicketAdopted has not come: the ticket must have been adopted."""
        self._opened(ev.TicketAdopted(self.attempt, self._plan().cached_blocks), now)
        return self.handle(event, now)

    def _memory_granted(self, now: float) -> None:
        self._consecutive_ticket_losses = 0
        self.held.begin(now)
        if self._timeline.admitted is None:
            self._timeline.admitted = now

    def _ticket_lost(self, event: ev.TicketLost, now: float) -> list[Action]:
        """Handle a lost ticket. A restarted KV node grants tickets only once one of its workers has attached again,
        which may take as long as a step."""
        self._avoid |= {self._plan().node_id}
        if self.attempt == 1 or not self._waits_for(event):
            return self._retry_or_fail(event, now)
        self.state, self._wait_began_s = RequestState.PLANNING, now
        # Back off, since all requests that lost their tickets with the node retry.
        self._consecutive_ticket_losses += 1
        return [
            self._look_up(min(MAX_RETRY_DELAY_MS, COMPONENT_POLL_MS * 2 ** min(self._consecutive_ticket_losses - 1, 8)))
        ]

    def _waits_for(self, loss: ev.AttemptLoss) -> bool:
        """Return whether the failed component is expected to return within the remaining wait."""
        return loss.retryable and self._waited_s < loss.patience_s

    def _granted(self, event: ev.TicketGranted, now: float) -> list[Action]:
        if event.attempt != self.attempt or self.state is not RequestState.PINNING:
            return [ev.ReleaseTicket(event.hold)]
        self.hold = event.hold
        self._memory_granted(now)
        self.plan = replan(self._plan(), event.pinned_blocks)
        pinned, limit = self.plan.cached_blocks, self.plan.limit_blocks
        wanted = plan_fetch(self.plan.sources, self.plan.node_id, pinned, limit, self.plan.split_decision)
        if wanted is None:
            return self._start_compute(pinned, now)
        self.state = RequestState.FETCHING
        return [ev.Fetch(self.attempt, self.plan, event.hold, wanted)]

    def _fetched(self, event: ev.BlocksFetched, now: float) -> list[Action]:
        return self._start_compute(event.blocks, now)

    def _start_compute(self, blocks: int, now: float) -> list[Action]:
        """Replan the attempt with the first ``blocks`` blocks of the prompt cached, or with the pinned blocks if these
        are more. Return the actions that start the prefill range, the decode stream, or both."""
        assert self.hold is not None
        self.plan = replan(self._plan(), max(blocks, self._plan().cached_blocks))
        self._timeline.set_cached(self.plan)
        self.held.settle(self.plan)
        if not self.plan.chunks:
            self.state = RequestState.DECODING
            return [self._submit()]
        self.state = RequestState.PREFILLING
        self._timeline.prefill_sent, self._timeline.chunks_before = now, self._timeline.chunks
        self._prefill_open = True
        run_prefill = ev.RunPrefill(self.attempt, self.plan, self.hold)
        if self.plan.remote:
            return [run_prefill]
        return [run_prefill, self._submit(self.plan.split_tokens // self.plan.block_size)]

    def _prefilling(self, event: ev.ChunkAcked | ev.PrefillEnded | ev.PrefillLost, now: float) -> list[Action]:
        if not self._prefill_open:
            return []
        plan, limit = self._plan(), self._prefilled_limit()
        self._prefill_open = isinstance(event, ev.ChunkAcked)
        if self.state is not RequestState.PREFILLING:
            # The stream has started, so all chunks are committed, even if the call failed.
            return []
        if isinstance(event, ev.ChunkAcked):
            self._timeline.ack(min(event.ack.end_tokens, limit), now)
            return []
        if isinstance(event, ev.PrefillEnded) and self._stream_open and event.end_tokens < plan.split_tokens:
            # The decode worker waits for blocks that will never come.
            event = ev.PrefillLost(event.attempt, Unavailable("the prefill range ended early"), True)
        if isinstance(event, ev.PrefillEnded):
            self._timeline.reach(min(event.end_tokens, limit))
            if self._deferred_loss is not None:
                return self._retry_or_fail(self._deferred_loss, now)
            self.state = RequestState.DECODING
            if self._stream_open:
                return []
            self.plan = shorten(plan, event.end_tokens)
            return [self._submit()]
        if plan.prefill is not None:
            self._avoid |= {plan.prefill.component_id}
        return self._retry_or_fail(event, now)

    def _tokens_beside_prefill(self, event: ev.AttemptEvent, now: float) -> list[Action]:
        """Handle a stream's first message if it comes before the prefill range's last acknowledgement."""
        if not self._stream_open:
            return []
        self._timeline.complete(self._plan(), self._prefilled_limit(), now)
        self.state = RequestState.DECODING
        return self.handle(event, now)

    def _lost_beside_prefill(self, event: ev.DecodeLost, now: float) -> list[Action]:
        """Handle the loss of a stream whose prefill range runs. The range continues, since the next attempt needs its
        blocks."""
        if not self._stream_open:
            return []
        if not event.retryable:
            return self._decoding(event, now)
        self._avoid |= {self._plan().decode.component_id}
        self._stream_open, self._deferred_loss = False, event
        return []

    def _decoding(self, event: ev.TokensSampled | ev.DecodeFinished | ev.DecodeLost, now: float) -> list[Action]:
        if isinstance(event, ev.TokensSampled):
            self._timeline.decode = event.timings or self._timeline.decode
            left = self._max_tokens - len(self.emitted)
            ids = event.token_ids[:left]
            if not ids:
                return []
            self.emitted.extend(ids)
            self._record_progress()
            if self._timeline.first_token is None:
                self._timeline.first_token = now
            return [ev.Emit(ids, event.logprobs[:left])]
        if isinstance(event, ev.DecodeFinished):
            self._timeline.decode = event.timings or self._timeline.decode
            return self._end(ev.Finish(event.reason, event.vector), now, stream_over=True)
        return self._stream_lost(event, now, stream_over=True)

    def _adopted(self, event: ev.TicketAdopted, now: float) -> list[Action]:
        return self._release_ticket()

    def _scored(self, event: ev.PromptScored, now: float) -> list[Action]:
        logprobs = event.logprobs[: len(self.prompt) - 1 - self.scored_tokens]
        self.scored_tokens += len(logprobs)
        if logprobs:
            self._record_progress()
        return [ev.EmitScores(logprobs)] if logprobs else []

    def _record_progress(self) -> None:
        """Record progress, which resets all limits on losses."""
        self._attempts_without_progress = self._losses_since_progress = 0
        self._waited_s, self._killed = 0.0, ()

    def _stream_lost(self, loss: ev.DecodeLost, now: float, stream_over: bool) -> list[Action]:
        reason = self._finished_reason()
        if reason is not None:
            return self._end(ev.Finish(reason), now, stream_over)
        self._avoid |= {self._plan().decode.component_id}
        return self._retry_or_fail(loss, now, stream_over)

    def _silent(self, event: ev.AttemptSilent, now: float) -> list[Action]:
        error = Unavailable(f"no progress report while {self.state.value}")
        loss = ev.DecodeLost(self.attempt, error, retryable=True)
        if self.state in (RequestState.OPENING, RequestState.DECODING):
            return self._stream_lost(loss, now, stream_over=False)
        if self.state is RequestState.PREFILLING and (worker := self._plan().prefill) is not None:
            self._avoid |= {worker.component_id}
        return self._retry_or_fail(loss, now)

    def tokens(self) -> tuple[int, ...]:
        """Return the tokens that the current attempt starts from: the prompt and the answer so far."""
        return (*self.prompt, *self.emitted) if self.emitted else self.prompt

    def _finished_reason(self) -> FinishReason | None:
        """Return the finish reason if the last emitted token ends the answer, else None. No stop id is sampled before
        min_tokens. An answer with max_tokens 0 ends with its stream, so this returns None."""
        if not self.emitted:
            return None
        if self.emitted[-1] in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.emitted) >= self._max_tokens else None

    def _prefilled_limit(self) -> int:
        """Return the end of the range that counts as prefilled in the timings: within the prompt, without a replay's
        answer tokens, and without the block of the prompt's last token."""
        plan = self._plan()
        return min(plan.split_tokens, (len(self.prompt) - 1) // plan.block_size * plan.block_size)

    def _submit(self, awaited_blocks: int = 0) -> Action:
        self._stream_open = True
        return ev.SubmitDecode(self.attempt, self._plan(), self.hold, awaited_blocks, scored_tokens=self.scored_tokens)

    def _look_up(self, after_ms: int) -> Action:
        unscored_from = self.scored_tokens if self.scored_tokens < len(self.prompt) - 1 else None
        return ev.LookUp(self.attempt, self._avoid, after_ms, unscored_from)

    def _retry_or_fail(self, loss: ev.AttemptLoss, now: float, stream_over: bool = False) -> list[Action]:
        if not loss.retryable:
            return self._end(ev.Fail(loss.error), now, stream_over)
        if loss.killed:
            self._killed += (loss.killed,)
        if len(self._killed) >= MAX_WORKERS_KILLED:
            names = ", ".join(self._killed)
            text = f"two workers were lost in a step with this request ({names}), so it is not retried"
            return self._end(ev.Fail(LethalRequest(text)), now, stream_over)
        waits = self._waits_for(loss)
        # With patience, the wait is limited; without, the number of attempts.
        if not waits and (loss.patience_s or self._attempts_without_progress >= self._admitted.options.max_attempts):
            return self._end(ev.Fail(self._attempts_exhausted(loss)), now, stream_over)
        stops = self._stop_attempt(stream_over, finished=False)
        self._end_held_kv(False, now)
        delay_ms = min(MAX_RETRY_DELAY_MS, FIRST_RETRY_DELAY_MS * 4 ** min(self._losses_since_progress, 8))
        self.attempt += 1
        self._losses_since_progress += 1
        self._attempts_without_progress += not waits
        self._timeline.retry()
        self._deferred_loss = None
        self.state, self._wait_began_s = RequestState.PLANNING, now
        return [*stops, self._look_up(delay_ms)]

    def _attempts_exhausted(self, loss: ev.AttemptLoss) -> PillionError:
        error, how = loss.error, f"after {self._attempts_without_progress} attempts; the last one"
        if loss.patience_s:
            how = f"after {self._waited_s:.0f} s without the components that it needs; the last loss"
        text = f"given up {how}: {error.message}"
        return Overloaded(text, error.retry_after_ms) if isinstance(error, Overloaded) else Unavailable(text)

    def _end(self, terminal: ev.Finish | ev.Fail, now: float, stream_over: bool = False) -> list[Action]:
        stops = self._stop_attempt(stream_over, finished=stream_over and isinstance(terminal, ev.Finish))
        self.state = RequestState.DONE
        self._timeline.ended = now
        self._end_held_kv(isinstance(terminal, ev.Finish), now)
        return [*stops, terminal]

    def _end_held_kv(self, whole: bool, now: float) -> None:
        self.held.end(len(self.prompt) + len(self.emitted), self._timeline.acked_tokens, whole, now)

    def _stop_attempt(self, stream_over: bool, finished: bool) -> list[Action]:
        """Stop the current attempt. ``stream_over`` is True if its stream has ended, ``finished`` if it ended with the
        complete answer."""
        actions: list[Action] = []
        follows = self.state is RequestState.FOLLOWING and self.plan is not None
        if (self._stream_open or self.state is RequestState.DECODING or follows) and not stream_over:
            actions.append(ev.CancelDecode(self.attempt))
        if self._prefill_open and finished:
            # All chunks are computed. Cancelling the call at once would lose the last chunk in the worker's traces.
            actions.append(ev.StopWork(self.attempt, LAST_ACK_WAIT_MS))
        elif self._prefill_open or self.state in (RequestState.PLANNING, RequestState.PINNING, RequestState.FETCHING):
            actions.append(ev.StopWork(self.attempt))
        self._prefill_open = self._stream_open = False
        return [*actions, *self._release_ticket()]

    def _release_ticket(self) -> list[Action]:
        """Release the attempt's ticket. A no-op the second time. A ticket kept after its adoption would pin blocks that
        a preempted stream must free."""
        hold, self.hold = self.hold, None
        return [] if hold is None else [ev.ReleaseTicket(hold)]

    def _plan(self) -> RequestPlan:
        if self.plan is None:
            raise Internal("the request has no plan in this state")
        return self.plan

    _HANDLERS: ClassVar[dict[tuple[RequestState, type[Event]], Callable[..., list[Action]]]] = {
        (state, kind): handler
        for states, handler, kinds in (
            (_UNFINISHED, _stopped, (ev.RequestCancelled, ev.DeadlinePassed, ev.StopStringFound)),
            (_UNFINISHED - {RequestState.FOLLOWING}, _silent, (ev.AttemptSilent,)),
            ({RequestState.FOLLOWING}, _follow, (ev.LeaderSubmitted, ev.LeaderRetried, ev.LeaderStarted)),
            ({RequestState.FOLLOWING}, _following, (ev.TokensSampled, ev.DecodeFinished, ev.DecodeLost)),
            ({RequestState.PLANNING}, _planned, (ev.PlanMade,)),
            ({RequestState.PLANNING}, _unplanned, (ev.PlanFailed,)),
            ({RequestState.OPENING}, _opened, (ev.TicketAdopted,)),
            ({RequestState.OPENING}, _lost_in_opening, (ev.DecodeLost,)),
            ({RequestState.OPENING}, _tokens_in_opening, (ev.TokensSampled, ev.PromptScored, ev.DecodeFinished)),
            ({RequestState.PINNING}, _ticket_lost, (ev.TicketLost,)),
            ({RequestState.FETCHING}, _fetched, (ev.BlocksFetched,)),
            (
                {RequestState.PREFILLING, RequestState.DECODING},
                _prefilling,
                (ev.ChunkAcked, ev.PrefillEnded, ev.PrefillLost),
            ),
            (
                {RequestState.PREFILLING},
                _tokens_beside_prefill,
                (ev.TokensSampled, ev.PromptScored, ev.DecodeFinished, ev.TicketAdopted),
            ),
            ({RequestState.PREFILLING}, _lost_beside_prefill, (ev.DecodeLost,)),
            ({RequestState.DECODING}, _decoding, (ev.TokensSampled, ev.DecodeFinished, ev.DecodeLost)),
            ({RequestState.DECODING}, _adopted, (ev.TicketAdopted,)),
            ({RequestState.DECODING}, _scored, (ev.PromptScored,)),
        )
        for state in states
        for kind in kinds
    }


@dataclass(slots=True, eq=False)
class _Timeline:
    """Times and token counts of one answer, for Timings. Times are monotonic seconds."""

    arrived: float
    admitted: float | None = None
    has_cached_tokens: bool = False
    cached_tokens: int = 0
    acked_tokens: int = 0
    chunks: int = 0
    chunks_before: int = 0
    prefill_sent: float = 0.0
    prefill_ms: float = 0.0
    first_token: float | None = None
    ended: float | None = None
    decode: DecodeTimings | None = None
    draft_tokens_before: tuple[int, int] = (0, 0)

    @property
    def draft_tokens(self) -> tuple[int, int]:
        """Numbers of drafted and of accepted tokens over all attempts, as reported by workers."""
        drafted, accepted = self.draft_tokens_before
        if self.decode is None:
            return drafted, accepted
        return drafted + self.decode.guessed_tokens, accepted + self.decode.accepted_tokens

    def retry(self) -> None:
        """Record the start of a new attempt."""
        self.draft_tokens_before, self.decode = self.draft_tokens, None

    def set_cached(self, plan: RequestPlan) -> None:
        """Record the first attempt's cached tokens; later ones would include what was computed for the request."""
        if not self.has_cached_tokens:
            self.has_cached_tokens = True
            self.cached_tokens = plan.cached_tokens

    def ack(self, end_tokens: int, now: float) -> None:
        """Record an acknowledged chunk; the time since the previous one, or since the range was sent, is prefill
        time."""
        self.chunks += 1
        self.reach(end_tokens)
        self.prefill_ms += (now - self.prefill_sent) * 1000
        self.prefill_sent = now

    def complete(self, plan: RequestPlan, end_tokens: int, now: float) -> None:
        """Record all chunks as acknowledged."""
        self.chunks = self.chunks_before + len(plan.chunks) - 1
        self.ack(end_tokens, now)

    def reach(self, end_tokens: int) -> None:
        """Record that all KV before ``end_tokens`` is at the decode worker's node."""
        self.acked_tokens = max(self.acked_tokens, end_tokens)

    def timings(self, prompt_tokens: int, plan: RequestPlan | None, attempt: int, now: float) -> Timings:
        """Return the timings so far."""
        prefilled = max(0, self.acked_tokens - self.cached_tokens)
        worker = self.decode or DecodeTimings()
        drafted, accepted = self.draft_tokens
        prefill = plan.prefill.component_id if plan and plan.prefill and self.chunks else ""

        def since_arrival_ms(moment: float | None) -> float:
            return ((now if moment is None else moment) - self.arrived) * 1000

        return Timings(
            cached_tokens=self.cached_tokens,
            prefilled_tokens=prefilled,
            prefill_chunks=self.chunks,
            tail_tokens=prompt_tokens - self.cached_tokens - prefilled,
            tail_steps=worker.tail_steps,
            admission_ms=since_arrival_ms(self.admitted),
            prefill_ms=self.prefill_ms,
            decode_queue_ms=worker.queue_ms,
            time_to_first_token_ms=since_arrival_ms(self.first_token),
            total_ms=since_arrival_ms(self.ended),
            replays=attempt - 1,
            preemptions=worker.preemptions,
            prefill_worker=prefill,
            decode_worker=plan.decode.component_id if plan else "",
            plan_reason=plan.reason if plan else "",
            guessed_tokens=drafted,
            accepted_tokens=accepted,
        )


@dataclass(slots=True, eq=False)
class HeldKv:
    """KV computed and used by the attempts of one answer, for its receipt. Times are monotonic seconds.

        memory granted --begin--> plan final --settle--> tokens --end--> the attempt's KV is added

    An attempt uses its prompt's blocks from the grant of memory to its end; its answer's blocks are assumed to be added
    at a constant rate.

    Attributes:
        computed_tokens: computed tokens of the prompt and, in later attempts, of the answer so far.
        byte_s: bytes of KV times the seconds for which they were used.
        token_byte_s: the same for a single token used in all attempts.
    """

    computed_tokens: int = 0
    byte_s: float = 0.0
    token_byte_s: float = 0.0
    _plan: RequestPlan | None = None
    _since_s: float = 0.0
    _shared_tokens: int = 0

    def begin(self, now_s: float) -> None:
        """Record that an attempt's memory was granted."""
        self._since_s = now_s

    def settle(self, plan: RequestPlan) -> None:
        """Record the final plan of an attempt."""
        self._plan, self._shared_tokens = plan, 0

    def begin_following(self, plan: RequestPlan | None, now_s: float) -> None:
        """Record that a follower's stream starts. The leader accounts for the prompt."""
        self._plan, self._since_s = plan, now_s
        self._shared_tokens = 0 if plan is None else plan.prompt_tokens

    def end(self, tokens: int, prefilled_tokens: int, whole: bool, now_s: float) -> None:
        """Add the KV of an attempt that ends with ``tokens`` tokens of prompt and answer, and whose prefill range has
        reached ``prefilled_tokens``. ``whole`` is True if the answer is complete."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        first, last = plan.prompt_tokens - self._shared_tokens, tokens - self._shared_tokens
        if first:
            reached = plan.prompt_tokens if whole or last > first else prefilled_tokens
            self.computed_tokens += max(0, reached - plan.cached_tokens)
        each_byte_s = (now_s - self._since_s) * plan.decode.block_bytes / plan.block_size
        states = plan.states.running * plan.block_size
        self.byte_s += each_byte_s * ((first + last) / 2 + states)
        self.token_byte_s += each_byte_s


AnswerAction = tuple[int, Action]


class ParallelSamples:
    """The machines of one request's answers, by index: actions of the first cause events of the others. Over all calls,
    at most one Fail is returned.

        answer 0, the leader                                         answers 1, 2, ..., which follow
        SubmitDecode, with a sample for each follower           -->  LeaderSubmitted
        LookUp, OpenTicket, before the first token               -->  LeaderRetried
        Emit, its first token                                    -->  LeaderStarted

    There is one plan, one ticket and one prefill: the leader's. From the leader's first token on, each answer is
    replayed on its own, with the prompt and its own tokens. An answer that fails for good fails the request and cancels
    the others.
    """

    def __init__(self, machines: Sequence[RequestMachine]) -> None:
        self.machines = tuple(machines)

    def start(self) -> list[AnswerAction]:
        """Return the first actions: the leader's look-up."""
        return [(index, action) for index, machine in enumerate(self.machines) for action in machine.start()]

    def handle(self, index: int, event: Event, now: float) -> list[AnswerAction]:
        """Return the actions for an event of one answer."""
        if len(self.machines) == 1:
            # Fast path: most requests have one answer, and this runs for every token.
            return [(0, action) for action in self.machines[0].handle(event, now)]
        return self._settle(self._handle_one(index, event, now), now)

    def handle_all(self, event: Event, now: float) -> list[AnswerAction]:
        """Return the actions for RequestCancelled or DeadlinePassed, which concern all answers."""
        actions = [action for index in range(len(self.machines)) for action in self._handle_one(index, event, now)]
        return self._settle(actions, now)

    def usage(self) -> Usage:
        """Return the token counts so far: the prompt's once, and those of all answers."""
        first, *others = (machine.usage() for machine in self.machines)
        return sum((replace(one, prompt_tokens=0, cached_tokens=0) for one in others), first)

    def receipt(self, usage: Usage) -> dict[str, int]:
        """Return the fields of Usage for the KV that all attempts computed and used. KV shared by several requests
        counts for each of them, by the tier that it was fetched from."""
        held = [machine.held for machine in self.machines]
        tiers = {tier: round(tokens * held[0].token_byte_s) for tier, tokens in usage.cached_by_tier().items()}
        computed = round(sum(one.byte_s for one in held)) - sum(tiers.values())
        return {
            "computed_tokens": sum(one.computed_tokens for one in held),
            "kv_computed_byte_seconds": max(0, computed),
            **{f"kv_{tier.removesuffix('_tokens')}_byte_seconds": byte_s for tier, byte_s in tiers.items()},
        }

    def timings(self, now: float) -> Timings:
        """Return the leader's timings, with the end of the last answer and the draft tokens of all answers."""
        timings = [machine.timings(now) for machine in self.machines]
        return replace(
            timings[0],
            total_ms=max(one.total_ms for one in timings),
            guessed_tokens=sum(one.guessed_tokens for one in timings),
            accepted_tokens=sum(one.accepted_tokens for one in timings),
        )

    def _handle_one(self, index: int, event: Event, now: float) -> list[AnswerAction]:
        actions = self.machines[index].handle(event, now)
        if index:
            return [(index, action) for action in actions]
        return [one for action in actions for one in self._lead(action, now)]

    def _lead(self, action: Action, now: float) -> list[AnswerAction]:
        """Return an action of the leader, and then the followers' actions that it causes."""
        following = tuple(n for n, machine in enumerate(self.machines) if machine.state is RequestState.FOLLOWING)
        caused: Event
        match action:
            case ev.SubmitDecode():
                action = structs.replace(action, parallel_samples=following)
                caused = ev.LeaderSubmitted(action.attempt, action.plan)
            case ev.LookUp() | ev.OpenTicket():
                caused = ev.LeaderRetried(action.attempt)
            case ev.Emit() | ev.Finish():
                caused = ev.LeaderStarted()
            case _:
                return [(0, action)]
        return [(0, action), *((n, its) for n in following for its in self.machines[n].handle(caused, now))]

    def _settle(self, actions: list[AnswerAction], now: float) -> list[AnswerAction]:
        """If an answer has failed, end all answers, and return only the first Fail."""
        failures = [one for one in actions if isinstance(one[1], ev.Fail)]
        if not failures:
            return actions
        rest = [one for one in actions if not isinstance(one[1], ev.Fail)]
        for index in range(len(self.machines)):
            left = self.machines[index].handle(ev.RequestCancelled(), now)
            rest += [(index, action) for action in left if not isinstance(action, ev.Fail)]
        return [*rest, failures[0]]
