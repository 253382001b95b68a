"""Publishes a component's metrics on a page for Prometheus, which OpenTelemetry collectors can scrape as well.

    scrape (thread of the page's server, or the gateway's own HTTP) --> collect on the component's loop --> values

The page reads the cells of :mod:`pillion.observability.metrics`. Two more, cheap pages are for health checks: /health
answers 200 if the component serves, /alive if its event loop answers; otherwise both answer 503 with the reason.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pillion._version import VERSION
from pillion.errors import ConfigError
from pillion.net.addresses import listening_host
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Meters, Values
from pillion.observability.metrics_prometheus import to_prometheus, to_vllm

log = logging.getLogger("pillion.observability.metrics")

# Timeout of a scrape on the component's loop; failed scrapes reveal an overloaded component.
COLLECT_TIMEOUT_S = 2.0

Collect = Callable[[], Values]
T = TypeVar("T")


class MetricsPage(Collector):
    """One component's metrics for Prometheus. ``collect_all``: returns all values; callable on any thread."""

    def __init__(self, collect_all: Collect) -> None:
        self._collect_all = collect_all

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, for the client library. Raises TimeoutError if the component does not answer."""
        values = self._collect_all()
        yield from to_prometheus(values)
        yield from to_vllm(values)

    def registry(self) -> prometheus_client.CollectorRegistry:
        """Return a registry with these metrics, and with the process's memory, files and CPU time."""
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        prometheus_client.ProcessCollector(registry=registry)
        return registry


class _OneSegment(WSGIRequestHandler):
    """Request handler that writes head and body together, without waiting for acknowledgements."""

    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_: Any) -> None:
        """Log no calls."""


class Exports:
    """Published metrics of one component. Create it on the component's event loop.

    Args:
        component_id, role: the component's name and kind.
        port, host: address of the page; port 0: no page.
        not_ready: returns why the component does not serve, "" if it does; called on its event loop.

    Raises ConfigError if the port is in use.
    """

    def __init__(
        self,
        meters: Meters,
        component_id: str,
        role: str,
        *,
        host: str,
        port: int,
        not_ready: Callable[[], str],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._meters = meters
        self._not_ready = not_ready
        meters.watch(lambda: [(names.BUILD, (VERSION, role, component_id), 1.0)])
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        if "otlp" in os.environ.get("OTEL_METRICS_EXPORTER", ""):
            log.warning("OTEL_METRICS_EXPORTER has no effect: metrics are scraped at --metrics-port")
        if port:
            registry = MetricsPage(self._collect).registry()
            try:
                self._server = prometheus_client.start_http_server(port, listening_host(host), registry)
            except OSError as error:
                raise ConfigError(f"the metrics page cannot listen on {host}:{port}: {error}") from None
            self._server[0].RequestHandlerClass = _OneSegment
            self._server[0].set_app(self._pages(prometheus_client.make_wsgi_app(registry)))
            log.info("metrics at http://%s:%d/metrics", host, port)

    def close(self) -> None:
        """Close the page. Do not call this on the event loop, which must answer pending scrapes. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server[0].shutdown()
            server[0].server_close()
            server[1].join()

    def _pages(self, metrics_page: Any) -> Any:
        """Return the port's WSGI application: pages for health checks, and ``metrics_page`` under any other path."""
        checks: dict[str, Callable[[], str]] = {"/health": self._not_ready, "/alive": str}

        def answer(environ: Any, start_response: Any) -> Any:
            check = checks.get(environ["PATH_INFO"])
            if check is None:
                return metrics_page(environ, start_response)
            try:
                reason = self._on_loop(check)
            except Exception:  # noqa: BLE001  (any failure means unhealthy)
                reason = f"no answer within {COLLECT_TIMEOUT_S:g} s"
            start_response("503 Service Unavailable" if reason else "200 OK", [("Content-Type", "text/plain")])
            return [f"{reason or 'ok'}\n".encode()]

        return answer

    def _collect(self) -> Values:
        return self._on_loop(self._meters.collect)

    def _on_loop(self, call: Callable[[], T]) -> T:
        """Return the result of ``call`` on the component's event loop. Raises TimeoutError if the loop does not
        answer."""

        async def run() -> T:
            return call()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(COLLECT_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise
