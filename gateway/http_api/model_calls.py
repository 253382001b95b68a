"""Calls that a model answers, of every HTTP API: as one object, or as server-sent events.

body --> parsed by the API --> first delta --> status and headers --> events of the API's writer ... its last events
            | 4xx with a param   | 4xx, 5xx                             | the error as an event

The status is sent with the first delta, so that a refusal has its own status. But proxies close silent streams: after
``ping_ms`` the status is sent without a delta, followed by a ping per ``ping_ms`` until the first delta. A client that
disconnects before or after cancels its request (I8).

Deltas are read in batches of all that are available.

one prompt:       its request runner is read directly
several prompts:  one task per prompt reads its runner into a bounded queue; at most MAX_PROMPTS_AT_ONCE run at a time
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
from pillion.gateway.http_api.body_reading import IGNORED_HEADER, BodyReading, with_reading
from pillion.gateway.http_api.http_call import HttpCall
from pillion.gateway.http_api.http_errors import ApiError, client_field, from_pillion
from pillion.gateway.http_api.openai_logprobs import TokenTexts
from pillion.gateway.request.admitted_request import AdmittedRequest, PlacedPrefix
from pillion.gateway.request.request_runner import DEFECT, RequestRunner
from pillion.gateway.request.validation import MAX_TOKENS_HEADER, prompt_field
from pillion.types import Delta, GenerateRequest, Usage
from pillion.wire.public import RECORD_HEADER

log = logging.getLogger("pillion.gateway")

MAX_PROMPTS_AT_ONCE = 32
# Deltas queued per client; further ones are merged by each request's runner.
MAX_WAITING_DELTAS = 256
MAX_BATCH_DELTAS = 256

StartRunner = Callable[[GenerateRequest], Awaitable[RequestRunner]]
DeltaBatch = list[tuple[int, Delta]]


@dataclass(slots=True, eq=False)
class DeltaReader:
    """Reader of the deltas of a call's requests, which start with the first ``read``. ``close`` cancels them, at any
    time (I8)."""

    _requests: Sequence[GenerateRequest]
    _start: StartRunner
    _runners: dict[int, RequestRunner] = field(default_factory=dict)
    _pumps: list[asyncio.Task[None]] = field(default_factory=list)
    _queue: asyncio.Queue[tuple[int, Delta | PillionError] | None] = field(
        default_factory=partial(asyncio.Queue, MAX_WAITING_DELTAS)
    )
    failed: int = 0
    _running: int = 0

    async def read(self) -> DeltaBatch:
        """Return at least one delta, or none at the end of all answers. Raises PillionError."""
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
        """The first started request, as admitted; available after the first batch."""
        return next(iter(self._runners.values())).admitted

    def cut_tokens(self) -> int | None:
        """Return the max tokens of an answer if the context leaves fewer than requested, else None.

        Available after the first batch, for the prompts started by then.
        """
        admitted = [runner.admitted for runner in self._runners.values()]
        return min((one.max_tokens for one in admitted if one.cut), default=None)

    def prompt_ids(self, prompt: int) -> tuple[int, ...]:
        """Return the token ids of a prompt that has had a delta."""
        return self._runners[prompt].admitted.prompt

    def first_prompt(self) -> tuple[tuple[int, ...], PlacedPrefix | None]:
        """Return the first prompt's token ids, and the location of its blocks in the cluster.

        Available after the first batch.
        """
        runner = self._runners[0]
        return runner.admitted.prompt, runner.placed_prefix()

    def usage(self) -> Usage:
        """Return the token counts of all prompts so far."""
        return sum((runner.usage() for runner in self._runners.values()), Usage(0, 0, 0))

    async def _read_several(self) -> DeltaBatch:
        if not self._pumps:
            turns = asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)
            self._running = len(self._requests)
            self._pumps = [asyncio.create_task(self._pump(n, turns)) for n in range(len(self._requests))]
        batch: DeltaBatch = []
        while self._running and not batch:
            batch = self._add_to_batch(await self._queue.get(), batch)
        while self._queue.qsize() and len(batch) < MAX_BATCH_DELTAS:
            batch = self._add_to_batch(self._queue.get_nowait(), batch)
        return batch

    def close(self) -> None:
        """Cancel the running requests."""
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
                # Without this the client would wait forever.
                log.exception("a prompt of a list failed")
                await self._queue.put((number, Internal(DEFECT)))

    def _add_to_batch(self, item: tuple[int, Delta | PillionError] | None, batch: DeltaBatch) -> DeltaBatch:
        if item is None:
            self._running -= 1
            return batch
        number, came = item
        if isinstance(came, PillionError):
            self.failed = number
            raise came
        batch.append((number, came))
        return batch


# Writes per second of all streams together, about half a core. A write costs more than a token: wake-up, framing,
# system call.
MAX_WRITES_PER_S = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A parsed call for a model's answers; subclassed by each HTTP API.

    Attributes:
        requests: one per prompt; they differ in the prompt only.
        names: per prompt, the gateway's names of fields -> the client's.
        stream: whether to send events.
    """

    requests: tuple[GenerateRequest, ...]
    names: tuple[Mapping[str, str], ...]
    stream: bool


