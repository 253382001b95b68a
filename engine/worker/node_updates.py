"""What the scheduler decided, told to the KV node in order: one batch at a time, whatever came meanwhile is the next.

    commit -> release -> give back -> lease        then the resumes of that batch begin, each on its own

Resumes wait in the node's line for memory, so they cannot wait here, where the memory comes from. A call whose outcome
is unknown (no answer in time) may have moved slots that nobody can name, so it ends the line, and with it the worker's
epoch: the node then frees everything on the worker's word that it has drained, or at the end of the attach socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from pillion.engine.scheduling.step_plan import CommitOrder, Outcome, ResumeOrder
from pillion.errors import PillionError
from pillion.wire.kvnode import CommitResult, CommitRun


class Node(Protocol):
    """The part of pillion.kvstore.client.node_client.NodeClient that is needed here; a test may bring its own."""

    async def commit(self, epoch: int, runs: Sequence[CommitRun]) -> list[CommitResult]: ...
    async def release(self, epoch: int, ticket_ids: Sequence[int]) -> None: ...
    async def give_back(self, epoch: int, slots: Sequence[int]) -> None: ...
    async def lease(self, epoch: int, blocks: int) -> tuple[int, ...]: ...


class NodeUpdates:
    """One task per epoch of a worker.

    Args:
        node: its client.
        epoch: this worker's.
        on_committed: an order and the node's answer.
        on_released: tickets that this worker holds no more.
        on_granted: the answer to a lease call.
        on_resume: a sequence whose ticket has been released and that needs a new one.
    """

    def __init__(
        self,
        node: Node,
        epoch: int,
        *,
        on_committed: Callable[[CommitOrder, CommitResult], None],
        on_released: Callable[[Sequence[int]], None],
        on_granted: Callable[[tuple[int, ...]], None],
        on_resume: Callable[[ResumeOrder], None],
    ) -> None:
        self._node = node
        self._epoch = epoch
        self._on_committed = on_committed
        self._on_released = on_released
        self._on_granted = on_granted
        self._on_resume = on_resume
        # Bounded by the scheduler: one commit, release or resume per sequence, one lease call, slots that exist.
        self._next = Outcome()
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, outcome: Outcome) -> None:
        """Take over the orders of an outcome."""
        self._next.commits += outcome.commits
        self._next.releases += outcome.releases
        self._next.give_back += outcome.give_back
        self._next.lease_blocks += outcome.lease_blocks
        self._next.resumes += outcome.resumes
        if not self._next.empty:
            self._idle.clear()
            self._news.set()

    async def run(self) -> None:
        """Serve until cancelled. Raises PillionError when a call fails: the epoch cannot go on."""
        while True:
            await self._news.wait()
            self._news.clear()
            batch, self._next = self._next, Outcome()
            await self._tell(batch)
            if self._next.empty:
                self._idle.set()

    async def drained(self) -> None:
        """Returns when everything put so far is told."""
        await self._idle.wait()

    async def _tell(self, batch: Outcome) -> None:
        if batch.commits:
            runs = [CommitRun(order.ticket_id, order.slots, order.block_hashes) for order in batch.commits]
            results = await self._node.commit(self._epoch, runs)
            for order, result in zip(batch.commits, results, strict=True):
                self._on_committed(order, result)
        if batch.releases:
            await self._node.release(self._epoch, batch.releases)
            self._on_released(batch.releases)
        if batch.give_back:
            await self._node.give_back(self._epoch, batch.give_back)
        if batch.lease_blocks:
            self._on_granted(await self._node.lease(self._epoch, batch.lease_blocks))
        for resume in batch.resumes:
            self._on_resume(resume)


def describe(error: PillionError) -> str:
    """Why an epoch, or a worker, ends when its node's answer is missing or a refusal."""
    return f"the KV node did not do as asked ({type(error).__name__}: {error.message})"
