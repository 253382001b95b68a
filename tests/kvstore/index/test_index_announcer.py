"""The announcer against a real Redis, and its queue against a plain model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.redis import RedisServer
from pillion.kvstore.hashing import SEGMENT_BLOCKS
from pillion.kvstore.index import announcer as announcer_module
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.announcer import BATCH_BLOCKS, AnnounceQueue, Announcer
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.ledger.records import IndexEvent
from pillion.wire.registry import ComponentRecord
from tests.support.redis_nodes import TTL_MS, Chain, found, node_record, until_found

pytestmark = pytest.mark.usefixtures("patient")


@contextlib.asynccontextmanager
async def announcing(
    url: str,
    have: list[tuple[bytes, bytes]],
    *,
    heartbeat_s: float = 0.05,
    record: Callable[[int], ComponentRecord] = lambda boot: node_record("a", boot),
) -> AsyncIterator[Announcer]:
    announcer = Announcer(url, heartbeat_s=heartbeat_s, ttl_ms=TTL_MS, record=record, hashes=lambda: list(have))
    task = asyncio.create_task(announcer.run())
    try:
        yield announcer
        assert not task.done(), "it survives everything"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await announcer.leave()


async def test_events_are_announced_at_once_and_leaving_removes_all(redis: RedisServer, index: Index) -> None:
    chain = Chain(range(1500))
    have: list[tuple[bytes, bytes]] = []
    async with announcing(redis.url, have) as announcer:
        await until_found(index, chain.packed, 0)
        have += chain.pairs()
        announcer.push(chain.events())
        await until_found(index, chain.packed, 1500)
        del have[700:]
        announcer.push(chain.events(700, here=False)[::-1])
        await until_found(index, chain.packed, 700)
    await until_found(index, chain.packed, 0)
    registry = Registry(redis.url, 1)
    assert await registry.components() == []
    await registry.aclose()


async def test_awaited_blocks_are_announced_before_the_next_heartbeat(redis: RedisServer) -> None:
    """Gateways learn from the node's record who is fenced."""
    fenced: list[str] = []

    def record(boot: int) -> ComponentRecord:
        return msgspec.structs.replace(node_record("a", boot), fenced_components=tuple(fenced))

    registry = Registry(redis.url, TTL_MS)

    async def named() -> list[tuple[str, ...]]:
        return [one.fenced_components for one in await registry.components()]

    async with announcing(redis.url, [], heartbeat_s=3600, record=record) as announcer:
        await until("the first heartbeat", named)
        for name in ("decode-0", "decode-1"):
            fenced.append(name)
            announcer.beat_now()
            await until("the record", lambda: _is(named, [tuple(fenced)]))
    await registry.aclose()


async def test_an_announcer_stops_while_events_arrive(redis: RedisServer) -> None:
    async with asyncio.timeout(WITHIN_S), announcing(redis.url, [], heartbeat_s=3600) as announcer:
        await until("the announcer to wait for news", lambda: announcer._changed._waiters)  # type: ignore[attr-defined]
        announcer.beat_now()


async def _is(asked: Callable[[], Awaitable[object]], wanted: object) -> bool:
    return await asked() == wanted


async def test_all_blocks_are_announced_again_after_a_redis_flush(redis: RedisServer, index: Index) -> None:
    chain = Chain(range(2 * BATCH_BLOCKS + 5))
    async with announcing(redis.url, chain.pairs()):
        await until_found(index, chain.packed, len(chain))
        redis.command("FLUSHALL")
        await until_found(index, chain.packed, len(chain))


