"""Spilling into a tier that lends its buffers: all of them are returned, whatever becomes of the copies."""

from __future__ import annotations

import asyncio

from lab.testbed.conditions import until
from pillion.kvstore.tiers.host_tier import HostTier
from tests.kvstore.ledger.test_eviction import prompt
from tests.kvstore.tiers.test_spill import BLOCK_BYTES, NUM_SLOTS, SpillHost, begin_copy, running, until_free


def host_tier() -> HostTier:
    return HostTier(memoryview(bytearray(NUM_SLOTS * BLOCK_BYTES)), BLOCK_BYTES, lambda: None)


async def test_an_unneeded_copy_returns_its_buffer() -> None:
    tier = host_tier()
    async with running(tier) as host:
        await begin_copy(host)
        ticket = host.open(0)
        host.go_on.set()
        await until_free(host, stored=True)
        await until("all buffers to be back", lambda: tier.room_bytes() == NUM_SLOTS * BLOCK_BYTES)
        assert prompt(0)[0] not in tier
        assert len(tier) == 5
        tier.check_integrity()
        host.close(ticket)


async def test_a_stopped_spiller_returns_its_buffers() -> None:
    tier = host_tier()
    host = SpillHost([tier])
    task = asyncio.create_task(host.spiller.run())
    host.go_on.clear()
    for token in range(17):
        host.serve(token)
    await until("a copy to begin", host.read.is_set)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert tier.room_bytes() < NUM_SLOTS * BLOCK_BYTES, "they are being written to"
    host.go_on.set()
    await host.spiller.close()
    await until("all buffers to be back", lambda: tier.room_bytes() == NUM_SLOTS * BLOCK_BYTES)
    tier.check_integrity()
