"""The index and the registry against a real Redis: what they know, forget, and survive."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.announcer import AnnounceQueue, Announcer
from kvstore.hashing import chain_hashes, split_hashes
from kvstore.index import Index, IndexWriter, PrefixHit, Registry
from kvstore.records import IndexEvent
from kvstore.redis_link import Breaker, RedisLink
from pillion.errors import ConfigError, Unavailable
from pillion.wire.registry import PartRecord
from tests.support.redis import RedisServer

ROOT = bytes(32)
TTL_MS = 60_000


def chain(*tokens: int) -> list[bytes]:
    return split_hashes(chain_hashes(ROOT, tokens, 1))


def node_record(node_id: str, boot_epoch: int = 1) -> PartRecord:
    return PartRecord(part_id=node_id, role="kvnode", address="unix:x", node_id=node_id, boot_epoch=boot_epoch)


class FakeNode:
    """What a node would say to Redis."""

    def __init__(self, url: str, node_id: str, boot_epoch: int = 1, ttl_ms: int = TTL_MS) -> None:
        self.registry, self.writer = Registry(url, ttl_ms), IndexWriter(url)
        self.record = node_record(node_id, boot_epoch)
        self.entry = b""

    async def beat(self) -> None:
        beat = await self.registry.beat(self.record)
        self.entry = beat.node_number + struct.pack(">I", self.record.boot_epoch)

    async def has(self, *hashes: bytes) -> None:
        await self.writer.announce(self.entry, hashes, [])

    async def lost(self, *hashes: bytes) -> None:
        await self.writer.announce(self.entry, [], hashes)


@pytest.fixture
async def index(redis: RedisServer) -> AsyncIterator[Index]:
    made = Index(redis.url)
    yield made
    await made.aclose()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def fake_nodes(redis: RedisServer, *names: str) -> list[FakeNode]:
    nodes = [FakeNode(redis.url, name, boot_epoch=number + 1) for number, name in enumerate(names)]
    for node in nodes:
        await node.beat()
    return nodes


async def test_longest_prefix_of_every_node(redis: RedisServer, index: Index) -> None:
    a, b, _ = await fake_nodes(redis, "a", "b", "idle")
    blocks = chain(*range(10))
    await a.has(*blocks[:4])
    await b.has(*blocks[:9])
    assert await index.longest_prefix(b"".join(blocks)) == [PrefixHit("b", 9), PrefixHit("a", 4)]
    assert await index.longest_prefix(b"".join(blocks[:3])) == [PrefixHit("a", 3), PrefixHit("b", 3)]
    assert await index.longest_prefix(b"".join(chain(7, 8))) == []
    assert await index.longest_prefix(b"") == []
    await b.lost(*blocks[3:])
    assert await index.longest_prefix(b"".join(blocks)) == [PrefixHit("a", 4), PrefixHit("b", 3)]
    assert index.available


async def test_random_prefixes_match_a_plain_model(redis: RedisServer, index: Index) -> None:
    rng = random.Random(7)
    nodes = await fake_nodes(redis, "a", "b", "c")
    blocks = chain(*range(200))
    for _ in range(30):
        ends = {node.record.node_id: rng.choice([0, 1, rng.randrange(201)]) for node in nodes}
        for node in nodes:
            end = ends[node.record.node_id]
            await node.writer.announce(node.entry, blocks[:end], blocks[end:])
        asked = rng.randrange(1, 201)
        hits = await index.longest_prefix(b"".join(blocks[:asked]))
        assert {hit.node_id: hit.blocks for hit in hits} == {n: min(e, asked) for n, e in ends.items() if e}
        assert [hit.blocks for hit in hits] == sorted((hit.blocks for hit in hits), reverse=True)


async def test_holes_give_a_hint_that_is_not_absurd(redis: RedisServer, index: Index) -> None:
    [a] = await fake_nodes(redis, "a")
    blocks = chain(*range(50))
    await a.has(*blocks)
    await a.lost(blocks[10], blocks[11], blocks[30])
    [hit] = await index.longest_prefix(b"".join(blocks))
    assert 1 <= hit.blocks <= 50
    await a.lost(blocks[0])
    assert await index.longest_prefix(b"".join(blocks)) == []


async def test_entries_of_another_boot_are_void(redis: RedisServer, index: Index) -> None:
    old, other = await fake_nodes(redis, "a", "b")
    blocks = chain(1, 2, 3)
    await old.has(*blocks)
    await other.has(*blocks[:1])
    new = FakeNode(redis.url, "a", boot_epoch=99)
    await new.beat()
    assert await index.longest_prefix(b"".join(blocks)) == [PrefixHit("b", 1)]
    await new.has(*blocks[:2])
    assert await index.longest_prefix(b"".join(blocks)) == [PrefixHit("a", 2), PrefixHit("b", 1)]
    assert new.entry[:4] == old.entry[:4], "a node keeps its number"
    # Old entries were swept out of what was touched: 8 bytes for each node that has the block.
    bucket = b"pillion:b:" + blocks[1][:2]
    assert redis.command("HGET", bucket, blocks[1][:16]) == new.entry


async def test_a_silent_nodes_entries_are_void_and_swept(redis: RedisServer, index: Index) -> None:
    dying = FakeNode(redis.url, "a", ttl_ms=100)
    await dying.beat()
    blocks = chain(1, 2)
    await dying.has(*blocks)
    assert await index.longest_prefix(b"".join(blocks))
    await asyncio.sleep(0.15)
    assert await index.longest_prefix(b"".join(blocks)) == []
    await dying.writer.sweep(int.from_bytes(blocks[0][:2], "big") - 3, 8)
    assert redis.command("EXISTS", b"pillion:b:" + blocks[0][:2]) == 0
    assert redis.command("EXISTS", b"pillion:b:" + blocks[1][:2]) == 1


async def test_the_registry_knows_who_lives(redis: RedisServer) -> None:
    registry, short = Registry(redis.url, TTL_MS), Registry(redis.url, 100)
    first = await registry.beat(PartRecord(part_id="d", role="decode", address="x", model="m", waiting_tokens=5))
    assert not first.known
    assert first.node_number == b""
    again = await registry.beat(PartRecord(part_id="d", role="decode", address="x", model="m", waiting_tokens=6))
    assert again.known
    assert again.generation == first.generation
    await short.beat(PartRecord(part_id="p", role="prefill", address="y"))
    parts = await registry.parts()
    assert [(part.part_id, part.waiting_tokens) for part in parts] == [("d", 6), ("p", 0)]
    assert all(0 <= part.heartbeat_age_ms < 10_000 for part in parts)
    await asyncio.sleep(0.15)
    assert [part.part_id for part in await registry.parts()] == ["d"]
    assert not (await short.beat(PartRecord(part_id="p", role="prefill", address="y"))).known, "it was lost meanwhile"
    await registry.leave("d")
    await registry.leave("d")
    redis.command("HSET", "pillion:parts", "p", b"123 not json")
    assert await registry.parts() == []


async def test_a_dead_redis_costs_little_and_comes_back(redis: RedisServer, index: Index) -> None:
    [node] = await fake_nodes(redis, "a")
    asked = b"".join(chain(1, 2))
    await node.has(*chain(1, 2))
    redis.kill()
    for _ in range(50):
        assert await index.longest_prefix(asked) == []
    assert not index.available
    with pytest.raises(Unavailable):
        await node.registry.parts()
    redis.start()
    await until(lambda: found(index, asked, blocks=0, available=True))


async def test_a_hanging_redis_is_not_waited_for(short_folder: str) -> None:
    """It accepts and says nothing: the deadline counts, and then the breaker."""
    server = await asyncio.start_unix_server(lambda reader, writer: None, f"{short_folder}/deaf.sock")
    index = Index(f"unix://{short_folder}/deaf.sock")
    async with asyncio.timeout(5):
        for _ in range(200):
            assert await index.longest_prefix(bytes(32)) == []
    assert not index.available
    await index.aclose()
    server.close()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "rediss://:secret@127.0.0.1:1", "unix:///nowhere.sock"])
async def test_redis_may_be_nowhere(url: str) -> None:
    index = Index(url)
    assert await index.longest_prefix(bytes(32)) == []
    assert not index.available
    await index.aclose()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancel_is_heard_even_where_the_library_loses_it(redis: RedisServer, fails: bool) -> None:
    link = RedisLink(redis.url, "parts")

    async def deaf(**_: object) -> list[bytes]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        if fails:
            raise ConnectionResetError
        return []

    link._scripts["parts"] = deaf  # type: ignore[assignment]
    call = asyncio.create_task(link.call("parts", deadline_ms=30_000))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    # A deadline is no cancel of the caller's.
    with contextlib.suppress(Unavailable):
        await link.call("parts", deadline_ms=20)
    await link.aclose()


@pytest.mark.parametrize("url", ["nonsense", "http://x", "redis://user:secret@host:notaport"])
def test_urls_are_judged_at_start(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Index(url)
    assert "secret" not in caught.value.message


def test_the_breaker() -> None:
    breaker = Breaker(open_s=1.0)
    assert breaker.may_try(0.0)
    breaker.failed(0.0)
    assert [breaker.may_try(now) for now in (0.5, 1.0, 1.1, 2.0)] == [False, True, False, True]
    breaker.succeeded()
    assert breaker.may_try(2.0)
    assert breaker.may_try(2.0)


# -- the announcer


async def found(index: Index, asked: bytes, blocks: int, *, available: bool | None = None) -> bool:
    hits = await index.longest_prefix(asked)
    good = hits == ([PrefixHit("a", blocks)] if blocks else [])
    return good and (available is None or index.available is available)


@contextlib.asynccontextmanager
async def announcing(url: str, have: list[bytes]) -> AsyncIterator[Announcer]:
    announcer = Announcer(
        url, heartbeat_s=0.05, ttl_ms=5000, record=lambda boot: node_record("a", boot), hashes=lambda: list(have)
    )
    task = asyncio.create_task(announcer.run())
    try:
        yield announcer
        assert not task.done(), "it survives everything"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await announcer.leave()


async def test_news_travel_at_once_and_a_goodbye_takes_all(redis: RedisServer, index: Index) -> None:
    blocks = chain(*range(1500))
    asked = b"".join(blocks)
    have: list[bytes] = []
    async with announcing(redis.url, have) as announcer:
        await until(lambda: found(index, asked, 0))
        have += blocks
        announcer.push([IndexEvent(block, here=True) for block in blocks])
        await until(lambda: found(index, asked, 1500))
        del have[700:]
        announcer.push([IndexEvent(block, here=False) for block in reversed(blocks[700:])])
        await until(lambda: found(index, asked, 700))
    assert await index.longest_prefix(asked) == []
    assert await Registry(redis.url, 1).parts() == []


async def test_an_emptied_redis_is_told_again(redis: RedisServer, index: Index) -> None:
    blocks = chain(1, 2, 3)
    async with announcing(redis.url, blocks):
        await until(lambda: found(index, b"".join(blocks), 3))
        redis.command("FLUSHALL")
        await until(lambda: found(index, b"".join(blocks), 3))


async def test_a_restarted_redis_is_told_again(redis: RedisServer, index: Index) -> None:
    blocks = chain(1, 2, 3)
    async with announcing(redis.url, blocks) as announcer:
        await until(lambda: found(index, b"".join(blocks), 3))
        redis.kill()
        blocks += chain(1, 2, 3, 4)[3:]
        announcer.push([IndexEvent(blocks[3], here=True)])
        await asyncio.sleep(0.1)
        redis.start()
        await until(lambda: found(index, b"".join(blocks), 4, available=True))


@pytest.mark.parametrize("sign", [("DEL", "pillion:generation"), ("ZREM", "pillion:expiry", "a")], ids=lambda s: s[1])
async def test_each_sign_of_loss_is_enough(redis: RedisServer, index: Index, sign: tuple[str, ...]) -> None:
    """Redis was emptied and others have filled it since, or the node's entries were swept while it seemed dead."""
    blocks = chain(1, 2, 3)
    async with announcing(redis.url, blocks):
        await until(lambda: found(index, b"".join(blocks), 3))
        redis.command("DEL", b"pillion:b:" + blocks[2][:2])
        assert await found(index, b"".join(blocks), 2)
        redis.command(*sign)
        await until(lambda: found(index, b"".join(blocks), 3))