async def until_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Wait until the announcer has met a Redis that accepts nothing."""
    await until("the announcer to notice", lambda: "continuing without Redis" in caplog.text)


async def test_all_blocks_are_announced_again_after_a_redis_restart(
    redis: RedisServer, index: Index, caplog: pytest.LogCaptureFixture
) -> None:
    chain = Chain(range(4))
    have = chain.pairs(0, 3)
    async with announcing(redis.url, have) as announcer:
        await until_found(index, chain.packed, 3)
        redis.kill()
        have += chain.pairs(3)
        announcer.push(chain.events(3))
        await until_noticed(caplog)
        redis.start()
        await until_found(index, chain.packed, 4, available=True)


@pytest.mark.parametrize("sign", [("DEL", keys.generation(b"")), ("ZREM", keys.EXPIRY, "a")], ids=["group", "part"])
async def test_each_sign_of_loss_triggers_a_full_announcement(
    redis: RedisServer, index: Index, sign: tuple[str | bytes, ...]
) -> None:
    """Redis was emptied and filled by others, or the node's entries were swept while it seemed dead."""
    chain = Chain([1, 2, 3])
    async with announcing(redis.url, chain.pairs()):
        await until_found(index, chain.packed, 3)
        redis.command("HDEL", chain.bucket(2), chain.field(2))
        await until_found(index, chain.packed, 2)
        redis.command(*sign)
        await until_found(index, chain.packed, 3)


async def test_silently_lost_entries_are_announced_again(
    redis: RedisServer, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer_module, "REPEAT_S", 0.2)
    chain = Chain([1, 2, 3])
    async with announcing(redis.url, chain.pairs()):
        await until_found(index, chain.packed, 3)
        redis.command("DEL", chain.bucket(0))
        await until_found(index, chain.packed, 3)


