"""Quotas across gateways: Redis counts as the class does, once for all gateways; locally without Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab.testbed.conditions import loop_turns, until
from lab.testbed.redis import RedisServer, running_redis
from pillion.errors import Overloaded, Unavailable
from pillion.gateway.admission.quotas import CountedCall, Quotas
from pillion.gateway.admission.tenants import OPEN, Bucket, Tenant
from pillion.kvstore.index import redis_url, shared_buckets
from pillion.kvstore.index.redis_keys import buckets_key
from pillion.kvstore.index.shared_buckets import BucketDemand, SharedBuckets, Shortage
from tests.support.examples import examples
from tests.support.standing_quotas import standing_quotas

LUA = pathlib.Path(__file__).resolve().parents[3] / "kvstore" / "index" / "lua"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture(autouse=True)
def forgotten(server: RedisServer) -> None:
    server.command("FLUSHALL")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the deadline: without an answer of Redis a gateway counts locally, and a busy machine delays Redis."""
    monkeypatch.setattr(redis_url, "CONNECT_TIMEOUT_MS", 30_000)
    monkeypatch.setattr(shared_buckets, "TAKE_DEADLINE_MS", 30_000)


@pytest.fixture
def standing() -> Iterator[None]:
    with standing_quotas():
        yield


def now() -> float:
    return time.monotonic()


steps = st.tuples(
    st.floats(0, 90).map(lambda pause: round(pause, 3)),
    st.sampled_from([1, 3, 60, 1000]),
    st.one_of(st.none(), st.integers(0, 1500)),
    st.integers(-200, 400),
)


@settings(max_examples=examples(60))
@example(draws=[(0.0, 1, None, 5), (0.0, 1000, None, 1), (0.3, 1, 0, 1)])
@given(st.lists(steps, max_size=25))
def test_the_redis_script_matches_the_bucket_class(
    server: RedisServer, draws: list[tuple[float, int, int | None, int]]
) -> None:
    """The script and the class agree to the millisecond, for any sequence of demands, refunds and rates."""
    clock = "local function now_ms() return tonumber(ARGV[4]) end\n"
    script = (LUA / "common.lua").read_text() + clock + (LUA / "take_tokens.lua").read_text().replace("#ARGV / 3", "1")
    bucket: Bucket | None = None
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.delete("bucket")
        at_s = 1000.0
        for pause_s, size, wanted, reported in draws:
            at_s += pause_s
            answer = client.eval(
                script, 1, "bucket", size, reported, -1 if wanted is None else wanted, f"{at_s * 1000:.0f}"
            )
            bucket = Bucket(size, at_s) if bucket is None else bucket
            bucket = bucket if bucket.per_minute == size else bucket.resized(size, at_s)
            bucket.take(reported, at_s)
            wait_s = 0.0 if wanted is None else bucket.wait_s(wanted, at_s)
            if wanted is not None and not wait_s:
                bucket.take(wanted, at_s)
            assert answer[0] == (1 if wait_s else 0)
            assert answer[1] == pytest.approx(wait_s * 1000, abs=1.01)


async def test_buckets_are_checked_in_order_and_expire(server: RedisServer) -> None:
    buckets = SharedBuckets(server.url)
    try:
        assert await buckets.take("a", [BucketDemand(2, 0, 1), BucketDemand(100, 0, 90)]) is None
        # The second bucket is short, so nothing is taken from the first.
        short = await buckets.take("a", [BucketDemand(2, 0, 1), BucketDemand(100, 0, 40)])
        assert short is not None
        assert short.index == 1
        assert 9_000 < short.wait_ms <= 18_000
        assert await buckets.take("a", [BucketDemand(2, 0, 1), BucketDemand(100, 0, 1)]) is None
        assert (await buckets.take("a", [BucketDemand(2, 0, 1), BucketDemand(100, 0, 1)])).index == 0
        assert await buckets.take("b", [BucketDemand(2, 0, 1), BucketDemand(0, 0, 10**9)]) is None
        assert await buckets.take("b", [BucketDemand(2, 5, None), BucketDemand(0)]) is None
        assert (await buckets.take("b", [BucketDemand(2, 0, 1), BucketDemand(0)])) == Shortage(
            0, pytest.approx(150_000, abs=20_000)
        )
        left_ms = server.command("PTTL", buckets_key("a"))
        assert 31_000 < left_ms <= 61_000
        assert await buckets.take("c", [BucketDemand(3, 0, 1)]) is None
        assert 1000 < server.command("PTTL", buckets_key("c")) <= 21_001
        # Foreign values and partial buckets are ignored.
        server.command("SET", buckets_key("d"), "x")
        assert await buckets.take("d", [BucketDemand(1, 0, 1)]) is None
        server.command("HSET", buckets_key("d"), "1", "no bucket")
        assert await buckets.take("d", [BucketDemand(1, 0, 1)]) is None
    finally:
        await buckets.aclose()


