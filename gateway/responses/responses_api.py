"""OpenAI's Responses API without storage: every call contains its whole conversation."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.routing import Route

from pillion.config import GatewayFlags
from pillion.gateway.gateway import ModelEntry
from pillion.gateway.http_api.http_call import Endpoint, HttpCall, reads_body
from pillion.gateway.http_api.model_calls import DeltaReader, ModelCalls
from pillion.gateway.responses.responses_events import ResponsesWriter
from pillion.gateway.responses.responses_fields import ResponsesBody
from pillion.gateway.responses.responses_requests import ResponsesRequest, responses_request
from pillion.types import SamplingParams

_EXAMPLE = {"model": "demo", "input": "What is the capital of France?", "max_output_tokens": 32}


def responses_routes(calls: ModelCalls, flags: GatewayFlags) -> list[Route]:
    """Return the route of the Responses API."""
    api, tenant_of = ResponsesApi(calls), calls.gateway.tenant_of
    answered = Endpoint("POST", api.responses, tenant_of, ResponsesBody, example=_EXAMPLE, in_batches=True)
    return [Route("/v1/responses", answered)]


class ResponsesApi:
    """Handlers of the Responses API. :class:`pillion.gateway.http_api.http_call.Endpoint` converts their exceptions to
    responses."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls

    @reads_body
    async def responses(self, call: HttpCall, raw: bytes) -> None:
        """Generate a conversation's next output items: reasoning, messages and function calls."""
        await self._calls.answer(call, raw, partial(_read, call), self._new_writer)

    async def _new_writer(
        self, call: HttpCall, parsed: ResponsesRequest, entry: ModelEntry, reader: DeltaReader
    ) -> ResponsesWriter:
        head = _head(call, entry.name, reader.admitted.sampling)
        head["system_fingerprint"] = reader.admitted.system_fingerprint
        writer = ResponsesWriter(head, self._calls.texts_of(entry), parsed)
        call.error_event = writer.failed
        return writer


def _read(call: HttpCall, raw: bytes, request_id: str) -> ResponsesRequest:
    """Parse a body. From then on, an error before the first delta ends a stream as a failed response without items.

    Raises ApiError.
    """
    parsed = responses_request(raw, request_id)
    first = parsed.requests[0]
    call.error_event = ResponsesWriter(_head(call, first.model, first.sampling), None, parsed).failed
    return parsed


def _head(call: HttpCall, model: str, sampling: SamplingParams) -> dict[str, Any]:
    """Return the response's fields that its call determines."""
    return {
        "id": f"resp_{call.answer_id}",
        "created_at": int(time.time()),
        "model": model,
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "presence_penalty": sampling.presence_penalty or 0.0,
        "frequency_penalty": sampling.frequency_penalty or 0.0,
    }
