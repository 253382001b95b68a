"""Serves a batch's lines by the HTTP port's handlers of their urls."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from starlette.routing import Route

from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.batches.batch_runner import LineReply
from pillion.gateway.http_api.http_call import Endpoint, HttpCall
from pillion.gateway.http_api.http_errors import ErrorForm, refused


class LineCall(HttpCall):
    """An HTTP call whose body comes from a batch's line, and whose response is stored."""

    def __init__(self, url: str, body: bytes, tenant: Tenant, request_id: str, error_form: ErrorForm) -> None:
        scope = {
            "method": "POST",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "headers": [(b"x-request-id", request_id.encode())],
        }
        super().__init__(scope, _receive_nothing, self._store, error_form)
        self.tenant = tenant
        self._body = body
        self._status = 0
        self._answer = b""
        self._retry_after_ms = 0

    @property
    def reply(self) -> LineReply:
        """The response, once the handler has ended."""
        return LineReply(self._status, self._answer, self._retry_after_ms / 1000)

    async def body(self) -> bytes:
        return self._body

    async def while_connected(self, work: Awaitable[None]) -> None:
        """Await ``work``; a line has no client that could disconnect."""
        await work

    async def start_events(self) -> None:
        """Raise ApiError: the answers of a batch are not streamed."""
        raise refused("stream", "a batch's answers cannot be streamed", "unsupported_parameter")

    async def _store(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._retry_after_ms = int(dict(message["headers"]).get(b"retry-after-ms", b"0"))
        else:
            self._answer += message.get("body", b"")


class LineCalls:
    """Endpoints that a batch's lines may call, by url (an HTTP path)."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoint] = {}

    def register(self, routes: Sequence[Route]) -> None:
        """Add the routes whose endpoints allow batches."""
        for route in routes:
            if isinstance(route.app, Endpoint) and route.app.in_batches:
                # Without ``tenant_of``: the tenant is the batch's.
                self._endpoints[route.path] = Endpoint("POST", route.app.handler, None, error_form=route.app.error_form)

    @property
    def urls(self) -> tuple[str, ...]:
        """Urls that a batch may call."""
        return tuple(self._endpoints)

    async def serve(self, url: str, body: bytes, tenant: Tenant, request_id: str) -> LineReply:
        """Serve one line, whose url is among ``urls``. Errors are replies, too."""
        endpoint = self._endpoints[url]
        call = LineCall(url, body, tenant, request_id, endpoint.error_form)
        await endpoint.answer(call)
        return call.reply


async def _receive_nothing() -> Any:
    raise AssertionError("a line's body is never received")
