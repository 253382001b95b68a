"""Handles one HTTP call: its id, its bounded body, its response, and what happens when its client goes away.

headers --> request id, body (bounded in size and time) --> work --> answer, whole or in pieces
                                                             |
                                              client gone ---+--> the work is cancelled (I8)

Calls that pages of other origins make a browser send without asking first are refused here. A browser asks (a
preflight, which the port answers by --allowed-origins) before it sends JSON, a DELETE or a key for a page of another
origin. It sends a form, a plain text or an empty body at once: the page cannot read the answer, but the call is made.
So a call that changes something and needs no preflight has to come from no browser, from a page of this port, or from a
page that --allowed-origins names. These are told apart by headers that browsers write themselves and pages cannot
change, as Go's http.CrossOriginProtection does it: by Sec-Fetch-Site, and where that is missing, on plain HTTP, by
whether the Origin is the Host that was asked. A page whose own name has become this machine's address (DNS rebinding)
chooses both, so before that the Host must be one of the port's own names, wherever these are known.
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

# All bodies that are being read have at most this many bytes, as thousands of clients may send one at the same time.
MAX_BODIES_BYTES = 16 * MAX_BODY_BYTES
# A client that says that it waits for longer than this is taken to wait for any time.
MAX_PATIENCE_S = 7 * 24 * 3600.0
# Path and headers together have at most this many bytes.
MAX_HEADER_BYTES = 32 * 2**10
# A body that takes longer than this to arrive is refused, because it holds a connection for nothing.
BODY_TIMEOUT_S = 60.0
JSON_TYPE = b"application/json"
# An answer with one of these statuses may come before the call's body has been read.
_UNREAD = (401, 403, 405, 408, 413, 415, 421, 431)

Api = TypeVar("Api")
Headers = list[tuple[bytes, bytes]]


class HttpCall:
    """Represents one call. Its response carries ``request_id``, which is a label and never an address: the client's own
    where it can stand in a header. Ids in the response are made of ``answer_id``, which is never the same again.

    ``tenant`` is the sender, on the pages that need a key. Errors are written in ``error_form``. The response also has
    the headers ``notes``.
    """

    # This counts the bytes of all bodies that this process is reading.
    bodies_bytes = 0
    # So many of them are this call's.
    _body_bytes = 0
    tenant = OPEN
    started = _reading = _streams = False
    # Once events have begun, this writes an error as an event, from its body; None: as the API's errors say.
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
        # What is refused, or had no effect, leaves a trace under this name of the API.
        self.api = self.path
        self._refusals: Refusals | None = scope.get("pillion.refusals")
        self.answer_id = new_answer_id()
        # The response gets these headers beside those of its kind.
        self.notes: Headers = []
        # What the call's body has without effect.
        self.reading = BodyReading()

    @property
    def request_id(self) -> str:
        return request_label(self.header(b"x-request-id"), self.answer_id)

    def trace_parent(self) -> otel_context.Context | None:
        """Returns the client's trace context, None where it sends none."""
        header = self.header(b"traceparent")
        return telemetry.from_traceparent(header) if header else None

    async def body(self) -> bytes:
        """Reads the whole body, which must be JSON by its header: inflated, and without images that no model sees.
        Raises ApiError before more than MAX_BODY_BYTES are kept."""
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
        """Returns the parameters after the path's "?". Raises ApiError for a parameter that is not one of ``known``, or
        comes twice."""
        try:
            found = parse_qs(self._query.decode("ascii"), keep_blank_values=True, max_num_fields=16)
        except ValueError:
            raise ApiError(400, "the path's parameters cannot be read", code="invalid_value") from None
        for name, values in found.items():
            if name not in known or len(values) > 1:
                raise refused(name[:100], "this parameter is not known here, or comes twice", "unknown_parameter")
        return {name: values[0] for name, values in found.items()}

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields a body of any kind as it comes, which may be long: each piece has BODY_TIMEOUT_S. Raises ApiError."""
        self._reading = True
        while True:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await self._receive()
            except TimeoutError:
                raise ApiError(408, f"nothing more of the body came for {BODY_TIMEOUT_S:g} s") from None
            if message["type"] != "http.request":
                raise ClientGone
            if not message.get("more_body", False):
                self._reading = False
            yield message.get("body", b"")
            if not self._reading:
                return

    async def while_connected(self, work: Awaitable[None]) -> None:
        """Awaits ``work``, which is cancelled at once when the call's client goes away (I8)."""
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
        """Sends a whole response to the call."""
        length = (b"content-length", b"%d" % len(body))
        await self.start(status, [(b"content-type", content_type), length, *(headers or [])])
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> None:
        """Sends an error: as the response, or as the last event of a stream that has begun. Where the call's body was
        not read, the connection is closed."""
        if self._refusals is not None:
            reason, parent = error.code or error.kind, self.trace_parent()
            self._refusals.refused(
                self.caller(error.status), error.status, reason, error.param or "", self.request_id, parent
            )
        status, body = self.error_form.write(error, self.request_id)
        if self._streams:
            await self.write((self.error_event or self.error_form.event)(body), last=True)
            return
        close: Headers = [(b"connection", b"close")] if self._reading or error.status in _UNREAD else []
        await self.answer(status, body, [*error.headers(), *close])

    async def start_events(self) -> None:
        """Begins a response of server-sent events, unless it has begun."""
        if self._streams:
            return
        await self.start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                # Proxies that buffer would hold tokens back.
                (b"x-accel-buffering", b"no"),
            ],
        )
        self._streams = True

    def write(self, events: bytes, last: bool = False) -> Awaitable[None]:
        """Writes some events to the client in one write. The result must be awaited, which takes long if the client
        reads slowly."""
        return self._send({"type": "http.response.body", "body": events, "more_body": not last})

    async def start(self, status: int, headers: Headers) -> None:
        """Begins a response whose body the caller writes next."""
        label = self.request_id.encode()
        labels = [(name, label) for name in self.error_form.id_headers]
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.notes, *labels]})
        self.started = True

    async def _read(self, reader: BodyReader) -> bytes:
        """Reads the call's body with ``reader``, and counts its bytes, until it is whole or too large. What takes more
        than some microseconds is done on a thread."""
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            if reader.packed or reader.kept_bytes + len(part) > LOOP_BYTES:
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
        """Returns who calls what. With the status 401 nobody knows whose call it is."""
        return Caller(self.api, STRANGERS if status == 401 else self.tenant.name, self.header(b"user-agent"))

    def credentials(self) -> str:
        """Gives the sender's credentials as an Authorization header has them; Anthropic's clients may send a key in a
        header of its own."""
        key = self.header(b"x-api-key")
        return self.header(b"authorization") or (f"Bearer {key}" if key else "")

    @property
    def patience_s(self) -> float | None:
        """Gives the seconds for which the client waits for the next bytes, as OpenAI's SDKs say with each call; None
        where it does not say."""
        with contextlib.suppress(ValueError):
            seconds = float(self.header(b"x-stainless-read-timeout") or self.header(b"x-stainless-timeout"))
            return seconds if 0 < seconds <= MAX_PATIENCE_S else None
        return None

    def header(self, name: bytes) -> str:
        """Returns a header's value, "" where there is none."""
        return self._headers.get(name, b"").decode("latin-1")


