"""A receiver of OTLP traces over real gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

EXPORT_DELAY_MS = 200


class Receiver:
    """Everything received. ``spans``: (service, OTLP span) pairs in order of arrival."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.spans: list[tuple[str, Any]] = []
        self.port = 0

    def environ(self, delay_ms: int = EXPORT_DELAY_MS) -> dict[str, str]:
        """Return the standard variables that point to this receiver; with ``delay_ms`` 0 the default export delay."""
        variables = {"OTEL_BSP_SCHEDULE_DELAY": str(delay_ms)} if delay_ms else {}
        return variables | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
        }

    def traces(self) -> dict[bytes, list[tuple[str, Any]]]:
        """Group the spans by trace id."""
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
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._received(named["service.name"], span)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[Receiver]:
    """Run a receiver."""
    receiver = Receiver()

    def received(service: str, span: Any) -> None:
        with receiver.lock:
            receiver.spans.append((service, span))

    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(received), server)  # type: ignore[no-untyped-call]
    receiver.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0)
