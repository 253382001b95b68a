"""One HTTP call: its id, its bounded body, its response, and disconnects.

headers --> request id, body (bounded in size and time) --> work --> answer, whole or streamed
                                                             |
                                           disconnect -------+--> the work is cancelled (I8)

Cross-origin writes that a browser sends without a preflight are refused here. Browsers send a preflight, answered by
--allowed-origins, before they send JSON, a DELETE or a key for a page of another origin. They send a form, plain text
or an empty body at once: the page cannot read the answer, but the call is made. So a call that changes something and
needs no preflight must come from a non-browser, from a page of this port, or from an origin in --allowed-origins. This
is decided, as in Go's http.CrossOriginProtection, by headers that pages cannot change: Sec-Fetch-Site, or without it,
on plain HTTP, whether Origin equals Host. A page whose name was rebound to this machine's address (DNS rebinding)
controls both, so the Host must first be one of the port's names, if they are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from opentelemetry import context as otel_context
from starlette.types import ASGIApp, Receive, Scope, Send

from pillion.errors import Internal, PillionError
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.gateway.http_api.body_reading import BodyReading
from pillion.gateway.http_api.http_errors import OPENAI_ERRORS, ApiError, ErrorForm, from_pillion, refused
from pillion.gateway.http_api.request_bodies import MAX_BODY_BYTES, MAX_SENT_BYTES, BodyReader, too_large
from pillion.gateway.request.refusals import STRANGERS, Caller, Refusals
from pillion.gateway.request.request_runner import DEFECT
from pillion.gateway.request.validation import new_answer_id, request_label
from pillion.gateway.tokens.tokenizer import LOOP_BYTES
from pillion.observability import telemetry

log = logging.getLogger("pillion.gateway")

# Max total size of request bodies being read, over all clients.
MAX_BODIES_BYTES = 16 * MAX_BODY_BYTES
# Longer read timeouts of clients count as none.
MAX_READ_TIMEOUT_S = 7 * 24 * 3600.0
MAX_HEADER_BYTES = 32 * 2**10
# Timeout of a whole body, or of each chunk of a body that is processed as it arrives.
BODY_TIMEOUT_S = 60.0
JSON_TYPE = b"application/json"
# Errors sent before the body was read; the connection is closed.
_STATUSES_BEFORE_BODY = (401, 403, 405, 408, 413, 415, 421, 431)

Api = TypeVar("Api")
Headers = list[tuple[bytes, bytes]]


class HttpCall:
    """One HTTP call.

    Attributes:
        request_id: the client's x-request-id if it is valid, else ``answer_id``. Not unique: clients may repeat it.
        answer_id: unique id, from which ids in the response are derived.
        tenant: the caller's tenant, on pages that need a key.
        error_form: format of errors.
        extra_headers: additional headers of the response.
    """

    # Size of all bodies that this process is reading.
    bodies_bytes = 0
    _body_bytes = 0
    tenant = OPEN
    started = _reading = _streams = False
    # Formats an error body as an event of a stream that has started; None for error_form.event.
    error_event: Callable[[bytes], bytes] | None = None

    def __init__(self, scope: Scope, receive: Receive, send: Send, error_form: ErrorForm = OPENAI_ERRORS) -> None:
        self.error_form = error_form
        self.method = str(scope["method"])
        self.path = str(scope["path"])
        self._receive = receive
        self._send = send
        self._headers: dict[bytes, bytes] = {}
        self.header_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        for name, value in scope["headers"]:
            self._headers.setdefault(name, value)
            self.header_bytes += len(name) + len(value)
        self.parameters = scope.get("path_params", {})
        self._query = bytes(scope["query_string"])
        # Name of the API in records of refusals and of fields without effect.
        self.api = self.path
        self._refusals: Refusals | None = scope.get("pillion.refusals")
        self.answer_id = new_answer_id()
        self.extra_headers: Headers = []
        self.reading = BodyReading()

    @property
    def request_id(self) -> str:
        return request_label(self.header(b"x-request-id"), self.answer_id)

    def trace_parent(self) -> otel_context.Context | None:
        """Return the client's trace context, or None."""
        header = self.header(b"traceparent")
        return telemetry.from_traceparent(header) if header else None

    async def body(self) -> bytes:
        """Read the whole body, which must be JSON by its header: decompressed, and without images that no model sees.

        Raises ApiError before more than MAX_BODY_BYTES are stored.
        """
        kind = self._headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != JSON_TYPE:
            raise ApiError(415, "the body must be sent as Content-Type: application/json")
        reader = BodyReader(self.header(b"content-encoding").strip().lower())
        length = self._headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > MAX_SENT_BYTES:
            raise too_large()
        self._reading = True
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read(reader)
        except TimeoutError:
            raise ApiError(408, f"the body took more than {BODY_TIMEOUT_S:g} s") from None
        finally:
            HttpCall.bodies_bytes -= self._body_bytes
            self._body_bytes = 0

    def query(self, *known: str) -> dict[str, str]:
        """Return the query parameters. Raises ApiError for a parameter that is not in ``known``, or is repeated."""
        try:
            parameters = parse_qs(self._query.decode("ascii"), keep_blank_values=True, max_num_fields=16)
        except ValueError:
            raise ApiError(400, "the query parameters cannot be parsed", code="invalid_value") from None
        for name, values in parameters.items():
            if name not in known or len(values) > 1:
                raise refused(name[:100], "this parameter is unknown here, or repeated", "unknown_parameter")
        return {name: values[0] for name, values in parameters.items()}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the chunks of a body of any type and size, each within BODY_TIMEOUT_S. Raises ApiError."""
        self._reading = True
        while True:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await self._receive()
            except TimeoutError:
                raise ApiError(408, f"no bytes of the body arrived for {BODY_TIMEOUT_S:g} s") from None
            if message["type"] != "http.request":
                raise ClientGone
            if not message.get("more_body", False):
                self._reading = False
            yield message.get("body", b"")
            if not self._reading:
                return

    async def while_connected(self, work: Awaitable[None]) -> None:
        """Await ``work``, which is cancelled when the client disconnects (I8)."""
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            # The body has been read, so the next message is the disconnect.
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        watcher = asyncio.create_task(watch(), name="disconnect")
        try:
            await work
        except asyncio.CancelledError:
            if not gone or task.uncancel():
                raise
        finally:
            watcher.cancel()

    async def answer(
        self, status: int, body: bytes, headers: Headers | None = None, *, content_type: bytes = JSON_TYPE
    ) -> None:
        """Send a whole response."""
        length = (b"content-length", b"%d" % len(body))
        await self.start(status, [(b"content-type", content_type), length, *(headers or [])])
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> None:
        """Send an error: as the response, or as the last event of a stream that has started. If the body was not read,
        the connection is closed."""
        if self._refusals is not None:
            reason, parent = error.code or error.kind, self.trace_parent()
            self._refusals.refused(
                self.caller(error.status), error.status, reason, error.param or "", self.request_id, parent
            )
        status, body = self.error_form.write(error, self.request_id)
        if self._streams:
            await self.write((self.error_event or self.error_form.event)(body), last=True)
            return
        close: Headers = [(b"connection", b"close")] if self._reading or error.status in _STATUSES_BEFORE_BODY else []
        await self.answer(status, body, [*error.headers(), *close])

    async def start_events(self) -> None:
        """Start a response of server-sent events, unless it has started."""
        if self._streams:
            return
        await self.start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                # Disable buffering in nginx.
                (b"x-accel-buffering", b"no"),
            ],
        )
        self._streams = True

    def write(self, events: bytes, last: bool = False) -> Awaitable[None]:
        """Send events in one write. Awaiting the result blocks while the client reads too slowly."""
        return self._send({"type": "http.response.body", "body": events, "more_body": not last})

    async def start(self, status: int, headers: Headers) -> None:
        """Start a response whose body the caller writes next."""
        label = self.request_id.encode()
        labels = [(name, label) for name in self.error_form.id_headers]
        headers = [*headers, *self.extra_headers, *labels]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.started = True

    async def _read(self, reader: BodyReader) -> bytes:
        """Read the body until it is complete or too large. Large chunks are processed on a thread."""
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            if reader.compressed or reader.kept_bytes + len(part) > LOOP_BYTES:
                await asyncio.to_thread(reader.feed, part)
            else:
                reader.feed(part)
            HttpCall.bodies_bytes += reader.kept_bytes - self._body_bytes
            self._body_bytes = reader.kept_bytes
            if not more:
                self._reading = False
                return await asyncio.to_thread(reader.whole) if reader.kept_bytes > LOOP_BYTES else reader.whole()
            if HttpCall.bodies_bytes > MAX_BODIES_BYTES:
                text = f"more than {MAX_BODIES_BYTES} bytes of requests are being read"
                raise ApiError(429, text, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_ms=1000)

    def caller(self, status: int = 200) -> Caller:
        """Return the caller for records of refusals; an unknown one for status 401."""
        return Caller(self.api, STRANGERS if status == 401 else self.tenant.name, self.header(b"user-agent"))

    def credentials(self) -> str:
        """Return the credentials as an Authorization header; Anthropic's clients may send the key as x-api-key."""
        key = self.header(b"x-api-key")
        return self.header(b"authorization") or (f"Bearer {key}" if key else "")

    @property
    def read_timeout_s(self) -> float | None:
        """Client's read timeout in seconds, which OpenAI's SDKs send with each call; None if not sent."""
        with contextlib.suppress(ValueError):
            seconds = float(self.header(b"x-stainless-read-timeout") or self.header(b"x-stainless-timeout"))
            return seconds if 0 < seconds <= MAX_READ_TIMEOUT_S else None
        return None

    def header(self, name: bytes) -> str:
        """Return a header's value, or ""."""
        return self._headers.get(name, b"").decode("latin-1")


