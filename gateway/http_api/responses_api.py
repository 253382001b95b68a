"""OpenAI's Responses, without a memory: every call brings its whole conversation, and nothing is stored."""

from __future__ import annotations

import time

from pillion.gateway.gateway import ModelEntry
from pillion.gateway.http_api.delta_reader import DeltaReader
from pillion.gateway.http_api.http_call import HttpCall
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.http_api.responses_events import ResponsesWriter
from pillion.gateway.http_api.responses_requests import ResponsesRequest, responses_request


class ResponsesApi:
    """The handler of calls; :class:`pillion.gateway.http_api.http_call.Endpoint` makes responses of what it raises."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls

    async def responses(self, call: HttpCall) -> None:
        """Answers a conversation with output items: reasoning, messages and calls of functions."""
        await self._calls.answer(call, responses_request, self._new_writer)

    async def _new_writer(
        self, call: HttpCall, asked: ResponsesRequest, entry: ModelEntry, reader: DeltaReader
    ) -> ResponsesWriter:
        head = {
            "id": f"resp_{call.request_id}",
            "created_at": int(time.time()),
            "model": entry.name,
            "system_fingerprint": reader.fingerprint,
            "temperature": reader.sampling.temperature,
            "top_p": reader.sampling.top_p,
        }
        return ResponsesWriter(head, self._calls.texts_of(entry), asked)
