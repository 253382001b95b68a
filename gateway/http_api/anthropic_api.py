"""Anthropic's endpoints; calls that the model answers go through ModelCalls."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from pillion.errors import PillionError
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.http_api.anthropic_events import CachedTo, MessageWriter
from pillion.gateway.http_api.anthropic_requests import MessagesRequest, count_tokens_request, messages_request
from pillion.gateway.http_api.delta_reader import DeltaReader
from pillion.gateway.http_api.http_call import HttpCall
from pillion.gateway.http_api.http_errors import from_pillion
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.prefixes.breakpoints import Breakpoint, ids_before, shared_tokens
from pillion.gateway.prefixes.prefix_pins import EPHEMERAL_WAIT_S, PrefixPins
from pillion.kvstore.hashing import HASH_BYTES

# The longer one of the times to live.
HOUR_S = 3600


class AnthropicApi:
    """Handlers of calls; :class:`pillion.gateway.http_api.http_call.Endpoint` turns what they raise into responses."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._pins = PrefixPins(calls.gateway)

    async def messages(self, call: HttpCall) -> None:
        """Answers a conversation with the assistant's next message, as Anthropic has it."""
        marked = _MarkedCall(self._calls.gateway, self._pins)
        try:
            await self._calls.answer(call, messages_request, marked.new_writer, marked.begun)
        finally:
            marked.close()

    async def count_tokens(self, call: HttpCall) -> None:
        """Counts the tokens of a conversation, as they would be computed."""
        await call.while_connected(self._count_tokens(call, await call.body()))

    async def _count_tokens(self, call: HttpCall, raw: bytes) -> None:
        gateway = self._calls.gateway
        request, names = await gateway.off_loop(call.tenant, len(raw), count_tokens_request, raw)
        await self._calls.entry(request.model, call.tenant)
        try:
            tokens = await gateway.tokenize(request, call.tenant)
        except PillionError as error:
            raise from_pillion(error, names) from None
        await call.answer(200, msgspec.json.encode({"input_tokens": len(tokens)}))


class _MarkedCall:
    """One call of /v1/messages with its breakpoints: their tokens are counted while the prompt is computed, and pinned
    when its first delta is there."""

    def __init__(self, gateway: Gateway, pins: PrefixPins) -> None:
        self._gateway = gateway
        self._pins = pins
        self._counting: asyncio.Future[list[tuple[int, ...] | BaseException | None]] | None = None

    def begun(self, call: HttpCall, asked: MessagesRequest, entry: ModelEntry) -> None:
        """Begins to count."""
        if not asked.breakpoints or not self._gateway.caches_prefixes:
            return
        (request,) = asked.requests
        counts = (ids_before(self._gateway, request, point, entry, call.tenant) for point in asked.breakpoints)
        self._counting = asyncio.gather(*counts, return_exceptions=True)

    async def new_writer(
        self, call: HttpCall, asked: MessagesRequest, entry: ModelEntry, reader: DeltaReader
    ) -> MessageWriter:
        """Makes the writer, which knows what was pinned."""
        head = {"id": f"msg_{call.request_id}", "model": entry.name, "system_fingerprint": reader.fingerprint}
        pinned: dict[int, int] = {}
        if self._counting is not None:
            # One bound for all of the wish: it never holds back an answer for longer.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EPHEMERAL_WAIT_S):
                    for point, ids in zip(asked.breakpoints, await self._counting, strict=True):
                        if not isinstance(ids, BaseException):
                            pinned[point.ttl_s] = await self._retained(call, point, ids, entry, reader)
        return MessageWriter(
            head, asked.shows_thinking, CachedTo(pinned.get(HOUR_S, 0), max(pinned.values(), default=0))
        )

    def close(self) -> None:
        """Ends counting; the call is over."""
        if self._counting is not None:
            self._counting.cancel()

    async def _retained(
        self, call: HttpCall, point: Breakpoint, ids: tuple[int, ...] | None, entry: ModelEntry, reader: DeltaReader
    ) -> int:
        """Pins the prompt up to a breakpoint; returns how many tokens that are, 0 where nothing is pinned."""
        prompt, placed = reader.first_prompt()
        if placed is None:
            return 0
        most = min(len(prompt), len(placed.hashes) // HASH_BYTES * placed.block_size)
        tokens = min(most, len(prompt) if ids is None else shared_tokens(ids, prompt))
        tokens -= tokens % placed.block_size
        done = await self._pins.retain_ephemeral(placed, call.tenant, tokens, point.ttl_s, entry.name)
        return tokens if done else 0