class ClientGone(Exception):  # noqa: N818
    """Raised if the client disconnects before its request is complete."""


def reads_body(
    handler: Callable[[Api, HttpCall, bytes], Coroutine[Any, Any, None]],
) -> Callable[[Api, HttpCall], Coroutine[Any, Any, None]]:
    """Wrap a handler that also takes the call's JSON body; it is cancelled when the client disconnects (I8)."""

    @wraps(handler)
    async def reading(api: Api, call: HttpCall) -> None:
        await call.while_connected(handler(api, call, await call.body()))

    return reading


@dataclass(frozen=True, eq=False)
class Endpoint:
    """ASGI application of a handler; the handler's exceptions are sent as errors.

    Attributes:
        method: the only allowed method; GET includes HEAD, "" allows any.
        handler: answers a call.
        tenant_of: returns the tenant of an Authorization header, before a body is read; None for a page without a key.
        body: type of the parsed body, for the OpenAPI document.
        error_form: format of the page's errors.
        body_type: the body's content type, for the OpenAPI document.
        example: a body, for the OpenAPI document. A test sends it.
        in_batches: whether a batch may contain this call.
        statuses: further errors of a page without a key, for the OpenAPI document.
    """

    method: str
    handler: Callable[[HttpCall], Awaitable[None]]
    tenant_of: Callable[[str], Tenant] | None
    body: type | None = None
    error_form: ErrorForm = OPENAI_ERRORS
    body_type: str = JSON_TYPE.decode()
    example: Mapping[str, Any] | None = None
    in_batches: bool = False
    statuses: tuple[int, ...] = ()

    @property
    def needs_key(self) -> bool:
        """True if the page needs an API key when API keys are configured."""
        return self.tenant_of is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        await self.answer(HttpCall(scope, receive, send, self.error_form))

    async def answer(self, call: HttpCall) -> None:
        """Answer a call; an exception of the handler becomes an error response."""
        try:
            if self.method not in ("", "GET" if call.method == "HEAD" else call.method):
                raise ApiError(405, f"{call.path} takes {self.method}", code="method_not_allowed")
            if call.header_bytes > MAX_HEADER_BYTES:
                raise ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes")
            if self.tenant_of is not None:
                call.tenant = self.tenant_of(call.credentials())
            await self.handler(call)
        except Exception as error:  # noqa: BLE001  (every call needs an answer)
            await _answer_error(call, error)


