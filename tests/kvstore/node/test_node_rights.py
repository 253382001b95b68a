"""Rights of sessions and workers at a node, and callers that use a nonce twice."""

from __future__ import annotations

import asyncio

import pytest

from lab.testbed.conditions import loop_turns
from pillion.errors import Cancelled, InvalidRequest
from pillion.v1.kvnode_pb2 import CommitRun, OpenTicketRequest
from tests.kvstore.node.test_node import NUM_SLOTS, hashes, running


async def test_only_a_worker_that_mapped_the_pool_may_commit(short_folder: str) -> None:
    """Hashes are not secret: a session that could commit could put anything into other clients' prompts."""
    async with running(short_folder) as cluster:
        await cluster.worker()
        epoch, client = cluster.session.epoch, cluster.client
        ticket = await client.open_ticket(epoch, hashes(1, 2), 3)
        run = CommitRun(ticket_id=ticket.ticket_id, slots=(0,), block_hashes=hashes(1))
        calls = (
            client.adopt(epoch, ticket.ticket_id, 1),
            client.lease(epoch, 1),
            client.return_slots(epoch, [0]),
            client.commit(epoch, [run]),
        )
        for call in calls:
            with pytest.raises(InvalidRequest, match="attached"):
                await call
        await client.check_integrity()


async def test_a_nonce_that_is_used_again_at_once(short_folder: str) -> None:
    async with running(short_folder) as cluster:
        await cluster.worker()
        epoch, pool = cluster.session.epoch, cluster.node.pool
        await cluster.client.open_ticket(epoch, b"", NUM_SLOTS)
        request = OpenTicketRequest(epoch=epoch, nonce=7, total_blocks=NUM_SLOTS)
        first = asyncio.create_task(pool.open_ticket(request))
        await loop_turns(1)
        pool.release(epoch, [], [7])
        second = asyncio.create_task(pool.open_ticket(request))
        with pytest.raises(Cancelled):
            await first
        pool.check_integrity()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        pool.check_integrity()
