"""Workers that a node reports as fenced: their work is lost, and they get none until they return."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from lab.testbed.conditions import WITHIN_S, until
from pillion.errors import Unavailable
from pillion.gateway.links.cluster import LINKS, Cluster
from pillion.gateway.links.decode_link import DecodeDelta, DecodeLink
from pillion.gateway.links.prefill_link import PrefillLink
from pillion.gateway.planning.cluster_view import ClusterView
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.registry import Registry
from pillion.net.rpc import start_server
from pillion.v1 import decode_pb2_grpc, prefill_pb2_grpc
from pillion.v1.common_pb2 import SamplingParams
from pillion.v1.decode_pb2 import Submit
from pillion.v1.prefill_pb2 import RunPrefillRequest
from pillion.wire.registry import ComponentRecord
from tests.support.fake_components import FakeDecode

PREFILL_RANGE = RunPrefillRequest(
    request_id="r",
    attempt=1,
    ticket_id=1,
    parent_hash=bytes(32),
    start_tokens=0,
    token_ids=(1, 2),
    chunk_tokens=(2,),
)

SUBMIT = Submit(
    key=0,
    request_id="r",
    attempt=1,
    ticket_id=1,
    root_hash=bytes(32),
    token_ids=(1, 2),
    prompt_tokens=2,
    sampling=SamplingParams(seed=1),
    stop_token_ids=(),
    max_tokens=1,
)


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pil-") as path:
        yield path


def node(*fenced: str) -> ComponentRecord:
    return ComponentRecord(
        component_id="kvnode-0", role="kvnode", address="unix:nowhere", node_id="kvnode-0", fenced_components=fenced
    )


def test_a_fenced_worker_is_reported_once_until_it_returns() -> None:
    view = ClusterView(0.0)
    assert view.update([node()], 0.0) == frozenset()
    assert view.update([node("a", "b")], 0.0) == {"a", "b"}
    assert view.update([node("b", "c")], 0.0) == {"c"}
    assert view.fenced == {"b", "c"}
    assert view.update([], 0.0) == frozenset()
    assert view.update([node("b")], 0.0) == {"b"}


def test_a_component_record_round_trips_through_json() -> None:
    record = node("a", "b")
    assert ComponentRecord.from_json(record.to_json()) == record
    assert ComponentRecord.from_json('{"component_id": "x", "role": "kvnode", "address": ""}').fenced_components == ()
    with pytest.raises(ValueError, match="Expected `array`"):
        ComponentRecord.from_json('{"component_id": "x", "role": "kvnode", "address": "", "fenced_components": 3}')


class Silent(prefill_pb2_grpc.PrefillServicer):
    """A client that accepts prefill ranges and never answers, like a paused process."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def RunPrefill(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.asked.set()
        await asyncio.Event().wait()
        yield


async def test_closing_a_link_ends_prefill_ranges_of_a_silent_worker(folder: str) -> None:
    silent = Silent()

    def add(server: Any) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(silent, server)

    server = await start_server(f"unix:{folder}/p.sock", [("pillion.v1.Prefill", add)])
    link = PrefillLink(ComponentRecord(component_id="prefill-0", role="prefill", address=server.address), "gateway-0")

    async def run() -> None:
        async for _ in link.run_prefill(PREFILL_RANGE, None, print):
            raise AssertionError("it never says anything")

    running = asyncio.create_task(run())
    await asyncio.wait_for(silent.asked.wait(), WITHIN_S)
    assert link.alive
    await link.aclose()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(running, WITHIN_S)
    assert not link.alive
    await server.stop(0)


async def test_fenced_workers_are_disconnected_and_not_planned(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, index = Registry("redis://127.0.0.1:1", 5000), Index("redis://127.0.0.1:1")
    workers = [
        ComponentRecord(component_id=f"{role}-0", role=role, address=f"unix:{folder}/{role}.sock", node_id="kvnode-0")
        for role in ("prefill", "decode")
    ]
    records: list[ComponentRecord] = [node(), *workers]

    async def components() -> list[ComponentRecord]:
        return records

    made: list[DecodeLink] = []

    class CountedLink(DecodeLink):
        def __init__(self, record: ComponentRecord, gateway_id: str) -> None:
            super().__init__(record, gateway_id)
            made.append(self)

    def add(server: Any) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(stuck, server)

    stuck = FakeDecode("x")
    stuck.gate.clear()

    def add_prefill(server: Any) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(Silent(), server)

    server = await start_server(f"unix:{folder}/decode.sock", [("pillion.v1.Decode", add)])
    prefill = await start_server(f"unix:{folder}/prefill.sock", [("pillion.v1.Prefill", add_prefill)])
    monkeypatch.setattr(registry, "components", components)
    monkeypatch.setitem(LINKS, "decode", CountedLink)
    cluster = Cluster("gateway-0", registry, index, 60.0)
    try:
        await cluster.refresh()
        first = cluster.decode("decode-0")
        await until("a connection to the decode worker", lambda: first.alive)
        deltas: list[DecodeDelta] = []
        first.submit(SUBMIT, [deltas.append])
        await until("the worker to hold the ticket", lambda: deltas)
        deltas.clear()
        records[0] = node("decode-0", "prefill-0")
        await cluster.refresh()
        assert made[0] is first
        assert len(made) == 2
        for call in (cluster.prefill, cluster.decode):
            with pytest.raises(Unavailable):
                call(f"{call.__name__}-0")
        await until("the loss of the stream to be told", lambda: deltas)
        assert deltas[0].error is not None
        assert deltas[0].error.retryable
        assert not any(cluster.answers(worker) for worker in workers)
        await cluster.refresh()
        assert len(made) == 2, "it is cut off once"
        records[0] = node()
        await cluster.refresh()
        assert cluster.decode("decode-0") is made[1]
        assert cluster.answers(workers[0])
    finally:
        await cluster.aclose()
        await server.stop(0)
        await prefill.stop(0)
