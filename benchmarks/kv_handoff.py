"""`python -m benchmarks.kv_handoff`: from the last chunk's commit on a prefill worker to the first step on the decode
worker, in the real cluster. No block is copied on the way: the pool is one memory, and slot numbers change hands.

The times are the parts' own, from the trace: the end of the last kv.commit to the start of decode.remnant. The cluster
is idle but for one request at a time, so nothing else is in the step. Beside it stands a floor of the same run: three
empty calls between processes, for the way holds three (the worker's word, the gateway's submit, the decode worker's
adopt).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from rich.table import Table

from benchmarks.cluster import prompts
from benchmarks.report import percentile, save, show_table
from pillion import AsyncClient, Client
from tests.support.cluster import ServedCluster, served

MODEL = "demo"
EXPORT_DELAY_MS = 200
# For the last spans to arrive.
SETTLE_S = 2.0
HOPS = 3


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what the hand-off's two ends say, in nanoseconds, by trace."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._committed: dict[bytes, int] = {}
        self._began: dict[bytes, int] = {}

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Spans of one part."""
        with self._lock:
            for resource in request.resource_spans:
                service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        trace = span.trace_id
                        if (service, span.name) == ("pillion-prefill", "kv.commit"):
                            self._committed[trace] = max(self._committed.get(trace, 0), span.end_time_unix_nano)
                        elif span.name == "decode.remnant":
                            self._began[trace] = span.start_time_unix_nano
        return trace_service_pb2.ExportTraceServiceResponse()

    def ms(self) -> list[float]:
        """Of every request whose two ends were seen."""
        with self._lock:
            both = self._committed.keys() & self._began.keys()
            return [(self._began[trace] - self._committed[trace]) / 1e6 for trace in both]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that the standard variables point at while this lasts."""
    server, collector = grpc.server(futures.ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    said = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_INSECURE": "true",
        "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_DELAY_MS),
    }
    os.environ.update(said)
    try:
        yield collector
    finally:
        for name in said:
            del os.environ[name]
        server.stop(0)


def main() -> None:
    """Start the cluster, send requests one after the other, write results/kv_handoff.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--input-len", type=int, default=33)
    args = parser.parse_args()
    with (
        collecting() as collector,
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), MODEL, "--split-policy", "disaggregated") as cluster,
    ):
        floor = asyncio.run(_empty_calls(cluster.target))
        with Client(cluster.target) as client:
            for ids in prompts(7, args.requests, args.input_len):
                list(client.generate(ids, temperature=0.0, max_tokens=2, ignore_eos=True))
        time.sleep(SETTLE_S)
        bytes_copied = _bytes_between_nodes(cluster)
    found = sorted(collector.ms())
    result = {
        "requests": len(found),
        "input_tokens": args.input_len,
        "handoff_ms": {f"p{percent}": percentile(found, percent) for percent in (50, 90, 99)},
        "empty_calls_ms": floor,
        "bytes_copied": bytes_copied,
    }
    table = Table(title=f"Hand-off of {len(found)} prompts, ms")
    for name in ("", "p50", "p90", "p99"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("last commit to first step", *(f"{value:.2f}" for value in result["handoff_ms"].values()))
    table.add_row(f"{HOPS} empty calls", *(f"{value:.2f}" for value in floor.values()))
    show_table(table)
    print(f"bytes copied: {bytes_copied}; written to {save('kv_handoff', result)}")


async def _empty_calls(target: str) -> dict[str, float]:
    took = []
    async with AsyncClient(target) as client:
        for _ in range(200):
            begin = time.perf_counter()
            for _ in range(HOPS):
                await client.models()
            took.append((time.perf_counter() - begin) * 1000)
    return {"p50": statistics.median(took), "p90": percentile(took, 90), "p99": percentile(took, 99)}


def _bytes_between_nodes(cluster: ServedCluster) -> int:
    """Blocks that any node fetched or wrote to a lower tier, in bytes."""
    status = cluster.node_status()
    return int((status.fetched_blocks + status.restored_blocks + status.spilled_blocks) * status.block_bytes)


if __name__ == "__main__":
    main()
