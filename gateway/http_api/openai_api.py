"""OpenAI's completions and vLLM's two endpoints for tokens; calls that the model answers go through ModelCalls."""

from __future__ import annotations

import time
from functools import partial

import msgspec

from pillion.errors import PillionError
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.gateway import ModelEntry
from pillion.gateway.http_api.delta_reader import DeltaReader
from pillion.gateway.http_api.http_call import HttpCall
from pillion.gateway.http_api.http_errors import from_pillion
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.http_api.openai_events import (
    ChatResponseWriter,
    CompletionResponseWriter,
    ReadResponseWriter,
    ResponseWriter,
)
from pillion.gateway.http_api.openai_fields import DetokenizeBody, parse
from pillion.gateway.http_api.openai_logprobs import TokenTexts
from pillion.gateway.http_api.openai_requests import (
    COMPLETION_NAMES,
    OpenAIRequest,
    chat_request,
    completion_request,
    read_ids,
    tokenize_request,
)
from pillion.types import GenerateRequest

# What a token's id, and its text, cost in an answer, by the measure of LOOP_BYTES.
TOKEN_ID_BYTES = 1
TOKEN_STRING_BYTES = 8


class OpenAIApi:
    """Handlers of calls; :class:`pillion.gateway.http_api.http_call.Endpoint` turns what they raise into responses."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._gateway = calls.gateway

    async def completions(self, call: HttpCall) -> None:
        """Continues a prompt, or several."""
        read = partial(completion_request, most_ids=self._gateway.longest_tokens)
        await self._calls.answer(call, read, self._new_writer)

    async def chat(self, call: HttpCall) -> None:
        """Answers a conversation with the assistant's next message."""
        await self._calls.answer(call, chat_request, self._new_writer)

    async def tokenize(self, call: HttpCall) -> None:
        """Gives the ids of a prompt or of a conversation, as they would be computed."""
        await call.while_connected(self._tokenize(call, await call.body()))

    async def detokenize(self, call: HttpCall) -> None:
        """Gives the text of ids."""
        await call.while_connected(self._detokenize(call, await call.body()))

    async def _tokenize(self, call: HttpCall, raw: bytes) -> None:
        body, request = await self._gateway.off_loop(call.tenant, len(raw), tokenize_request, raw)
        entry = await self._calls.entry(body.model, call.tenant)
        try:
            bare = body.add_special_tokens is False
            tokens = await self._gateway.tokenize(request, call.tenant, bare=bare)
        except PillionError as error:
            raise from_pillion(error, COMPLETION_NAMES) from None
        texts = self._calls.texts_of(entry) if body.return_token_strs else None
        size = len(tokens) * (TOKEN_STRING_BYTES if texts else TOKEN_ID_BYTES)
        longest = entry.limits.max_model_len_tokens
        await call.answer(200, await self._gateway.off_loop(call.tenant, size, _tokenized, tokens, texts, longest))

    async def _detokenize(self, call: HttpCall, raw: bytes) -> None:
        body = await self._gateway.off_loop(call.tenant, len(raw), parse, raw, DetokenizeBody)
        entry = await self._calls.entry(body.model, call.tenant)
        most = entry.limits.max_model_len_tokens
        tokens = await self._gateway.off_loop(call.tenant, len(raw), read_ids, body.tokens, "tokens", most)
        text = await self._gateway.detokenize(entry.name, tokens, call.tenant)
        await call.answer(200, msgspec.json.encode({"prompt": text}))

    async def _prompt_text(self, request: GenerateRequest, entry: ModelEntry, tenant: Tenant) -> str:
        """The prompt's text, for an echo."""
        if not request.token_ids:
            return request.text
        # By the model's own name: that of an adapter may have gone since the call came.
        return await self._gateway.text_of(entry.limits.name, request.token_ids, tenant)

    async def _new_writer(
        self, call: HttpCall, asked: OpenAIRequest, entry: ModelEntry, reader: DeltaReader
    ) -> ResponseWriter:
        is_chat = bool(asked.requests[0].messages)
        head = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + call.request_id,
            "object": "",
            "created": int(time.time()),
            "model": entry.name,
            "system_fingerprint": reader.fingerprint,
        }
        texts = self._calls.texts_of(entry)
        if is_chat and entry.formats.read_answers(asked.requests[0].tools):
            return ReadResponseWriter(head, texts, asked)
        if is_chat:
            return ChatResponseWriter(head, texts, asked)
        echoed = [await self._prompt_text(one, entry, call.tenant) for one in asked.requests] if asked.echo else []
        return CompletionResponseWriter(head, texts, asked, echoed, reader.first_token)


def _tokenized(tokens: tuple[int, ...], texts: TokenTexts | None, longest: int) -> bytes:
    """The answer of /tokenize, with the text of each token where there are ``texts``."""
    strings = None if texts is None else [texts.text_of(token) for token in tokens]
    answer = {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": strings}
    return msgspec.json.encode(answer)
