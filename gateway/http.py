"""The HTTP port, in the gateway's process and event loop. Three pages now; the OpenAI API comes to the same frame."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from gateway.core import Gateway
from pillion._version import VERSION

MAX_HTTP_CONNECTIONS = 4096
LISTEN_BACKLOG = 1024


def make_app(gateway: Gateway) -> Starlette:
    """The application: /health, /version and /v1/models."""
    started = int(time.time())

    async def health(_: Request) -> JSONResponse:
        """200 when a request would be served now, 503 with what is missing when not."""
        missing = gateway.not_ready()
        if missing:
            return JSONResponse({"status": "unavailable", "missing": missing}, 503)
        return JSONResponse({"status": "ok"})

    async def version(_: Request) -> JSONResponse:
        return JSONResponse({"version": VERSION})

    async def models(_: Request) -> JSONResponse:
        """OpenAI's list; ``max_model_len`` as vLLM adds it."""
        entries = [
            {
                "id": info.name,
                "object": "model",
                "created": started,
                "owned_by": "pillion",
                "root": info.name,
                "max_model_len": info.max_model_len_tokens,
            }
            for info in gateway.models()
        ]
        return JSONResponse({"object": "list", "data": entries})

    return Starlette(routes=[Route("/health", health), Route("/version", version), Route("/v1/models", models)])


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: the process belongs to the part, not to its HTTP port."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A running server. ``address`` is where it really listens."""

    def __init__(self, server: _Server, task: asyncio.Task[None], address: str) -> None:
        self._server = server
        self.task = task
        self.address = address

    async def stop(self) -> None:
        """Lets answers under way finish for a moment, then closes."""
        self._server.should_exit = True
        await asyncio.gather(self.task, return_exceptions=True)


async def start_http(gateway: Gateway, host: str, port: int) -> HttpServer:
    """Serves on ``host:port`` (0: any free port). Raises OSError when the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    bound = listener.getsockname()[1]
    config = uvicorn.Config(
        make_app(gateway),
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        limit_concurrency=MAX_HTTP_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    while not server.started and not task.done():  # noqa: ASYNC110  (uvicorn offers no event)
        await asyncio.sleep(0.005)
    name = f"[{host}]" if ":" in host else host
    return HttpServer(server, task, f"{name}:{bound}")
