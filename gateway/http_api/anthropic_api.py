"""Anthropic's endpoints; calls that the model answers go through ModelCalls."""

from __future__ import annotations

import msgspec

from pillion.errors import PillionError
from pillion.gateway.gateway import ModelEntry
from pillion.gateway.http_api.anthropic_events import MessageWriter
from pillion.gateway.http_api.anthropic_requests import MessagesRequest, count_tokens_request, messages_request
from pillion.gateway.http_api.delta_reader import DeltaReader
from pillion.gateway.http_api.http_call import HttpCall
from pillion.gateway.http_api.http_errors import from_pillion
from pillion.gateway.http_api.model_calls import ModelCalls


class AnthropicApi:
    """Handlers of calls; :class:`pillion.gateway.http_api.http_call.Endpoint` turns what they raise into responses."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls

    async def messages(self, call: HttpCall) -> None:
        """Answers a conversation with the assistant's next message, as Anthropic has it."""
        await self._calls.answer(call, messages_request, self._new_writer)

    async def count_tokens(self, call: HttpCall) -> None:
        """Counts the tokens of a conversation, as they would be computed."""
        raw, gateway = await call.body(), self._calls.gateway
        request, names = await gateway.off_loop(call.tenant, len(raw), count_tokens_request, raw)
        await self._calls.entry(request.model, call.tenant)
        try:
            tokens = await gateway.tokenize(request, call.tenant)
        except PillionError as error:
            raise from_pillion(error, names) from None
        await call.answer(200, msgspec.json.encode({"input_tokens": len(tokens)}))

    async def _new_writer(
        self, call: HttpCall, asked: MessagesRequest, entry: ModelEntry, reader: DeltaReader
    ) -> MessageWriter:
        head = {"id": f"msg_{call.request_id}", "model": entry.name, "system_fingerprint": reader.fingerprint}
        return MessageWriter(head, asked.shows_thinking)
