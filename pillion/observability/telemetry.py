"""Traces requests with OpenTelemetry: one trace per request through all components, exported if the OTEL_* variables
ask for it.

    a component        setup() installs a provider for its process --> spans leave --> shutdown() sends the rest
    SDK and commands   client_tracer(): the program's own provider, else one for the client's spans alone, whose rest is
                       sent when the program ends

Without the variables the API's no-op tracer answers and a span costs about a microsecond. The exporter is chosen as the
specification says: ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or its ``_TRACES_`` form) or ``OTEL_TRACES_EXPORTER=otlp`` switches
tracing on, ``OTEL_EXPORTER_OTLP_PROTOCOL`` picks grpc or http/protobuf, ``OTEL_TRACES_EXPORTER=none`` and
``OTEL_SDK_DISABLED=true`` switch it off, ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` name the process.
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

# A process that ends waits at most this long for its last spans to be sent.
FLUSH_TIMEOUT_MS = 3000
_making = threading.Lock()
_PROPAGATOR = TraceContextTextMapPropagator()

Metadata = Sequence[tuple[str, str]]


def tracer() -> trace.Tracer:
    """Return the tracer of every span in Pillion."""
    return trace.get_tracer("pillion")


def wanted() -> bool:
    """Return whether the environment asks for the export of spans by OTLP."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    chosen = [name.strip().lower() for name in os.environ.get("OTEL_TRACES_EXPORTER", "").split(",") if name.strip()]
    return "otlp" in chosen or (not chosen and bool(_otlp_setting("ENDPOINT")))


def exporter() -> Any:
    """Make the SDK's exporter of spans, over the protocol that the environment sets; grpc if that sets none."""
    way = "grpc" if _otlp_setting("PROTOCOL") in ("", "grpc") else "http"
    return import_module(f"opentelemetry.exporter.otlp.proto.{way}.trace_exporter").OTLPSpanExporter()


def _otlp_setting(name: str) -> str:
    own, shared = f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"
    return os.environ.get(own) or os.environ.get(shared) or ""


def resource(component_id: str, role: str) -> Resource:
    """Make the process's name for its traces. What the environment says of the process wins."""
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
    """Install the SDK in this process if the environment asks for it. A component's main calls it once."""
    if wanted():
        trace.set_tracer_provider(_provider(component_id, role))


def client_tracer() -> trace.Tracer:
    """Return the tracer of the client's spans: of the program's own provider, where it has one.

    A library must not install a provider for its program, so the client's own one is kept here.
    """
    if not recording() and wanted():
        with _making:
            own: Any = _client_provider()
        if own is not None:
            found: trace.Tracer = own.get_tracer("pillion")
            return found
    return tracer()


@functools.cache
def _client_provider() -> Any:
    """Return the provider of the client's own spans, which is made once; None, with a warning, where the SDK's
    packages are missing."""
    try:
        made = _provider(f"client-{socket.gethostname()}-{os.getpid()}", "client")
    except ImportError as error:
        log.warning("no spans are sent, though the OTEL_* variables ask for it: %s", error)
        return None
    atexit.register(shutdown_client)
    return made


def shutdown_client() -> None:
    """Send those of the client's own spans that were not sent yet; the next span makes a new provider."""
    provider = _client_provider() if _client_provider.cache_info().currsize else None
    _client_provider.cache_clear()
    atexit.unregister(shutdown_client)
    if provider is not None:
        _stop(provider.shutdown)


def shutdown() -> None:
    """Send the process's spans that were not sent yet. It is called once, when a component stops."""
    stop = getattr(trace.get_tracer_provider(), "shutdown", None)
    if stop is not None:
        _stop(stop)


def _stop(stop: Callable[[], None]) -> None:
    """Call ``stop`` and wait for it, but not longer than FLUSH_TIMEOUT_MS: a receiver may be down."""
    stopping = threading.Thread(target=stop, name="last spans", daemon=True)
    stopping.start()
    stopping.join(FLUSH_TIMEOUT_MS / 1000)


def recording() -> bool:
    """Return whether spans are exported from this process."""
    return not isinstance(trace.get_tracer_provider(), (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


def child(name: str, parent: trace.Span) -> AbstractContextManager[trace.Span]:
    """Open a span under ``parent``, which is the current span within the block and ends with it."""
    return tracer().start_as_current_span(name, context=trace.set_span_in_context(parent))


def inject(context: otel_context.Context | None = None) -> list[tuple[str, str]]:
    """Return gRPC metadata that carries ``context`` (default: the current one); it is empty when nothing is
    recorded."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return list(carrier.items())


def traceparent(context: otel_context.Context | None = None) -> str:
    """Return the W3C ``traceparent`` of ``context`` (default: the current one); it is empty when nothing is
    recorded."""
    return dict(inject(context)).get("traceparent", "")


def extract(metadata: Metadata | None) -> otel_context.Context:
    """Read the caller's trace context from gRPC metadata."""
    return _PROPAGATOR.extract({key.lower(): value for key, value in metadata or () if isinstance(value, str)})


def from_traceparent(value: str) -> otel_context.Context:
    """Read the trace context from one ``traceparent`` text; an empty or broken text starts a new trace."""
    return _PROPAGATOR.extract({"traceparent": value} if value else {})
