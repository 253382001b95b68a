"""Blocks that the index lists and the ticket lacks are fetched first; every outcome gives the same answer (I1)."""

from __future__ import annotations

import asyncio
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lab.testbed.conditions import until
from pillion import DeadlineExceeded
from pillion.errors import Conflict, NotFound, Overloaded, PillionError, Unavailable
from pillion.gateway.links import cluster as links
from pillion.gateway.planning.plan_cost import MIN_FETCH_S
from pillion.gateway.planning.planner import FetchPlan
from pillion.gateway.request import events as ev
from pillion.gateway.request.request_machine import RequestState
from pillion.kvstore.client import node_client as client
from tests.gateway.request.test_faults import PROMPT, SCRIPT, read, whole
from tests.gateway.request.test_request import hold, kinds, machine, planned
from tests.support.fake_components import FakeCluster, knows, running_fake_cluster

BOTH = "kvnode prefill decode far-kvnode"
# Delay after the fetch's timeout at which an unanswered call ends. A busy machine may use part of it before the node
# has the call.
GRACE_S = 1.0


@pytest.mark.parametrize(("brought", "cached"), [(5, 20), (4, 16), (2, 8), (0, 8), (99, 20)])
def test_a_fetch_only_moves_the_split_forward(brought: int, cached: int) -> None:
    m = machine(arrived=1.0)
    m.handle(planned(1, 21, 2, far=9), 1.0)
    (fetch,) = m.handle(ev.TicketGranted(1, hold(), 2), 1.5)
    assert isinstance(fetch, ev.Fetch)
    assert (fetch.hold, fetch.wanted, m.state) == (hold(), FetchPlan(5, ("kv-1",)), RequestState.FETCHING)
    after, *rest = m.handle(ev.BlocksFetched(1, brought), 2.0)
    last = [after, *rest][-1]
    assert isinstance(after, ev.SubmitDecode | ev.RunPrefill)
    assert isinstance(last, ev.SubmitDecode)
    assert last.awaited_blocks == (0 if cached == 20 else 5)
    assert kinds([after, *rest]) == (["SubmitDecode"] if cached == 20 else ["RunPrefill", "SubmitDecode"])
    assert (after.plan.cached_tokens, m.usage().cached_tokens, m.timings(2.0).admission_ms) == (cached, cached, 500.0)
    assert m.handle(ev.BlocksFetched(1, 5), 2.0) == []


def test_fetches_of_an_older_attempt_do_not_count() -> None:
    m = machine()
    m.handle(planned(1, 21, far=5), 1.0)
    m.handle(ev.TicketGranted(1, hold(), 0), 1.0)
    assert kinds(m.handle(ev.AttemptSilent(1), 2.0)) == ["StopWork", "ReleaseTicket", "LookUp"]
    m.handle(planned(2, 21, far=5), 2.0)
    m.handle(ev.TicketGranted(2, hold(2), 0), 2.0)
    assert m.handle(ev.BlocksFetched(1, 5), 2.0) == []
    assert kinds(m.handle(ev.BlocksFetched(2, 1), 3.0)) == ["RunPrefill", "SubmitDecode"]
    assert m.usage().cached_tokens == 4


def cached_of(fakes: FakeCluster, deltas: list) -> int:
    """Return the number of cached tokens, after checking that all counts add up."""
    last = deltas[-1]
    assert last.usage.cached_tokens == last.timings.cached_tokens
    started = [prefill_range.start_tokens for prefill_range in fakes.prefill.prefill_ranges] or [28]
    assert started == [last.usage.cached_tokens]
    return last.usage.cached_tokens


@pytest.mark.parametrize(
    ("brings", "cached"),
    [(6, 24), (4, 16), (2, 8), (0, 8), (99, 24), (Unavailable("the source is gone"), 8), (Conflict("fenced"), 8),
     (NotFound("no such ticket"), 8), (Overloaded("too many fetches"), 8)],
)  # fmt: skip
async def test_the_answer_does_not_depend_on_the_fetch(brings: int | PillionError, cached: int) -> None:
    async with running_fake_cluster(SCRIPT, BOTH) as fakes:
        fakes.node.pinned, fakes.node.brings = 2, [brings]
        knows(fakes, kv_0=2, kv_1=6)
        deltas = await read(fakes.client.generate(PROMPT))
        whole(fakes, deltas, replays=0)
        assert cached_of(fakes, deltas) == cached
        (opened,), (fetch,) = fakes.node.opened, fakes.node.fetches
        assert (fetch.epoch, fetch.block_hashes) == (opened.epoch, opened.block_hashes[: 6 * 32])
        assert list(fetch.source_node_ids) == ["kv-1"]
        assert 0 < fetch.timeout_ms <= links.MAX_FETCH_S * 1000
        assert fakes.prefill.prefill_ranges[0].ticket_id == fetch.ticket_id == fakes.decode.submits[0].ticket_id
        assert not fakes.far_node.opened
        await fakes.settled()


async def test_a_complete_fetch_needs_no_prefill() -> None:
    async with running_fake_cluster(SCRIPT, BOTH) as fakes:
        knows(fakes, kv_1=9)
        deltas = await read(fakes.client.generate(PROMPT))
        whole(fakes, deltas, replays=0)
        assert (cached_of(fakes, deltas), deltas[-1].timings.tail_tokens) == (28, 2)
        assert not fakes.prefill.prefill_ranges
        await fakes.settled()


