"""Calls that a model answers, at any of the doors: whole, or as server-sent events.

body --> read by the door --> first delta --> status and headers --> events of the door's writer ... its last events
            | 4xx with a param   | 4xx, 5xx                           | the error as an event

The status is sent with the first delta, so that a refusal is a status and not an event. A client that goes away before
or after cancels its request (I8).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pillion.errors import NotFound, PillionError
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.http_api.delta_reader import DeltaBatch, DeltaReader
from pillion.gateway.http_api.http_call import HttpCall
from pillion.gateway.http_api.http_errors import ApiError, from_pillion
from pillion.gateway.http_api.openai_logprobs import TokenTexts
from pillion.gateway.request.runner import Generation
from pillion.gateway.request.validation import MAX_TOKENS_HEADER
from pillion.types import Delta, GenerateRequest, Usage

# Writes of all streams together: half a core's worth. A write costs more than a token: the wake-up, the framing, the
# system call.
MAX_WRITES_PER_S = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCall:
    """A parsed call; the base of all doors'.

    Attributes:
        requests: one for each prompt; they differ in it alone.
        names: the client's names of fields, by the gateway's, for each prompt.
        stream: whether events are wanted.
    """

    requests: tuple[GenerateRequest, ...]
    names: tuple[Mapping[str, str], ...]
    stream: bool


class AnswerWriter:
    """Writes the response to one call; the base of all doors'. Either its events are asked for, or all is kept and then
    written as one object.

    Attributes:
        size_bytes: about what the whole response takes so far.
    """

    size_bytes = 0

    def events(self, batch: DeltaBatch, usage: Callable[[], Usage]) -> bytes:
        """The events of some deltas. ``usage`` gives the tokens so far."""
        raise NotImplementedError

    def events_bytes(self, batch: DeltaBatch) -> int:
        """About how large the events of some deltas are, where they may be too large for the event loop; else 0."""
        return 0

    def last_events(self, usage: Usage) -> bytes:
        """What stands behind the events of the last delta."""
        raise NotImplementedError

    def failed(self, error: bytes) -> bytes:
        """The last event of a stream that fails. ``error`` is its JSON, in the form of the door's errors."""
        raise NotImplementedError

    def keep(self, prompt: int, delta: Delta) -> None:
        """Collects a delta for :meth:`whole`."""
        raise NotImplementedError

    def whole(self, usage: Usage) -> bytes:
        """Everything that was kept, as one object."""
        raise NotImplementedError


Asked = TypeVar("Asked", bound=AskedCall)
# Makes the writer of a call, whose first deltas are there.
NewWriter = Callable[[HttpCall, Asked, ModelEntry, DeltaReader], Awaitable[AnswerWriter]]


class ModelCalls:
    """Answers calls of all doors. ``gateway`` is what stands behind them."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._texts: dict[str, TokenTexts] = {}
        self._pacer = WritePacer()

    async def answer(
        self,
        call: HttpCall,
        read: Callable[[bytes, str], Asked],
        new_writer: NewWriter[Asked],
        begun: Callable[[HttpCall, Asked, ModelEntry], None] = lambda *_: None,
    ) -> None:
        """Reads the body with ``read``, which gets the request's id too, and answers it as long as the client is
        there. ``begun`` is called once its first prompt has been checked, counted and admitted. Raises ApiError."""
        await call.while_connected(self._answer(call, read, new_writer, begun, await call.body()))

    async def entry(self, name: str, tenant: Tenant) -> ModelEntry:
        """The model that a client's ``name`` means. Raises ApiError."""
        try:
            return await self.gateway.find_entry(name, tenant)
        except NotFound as error:
            raise unknown_model(error.message) from None

    def texts_of(self, entry: ModelEntry) -> TokenTexts:
        """The texts of a model's tokens."""
        name = entry.limits.name
        if name not in self._texts:
            self._texts[name] = TokenTexts(entry.tokenizer.spellings)
        return self._texts[name]

    async def _answer(
        self,
        call: HttpCall,
        read: Callable[[bytes, str], Asked],
        new_writer: NewWriter[Asked],
        begun: Callable[[HttpCall, Asked, ModelEntry], None],
        raw: bytes,
    ) -> None:
        asked = await self.gateway.off_loop(call.tenant, len(raw), read, raw, call.request_id)
        # All prompts of a call are answered by what the name means now.
        entry, parent = await self.entry(asked.requests[0].model, call.tenant), call.trace_parent()
        if len(asked.requests) > 1:
            await self._check_prompts(asked, call.tenant)

        async def start(request: GenerateRequest) -> Generation:
            generation = await self.gateway.generate(request, tenant=call.tenant, parent=parent, entry=entry)
            if request is asked.requests[0]:
                begun(call, asked, entry)
            return generation

        reader = DeltaReader(asked.requests, start)
        try:
            batch = await reader.read()
            if (cut_tokens := reader.cut_tokens()) is not None:
                call.notes.append((MAX_TOKENS_HEADER.encode(), b"%d" % cut_tokens))
            # After the first delta: nothing is prepared for what is refused or waits for its turn.
            writer = await new_writer(call, asked, entry, reader)
            if asked.stream:
                await self._stream(call, asked, reader, writer, batch)
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

    async def _stream(
        self, call: HttpCall, asked: AskedCall, reader: DeltaReader, writer: AnswerWriter, batch: DeltaBatch
    ) -> None:
        pacer = self._pacer
        await call.start_events()
        try:
            with pacer:
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
                        await pacer.rest(wrote)
                    batch = await reader.read()
        except PillionError as error:
            said = call.error_form.write(from_pillion(error, asked.names[reader.failed]), call.request_id)[1]
            await call.write(writer.failed(said), last=True)
            return
        await call.write(writer.last_events(reader.usage()), last=True)

    async def _check_prompts(self, asked: AskedCall, tenant: Tenant) -> None:
        """Checks several prompts before any of them is run. Raises ApiError, naming the prompt."""
        for request, names in zip(asked.requests, asked.names, strict=True):
            try:
                await self.gateway.check(request, tenant)
            except PillionError as error:
                raise from_pillion(error, names) from None


class WritePacer:
    """Bounds how often one process writes; ``with pacer`` is one more stream that writes.

    Each stream writes as soon as it has something, but no sooner after its last write than its share of
    MAX_WRITES_PER_S; what comes meanwhile goes with the next write. So nothing is held back as long as all streams
    together bring fewer messages than that, and beyond it the core carries more tokens instead of more system calls.
    """

    def __init__(self) -> None:
        self.streams = 0

    def __enter__(self) -> WritePacer:
        self.streams += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.streams -= 1

    async def rest(self, wrote: float) -> None:
        """Waits until a stream that wrote at ``wrote`` (monotonic seconds) may write again; mostly that is at once."""
        left_s = wrote + self.streams / MAX_WRITES_PER_S - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)


def unknown_model(message: str) -> ApiError:
    """OpenAI's error for an unknown model: 404."""
    return ApiError(404, message, param="model", code="model_not_found")
