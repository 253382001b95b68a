"""Gateways exchange their load through a real Redis; what one sends, the next plan of another uses."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest

from lab.testbed.conditions import until
from lab.testbed.redis import RedisServer, running_redis
from pillion.errors import Unavailable
from pillion.gateway.links import load_exchange
from pillion.gateway.links.load_exchange import AssignedLoad, LoadExchange, OwnLoad
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index import redis_url, shared_loads
from pillion.kvstore.index.shared_loads import MAX_CHANGES_PER_CALL, SharedLoads, UnderWay

PATIENT_DEADLINE_MS = 30_000


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat full reports and retry failed calls sooner than in production."""
    monkeypatch.setattr(load_exchange, "WHOLE_S", 0.2)
    monkeypatch.setattr(load_exchange, "RETRY_S", 0.05)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the deadlines: on a busy machine a sound Redis may take a second to answer."""
    monkeypatch.setattr(redis_url, "CONNECT_TIMEOUT_MS", PATIENT_DEADLINE_MS)
    monkeypatch.setattr(shared_loads, "READ_LOADS_DEADLINE_MS", PATIENT_DEADLINE_MS)
    monkeypatch.setattr(shared_loads, "TELL_LOAD_DEADLINE_MS", PATIENT_DEADLINE_MS)


class ToldGateway:
    """One gateway's side of the exchange. ``others`` are the gateways that it sees."""

    def __init__(self, redis: RedisServer, name: str, others: list[str]) -> None:
        self.load = OwnLoad()
        self.exchange = LoadExchange(name, self.load, SharedLoads(redis.url), lambda: others)
        self.exchange.start()

    async def sees(self, component_id: str, amount: int, tokens: int) -> bool:
        amounts, queued = await self.exchange.with_others([component_id])
        return (amounts.get(component_id, 0), queued.get(component_id, 0)) == (amount, tokens)

    async def until_sees(self, component_id: str, amount: int, tokens: int) -> None:
        await until(f"{amount}, {tokens} on {component_id}", lambda: self.sees(component_id, amount, tokens))


@contextlib.asynccontextmanager
async def gateways(redis: RedisServer, *names: str) -> AsyncIterator[list[ToldGateway]]:
    made = [ToldGateway(redis, name, [other for other in names if other != name]) for name in names]
    try:
        yield made
    finally:
        for one in made:
            await one.exchange.aclose()


@pytest.mark.usefixtures("patient")
async def test_each_gateway_sees_the_total_load(redis: RedisServer) -> None:
    async with gateways(redis, "a", "b", "c") as (a, b, c):
        a.load.add("decode-1", 1, 100)
        b.load.add("decode-1", 1, 20)
        b.load.add("prefill-1", 512, 512)
        for one in (a, b, c):
            await one.until_sees("decode-1", 2, 120)
            await one.until_sees("prefill-1", 512, 512)
        assert await c.sees("decode-2", 0, 0)
        a.load.add("decode-1", 0, -100)
        b.load.add("decode-1", -1, -20)
        await c.until_sees("decode-1", 1, 0)
        await b.exchange.aclose()
        assert await c.sees("prefill-1", 0, 0), "a gateway that leaves takes back what it told"


@pytest.mark.usefixtures("patient")
async def test_an_emptied_redis_is_refilled(redis: RedisServer) -> None:
    async with gateways(redis, "a", "b") as (a, b):
        count = MAX_CHANGES_PER_CALL + 2
        for number in range(count):
            a.load.add(f"decode-{number}", 1, number)
        await b.until_sees(f"decode-{count - 1}", 1, count - 1)
        redis.command("FLUSHALL")
        redis.command("RPUSH", keys.load_key("a"), "not ours")
        assert await b.sees("decode-0", 0, 0)
        await b.until_sees("decode-0", 1, 0)
        await b.until_sees(f"decode-{count - 1}", 1, count - 1)
        a.load.add("decode-0", -1)
        await b.until_sees("decode-0", 0, 0)