@pytest.mark.usefixtures("standing")
async def test_requests_and_tokens_are_counted_over_all_gateways(server: RedisServer) -> None:
    one, two = (Quotas(SharedBuckets(server.url)) for _ in range(2))
    tenant = Tenant(name="acme", requests_per_minute=3, tokens_per_minute=100)
    try:
        for quotas in (one, two):
            quotas.take_request(tenant, now())
            await quotas.confirm(tenant, 40, now())
        one.take_request(tenant, now())
        with pytest.raises(Overloaded) as caught:
            await one.confirm(tenant, 50, now())
        assert [quota.subject for quota in caught.value.quotas] == ["acme/tokens_per_minute"]
        assert 6_000 < caught.value.retry_after_ms <= 18_000
        # The refusal cost nothing, so a third request passes; a fourth passes locally and is refused by the shared
        # count.
        two.take_request(tenant, now())
        await two.confirm(tenant, 0, now())
        one.take_request(tenant, now())
        one.take_request(tenant, now())
        with pytest.raises(Overloaded) as caught:
            await one.confirm(tenant, 1, now(), 2)
        assert [quota.subject for quota in caught.value.quotas] == ["acme/requests_per_minute"]
        one.take_request(tenant, now(), 2)
        with pytest.raises(Overloaded):
            one.take_request(tenant, now())
        await one.confirm(Tenant(name="acme", tokens_per_minute=100), 20, now())
    finally:
        await one.aclose()
        await two.aclose()


@pytest.mark.usefixtures("standing")
async def test_a_refused_call_is_refunded_in_the_shared_count(server: RedisServer) -> None:
    one, two = (Quotas(SharedBuckets(server.url)) for _ in range(2))
    tenant = Tenant(name="acme", requests_per_minute=6, tokens_per_minute=1000)
    try:
        # A call refused before the shared count saw it refunds nothing there.
        early = CountedCall(one, tenant)
        early.take(5, now())
        early.end(now(), Overloaded("full"))
        late, broken = CountedCall(one, tenant), CountedCall(two, tenant)
        late.take(4, now())
        await late.confirm(900, now())
        broken.take(2, now())
        with pytest.raises(Overloaded):
            await CountedCall(two, tenant, requests=1).confirm(101, now())
        await broken.confirm(90, now())
        with pytest.raises(Overloaded):
            await CountedCall(two, tenant, requests=1).confirm(None, now())
        # Prompts that never began are refunded; the refused call costs nothing.
        broken.begun_tokens = 50
        broken.end(now(), Unavailable("lost"))
        late.end(now(), Overloaded("full"))
        late.end(now(), Overloaded("full"))
        await one.aclose()
        buckets = SharedBuckets(server.url)
        await two.aclose()
        for requests, tokens in ((5, 0), (0, 970)):
            assert await buckets.take("acme", [BucketDemand(6, 0, requests), BucketDemand(1000, 0, tokens)]) is not None
        assert await buckets.take("acme", [BucketDemand(6, 0, 4), BucketDemand(1000, 0, 940)]) is None
        await buckets.aclose()
    finally:
        await one.aclose()
        await two.aclose()