async def test_a_node_that_was_cut_off_takes_back_what_went_meanwhile(redis: RedisServer, index: Index) -> None:
    """Redis lived on and swept nothing yet: entries of the same boot would be believed again."""
    blocks = chain(1, 2, 3)
    async with announcing(redis.url, blocks) as announcer:
        await until(lambda: found(index, b"".join(blocks), 3))
        redis.command("ZREM", "pillion:expiry", "a")
        announcer._queue.push([IndexEvent(blocks.pop(), here=False)])
        await until(lambda: found(index, b"".join(chain(1, 2, 3)), 2))


async def test_too_much_news_takes_a_new_boot_epoch(redis: RedisServer, index: Index) -> None:
    """Withdrawals were forgotten, so what Redis still knows must become void."""
    blocks = chain(1, 2, 3)
    async with announcing(redis.url, blocks) as announcer:
        await until(lambda: found(index, b"".join(blocks), 3))
        before = announcer.boot_epoch
        announcer._queue._bound_blocks = 1
        gone = [IndexEvent(block, here=False) for block in (blocks.pop(), blocks.pop())]
        announcer.push(gone)
        await until(lambda: found(index, b"".join(chain(1, 2, 3)), 1))
        assert announcer.boot_epoch != before


events = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30)


@settings(deadline=None)
@given(st.lists(st.tuples(events, st.integers(0, 4), st.booleans()), max_size=6))
def test_the_queue_says_the_last_word_on_every_block(rounds: list[tuple[list[tuple[int, bool]], int, bool]]) -> None:
    queue = AnnounceQueue()
    truth: dict[bytes, bool] = {}
    told: dict[bytes, bool] = {}
    for news, count, fails in rounds:
        queue.push(IndexEvent(bytes([block]), here) for block, here in news)
        truth |= {bytes([block]): here for block, here in news}
        came, went = queue.take(count)
        assert len(came) + len(went) <= count
        if fails:
            queue.put_back(came, went)
        else:
            told |= dict.fromkeys(came, True) | dict.fromkeys(went, False)
    came, went = queue.take(100)
    assert told | dict.fromkeys(came, True) | dict.fromkeys(went, False) == truth
    assert len(queue) == 0
    assert not queue.overflowed


def test_the_queue_is_bounded() -> None:
    queue = AnnounceQueue(max_blocks=3)
    queue.push(IndexEvent(bytes([block]), here=True) for block in range(4))
    queue.push([IndexEvent(b"x", here=True)])
    assert (queue.overflowed, len(queue)) == (True, 0)
    queue.say_all([bytes([block]) for block in range(10)])
    assert (queue.overflowed, len(queue)) == (False, 10)
    queue.push([IndexEvent(b"x", here=True)])
    assert len(queue) == 11, "a big pool must fit"