class ClientGone(Exception):  # noqa: N818
    """Says that the client went away before its request was whole."""


def reads_body(
    handler: Callable[[Api, HttpCall, bytes], Coroutine[Any, Any, None]],
) -> Callable[[Api, HttpCall], Coroutine[Any, Any, None]]:
    """Makes a page's handler of a method that takes the call's body, which is JSON, as well. What it does is cancelled
    when the call's client goes away (I8)."""

    @wraps(handler)
    async def reading(api: Api, call: HttpCall) -> None:
        await call.while_connected(handler(api, call, await call.body()))

    return reading


@dataclass(frozen=True, eq=False)
class Endpoint:
    """Represents an ASGI application around a handler of calls; an exception of the handler is sent as an error.

    Attributes:
        method: the only method that is allowed; GET allows HEAD too, "" allows any.
        handler: answers a call.
        tenant_of: finds the tenant by the Authorization header, before a body is read; None says that the page is open
            to everybody, and so has to be given.
        body: the type that the handler reads a body as, for the API's description.
        error_form: how the page's errors are written.
        body_type: the body's content type, for the API's description.
        example: a body, for the API's description. A test sends it.
        in_batches: whether the handler answers with what a model generates, so that a line of a batch may be its call.
        statuses: errors of a page without a key that other such pages do not have, for the API's description.
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
        """Says whether the page needs an API key where API keys are in use."""
        return self.tenant_of is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        await self.answer(HttpCall(scope, receive, send, self.error_form))

    async def answer(self, call: HttpCall) -> None:
        """Answers a call, with an error where the handler raises one."""
        try:
            if self.method not in ("", "GET" if call.method == "HEAD" else call.method):
                raise ApiError(405, f"{call.path} takes {self.method}", code="method_not_allowed")
            if call.header_bytes > MAX_HEADER_BYTES:
                raise ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes")
            if self.tenant_of is not None:
                call.tenant = self.tenant_of(call.credentials())
            await self.handler(call)
        except Exception as error:  # noqa: BLE001  (each call has an answer, whatever failed)
            await _answer_error(call, error)


async def _answer_error(call: HttpCall, error: Exception) -> None:
    """Answers a call whose handler has raised an error."""
    if isinstance(error, ClientGone):
        log.debug("the client of request %s went away while it sent it", call.request_id)
    elif isinstance(error, ApiError):
        await call.fail(error)
    elif isinstance(error, PillionError):
        await call.fail(from_pillion(error, {}))
    else:
        log.error("request %s failed", call.request_id, exc_info=error)
        if call.started:
            # The connection is cut in the middle of the response, which shows the client that the response is not
            # whole.
            raise error
        await call.fail(from_pillion(Internal(DEFECT), {}))


class Methods:
    """Represents an ASGI application of a path that takes several methods, each with an endpoint of its own."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.endpoints: Sequence[Endpoint] = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        other = Endpoint(" or ".join(one.method for one in self.endpoints), self.endpoints[0].handler, None)
        await next((one for one in self.endpoints if one.method == method), other)(scope, receive, send)


