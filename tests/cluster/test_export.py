"""Real processes export one connected trace by OTLP when the standard variables say where to."""

from __future__ import annotations

import pathlib
import tempfile
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from pillion import Client
from tests.support.cluster import served, wait_for
from tests.support.tiny_model import save_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps (service, span) pairs by trace id."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.traces: dict[bytes, set[tuple[str, str]]] = {}

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self.lock:
            for resource in request.resource_spans:
                service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.traces.setdefault(span.trace_id, set()).add((service, span.name))
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, int]]:
    server, servicer = grpc.server(futures.ThreadPoolExecutor(4)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, port
    server.stop(0)


def test_processes_export_one_trace(
    collector: tuple[Collector, int], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, port = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    model = str(save_model(tmp_path / "tiny"))
    flags = ("--dtype", "float32", "--max-model-len", "512", "--kv-pool-bytes", "16MiB", "--chunk-size", "32")
    with tempfile.TemporaryDirectory(prefix="pil-") as folder, served(pathlib.Path(folder), model, *flags) as cluster:
        with Client(cluster.target) as client:
            list(client.generate(list(range(2, 102)), temperature=0.0, max_tokens=3, ignore_eos=True))
        wanted = {
            ("pillion-gateway", "plan"),
            ("pillion-gateway", "kv.pin"),
            ("pillion-prefill", "prefill.chunk"),
            ("pillion-decode", "decode.remnant"),
            ("pillion-decode", "decode"),
        }

        def connected() -> bool:
            with kept.lock:
                return any(wanted <= spans for spans in kept.traces.values())

        wait_for("one trace with spans of all services", connected)
