"""The HTTP port, in the gateway's process and event loop: OpenAI's and Anthropic's APIs, and pages of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Any

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from pillion._version import VERSION
from pillion.config import GatewayFlags, listed_origins
from pillion.errors import PillionError, Unavailable
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.batches.batch_runner import BatchRunner
from pillion.gateway.gateway import Gateway
from pillion.gateway.http_api import docs_page, openapi
from pillion.gateway.http_api.adapters_api import AdaptersApi, LoadAdapterBody, UnloadAdapterBody
from pillion.gateway.http_api.anthropic_api import AnthropicApi
from pillion.gateway.http_api.anthropic_fields import CountTokensBody, MessagesBody
from pillion.gateway.http_api.batches_api import BatchBody, BatchesApi
from pillion.gateway.http_api.cross_origin import OwnPagesWrite
from pillion.gateway.http_api.http_call import MAX_HEADER_BYTES, Endpoint, HttpCall, Methods
from pillion.gateway.http_api.http_connection import HttpConnection, PortState
from pillion.gateway.http_api.http_errors import ANTHROPIC_ERRORS, ApiError
from pillion.gateway.http_api.model_calls import ModelCalls, unknown_model
from pillion.gateway.http_api.multipart import FORM_TYPE, UploadForm
from pillion.gateway.http_api.openai_api import OpenAIApi
from pillion.gateway.http_api.openai_fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pillion.gateway.http_api.prefixes_api import PrefixBody, PrefixesApi
from pillion.gateway.http_api.responses_api import ResponsesApi
from pillion.gateway.http_api.responses_fields import ResponsesBody
from pillion.gateway.http_api.ui_api import UiApi
from pillion.gateway.request.validation import MAX_TOKENS_HEADER
from pillion.net import tls
from pillion.observability.metrics_export import MetricsPage
from pillion.sampling_defaults import SAMPLING_KEYS
from pillion.types import ModelInfo

MAX_HTTP_CONNECTIONS = 4096
LISTEN_BACKLOG = 1024
# How long a connection may stay without a further request.
KEEP_ALIVE_S = 75
# How often the date in the headers of answers changes.
DATE_INTERVAL_S = 1.0
# Paths of OpenAI's, Jina's and vLLM's APIs for which models of other kinds are needed.
NOT_OFFERED = frozenset(
    f"{version}/{name}"
    for version in ("", "/v1", "/v2")
    for name in ("embeddings", "rerank", "score", "pooling", "classify")
)


class _Pages:
    """The pages whose calls have no body."""

    def __init__(self, gateway: Gateway, flags: GatewayFlags) -> None:
        self._gateway = gateway
        self._vllm_names = flags.vllm_metric_names
        self._first_page = b"ui" if flags.ui else b"docs"
        self._started = int(time.time())
        self.routes: list[Route] = []

    async def health(self, call: HttpCall) -> None:
        """200 when a request would be served now, 503 with what is missing when not."""
        missing = self._gateway.not_ready()
        if missing:
            await call.answer(503, msgspec.json.encode({"status": "unavailable", "missing": missing}))
        else:
            await call.answer(200, b'{"status":"ok"}')

    async def version(self, call: HttpCall) -> None:
        """This gateway's version."""
        await call.answer(200, msgspec.json.encode({"version": VERSION}))

    async def metrics(self, call: HttpCall) -> None:
        """Metrics for Prometheus: those of this process, where several share the port."""
        page = MetricsPage(lambda: self._gateway.metrics(call.tenant), vllm_names=self._vllm_names)
        await call.answer(200, generate_latest(page.registry()), content_type=CONTENT_TYPE_LATEST.encode())

    async def models(self, call: HttpCall) -> None:
        """OpenAI's list of what live workers serve."""
        entries = [self._entry(info) for info in self._gateway.models(call.tenant)]
        await call.answer(200, msgspec.json.encode({"object": "list", "data": entries}))

    async def model(self, call: HttpCall) -> None:
        """One model; its name may contain slashes."""
        asked = str(call.parameters["name"])
        try:
            entry = await self._gateway.find_entry(asked, call.tenant)
        except PillionError:
            raise unknown_model(f"the model {asked[:100]!r} is not served here") from None
        for info in self._gateway.models(call.tenant):
            if info.name == (asked or entry.name):
                await call.answer(200, msgspec.json.encode(self._entry(info)))
                return
        raise Unavailable(self._gateway.missing(entry.limits.name))

    async def start(self, call: HttpCall) -> None:
        """Redirects a browser to the page for people (/ui) where the gateway has one, and to /docs otherwise."""
        # The place is a relative one, so it is right behind a proxy's path, too.
        await call.answer(307, b"", [(b"location", self._first_page)])

    async def openapi(self, call: HttpCall) -> None:
        """Gives this description of the API, as OpenAPI 3.1."""
        document, _ = await asyncio.to_thread(lambda: self._description)
        await call.answer(200, document)

    async def docs(self, call: HttpCall) -> None:
        """Shows this page."""
        policy = (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'")
        _, page = await asyncio.to_thread(lambda: self._description)
        await call.answer(200, page, [policy], content_type=b"text/html; charset=utf-8")

    @cached_property
    def _description(self) -> tuple[bytes, bytes]:
        """OpenAPI's document of the port and the page of it, made when somebody asks first: that takes 30 ms."""
        described = openapi.describe(self.routes)
        return msgspec.json.encode(described), docs_page.page(described)

    async def nothing(self, call: HttpCall) -> None:
        """404, for every other path."""
        if call.path.startswith("/v1/messages/"):
            call.error_form = ANTHROPIC_ERRORS
        if call.path in NOT_OFFERED:
            raise ApiError(404, f"{call.path} is not offered: the models here generate text", code="not_found")
        raise ApiError(404, f"there is no {call.path[:200]!r} here", code="not_found")

    def _entry(self, info: ModelInfo) -> dict[str, Any]:
        """A model as OpenAI describes it, with vLLM's ``max_model_len``; an adapter has the model as ``parent``, and
        its content's digest, and a model's other name has the model as ``root``."""
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


def make_app(gateway: Gateway, flags: GatewayFlags, batches: BatchRunner | None) -> ASGIApp:
    """The application; every page of the port is in this one table. Pages that need a key have ``tenant_of``.

    It is a bare router: Starlette's application wraps every write of a stream twice, for errors that Endpoint handles.
    With --allowed-origins the writes of a browser's streams are wrapped once.
    """
    pages, tenant_of, calls = _Pages(gateway, flags), gateway.tenant_of, ModelCalls(gateway)
    api, anthropic, files = OpenAIApi(calls), AnthropicApi(calls), BatchesApi(batches)
    adapters = AdaptersApi(gateway)
    routes = [
        Route("/health", Endpoint("GET", pages.health)),
        Route("/version", Endpoint("GET", pages.version)),
        Route("/metrics", Endpoint("GET", pages.metrics, tenant_of)),
        Route("/v1/models", Endpoint("GET", pages.models, tenant_of)),
        Route("/v1/models/{name:path}", Endpoint("GET", pages.model, tenant_of)),
        Route("/v1/completions", Endpoint("POST", api.completions, tenant_of, CompletionBody)),
        Route("/v1/chat/completions", Endpoint("POST", api.chat, tenant_of, ChatBody)),
        Route("/v1/responses", Endpoint("POST", ResponsesApi(calls).responses, tenant_of, ResponsesBody)),
        Route("/v1/messages", Endpoint("POST", anthropic.messages, tenant_of, MessagesBody, ANTHROPIC_ERRORS)),
        Route(
            "/v1/messages/count_tokens",
            Endpoint("POST", anthropic.count_tokens, tenant_of, CountTokensBody, ANTHROPIC_ERRORS),
        ),
        Route(
            "/v1/files",
            Methods(
                Endpoint("POST", files.create_file, tenant_of, UploadForm, body_type=FORM_TYPE),
                Endpoint("GET", files.files, tenant_of),
            ),
        ),
        Route(
            "/v1/files/{id}",
            Methods(Endpoint("GET", files.file, tenant_of), Endpoint("DELETE", files.delete_file, tenant_of)),
        ),
        Route("/v1/files/{id}/content", Endpoint("GET", files.content, tenant_of)),
        Route(
            "/v1/batches",
            Methods(
                Endpoint("POST", files.create_batch, tenant_of, BatchBody),
                Endpoint("GET", files.batches, tenant_of),
            ),
        ),
        Route("/v1/batches/{id}", Endpoint("GET", files.batch, tenant_of)),
        Route("/v1/batches/{id}/cancel", Endpoint("POST", files.cancel_batch, tenant_of)),
        *_prefix_routes(PrefixesApi(calls), tenant_of),
        Route("/v1/load_lora_adapter", Endpoint("POST", adapters.load_lora_adapter, tenant_of, LoadAdapterBody)),
        Route("/v1/unload_lora_adapter", Endpoint("POST", adapters.unload_lora_adapter, tenant_of, UnloadAdapterBody)),
        Route("/tokenize", Endpoint("POST", api.tokenize, tenant_of, TokenizeBody)),
        Route("/detokenize", Endpoint("POST", api.detokenize, tenant_of, DetokenizeBody)),
        Route("/", Endpoint("GET", pages.start)),
        Route("/openapi.json", Endpoint("GET", pages.openapi)),
        Route("/docs", Endpoint("GET", pages.docs)),
    ]
    routes += _ui_routes(gateway) if flags.ui else []
    pages.routes = routes
    origins = listed_origins(flags.allowed_origins)
    app = OwnPagesWrite(Router(routes, redirect_slashes=False, default=Endpoint("", pages.nothing)), origins)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        allow_credentials=flags.allow_credentials,
        expose_headers=["x-request-id", "request-id", "retry-after", "retry-after-ms", MAX_TOKENS_HEADER],
    )


