"""OpenAI's completions, whose answers ModelCalls generates, and vLLM's /tokenize and /detokenize."""

from __future__ import annotations

import time
from functools import partial

import msgspec
from starlette.routing import Route

from pillion.errors import PillionError
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.gateway import ModelEntry
from pillion.gateway.http_api.body_reading import parse
from pillion.gateway.http_api.http_call import Endpoint, HttpCall, reads_body
from pillion.gateway.http_api.http_errors import from_pillion
from pillion.gateway.http_api.model_calls import DeltaReader, ModelCalls
from pillion.gateway.http_api.openai_events import (
    ChatResponseWriter,
    CompletionResponseWriter,
    ParsedChatWriter,
    ResponseWriter,
)
from pillion.gateway.http_api.openai_fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
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

CHAT_EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
_PROMPT = {"model": "demo", "prompt": "The capital of France is"}


def openai_routes(calls: ModelCalls) -> list[Route]:
    """Return the routes of OpenAI's API."""
    api, tenant_of = OpenAIApi(calls), calls.gateway.tenant_of
    chat, text = CHAT_EXAMPLE | {"max_tokens": 32}, _PROMPT | {"max_tokens": 16}
    ids = {"model": "demo", "tokens": [1, 2, 3]}
    return [
        Route("/v1/chat/completions", Endpoint("POST", api.chat, tenant_of, ChatBody, example=chat, in_batches=True)),
        Route(
            "/v1/completions",
            Endpoint("POST", api.completions, tenant_of, CompletionBody, example=text, in_batches=True),
        ),
        Route("/tokenize", Endpoint("POST", api.tokenize, tenant_of, TokenizeBody, example=_PROMPT)),
        Route("/detokenize", Endpoint("POST", api.detokenize, tenant_of, DetokenizeBody, example=ids)),
    ]


class OpenAIApi:
    """Handlers of OpenAI's API. :class:`pillion.gateway.http_api.http_call.Endpoint` converts their exceptions to
    responses."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._gateway = calls.gateway

    @reads_body
    async def completions(self, call: HttpCall, raw: bytes) -> None:
        """Generate the continuation of one or several prompts."""
        read = partial(completion_request, max_ids=self._gateway.longest_tokens)
        await self._calls.answer(call, raw, read, self._new_writer)

    @reads_body
    async def chat(self, call: HttpCall, raw: bytes) -> None:
        """Generate the assistant's next message of a conversation."""
        await self._calls.answer(call, raw, chat_request, self._new_writer)

    @reads_body
    async def tokenize(self, call: HttpCall, raw: bytes) -> None:
        """Return the token ids of the prompt that a text or a conversation becomes."""
        body, request = await self._calls.read(call, tokenize_request, raw)
        entry = await self._calls.entry(body.model, call.tenant)
        try:
            no_specials = body.add_special_tokens is False
            tokens = await self._gateway.tokenize(request, call.tenant, bare=no_specials)
        except PillionError as error:
            raise from_pillion(error, COMPLETION_NAMES) from None
        texts = self._calls.texts_of(entry) if body.return_token_strs else None
        # Approximate cost, in bytes as other work on a call; a token's text costs 8 times as much as its id.
        size_bytes = len(tokens) * (8 if texts else 1)
        max_len = entry.limits.max_model_len_tokens
        await call.answer(
            200, await self._gateway.off_loop(call.tenant, size_bytes, _tokenized, tokens, texts, max_len)
        )

    @reads_body
    async def detokenize(self, call: HttpCall, raw: bytes) -> None:
        """Return the text of token ids."""
        body = await self._calls.read(call, parse, raw, DetokenizeBody)
        entry = await self._calls.entry(body.model, call.tenant)
        max_ids = entry.limits.max_model_len_tokens
        tokens = await self._gateway.off_loop(call.tenant, len(raw), read_ids, body.tokens, "tokens", max_ids)
        text = await self._gateway.detokenize(entry.name, tokens, call.tenant)
        await call.answer(200, msgspec.json.encode({"prompt": text}))

    async def _prompt_text(self, request: GenerateRequest, entry: ModelEntry, tenant: Tenant) -> str:
        """Return the prompt's text, possibly truncated, for an answer with echo."""
        token_ids = request.token_ids
        if request.sampling.truncate_prompt_tokens is not None:
            token_ids = await self._gateway.prompt_ids(request, entry, tenant)
        if not token_ids:
            return request.text
        # By the base model's name: the adapter may have been removed since.
        return await self._gateway.text_of(entry.limits.name, token_ids, tenant)

    async def _new_writer(
        self, call: HttpCall, parsed: OpenAIRequest, entry: ModelEntry, reader: DeltaReader
    ) -> ResponseWriter:
        is_chat = bool(parsed.requests[0].messages)
        head = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + call.answer_id,
            "object": "",
            "created": int(time.time()),
            "model": entry.name,
            "system_fingerprint": reader.admitted.system_fingerprint,
        }
        texts, ids = self._calls.texts_of(entry), reader.prompt_ids
        if parsed.body.return_tokens_as_token_ids:
            texts = TokenTexts(entry.tokenizer.spellings, by_ids=True)
        if is_chat and entry.formats.read_answers(parsed.requests[0].tools):
            reasons = entry.formats.reads_reasoning
            return ParsedChatWriter(head, texts, parsed, ids, reasons)
        if is_chat:
            return ChatResponseWriter(head, texts, parsed, ids)
        requests = parsed.requests if parsed.body.echo else ()
        echoed = [await self._prompt_text(request, entry, call.tenant) for request in requests]
        return CompletionResponseWriter(head, texts, parsed, ids, echoed)


def _tokenized(tokens: tuple[int, ...], texts: TokenTexts | None, max_len: int) -> bytes:
    """Return the answer of /tokenize, with the text of each token if ``texts`` is given."""
    strings = None if texts is None else [texts.text_of(token) for token in tokens]
    answer = {"count": len(tokens), "max_model_len": max_len, "tokens": tokens, "token_strs": strings}
    return msgspec.json.encode(answer)
