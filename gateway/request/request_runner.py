"""Runs one request: passes events to the machines of its answers, performs their actions, and collects text for the
client.

A request has no task besides its calls: events are handled where they occur, on the event loop, and wake the reader.
Unread deltas are merged into one per answer (:class:`Outbox`), so ``max_tokens`` bounds their size.

    add, add --> finish --> (the other answers' finish) --> end        fail, any time: pending deltas, then the error

If more answers are generated than returned (``best_of``), none is returned before the end, when they are ranked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any

from opentelemetry import trace

from pillion.errors import Cancelled, DeadlineExceeded, Internal, Overloaded, PillionError
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.links.load_exchange import AssignedLoad
from pillion.gateway.recorder.story import Story
from pillion.gateway.request import events as ev
from pillion.gateway.request.admitted_request import AdmittedRequest, PlacedPrefix
from pillion.gateway.request.component_calls import ComponentCalls
from pillion.gateway.request.events import Action, Event
from pillion.gateway.request.request_machine import (
    AnswerAction,
    ParallelSamples,
    RequestMachine,
    RequestState,
)
from pillion.gateway.request.request_telemetry import RequestMeter
from pillion.gateway.tokens.answer_text import AnswerDelta, AnswerText
from pillion.types import Delta, FinishReason, StreamOrigin, Timings, TokenLogprob, ToolCallDelta, Usage

log = logging.getLogger("pillion.gateway")

# Time without a chunk, token or queue heartbeat after which a worker counts as hung.
MAX_SILENCE_S = 300.0
# Silence after which an answer is logged: by then, three heartbeats of the worker are missing.
LOGGED_SILENCE_S = 60.0
DEFECT = "internal error; the gateway's log says more"


@dataclass(eq=False)
class RequestRunner:
    """A running request. Iterate over it asynchronously, in one task, for its deltas; raises PillionError if the
    request fails.

    ``cancel`` may be called at any time, repeatedly, and frees all resources at once (I8).

    Args:
        answers: text of each generated answer so far.
        span: the request's trace span, which the runner ends.
        meter: records token times and the request's end.
        on_end: called once, with the usage.
        story: records the request's events; None without a recorder.
    """

    admitted: AdmittedRequest
    _cluster: Cluster
    _answers: Sequence[AnswerText]
    _span: trace.Span
    _meter: RequestMeter
    _on_end: Callable[[Usage], None]
    _story: Story | None = None
    ended: bool = False
    # The text's vector once the request has ended: float32, little-endian.
    vector: bytes = b""
    # True if it ended with an error other than Cancelled and DeadlineExceeded.
    failed: bool = False
    # True if the error is Overloaded, which asks the client to retry later.
    refused: bool = False
    defect: PillionError | None = None
    _inbox: deque[tuple[int | None, Event]] = field(default_factory=deque)
    _handling: bool = False
    _deadline: asyncio.TimerHandle | None = None
    _silence: asyncio.TimerHandle | None = None
    _waiter: asyncio.Future[None] | None = None
    _emitted: bool = False

    def __post_init__(self) -> None:
        admitted, indexes = self.admitted, range(len(self._answers))
        self._samples = ParallelSamples([RequestMachine(admitted, index) for index in indexes])
        self._calls = [
            ComponentCalls(
                admitted,
                index,
                machine.tokens,
                self._cluster,
                self._span,
                partial(self._post, index),
                self._fail_by_defect,
                AssignedLoad(self._cluster.load),
            )
            for index, machine in enumerate(self._samples.machines)
        ]
        self._outbox = Outbox(admitted, len(indexes))
        self._last_event_s = [time.monotonic()] * len(indexes)
        self._reasons = [""] * len(indexes)
        for index, answer in enumerate(admitted.resume.answers if admitted.resume is not None else ()):
            self._reasons[index] = answer.finish_reason.value if answer.finish_reason is not None else ""

    def start(self) -> None:
        """Start the request. Call once."""
        if self.admitted.deadline is not None:
            left_s = max(0.0, self.admitted.deadline - time.monotonic())
            self._deadline = asyncio.get_running_loop().call_later(left_s, self._post, None, ev.DeadlinePassed())
        self._silence = asyncio.get_running_loop().call_later(min(LOGGED_SILENCE_S, MAX_SILENCE_S), self._watch_silence)
        for index, answer in enumerate(self._answers):
            if answer.stopped:
                self._post(index, ev.StopStringFound(answer.completion_tokens))
        for index, action in self._samples.start():
            self._perform(index, action)

    def cancel(self) -> None:
        """Cancel the request."""
        self._post(None, ev.RequestCancelled())

    @property
    def pending(self) -> bool:
        """True if the next delta or the error can be read without waiting."""
        return self._outbox.pending

    def usage(self) -> Usage:
        usage = self._samples.usage()
        reasoning = sum(one.reasoning_tokens for one in self._answers)
        usage = replace(usage, reasoning_tokens=reasoning, **self._fetched(usage))
        if not self.ended:
            return usage
        receipt = self._samples.receipt(usage)
        if self.admitted.resume is not None:
            # The prompt was computed for the gateway that began the stream.
            receipt["computed_tokens"] += usage.prompt_tokens - usage.cached_tokens
        return replace(usage, **receipt)

    def origin(self) -> StreamOrigin | None:
        """Return what another gateway needs, besides the tokens, to resume this stream; valid from the first delta on.
        None for ranked answers, which cannot be resumed."""
        if len(self._answers) > self.admitted.answers:
            return None
        seed = self.admitted.sampling.seed or 0
        return StreamOrigin(seed, self.admitted.digest(), self._samples.usage().cached_tokens, self.admitted.answer_id)

    def placed_prefix(self) -> PlacedPrefix | None:
        """Return where the prompt's whole blocks are; valid from the first delta on. None without a plan."""
        plan, chain = self._samples.machines[0].plan, self._calls[0].chain
        if plan is None:
            return None
        # Without the prompt's last token, which is always computed.
        whole = (len(self.admitted.prompt) - 1) // plan.block_size
        return PlacedPrefix(plan.node_id, chain.first(whole), plan.block_size)

    @property
    def ended_itself(self) -> bool:
        """True if every answer ended by itself, not at a limit."""
        return all(self._reasons) and FinishReason.LENGTH.value not in self._reasons

    def __aiter__(self) -> RequestRunner:
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

    def _post(self, index: int | None, event: Event) -> None:
        """Handle ``event`` of one answer, or of all if ``index`` is None. Events posted while an event is handled are
        queued."""
        self._inbox.append((index, event))
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox:
                for answer, action in self._handle(*self._inbox.popleft()):
                    self._perform(answer, action)
        except Exception as error:  # noqa: BLE001  (a bug must end its request, not the gateway)
            self._handling = False
            self._fail_by_defect(error)
        finally:
            self._handling = False

    def _handle(self, index: int | None, event: Event) -> list[AnswerAction]:
        now = time.monotonic()
        if index is None:
            actions = self._samples.handle_all(event, now)
        else:
            self._last_event_s[index] = now
            actions = self._samples.handle(index, event, now)
        if self._story is not None:
            self._story.note(index, event, actions, now)
        return actions

    def _fail_by_defect(self, error: BaseException) -> None:
        log.error("request %s failed", self.admitted.request_id, exc_info=error)
        previous, self.defect = self.defect, Internal(DEFECT)
        if previous is None:
            # The cancellation frees the request's resources; the reader gets the internal error instead.
            self._post(None, ev.RequestCancelled())
        self._fail(self.defect)

    def _perform(self, index: int, action: Action) -> None:
        calls = self._calls[index]
        match action:
            case ev.Emit():
                self._emit(index, action)
            case ev.EmitScores(logprobs):
                self._outbox.score(logprobs)
                self._wake()
            case ev.SubmitDecode():
                calls.submit(action, [self._calls[sample] for sample in action.parallel_samples])
            case ev.Finish():
                self.vector = action.vector
                self._finish(index, action.reason)
            case ev.Fail():
                self._fail(self.defect or action.error)
            case _:
                if isinstance(action, ev.LookUp) and action.attempt > 1:
                    self._span.add_event("replay", {"pillion.attempt": action.attempt, "pillion.answer": index})
                calls.perform(action)

    def _emit(self, index: int, action: ev.Emit) -> None:
        """Add tokens to the outbox. Called exactly once for each emitted token, over all answers and attempts."""
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
            reason = FinishReason.STOP
        if answer.calls and reason is FinishReason.STOP:
            # The client must send the calls' results, even if a stop string ended the answer.
            reason = FinishReason.TOOL_CALLS
        self._calls[index].load.end()
        self._reasons[index] = reason.value
        if self._story is not None:
            self._story.answers[index].finish_reason = reason.value
        self._outbox.finish(index, last, reason, answer.stop_string)
        self._wake()
        if all(self._reasons) and not self.ended:
            self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
            self._end(None)

    def _fail(self, error: PillionError) -> None:
        if self.ended:
            return
        self.failed = not isinstance(error, Cancelled | DeadlineExceeded)
        self.refused = isinstance(error, Overloaded)
        self._outbox.fail(error)
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(trace.StatusCode.ERROR, error.message)
        self._end(error)

    def _end(self, error: PillionError | None) -> None:
        self.ended = True
        for calls in self._calls:
            calls.load.end()
        for timer in (self._deadline, self._silence):
            if timer is not None:
                timer.cancel()
        now, usage, span = time.monotonic(), self.usage(), self._span
        timings = self._timings(now)
        if error is None:
            self._outbox.end(usage, timings)
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        span.set_attribute("pillion.attempts", max(machine.attempt for machine in self._samples.machines))
        span.end()
        self._meter.ended(now, usage, timings, self._reasons, error)
        if log.isEnabledFor(logging.INFO):
            self._log_end(usage, timings, error)
        if self._story is not None:
            self._story.ended(now, usage, timings, error)
        self._on_end(usage)
        self._wake()

    def _timings(self, now: float) -> Timings:
        timings = self._samples.timings(now)
        return replace(timings, **self._fetched(timings), system_fingerprint=self.admitted.system_fingerprint)

    def _fetched(self, counts: Usage | Timings) -> dict[str, Any]:
        """Return the fields of Usage and Timings that divide the cached tokens by the source of their fetch."""
        # Limited, since a later attempt may fetch more than the first attempt's cached tokens.
        left = counts.cached_tokens
        fields: dict[str, int] = {}
        for source, tokens in self._calls[0].brought_tokens._asdict().items() if left else ():
            fields[f"{source}_tokens"] = min(tokens, left)
            left -= fields[f"{source}_tokens"]
        return fields

    def _log_end(self, usage: Usage, timings: Timings, error: PillionError | None) -> None:
        how = ",".join(sorted(set(filter(None, self._reasons)))) if error is None else type(error).__name__
        fields = {
            "request_id": self.admitted.request_id,
            "model": self.admitted.model,
            "ended": how,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "time_to_first_token_ms": round(timings.time_to_first_token_ms, 1),
            "total_ms": round(timings.total_ms, 1),
            "replays": timings.replays,
        }
        with trace.use_span(self._span):
            text = " ".join(f"{name}={value}" for name, value in fields.items())
            log.info("request %s", text, extra={"fields": fields})

    def _watch_silence(self) -> None:
        """Log answers that are silent, and end the attempt of those that are silent for too long. Called by a timer."""
        longest_s = 0.0
        for index, machine in enumerate(self._samples.machines):
            if machine.state is RequestState.DONE:
                continue
            silent_s = time.monotonic() - self._last_event_s[index]
            if silent_s >= LOGGED_SILENCE_S and machine.state is not RequestState.FOLLOWING:
                self._log_silence(index, machine, silent_s)
            if silent_s >= MAX_SILENCE_S:
                self._post(index, ev.AttemptSilent(machine.attempt))
                silent_s = 0.0
            longest_s = max(longest_s, silent_s)
        if not self.ended:
            wait_s = min(LOGGED_SILENCE_S, MAX_SILENCE_S - longest_s)
            self._silence = asyncio.get_running_loop().call_later(wait_s, self._watch_silence)

    def _log_silence(self, index: int, machine: RequestMachine, silent_s: float) -> None:
        """Log the state and the workers of a silent answer."""
        planned = () if machine.plan is None else (machine.plan.prefill, machine.plan.decode)
        workers = ", ".join(one.component_id for one in planned if one is not None) or "no plan"
        where = f"answer {index} of request {self.admitted.request_id} is {machine.state.value} ({workers})"
        log.warning("%s in attempt %d, silent for %.0f s", where, machine.attempt, silent_s)