class AnswerWriter:
    """Writer of the response to one call; subclassed by each HTTP API. A response is either written as events, or
    collected and written as one object.

    Attributes:
        size_bytes: approximate size of the whole response so far.
    """

    size_bytes = 0

    def events(self, batch: DeltaBatch, usage: Callable[[], Usage]) -> bytes:
        """Return the events of some deltas. ``usage`` returns the token counts so far."""
        raise NotImplementedError

    def events_bytes(self, batch: DeltaBatch) -> int:
        """Return the approximate size of some deltas' events if it may block the event loop, else 0."""
        return 0

    def last_events(self, usage: Usage) -> bytes:
        """Return the events after those of the last delta."""
        raise NotImplementedError

    def keep(self, prompt: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        raise NotImplementedError

    def whole(self, usage: Usage) -> bytes:
        """Return everything that :meth:`keep` collected, as one object."""
        raise NotImplementedError


T = TypeVar("T")
Asked = TypeVar("Asked", bound=ParsedCall)
# Returns the numbers of tokens of a call's first prompt after which other prompts are expected to diverge.
Places = Callable[[HttpCall, Asked, ModelEntry, tuple[int, ...]], Awaitable[tuple[int, ...]]]
NewWriter = Callable[[HttpCall, Asked, ModelEntry, DeltaReader], Awaitable[AnswerWriter]]


class ModelCalls:
    """Calls for a model's answers, of every HTTP API.

    Args:
        strict_fields: whether fields that no API documents are refused.
        ping_ms: period of pings, 0 for none.
    """

    def __init__(self, gateway: Gateway, strict_fields: bool = False, ping_ms: int = 0) -> None:
        self.gateway = gateway
        self._strict_fields = strict_fields
        self._ping_s = ping_ms / 1000
        self._texts: dict[str, TokenTexts] = {}
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
        """Answer a call. Raises ApiError.

        ``read`` parses the body ``raw``; its second argument is the request's id. ``begun`` is called after the first
        prompt was validated, counted and admitted, and ``places``, for hybrid models, before that.
        """
        arrived = asyncio.get_running_loop().time()
        asked, parent = await self.read(call, read, raw, call.request_id), call.trace_parent()
        quota: CountedCall | None = None
        # A client without a stream receives nothing earlier, so its read timeout is the answer's deadline.
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
            pinging = self._pinging(call, arrived) if asked.stream and self._ping_s else contextlib.nullcontext()
            async with pinging, contextlib.AsyncExitStack() as refusable:
                # Resolved once: all prompts of a call use the same model.
                entry = await self.entry(asked.requests[0].model, call.tenant)
                if len(asked.requests) > 1:
                    quota = await refusable.enter_async_context(await self._counted(asked, entry, call.tenant))
                batch = await reader.read()
                self._name_left_out(call, asked, reader.admitted.grammar.left_out)
                if (cut_tokens := reader.cut_tokens()) is not None:
                    call.notes.append((MAX_TOKENS_HEADER.encode(), b"%d" % cut_tokens))
                # After the first delta, so that nothing is prepared for a call that is refused or queued.
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
        """Return ``read(raw, *arguments)``, which parses a body; fields without effect are named in a response header.

        Raises ApiError.
        """
        reading = BodyReading(self._strict_fields)
        found: T = await self.gateway.off_loop(call.tenant, len(raw), with_reading, reading, read, raw, *arguments)
        call.reading = reading
        self._name_ignored(call, reading.found)
        return found

    def _name_ignored(self, call: HttpCall, names: Iterable[str]) -> None:
        """Update the response header that names fields without effect; ``names`` are new."""
        if new := list(names):
            header = IGNORED_HEADER.encode()
            call.notes = [(name, value) for name, value in call.notes if name != header]
            call.notes.append((header, call.reading.ignored.encode()))
            self.gateway.refusals.without_effect(call.caller(), new)

    def _name_left_out(self, call: HttpCall, asked: ParsedCall, places: Sequence[tuple[str, str]]) -> None:
        """Name the places in a call's schemas that its answers are not constrained by in the response header."""
        before = dict(call.reading.found)
        for name, place in places:
            call.reading.note(client_field(name, asked.names[0]) + place)
        self._name_ignored(call, call.reading.found.keys() - before)

    async def entry(self, name: str, tenant: Tenant) -> ModelEntry:
        """Return the model that a client's ``name`` means. Raises ApiError."""
        try:
            return await self.gateway.find_entry(name, tenant)
        except NotFound as error:
            raise unknown_model_error(error.message) from None

    def texts_of(self, entry: ModelEntry) -> TokenTexts:
        """Return the cached texts of a model's tokens."""
        name = entry.limits.name
        if name not in self._texts:
            self._texts[name] = TokenTexts(entry.tokenizer.spellings)
        return self._texts[name]

    @contextlib.asynccontextmanager
    async def _pinging(self, call: HttpCall, arrived_s: float) -> AsyncIterator[None]:
        """Send a ping per ``ping_ms`` until the answer starts, counted from ``arrived_s`` (loop time)."""
        loop, pings = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        timer = loop.call_at(arrived_s + self._ping_s, lambda: pings.add(loop.create_task(self._send_pings(call))))
        try:
            yield
        finally:
            timer.cancel()
            for task in pings:
                task.cancel()
            # A ping must be written completely before the next event.
            await asyncio.gather(*pings, return_exceptions=True)

    async def _send_pings(self, call: HttpCall) -> None:
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
                    # A stream writes as soon as it has something, but not before its share of MAX_WRITES_PER_S. Nothing
                    # is delayed below that rate; above it, the core sends more tokens instead of making more system
                    # calls.
                    left_s = wrote + self._streams / MAX_WRITES_PER_S - time.monotonic()
                    if left_s > 0:
                        await asyncio.sleep(left_s)
                batch = await reader.read()
        finally:
            self._streams -= 1
        await call.write(writer.last_events(reader.usage()), last=True)

    async def _counted(
        self, asked: ParsedCall, entry: ModelEntry, tenant: Tenant
    ) -> contextlib.AbstractAsyncContextManager[CountedCall]:
        """Validate all prompts of a call before any of them runs.

        Returns a context that counts them together, and refunds them if the call is refused in it. Raises ApiError,
        naming the prompt.
        """
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


def unknown_model_error(message: str) -> ApiError:
    """Return OpenAI's error for an unknown model, with status 404."""
    return ApiError(404, message, param="model", code="model_not_found")
