"""OpenTelemetry tracing: one trace per request through all components, exported if the OTEL_* variables request it.

    a component        setup() installs a provider for its process --> spans are sent --> shutdown() sends the rest
    SDK and commands   client_tracer(): the program's own provider, else a private one for the client's spans, which is
                       flushed when the program ends

Without the variables the API's no-op tracer is used, at about a microsecond per span. The exporter follows the
specification: ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or its ``_TRACES_`` form) or ``OTEL_TRACES_EXPORTER=otlp`` enables
tracing, ``OTEL_EXPORTER_OTLP_PROTOCOL`` selects grpc or http/protobuf, ``OTEL_TRACES_EXPORTER=none`` and
``OTEL_SDK_DISABLED=true`` disable it, ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` name the process.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

log = logging.getLogger("pillion.observability.telemetry")

FLUSH_TIMEOUT_MS = 3000
_making = threading.Lock()
_PROPAGATOR = TraceContextTextMapPropagator()

Metadata = Sequence[tuple[str, str]]


def tracer() -> trace.Tracer:
    """Return Pillion's tracer."""
    return trace.get_tracer("pillion")


def wanted() -> bool:
    """Return whether the environment requests the export of spans by OTLP."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    chosen = [name.strip().lower() for name in os.environ.get("OTEL_TRACES_EXPORTER", "").split(",") if name.strip()]
    return "otlp" in chosen or (not chosen and bool(_otlp_setting("ENDPOINT")))


def exporter() -> Any:
    """Return the SDK's exporter of spans, with the environment's protocol; by default grpc."""
    protocol = "grpc" if _otlp_setting("PROTOCOL") in ("", "grpc") else "http"
    return import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter").OTLPSpanExporter()


def _otlp_setting(name: str) -> str:
    own, shared = f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"
    return os.environ.get(own) or os.environ.get(shared) or ""


def resource(component_id: str, role: str) -> Resource:
    """Return the process's resource attributes. The environment's attributes take precedence."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    names = {"service.name": f"pillion-{role}", "service.instance.id": component_id, "service.namespace": "pillion"}
    return Resource.create({**names, **OTELResourceDetector().detect().attributes})


def _provider(component_id: str, role: str) -> Any:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource(component_id, role), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter()))
    return provider


def setup(component_id: str, role: str) -> None:
    """Install the SDK in this process if the environment requests it. Call once, in a component's main."""
    if wanted():
        trace.set_tracer_provider(_provider(component_id, role))


def client_tracer() -> trace.Tracer:
    """Return the tracer of the client's spans: that of the program's own provider, if it has one.

    A library must not install a provider for its program, so the client's own one is private.
    """
    if not recording() and wanted():
        with _making:
            provider: Any = _client_provider()
        if provider is not None:
            private: trace.Tracer = provider.get_tracer("pillion")
            return private
    return tracer()


@functools.cache
def _client_provider() -> Any:
    """Return the provider of the client's own spans, created once; None, with a warning, if the SDK's packages are
    missing."""
    try:
        provider = _provider(f"client-{socket.gethostname()}-{os.getpid()}", "client")
    except ImportError as error:
        log.warning("no spans are sent, although the OTEL_* variables request it: %s", error)
        return None
    atexit.register(shutdown_client)
    return provider


def shutdown_client() -> None:
    """Send the client's unsent spans; the next span creates a new provider."""
    provider = _client_provider() if _client_provider.cache_info().currsize else None
    _client_provider.cache_clear()
    atexit.unregister(shutdown_client)
    if provider is not None:
        _stop(provider.shutdown)


def shutdown() -> None:
    """Send the process's unsent spans. Call once, when a component stops."""
    stop = getattr(trace.get_tracer_provider(), "shutdown", None)
    if stop is not None:
        _stop(stop)


def _stop(stop: Callable[[], None]) -> None:
    """Call ``stop``, waiting for up to FLUSH_TIMEOUT_MS, since the receiver may be down."""
    stopping = threading.Thread(target=stop, name="last spans", daemon=True)
    stopping.start()
    stopping.join(FLUSH_TIMEOUT_MS / 1000)


def recording() -> bool:
    """Return whether spans are exported from this process."""
    return not isinstance(trace.get_tracer_provider(), (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


def child(name: str, parent: trace.Span) -> AbstractContextManager[trace.Span]:
    """Return a context manager for a span under ``parent``, which is the current span while it is open."""
    return tracer().start_as_current_span(name, context=trace.set_span_in_context(parent))


def inject(context: otel_context.Context | None = None) -> list[tuple[str, str]]:
    """Return gRPC metadata with ``context`` (default: the current one); empty if nothing is recorded."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return list(carrier.items())


def traceparent(context: otel_context.Context | None = None) -> str:
    """Return the W3C ``traceparent`` of ``context`` (default: the current one); empty if nothing is recorded."""
    return dict(inject(context)).get("traceparent", "")


def extract(metadata: Metadata | None) -> otel_context.Context:
    """Extract the caller's trace context from gRPC metadata."""
    return _PROPAGATOR.extract({key.lower(): value for key, value in metadata or () if isinstance(value, str)})


def from_traceparent(value: str) -> otel_context.Context:
    """Extract the trace context from a ``traceparent``; an empty or broken one starts a new trace."""
    return _PROPAGATOR.extract({"traceparent": value} if value else {})
