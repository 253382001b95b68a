"""One request under way: its state machine's events in, its actions out, and the text to the client.

There is no task per request beyond the calls under way: events are handled where they arrive, on the event loop, and
the reader is woken. What the reader has not taken yet is merged into one delta; it is bounded by ``max_tokens``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from opentelemetry import trace

from gateway import events as ev
from gateway.answer import Answer
from gateway.calls import Calls, Job
from gateway.cluster import Cluster
from gateway.events import Action, Event
from gateway.request import RequestMachine
from pillion.errors import Internal, PillionError
from pillion.types import Delta, FinishReason, Usage

log = logging.getLogger("pillion.gateway")

# Nothing heard of a request for so long, chunk or token: its worker hangs.
MAX_SILENCE_S = 300.0


class Generation:
    """An asynchronous iterator of deltas, for one reader; raises PillionError where the request fails.

    ``cancel`` may be called at any time, any number of times, and frees everything at once (I8).
    """

    def __init__(
        self, job: Job, cluster: Cluster, answer: Answer, span: trace.Span, on_end: Callable[[Usage], None]
    ) -> None:
        self.job = job
        self._answer = answer
        self._span = span
        self._on_end = on_end
        self._machine = RequestMachine(
            job.prompt, job.resolved.max_tokens, frozenset(job.resolved.stop_token_ids), job.max_attempts, job.arrived
        )
        self._calls = Calls(job, cluster, span, self._post, self._broke)
        self._inbox: deque[Event] = deque()
        self._handling = False
        self._defect: PillionError | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._heard_at = time.monotonic()
        self._wake = asyncio.Event()
        self._text: list[str] = []
        self._ids: list[int] = []
        self._last: Delta | PillionError | None = None
        self._read = False

    def start(self) -> None:
        """Begins. Call once."""
        if self.job.deadline is not None:
            left_s = max(0.0, self.job.deadline - time.monotonic())
            self._deadline = asyncio.get_running_loop().call_later(left_s, self._post, ev.DeadlinePassed())
        self._watch_silence()
        self._act(self._machine.start())

    def cancel(self) -> None:
        """The client went away."""
        self._post(ev.Cancelled())

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        if self._read:
            raise StopAsyncIteration
        while not self._ids and self._last is None:
            self._wake.clear()
            await self._wake.wait()
        text, ids = "".join(self._text), tuple(self._ids)
        self._text, self._ids = [], []
        last = self._last
        if last is None or (ids and isinstance(last, PillionError)):
            return Delta(self.job.request_id, text, ids)
        self._read = True
        if isinstance(last, PillionError):
            raise last
        return Delta(last.request_id, text + last.text, ids, last.finish_reason, last.usage, last.timings)

    # ---- events in, actions out ---------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        """Handles ``event`` now; called while another is handled, right after it."""
        self._inbox.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox:
                self._heard_at = time.monotonic()
                self._act(self._machine.handle(self._inbox.popleft(), self._heard_at))
        except Exception as error:  # noqa: BLE001  (a defect must end its request, not the gateway)
            self._handling = False
            self._broke(error)
        finally:
            self._handling = False

    def _broke(self, error: BaseException) -> None:
        log.error("request %s failed", self.job.request_id, exc_info=error)
        again, self._defect = self._defect, Internal("internal error; the gateway's log says more")
        if again is None:
            # Cancelling frees what the request holds; the reader is told the defect instead.
            self._post(ev.Cancelled())
        else:
            self._end(self._defect)

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case ev.LookUp():
                self._calls.look_up(action)
            case ev.OpenTicket():
                self._calls.open_ticket(action)
            case ev.RunSpan():
                self._calls.run_span(action)
            case ev.SubmitDecode():
                self._calls.submit(action)
            case ev.StopWork():
                self._calls.stop_work()
            case ev.CancelDecode():
                self._calls.cancel_decode()
            case ev.ReleaseTicket():
                self._calls.release(action.hold)
            case ev.Emit():
                self._emit(action.token_ids)
            case ev.Finish():
                self._finish(action.reason)
            case ev.Fail():
                self._end(self._defect or action.error)

    def _emit(self, token_ids: tuple[int, ...]) -> None:
        if self._answer.completion_tokens == 0:
            self._span.add_event("first token")
        text, taken = self._answer.push(token_ids)
        self._text.append(text)
        self._ids.extend(taken)
        self._wake.set()
        if self._answer.stopped:
            self._post(ev.StopHit(self._answer.completion_tokens))

    def _finish(self, reason: FinishReason) -> None:
        text = self._answer.flush()
        if self._answer.stopped:
            # The end of the stream made the held-back characters certain, and they completed a stop string.
            reason = FinishReason.STOP
        timings = self._machine.timings(time.monotonic())
        self._end(Delta(self.job.request_id, text, (), reason, self._machine.usage(), timings))

    def _end(self, last: Delta | PillionError) -> None:
        if self._last is not None:
            return
        self._last = last
        self._calls.assign({})
        for timer in (self._deadline, self._silence):
            if timer is not None:
                timer.cancel()
        self._describe(last)
        self._on_end(self._machine.usage())
        self._wake.set()

    def _watch_silence(self) -> None:
        quiet_s = time.monotonic() - self._heard_at
        if quiet_s >= MAX_SILENCE_S:
            self._post(ev.WentSilent(self._machine.attempt))
            quiet_s = 0.0
        if self._last is None:
            self._silence = asyncio.get_running_loop().call_later(MAX_SILENCE_S - quiet_s, self._watch_silence)

    def _describe(self, last: Delta | PillionError) -> None:
        usage, span = self._machine.usage(), self._span
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        span.set_attribute("pillion.attempts", self._machine.attempt)
        if isinstance(last, PillionError):
            span.set_attribute("error.type", type(last).__name__)
            span.set_status(trace.StatusCode.ERROR, last.message)
        elif last.finish_reason is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [last.finish_reason.value])
        span.end()
