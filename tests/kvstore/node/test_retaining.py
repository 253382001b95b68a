"""A node's retentions over its own restart and over an emptied Redis, on a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from pillion.errors import Conflict, InvalidRequest, NotFound, Unavailable
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.index.retention_records import RetentionRecords
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import SESSION
from pillion.kvstore.node import retaining
from pillion.kvstore.node.retaining import Retaining
from pillion.net.rpc import RunningServer
from pillion.v1 import kvnode_pb2 as pb
from pillion.v1.kvnode_pb2 import CommitRun
from testbed.conditions import until
from testbed.redis import RedisServer
from tests.support.node_lives import Lives, ended

CHAIN = chain_hashes(bytes(32), (1, 2, 3), 1)


@pytest.fixture(autouse=True)
def _looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retaining, "LOOK_S", 0.02)


class RetainingLife:
    """One life of a node's ledger, with a caller."""

    def __init__(self, num_slots: int = 16) -> None:
        self.ledger = Ledger(itertools.count(1).__next__, retained_percents=(50, 25))
        if num_slots:
            self.ledger.shape(num_slots)
        self.epoch = self.ledger.attach("gateway", SESSION)

    def compute(self) -> None:
        """Computes the chain, where it is not here."""
        hashes = split_hashes(CHAIN)
        ticket = self.ledger.admit(self.epoch, 1, hashes, 3)
        assert ticket is not None
        slots = self.ledger.adopt(self.epoch, ticket.ticket_id, 3).leased_slots
        self.ledger.commit(self.epoch, [CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=CHAIN)])
        self.ledger.release(self.epoch, [ticket.ticket_id])

    @contextlib.asynccontextmanager
    async def running(self, redis: RedisServer, node_id: str) -> AsyncIterator[Retaining]:
        retained = Retaining(self.ledger, RetentionRecords(redis.url, node_id))
        task = asyncio.create_task(retained.run())
        try:
            yield retained
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await retained.aclose()

    def asked(self, **fields: int | str) -> pb.RetainChainRequest:
        request = pb.RetainChainRequest(epoch=self.epoch, owner="a", name="x", block_hashes=CHAIN, ttl_s=600, tokens=50)
        request.MergeFrom(pb.RetainChainRequest(**fields))
        return request

    def drop(self, retained: Retaining, name: str) -> bool:
        return retained.drop(pb.DropRetentionRequest(epoch=self.epoch, owner="a", name=name))

    def listed(self, retained: Retaining, owner: str = "a") -> list[pb.Retention]:
        return list(retained.listed(pb.ListRetentionsRequest(epoch=self.epoch, owner=owner)).retentions)


async def written(redis: RedisServer, node_id: str, names: set[str]) -> None:
    records = RetentionRecords(redis.url, node_id)

    async def there() -> bool:
        return {record.name for record in await records.read()} == names

    await until(f"the record to name {names}", there)
    await records.aclose()


async def test_a_node_that_starts_again_retains_what_its_last_life_did(redis: RedisServer) -> None:
    first, second = RetainingLife(), RetainingLife()
    first.compute()
    async with first.running(redis, "node") as retained:
        assert retained.retain(first.asked(model="m")).present_blocks == 3
        await written(redis, "node", {"x"})
    async with second.running(redis, "node") as retained:
        await until("the record to be read", lambda: second.listed(retained))
        (found,) = second.listed(retained)
        assert (found.name, found.model, found.tokens, found.blocks, found.present_blocks) == ("x", "m", 50, 3, 0)
        assert 0 < found.left_s <= 600
        # The pool was lost. What is computed anew is retained at once.
        second.compute()
        assert second.listed(retained)[0].present_blocks == 3
        assert second.listed(retained, "b") == []
        check_integrity(second.ledger)
        assert second.drop(retained, "x")
        assert not second.drop(retained, "x")
        await written(redis, "node", set())


async def test_what_is_dropped_before_the_record_is_read_does_not_come_back(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retaining, "MAX_UNREAD_DROPS", 1)
    first, second = RetainingLife(), RetainingLife(32)
    async with first.running(redis, "unread") as retained:
        for name in "xy":
            retained.retain(first.asked(name=name, block_hashes=CHAIN[:32]))
        await written(redis, "unread", {"x", "y"})
    async with second.running(redis, "unread") as retained:
        # Nothing of it has run yet.
        assert second.drop(retained, "x")
        assert second.drop(retained, "x")
        with pytest.raises(Unavailable, match="remembers 1"):
            second.drop(retained, "y")
        retained.retain(second.asked(name="y"))
        await written(redis, "unread", {"y"})
        (found,) = second.listed(retained)
        assert (found.name, found.blocks) == ("y", 3), "the newer one of a name stays"
        assert not second.drop(retained, "x")


async def test_a_drop_while_the_node_ends_is_written(
    short_folder: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(short_folder, "", redis_url=redis.url)
    async with ended(lives):
        node = await lives.begin()
        await lives.worker()
        life = RetainingLife()
        life.epoch = node.pool.open_session("gateway")
        node.pool.retaining.retain(life.asked(block_hashes=CHAIN[:32]))
        await written(redis, lives.flags.node_id, {"x"})
        stop = RunningServer.stop

        async def dropping(server: RunningServer, grace_s: float) -> None:
            await stop(server, grace_s)
            assert life.drop(node.pool.retaining, "x")

        monkeypatch.setattr(RunningServer, "stop", dropping)
        await lives.end()
        await written(redis, lives.flags.node_id, set())
        await node.stop(0.0)


async def test_a_fenced_caller_changes_nothing() -> None:
    life = RetainingLife()
    retained = Retaining(life.ledger)
    retained.retain(life.asked())
    life.ledger.fence(life.epoch)
    for change in (lambda: retained.retain(life.asked()), lambda: life.drop(retained, "x")):
        with pytest.raises(Conflict, match="fenced"):
            change()
    assert [one.name for one in life.listed(retained)] == ["x"]


async def test_an_emptied_redis_gets_the_record_again(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retaining, "REPEAT_S", 0.0)
    life = RetainingLife()
    async with life.running(redis, "emptied") as retained:
        retained.retain(life.asked())
        await written(redis, "emptied", {"x"})
        redis.command("FLUSHALL")
        await written(redis, "emptied", {"x"})
        assert len(life.listed(retained)) == 1


async def test_nonsense_in_redis_is_no_record(redis: RedisServer) -> None:
    redis.command("SET", "pillion:retentions:odd", "nonsense")
    life = RetainingLife()
    async with life.running(redis, "odd") as retained:
        retained.retain(life.asked())
        await written(redis, "odd", {"x"})


async def test_what_is_over_ends(redis: RedisServer) -> None:
    life = RetainingLife()
    async with life.running(redis, "over") as retained:
        retained.retain(life.asked(ttl_s=1))
        await until("it to end", lambda: not life.listed(retained))
        await written(redis, "over", set())
    assert life.ledger.retentions.lapsed_ever == 1


async def test_what_is_refused() -> None:
    life = RetainingLife()
    retained = Retaining(life.ledger)
    for wrong in (life.asked(ttl_s=10**9), life.asked(name="n" * 300), life.asked(block_hashes=CHAIN[:31])):
        with pytest.raises(InvalidRequest):
            retained.retain(wrong)
    with pytest.raises(NotFound):
        retained.retain(life.asked(epoch=10**6))
    shapeless = RetainingLife(0)
    with pytest.raises(Unavailable):
        Retaining(shapeless.ledger).retain(shapeless.asked())
