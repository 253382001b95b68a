"""Sends the scheduler's orders to the KV node, in order, one batch at a time; later orders are the next batch.

    commit -> release -> give back -> lease        then the batch's resumes and chain orders begin, each on its own

Orders that nothing waits for, i.e. commits of streams' blocks, gather for GATHER_MS: a call costs the worker, the node
and the index more than the blocks in it.

Resumes wait in the node's queue for memory, so they must not wait here, where memory is released. A call with an
unknown outcome (no answer in time) may have moved slots, so it ends the updates and the worker's epoch: the node frees
everything once the worker reports that it has drained, or the attach socket ends.
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

# Delay of stream blocks on their way to the node, where other prompts find them. A worker that dies meanwhile loses
# them.
GATHER_MS = 100


@dataclass(eq=False)
class NodeUpdates:
    """Sends the orders of one epoch to the KV node.

    Attributes:
        tickets: the worker's tickets, which are told of releases.
        post_event: schedules a call of a Scheduler method between two steps.
        on_committed: called with an order and the node's answer.
        on_resume: called for a sequence whose ticket has been released and that needs a new one.
        on_chain: called for a feature's own chain that needs a ticket.
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
        # Bounded by the scheduler: a commit, release or resume per sequence and chain, one lease call, existing slots.
        self._next = Outcome()
        self._pending = asyncio.Event()
        self._urgent = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, outcome: Outcome) -> None:
        """Add an outcome's orders to the KV node (commits, releases, slots) to the next round of calls."""
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
        """Return once the node has answered everything put so far."""
        self._urgent.set()
        await self._idle.wait()

    async def _send(self, batch: Outcome) -> None:
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
            self.tickets.released(batch.releases)
        if batch.returned_slots:
            await self.node.return_slots(self.epoch, batch.returned_slots)
        if batch.lease_blocks:
            self.post_event(Scheduler.granted, await self.node.lease(self.epoch, batch.lease_blocks))
        for resume in batch.resumes:
            self.on_resume(resume)
        for chain in batch.chain_orders:
            self.on_chain(chain)


def describe_failure(error: PillionError) -> str:
    """Return why an epoch, or a worker, ends when a call to its node is refused or unanswered."""
    return f"the KV node did not do as asked ({type(error).__name__}: {error.message})"
