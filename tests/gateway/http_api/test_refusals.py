"""Refused and ignored fields at each API are visible in a table for operators, the log and a span."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pillion import AsyncClient
from pillion.errors import InvalidRequest, Unauthenticated
from pillion.gateway.admission.api_keys import hash_of
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call

KEYS = {name: f"plk-{name}-" + "a" * 40 for name in ("boss", "acme")}
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture
def file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    entries = [f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(key)}"\n' for name, key in KEYS.items()]
    path = tmp_path / "keys.toml"
    path.write_text("[tenant.boss]\noperator = true\n[tenant.acme]\n" + "".join(entries))
    monkeypatch.setenv("PILLION_API_KEY", KEYS["boss"])
    return str(path)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("pillion.observability.telemetry.tracer", lambda: provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def sent_by(name: str, client: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}", "User-Agent": client}


async def test_operators_see_refusals_by_tenant(file: str, caplog: pytest.LogCaptureFixture) -> None:
    apis: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": MESSAGES},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
        "/v1/responses": {"input": "x"},
    }
    async with running_fake_cluster(api_keys=file) as fakes:
        address = fakes.gateway.http_address
        with caplog.at_level(logging.INFO, "pillion.gateway.refusals"):
            for path, body in apis.items():
                named = {"model": "toy", **body}
                wrong = await call(address, path, {**named, "temperature": -3}, sent_by("acme", "Agent/2.1"))
                assert wrong.status == 400
                for _ in range(2):
                    said = await call(address, path, {**named, "of_next_year": 1}, sent_by("acme", "Agent/2.1"))
                    assert said.headers["x-pillion-ignored"] == "of_next_year"
            assert (await call(address, "/v1/models", headers={"User-Agent": "x" * 500})).status == 401
            assert (await call(address, "/any/" + "path" * 50, headers=sent_by("acme", "a"))).status == 404
        assert (await call(address, "/v1/refusals", headers=sent_by("acme", "a"))).status == 403
        page = await call(address, "/v1/refusals", headers=sent_by("boss", "a"))
        rows = {(row["api"], row["tenant"], row["client"], row["status"]): row for row in page.json["data"]}
        for path in apis:
            refused, ignored = (rows[path, "acme", "Agent/2.1", status] for status in (400, None))
            assert (refused["field"], refused["times"]) == ("temperature", 1)
            assert (ignored["field"], ignored["reason"], ignored["times"]) == ("of_next_year", "no effect", 2)
        assert rows["/v1/models", "(no key)", "x" * 100, 401]["reason"] == "invalid_api_key"
        assert rows["unknown path", "", "a", 404]["times"] == 1
        line = next(one.message for one in caplog.records if "/v1/messages" in one.message)
        for words in ("refused: ", "status 400", "field temperature", "tenant acme", "client Agent/2.1"):
            assert words in line
        assert "plk-" not in caplog.text


async def test_refusals_over_grpc_are_recorded(file: str) -> None:
    async with running_fake_cluster(api_keys=file) as fakes:
        async with AsyncClient(fakes.gateway.grpc_address, api_key=KEYS["acme"]) as client:
            with pytest.raises(InvalidRequest):
                [delta async for delta in client.generate("x", temperature=-3)]
        async with AsyncClient(fakes.gateway.grpc_address, api_key="wrong") as client:
            with pytest.raises(Unauthenticated):
                [delta async for delta in client.generate("x")]
        rows = {(row["tenant"], row["status"]): row for row in fakes.gateway.gateway.refusals.rows()}
        own = rows["acme", 400]
        assert (own["api"], own["field"], own["times"]) == ("gRPC Generate", "temperature", 1)
        assert own["client"].startswith("grpc-python")
        assert rows["(no key)", 401]["api"] == "gRPC Generate"


async def test_spans_record_requests_and_refusals(spans: InMemorySpanExporter) -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        for body in ({"stream": True}, {"stream": False}, {}):
            sent = {"model": "models/toy", "prompt": "x", "max_tokens": 2, **body}
            assert (await call(address, "/v1/completions", sent)).status == 200
        assert (await call(address, "/v1/embeddings", {"model": "toy", "input": "x"})).status == 200
        trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "User-Agent": "Agent/2.1"}
        assert (await call(address, "/v1/completions", {"prompt": "x", "temperature": -3}, trace)).status == 400
        await fakes.settled()
        found = spans.get_finished_spans()
        asked = [one.attributes for one in found if one.attributes.get("gen_ai.request.model") == "models/toy"]
        assert [one["gen_ai.request.stream"] for one in asked] == [True, False, False]
        assert {one["gen_ai.response.model"] for one in asked} == {"toy"}
        assert "embeddings" in {one.attributes.get("gen_ai.operation.name") for one in found}
        (refused,) = (one for one in found if one.name == "refuse /v1/completions")
        assert f"{refused.context.trace_id:x}" == "a" * 32
        assert refused.attributes["pillion.field"] == "temperature"
        assert refused.attributes["user_agent.original"] == "Agent/2.1"