@pytest.mark.usefixtures("standing")
async def test_answer_tokens_count_at_other_gateways(server: RedisServer) -> None:
    one, two = (Quotas(SharedBuckets(server.url)) for _ in range(2))
    tenant = Tenant(name="acme", tokens_per_minute=100)
    try:
        await one.confirm(tenant, 10, now())
        one.spend(tenant, 80, now())
        one.spend(tenant, 60, now())

        async def refused() -> bool:
            try:
                await two.confirm(tenant, 1, now())
            except Overloaded as error:
                return error.retry_after_ms > 20_000
            return False

        await until("the reports of both answers to be counted", refused)
        one.spend(tenant, -150, now())

        async def served() -> bool:
            with contextlib.suppress(Overloaded):
                await two.confirm(tenant, 50, now())
                return True
            return False

        await until("the prompt that came back to be counted", served)
    finally:
        await one.aclose()
        await two.aclose()


@pytest.mark.usefixtures("standing")
@pytest.mark.parametrize("under_way", [False, True])
async def test_the_last_answers_are_counted_on_shutdown(
    server: RedisServer, under_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas, tenant = Quotas(SharedBuckets(server.url)), Tenant(name="acme", tokens_per_minute=10)
    begun, go_on, take = asyncio.Event(), asyncio.Event(), SharedBuckets.take

    async def slow(*demands: Any) -> Shortage | None:
        begun.set()
        await go_on.wait()
        return await take(*demands)

    monkeypatch.setattr(SharedBuckets, "take", slow)
    quotas.spend(tenant, 30, now())
    if under_way:
        await begun.wait()
    closing = asyncio.create_task(quotas.aclose())
    await loop_turns()
    go_on.set()
    await closing
    buckets = SharedBuckets(server.url)
    assert (await buckets.take("acme", [BucketDemand(0), BucketDemand(10, 0, 1)])).index == 1
    await buckets.aclose()


async def test_a_tenant_without_quota_costs_no_redis_call(server: RedisServer) -> None:
    quotas = Quotas(SharedBuckets(server.url))
    quotas.take_request(OPEN, now())
    await quotas.confirm(OPEN, 10**9, now())
    await quotas.confirm(OPEN, None, now())
    quotas.spend(OPEN, 10**9, now())
    await quotas.aclose()
    assert server.command("KEYS", "*") == []


async def test_without_redis_the_local_count_decides(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = Tenant(name="acme", requests_per_minute=4, tokens_per_minute=100)
    with running_redis() as redis_server:
        quotas, other = (Quotas(SharedBuckets(redis_server.url)) for _ in range(2))
        await other.confirm(tenant, 60, now())
        await quotas.confirm(tenant, 10, now())
        monkeypatch.setattr(shared_buckets, "TAKE_DEADLINE_MS", 100)
        with redis_server.stopped(), caplog.at_level(logging.WARNING, "pillion.gateway"):
            for _ in range(2):
                quotas.take_request(tenant, now())
                await quotas.confirm(tenant, 40, now())
            assert caplog.text.count("counted by this gateway alone") == 1
            with pytest.raises(Overloaded, match="tokens_per_minute"):
                await quotas.confirm(tenant, 40, now())
            quotas.spend(tenant, 5, now())

        async def together() -> bool:
            buckets = SharedBuckets(redis_server.url)
            try:
                return (await buckets.take("acme", [BucketDemand(4, 0, 0), BucketDemand(100, 0, 100)])) is not None
            except Unavailable:
                return False
            finally:
                await buckets.aclose()

        await until("the quota of both gateways to be used up in Redis", together)
        free = Tenant(name="acme", tokens_per_minute=1000)

        async def asked_again() -> bool:
            await quotas.confirm(free, 1, now())
            return quotas.redis_answers

        await until("a call that the breaker lets through", asked_again)
        redis_server.kill()
        await quotas.confirm(free, 1, now())
        assert not quotas.redis_answers
        await quotas.aclose()
        await other.aclose()


async def test_a_gateway_without_redis_counts_locally() -> None:
    quotas, tenant = Quotas(), Tenant(name="acme", requests_per_minute=1, tokens_per_minute=10)
    quotas.take_request(tenant, 0.0)
    await quotas.confirm(tenant, 10, 0.0)
    await quotas.confirm(tenant, None, 0.0)
    quotas.spend(tenant, 5, 0.0)
    with pytest.raises(Overloaded):
        quotas.take_request(tenant, 0.0)
    quotas.retain(())
    quotas.take_request(tenant, 0.0)
    await quotas.aclose()
