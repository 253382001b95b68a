"""OpenAI's endpoints, and vLLM's two for tokens, around :class:`pillion.gateway.gateway.Gateway`.

body --> checked and converted --> first delta --> status and headers --> events ... usage, [DONE]
            | 4xx with a param        | 4xx, 5xx                 | the error as an event

The status is sent with the first delta, so that a refusal is a status and not an event. A client that goes away before
or after cancels its request (I8).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from pillion.errors import NotFound, PillionError
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.http_api.http_call import HttpCall
from pillion.gateway.http_api.http_errors import ApiError, from_pillion
from pillion.gateway.http_api.openai_events import (
    DONE,
    ChatResponseWriter,
    CompletionResponseWriter,
    ResponseWriter,
    error_event,
    usage_json,
)
from pillion.gateway.http_api.openai_fields import DetokenizeBody, parse
from pillion.gateway.http_api.openai_logprobs import TokenTexts
from pillion.gateway.http_api.openai_reader import DeltaBatch, DeltaReader
from pillion.gateway.http_api.openai_requests import (
    COMPLETION_NAMES,
    OpenAIRequest,
    chat_request,
    completion_request,
    read_ids,
    tokenize_request,
)
from pillion.gateway.request.runner import Generation
from pillion.types import GenerateRequest

# Writes of all streams together: half a core's worth. A write costs more than a token: the wake-up, the framing, the
# system call.
MAX_WRITES_PER_S = 12_000
# What a token's id, and its text, cost in an answer, by the measure of LOOP_BYTES.
TOKEN_ID_BYTES = 1
TOKEN_STRING_BYTES = 8


class OpenAIApi:
    """Handlers of calls; :class:`pillion.gateway.http_api.http_call.Endpoint` turns what they raise into responses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._texts: dict[str, TokenTexts] = {}
        self._pacer = WritePacer()

    async def completions(self, call: HttpCall) -> None:
        """Continues a prompt, or several."""
        read = partial(completion_request, most_ids=self._gateway.longest_tokens)
        await call.while_connected(self._answer(call, read, await call.body()))

    async def chat(self, call: HttpCall) -> None:
        """Answers a conversation with the assistant's next message."""
        await call.while_connected(self._answer(call, chat_request, await call.body()))

    async def tokenize(self, call: HttpCall) -> None:
        """Gives the ids of a prompt or of a conversation, as they would be computed."""
        raw = await call.body()
        body, request = await self._gateway.off_loop(call.tenant, len(raw), tokenize_request, raw)
        entry = self._entry(body.model)
        try:
            bare = body.add_special_tokens is False
            tokens = await self._gateway.tokenize(request, call.tenant, bare=bare)
        except PillionError as error:
            raise from_pillion(error, COMPLETION_NAMES) from None
        texts = self._texts_of(entry) if body.return_token_strs else None
        size = len(tokens) * (TOKEN_STRING_BYTES if texts else TOKEN_ID_BYTES)
        longest = entry.limits.max_model_len_tokens
        await call.answer(200, await self._gateway.off_loop(call.tenant, size, _tokenized, tokens, texts, longest))

    async def detokenize(self, call: HttpCall) -> None:
        """Gives the text of ids."""
        raw = await call.body()
        body = await self._gateway.off_loop(call.tenant, len(raw), parse, raw, DetokenizeBody)
        entry = self._entry(body.model)
        most = entry.limits.max_model_len_tokens
        tokens = await self._gateway.off_loop(call.tenant, len(raw), read_ids, body.tokens, "tokens", most)
        text = await self._gateway.detokenize(entry.limits.name, tokens, call.tenant)
        await call.answer(200, msgspec.json.encode({"prompt": text}))

    async def _prompt_text(self, request: GenerateRequest, tenant: Tenant) -> str:
        """The prompt's text, for an echo."""
        if not request.token_ids:
            return request.text
        return await self._gateway.text_of(request.model, request.token_ids, tenant)

    async def _check_prompts(self, asked: OpenAIRequest, tenant: Tenant) -> None:
        """Checks several prompts before any of them is run. Raises ApiError, naming the prompt."""
        for request, names in zip(asked.requests, asked.names, strict=True):
            try:
                await self._gateway.check(request, tenant)
            except PillionError as error:
                raise from_pillion(error, names) from None

    async def _answer(self, call: HttpCall, read: Callable[[bytes, str], OpenAIRequest], raw: bytes) -> None:
        asked = await self._gateway.off_loop(call.tenant, len(raw), read, raw, call.request_id)
        entry, parent = self._entry(asked.requests[0].model), call.trace_parent()
        if len(asked.requests) > 1:
            await self._check_prompts(asked, call.tenant)

        async def start(request: GenerateRequest) -> Generation:
            return await self._gateway.generate(request, tenant=call.tenant, parent=parent)

        reader = DeltaReader(asked.requests, start)
        try:
            batch = await reader.read()
            # After the first delta: what is refused, or waits for its turn, is not decoded.
            echoed = [await self._prompt_text(one, call.tenant) for one in asked.requests] if asked.echo else []
            writer = self._writer(call, asked, entry, reader, echoed)
            if asked.stream:
                await self._stream(call, asked, reader, writer, batch)
                return
            while batch:
                for prompt, delta in batch:
                    if delta.prompt_logprobs:
                        writer.score(prompt, delta.prompt_logprobs)
                    else:
                        writer.keep(prompt * asked.answers + delta.index, delta)
                batch = await reader.read()
            usage = reader.usage()
            await call.answer(200, await self._gateway.off_loop(call.tenant, writer.size_bytes, writer.whole, usage))
        except PillionError as error:
            raise from_pillion(error, asked.names[reader.failed]) from None
        finally:
            reader.close()

    async def _stream(
        self, call: HttpCall, asked: OpenAIRequest, reader: DeltaReader, writer: ResponseWriter, batch: DeltaBatch
    ) -> None:
        answers, continuous, pacer = asked.answers, asked.continuous_usage, self._pacer
        await call.start_events()
        try:
            with pacer:
                while batch:
                    usage = usage_json(reader.usage()) if continuous else b""
                    if asked.scored:
                        events = await self._scored_events(call.tenant, asked, writer, batch, usage)
                    else:
                        events = [writer.event(prompt * answers + delta.index, delta, usage) for prompt, delta in batch]
                    wrote = time.monotonic()
                    if events:
                        await call.write(b"".join(events))
                    if batch[-1][1].usage is None:
                        await pacer.rest(wrote)
                    batch = await reader.read()
        except PillionError as error:
            failed = from_pillion(error, asked.names[reader.failed])
            await call.write(error_event(failed.body()), last=True)
            return
        last = writer.usage_event(reader.usage()) if asked.include_usage else b""
        await call.write(last + DONE, last=True)

    async def _scored_events(
        self, tenant: Tenant, asked: OpenAIRequest, writer: ResponseWriter, batch: DeltaBatch, usage: bytes
    ) -> list[bytes]:
        """The events of a batch; long ones, which echo log probabilities of a prompt, are made on a thread."""
        events = []
        for prompt, delta in batch:
            index = prompt * asked.answers + delta.index
            if delta.prompt_logprobs:
                writer.score(prompt, delta.prompt_logprobs)
            else:
                size = writer.echo_bytes(index)
                events.append(await self._gateway.off_loop(tenant, size, writer.event, index, delta, usage))
        return events

    def _writer(
        self, call: HttpCall, asked: OpenAIRequest, entry: ModelEntry, reader: DeltaReader, echoed: Sequence[str]
    ) -> ResponseWriter:
        is_chat = bool(asked.requests[0].messages)
        head = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + call.request_id,
            "object": "",
            "created": int(time.time()),
            "model": entry.limits.name,
            "system_fingerprint": reader.fingerprint,
        }
        texts = self._texts_of(entry)
        shown: dict[str, Any] = {
                "logprobs": asked.logprobs,
                "usage_field": asked.include_usage,
                "prompt_logprobs": asked.prompt_logprobs,
            },
        )
        if is_chat:
            return ChatResponseWriter(head, texts, **shown)
        return CompletionResponseWriter(
            head,
            texts,
            **shown,
            prompts=echoed,
            answers=asked.answers,
            echoed_logprobs=asked.requests[0].sampling.logprobs or 0,
            first_token=reader.first_token,
        )

    def _texts_of(self, entry: ModelEntry) -> TokenTexts:
        name = entry.limits.name
        if name not in self._texts:
            self._texts[name] = TokenTexts(entry.tokenizer.spellings)
        return self._texts[name]

    def _entry(self, name: str) -> ModelEntry:
        try:
            return self._gateway.entry(name)
        except NotFound as error:
            raise unknown_model(error.message) from None


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


def _tokenized(tokens: tuple[int, ...], texts: TokenTexts | None, longest: int) -> bytes:
    """The answer of /tokenize, with the text of each token where there are ``texts``."""
    strings = None if texts is None else [texts.text_of(token) for token in tokens]
    answer = {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": strings}
    return msgspec.json.encode(answer)


def unknown_model(message: str) -> ApiError:
    """OpenAI's error for an unknown model: 404."""
    return ApiError(404, message, param="model", code="model_not_found")
