"""The lines of batches, served by the handlers of the same calls: there is no second way from a body to an answer."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.batches.batch_runner import LineReply
from pillion.gateway.http_api.anthropic_api import AnthropicApi
from pillion.gateway.http_api.http_call import Endpoint, HttpCall
from pillion.gateway.http_api.http_errors import ANTHROPIC_ERRORS, ErrorForm, refused
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.http_api.openai_api import OpenAIApi
from pillion.gateway.http_api.responses_api import ResponsesApi

# The urls that a batch may call.
BATCH_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


class LineCall(HttpCall):
    """A call that no connection brought: its body is a line's, and its response is kept."""

    def __init__(self, url: str, body: bytes, tenant: Tenant, request_id: str, error_form: ErrorForm) -> None:
        scope = {
            "method": "POST",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "headers": [(b"x-request-id", request_id.encode())],
        }
        super().__init__(scope, _nothing_comes, self._keep, error_form)
        self.tenant = tenant
        self._body = body
        self._status = 0
        self._answer = b""
        self._retry_after_ms = 0

    @property
    def reply(self) -> LineReply:
        """The response, once it is there."""
        return LineReply(self._status, self._answer, self._retry_after_ms / 1000)

    async def body(self) -> bytes:
        """The line's body."""
        return self._body

    async def while_connected(self, work: Awaitable[None]) -> None:
        """Awaits ``work``: there is no client that could go away."""
        await work

    async def start_events(self) -> None:
        """Refuses a stream, which a file cannot hold."""
        raise refused("stream", "the answers of a batch come whole", "unsupported_parameter")

    async def _keep(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._retry_after_ms = int(dict(message["headers"]).get(b"retry-after-ms", b"0"))
        else:
            self._answer += message.get("body", b"")


class LineCalls:
    """Serves lines by their urls."""

    def __init__(self, calls: ModelCalls) -> None:
        openai, anthropic = OpenAIApi(calls), AnthropicApi(calls)
        served = (
            Endpoint("POST", openai.chat),
            Endpoint("POST", openai.completions),
            Endpoint("POST", anthropic.messages, error_form=ANTHROPIC_ERRORS),
            Endpoint("POST", ResponsesApi(calls).responses),
        )
        self._endpoints = dict(zip(BATCH_URLS, served, strict=True))

    async def serve(self, url: str, body: bytes, tenant: Tenant, request_id: str) -> LineReply:
        """Serves one line, whose url is among BATCH_URLS; errors are replies."""
        endpoint = self._endpoints[url]
        call = LineCall(url, body, tenant, request_id, endpoint.error_form)
        await endpoint.answer(call)
        return call.reply


async def _nothing_comes() -> Any:
    raise AssertionError("a line's body is read at once")
