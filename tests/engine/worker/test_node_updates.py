"""Updates to the KV node: those without a waiter are batched; others are sent at once, with all before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from pillion.engine.scheduling.step_plan import CommitOrder, Outcome
from pillion.engine.worker import node_updates
from pillion.engine.worker.node_updates import NodeUpdates
from pillion.engine.worker.tickets import Tickets
from pillion.kvstore.client.node_client import NodeClient
from pillion.v1.kvnode_pb2 import CommitRun, CommitRunResult


@dataclass
class RecordingNode:
    """A KV node that accepts everything and records the calls."""

    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)

    async def commit(self, epoch: int, runs: Sequence[CommitRun]) -> list[CommitRunResult]:
        self.calls.append(("commit", tuple(run.ticket_id for run in runs)))
        self.called.set()
        return [CommitRunResult(slots=run.slots) for run in runs]

    async def lease(self, epoch: int, blocks: int) -> tuple[int, ...]:
        self.calls.append(("lease", (blocks,)))
        return ()


def order(ticket: int, *, may_wait: bool) -> CommitOrder:
    return CommitOrder(
        seq_id=ticket, ticket_id=ticket, slots=(ticket,), block_hashes=bytes(32), ordered_s=0.0, may_wait=may_wait
    )


@asynccontextmanager
async def running(node: RecordingNode) -> AsyncIterator[NodeUpdates]:
    updates = NodeUpdates(
        cast(NodeClient, node),
        1,
        on_committed=lambda order, result: None,
        tickets=cast(Tickets, None),
        post_event=lambda *event: None,
        on_resume=lambda order: None,
        on_chain=lambda order: None,
    )
    task = asyncio.create_task(updates.run())
    try:
        yield updates
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders that may wait do so for ever, except where a test says otherwise: no test depends on who is quicker."""
    monkeypatch.setattr(node_updates, "GATHER_MS", 10**9)


@pytest.mark.parametrize(
    "urgent", [Outcome(commits=[order(9, may_wait=False)]), Outcome(lease_blocks=3), Outcome(hurry=True)]
)
async def test_deferred_updates_are_sent_with_urgent_ones(urgent: Outcome) -> None:
    node = RecordingNode()
    async with running(node) as updates:
        for ticket in (1, 2):
            updates.put(Outcome(commits=[order(ticket, may_wait=True)]))
            await settled()
            assert not node.calls
        updates.put(urgent)
        await settled()
        assert node.calls[0] == ("commit", (1, 2, *(one.ticket_id for one in urgent.commits)))
        before = len(node.calls)
        updates.put(Outcome(commits=[order(3, may_wait=True)]))
        await settled()
        assert len(node.calls) == before


async def test_deferred_updates_are_sent_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_updates, "GATHER_MS", 1)
    node = RecordingNode()
    async with running(node) as updates:
        updates.put(Outcome(commits=[order(1, may_wait=True)]))
        async with asyncio.timeout(30):
            await node.called.wait()
        assert node.calls == [("commit", (1,))]


async def test_a_draining_worker_does_not_defer_updates() -> None:
    node = RecordingNode()
    async with running(node) as updates:
        updates.put(Outcome(commits=[order(1, may_wait=True)]))
        async with asyncio.timeout(30):
            await updates.drained()
        assert node.calls == [("commit", (1,))]


def test_outcomes_are_urgent_if_somebody_waits() -> None:
    urgent: list[dict[str, Any]] = [
        {"releases": [1]},
        {"returned_slots": [1]},
        {"commits": [order(1, may_wait=True), order(2, may_wait=False)]},
        {"hurry": True},
    ]
    assert all(Outcome(**one).urgent and not Outcome(**one).empty for one in urgent)
    assert not Outcome(commits=[order(1, may_wait=True)]).urgent
    assert not Outcome().urgent
