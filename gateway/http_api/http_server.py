"""Server of the HTTP port, in the gateway's process and event loop: OpenAI's and Anthropic's APIs, and pages."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import errno
import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from pillion._version import VERSION
from pillion.config import GatewayFlags, parse_origins
from pillion.errors import NotFound, Unavailable
from pillion.gateway.gateway import Gateway
from pillion.gateway.http_api import docs_page, openapi
from pillion.gateway.http_api.body_reading import IGNORED_HEADER
from pillion.gateway.http_api.http_call import MAX_HEADER_BYTES, CrossOriginGuard, Endpoint, HttpCall, Methods
from pillion.gateway.http_api.http_connection import HttpConnection, PortState, TlsListener
from pillion.gateway.http_api.http_errors import OPENAI_ERRORS, ApiError, ErrorForm
from pillion.gateway.http_api.model_calls import ModelCalls, unknown_model_error
from pillion.gateway.http_api.openai_api import openai_routes
from pillion.gateway.http_api.public_url import PathPrefixRemover, public_url
from pillion.gateway.request.validation import MAX_TOKENS_HEADER
from pillion.net import tls
from pillion.net.addresses import is_local, listen
from pillion.observability.metrics_export import MetricsPage
from pillion.settings.sampling_defaults import SAMPLING_KEYS
from pillion.types import ModelInfo

log = logging.getLogger("pillion.gateway")

MoreRoutes = Callable[[ModelCalls, Sequence[Route]], list[Route]]

# Max share of the port's connections that are in a TLS handshake.
HANDSHAKE_PERCENT = 25
LISTEN_BACKLOG = 1024
# Connections accepted per iteration of the event loop, before the limits apply to them.
ACCEPTED_AT_ONCE = 32
# Min interval of log lines about accepts that failed for lack of file descriptors.
EXHAUSTED_LOG_S = 60.0
# Min similarity (difflib ratio, 1 for equality) of an unknown path to the one that an error suggests. A missing or
# doubled /v1, a trailing slash and a missing letter are above it.
MIN_PATH_SIMILARITY = 0.8
# Names of this machine, on itself and in Docker's and Podman's containers. None of them can be registered.
_LOCAL_NAMES = ("localhost", "host.docker.internal", "host.containers.internal")


class _Pages:
    """Handlers of health, metrics, models, and the API's description: calls without a body."""

    def __init__(self, gateway: Gateway, flags: GatewayFlags) -> None:
        self._gateway = gateway
        self._root_path, self._encrypted = flags.root_path, bool(flags.tls_cert)
        self._first_page = b"ui" if flags.ui else b"docs"
        self._started = int(time.time())
        self.routes: list[Route] = []
        # Path prefix -> error format of an API, for unknown paths below it.
        self._forms: list[tuple[str, ErrorForm]] = []

    def describe(self, routes: list[Route]) -> None:
        """Set the list of all routes, which the OpenAPI document describes."""
        self.routes = routes
        apps = ((route.path, route.app) for route in routes)
        self._forms = [(f"{path}/", app.error_form) for path, app in apps if isinstance(app, Endpoint)]
        self._forms = [(prefix, form) for prefix, form in self._forms if form is not OPENAI_ERRORS]

    async def health(self, call: HttpCall) -> None:
        """Return 200 if a request would be served now, else 503 with what is missing."""
        missing = self._gateway.not_ready()
        if missing:
            await call.answer(503, msgspec.json.encode({"status": "unavailable", "missing": missing}))
        else:
            await call.answer(200, b'{"status":"ok"}')

    async def ping(self, call: HttpCall) -> None:
        """Return the same as /health, for clients that expect this path."""
        await self.health(call)

    async def ping_posted(self, call: HttpCall) -> None:
        """Return the same as /health, for clients that use POST."""
        await self.health(call)

    async def load(self, call: HttpCall) -> None:
        """Return the number of running requests of this gateway, in vLLM's format."""
        await call.answer(200, msgspec.json.encode({"server_load": self._gateway.active_requests}))

    async def tokenizer_info(self, call: HttpCall) -> None:
        """Return the special tokens and vocabulary size of the tokenizer of the model named by the query parameter
        ``model``."""
        name = call.query("model").get("model", "")
        try:
            entry = await self._gateway.find_entry(name, call.tenant)
        except NotFound as error:
            raise unknown_model_error(error.message) from None
        tokenizer = entry.tokenizer
        await call.answer(
            200,
            msgspec.json.encode(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "model_max_length": entry.limits.max_model_len_tokens,
                    "vocab_size": entry.limits.vocab_size,
                    "add_bos_token": tokenizer.adds_bos,
                    **tokenizer.specials,
                }
            ),
        )

    async def version(self, call: HttpCall) -> None:
        """Return this gateway's version."""
        await call.answer(200, msgspec.json.encode({"version": VERSION}))

    async def metrics(self, call: HttpCall) -> None:
        """Return this gateway's metrics for Prometheus; if several processes share the port, those of the process
        reached."""
        page = MetricsPage(lambda: self._gateway.metrics(call.tenant))
        await call.answer(200, generate_latest(page.registry()), content_type=CONTENT_TYPE_LATEST.encode())

    async def refusals(self, call: HttpCall) -> None:
        """Return for operators the clients whose requests were refused, or had fields without effect, with counts; if
        several processes share the port, those of the process reached."""
        self._gateway.operators_only(call.tenant)
        refusals = self._gateway.refusals
        listed = {"object": "list", "since": int(refusals.since_s), "data": list(refusals.rows())}
        await call.answer(200, msgspec.json.encode(listed))

    async def models(self, call: HttpCall) -> None:
        """List the models that live workers serve, in OpenAI's format."""
        entries = [self._entry(info) for info in self._gateway.models(call.tenant)]
        await call.answer(200, msgspec.json.encode({"object": "list", "data": entries}))

    async def model(self, call: HttpCall) -> None:
        """Describe one model; its name may contain slashes."""
        name = str(call.parameters["name"])
        if not name:
            await self.models(call)
            return
        try:
            entry = await self._gateway.find_entry(name, call.tenant)
        except NotFound as error:
            raise unknown_model_error(error.message) from None
        for info in self._gateway.models(call.tenant):
            if info.name == name:
                await call.answer(200, msgspec.json.encode(self._entry(info)))
                return
        raise Unavailable(self._gateway.missing(entry.limits.name))

    async def start(self, call: HttpCall) -> None:
        """Redirect a browser to the web page (/ui) if enabled, else to /docs."""
        # A relative redirect also works behind a proxy that adds a path.
        await call.answer(307, b"", [(b"location", self._first_page)])

    async def openapi(self, call: HttpCall) -> None:
        """Return the OpenAPI 3.1 document of this API."""
        document, _ = await asyncio.to_thread(lambda: self._description)
        await call.answer(200, document)

    async def docs(self, call: HttpCall) -> None:
        """Show the description of this API as a page."""
        policy = (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'")
        _, page = await asyncio.to_thread(lambda: self._description)
        encrypted = self._encrypted or call.header(b"x-forwarded-proto") == "https"
        address = public_url(call.header(b"host"), self._root_path, encrypted=encrypted)
        page = page.replace(docs_page.ADDRESS.encode(), address.encode())
        await call.answer(200, page, [policy], content_type=b"text/html; charset=utf-8")

    @cached_property
    def _description(self) -> tuple[bytes, bytes]:
        """The OpenAPI document and the page that shows it, generated on the first request since that takes 30 ms."""
        described = openapi.describe(self.routes, self._root_path)
        return msgspec.json.encode(described), docs_page.page(described)

    async def not_found(self, call: HttpCall) -> None:
        """Answer unknown paths with 404."""
        path = call.path[:200]
        known = [route.path for route in self.routes if "{" not in route.path]
        near = next(iter(difflib.get_close_matches(path, known, 1, MIN_PATH_SIMILARITY)), path)
        call.api = "unknown path"
        call.error_form = next((form for prefix, form in self._forms if f"{near}/".startswith(prefix)), OPENAI_ERRORS)
        text = f"there is no {path!r} here"
        # Paths of vLLM.
        if path in ("/pooling", "/v1/pooling", "/v2/pooling"):
            text = f"{path} is not supported; use /v1/embeddings, /v1/classify, /v1/score or /v1/rerank"
        elif path.startswith("/v1/responses/"):
            text = (
                f"{path} is not supported, because no response is stored here: send the whole conversation to"
                " /v1/responses; the client can shorten one that is too long"
            )
        elif near != path:
            text += f"; did you mean {near}? Check whether the client's base URL needs /v1"
        raise ApiError(404, text, code="not_found")

    def _entry(self, info: ModelInfo) -> dict[str, Any]:
        """Return a model in OpenAI's format, with vLLM's ``max_model_len``.

        An adapter has the model as ``parent``, and its digest; an alias has the model as ``root``.
        """
        of_adapter = {"parent": info.parent, "digest": info.adapter} if info.parent else {"parent": None}
        return {
            "id": info.name,
            "object": "model",
            "created": self._started,
            "owned_by": "pillion",
            "root": info.parent or info.alias_of or info.name,
            **of_adapter,
            "max_model_len": info.max_model_len_tokens,
            "tool_call_parser": info.tool_call_parser,
            "reasoning_parser": info.reasoning_parser,
            "weights": info.weights,
            "default_sampling_params": {
                name: value for name in SAMPLING_KEYS if (value := getattr(info.sampling, name)) is not None
            },
        }


def make_app(gateway: Gateway, flags: GatewayFlags, more_routes: MoreRoutes) -> ASGIApp:
    """Create the application with the core's and OpenAI's routes, and ``more_routes`` of features.

    It is a bare router: Starlette's application wraps every write of a stream twice, for errors that Endpoint handles.
    With --allowed-origins the writes of a browser's streams are wrapped once.
    """
    pages, tenant_of = _Pages(gateway, flags), gateway.tenant_of
    calls = ModelCalls(gateway, flags.strict_fields, gateway.limits.stream_ping_ms)
    routes = [
        Route("/health", Endpoint("GET", pages.health, None, statuses=(503,))),
        Route(
            "/ping",
            Methods(
                Endpoint("GET", pages.ping, None, statuses=(503,)),
                Endpoint("POST", pages.ping_posted, None, statuses=(403, 503)),
            ),
        ),
        Route("/version", Endpoint("GET", pages.version, None)),
        Route("/load", Endpoint("GET", pages.load, tenant_of)),
        Route("/tokenizer_info", Endpoint("GET", pages.tokenizer_info, tenant_of)),
        Route("/metrics", Endpoint("GET", pages.metrics, tenant_of)),
        Route("/v1/refusals", Endpoint("GET", pages.refusals, tenant_of)),
        Route("/v1/models", Endpoint("GET", pages.models, tenant_of)),
        Route("/v1/models/{name:path}", Endpoint("GET", pages.model, tenant_of)),
        *openai_routes(calls),
        Route("/", Endpoint("GET", pages.start, None)),
        Route("/openapi.json", Endpoint("GET", pages.openapi, None)),
        Route("/docs", Endpoint("GET", pages.docs, None)),
    ]
    routes += more_routes(calls, tuple(routes))
    pages.describe(routes)
    origins = parse_origins(flags.allowed_origins)
    router = Router(routes, redirect_slashes=False, default=Endpoint("", pages.not_found, None))
    app = CrossOriginGuard(
        PathPrefixRemover(router, flags.root_path) if flags.root_path else router,
        origins,
        gateway.refusals,
        _own_hosts(flags),
    )
    if not origins:
        return app
    return _NamedOriginsCors(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[
            "x-request-id",
            "request-id",
            "retry-after",
            "retry-after-ms",
            MAX_TOKENS_HEADER,
            IGNORED_HEADER,
        ],
    )


class _NamedOriginsCors(CORSMiddleware):
    """CORS middleware. A public web page may call a private address only if its origin is named: '*' would allow every
    page that a user of this network ever opens."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a preflight as Starlette does, but allow named origins on private networks."""
        asks_private = b"access-control-request-private-network"
        plain = Headers(raw=[(name, value) for name, value in request_headers.raw if name != asks_private])
        response = super().preflight_response(plain)
        is_named = request_headers["origin"] in self.allow_origins
        if response.status_code == 200 and is_named and len(plain) < len(request_headers):
            response.headers["Access-Control-Allow-Private-Network"] = "true"
        return response


def _own_hosts(flags: GatewayFlags) -> frozenset[str] | None:
    """Return the accepted Host names, None for any.

    On a local address without API keys, a web page could rebind its own name to this machine's address (DNS rebinding)
    and call the port, so unknown names are refused.
    """
    is_open = not (flags.api_keys or flags.api_key) and is_local(f"{flags.host}:0")
    if "*" in flags.allowed_hosts or not (flags.allowed_hosts or is_open):
        return None
    return frozenset(name.lower() for name in (flags.host, *_LOCAL_NAMES, *flags.allowed_hosts))


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, which belong to the component's process, and without its polling: uvicorn
    checks every 100 ms for shutdown, and waits as long again without connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state: PortState = PortState()
        self.ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        # Uvicorn updates the Date header, which has whole seconds, on ticks with number 0.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self.ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)


@dataclass(eq=False)
class HttpServer:
    """A running HTTP server, which listens on ``address``."""

    _server: _Server
    task: asyncio.Task[None]
    address: str

    @property
    def connections(self) -> Collection[Any]:
        return self._server.server_state.connections

    async def stop(self, grace_s: float = 1.0) -> None:
        """Stop accepting, let responses finish for ``grace_s`` (whole seconds), then close all connections."""
        self._server.config.timeout_graceful_shutdown = max(1, math.ceil(grace_s))
        self._server.should_exit = True
        self._server.ending.set()
        await asyncio.gather(self.task, return_exceptions=True)


def _limit_accept_error_logs() -> None:
    """Limit the event loop's log of failed accepts, for lack of file descriptors, to a line per EXHAUSTED_LOG_S.

    asyncio logs a traceback per attempt, and retries a second later.
    """
    loop, logged_s = asyncio.get_running_loop(), -math.inf
    previous = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_s
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE) and "socket" in context:
            if loop.time() - logged_s >= EXHAUSTED_LOG_S:
                logged_s = loop.time()
                log.error(
                    "no connection can be accepted: %s; raise the limit of open files (ulimit -n)", error.strerror
                )
        elif previous is not None:
            previous(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


async def start_http(
    gateway: Gateway,
    flags: GatewayFlags,
    identity: tls.Identity | None,
    more_routes: MoreRoutes,
    max_connections: int,
) -> HttpServer:
    """Serve HTTP on --host and --http-port (0: any free port), with TLS if there is an ``identity``.

    With --share-ports other processes may listen on the same port; the kernel distributes connections. Raises OSError
    if the address cannot be bound.
    """
    host = flags.host
    listener = listen(host, flags.http_port, LISTEN_BACKLOG, share_port=flags.share_ports)
    bound = listener.getsockname()[1]
    handshakes = 0 if identity is None else max_connections * HANDSHAKE_PERCENT // 100
    config = uvicorn.Config(
        make_app(gateway, flags, more_routes),
        # h11 limits incomplete headers; Endpoint limits complete ones.
        http=HttpConnection,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max_connections - handshakes,
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=gateway.limits.keep_alive_s,
    )
    config.load()
    config.ssl = None if identity is None else tls.http_context(identity)
    server = _Server(config)
    if identity is not None:
        listener = TlsListener(listener, server.server_state.handshakes, handshakes)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    while not server.started and not task.done():  # noqa: ASYNC110  (uvicorn offers no event)
        await asyncio.sleep(0.005)
    # asyncio has set the backlog to ACCEPTED_AT_ONCE.
    listener.listen(LISTEN_BACKLOG)
    _limit_accept_error_logs()
    name = f"[{host}]" if ":" in host else host
    return HttpServer(server, task, f"{name}:{bound}")
