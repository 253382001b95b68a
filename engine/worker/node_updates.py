"""Sends the scheduler's orders to the KV node, in order: one batch at a time; orders that come meanwhile are the next.

    commit -> release -> give back -> lease        then the batch's resumes and draft orders begin, each on its own

Resumes wait in the node's queue for memory, so they cannot wait here, where the memory comes from. A call whose outcome
is unknown (no answer in time) may have moved slots that nobody can name, so it ends the updates, and with them the
worker's epoch: the node then frees everything when the worker reports that it has drained, or when the attach socket
ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.step_plan import CommitOrder, DraftOrder, Outcome, ResumeOrder
from pillion.engine.worker.tickets import Tickets
from pillion.errors import PillionError
from pillion.kvstore.client.node_client import NodeClient
from pillion.v1.kvnode_pb2 import CommitRun, CommitRunResult


class NodeUpdates:
    """The ordered calls of one epoch of a worker.

    Args:
        tickets: told which of them this worker holds no more.
        post_event: has a method of Scheduler called between two steps.
        on_committed: called with an order and the node's answer.
        on_resume: called for a sequence whose ticket has been released and that needs a new one.
        on_draft: called for a draft model's chain that needs a ticket.
    """

    def __init__(
        self,
        node: NodeClient,
        epoch: int,
        *,
        on_committed: Callable[[CommitOrder, CommitRunResult], None],
        tickets: Tickets,
        post_event: Callable[..., None],
        on_resume: Callable[[ResumeOrder], None],
        on_draft: Callable[[DraftOrder], None],
    ) -> None:
        self._node = node
        self._epoch = epoch
        self._on_committed = on_committed
        self._tickets = tickets
        self._post_event = post_event
        self._on_resume = on_resume
        self._on_draft = on_draft
        # Bounded by the scheduler: a commit, release or resume per sequence and draft, one lease call, existing slots.
        self._next = Outcome()
        self._pending = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, outcome: Outcome) -> None:
        """Take over the orders of an outcome."""
        if outcome.has_orders:
            self._next.add_orders(outcome)
            self._idle.clear()
            self._pending.set()

    async def run(self) -> None:
        """Send orders until cancelled. Raises PillionError when a call fails: the epoch cannot go on."""
        while True:
            await self._pending.wait()
            self._pending.clear()
            batch, self._next = self._next, Outcome()
            await self._send(batch)
            if not self._next.has_orders:
                self._idle.set()

    async def drained(self) -> None:
        """Returns when the node has answered everything put so far."""
        await self._idle.wait()

    async def _send(self, batch: Outcome) -> None:
        if batch.commits:
            runs = [
                CommitRun(ticket_id=order.ticket_id, slots=order.slots, block_hashes=order.block_hashes)
                for order in batch.commits
            ]
            results = await self._node.commit(self._epoch, runs)
            for order, result in zip(batch.commits, results, strict=True):
                self._on_committed(order, result)
        if batch.releases:
            await self._node.release(self._epoch, batch.releases)
            self._tickets.released(batch.releases)
        if batch.give_back:
            await self._node.give_back(self._epoch, batch.give_back)
        if batch.lease_blocks:
            self._post_event(Scheduler.granted, await self._node.lease(self._epoch, batch.lease_blocks))
        for resume in batch.resumes:
            self._on_resume(resume)
        for draft in batch.draft_orders:
            self._on_draft(draft)


def describe_failure(error: PillionError) -> str:
    """Why an epoch, or a worker, ends when its node refuses a call or does not answer it."""
    return f"the KV node did not do as asked ({type(error).__name__}: {error.message})"
