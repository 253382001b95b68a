"""Endpoints of Anthropic's API; ModelCalls generates the answers."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from starlette.routing import Route

from pillion.config import GatewayFlags
from pillion.errors import PillionError
from pillion.gateway.anthropic.anthropic_errors import ANTHROPIC_ERRORS
from pillion.gateway.anthropic.anthropic_events import MessageWriter
from pillion.gateway.anthropic.anthropic_fields import CountTokensBody, MessagesBody
from pillion.gateway.anthropic.anthropic_requests import MessagesRequest, count_tokens_request, messages_request
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.http_api.http_call import Endpoint, HttpCall, reads_body
from pillion.gateway.http_api.http_errors import from_pillion
from pillion.gateway.http_api.model_calls import DeltaReader, ModelCalls
from pillion.gateway.prefix_pins.breakpoints import Breakpoint, ids_before, shared_tokens
from pillion.gateway.prefix_pins.prefix_pins import EPHEMERAL_WAIT_S, PrefixPins
from pillion.kvstore.hashing import HASH_BYTES
from pillion.tasks import at_most

_EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


def anthropic_routes(calls: ModelCalls, flags: GatewayFlags) -> list[Route]:
    """Return the routes of Anthropic's API."""
    api, tenant_of = AnthropicApi(calls), calls.gateway.tenant_of
    answered = Endpoint(
        "POST",
        api.messages,
        tenant_of,
        MessagesBody,
        ANTHROPIC_ERRORS,
        example=_EXAMPLE | {"max_tokens": 32},
        in_batches=True,
    )
    counted = Endpoint("POST", api.count_tokens, tenant_of, CountTokensBody, ANTHROPIC_ERRORS, example=_EXAMPLE)
    return [Route("/v1/messages", answered), Route("/v1/messages/count_tokens", counted)]


class AnthropicApi:
    """Handlers of Anthropic's API. :class:`pillion.gateway.http_api.http_call.Endpoint` converts their exceptions to
    responses."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._pins = PrefixPins(calls.gateway)

    @reads_body
    async def messages(self, call: HttpCall, raw: bytes) -> None:
        """Generate the assistant's next message of a conversation (Anthropic's Messages)."""
        marked = _MarkedCall(self._calls.gateway, self._pins)
        try:
            await self._calls.answer(
                call, raw, messages_request, marked.new_writer, marked.start_counting, marked.branch_points
            )
        finally:
            marked.close()

    @reads_body
    async def count_tokens(self, call: HttpCall, raw: bytes) -> None:
        """Count the tokens of a conversation's prompt."""
        gateway = self._calls.gateway
        request, names = await self._calls.read(call, count_tokens_request, raw)
        await self._calls.entry(request.model, call.tenant)
        try:
            tokens = await gateway.tokenize(request, call.tenant)
        except PillionError as error:
            raise from_pillion(error, names) from None
        await call.answer(200, msgspec.json.encode({"input_tokens": len(tokens)}))


class _MarkedCall:
    """Breakpoints of one call of /v1/messages.

    The tokens before each breakpoint are counted while the prompt is computed, and pinned after its first delta. For a
    model with recurrent states they are counted before, since its workers store states at these positions.
    """

    def __init__(self, gateway: Gateway, pins: PrefixPins) -> None:
        self._gateway = gateway
        self._pins = pins
        self._counting: asyncio.Future[list[tuple[int, ...] | BaseException | None]] | None = None

    def start_counting(self, call: HttpCall, parsed: MessagesRequest, entry: ModelEntry) -> None:
        """Start to count the prompt's tokens before each breakpoint, unless this was started."""
        if not parsed.breakpoints or not self._gateway.caches_prefixes or self._counting is not None:
            return
        (request,) = parsed.requests
        counts = (ids_before(self._gateway, request, point, entry, call.tenant) for point in parsed.breakpoints)
        self._counting = asyncio.gather(*counts, return_exceptions=True)

    async def branch_points(
        self, call: HttpCall, parsed: MessagesRequest, entry: ModelEntry, prompt: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return the number of prompt tokens before each breakpoint; none unless counted within EPHEMERAL_WAIT_S."""
        self.start_counting(call, parsed, entry)
        counted: list[tuple[int, ...] | BaseException | None] = []
        if self._counting is not None:
            counted = await at_most(EPHEMERAL_WAIT_S, asyncio.shield(self._counting)) or []
        return tuple(_tokens_before(ids, prompt) for ids in counted if not isinstance(ids, BaseException))

    async def new_writer(
        self, call: HttpCall, parsed: MessagesRequest, entry: ModelEntry, reader: DeltaReader
    ) -> MessageWriter:
        """Pin the prompt up to its breakpoints and return the answer's writer, which reports the pinned tokens."""
        head = {
            "id": f"msg_{call.answer_id}",
            "model": entry.name,
            "system_fingerprint": reader.admitted.system_fingerprint,
        }
        pinned: dict[int, int] = {}
        if self._counting is not None:
            # One timeout for all breakpoints bounds the delay of the answer.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EPHEMERAL_WAIT_S):
                    for point, ids in zip(parsed.breakpoints, await self._counting, strict=True):
                        if not isinstance(ids, BaseException):
                            pinned[point.ttl_s] = await self._pin(call, point, ids, entry, reader)
        return MessageWriter(head, parsed.shows_thinking, pinned)

    def close(self) -> None:
        """Cancel the counting of tokens."""
        if self._counting is not None:
            self._counting.cancel()

    async def _pin(
        self, call: HttpCall, point: Breakpoint, ids: tuple[int, ...] | None, entry: ModelEntry, reader: DeltaReader
    ) -> int:
        """Pin the prompt up to a breakpoint; return the number of pinned tokens."""
        prompt, placed = reader.first_prompt()
        if placed is None:
            return 0
        hashed_tokens = len(placed.hashes) // HASH_BYTES * placed.block_size
        tokens = min(len(prompt), hashed_tokens, _tokens_before(ids, prompt))
        tokens -= tokens % placed.block_size
        pinned = await self._pins.pin_ephemeral(placed, call.tenant, tokens, point.ttl_s, entry.name)
        return tokens if pinned else 0


def _tokens_before(ids: tuple[int, ...] | None, prompt: tuple[int, ...]) -> int:
    """Return the number of prompt tokens before a breakpoint, by the ids of the conversation up to it; None for the
    whole prompt."""
    return len(prompt) if ids is None else shared_tokens(ids, prompt)
