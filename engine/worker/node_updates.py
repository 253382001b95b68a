"""Sends the scheduler's orders to the KV node in batches: orders that arrive meanwhile are the next batch.

    commit -> release -> return slots -> lease        then each resume and chain order of the batch starts a task

Orders that nothing waits for, i.e. commits of streams' blocks, are collected for GATHER_MS, because a call costs the
worker, the node and the index more than the blocks in it.

Resumes have separate tasks because they wait for memory, which the releases of later batches free. A call with an
unknown outcome (no reply in time) may have moved slots, so it ends the worker's epoch: the node frees everything once
the worker reports that it has drained, or the attach socket closes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.step_plan import ChainOrder, CommitOrder, Outcome, ResumeOrder
from pillion.engine.worker.tickets import Tickets
from pillion.errors import PillionError
from pillion.kvstore.client.node_client import NodeClient
from pillion.v1.kvnode_pb2 import CommitRun, CommitRunResult

# Max delay of commits that nothing waits for. Until then other prompts do not find these blocks, and they are lost if
# the worker dies.
GATHER_MS = 100


@dataclass(eq=False)
class NodeUpdates:
    """Sends the orders of one epoch to the KV node.

    Attributes:
        tickets: the worker's tickets, notified of confirmed releases.
        post_event: schedules a call of a Scheduler method between two steps.
        on_committed: called with a commit order and the node's reply.
        on_resume: called for a preempted sequence, once its ticket is released, to open a new one.
        on_chain: called to open a ticket for a chain of a draft model's KV.
    """

    node: NodeClient
    epoch: int
    _: KW_ONLY
    tickets: Tickets
    post_event: Callable[..., None]
    on_committed: Callable[[CommitOrder, CommitRunResult], None]
    on_resume: Callable[[ResumeOrder], None]
    on_chain: Callable[[ChainOrder], None]

    def __post_init__(self) -> None:
        # Orders of the next batch. The scheduler bounds them: at most one commit, release or resume per sequence and
        # chain, one lease, and existing slots.
        self._next = Outcome()
        self._pending = asyncio.Event()
        self._urgent = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, outcome: Outcome) -> None:
        """Add an outcome's orders to the next batch."""
        if outcome.has_orders:
            self._next.add_orders(outcome)
            self._idle.clear()
            self._pending.set()
        if outcome.urgent:
            self._urgent.set()

    async def run(self) -> None:
        """Send orders until cancelled. Raises PillionError if a call fails: the epoch cannot continue."""
        while True:
            await self._pending.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_MS / 1000):
                    await self._urgent.wait()
            self._pending.clear()
            self._urgent.clear()
            batch, self._next = self._next, Outcome()
            await self._send(batch)
            if not self._next.has_orders:
                self._idle.set()

    async def drained(self) -> None:
        """Return once the node has replied to all orders put so far."""
        self._urgent.set()
        await self._idle.wait()

    async def _send(self, batch: Outcome) -> None:
        """Make the calls of a batch. Raises PillionError if one fails."""
        if batch.commits:
            runs = [
                CommitRun(
                    ticket_id=order.ticket_id, slots=order.slots, block_hashes=order.block_hashes, after=order.after
                )
                for order in batch.commits
            ]
            results = await self.node.commit(self.epoch, runs)
            for order, result in zip(batch.commits, results, strict=True):
                self.on_committed(order, result)
        if batch.releases:
            await self.node.release(self.epoch, batch.releases)
            self.tickets.on_released(batch.releases)
        if batch.returned_slots:
            await self.node.return_slots(self.epoch, batch.returned_slots)
        if batch.lease_blocks:
            self.post_event(Scheduler.granted, await self.node.lease(self.epoch, batch.lease_blocks))
        for resume in batch.resumes:
            self.on_resume(resume)
        for chain in batch.chain_orders:
            self.on_chain(chain)


def describe_failure(error: PillionError) -> str:
    """Return the reason for the end of an epoch, or of a worker, whose call to its node failed."""
    return f"a call to the KV node failed ({type(error).__name__}: {error.message})"
