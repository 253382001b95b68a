"""One request under way: events of its answers come in, actions go out, and text goes to the client.

A request has no task of its own beyond the calls under way: events are handled where they arrive, on the event loop,
and the reader is woken. What the reader has not taken yet is merged (:mod:`pillion.gateway.request.outbox`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from opentelemetry import trace

from pillion.errors import Cancelled, DeadlineExceeded, Internal, PillionError
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.request import events as ev
from pillion.gateway.request.choices import AnswerAction, Choices
from pillion.gateway.request.component_calls import ComponentCalls
from pillion.gateway.request.events import Action, Event
from pillion.gateway.request.job import Job, PlacedPrefix
from pillion.gateway.request.outbox import Outbox
from pillion.gateway.request.request_machine import RequestMachine, RequestState
from pillion.gateway.request.request_telemetry import RequestMeter
from pillion.gateway.request.validation import answer_seed
from pillion.gateway.tokens.answer_text import AnswerText
from pillion.types import Delta, FinishReason, StreamOrigin, Timings, Usage

log = logging.getLogger("pillion.gateway")

# An answer without a chunk, a token or a worker's word that it waits in line, for so long: its worker hangs.
MAX_SILENCE_S = 300.0
# What a client is told where the gateway itself fails.
DEFECT = "internal error; the gateway's log says more"


class Generation:
    """An asynchronous iterator of deltas, for one reader; raises PillionError where the request fails.

    ``cancel`` may be called at any time, any number of times, and frees everything at once (I8).

    Args:
        job: the request.
        cluster: the connections to the components that work for it.
        answers: one, empty, for each answer that is generated.
        span: the request's trace span, which the generation ends.
        meter: records when tokens come and how the request ends.
        on_end: called once, with the tokens used.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        answers: Sequence[AnswerText],
        span: trace.Span,
        meter: RequestMeter,
        on_end: Callable[[Usage], None],
    ) -> None:
        self.job = job
        self._answers = tuple(answers)
        self._span = span
        self._meter = meter
        self._on_end = on_end
        indexes = range(len(self._answers))
        self._choices = Choices([_machine(job, index) for index in indexes])
        seeds = [answer_seed(job.resolved.sampling.seed or 0, index) for index in indexes]
        self._calls = [
            ComponentCalls(job, seed, cluster, span, partial(self._post, index), self._fail_by_defect)
            for index, seed in enumerate(seeds)
        ]
        self._outbox = Outbox(job.request_id, len(indexes), job.answers, job.show_logprobs)
        self._inbox: deque[tuple[int | None, Event]] = deque()
        self._handling = False
        self._defect: PillionError | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._last_event_s = [time.monotonic()] * len(indexes)
        # What the reader awaits while nothing is pending.
        self._waiter: asyncio.Future[None] | None = None
        self._emitted = False
        self._reasons = [""] * len(indexes)
        for index, answer in enumerate(job.resume.answers if job.resume is not None else ()):
            self._reasons[index] = answer.finish_reason.value if answer.finish_reason is not None else ""
        self.ended = False
        # Whether the request ended with an error that neither the client nor its deadline caused.
        self.failed_unserved = False

    def start(self) -> None:
        """Begins the request. Call once."""
        if self.job.deadline is not None:
            left_s = max(0.0, self.job.deadline - time.monotonic())
            self._deadline = asyncio.get_running_loop().call_later(left_s, self._post, None, ev.DeadlinePassed())
        self._watch_silence()
        for index, answer in enumerate(self._answers):
            if answer.stopped:
                # A resumed answer that holds a stop string.
                self._post(index, ev.StopStringFound(answer.completion_tokens))
        for index, action in self._choices.start():
            self._perform(index, action)

    def cancel(self) -> None:
        """The client went away."""
        self._post(None, ev.RequestCancelled())

    @property
    def pending(self) -> bool:
        """Whether the next delta, or the error, is there already."""
        return self._outbox.pending

    def usage(self) -> Usage:
        """Tokens so far."""
        return replace(self._choices.usage(), reasoning_tokens=sum(one.reasoning_tokens for one in self._answers))

    def origin(self) -> StreamOrigin | None:
        """What another gateway needs to go on with this stream, besides the tokens. Call it when the first delta is
        there. None where the answers are ranked, which cannot be resumed."""
        if len(self._answers) > self.job.answers:
            return None
        seed = self.job.resolved.sampling.seed or 0
        return StreamOrigin(seed, self.job.digest(), self._choices.usage().cached_tokens)

    def placed_prefix(self) -> PlacedPrefix | None:
        """Where the prompt's whole blocks are, once its first delta is there; None before it has a plan."""
        plan, chain = self._choices.machines[0].plan, self._calls[0].chain
        if plan is None:
            return None
        # The last token is left to compute, and blocks of the answer are none of the prompt.
        whole = (len(self.job.prompt) - 1) // plan.block_size
        return PlacedPrefix(plan.node_id, chain.first(whole), plan.block_size)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        if self._outbox.over:
            raise StopAsyncIteration
        while not self._outbox.pending:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._outbox.take()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ---- events in, actions out ---------------------------------------------------------------------------------

    def _post(self, index: int | None, event: Event) -> None:
        """Handles ``event`` of one answer, or of all (None). While another event is handled, it waits its turn."""
        self._inbox.append((index, event))
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox:
                for answer, action in self._handle(*self._inbox.popleft()):
                    self._perform(answer, action)
        except Exception as error:  # noqa: BLE001  (a defect must end its request, not the gateway)
            self._handling = False
            self._fail_by_defect(error)
        finally:
            self._handling = False

    def _handle(self, index: int | None, event: Event) -> list[AnswerAction]:
        now = time.monotonic()
        if index is None:
            return self._choices.handle_all(event, now)
        self._last_event_s[index] = now
        return self._choices.handle(index, event, now)

    def _fail_by_defect(self, error: BaseException) -> None:
        log.error("request %s failed", self.job.request_id, exc_info=error)
        again, self._defect = self._defect, Internal(DEFECT)
        if again is None:
            # Cancelling frees what the request holds; the reader is told the defect instead.
            self._post(None, ev.RequestCancelled())
        self._fail(self._defect)

    def _perform(self, index: int, action: Action) -> None:
        calls = self._calls[index]
        match action:
            case ev.Emit():
                # Nearly all actions are these.
                self._emit(index, action)
            case ev.EmitScores(logprobs):
                self._outbox.score(logprobs)
                self._wake()
            case ev.SubmitDecode():
                calls.submit(action, [self._calls[fork] for fork in action.forks])
            case ev.Finish():
                self._finish(index, action.reason)
            case ev.Fail():
                self._fail(self._defect or action.error)
            case _:
                if isinstance(action, ev.LookUp) and action.attempt > 1:
                    # The request is replayed, on another worker or on the same one.
                    self._span.add_event("replay", {"pillion.attempt": action.attempt, "pillion.answer": index})
                calls.perform(action)

    def _emit(self, index: int, action: ev.Emit) -> None:
        """Every token of the request passes here once, over all answers and attempts."""
        if not self._emitted:
            self._emitted = True
            self._span.add_event("first token")
        answer = self._answers[index]
        self._meter.tokens(index, len(action.token_ids), self._last_event_s[index])
        self._outbox.add(index, answer.push(action.token_ids, action.logprobs))
        self._wake()
        if answer.stopped:
            self._post(index, ev.StopStringFound(answer.completion_tokens))

    def _finish(self, index: int, reason: FinishReason) -> None:
        answer = self._answers[index]
        last = answer.flush(cut=reason is FinishReason.LENGTH)
        if answer.stopped:
            # The end of the stream made the held-back characters certain, and they completed a stop string.
            reason = FinishReason.STOP
        elif answer.calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        self._calls[index].load.assign({})
        self._reasons[index] = reason.value
        self._outbox.finish(index, last, reason, answer.stop_string)
        self._wake()
        if all(self._reasons) and not self.ended:
            self._outbox.end(self.usage(), self._timings(time.monotonic()))
            self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
            self._end(None)

    def _fail(self, error: PillionError) -> None:
        if self.ended:
            return
        self.failed_unserved = not isinstance(error, Cancelled | DeadlineExceeded)
        self._outbox.fail(error)
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(trace.StatusCode.ERROR, error.message)
        self._end(error)

    def _end(self, error: PillionError | None) -> None:
        self.ended = True
        for calls in self._calls:
            calls.load.assign({})
        for timer in (self._deadline, self._silence):
            if timer is not None:
                timer.cancel()
        usage, span = self.usage(), self._span
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        span.set_attribute("pillion.attempts", max(machine.attempt for machine in self._choices.machines))
        span.end()
        now = time.monotonic()
        timings = self._timings(now)
        self._meter.ended(now, usage, timings, self._reasons, error)
        self._log_end(usage, timings, error)
        self._on_end(usage)
        self._wake()

    def _timings(self, now: float) -> Timings:
        timings, brought = self._choices.timings(now), self._calls[0].brought_tokens
        # A later attempt may bring back more than the first one found.
        left = timings.cached_tokens
        kept: dict[str, int] = {}
        for source, tokens in brought._asdict().items():
            kept[f"{source}_tokens"] = min(tokens, left)
            left -= kept[f"{source}_tokens"]
        return replace(timings, **kept, system_fingerprint=self.job.system_fingerprint)  # type: ignore[arg-type]

    def _log_end(self, usage: Usage, timings: Timings, error: PillionError | None) -> None:
        """Writes the request's line into the log."""
        if not log.isEnabledFor(logging.INFO):
            return
        how = ",".join(sorted(set(filter(None, self._reasons)))) if error is None else type(error).__name__
        fields = {
            "request_id": self.job.request_id,
            "model": self.job.model,
            "ended": how,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "time_to_first_token_ms": round(timings.time_to_first_token_ms, 1),
            "total_ms": round(timings.total_ms, 1),
            "replays": timings.replays,
        }
        with trace.use_span(self._span):
            words = " ".join(f"{name}={value}" for name, value in fields.items())
            log.info("request %s", words, extra={"fields": fields})

    def _watch_silence(self) -> None:
        """Looks at each answer by itself: tokens of the others do not excuse one that hangs."""
        longest_s = 0.0
        for index, machine in enumerate(self._choices.machines):
            if machine.state is RequestState.DONE:
                continue
            quiet_s = time.monotonic() - self._last_event_s[index]
            if quiet_s >= MAX_SILENCE_S:
                self._post(index, ev.AttemptSilent(machine.attempt))
                quiet_s = 0.0
            longest_s = max(longest_s, quiet_s)
        if not self.ended:
            self._silence = asyncio.get_running_loop().call_later(MAX_SILENCE_S - longest_s, self._watch_silence)


def _machine(job: Job, index: int) -> RequestMachine:
    resolved, attempts, resume = job.resolved, job.options.max_attempts, job.resume
    stop_ids = frozenset(resolved.stop_token_ids)
    machine = partial(RequestMachine, job.prompt, resolved.max_tokens, stop_ids, attempts, job.arrived)
    # The first answer brings the prompt's log probabilities, for all of them.
    scores = index == 0 and resolved.sampling.prompt_logprobs is not None
    if resume is None:
        return machine(follows=index > 0, scored_tokens=0 if scores else None)
    scored = resume.scored_tokens if scores else None
    so_far, cached_tokens = resume.answers[index], resume.origin.cached_tokens
    return machine(resumed=so_far, cached_tokens=cached_tokens, scored_tokens=scored)
