"""A node's prefix pins across its own restart and across an emptied Redis, with a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from lab.testbed.conditions import until
from lab.testbed.redis import RedisServer
from pillion.errors import Conflict, InvalidRequest, NotFound, Unavailable
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import SESSION, Ledger
from pillion.kvstore.prefix_pins import node_pins
from pillion.kvstore.prefix_pins.node_pins import NodePrefixPins
from pillion.kvstore.prefix_pins.pin_records import PrefixPinRecords
from pillion.net.rpc import RunningServer
from pillion.v1 import kvnode_pb2 as pb
from pillion.v1.kvnode_pb2 import CommitRun
from tests.support.node_lives import Lives, ended

CHAIN = chain_hashes(bytes(32), (1, 2, 3), 1)


@pytest.fixture(autouse=True)
def _looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pins, "POLL_S", 0.02)


class NodePinsLife:
    """One life of a node's ledger, with a caller."""

    def __init__(self, num_slots: int = 16) -> None:
        self.ledger = Ledger(itertools.count(1).__next__)
        if num_slots:
            self.ledger.shape(num_slots)
        self.epoch = self.ledger.attach("gateway", SESSION)

    def compute(self) -> None:
        """Compute the chain unless it is present."""
        hashes = split_hashes(CHAIN)
        ticket = self.ledger.admit(self.epoch, 1, hashes, 3)
        assert ticket is not None
        slots = self.ledger.adopt(self.epoch, ticket.ticket_id, 3).leased_slots
        self.ledger.commit(self.epoch, [CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=CHAIN)])
        self.ledger.release(self.epoch, [ticket.ticket_id])

    @contextlib.asynccontextmanager
    async def running(self, redis: RedisServer, node_id: str) -> AsyncIterator[NodePrefixPins]:
        pins = NodePrefixPins(self.ledger, PrefixPinRecords(redis.url, node_id))
        task = asyncio.create_task(pins.run())
        try:
            yield pins
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await pins.aclose()

    def asked(self, **fields: int | str) -> pb.PinPrefixRequest:
        request = pb.PinPrefixRequest(epoch=self.epoch, owner="a", name="x", block_hashes=CHAIN, ttl_s=600, tokens=50)
        request.MergeFrom(pb.PinPrefixRequest(**fields))
        return request

    def drop(self, pins: NodePrefixPins, name: str) -> bool:
        return pins.drop(pb.UnpinPrefixRequest(epoch=self.epoch, owner="a", name=name))

    def listed(self, pins: NodePrefixPins, owner: str = "a") -> list[pb.PrefixPin]:
        return list(pins.list_pins(pb.ListPrefixPinsRequest(epoch=self.epoch, owner=owner)).prefix_pins)


async def written(redis: RedisServer, node_id: str, names: set[str]) -> None:
    records = PrefixPinRecords(redis.url, node_id)

    async def there() -> bool:
        # On a busy machine a call of Redis may take longer than its limit.
        with contextlib.suppress(Unavailable):
            return {record.name for record in await records.read()} == names
        return False

    await until(f"the record to name {names}", there)
    await records.aclose()


async def test_pins_survive_a_restart_of_the_node(redis: RedisServer) -> None:
    first, second = NodePinsLife(), NodePinsLife()
    first.compute()
    async with first.running(redis, "node") as pins:
        assert pins.pin_prefix(first.asked(model="m")).present_blocks == 3
        await written(redis, "node", {"x"})
    async with second.running(redis, "node") as pins:
        await until("the record to be read", lambda: second.listed(pins))
        (found,) = second.listed(pins)
        assert (found.name, found.model, found.tokens, found.blocks, found.present_blocks) == ("x", "m", 50, 3, 0)
        assert 0 < found.left_s <= 600
        # The pool was lost. What is computed anew is prefix-pinned at once.
        second.compute()
        assert second.listed(pins)[0].present_blocks == 3
        assert second.listed(pins, "b") == []
        check_integrity(second.ledger)
        assert second.drop(pins, "x")
        assert not second.drop(pins, "x")
        await written(redis, "node", set())