# Max log probabilities of a prompt per delta, including alternatives; they take about 5 ms to convert.
MAX_DELTA_LOGPROBS = 4096


@dataclass(slots=True)
class _Unread:
    """Tokens and text of one answer that the reader has not got yet."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reasoning: list[str] | None = None
    calls: list[ToolCallDelta] | None = None
    finish_reason: FinishReason | None = None
    stop_string: str = ""


@dataclass(eq=False)
class Outbox:
    """Unread deltas of a request, at most one per answer, oldest first.

    ``generated`` is the number of generated answers. If the client gets fewer, these are the best, numbered by rank.
    """

    _admitted: AdmittedRequest
    generated: InitVar[int]
    _pending: deque[int] = field(default_factory=deque)
    _scores: deque[TokenLogprob] = field(default_factory=deque)
    _last: tuple[Usage, Timings] | None = None
    _error: PillionError | None = None
    over: bool = False

    def __post_init__(self, generated: int) -> None:
        self._unread = [_Unread() for _ in range(generated)]
        self._ranks = self._admitted.answers < generated
        self._show_logprobs = self._admitted.asked.sampling.logprobs is not None

    @property
    def pending(self) -> bool:
        """True if a delta or the request's error can be read."""
        return bool(self._pending or self._scores) or (self._error is not None and not self.over)

    def score(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Add log probabilities of the prompt's next tokens, which precede all other deltas."""
        self._scores.extend(logprobs)

    def add(self, index: int, delta: AnswerDelta) -> None:
        """Add tokens and text of an answer."""
        unread = self._unread[index]
        unread.texts.append(delta.text)
        unread.token_ids.extend(delta.token_ids)
        if self._show_logprobs or self._ranks:
            unread.logprobs.extend(delta.logprobs)
        if delta.reasoning or delta.tool_calls:
            if unread.reasoning is None or unread.calls is None:
                unread.reasoning, unread.calls = [], []
            unread.reasoning.append(delta.reasoning)
            unread.calls.extend(delta.tool_calls)
        if delta.token_ids:
            self._mark_pending(index)

    def finish(self, index: int, last: AnswerDelta, reason: FinishReason, stop_string: str = "") -> None:
        """Add the end of an answer, with its withheld text, and the stop string that ended it, or ""."""
        unread = self._unread[index]
        unread.finish_reason, unread.stop_string = reason, stop_string
        self.add(index, last)
        self._mark_pending(index)

    def end(self, usage: Usage, timings: Timings) -> None:
        """End the request's deltas; called right after the last ``finish``."""
        self._last = (usage, timings)
        if self._ranks:
            chosen = rank_answers([unread.logprobs for unread in self._unread], self._admitted.answers)
            self._unread = [self._unread[index] for index in chosen]
            self._pending.extend(range(len(chosen)))

    def fail(self, error: PillionError) -> None:
        """End the request with an error, which follows the pending deltas."""
        self._error = error

    def take(self) -> Delta:
        """Remove and return the next delta; requires ``pending``. Raises the request's error."""
        if self._scores:
            scores, limit = self._scores, MAX_DELTA_LOGPROBS // (1 + len(self._scores[0].top_ids))
            logprobs = tuple(scores.popleft() for _ in range(min(len(scores), max(limit, 1))))
            return Delta(self._admitted.request_id, "", prompt_logprobs=logprobs)
        if not self._pending:
            assert self._error is not None
            self.over = True
            raise self._error
        index = self._pending.popleft()
        unread, self._unread[index] = self._unread[index], _Unread()
        usage, timings = None, None
        if self._last is not None and not self._pending:
            self.over = True
            usage, timings = self._last
        return Delta(
            request_id=self._admitted.request_id,
            text="".join(unread.texts),
            token_ids=tuple(unread.token_ids),
            finish_reason=unread.finish_reason,
            usage=usage,
            timings=timings,
            index=index,
            logprobs=tuple(unread.logprobs) if self._show_logprobs else (),
            reasoning="".join(unread.reasoning) if unread.reasoning else "",
            tool_calls=_merge_calls(unread.calls) if unread.calls else (),
            stop_string=unread.stop_string,
        )

    def _mark_pending(self, index: int) -> None:
        """Queue an answer for the reader, unless it is queued, or answers are ranked at the end."""
        if not self._ranks and index not in self._pending:
            self._pending.append(index)


def _merge_calls(deltas: list[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Merge consecutive deltas of the same tool call into one."""
    merged: list[ToolCallDelta] = []
    for _, group in itertools.groupby(deltas, key=lambda delta: (delta.index, delta.name)):
        same = list(group)
        merged.append(replace(same[0], arguments="".join(delta.arguments for delta in same)))
    return tuple(merged)


def rank_answers(logprobs: Sequence[Sequence[TokenLogprob]], count: int) -> list[int]:
    """Return the indexes of the ``count`` answers with the highest mean log probability per token, best first; ties by
    index. An answer without tokens comes last. This is OpenAI's ``best_of``."""

    def mean(answer: Sequence[TokenLogprob]) -> float:
        return sum(token.logprob for token in answer) / len(answer) if answer else -float("inf")

    return sorted(range(len(logprobs)), key=lambda index: -mean(logprobs[index]))[:count]