# Calls with these methods change nothing, or a browser asks before it sends them for a foreign page.
_SAFE = ("GET", "HEAD", "OPTIONS")
_ASKED_FIRST = ("DELETE", "PUT", "PATCH")


def is_foreign_write(method: str, headers: Mapping[bytes, bytes], allowed: Collection[str]) -> bool:
    """Returns whether a browser may have sent this call for a page of an origin that is not ``allowed``, without asking
    first. ``headers`` have names in small letters."""
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    unasked = method not in _SAFE and method not in _ASKED_FIRST and kind != JSON_TYPE
    return unasked and _is_foreign(headers, allowed)


def _is_foreign(headers: Mapping[bytes, bytes], allowed: Collection[str]) -> bool:
    """Returns whether a browser may have sent a call for a page of an origin that is not ``allowed``."""
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
    """Returns the name in a Host header, in small letters and without its port; "" for an address and for none."""
    name = re.sub(r":[0-9]*$", "", host)
    for address in (host, name):
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(address.strip("[]"))
            return ""
    return name.lower().removesuffix(".")


class OwnPagesWrite:
    """Represents an ASGI application that passes calls on to ``app``, except those for names that are not among its
    ``hosts`` (None: any name), and writes that foreign pages make a browser send. The path of a POST may end with a
    slash."""

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
        # Where a header comes twice the first one counts, as everywhere on the port.
        known = dict(reversed(scope["headers"])) if scope["type"] == "http" else {}
        scope = {**scope, "pillion.refusals": self._refusals}
        if scope.get("method") == "POST":
            # A redirect would lose the body at some clients.
            scope["path"] = scope["path"].rstrip("/") or "/"
        name = host_name(known.get(b"host", b"").decode("latin-1"))
        error = None
        if self._hosts is not None and name and name not in self._hosts and not name.endswith(".localhost"):
            error = _misdirected(name)
        elif known and is_foreign_write(scope["method"], known, self._allowed):
            text = "a browser sent this for a page of another origin; --allowed-origins names those that may"
            error = ApiError(403, text, kind="permission_error", code="cross_origin")
        await (self._app(scope, receive, send) if error is None else HttpCall(scope, receive, send).fail(error))


def _misdirected(name: str) -> ApiError:
    text = f"this port is not asked as {name[:100]!r}; --allowed-hosts names others than localhost and addresses"
    return ApiError(421, text, code="misdirected_request")
