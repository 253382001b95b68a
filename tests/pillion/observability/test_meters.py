"""Cells against numpy, the page against Prometheus's own parser."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import math
import os
import threading
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lab.testbed.conditions import WITHIN_S
from lab.testbed.ports import free_port
from pillion.errors import ConfigError
from pillion.observability import metric_catalog as names
from pillion.observability import telemetry
from pillion.observability.metrics import MAX_CELLS, OTHER, Distribution, Meters, Metric, Reading
from pillion.observability.metrics_export import Exports, MetricsPage
from pillion.observability.metrics_prometheus import prometheus_name
from tests.support.http import data_segments

QUIET = Metric("pillion.quiet", "gauge", "", "Nobody says anything.")


def samples(meters: Meters, *, vllm_names: bool = False) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples that Prometheus reads from the page under Pillion's names, or under vLLM's, without the
    process's own figures."""
    text = generate_latest(MetricsPage(meters.collect).registry()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.startswith("process_") and sample.name.startswith("vllm") == vllm_names
    }


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.005, 0.02, 0.0201, 1.0, 9.0]), st.integers(1, 4)), max_size=30))
def test_a_distribution_is_a_histogram(observed: list[tuple[float, int]]) -> None:
    cell = Meters().distribution(names.ITL, "demo")
    for value, times in observed:
        cell.observe(value, times)
    values = np.repeat([value for value, _ in observed] or [0.0], [times for _, times in observed] or [0])
    # numpy's bins are closed on the left, Prometheus's on the right.
    expected = np.histogram(-values, np.array([-math.inf, *(-bound for bound in reversed(names.ITL_BOUNDS)), math.inf]))
    assert cell.counts == expected[0][::-1].tolist()
    assert cell.total == pytest.approx(values.sum())


def test_the_metrics_page_matches_the_counters() -> None:
    meters = Meters()
    meters.counter(names.GENERATED_TOKENS, "demo").add(7)
    meters.counter(names.GENERATED_TOKENS, 'a "model"\n').add(1)
    for value in (0.004, 0.03, 0.03, 99.0):
        meters.distribution(names.ITL, "demo").observe(value)
    meters.watch(lambda: [(names.KV_USAGE, (), 0.25)])
    found = samples(meters)
    assert found["pillion_generated_tokens_total", (("gen_ai_request_model", "demo"),)] == 7
    assert found["pillion_generated_tokens_total", (("gen_ai_request_model", 'a "model"\n'),)] == 1
    assert found["pillion_kv_usage_ratio", ()] == 0.25
    name, model = "pillion_inter_token_latency_seconds", ("gen_ai_request_model", "demo")
    assert found[f"{name}_count", (model,)] == 4
    assert found[f"{name}_sum", (model,)] == pytest.approx(99.064)
    assert found[f"{name}_bucket", (model, ("le", "0.03"))] == 3
    assert found[f"{name}_bucket", (model, ("le", "+Inf"))] == 4


def test_metrics_have_the_names_of_the_catalog() -> None:
    assert len({metric.name for metric in names.CATALOG}) == len(names.CATALOG)
    assert prometheus_name(names.KV_EVICTED) == "pillion_kv_evicted_blocks"
    assert prometheus_name(names.KV_FETCH_BYTES) == "pillion_kv_fetched_bytes"
    assert prometheus_name(names.TTFT) == "gen_ai_server_time_to_first_token_seconds"
    assert prometheus_name(names.KV_BLOCK_BYTES) == "pillion_kv_block_size_bytes"
    for metric in names.CATALOG:
        assert metric.help.endswith("."), metric.name
        assert list(metric.bounds) == sorted(set(metric.bounds)), metric.name
        assert bool(metric.bounds) == (metric.kind == "histogram"), metric.name


def test_the_number_of_labels_is_limited() -> None:
    meters = Meters()
    for number in range(MAX_CELLS + 50):
        meters.counter(names.GENERATED_TOKENS, f"model-{number}").add()
        meters.distribution(names.ITL, f"model-{number}").observe(0.01)
    for cells in meters.collect().values():
        assert len(cells) == MAX_CELLS + 1
        rest = cells[(OTHER,)]
        assert (rest.count if isinstance(rest, Distribution) else rest) == 50


def test_a_failing_collector_hides_no_other_metric() -> None:
    def broken() -> Iterator[Reading]:
        yield names.KV_DISK_BLOCKS, (), 3
        raise RuntimeError("the books burnt")

    meters = Meters()
    meters.watch(broken)
    meters.watch(lambda: [(names.KV_FENCED, (), 1)])
    assert meters.collect() == {names.KV_DISK_BLOCKS: {(): 3}, names.KV_FENCED: {(): 1}}


