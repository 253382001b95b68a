"""Connections that end in unusual ways, and clients that ask for unusual amounts: each ends in a clear answer, soon."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pillion import InvalidRequest, Overloaded
from pillion.gateway.links import decode_link
from pillion.v1 import common_pb2
from pillion.wire.registry import ComponentRecord
from testbed.conditions import until
from tests.gateway.request.test_faults import start_decode_again
from tests.support.fake_components import FakeCluster, record, running_fake_cluster

PROMPT = "What is the capital of France?"


async def replays(fakes: FakeCluster, timeout_s: float | None = None) -> int:
    """Return the replays of one whole answer."""
    deltas = [delta async for delta in fakes.client.generate(PROMPT, timeout_s=timeout_s)]
    assert "".join(delta.text for delta in deltas) == "The answer."
    return deltas[-1].timings.replays


async def test_a_worker_that_ends_the_connection_in_good_order_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the worker ends it before our hello is written, grpc.aio answers the write with an InvalidStateError."""
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
        await start_decode_again(fakes)
        await until("the third connection", lambda: link.alive and calls >= 3)
        assert await replays(fakes) == 0
        await fakes.settled()


@pytest.mark.parametrize("stage", ["ticket", "prefill"])
async def test_a_link_that_is_closed_under_a_call_is_a_part_lost(stage: str) -> None:
    """A component may come back at another address before its old connection was found dead."""
    async with running_fake_cluster() as fakes:
        peer, cluster = (fakes.node, fakes.prefill)[stage == "prefill"], fakes.gateway.cluster
        peer.gate.clear()
        reading = asyncio.create_task(replays(fakes))
        await until("the call to be under way", lambda: fakes.node.waiting or fakes.prefill.running)
        role = "kvnode" if stage == "ticket" else "prefill"
        moved = next(one for one in cluster.view.records() if one.role == role)
        # The same socket by another name, as the registry has it from now on.
        elsewhere = moved.address.replace("unix:/", "unix:///")
        await fakes.registry.heartbeat(msgspec.structs.replace(moved, address=elsewhere))
        await until("the call to end", lambda: not (fakes.node.waiting or fakes.prefill.running))
        peer.gate.set()
        assert await asyncio.wait_for(reading, 10) == 1
        await fakes.settled()


async def test_full_workers_are_told_as_too_much() -> None:
    async with running_fake_cluster(max_attempts=2) as fakes:
        fakes.decode.refusals = [(Overloaded.code, True)] * 2
        with pytest.raises(Overloaded, match="given up after 2 attempts"):
            await replays(fakes)
        await fakes.settled()


async def test_a_deadline_months_away_is_a_deadline() -> None:
    async with running_fake_cluster() as fakes:
        assert await replays(fakes, timeout_s=90 * 86_400.0) == 0
        assert fakes.decode.submits[0].timeout_ms == 2**32 - 1
        await fakes.settled()


async def test_lists_without_end_are_refused_before_they_are_read() -> None:
    async with running_fake_cluster() as fakes:
        with pytest.raises(InvalidRequest) as failure:
            await anext(fakes.client.generate("x", stop=("x",) * 5000))
        assert [(v.field, v.description) for v in failure.value.violations] == [
            ("sampling.stop", "5000 items; at most 4096")
        ]


async def test_a_message_that_no_prompt_needs_is_refused() -> None:
    async with running_fake_cluster() as fakes:
        with pytest.raises(InvalidRequest) as caught:
            async for _ in fakes.client.generate("x" * (9 * 2**20)):
                pass
    assert [violation.field for violation in caught.value.violations] == ["(message)"]


async def test_a_look_at_the_registry_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
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
