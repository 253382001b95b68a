"""Answers the calls for which a model generates text, of every HTTP API: whole, or as server-sent events.

body --> read by the API --> first delta --> status and headers --> events of the API's writer ... its last events
            | 4xx with a param   | 4xx, 5xx                           | the error as an event

The status is sent with the first delta, so that a refusal is a status and not an event. But proxies hang up on a stream
that is silent for long: after ``ping_ms`` the status is sent without a delta, and something that clients pass
over, again and again until the first delta comes. A client that goes away before or after cancels its request (I8).

A call has one prompt or several, whose deltas are read in batches of all that are there.

one prompt:       its request runner is read directly
several prompts:  a task each reads its request runner into one bounded queue; at most MAX_PROMPTS_AT_ONCE run at a time
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pillion.errors import Internal, NotFound, PillionError
from pillion.gateway.admission.quotas import CountedCall
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.http_api.body_reading import IGNORED_HEADER, BodyReading, read_noting
from pillion.gateway.http_api.http_call import HttpCall
from pillion.gateway.http_api.http_errors import ApiError, from_pillion, spelled_field
from pillion.gateway.http_api.openai_logprobs import TokenTexts
from pillion.gateway.request.admitted_request import AdmittedRequest, PlacedPrefix
from pillion.gateway.request.request_runner import DEFECT, RequestRunner
from pillion.gateway.request.validation import MAX_TOKENS_HEADER, prompt_field
from pillion.types import Delta, GenerateRequest, Usage
from pillion.wire.public import RECORD_HEADER

log = logging.getLogger("pillion.gateway")

MAX_PROMPTS_AT_ONCE = 32
# This many deltas may wait for one client. Further deltas are merged by the runner of each request.
MAX_WAITING_DELTAS = 256
# One write has at most this many deltas.
MAX_BATCH_DELTAS = 256

StartRunner = Callable[[GenerateRequest], Awaitable[RequestRunner]]
# A batch of deltas has pairs of a prompt's index and its delta.
DeltaBatch = list[tuple[int, Delta]]


@dataclass(slots=True, eq=False)
class DeltaReader:
    """Starts the requests of a call with the first ``read``, and reads their deltas. ``close`` cancels all of them, at
    any time (I8)."""

    _requests: Sequence[GenerateRequest]
    _start: StartRunner
    # This holds the runners by the number of their prompts, in the order in which they were started.
    _runners: dict[int, RequestRunner] = field(default_factory=dict)
    _pumps: list[asyncio.Task[None]] = field(default_factory=list)
    _queue: asyncio.Queue[tuple[int, Delta | PillionError] | None] = field(
        default_factory=partial(asyncio.Queue, MAX_WAITING_DELTAS)
    )
    # This is the number of the prompt whose error was raised.
    failed: int = 0
    _running: int = 0

    async def read(self) -> DeltaBatch:
        """Returns the next deltas, at least one, or none at the end of all answers. Raises PillionError."""
        if len(self._requests) > 1:
            return await self._read_several()
        if not self._runners:
            self._runners[0] = await self._start(self._requests[0])
        runner = self._runners[0]
        try:
            batch = [(0, await anext(runner))]
        except StopAsyncIteration:
            return []
        while runner.pending and len(batch) < MAX_BATCH_DELTAS:
            batch.append((0, await anext(runner)))
        return batch

    @property
    def admitted(self) -> AdmittedRequest:
        """Gives the first request that began, as it was admitted. It is known after the first batch."""
        return next(iter(self._runners.values())).admitted

    def cut_tokens(self) -> int | None:
        """Returns the most tokens of an answer, where the contexts of the prompts leave fewer than were asked for; else
        None. It is known after the first batch, for the prompts that run by then."""
        admitted = [runner.admitted for runner in self._runners.values()]
        return min((one.max_tokens for one in admitted if one.cut), default=None)

    def prompt_ids(self, prompt: int) -> tuple[int, ...]:
        """Returns the token ids of a prompt of which a delta has come."""
        return self._runners[prompt].admitted.prompt

    def first_prompt(self) -> tuple[tuple[int, ...], PlacedPrefix | None]:
        """Returns the first prompt's token ids, and where the blocks of all of them are in the cluster. Both are known
        after the first batch."""
        runner = self._runners[0]
        return runner.admitted.prompt, runner.placed_prefix()

    def usage(self) -> Usage:
        """Returns the token counts of all prompts so far."""
        return sum((runner.usage() for runner in self._runners.values()), Usage(0, 0, 0))

    async def _read_several(self) -> DeltaBatch:
        if not self._pumps:
            turns = asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)
            self._running = len(self._requests)
            self._pumps = [asyncio.create_task(self._pump(n, turns)) for n in range(len(self._requests))]
        batch: DeltaBatch = []
        while self._running and not batch:
            batch = self._taken(await self._queue.get(), batch)
        while self._queue.qsize() and len(batch) < MAX_BATCH_DELTAS:
            batch = self._taken(self._queue.get_nowait(), batch)
        return batch

    def close(self) -> None:
        """Cancels the requests that still run."""
        for pump in self._pumps:
            pump.cancel()
        for runner in self._runners.values():
            runner.cancel()

    async def _pump(self, number: int, turns: asyncio.Semaphore) -> None:
        async with turns:
            try:
                runner = self._runners[number] = await self._start(self._requests[number])
                async for delta in runner:
                    await self._queue.put((number, delta))
                await self._queue.put(None)
            except PillionError as error:
                await self._queue.put((number, error))
            except Exception:
                # A defect must end the response, because otherwise the client would wait for ever.
                log.exception("a prompt of a list failed")
                await self._queue.put((number, Internal(DEFECT)))

    def _taken(self, item: tuple[int, Delta | PillionError] | None, batch: DeltaBatch) -> DeltaBatch:
        if item is None:
            self._running -= 1
            return batch
        number, came = item
        if isinstance(came, PillionError):
            self.failed = number
            raise came
        batch.append((number, came))
        return batch


# All streams together may write this often, which takes half a core. A write costs more than a token: the wake-up, the
# framing, the system call.
MAX_WRITES_PER_S = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCall:
    """Holds a parsed call for a model's answers. The calls of each HTTP API extend this class.

    Attributes:
        requests: a request for each prompt; they differ in the prompt alone.
        names: the client's names of fields, by the gateway's, for each prompt.
        stream: whether events are wanted.
    """

    requests: tuple[GenerateRequest, ...]
    names: tuple[Mapping[str, str], ...]
    stream: bool


class AnswerWriter:
    """Writes the response to one call. The writers of each HTTP API extend this class. A response is either written as
    events, or kept and then written as one object.

    Attributes:
        size_bytes: about the size of the whole response so far.
    """

    size_bytes = 0

    def events(self, batch: DeltaBatch, usage: Callable[[], Usage]) -> bytes:
        """Returns the events of some deltas. ``usage`` returns the tokens so far."""
        raise NotImplementedError

    def events_bytes(self, batch: DeltaBatch) -> int:
        """Gives about how large the events of some deltas are, if they may be too large for the event loop; else 0."""
        return 0

    def last_events(self, usage: Usage) -> bytes:
        """Returns the events that stand after those of the last delta."""
        raise NotImplementedError

    def keep(self, prompt: int, delta: Delta) -> None:
        """Collects a delta for :meth:`whole`."""
        raise NotImplementedError

    def whole(self, usage: Usage) -> bytes:
        """Returns everything that :meth:`keep` collected, as one object."""
        raise NotImplementedError


T = TypeVar("T")
Asked = TypeVar("Asked", bound=AskedCall)
# Such a function returns after how many tokens of a call's first prompt others are expected to part from it.
Places = Callable[[HttpCall, Asked, ModelEntry, tuple[int, ...]], Awaitable[tuple[int, ...]]]
# Such a function makes the writer of a call once its first deltas are there.
NewWriter = Callable[[HttpCall, Asked, ModelEntry, DeltaReader], Awaitable[AnswerWriter]]


class ModelCalls:
    """Answers calls for a model's answers, of every HTTP API. ``gateway`` is the gateway behind them; ``strict_fields``
    says whether fields that no API documents are refused, and ``ping_ms`` is the period of pings."""

    def __init__(self, gateway: Gateway, strict_fields: bool = False, ping_ms: int = 0) -> None:
        self.gateway = gateway
        self._strict_fields = strict_fields
        self._ping_s = ping_ms / 1000
        self._texts: dict[str, TokenTexts] = {}
        # So many streams are being written.
        self._streams = 0

    async def answer(
        self,
        call: HttpCall,
        raw: bytes,
        read: Callable[[bytes, str], Asked],
        new_writer: NewWriter[Asked],
        begun: Callable[[HttpCall, Asked, ModelEntry], None] = lambda *_: None,
        places: Places[Asked] | None = None,
    ) -> None:
        """Answers a call whose body ``raw`` is read by ``read``, which gets the request's id, too. ``begun`` is called
        once the call's first prompt has been checked, counted and admitted; ``places`` before that, where a model's
        layers carry states. Raises ApiError."""
        arrived = asyncio.get_running_loop().time()
        asked, parent = await self.read(call, read, raw, call.request_id), call.trace_parent()
        quota: CountedCall | None = None
        # Whoever waits for a whole answer hears nothing before, so that is the time that the answer has.
        patience_s = None if asked.stream else call.patience_s
        recorded = call.header(RECORD_HEADER.encode()).strip() == "1"

        async def start(request: GenerateRequest) -> RequestRunner:
            first = request is asked.requests[0]
            found = partial(places, call, asked, entry) if first and places is not None else None
            runner = await self.gateway.generate(
                request,
                tenant=call.tenant,
                parent=parent,
                entry=entry,
                counted=quota,
                places=found,
                streamed=asked.stream,
                recorded=recorded,
                timeout_s=None if patience_s is None else arrived + patience_s - asyncio.get_running_loop().time(),
            )
            if first:
                begun(call, asked, entry)
            return runner

        reader = DeltaReader(asked.requests, start)
        try:
            heard = self._heard(call, arrived) if asked.stream and self._ping_s else contextlib.nullcontext()
            async with heard, contextlib.AsyncExitStack() as refusable:
                # All prompts of a call are answered by the model that the name means now.
                entry = await self.entry(asked.requests[0].model, call.tenant)
                if len(asked.requests) > 1:
                    quota = await refusable.enter_async_context(await self._counted(asked, entry, call.tenant))
                batch = await reader.read()
                self._name_left_out(call, asked, reader.admitted.grammar.left_out)
                if (cut_tokens := reader.cut_tokens()) is not None:
                    call.notes.append((MAX_TOKENS_HEADER.encode(), b"%d" % cut_tokens))
                # The writer is made after the first delta, so nothing is prepared for a call that is refused or waits.
                writer = await new_writer(call, asked, entry, reader)
            if asked.stream:
                await self._stream(call, reader, writer, batch)
                return
            while batch:
                for prompt, delta in batch:
                    writer.keep(prompt, delta)
                batch = await reader.read()
            usage = reader.usage()
            await call.answer(200, await self.gateway.off_loop(call.tenant, writer.size_bytes, writer.whole, usage))
        except PillionError as error:
            raise from_pillion(error, asked.names[reader.failed]) from None
        finally:
            reader.close()
            if quota is not None:
                quota.end(time.monotonic())

    async def read(self, call: HttpCall, read: Callable[..., T], raw: bytes, *arguments: Any) -> T:
        """Returns ``read(raw, *arguments)``, which reads a call's body. The answer gets a header with the names of the
        fields that have no effect. Raises ApiError."""
        reading = BodyReading(self._strict_fields)
        found: T = await self.gateway.off_loop(call.tenant, len(raw), read_noting, reading, read, raw, *arguments)
        call.reading = reading
        self._name_ignored(call, reading.found)
        return found

    def _name_ignored(self, call: HttpCall, names: Iterable[str]) -> None:
        """Names in the answer's header what has no effect, of which ``names`` are new."""
        if new := list(names):
            header = IGNORED_HEADER.encode()
            call.notes = [(name, value) for name, value in call.notes if name != header]
            call.notes.append((header, call.reading.ignored.encode()))
            self.gateway.refusals.without_effect(call.caller(), new)

    def _name_left_out(self, call: HttpCall, asked: AskedCall, places: Sequence[tuple[str, str]]) -> None:
        """Names in the answer's header the places in a call's schemas to which its answers are not held."""
        before = dict(call.reading.found)
        for name, place in places:
            call.reading.note(spelled_field(name, asked.names[0]) + place)
        self._name_ignored(call, call.reading.found.keys() - before)

    async def entry(self, name: str, tenant: Tenant) -> ModelEntry:
        """Returns the model that a client's ``name`` means. Raises ApiError."""
        try:
            return await self.gateway.find_entry(name, tenant)
        except NotFound as error:
            raise unknown_model(error.message) from None

    def texts_of(self, entry: ModelEntry) -> TokenTexts:
        """Returns the texts of a model's tokens."""
        name = entry.limits.name
        if name not in self._texts:
            self._texts[name] = TokenTexts(entry.tokenizer.spellings)
        return self._texts[name]

    @contextlib.asynccontextmanager
    async def _heard(self, call: HttpCall, arrived_s: float) -> AsyncIterator[None]:
        """Lets a stream's client hear something while its answer has not begun: every ``ping_ms`` since its body
        was there, at ``arrived_s`` of the loop's clock."""
        loop, speaking = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        timer = loop.call_at(arrived_s + self._ping_s, lambda: speaking.add(loop.create_task(self._speak(call))))
        try:
            yield
        finally:
            timer.cancel()
            for task in speaking:
                task.cancel()
            # The next event must not come between the head and what was to be said.
            await asyncio.gather(*speaking, return_exceptions=True)

    async def _speak(self, call: HttpCall) -> None:
        await call.start_events()
        while True:
            await call.write(call.error_form.waiting)
            await asyncio.sleep(self._ping_s)

    async def _stream(self, call: HttpCall, reader: DeltaReader, writer: AnswerWriter, batch: DeltaBatch) -> None:
        await call.start_events()
        self._streams += 1
        try:
            while batch:
                size = writer.events_bytes(batch)
                if size:
                    events = await self.gateway.off_loop(call.tenant, size, writer.events, batch, reader.usage)
                else:
                    events = writer.events(batch, reader.usage)
                wrote = time.monotonic()
                if events:
                    await call.write(events)
                if batch[-1][1].usage is None:
                    # A stream writes as soon as it has something, but no sooner after its last write than its share of
                    # MAX_WRITES_PER_S. So nothing is held back as long as all streams together bring fewer messages
                    # than that, and beyond it the core carries more tokens instead of more system calls.
                    left_s = wrote + self._streams / MAX_WRITES_PER_S - time.monotonic()
                    if left_s > 0:
                        await asyncio.sleep(left_s)
                batch = await reader.read()
        finally:
            self._streams -= 1
        await call.write(writer.last_events(reader.usage()), last=True)

    async def _counted(
        self, asked: AskedCall, entry: ModelEntry, tenant: Tenant
    ) -> contextlib.AbstractAsyncContextManager[CountedCall]:
        """Checks all prompts of a call before any of them is run. Returns a block that counts them all together, until
        it is known that the call is not refused. Raises ApiError, naming the prompt."""
        tokens = 0
        for request, names in zip(asked.requests, asked.names, strict=True):
            try:
                await self.gateway.check(request, tenant)
                if tenant.tokens_per_minute:
                    tokens += len(await self.gateway.prompt_ids(request, entry, tenant))
            except PillionError as error:
                raise from_pillion(error, names) from None
        fields = [names[prompt_field(request)] for request, names in zip(asked.requests, asked.names, strict=True)]
        return self.gateway.counted(tenant, fields, tokens)


def unknown_model(message: str) -> ApiError:
    """Makes OpenAI's error for an unknown model, with the status 404."""
    return ApiError(404, message, param="model", code="model_not_found")
