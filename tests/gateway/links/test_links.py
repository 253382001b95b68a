"""Connections with unusual ends, and clients with unusual demands: each gets a clear answer, soon."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from lab.testbed.conditions import WITHIN_S, until
from pillion import InvalidRequest, Overloaded
from pillion.gateway.links import decode_link
from pillion.gateway.links.cluster import Served
from pillion.net import rpc
from pillion.v1 import common_pb2, decode_pb2, kvnode_pb2_grpc
from pillion.wire.registry import ComponentRecord
from tests.gateway.request.test_faults import start_again
from tests.support.fake_components import FakeCluster, record, running_fake_cluster

PROMPT = "What is the capital of France?"


async def replays(fakes: FakeCluster, timeout_s: float | None = None) -> int:
    """Return the replays of one whole answer."""
    deltas = [delta async for delta in fakes.client.generate(PROMPT, timeout_s=timeout_s)]
    assert "".join(delta.text for delta in deltas) == "The answer."
    return deltas[-1].timings.replays


async def test_a_connection_closed_by_the_worker_is_reopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the worker closes it before our hello is written, grpc.aio answers the write with an InvalidStateError."""
    async with running_fake_cluster() as fakes:
        link, calls = fakes.gateway.cluster.decode("decode-0"), 0
        hello = decode_link.hello_to_pb

        def hasty(gateway_id: str) -> common_pb2.Hello:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise asyncio.InvalidStateError("RPC already finished.")
            return hello(gateway_id)

        monkeypatch.setattr(decode_link, "hello_to_pb", hasty)
        await fakes.servers["decode"].stop(0)
        await start_again(fakes, "decode")
        await until("the third connection", lambda: link.alive and calls >= 3)
        assert await replays(fakes) == 0
        await fakes.settled()


@pytest.mark.parametrize("stage", ["ticket", "prefill"])
async def test_a_link_closed_during_a_call_is_a_lost_component(stage: str) -> None:
    """A component may return at another address before its old connection is found dead."""
    async with running_fake_cluster() as fakes:
        peer, cluster = (fakes.node, fakes.prefill)[stage == "prefill"], fakes.gateway.cluster
        peer.gate.clear()
        reading = asyncio.create_task(replays(fakes))
        await until("the call to be under way", lambda: fakes.node.waiting or fakes.prefill.running)
        role = "kvnode" if stage == "ticket" else "prefill"
        moved = next(one for one in cluster.view.records() if one.role == role)
        # The same socket under another name, as in the registry from now on.
        elsewhere = moved.address.replace("unix:/", "unix:///")
        await fakes.registry.heartbeat(msgspec.structs.replace(moved, address=elsewhere))
        await until("the call to end", lambda: not (fakes.node.waiting or fakes.prefill.running))
        peer.gate.set()
        assert await asyncio.wait_for(reading, WITHIN_S) == 1
        await fakes.settled()


async def test_full_workers_raise_overloaded() -> None:
    async with running_fake_cluster(max_attempts=2) as fakes:
        fakes.decode.refusals = [(Overloaded.code, True)] * 2
        with pytest.raises(Overloaded, match="given up after 2 attempts"):
            await replays(fakes)
        await fakes.settled()


async def test_a_deadline_months_away_is_clamped() -> None:
    async with running_fake_cluster() as fakes:
        assert await replays(fakes, timeout_s=90 * 86_400.0) == 0
        assert fakes.decode.submits[0].timeout_ms == 2**32 - 1
        await fakes.settled()


async def test_long_lists_are_refused_before_parsing() -> None:
    async with running_fake_cluster() as fakes:
        with pytest.raises(InvalidRequest) as failure:
            await anext(fakes.client.generate("x", stop=("x",) * 5000))
        assert [(v.field, v.description) for v in failure.value.violations] == [
            ("sampling.stop", "5000 items; at most 4096")
        ]


async def test_an_oversized_message_is_refused() -> None:
    async with running_fake_cluster() as fakes:
        with pytest.raises(InvalidRequest) as caught:
            async for _ in fakes.client.generate("x" * (9 * 2**20)):
                pass
    assert [violation.field for violation in caught.value.violations] == ["(message)"]