async def test_an_interrupted_full_announcement_resumes(
    redis: RedisServer, index: Index, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Slowly, news first, and without starting over after a short outage of Redis."""
    # Nothing but news makes it go on before the test lets it.
    monkeypatch.setattr(announcer_module, "REPEAT_BLOCKS_PER_S", BATCH_BLOCKS / 3600)
    monkeypatch.setattr(announcer_module, "RETRY_S", 0.05)
    chain, updates = Chain(range(8 * BATCH_BLOCKS)), Chain([7, 7])
    asked = 0

    def all_there_is() -> list[tuple[bytes, bytes]]:
        nonlocal asked
        asked += 1
        return chain.pairs()

    announcer = Announcer(
        redis.url, heartbeat_s=3600, ttl_ms=7_200_000, record=lambda boot: node_record("a", boot), hashes=all_there_is
    )
    task = asyncio.create_task(announcer.run())

    async def begun() -> bool:
        return bool(await index.longest_prefix(chain.packed))

    await until("the first blocks", begun)
    announcer.push(updates.events())
    await until_found(index, updates.packed, 2)
    assert announcer.repeating, "news do not wait until all is said"
    monkeypatch.setattr(announcer_module, "REPEAT_BLOCKS_PER_S", 10**6)
    redis.command("REPLICAOF", "127.0.0.1", "1")
    announcer.push(Chain([8]).events())
    await until_noticed(caplog)
    redis.command("REPLICAOF", "NO", "ONE")

    async def all_said() -> bool:
        return await found(index, chain.packed, len(chain)) and not announcer.repeating

    await until("all blocks", all_said)
    assert asked == 1
    fields = [redis.command("HLEN", bucket) for bucket in keys.chain_buckets(chain.packed)]
    assert fields == [SEGMENT_BLOCKS] * len(fields), "nothing is left out"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await announcer.leave()


async def test_a_reconnected_node_removes_blocks_evicted_meanwhile(
    redis: RedisServer, index: Index, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis lived on and swept nothing yet: entries of the same boot would be valid again."""
    chain = Chain([1, 2, 3])
    have = chain.pairs()
    async with announcing(redis.url, have) as announcer:
        await until_found(index, chain.packed, 3)
        # Without memory it accepts no heartbeat, and the node announces nothing before one.
        redis.command("CONFIG", "SET", "maxmemory", "1")
        await until_noticed(caplog)
        have.pop()
        announcer.push(chain.events(2, here=False))
        redis.command("ZREM", keys.EXPIRY, "a")
        redis.command("CONFIG", "SET", "maxmemory", "0")
        await until_found(index, chain.packed, 2)


async def test_an_event_overflow_starts_a_new_boot_epoch(
    redis: RedisServer, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Withdrawals were dropped, so what Redis still has must become invalid."""
    monkeypatch.setattr(announcer_module, "AnnounceQueue", lambda: AnnounceQueue(max_blocks=1))
    chain = Chain([1, 2, 3])
    have = chain.pairs()
    async with announcing(redis.url, have) as announcer:
        await until_found(index, chain.packed, 3)
        before = announcer.boot_epoch
        del have[1:]
        announcer.push(chain.events(1, here=False))
        await until_found(index, chain.packed, 1)
        assert announcer.boot_epoch != before


events = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30)
rounds = st.lists(
    st.tuples(events, st.integers(1, 4), st.sampled_from(["told", "fails", "overflows"]), st.booleans()), max_size=8
)


@settings(deadline=None)
@given(rounds)
def test_the_queue_keeps_the_last_event_of_each_block(
    script: list[tuple[list[tuple[int, bool]], int, str, bool]],
) -> None:
    """Whatever fails in between, and whenever everything is announced again, Redis is right in the end."""
    queue = AnnounceQueue()
    truth: dict[bytes, bool] = {}
    announced: dict[bytes, bool] = {}

    def say(taken: list[IndexEvent], fails: bool) -> None:
        if fails:
            queue.put_back(taken)
        else:
            announced.update({event.block_hash: event.here for event in taken})

    for updates, count, how, all_again in script:
        if all_again:
            queue.repeat_all([(block, b"s") for block, here in truth.items() if here])
            if how == "overflows":
                announced.clear()
        queue.push(IndexEvent(bytes([block]), here, b"s") for block, here in updates)
        truth |= {bytes([block]): here for block, here in updates}
        for take in (queue.take, queue.take_repeated):
            taken = take(count)
            assert len(taken) <= count
            say(taken, how == "fails")
    while len(queue) or queue.repeating:
        say(queue.take(3), False)
        say(queue.take_repeated(2), False)
    assert {block for block, here in announced.items() if here} == {block for block, here in truth.items() if here}
    assert not queue.overflowed


def test_the_queue_is_limited() -> None:
    queue = AnnounceQueue(max_blocks=3)
    queue.push(IndexEvent(bytes([block]), here=True) for block in range(4))
    queue.push([IndexEvent(b"x", here=True)])
    assert (queue.overflowed, len(queue)) == (True, 0)
    queue.repeat_all([(bytes([block]), b"") for block in range(10)])
    assert (queue.overflowed, len(queue)) == (False, 0)
    assert len(queue.take_repeated(8)) == 8
    for block in range(3):
        queue.push([IndexEvent(bytes([block]), here=False)])
        queue.take(1)
    assert queue.repeating
    queue.push([IndexEvent(b"y", here=False)])
    assert queue.overflowed, "what went while all is said is remembered, and that is bounded too"
    assert (queue.repeating, queue.take_repeated(1)) == (False, [])


def test_events_for_an_unresponsive_shard_are_queued_separately() -> None:
    queue = AnnounceQueue(4)
    first, second, third = (IndexEvent(bytes([block]), here=True) for block in range(3))
    queue.push([first, second])
    taken = queue.take(2)
    queue.set_aside(taken[:1])
    assert not len(queue), "the others' news is not after it"
    queue.push([IndexEvent(first.block_hash, here=False)])
    queue.try_again(9)
    assert [event.here for event in queue.take(9)] == [False], "newer news stands"
    queue.set_aside([first, second, third])
    queue.try_again(1)
    assert len(queue.take(9)) == 1
    queue.push([IndexEvent(bytes([block]), here=True) for block in range(10, 13)])
    assert queue.overflowed, "what waits apart counts too"