def test_vllm_names_are_aliases() -> None:
    meters = Meters()
    for source, tokens in (("pool", 30), ("fetched", 10), ("restored", 2), ("prefill", 50), ("tail", 8)):
        meters.counter(names.PROMPT_TOKENS, "demo", source).add(tokens)
    for operation in ("chat", "text_completion"):
        meters.distribution(names.TTFT, operation, "demo").observe(0.3)
    meters.counter(names.REQUESTS, "demo", "stop").add(5)
    meters.counter(names.REQUESTS, "demo", "UNAVAILABLE").add(1)
    meters.watch(lambda: [(names.SEQUENCES, ("running",), 3), (names.SEQUENCES, ("waiting",), 2)])
    model = ("model_name", "demo")
    found = samples(meters, vllm_names=True)
    assert found["vllm:prompt_tokens_total", (model,)] == 100
    assert found["vllm:prefix_cache_queries_total", (model,)] == 100
    assert found["vllm:prefix_cache_hits_total", (model,)] == 42
    # A worker's page knows no names of models.
    assert found["vllm:num_requests_running", ()] == 3
    assert found["vllm:num_requests_waiting", ()] == 2
    # Of both kinds of operation, which vLLM does not tell apart.
    assert found["vllm:time_to_first_token_seconds_count", (model,)] == 2
    assert found["vllm:time_to_first_token_seconds_bucket", (("le", "0.5"), model)] == 2
    assert found["vllm:request_success_total", (("finished_reason", "stop"), model)] == 5
    assert ("vllm:request_success_total", (("finished_reason", "UNAVAILABLE"), model)) not in found


async def test_a_component_has_a_metrics_page_on_its_own_port() -> None:
    port = free_port()
    meters, page = Meters(), {"host": "127.0.0.1", "port": port, "not_ready": str}
    exports = Exports(meters, "decode-7", "decode", **page)  # type: ignore[arg-type]
    try:
        with pytest.raises(ConfigError, match="the metrics page cannot listen"):
            Exports(Meters(), "decode-8", "decode", **page)  # type: ignore[arg-type]
        url = f"http://127.0.0.1:{port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=WITHIN_S).read().decode())
        assert 'component="decode-7"' in text
        assert "process_resident_memory_bytes" in text
    finally:
        await asyncio.to_thread(exports.close)
        await asyncio.to_thread(exports.close)


async def test_an_answer_of_a_parts_page_is_one_segment() -> None:
    port = free_port()
    page = {"host": "127.0.0.1", "port": port, "not_ready": str}
    exports = Exports(Meters(), "decode-7", "decode", **page)  # type: ignore[arg-type]
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /alive HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), WITHIN_S)).endswith(b"\r\n\r\nok\n")
        assert data_segments(writer.get_extra_info("socket")) == 1
        writer.close()
    finally:
        await asyncio.to_thread(exports.close)


async def test_health_checks_report_readiness_and_liveness(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble, port = "", free_port()
    page = {"host": "127.0.0.1", "port": port, "not_ready": lambda: trouble}
    exports = Exports(Meters(), "gateway-0", "gateway", **page)  # type: ignore[arg-type]

    def read(path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

    try:
        for path in ("/health", "/alive"):
            assert await asyncio.to_thread(read, path) == (200, "ok\n")
        trouble = "no decode worker lives"
        assert await asyncio.to_thread(read, "/health") == (503, "no decode worker lives\n")
        assert (await asyncio.to_thread(read, "/alive"))[0] == 200
        monkeypatch.setattr("pillion.observability.metrics_export.COLLECT_TIMEOUT_S", 0.01)
        for path in ("/health", "/alive"):
            # Asked while the event loop stands still, which waits for the answer here.
            assert read(path) == (503, "no answer within 0.01 s\n")
    finally:
        await asyncio.to_thread(exports.close)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "x"}, True),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "True"}, False),
    ],
)
def test_the_environment_enables_the_export_of_spans(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: bool
) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert telemetry.wanted() is wanted


def test_the_environment_sets_the_service_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert telemetry.resource("g-1", "gateway").attributes["service.name"] == "pillion-gateway"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=shop,team=a")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm")
    found = telemetry.resource("g-1", "gateway").attributes
    assert [found[f"service.{name}"] for name in ("name", "namespace", "instance.id")] == ["llm", "shop", "g-1"]
    assert found["team"] == "a"


def test_flushing_the_last_spans_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "FLUSH_TIMEOUT_MS", 10)
    never = threading.Event()
    telemetry._stop(never.wait)
    never.set()


@pytest.mark.parametrize(
    ("shared", "own", "way"), [("", "", "grpc"), ("http/protobuf", "", "http"), ("http/protobuf", "grpc", "grpc")]
)
def test_the_environment_picks_the_protocol_of_spans(
    monkeypatch: pytest.MonkeyPatch, shared: str, own: str, way: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", shared)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", own)
    made = telemetry.exporter()
    assert type(made).__module__.startswith(f"opentelemetry.exporter.otlp.proto.{way}.")
    made.shutdown()