@pytest.mark.usefixtures("patient")
async def test_without_redis_a_gateway_uses_its_own_load(redis: RedisServer) -> None:
    async with gateways(redis, "a", "b") as (a, b):
        a.load.add("decode-1", 1, 5)
        b.load.add("decode-1", 1, 7)
        await a.until_sees("decode-1", 2, 12)
        redis.kill()
        assert await a.sees("decode-1", 1, 5)
        a.load.add("decode-2", 1, 0)
        redis.start()
        await a.until_sees("decode-1", 2, 12)
        await b.until_sees("decode-2", 1, 0)
        with redis.refusing("full"):
            assert await b.sees("decode-2", 1, 0), "what was told is still read"


@pytest.mark.usefixtures("patient")
async def test_a_mismatched_answer_is_ignored(redis: RedisServer) -> None:
    async with gateways(redis, "a", "b") as (a, b):
        b.load.add("decode-1", 1, 5)
        await a.until_sees("decode-1", 1, 5)
        a.load.add("decode-1", 1, 2)
        # The script splits the second name into two.
        amounts, tokens = await a.exchange.with_others(["decode-1", "decode\n2"])
        assert (amounts["decode-1"], tokens["decode-1"]) == (1, 2)


@pytest.mark.usefixtures("patient")
async def test_the_exchange_survives_a_defect(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tell, calls = SharedLoads.tell, itertools.count()

    async def fail_once(self: SharedLoads, name: str, loads: Mapping[str, UnderWay], *, whole: bool) -> None:
        if not next(calls):
            raise RuntimeError("a defect")
        await tell(self, name, loads, whole=whole)

    monkeypatch.setattr(SharedLoads, "tell", fail_once)
    async with gateways(redis, "a", "b") as (a, b):
        a.load.add("decode-1", 1, 5)
        await b.until_sees("decode-1", 1, 5)


@pytest.mark.usefixtures("patient")
async def test_reported_load_is_withdrawn_after_an_outage(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_loads, "LOAD_TTL_MS", 600_000)
    tell, errors = SharedLoads.tell, [Unavailable("away"), Unavailable("away")]

    async def fail_twice(self: SharedLoads, name: str, loads: Mapping[str, UnderWay], *, whole: bool) -> None:
        if errors:
            raise errors.pop()
        await tell(self, name, loads, whole=whole)

    async with gateways(redis, "a", "b") as (a, b):
        a.load.add("decode-1", 1, 5)
        await b.until_sees("decode-1", 1, 5)
        monkeypatch.setattr(SharedLoads, "tell", fail_twice)
        a.load.add("decode-1", -1, -5)
        await b.until_sees("decode-1", 0, 0)


async def test_a_lone_gateway_makes_no_calls(redis: RedisServer) -> None:
    async with gateways(redis, "a") as (a,):
        a.load.add("decode-1", 1, 5)
        a.load.add("decode-1", -1, -5)
        assert await a.sees("decode-1", 0, 0)
        info = redis.command("INFO", "commandstats")
        assert isinstance(info, dict)
        assert not {"cmdstat_eval", "cmdstat_evalsha"} & info.keys()


@pytest.mark.usefixtures("patient")
async def test_the_load_of_a_lost_gateway_expires(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_loads, "LOAD_TTL_MS", 50)
    lost = SharedLoads(redis.url)
    await lost.tell("b", {"decode-1": UnderWay(1, 9)}, whole=True)
    async with gateways(redis, "a", "b") as (a, _):
        await a.until_sees("decode-1", 0, 0)
    await lost.aclose()


def test_a_finished_answer_adds_no_load() -> None:
    """A chunk's acknowledgement may come after the stream's end."""
    load = OwnLoad()
    answer = AssignedLoad(load)
    answer.assign({"decode-0": (1, 40)})
    assert load.busy() == {"decode-0"}
    answer.end()
    answer.assign({"decode-0": (1, 20)})
    assert load.busy() == set()
