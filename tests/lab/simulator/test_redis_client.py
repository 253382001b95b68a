"""The production Redis clients over the model, on an event loop, in all states of the network path."""

from __future__ import annotations

import asyncio
import struct

import pytest

from lab.simulator.redis_client import RedisModelClient, WayToRedis
from lab.simulator.redis_model import RedisModel
from lab.testbed.conditions import loop_turns
from pillion.errors import Unavailable
from pillion.kvstore.index import shared_buckets
from pillion.kvstore.index.index import Index, PrefixHit
from pillion.kvstore.index.redis_writer import IndexWriter
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.index.shared_buckets import BucketDemand, SharedBuckets
from tests.kvstore.index.conftest import lengthen_deadlines
from tests.support.loop_clock import turn_clock
from tests.support.redis_nodes import PATIENT_DEADLINE_MS, Chain, node_record

TTL_MS = 5000


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    lengthen_deadlines(monkeypatch)
    monkeypatch.setattr(shared_buckets, "TAKE_DEADLINE_MS", PATIENT_DEADLINE_MS)


class Parts:
    """The production clients over one model."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.model, self.way = RedisModel(lambda: self.now_s), WayToRedis()
        server = RedisModelClient(self.model, self.way)
        self.registry, self.index = Registry(server, TTL_MS), Index(server)
        self.writer, self.buckets = IndexWriter(server), SharedBuckets(server)

    async def announce(self, node_id: str, chain: Chain) -> None:
        answer = await self.registry.heartbeat(node_record(node_id))
        await self.writer.announce(answer.node_number + struct.pack(">I", 1), chain.events())


async def test_production_clients_work_with_the_model() -> None:
    parts, chain = Parts(), Chain(range(100))
    await parts.announce("a", chain)
    await parts.announce("b", Chain(range(40)))
    assert await parts.index.longest_prefix(chain.packed) == [PrefixHit("a", 100), PrefixHit("b", 40)]
    assert [one.component_id for one in await parts.registry.components()] == ["a", "b"]
    assert await parts.buckets.take("t", [BucketDemand(60, wanted=60)]) is None
    assert await parts.buckets.take("t", [BucketDemand(60, wanted=1)]) is not None
    for _ in range(6):
        parts.now_s += TTL_MS / 5000
        await parts.registry.heartbeat(node_record("b"))
    assert [one.component_id for one in await parts.registry.components()] == ["b"]
    parts.model.restart()
    assert not (await parts.registry.heartbeat(node_record("b"))).known, "and the scripts were sent again"


async def test_a_refusal_names_a_remedy() -> None:
    parts = Parts()
    parts.model.refusing = "full"
    with pytest.raises(Unavailable, match=r"OOM.*Remedy: its memory is full"):
        await parts.registry.heartbeat(node_record("a"))
    assert await parts.registry.components() == []
    parts.way.gone = True
    with pytest.raises(Unavailable, match="refused"):
        await parts.registry.components()


async def test_abandoned_commands_are_executed() -> None:
    """A silent server: the call ends at its deadline, and its command runs when the server continues."""
    parts = Parts()
    # The first call sends the script.
    assert await parts.buckets.take("t", [BucketDemand(60, wanted=10)]) is None
    parts.way.silence()
    asking = asyncio.create_task(parts.buckets.take("t", [BucketDemand(60, wanted=50)]))
    await loop_turns()
    await turn_clock(PATIENT_DEADLINE_MS / 1000)
    with pytest.raises(Unavailable):
        await asking
    before = parts.model.dump()
    parts.way.go_on()
    assert parts.model.dump() != before


async def test_commands_take_network_time() -> None:
    """By the loop's clock, which is advanced at once."""
    parts = Parts()
    parts.way.there_s, parts.way.back_s = 2000.0, 3000.0
    asked = asyncio.ensure_future(RedisModelClient(parts.model, parts.way).execute_command("HSET", "k", "f", "v"))
    await loop_turns()
    await turn_clock(1999.0)
    assert not parts.model.dump()
    await turn_clock(2.0)
    assert parts.model.dump()
    await turn_clock(2998.0)
    assert not asked.done()
    await turn_clock(2.0)
    assert await asked == 1
