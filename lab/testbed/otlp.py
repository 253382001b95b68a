"""Receives OTLP traces and metrics over real gRPC, and keeps everything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

EXPORT_DELAY_MS = 200


class Attributes(dict[str, str]):
    """Holds the attributes of a resource; it is hashable, so that it can be a dictionary's key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


class Receiver:
    """Holds everything received. ``spans`` are (service, span) pairs in order of arrival. ``metrics`` has, by resource,
    the latest of each name. Both are OTLP's own messages."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.spans: list[tuple[str, Any]] = []
        self.metrics: dict[Attributes, dict[str, Any]] = {}
        self.port = 0

    def environ(self, delay_ms: int = EXPORT_DELAY_MS) -> dict[str, str]:
        """Returns the standard variables that point here; with ``delay_ms`` 0 exports keep their default pace."""
        pace = ("OTEL_BSP_SCHEDULE_DELAY", "OTEL_METRIC_EXPORT_INTERVAL") if delay_ms else ()
        variables = dict.fromkeys(pace, str(delay_ms))
        return variables | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
        }

    def traces(self) -> dict[bytes, list[tuple[str, Any]]]:
        """Returns the spans by trace id."""
        found: dict[bytes, list[tuple[str, Any]]] = {}
        with self.lock:
            for service, span in self.spans:
                found.setdefault(span.trace_id, []).append((service, span))
        return found


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, received: Callable[[str, Any], None]) -> None:
        self._received = received

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._received(service, span)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        with self._receiver.lock:
            for resource in request.resource_metrics:
                kept = self._receiver.metrics.setdefault(_attributes(resource.resource.attributes), {})
                for scope in resource.scope_metrics:
                    kept.update({metric.name: metric for metric in scope.metrics})
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _attributes(attributes: Iterable[Any]) -> Attributes:
    return Attributes({each.key: each.value.string_value for each in attributes})


@contextmanager
def collecting() -> Iterator[Receiver]:
    """Runs a receiver."""
    receiver = Receiver()

    def received(service: str, span: Any) -> None:
        with receiver.lock:
            receiver.spans.append((service, span))

    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(received), server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(  # type: ignore[no-untyped-call]
        _Metrics(receiver), server
    )
    receiver.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0)