def _ui_routes(gateway: Gateway) -> list[Route]:
    """The page for people, whose files are open, and what it shows of the cluster."""
    ui = UiApi(gateway)
    return [
        Route("/ui", Endpoint("GET", ui.page)),
        Route("/ui/cluster", Endpoint("GET", ui.cluster, gateway.tenant_of)),
        Route("/ui/{name}", Endpoint("GET", ui.file)),
    ]


def _prefix_routes(api: PrefixesApi, tenant_of: Callable[[str], Tenant]) -> list[Route]:
    made = Endpoint("POST", api.warm, tenant_of, PrefixBody)
    return [
        Route("/v1/cache/prefixes", Methods(made, Endpoint("GET", api.prefixes, tenant_of))),
        Route("/v1/cache/prefixes/{name}", Endpoint("DELETE", api.drop, tenant_of)),
    ]


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, for the process belongs to the component and not to its HTTP port, and
    without its polls: it looks every 100 ms whether it is to end, and waits as long again where nobody is connected.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state: PortState = PortState()
        self.ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        # A tick whose number is 0 writes the headers' date.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), DATE_INTERVAL_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)


class HttpServer:
    """A running server. ``address`` is where it really listens."""

    def __init__(self, server: _Server, task: asyncio.Task[None], address: str) -> None:
        self._server = server
        self.task = task
        self.address = address

    @property
    def connections(self) -> Collection[Any]:
        """The protocols of open connections."""
        return self._server.server_state.connections

    @property
    def waiting_clients(self) -> tuple[int, int]:
        """Connections that wait for their clients: those without a request, and those whose body is not whole."""
        return self._server.server_state.idle.count, self._server.server_state.sending.count

    async def stop(self, grace_s: float = 1.0) -> None:
        """Takes no more connections, lets answers under way finish for ``grace_s`` (whole seconds), then closes."""
        self._server.config.timeout_graceful_shutdown = max(1, math.ceil(grace_s))
        self._server.should_exit = True
        self._server.ending.set()
        await asyncio.gather(self.task, return_exceptions=True)


async def start_http(
    gateway: Gateway, flags: GatewayFlags, identity: tls.Identity | None, batches: BatchRunner | None = None
) -> HttpServer:
    """Serves on --host and --http-port (0: any free port), with TLS where there is an ``identity``.

    With --share-ports other processes may listen on the same port; the system spreads connections over them. Raises
    OSError when the address cannot be bound.
    """
    host, address = flags.host, (flags.host, flags.http_port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server(address, family=family, backlog=LISTEN_BACKLOG, reuse_port=flags.share_ports)
    bound = listener.getsockname()[1]
    config = uvicorn.Config(
        make_app(gateway, flags, batches),
        # On h11, which takes a bound for headers that are not whole yet; whole ones are judged by the endpoint.
        http=HttpConnection,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_HTTP_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    config.ssl = None if identity is None else tls.http_context(identity)
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    while not server.started and not task.done():  # noqa: ASYNC110  (uvicorn offers no event)
        await asyncio.sleep(0.005)
    name = f"[{host}]" if ":" in host else host
    return HttpServer(server, task, f"{name}:{bound}")