async def test_registry_polling_continues_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_fake_cluster() as fakes:
        cluster = fakes.gateway.gateway.cluster
        looks = 0

        async def broken() -> list[ComponentRecord]:
            nonlocal looks
            looks += 1
            raise TypeError("a record that nobody foresaw")

        monkeypatch.setattr(cluster.registry, "components", broken)
        await until("a second look at the registry", lambda: looks >= 2)
        monkeypatch.undo()
        await fakes.registry.heartbeat(record("gateway-9", "gateway", "unix:nowhere.sock"))
        await until(
            "gateway-9 to be known",
            lambda: any(component.component_id == "gateway-9" for component in cluster.view.records()),
        )
        assert await replays(fakes) == 0


async def test_a_link_survives_a_defect(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each error under a connection costs that connection; the next one is made. It is logged once."""
    async with running_fake_cluster() as fakes:
        link, node, calls = fakes.gateway.cluster.decode("decode-0"), fakes.gateway.cluster.node("kv-0"), 0

        async def defective(*_: object) -> None:
            nonlocal calls
            calls += 1
            raise TypeError("nobody foresaw this")

        def defective_now(*_: object) -> None:
            asyncio.ensure_future(defective()).add_done_callback(lambda task: task.exception())
            raise TypeError("nobody foresaw this")

        monkeypatch.setattr(decode_link, "hello_to_pb", defective_now)
        monkeypatch.setattr(node.client, "open_session", defective)
        await fakes.servers["decode"].stop(0)
        await start_again(fakes, "decode")
        await fakes.servers["kvnode"].stop(0)
        await until("both links to be down and tried again", lambda: not (link.alive or node.alive) and calls >= 4)
        monkeypatch.undo()
        await start_node_again(fakes)
        await until("both links to be up", lambda: link.alive and node.alive)
        connections = fakes.decode.connections
        assert link._commands is not None
        monkeypatch.setattr(link._commands, "get", defective)
        link._commands.put_nowait(decode_pb2.DecodeCommand())
        await until("the next connection", lambda: link.alive and fakes.decode.connections > connections)
        assert await replays(fakes) == 0
        await fakes.settled()
    texts = [record.getMessage() for record in caplog.records if "failed unexpectedly" in record.getMessage()]
    assert len([text for text in texts if "decode-0" in text]) <= 2
    assert len([text for text in texts if "kv-0" in text]) == 1


async def start_node_again(fakes: FakeCluster) -> None:
    add = lambda server: kvnode_pb2_grpc.add_KVNodeServicer_to_server(fakes.node, server)  # noqa: E731
    address = f"unix:{fakes.folder}/kvnode.sock"
    fakes.servers["kvnode"].server = (await rpc.start_server(address, [("pillion.v1.KVNode", add)])).server


async def test_requests_without_a_worker_share_one_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a worker share one search, and all continue when it finds one."""
    many = 60
    async with running_fake_cluster() as fakes:
        cluster, looks, lookers = fakes.gateway.cluster, {"registry": 0, "model": 0}, set()
        components, served = cluster.registry.components, cluster.served
        await fakes.servers["decode"].stop(0)
        await until("the link to be down", lambda: not cluster.decode("decode-0").alive)

        async def counted() -> list[ComponentRecord]:
            looks["registry"] += 1
            lookers.add(asyncio.current_task())
            return await components()

        def looked(*key: str) -> Served:
            looks["model"] += 1
            return served(*key)

        monkeypatch.setattr(cluster.registry, "components", counted)
        monkeypatch.setattr(cluster, "served", looked)
        reading = [asyncio.create_task(replays(fakes)) for _ in range(many)]
        await until("all to wait", lambda: looks["model"] >= many)
        await until("further looks", lambda: looks["registry"] >= 10)
        for task in reading[: many // 2]:
            task.cancel()
        await start_again(fakes, "decode")
        assert await asyncio.gather(*reading[many // 2 :]) == [0] * (many // 2)
        # The registry poll and the search, which restarts if nothing waited in between.
        assert len(lookers) < 10
        assert looks["model"] <= many + looks["registry"]
        await fakes.settled()
