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
    """Reader of the deltas of a call's requests. The first ``read`` starts the requests; ``close`` cancels them (I8).

    Attributes:
        failed_prompt: number of the prompt whose error ``read`` has raised.
    """

    _requests: Sequence[GenerateRequest]
    _start: StartRunner
    _runners: dict[int, RequestRunner] = field(default_factory=dict)
    _pumps: list[asyncio.Task[None]] = field(default_factory=list)
    _queue: asyncio.Queue[tuple[int, Delta | PillionError] | None] = field(
        default_factory=partial(asyncio.Queue, MAX_WAITING_DELTAS)
    )
    failed_prompt: int = 0
    _running: int = 0

    async def read(self) -> DeltaBatch:
        """Wait for the next delta, and return all that are available; none at the end of all answers. Raises
        PillionError."""
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
        return min((request.max_tokens for request in admitted if request.cut), default=None)

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
            slots = asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)
            self._running = len(self._requests)
            self._pumps = [asyncio.create_task(self._pump(n, slots)) for n in range(len(self._requests))]
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

    async def _pump(self, number: int, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                runner = self._runners[number] = await self._start(self._requests[number])
                async for delta in runner:
                    await self._queue.put((number, delta))
                await self._queue.put(None)
            except PillionError as error:
                await self._queue.put((number, error))
            except Exception:
                # Otherwise the client would wait forever.
                log.exception("prompt %d of a call failed", number)
                await self._queue.put((number, Internal(DEFECT)))

    def _add_to_batch(self, item: tuple[int, Delta | PillionError] | None, batch: DeltaBatch) -> DeltaBatch:
        if item is None:
            self._running -= 1
            return batch
        number, result = item
        if isinstance(result, PillionError):
            self.failed_prompt = number
            raise result
        batch.append((number, result))
        return batch


# Max writes per second of all streams together, about half a core. A write costs more than a token does: a wake-up,
# framing and a system call.
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
    """Writer of the response to one call, as events or as one object; subclassed by each HTTP API.

    Attributes:
        size_bytes: approximate size of the whole response so far.
    """

    size_bytes = 0

    def events(self, batch: DeltaBatch, usage: Callable[[], Usage]) -> bytes:
        """Return the events of some deltas. ``usage`` returns the token counts so far."""
        raise NotImplementedError

    def events_bytes(self, batch: DeltaBatch) -> int:
        """Return the approximate bytes of the events of ``batch`` if formatting them may block the loop, else 0."""
        return 0

    def last_events(self, usage: Usage) -> bytes:
        """Return the events that end the response, after the last delta's."""
        raise NotImplementedError

    def collect(self, prompt: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        raise NotImplementedError

    def whole(self, usage: Usage) -> bytes:
        """Return everything that :meth:`collect` collected, as one object."""
        raise NotImplementedError


T = TypeVar("T")
Parsed = TypeVar("Parsed", bound=ParsedCall)
# Returns token counts of a call's first prompt after which other prompts are expected to diverge.
BranchPoints = Callable[[HttpCall, Parsed, ModelEntry, tuple[int, ...]], Awaitable[tuple[int, ...]]]
NewWriter = Callable[[HttpCall, Parsed, ModelEntry, DeltaReader], Awaitable[AnswerWriter]]


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
        read: Callable[[bytes, str], Parsed],
        new_writer: NewWriter[Parsed],
        on_admitted: Callable[[HttpCall, Parsed, ModelEntry], None] = lambda *_: None,
        branch_points: BranchPoints[Parsed] | None = None,
    ) -> None:
        """Answer a call with the body ``raw``, which ``read`` parses, given the request's id. Raises ApiError.

        ``new_writer`` is called after the first deltas, ``on_admitted`` once the first prompt was validated, charged to
        the quota and admitted, and ``branch_points``, for models with recurrent states, before it is admitted.
        """
        arrived_s = asyncio.get_running_loop().time()
        parsed, parent = await self.read(call, read, raw, call.request_id), call.trace_parent()
        quota: CountedCall | None = None
        # Without a stream, the client receives nothing before the whole answer, so its read timeout is the deadline.
        timeout_s = None if parsed.stream else call.read_timeout_s
        recorded = call.header(RECORD_HEADER.encode()).strip() == "1"

        async def start(request: GenerateRequest) -> RequestRunner:
            first = request is parsed.requests[0]
            points_of = partial(branch_points, call, parsed, entry) if first and branch_points is not None else None
            runner = await self.gateway.generate(
                request,
                tenant=call.tenant,
                parent=parent,
                entry=entry,
                counted=quota,
                branch_points=points_of,
                streamed=parsed.stream,
                recorded=recorded,
                timeout_s=None if timeout_s is None else arrived_s + timeout_s - asyncio.get_running_loop().time(),
            )
            if first:
                on_admitted(call, parsed, entry)
            return runner

        reader = DeltaReader(parsed.requests, start)
        try:
            pinging = self._pinging(call, arrived_s) if parsed.stream and self._ping_s else contextlib.nullcontext()
            async with pinging, contextlib.AsyncExitStack() as refusable:
                # Resolved once: all prompts of a call use the same model.
                entry = await self.entry(parsed.requests[0].model, call.tenant)
                if len(parsed.requests) > 1:
                    quota = await refusable.enter_async_context(await self._charged(parsed, entry, call.tenant))
                batch = await reader.read()
                self._report_unconstrained(call, parsed, reader.admitted.grammar.left_out)
                if (cut_tokens := reader.cut_tokens()) is not None:
                    call.extra_headers.append((MAX_TOKENS_HEADER.encode(), b"%d" % cut_tokens))
                # Created late, so that a call that is refused or still queued costs nothing.
                writer = await new_writer(call, parsed, entry, reader)
            if parsed.stream:
                await self._stream(call, reader, writer, batch)
                return
            while batch:
                for prompt, delta in batch:
                    writer.collect(prompt, delta)
                batch = await reader.read()
            usage = reader.usage()
            await call.answer(200, await self.gateway.off_loop(call.tenant, writer.size_bytes, writer.whole, usage))
        except PillionError as error:
            raise from_pillion(error, parsed.names[reader.failed_prompt]) from None
        finally:
            reader.close()
            if quota is not None:
                quota.end(time.monotonic())

    async def read(self, call: HttpCall, read: Callable[..., T], raw: bytes, *arguments: Any) -> T:
        """Parse a body: return ``read(raw, *arguments)``. A response header names the fields without effect.

        Raises ApiError.
        """
        reading = BodyReading(self._strict_fields)
        parsed: T = await self.gateway.off_loop(call.tenant, len(raw), with_reading, reading, read, raw, *arguments)
        call.reading = reading
        self._report_ignored(call, reading.names)
        return parsed

    def _report_ignored(self, call: HttpCall, names: Iterable[str]) -> None:
        """Update the response header that names fields without effect; ``names`` are new."""
        if new := list(names):
            header = IGNORED_HEADER.encode()
            call.extra_headers = [(name, value) for name, value in call.extra_headers if name != header]
            call.extra_headers.append((header, call.reading.ignored.encode()))
            self.gateway.refusals.without_effect(call.caller(), new)

    def _report_unconstrained(self, call: HttpCall, parsed: ParsedCall, paths: Sequence[tuple[str, str]]) -> None:
        """Name, in the response header, the parts of schemas that do not constrain the answers: (field, path in it)."""
        before = dict(call.reading.names)
        for name, path in paths:
            call.reading.note(client_field(name, parsed.names[0]) + path)
        self._report_ignored(call, call.reading.names.keys() - before)

    async def entry(self, name: str, tenant: Tenant) -> ModelEntry:
        """Return the model of a client's ``name``, which may be an alias or an adapter. Raises ApiError."""
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
                    # Above MAX_WRITES_PER_S, each stream pauses after a write and sends more tokens with the next one,
                    # instead of making more system calls. Below that rate nothing is delayed.
                    left_s = wrote + self._streams / MAX_WRITES_PER_S - time.monotonic()
                    if left_s > 0:
                        await asyncio.sleep(left_s)
                batch = await reader.read()
        finally:
            self._streams -= 1
        await call.write(writer.last_events(reader.usage()), last=True)

    async def _charged(
        self, parsed: ParsedCall, entry: ModelEntry, tenant: Tenant
    ) -> contextlib.AbstractAsyncContextManager[CountedCall]:
        """Validate all prompts of a call before any of them runs.

        Returns a context manager that charges the quota for all of them, and refunds it if the call is refused within
        the context. Raises ApiError, naming the prompt.
        """
        tokens = 0
        for request, names in zip(parsed.requests, parsed.names, strict=True):
            try:
                await self.gateway.check(request, tenant)
                if tenant.tokens_per_minute:
                    tokens += len(await self.gateway.prompt_ids(request, entry, tenant))
            except PillionError as error:
                raise from_pillion(error, names) from None
        fields = [names[prompt_field(request)] for request, names in zip(parsed.requests, parsed.names, strict=True)]
        return self.gateway.counted(tenant, fields, tokens)


def unknown_model_error(message: str) -> ApiError:
    """Return OpenAI's error for an unknown model, with status 404."""
    return ApiError(404, message, param="model", code="model_not_found")