async def test_a_pin_dropped_before_recovery_is_not_restored(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pins, "MAX_UNREAD_DROPS", 1)
    first, second = NodePinsLife(), NodePinsLife(32)
    async with first.running(redis, "unread") as pins:
        for name in "xy":
            pins.pin_prefix(first.asked(name=name, block_hashes=CHAIN[:32]))
        await written(redis, "unread", {"x", "y"})
    async with second.running(redis, "unread") as pins:
        # Nothing of it has run yet.
        assert second.drop(pins, "x")
        assert second.drop(pins, "x")
        with pytest.raises(Unavailable, match="remembers 1"):
            second.drop(pins, "y")
        pins.pin_prefix(second.asked(name="y"))
        await written(redis, "unread", {"y"})
        (found,) = second.listed(pins)
        assert (found.name, found.blocks) == ("y", 3), "the newer one of a name stays"
        assert not second.drop(pins, "x")


async def test_a_drop_during_shutdown_is_recorded(
    short_folder: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(short_folder, "", redis_url=redis.url)
    async with ended(lives):
        node = await lives.begin()
        await lives.worker()
        life = NodePinsLife()
        life.epoch = node.pool.open_session("gateway")
        node.prefix_pins.pin_prefix(life.asked(block_hashes=CHAIN[:32]))
        await written(redis, lives.flags.node_id, {"x"})
        stop = RunningServer.stop

        async def dropping(server: RunningServer, grace_s: float) -> None:
            await stop(server, grace_s)
            assert life.drop(node.prefix_pins, "x")

        monkeypatch.setattr(RunningServer, "stop", dropping)
        await lives.end()
        await written(redis, lives.flags.node_id, set())
        await node.stop(0.0)


async def test_a_fenced_caller_changes_nothing() -> None:
    life = NodePinsLife()
    pins = NodePrefixPins(life.ledger)
    pins.pin_prefix(life.asked())
    life.ledger.fence(life.epoch)
    for change in (lambda: pins.pin_prefix(life.asked()), lambda: life.drop(pins, "x")):
        with pytest.raises(Conflict, match="fenced"):
            change()
    assert [one.name for one in life.listed(pins)] == ["x"]


async def test_the_record_is_rewritten_after_a_redis_flush(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pins, "REPEAT_S", 0.0)
    life = NodePinsLife()
    async with life.running(redis, "emptied") as pins:
        pins.pin_prefix(life.asked())
        await written(redis, "emptied", {"x"})
        redis.command("FLUSHALL")
        await written(redis, "emptied", {"x"})
        assert len(life.listed(pins)) == 1


async def test_malformed_records_in_redis_are_ignored(redis: RedisServer) -> None:
    redis.command("SET", "pillion:prefix_pins:odd", "nonsense")
    life = NodePinsLife()
    async with life.running(redis, "odd") as pins:
        pins.pin_prefix(life.asked())
        await written(redis, "odd", {"x"})


async def test_pins_expire(redis: RedisServer) -> None:
    life = NodePinsLife()
    async with life.running(redis, "over") as pins:
        pins.pin_prefix(life.asked(ttl_s=1))
        await until("it to end", lambda: not life.listed(pins))
        await written(redis, "over", set())
    assert life.ledger.prefix_pins.lapsed_ever == 1


async def test_rejected_requests() -> None:
    life = NodePinsLife()
    pins = NodePrefixPins(life.ledger)
    for wrong in (life.asked(ttl_s=10**9), life.asked(name="n" * 300), life.asked(block_hashes=CHAIN[:31])):
        with pytest.raises(InvalidRequest):
            pins.pin_prefix(wrong)
    with pytest.raises(NotFound):
        pins.pin_prefix(life.asked(epoch=10**6))
    shapeless = NodePinsLife(0)
    with pytest.raises(Unavailable):
        NodePrefixPins(shapeless.ledger).pin_prefix(shapeless.asked())
