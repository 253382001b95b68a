"""OpenTelemetry tracing: one trace per request through all components, exported if the OTEL_* variables ask for it.

Without them the API's no-op tracer answers and a span costs about a microsecond. The exporter is chosen as the
specification says: ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or its ``_TRACES_`` form) switches tracing on,
``OTEL_EXPORTER_OTLP_PROTOCOL`` picks grpc or http/protobuf, ``OTEL_SDK_DISABLED=true`` switches it off.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

_PROPAGATOR = TraceContextTextMapPropagator()

Metadata = Sequence[tuple[str, str]]
Signal = Literal["TRACES", "METRICS"]


def tracer() -> trace.Tracer:
    """The tracer of every span in Pillion."""
    return trace.get_tracer("pillion")


def wanted(signal: Signal) -> bool:
    """Whether the environment asks for the export of ``signal``."""
    return os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true" and bool(_otlp_setting(signal, "ENDPOINT"))


def exporter(signal: Signal) -> Any:
    """The SDK's exporter of ``signal``, over the protocol that the environment sets; grpc if it sets none."""
    name, made = {"TRACES": ("trace", "OTLPSpanExporter"), "METRICS": ("metric", "OTLPMetricExporter")}[signal]
    way = "grpc" if _otlp_setting(signal, "PROTOCOL") in ("", "grpc") else "http"
    return getattr(import_module(f"opentelemetry.exporter.otlp.proto.{way}.{name}_exporter"), made)()


def _otlp_setting(signal: Signal, name: str) -> str:
    own, shared = f"OTEL_EXPORTER_OTLP_{signal}_{name}", f"OTEL_EXPORTER_OTLP_{name}"
    return os.environ.get(own) or os.environ.get(shared) or ""


def resource(component_id: str, role: str) -> Resource:
    """The process's name wherever its traces and metrics go."""
    from opentelemetry.sdk.resources import Resource

    names = {"service.name": f"pillion-{role}", "service.instance.id": component_id, "service.namespace": "pillion"}
    return Resource.create(names)


def setup(component_id: str, role: str) -> None:
    """Installs the SDK in this process if the environment asks for it. Called once, by a component's main."""
    if not wanted("TRACES"):
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource(component_id, role))
    provider.add_span_processor(BatchSpanProcessor(exporter("TRACES")))
    trace.set_tracer_provider(provider)


def shutdown() -> None:
    """Sends what is left. Called once, when a component stops."""
    stop = getattr(trace.get_tracer_provider(), "shutdown", None)
    if stop is not None:
        stop()


def recording() -> bool:
    """Whether spans go anywhere in this process."""
    return not isinstance(trace.get_tracer_provider(), (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


def child(name: str, parent: trace.Span) -> AbstractContextManager[trace.Span]:
    """A span under ``parent``, ended with the block and current within it."""
    return tracer().start_as_current_span(name, context=trace.set_span_in_context(parent))


def inject(context: otel_context.Context | None = None) -> list[tuple[str, str]]:
    """gRPC metadata that carries ``context`` (default: the current one); empty when nothing is recorded."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return list(carrier.items())


def traceparent(context: otel_context.Context | None = None) -> str:
    """The W3C ``traceparent`` of ``context`` (default: the current one), empty when nothing is recorded."""
    return dict(inject(context)).get("traceparent", "")


def extract(metadata: Metadata | None) -> otel_context.Context:
    """The caller's context out of gRPC metadata."""
    return _PROPAGATOR.extract({key.lower(): value for key, value in metadata or () if isinstance(value, str)})


def from_traceparent(value: str) -> otel_context.Context:
    """The context out of one ``traceparent`` text; an empty or broken one starts a new trace."""
    return _PROPAGATOR.extract({"traceparent": value} if value else {})
