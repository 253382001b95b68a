"""Pillion's endpoints for prompts that are computed ahead and pinned: /v1/cache/prefixes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from msgspec import Raw
from starlette.routing import Route

from pillion.config import GatewayFlags
from pillion.errors import PillionError
from pillion.gateway.http_api.body_reading import given, parse
from pillion.gateway.http_api.http_call import Endpoint, HttpCall, Methods, reads_body
from pillion.gateway.http_api.http_errors import from_pillion, refused
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.http_api.openai_fields import Int
from pillion.gateway.http_api.openai_requests import (
    COMPLETION_NAMES,
    read_ids,
    read_messages,
    read_tools,
    template_kwargs,
)
from pillion.gateway.prefix_pins.prefix_pins import PrefixPins
from pillion.types import ChatOptions, GenerateRequest, PinnedPrefix

_EXAMPLE = {"model": "demo", "prompt": "The capital of France is", "name": "france", "ttl_s": 3600}


def prefix_routes(calls: ModelCalls, flags: GatewayFlags) -> list[Route]:
    """Return the HTTP routes of prefix pins."""
    api, tenant_of = PrefixesApi(calls), calls.gateway.tenant_of
    warm = Endpoint("POST", api.warm, tenant_of, PrefixBody, example=_EXAMPLE)
    return [
        Route("/v1/cache/prefixes", Methods(warm, Endpoint("GET", api.prefixes, tenant_of))),
        Route("/v1/cache/prefixes/{name}", Endpoint("DELETE", api.drop, tenant_of)),
    ]


class PrefixBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/cache/prefixes: a prompt as text, as ids, or as a conversation.

    Attributes:
        model: name of the served model; may be omitted if only one is served.
        prompt: a text.
        tokens: the ids of a prompt.
        messages: a conversation; the prompt ends with its last message.
        tools: functions that the model may call, at most 128.
        chat_template_kwargs: further variables of the model's chat template, such as enable_thinking; at most 16 KiB.
        cache_salt: only requests with the same salt share cached prefixes.
        pin: whether the prompt is evicted after everything that is not pinned; default: true. With false it is only
            computed.
        name: the pin's name; a name in use gets the new prompt. Default: a name derived from the prompt.
        ttl_s: lifetime of the pin, up to 30 days; default: a day.
    """

    model: str = ""
    prompt: str | None = None
    tokens: Raw = Raw()
    messages: Raw = Raw()
    tools: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    cache_salt: str | None = None
    pin: bool = True
    name: str = ""
    ttl_s: Int = 0


class PrefixesApi:
    """Handlers of prefix pins. :class:`pillion.gateway.http_api.http_call.Endpoint` converts their exceptions to
    responses."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._pins = PrefixPins(calls.gateway)

    async def prefixes(self, call: HttpCall) -> None:
        """List the caller's prefix pins."""
        pins = await self._pins.pins(call.tenant)
        await call.answer(200, msgspec.json.encode({"object": "list", "data": [_described(pin) for pin in pins]}))

    async def drop(self, call: HttpCall) -> None:
        """Remove one of the caller's prefix pins. Its blocks stay in the pool until they are evicted."""
        name = str(call.parameters["name"])
        await self._pins.drop(name, call.tenant)
        await call.answer(200, msgspec.json.encode({"object": "cache.prefix", "name": name, "deleted": True}))

    @reads_body
    async def warm(self, call: HttpCall, raw: bytes) -> None:
        """Compute a prompt ahead, in the background, and pin it. Generates nothing."""
        body, request = await self._calls.read(call, _read, raw, self._calls.gateway.longest_tokens)
        await self._calls.entry(body.model, call.tenant)
        try:
            warmed = await self._pins.warm(
                request,
                call.tenant,
                pin=body.pin,
                name=body.name,
                ttl_s=body.ttl_s,
                parent=call.trace_parent(),
            )
        except PillionError as error:
            raise from_pillion(error, COMPLETION_NAMES) from None
        answer = {
            "object": "cache.warmed",
            "computed_tokens": warmed.computed_tokens,
            "found_tokens": warmed.found_tokens,
            "pin": None if warmed.pin is None else _described(warmed.pin),
        }
        await call.answer(200, msgspec.json.encode(answer))


def _read(raw: bytes, max_ids: int) -> tuple[PrefixBody, GenerateRequest]:
    body = parse(raw, PrefixBody)
    if (body.prompt is not None) + given(body.tokens) + given(body.messages) != 1:
        raise refused("prompt", "exactly one of prompt, tokens and messages is needed")
    if body.prompt == "":
        raise refused("prompt", "the prompt is empty")
    for name in ("tools", "chat_template_kwargs"):
        if given(getattr(body, name)) and not given(body.messages):
            raise refused(name, "needs messages")
    prompt: dict[str, Any] = {"text": body.prompt} if body.prompt is not None else {}
    if given(body.tokens):
        prompt = {"token_ids": read_ids(body.tokens, "tokens", max_ids)}
    elif given(body.messages):
        prompt = {"messages": read_messages(body.messages), "tools": read_tools(body.tools, Raw()).options}
        variables = template_kwargs(body.chat_template_kwargs)
        prompt["chat"] = ChatOptions(add_generation_prompt=False, chat_template_kwargs=variables)
    return body, GenerateRequest(model=body.model, cache_salt=body.cache_salt or "", **prompt)


def _described(pin: PinnedPrefix) -> dict[str, Any]:
    return {"object": "cache.prefix", **asdict(pin)}