async def _answer_error(call: HttpCall, error: Exception) -> None:
    """Send the error response for an exception of a handler."""
    if isinstance(error, ClientGone):
        log.debug("the client of request %s disconnected while sending it", call.request_id)
    elif isinstance(error, ApiError):
        await call.fail(error)
    elif isinstance(error, PillionError):
        await call.fail(from_pillion(error, {}))
    else:
        log.error("request %s failed", call.request_id, exc_info=error)
        if call.started:
            # Only an abort of the connection can signal that the response is incomplete.
            raise error
        await call.fail(from_pillion(Internal(DEFECT), {}))


class Methods:
    """ASGI application of a path with several methods, each with an endpoint."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.endpoints: Sequence[Endpoint] = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        not_allowed = Endpoint(" or ".join(one.method for one in self.endpoints), self.endpoints[0].handler, None)
        await next((one for one in self.endpoints if one.method == method), not_allowed)(scope, receive, send)


def is_cross_origin_write(method: str, headers: Mapping[bytes, bytes], allowed: Collection[str]) -> bool:
    """Return True if a browser may have sent this call without a preflight for a page of an origin not in ``allowed``.

    Names of ``headers`` are in lower case.
    """
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    # The first three methods change nothing; for the others browsers send a preflight, as they do for JSON.
    if method in ("GET", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH") or kind == JSON_TYPE:
        return False
    return _is_foreign(headers, allowed)


def _is_foreign(headers: Mapping[bytes, bytes], allowed: Collection[str]) -> bool:
    """Return True if a browser may have sent a call for a page of an origin not in ``allowed``."""
    origin, site = headers.get(b"origin", b"").decode("latin-1"), headers.get(b"sec-fetch-site", b"")
    if site in (b"same-origin", b"none") or (not site and not origin):
        return False
    if "*" in allowed or origin in allowed:
        return False
    host = headers.get(b"host", b"").decode("latin-1")
    try:
        return bool(site) or not host or urlsplit(origin).netloc.lower() != host.lower()
    except ValueError:
        return True


def host_name(host: str) -> str:
    """Return the name in a Host header, in lower case without port; "" for an IP address or no header."""
    name = re.sub(r":[0-9]*$", "", host)
    for address in (host, name):
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(address.strip("[]"))
            return ""
    return name.lower().removesuffix(".")


class CrossOriginGuard:
    """ASGI application that forwards calls to ``app``, except cross-origin writes, and calls for names not in ``hosts``
    (None: any name). A trailing slash in the path of a POST is removed."""

    def __init__(
        self,
        app: ASGIApp,
        allowed: Collection[str],
        refusals: Refusals | None = None,
        hosts: Collection[str] | None = None,
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._refusals = refusals
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        # Of repeated headers the first one counts, as in HttpCall.
        headers = dict(reversed(scope["headers"])) if scope["type"] == "http" else {}
        scope = {**scope, "pillion.refusals": self._refusals}
        if scope.get("method") == "POST":
            # A redirect would lose the body with some clients.
            scope["path"] = scope["path"].rstrip("/") or "/"
        name = host_name(headers.get(b"host", b"").decode("latin-1"))
        error = None
        if self._hosts is not None and name and name not in self._hosts and not name.endswith(".localhost"):
            error = _misdirected(name)
        elif headers and is_cross_origin_write(scope["method"], headers, self._allowed):
            text = "a browser sent this for a page of another origin; allow it with --allowed-origins"
            error = ApiError(403, text, kind="permission_error", code="cross_origin")
        await (self._app(scope, receive, send) if error is None else HttpCall(scope, receive, send).fail(error))


def _misdirected(name: str) -> ApiError:
    text = (
        f"{name[:100]!r} is not a host name of this port; besides localhost and addresses, --allowed-hosts adds names"
    )
    return ApiError(421, text, code="misdirected_request")
