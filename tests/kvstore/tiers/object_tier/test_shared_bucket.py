"""Real nodes over one bucket: blocks that one of them evicted serve another, even after its death."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator

import pytest

from lab.testbed.conditions import WITHIN_S
from lab.testbed.redis import RedisServer
from lab.testbed.s3_service import CREDENTIALS, S3Service
from pillion.kvstore.hashing import HASH_BYTES, state_page
from pillion.kvstore.node.kv_node import metric_readings
from pillion.kvstore.tiers.object_tier import object_store, write_through
from pillion.observability import metric_catalog as names
from pillion.v1.kvnode_pb2 import NodeStatus, PrefetchReply
from tests.support.kv_hosts import EAGER, NUM_SLOTS, content, hosts, prompt

pytest.importorskip("obstore")


@pytest.fixture
async def service(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[S3Service]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "CONNECT_TIMEOUT_MS", object_store.REQUEST_TIMEOUT_MS)
    # Blocks that stay in the pool are in the bucket only where a test says so.
    monkeypatch.setattr(write_through, "COPY_DELAY_S", 10 * WITHIN_S)
    async with S3Service(tmp_path / "s3").running() as found:
        yield found


def written(status: NodeStatus) -> bool:
    """Return whether all blocks that the watermarks want out of the pool are in the bucket."""
    return status.free_blocks >= NUM_SLOTS * 0.8 and status.object_blocks == status.spilled_blocks > 0


async def test_objects_of_a_dead_node_serve_another(
    short_folder: str, redis: RedisServer, service: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_through, "COPY_DELAY_S", 0.01)
    async with hosts(short_folder, redis, "a", "b", object_url=service.url()) as (a, b):
        hashes = prompt(*range(30))
        await a.serve(hashes)
        await a.until(lambda status: status.object_blocks == 30)
        assert (await a.client.status()).spilled_blocks == 0, "they are in the pool as before"
        await a.stop()
        # The index is empty and no source node is named, so the bucket is asked.
        assert await b.client.find_blocks(hashes, 0, timeout_s=60) == 30
        assert await b.client.find_blocks(hashes, 12, timeout_s=60) == 18
        assert await b.serve(hashes) == PrefetchReply(blocks=30, bucket_blocks=30)
        await b.idle()
        await b.check()


async def test_a_state_in_a_bucket_is_a_hit(
    short_folder: str, redis: RedisServer, service: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of two pages after 12 blocks and after a segment's last block, whose first page starts another segment."""
    monkeypatch.setattr(write_through, "COPY_DELAY_S", 0.01)
    async with hosts(short_folder, redis, "a", "b", object_url=service.url()) as (a, b):
        hashes = prompt(*range(34))

        def first(blocks: int) -> bytes:
            return hashes[: blocks * HASH_BYTES]

        for blocks in (12, 32):
            pages = (state_page(first(blocks)[-HASH_BYTES:], page) for page in range(2))
            await a.serve(first(blocks) + b"".join(pages))
        await a.serve(hashes)
        await a.until(lambda status: status.object_blocks == 34 + 4)
        await a.stop()
        for blocks, begin, found in ((34, 0, 32), (34, 12, 20), (31, 0, 12), (11, 0, 0), (34, 33, 0)):
            more = await b.client.find_blocks(first(blocks), begin, timeout_s=60, state_pages=2)
            assert more == found, (blocks, begin)
        ticket = await b.client.open_ticket(b.session.epoch, first(12), 13, timeout_s=WITHIN_S, state_pages=2)
        brought = await b.fetch(ticket, first(12))
        assert (brought.blocks, brought.bucket_blocks) == (12, 14)
        adopted = await b.client.adopt(b.worker.epoch, ticket.ticket_id, 0)
        pages = [state_page(first(12)[-HASH_BYTES:], page) for page in range(2)]
        assert [b.read(slot) for slot in adopted.state_slots] == [content(page) for page in pages]
        await b.release(ticket)
        await b.idle()
        await b.check()


async def test_evicted_blocks_come_back_from_the_bucket(
    short_folder: str, redis: RedisServer, service: S3Service
) -> None:
    async with hosts(short_folder, redis, "a", object_url=service.url(), **EAGER) as (a,):
        hashes = prompt(*range(30))
        await a.serve(hashes)
        await a.until(written)
        spilled = (await a.client.status()).spilled_blocks
        assert await a.serve(hashes) == PrefetchReply(blocks=30, bucket_blocks=spilled)
        status = await a.client.status()
        assert (status.bucket_blocks, status.restored_blocks) == (spilled, 0)
        readings = {(metric, labels): value for metric, labels, value in metric_readings(status)}
        assert readings[names.KV_FETCH_BYTES, ("bucket",)] == spilled * status.block_bytes
        assert readings[names.KV_FETCH_BYTES, ("disk",)] == 0
        await a.idle()
        await a.check()


async def test_a_failing_bucket_only_reduces_hits(short_folder: str, redis: RedisServer, service: S3Service) -> None:
    async with hosts(short_folder, redis, "a", object_url=service.url(), fetch_timeout_s=0.3, **EAGER) as (a,):
        hashes = prompt(*range(30))
        await a.serve(hashes)
        await a.until(written)
        service.trouble = "stall"
        short = await a.serve(hashes)
        assert short.blocks < 30
        service.trouble = ""
        await a.until(lambda status: not status.late_blocks)
        await a.idle()
        await a.check()