async def test_a_fetch_from_the_nodes_own_disk_needs_no_source() -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.node.pinned = 1
        knows(fakes, kv_0=5, kv_7=7)
        deltas = await read(fakes.client.generate(PROMPT))
        assert cached_of(fakes, deltas) == 20
        (fetch,) = fakes.node.fetches
        assert (list(fetch.source_node_ids), len(fetch.block_hashes)) == ([], 5 * 32)
        await fakes.settled()


async def test_pinned_blocks_are_not_fetched() -> None:
    async with running_fake_cluster(SCRIPT, BOTH) as fakes:
        fakes.node.pinned = 3
        knows(fakes, kv_0=3, kv_1=2)
        assert cached_of(fakes, await read(fakes.client.generate(PROMPT))) == 12
        assert not fakes.node.fetches
        await fakes.settled()


async def test_a_fetch_that_hangs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_FETCH_S", 0.1)
    monkeypatch.setattr(client, "PREFETCH_GRACE_S", GRACE_S)
    async with running_fake_cluster(SCRIPT, BOTH) as fakes:
        fakes.node.pinned = 1
        fakes.node.fetch_gate.clear()
        knows(fakes, kv_1=6)
        deltas = await read(fakes.client.generate(PROMPT))
        whole(fakes, deltas, replays=0)
        assert cached_of(fakes, deltas) == 4
        assert [fetch.timeout_ms for fetch in fakes.node.fetches] == [100]
        await fakes.settled()


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_a_cancelled_request_does_not_wait_for_its_fetch(end: str) -> None:
    async with running_fake_cluster(SCRIPT, BOTH) as fakes:
        fakes.node.fetch_gate.clear()
        knows(fakes, kv_1=6)
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT, timeout_s=0.5 if end == "deadline" else None)))
        # On a stalled machine the deadline may pass earlier.
        await until("a fetch under way", lambda: fakes.node.fetching or reading.done())
        if end == "cancel":
            reading.cancel()
        (outcome,) = await asyncio.gather(reading, return_exceptions=True)
        assert isinstance(outcome, DeadlineExceeded if end == "deadline" else asyncio.CancelledError)
        await fakes.settled()
        assert not fakes.prefill.prefill_ranges
        assert not fakes.decode.submits


async def test_a_node_lost_during_a_fetch_costs_one_replay() -> None:
    async with running_fake_cluster(SCRIPT, BOTH) as fakes:
        fakes.node.fetch_gate.clear()
        knows(fakes, kv_1=6)
        # Workers that lost their node do not find its tickets.
        fakes.decode.refusals = [(NotFound.code, True)]
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await until("a fetch under way", lambda: fakes.node.fetching)
        fakes.node.fetch_gate.set()
        await fakes.servers["kvnode"].stop(0)
        await until("a submit", lambda: fakes.decode.submits)
        await start_node_again(fakes)
        deltas = await reading
        whole(fakes, deltas, replays=1)
        assert len({opened.epoch for opened in fakes.node.opened}) == 2
        await fakes.settled()


async def start_node_again(fakes: FakeCluster) -> None:
    from pillion.net import rpc
    from pillion.v1 import kvnode_pb2_grpc

    def add(server) -> None:
        kvnode_pb2_grpc.add_KVNodeServicer_to_server(fakes.node, server)

    again = await rpc.start_server(f"unix:{fakes.folder}/kvnode.sock", [("pillion.v1.KVNode", add)])
    fakes.servers["kvnode"].server = again.server


async def test_a_fetch_is_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("pillion.observability.telemetry.tracer", lambda: provider.get_tracer("test"))
    async with running_fake_cluster(SCRIPT, BOTH) as fakes:
        fakes.node.brings = [3, Unavailable("gone")]
        knows(fakes, kv_1=6)
        for _ in range(2):
            await read(fakes.client.generate(PROMPT, max_tokens=1))
        await fakes.settled()
    prefill_ranges = exporter.get_finished_spans()
    roots = {prefill_range.context.span_id for prefill_range in prefill_ranges if prefill_range.name == "generate toy"}
    good, bad = (prefill_range for prefill_range in prefill_ranges if prefill_range.name == "kv.fetch")
    assert {good.parent.span_id, bad.parent.span_id} == roots
    assert good.attributes == {
        "pillion.node": "kv-0",
        "pillion.sources": ("kv-1",),
        "pillion.fetched_blocks": 3,
        "pillion.restored_blocks": 0,
        "pillion.bucket_blocks": 0,
    }
    assert bad.attributes["error.type"] == "Unavailable"


async def test_fetches_are_observed_per_pair_of_nodes() -> None:
    async with running_fake_cluster(SCRIPT, BOTH) as fakes:
        fakes.node.brings = [3]
        knows(fakes, kv_1=6)
        await read(fakes.client.generate(PROMPT, max_tokens=1))
        await fakes.settled()
        paces, now = fakes.gateway.cluster.routes.fetch_paces, time.monotonic()
        assert paces.cost("kv-1", "kv-0", now) is not None
        assert paces.cost("kv-0", "kv-1", now) is None


async def test_a_fetch_gets_no_more_time_than_computing_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """With policy ``auto``, from the worker's cost per token: a hanging source costs at most that time again."""
    monkeypatch.setattr(client, "PREFETCH_GRACE_S", GRACE_S)
    async with running_fake_cluster(SCRIPT, BOTH, split_policy="auto") as fakes:
        fakes.node.fetch_gate.clear()
        knows(fakes, kv_0=6)
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=0)
        assert [fetch.timeout_ms for fetch in fakes.node.fetches] == [MIN_FETCH_S * 1000]
        fakes.node.fetch_gate.set()
        await fakes.settled()
