"""The life of one answer to a request (I9): events and a clock in, actions out. Most requests have one answer.

                 +------------------- attempt + 1, tokens = prompt + emitted -------------------+
                 v                                                     SpanEnded, or the stream |
    start -> PLANNING -PlanMade-> PINNING -TicketGranted-> PREFILLING -speaks first-> DECODING  |
               |  ^                |  |                       ^   |                    |  |     |
               |  | no worker      |  +-> FETCHING            |   |                    |  |     |
               |  | lives yet      |        +--BlocksFetched--+   |                    |  |     |
               +--+ (bounded)      | TicketLost          SpanLost |         DecodeLost |  |     |
                                   +------------------------------+--------------------+--|-----+
                                                                                          |
                  DecodeFinished, StopStringFound -> Finish -+                            |
    any state:    RequestCancelled, DeadlinePassed,          +--> DONE <------------------+
                  attempts used up -> Fail ------------------+

    each further answer, to a request that wants several:
    start -> FOLLOWING -own TokensSampled, or LeaderStarted-> DECODING, and on as above
               |   ^   -LeaderStarted, but its stream is lost already-> PLANNING, attempt + 1
               +---+ LeaderSubmitted, LeaderRetried: the first answer's attempts, until it has a token

A further answer (:mod:`pillion.gateway.request.choices`) has no ticket and no work of its own while it follows the
first one, the leader: its stream begins with the leader's submit, and a loss before the leader's first token is the
leader's to handle. From then on it is replayed like any other answer, with attempts of its own.

FETCHING is entered where the index knows more of the prompt than the ticket has pinned, on whatever node. A fetch never
fails: it brings less, and what is missing is computed (I1). A span that ends early does not fail the attempt either:
the decode worker computes the rest.

A span on the decode worker's own node is sent together with the submit: the decode worker waits at the node for the
span's last block, so no message of the gateway stands between the two. Its stream may then speak before the span's last
acknowledgement has arrived, which shows that all chunks are there. A span of another node is over before the submit,
for its blocks may fall short. Where the decode worker is lost meanwhile, the span goes on to its end, and the next
attempt finds its blocks: whoever decodes needs them.

Attempts that bring nothing are bounded in number, but for those that fail because a component is away and on its way
back: there it is the time in PLANNING that is bounded, from the last token on. A request that was in a step of two
workers when they were lost, and got nothing between, fails (``MAX_WORKERS_KILLED``).

A plan without chunks skips PREFILLING. An attempt is named by its number, and events of an older attempt are dropped
(I6), except a ticket: one that arrives and is not wanted any more is released. The ticket is released when the decode
worker reports that it holds it itself, or when the attempt ends before that. Leaving an attempt stops its work and
cancels its stream (I8). Every request has exactly one terminal action.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from pillion.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    LethalRequest,
    Overloaded,
    PillionError,
    Unavailable,
)
from pillion.gateway.planning.planner import RequestPlan, plan_fetch, replan, shorten
from pillion.gateway.request import events as ev
from pillion.gateway.request.events import Action, Event, TicketHold
from pillion.types import AnswerSoFar, FinishReason, Timings, Usage
from pillion.v1.decode_pb2 import DecodeTimings

# Delay before the second attempt; each further one waits four times as long. The planner leaves a lost component out
# at once, the pause is for what has not been noticed yet.
FIRST_RETRY_DELAY_MS = 20
MAX_RETRY_DELAY_MS = 500
# How often a request that was under way looks for components that it has lost.
COMPONENT_POLL_MS = 100
# So many workers that die in a step with a request, without anything between them that the client got, end the request.
MAX_WORKERS_KILLED = 2
# How long the call of a span may outlive its answer, where the answer ended before the span's last acknowledgement.
LAST_ACK_WAIT_MS = 1000


class RequestState(Enum):
    """The states of the lifecycle above."""

    FOLLOWING = "following"
    PLANNING = "planning"
    PINNING = "pinning"
    FETCHING = "fetching"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


class RequestMachine:
    """Owns an answer's tokens, its attempts and its ticket. ``now`` is monotonic, in seconds. At most ``max_attempts``
    in a row bring nothing.

    A machine that ``follows`` learns what the leader does by LeaderSubmitted, LeaderRetried and LeaderStarted. One that
    is ``resumed`` goes on behind the tokens that another gateway has given; there ``cached_tokens`` of the prompt were
    found. ``scored_tokens`` log probabilities of the prompt have been given; None: this answer's client wants none.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        stop_token_ids: frozenset[int],
        max_attempts: int,
        arrived: float,
        follows: bool = False,
        resumed: AnswerSoFar | None = None,
        cached_tokens: int = 0,
        scored_tokens: int | None = None,
    ) -> None:
        self.prompt = prompt
        # How many tokens behind the prompt's first one are scored, or need not be.
        most_scored = len(prompt) - 1
        self.scored_tokens = most_scored if scored_tokens is None else min(scored_tokens, most_scored)
        self.state = RequestState.FOLLOWING if follows else RequestState.PLANNING
        self.attempt = 1
        self.emitted: list[int] = []
        self.plan: RequestPlan | None = None
        self.hold: TicketHold | None = None
        self._max_tokens = max_tokens
        self._stop_ids = stop_token_ids
        self._max_attempts = max_attempts
        # Attempts since the last one that brought something: only these are bounded, for a stream that gets on, however
        # often it has to move, is not to be given up. What failed because a component was away is none of them.
        self._fruitless = 1
        # Losses since the last attempt that brought something, those included.
        self._losses = 0
        # Tickets refused in a row while the request waits for what it has lost.
        self._lost_tickets = 0
        self._avoid: frozenset[str] = frozenset()
        # Workers that died in a step with this request, since it got something.
        self._killed: tuple[str, ...] = ()
        # Since when the request looks for what it has lost, and how long it has looked before that since it got
        # something: this time is bounded, whatever is lost how often.
        self._looking_s, self._looked_s = 0.0, 0.0
        # Whether a span, and the decode worker's stream, of this attempt are under way.
        self._span_open = False
        self._stream_open = False
        # How the stream was lost: of a follower before its leader began, of others while their span goes on.
        self._lost: ev.DecodeLost | None = None
        self._timeline = _Timeline(arrived)
        if resumed is not None:
            self.emitted.extend(resumed.token_ids)
            self._timeline.found, self._timeline.cached_tokens = True, cached_tokens
            if resumed.finish_reason is not None:
                self.state = RequestState.DONE

    def start(self) -> list[Action]:
        """The first look-up. A follower begins with none, and a resumed answer that is whole just ends."""
        if self.state is not RequestState.PLANNING:
            return []
        whole = self._whole()
        return [self._look_up(0)] if whole is None else self._end(ev.Finish(whole), self._timeline.arrived)

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions that ``event`` calls for, in order; none for one that comes late or belongs to another state."""
        if isinstance(event, ev.TokensSampled) and self.state is RequestState.DECODING:
            # Nearly all events are these, so they are tested first.
            return self._decoding(event, now) if event.attempt == self.attempt else []
        match event:
            case ev.TicketGranted():
                return self._granted(event, now)
            case _ if self.state is RequestState.DONE:
                return []
            case ev.RequestCancelled():
                return self._end(ev.Fail(Cancelled("the client went away")), now)
            case ev.DeadlinePassed():
                return self._end(ev.Fail(DeadlineExceeded("the request's deadline passed")), now)
            case ev.StopStringFound():
                del self.emitted[event.kept_tokens :]
                return self._end(ev.Finish(FinishReason.STOP), now)
            case ev.DecodeFinished() | ev.DecodeLost() if self.state is RequestState.DECODING:
                return self._decoding(event, now) if event.attempt == self.attempt else []
            case ev.LeaderSubmitted() | ev.LeaderRetried() | ev.LeaderStarted():
                return self._follow(event, now) if self.state is RequestState.FOLLOWING else []
            case ev.AttemptEvent() if event.attempt != self.attempt:
                return []
            case ev.TokensSampled() | ev.DecodeFinished() | ev.DecodeLost() if self.state is RequestState.FOLLOWING:
                return self._following(event, now)
            case ev.PlanMade() | ev.PlanFailed() if self.state is RequestState.PLANNING:
                return self._planned(event, now)
            case ev.TicketLost() if self.state is RequestState.PINNING:
                return self._ticket_lost(event, now)
            case ev.BlocksFetched() if self.state is RequestState.FETCHING:
                return self._go_on(event.blocks, now)
            case ev.ChunkAcked() | ev.SpanEnded() | ev.SpanLost() if self._span_open:
                return self._prefilling(event, now)
            case ev.TokensSampled() | ev.PromptScored() | ev.DecodeFinished() | ev.TicketAdopted() if (
                self.state is RequestState.PREFILLING and self._stream_open
            ):
                self._timeline.complete(self._plan(), self._prompt_limit(), now)
                self.state = RequestState.DECODING
                return self.handle(event, now)
            case ev.DecodeLost() if self.state is RequestState.PREFILLING and self._stream_open:
                return self._lost_beside_span(event, now)
            case ev.TicketAdopted() if self.state is RequestState.DECODING:
                return self._release_ticket()
            case ev.PromptScored() if self.state is RequestState.DECODING:
                return self._scored(event)
            case ev.AttemptSilent():
                return self._silent(now)
        return []

    def usage(self) -> Usage:
        """Tokens so far."""
        guessed, accepted = self._timeline.guesses
        found = Usage(len(self.prompt), self._timeline.cached_tokens, len(self.emitted))
        return replace(found, guessed_tokens=guessed, accepted_tokens=accepted) if guessed else found

    def timings(self, now: float) -> Timings:
        """Where the prompt and the time went so far. Cached, prefilled and tail tokens add up to the prompt."""
        return self._timeline.timings(len(self.prompt), self.plan, self.attempt, now)

    # ---- one state each -----------------------------------------------------------------------------------------

    def _follow(self, event: ev.LeaderSubmitted | ev.LeaderRetried | ev.LeaderStarted, now: float) -> list[Action]:
        if isinstance(event, ev.LeaderStarted):
            if not self._max_tokens:
                return self._end(ev.Finish(FinishReason.LENGTH), now)
            self.state = RequestState.DECODING
            return [] if self._lost is None else self._decoding(self._lost, now)
        cancel: list[Action] = [] if self.plan is None else [ev.CancelDecode(self.attempt)]
        self.attempt, self._lost = event.attempt, None
        self.plan = event.plan if isinstance(event, ev.LeaderSubmitted) else None
        return cancel

    def _following(self, event: ev.TokensSampled | ev.DecodeFinished | ev.DecodeLost, now: float) -> list[Action]:
        if self.plan is None:
            # No stream has begun.
            return []
        if isinstance(event, ev.DecodeLost):
            # The next event shows whether this stream alone is lost, or the leader's too, which is then tried again.
            self._lost = event
            return []
        self.state = RequestState.DECODING
        return self._decoding(event, now)

    def _planned(self, event: ev.PlanMade | ev.PlanFailed, now: float) -> list[Action]:
        if isinstance(event, ev.PlanFailed):
            if self.attempt > 1 and now - self._looking_s + self._looked_s < event.patience_s:
                return [self._look_up(COMPONENT_POLL_MS)]
            return self._retry_or_fail(event, now)
        self.plan = event.plan
        self.state = RequestState.PINNING
        if self.attempt > 1:
            self._looked_s += now - self._looking_s
        return [ev.OpenTicket(self.attempt, event.plan)]

    def _ticket_lost(self, event: ev.TicketLost, now: float) -> list[Action]:
        """A node that is back gives no ticket before one of its workers is, which may take as long as a step does."""
        self._avoid |= {self._plan().node_id}
        if self.attempt == 1 or not self._waits_for(event):
            return self._retry_or_fail(event, now)
        self.state, self._looking_s = RequestState.PLANNING, now
        # A node that refuses is asked ever more seldom, by all the requests that it has lost.
        self._lost_tickets += 1
        return [self._look_up(min(MAX_RETRY_DELAY_MS, COMPONENT_POLL_MS * 2 ** min(self._lost_tickets - 1, 8)))]

    def _waits_for(self, loss: ev.AttemptLoss) -> bool:
        """Whether what failed may still come back in the time that the request waits for components."""
        return loss.retryable and self._looked_s < loss.patience_s

    def _granted(self, event: ev.TicketGranted, now: float) -> list[Action]:
        if event.attempt != self.attempt or self.state is not RequestState.PINNING:
            return [ev.ReleaseTicket(event.hold)]
        self.hold = event.hold
        self._lost_tickets = 0
        self.plan = replan(self._plan(), event.pinned_blocks)
        if self._timeline.admitted is None:
            self._timeline.admitted = now
        pinned, limit = self.plan.cached_blocks, self.plan.limit_blocks
        wanted = plan_fetch(self.plan.sources, self.plan.node_id, pinned, limit, self.plan.dial)
        if wanted is None:
            return self._go_on(pinned, now)
        self.state = RequestState.FETCHING
        return [ev.Fetch(self.attempt, self.plan, event.hold, wanted)]

    def _go_on(self, blocks: int, now: float) -> list[Action]:
        """Goes on with the first ``blocks`` blocks of the prompt, or those that were pinned where they are more."""
        assert self.hold is not None
        self.plan = replan(self._plan(), max(blocks, self._plan().cached_blocks))
        self._timeline.find(self.plan)
        if not self.plan.chunks:
            self.state = RequestState.DECODING
            return [self._submit()]
        self.state = RequestState.PREFILLING
        # Its chunks are added to those of earlier attempts.
        self._timeline.span_sent, self._timeline.chunks_before = now, self._timeline.chunks
        self._span_open = True
        run_span = ev.RunSpan(self.attempt, self.plan, self.hold, self.tokens())
        if self.plan.remote:
            return [run_span]
        return [run_span, self._submit(self.plan.split_tokens // self.plan.block_size)]

    def _prefilling(self, event: ev.ChunkAcked | ev.SpanEnded | ev.SpanLost, now: float) -> list[Action]:
        plan, limit = self._plan(), self._prompt_limit()
        self._span_open = isinstance(event, ev.ChunkAcked)
        if self.state is not RequestState.PREFILLING:
            # The stream has begun, so every chunk is there, whatever became of the call.
            return []
        if isinstance(event, ev.ChunkAcked):
            self._timeline.ack(min(event.ack.end_tokens, limit), now)
            return []
        if isinstance(event, ev.SpanEnded) and self._stream_open and event.end_tokens < plan.split_tokens:
            # The decode worker waits for blocks that nobody computes any more.
            event = ev.SpanLost(event.attempt, Unavailable("the span ended early"), True)
        if isinstance(event, ev.SpanEnded):
            self._timeline.reach(min(event.end_tokens, limit))
            if self._lost is not None:
                return self._retry_or_fail(self._lost, now)
            self.state = RequestState.DECODING
            if self._stream_open:
                return []
            self.plan = shorten(plan, event.end_tokens)
            return [self._submit()]
        if plan.prefill is not None:
            self._avoid |= {plan.prefill.component_id}
        return self._retry_or_fail(event, now)

    def _lost_beside_span(self, event: ev.DecodeLost, now: float) -> list[Action]:
        """The stream is lost while its span is computed, which goes on: the next attempt needs the same blocks."""
        if not event.retryable:
            return self._decoding(event, now)
        self._avoid |= {self._plan().decode.component_id}
        self._stream_open, self._lost = False, event
        return []

    def _decoding(self, event: ev.TokensSampled | ev.DecodeFinished | ev.DecodeLost, now: float) -> list[Action]:
        if isinstance(event, ev.TokensSampled):
            self._timeline.decode = event.timings or self._timeline.decode
            left = self._max_tokens - len(self.emitted)
            ids = event.token_ids[:left]
            if not ids:
                return []
            self.emitted.extend(ids)
            self._got_on()
            if self._timeline.first_token is None:
                self._timeline.first_token = now
            return [ev.Emit(ids, event.logprobs[:left])]
        if isinstance(event, ev.DecodeFinished):
            self._timeline.decode = event.timings or self._timeline.decode
            return self._end(ev.Finish(event.reason), now, stream_over=True)
        return self._stream_lost(event, now, stream_over=True)

    def _scored(self, event: ev.PromptScored) -> list[Action]:
        logprobs = event.logprobs[: len(self.prompt) - 1 - self.scored_tokens]
        self.scored_tokens += len(logprobs)
        if logprobs:
            self._got_on()
        return [ev.EmitScores(logprobs)] if logprobs else []

    def _got_on(self) -> None:
        """The client is given something: what was lost before does not count any more."""
        self._fruitless = self._losses = 0
        self._looked_s, self._killed = 0.0, ()

    def _stream_lost(self, loss: ev.DecodeLost, now: float, stream_over: bool) -> list[Action]:
        # The last token may have arrived before its worker was lost.
        whole = self._whole()
        if whole is not None:
            return self._end(ev.Finish(whole), now, stream_over)
        self._avoid |= {self._plan().decode.component_id}
        return self._retry_or_fail(loss, now, stream_over)

    def _silent(self, now: float) -> list[Action]:
        if self.state is RequestState.FOLLOWING:
            return []
        error = Unavailable(f"nothing was heard of the request while it was {self.state.value}")
        loss = ev.DecodeLost(self.attempt, error, retryable=True)
        if self.state is RequestState.DECODING:
            return self._stream_lost(loss, now, stream_over=False)
        if self.state is RequestState.PREFILLING and (worker := self._plan().prefill) is not None:
            self._avoid |= {worker.component_id}
        return self._retry_or_fail(loss, now)

    # ---- moves --------------------------------------------------------------------------------------------------

    def tokens(self) -> tuple[int, ...]:
        """The tokens that this attempt starts from: the prompt, and the answer so far."""
        return (*self.prompt, *self.emitted)

    def _whole(self) -> FinishReason | None:
        """Why the answer ends with the last token that was emitted; None where it goes on. No stop id is ever sampled
        before min_tokens. An answer without tokens is whole when its stream has ended, for the prompt's sake."""
        if not self.emitted:
            return None
        if self.emitted[-1] in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.emitted) >= self._max_tokens else None

    def _prompt_limit(self) -> int:
        """Tokens of a span that count as prefill: in a replay only those of the prompt, and never its last one."""
        plan = self._plan()
        return min(plan.split_tokens, (len(self.prompt) - 1) // plan.block_size * plan.block_size)

    def _submit(self, awaited_blocks: int = 0) -> Action:
        assert self.hold is not None
        self._stream_open = True
        return ev.SubmitDecode(
            self.attempt, self._plan(), self.hold, self.tokens(), awaited_blocks, scored_tokens=self.scored_tokens
        )

    def _look_up(self, after_ms: int) -> Action:
        unscored_from = self.scored_tokens if self.scored_tokens < len(self.prompt) - 1 else None
        return ev.LookUp(self.attempt, self.tokens(), self._avoid, after_ms, unscored_from)

    def _retry_or_fail(self, loss: ev.AttemptLoss, now: float, stream_over: bool = False) -> list[Action]:
        if not loss.retryable:
            return self._end(ev.Fail(loss.error), now, stream_over)
        if loss.killed:
            self._killed += (loss.killed,)
        if len(self._killed) >= MAX_WORKERS_KILLED:
            names = ", ".join(self._killed)
            text = f"two workers were lost in a step with this request ({names}), so no other one gets it"
            return self._end(ev.Fail(LethalRequest(text)), now, stream_over)
        waits = self._waits_for(loss)
        if not waits and (loss.patience_s or self._fruitless >= self._max_attempts):
            return self._end(ev.Fail(self._given_up(loss)), now, stream_over)
        leaving = self._leave(stream_over)
        delay_ms = min(MAX_RETRY_DELAY_MS, FIRST_RETRY_DELAY_MS * 4 ** min(self._losses, 8))
        self.attempt += 1
        self._losses += 1
        self._fruitless += not waits
        self._timeline.retry()
        self._lost = None
        self.state, self._looking_s = RequestState.PLANNING, now
        return [*leaving, self._look_up(delay_ms)]

    def _given_up(self, loss: ev.AttemptLoss) -> PillionError:
        error, how = loss.error, f"after {self._fruitless} attempts; the last one"
        if loss.patience_s:
            how = f"after {self._looked_s:.0f} s without the components that it needs; the last loss"
        text = f"given up {how}: {error.message}"
        return Overloaded(text, error.retry_after_ms) if isinstance(error, Overloaded) else Unavailable(text)

    def _end(self, terminal: ev.Finish | ev.Fail, now: float, stream_over: bool = False) -> list[Action]:
        leaving = self._leave(stream_over, finished=stream_over and isinstance(terminal, ev.Finish))
        self.state = RequestState.DONE
        self._timeline.ended = now
        return [*leaving, terminal]

    def _leave(self, stream_over: bool = False, finished: bool = False) -> list[Action]:
        """Stops whatever the current attempt does. ``finished``: the stream has ended by itself, with an answer."""
        actions: list[Action] = []
        # A further answer's stream begins with the first answer's submit.
        follows = self.state is RequestState.FOLLOWING and self.plan is not None
        if (self._stream_open or self.state is RequestState.DECODING or follows) and not stream_over:
            actions.append(ev.CancelDecode(self.attempt))
        if self._span_open and finished:
            # The span is computed. Cancelled in its last moment, it would lack its last chunk in the worker's traces.
            actions.append(ev.StopWork(self.attempt, LAST_ACK_WAIT_MS))
        elif self._span_open or self.state in (RequestState.PLANNING, RequestState.PINNING, RequestState.FETCHING):
            actions.append(ev.StopWork(self.attempt))
        self._span_open = self._stream_open = False
        return [*actions, *self._release_ticket()]

    def _release_ticket(self) -> list[Action]:
        """Releases the ticket, once: when the decode worker has taken it over, or when the attempt ends before that. A
        ticket that stayed would keep blocks pinned that a preempted stream must give up for others."""
        hold, self.hold = self.hold, None
        return [] if hold is None else [ev.ReleaseTicket(hold)]

    def _plan(self) -> RequestPlan:
        if self.plan is None:
            raise Internal("the request has no plan in this state")
        return self.plan


class _Timeline:
    """The moments of a request, for Timings."""

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        # When the first ticket was granted.
        self.admitted: float | None = None
        self.found = False
        self.cached_tokens = 0
        self.acked_tokens = 0
        self.chunks = 0
        self.chunks_before = 0
        self.span_sent: float | None = None
        self.prefill_ms = 0.0
        self.first_token: float | None = None
        self.ended: float | None = None
        self.decode: DecodeTimings | None = None
        # Guesses of earlier attempts, and those of them that were right.
        self.guesses_before = 0, 0

    @property
    def guesses(self) -> tuple[int, int]:
        """Guessed tokens of all attempts, as far as workers have told of them, and those that were right."""
        guessed, accepted = self.guesses_before
        if self.decode is None:
            return guessed, accepted
        return guessed + self.decode.guessed_tokens, accepted + self.decode.accepted_tokens

    def retry(self) -> None:
        """Notes that the attempt is over, and another one follows."""
        self.guesses_before, self.decode = self.guesses, None

    def find(self, plan: RequestPlan) -> None:
        """Notes what is cached: of the first attempt, before anything was computed for this request."""
        if not self.found:
            self.found = True
            self.cached_tokens = plan.cached_tokens

    def ack(self, end_tokens: int, now: float) -> None:
        """Notes one chunk; the time since the dispatch or the chunk before it is prefill time."""
        self.chunks += 1
        self.reach(end_tokens)
        since = self.span_sent if self.span_sent is not None else now
        self.prefill_ms += (now - since) * 1000
        self.span_sent = now

    def complete(self, plan: RequestPlan, end_tokens: int, now: float) -> None:
        """Notes that all chunks are there, though not all acknowledgements have come."""
        self.chunks = self.chunks_before + len(plan.chunks) - 1
        self.ack(end_tokens, now)

    def reach(self, end_tokens: int) -> None:
        """Notes that the decode worker has all KV before ``end_tokens``."""
        self.acked_tokens = max(self.acked_tokens, end_tokens)

    def timings(self, prompt_tokens: int, plan: RequestPlan | None, attempt: int, now: float) -> Timings:
        """The figures so far; common.proto describes them (Timings)."""
        prefilled = max(0, self.acked_tokens - self.cached_tokens)
        worker = self.decode or DecodeTimings()
        guessed, accepted = self.guesses
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
            guessed_tokens=guessed,
            accepted_tokens=accepted,
        )
