"""A span on a prefill worker of another node: its blocks flow to the decode worker's while later chunks are computed.

    ticket at the prefill worker's node --> cached prefix fetched there --> chunk computed --> chunk computed --> ...
                                                                                 |                 |
    ticket at the decode worker's node  <------------ one fetch at a time, as far as is computed --+

The second ticket ends with the span, whatever happens. A prefill worker that is lost raises; blocks that do not come
over only end the span early (I1), for the decode worker computes what it lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from opentelemetry import trace

from pillion.errors import DeadlineExceeded, Overloaded, Unavailable
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.links.node_link import NodeLink
from pillion.gateway.planning.planner import PrefixSource, chunks_between, plan_fetch
from pillion.gateway.request import events as ev
from pillion.gateway.request.events import TicketHold
from pillion.gateway.request.job import BlockHashChain, Job
from pillion.kvstore.hashing import HASH_BYTES
from pillion.observability import telemetry
from pillion.v1.prefill_pb2 import ChunkAck, RunSpanRequest

# Longest wait for KV memory at a prefill worker's node. Short, because the request holds memory at the decode worker's
# node meanwhile: two requests may wait for each other's nodes, and then both go on without.
MAX_REMOTE_ADMISSION_WAIT_S = 2.0


def make_span(job: Job, chain: BlockHashChain, action: ev.RunSpan, ticket_id: int, start_blocks: int) -> RunSpanRequest:
    """The message to a prefill worker: from ``start_blocks``, which its ticket has, to the split."""
    plan = action.plan
    start_tokens = start_blocks * plan.block_size
    return RunSpanRequest(
        request_id=job.request_id,
        attempt=action.attempt,
        ticket_id=ticket_id,
        parent_hash=chain.before(start_blocks),
        start_tokens=start_tokens,
        token_ids=action.token_ids[start_tokens : plan.split_tokens],
        chunk_tokens=chunks_between(plan, start_blocks, plan.split_blocks),
        priority=job.priority,
        text_tokens=job.text_tokens,
        adapter=job.adapter,
    )


async def open_ticket(
    link: NodeLink,
    job: Job,
    action: ev.OpenTicket | ev.RunSpan,
    hashes: bytes,
    total_blocks: int,
    wait_s: float,
    parent: trace.Span,
) -> tuple[TicketHold, int]:
    """Opens a ticket for ``action``'s attempt; returns the hold, and how many leading blocks are pinned.

    Raises PillionError, DeadlineExceeded where no memory comes free within ``wait_s``. Cancelled or out of time, the
    call leaves no ticket behind: the node client sees to that.
    """
    with telemetry.child("kv.pin", parent) as span:
        epoch = link.epoch
        ticket = await link.client.open_ticket(
            epoch,
            hashes,
            total_blocks,
            resume=action.attempt > 1,
            timeout_s=wait_s,
            priority=job.priority,
            expected_blocks=min(len(hashes) // HASH_BYTES, action.plan.hinted_blocks(link.node_id)),
        )
        span.set_attribute("pillion.pinned_blocks", ticket.pinned_blocks)
    return TicketHold(link.node_id, epoch, ticket.ticket_id), ticket.pinned_blocks


class RemoteSpan:
    """One span. ``on_chunk`` is called with every chunk that the decode worker's node has. The prefill worker of
    ``action`` is on another node than its ticket."""

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        chain: BlockHashChain,
        action: ev.RunSpan,
        on_chunk: Callable[[ChunkAck], None],
        on_queued: Callable[[int], None],
    ) -> None:
        self._cluster = cluster
        self._job = job
        self._chain = chain
        self._action = action
        assert action.plan.prefill is not None
        self._worker = action.plan.prefill
        self._on_chunk = on_chunk
        self._on_queued = on_queued
        # Blocks at the decode worker's node, and blocks at the prefill worker's.
        self._here = action.plan.cached_blocks
        self._there = 0
        # Computed and not here yet; as many as the span has chunks.
        self._acked: deque[ChunkAck] = deque()
        self._progress = asyncio.Event()

    async def run(self) -> int:
        """Runs the span; returns up to which token the decode worker's node has the KV.

        Raises PillionError where the prefill worker or its node is lost or refuses. Cancelled, it stops everything.
        """
        granted = await self._open_ticket()
        if granted is not None:
            hold, pinned_blocks = granted
            try:
                await self._run(hold, pinned_blocks)
            finally:
                # A node that is gone has released everything.
                with contextlib.suppress(Unavailable):
                    self._cluster.node(hold.node_id).release(hold)
        return self._here * self._action.plan.block_size

    async def _open_ticket(self) -> tuple[TicketHold, int] | None:
        """Opens the ticket at the prefill worker's node; None while memory is short there."""
        split, wait_s = self._action.plan.split_blocks, self._job.wait_s(MAX_REMOTE_ADMISSION_WAIT_S)
        link, hashes = self._cluster.node(self._worker.node_id), self._chain.first(split)
        try:
            return await open_ticket(link, self._job, self._action, hashes, split + 1, wait_s, trace.get_current_span())
        except (Overloaded, DeadlineExceeded):
            return None

    async def _run(self, hold: TicketHold, pinned_blocks: int) -> None:
        self._there = await self._fetch_prefix(hold, pinned_blocks)
        computing = asyncio.create_task(self._compute(hold), name=f"span of {self._job.request_id}")
        computing.add_done_callback(lambda _: self._progress.set())
        try:
            await self._carry(computing)
        finally:
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)

    async def _fetch_prefix(self, hold: TicketHold, pinned_blocks: int) -> int:
        """Fetches cached blocks that the prefill worker's node lacks, from the decode worker's node or others. Returns
        the number of blocks before the span."""
        plan = self._action.plan
        others = [source for source in plan.sources if source.node_id != plan.node_id]
        sources = sorted([PrefixSource(plan.node_id, self._here), *others], key=lambda source: -source.blocks)
        wanted = plan_fetch(sources, hold.node_id, pinned_blocks, plan.split_blocks)
        if wanted is None:
            return pinned_blocks
        hashes = self._chain.first(wanted.blocks)
        names, left_s = wanted.source_node_ids, self._job.left_s()
        return (await self._cluster.fetch_blocks(hold, hashes, names, pinned_blocks, left_s)).blocks

    async def _compute(self, hold: TicketHold) -> None:
        plan = self._action.plan
        if self._there >= plan.split_blocks:
            return
        span = make_span(self._job, self._chain, self._action, hold.ticket_id, self._there)
        link = self._cluster.prefill(self._worker.component_id)
        async for ack in link.run_span(span, self._job.left_s(), self._on_queued):
            self._acked.append(ack)
            self._there = max(self._there, min(ack.end_tokens // plan.block_size, plan.split_blocks))
            self._progress.set()

    async def _carry(self, computing: asyncio.Task[None]) -> None:
        """Carries blocks over until all are here, or no more come. Raises the exception that ended ``computing``."""
        while True:
            over = computing.done()
            if self._there > self._here:
                if not await self._carry_over():
                    return
            elif over:
                break
            else:
                await self._progress.wait()
                self._progress.clear()
        computing.result()

    async def _carry_over(self) -> bool:
        """Fetches what is computed now. Returns whether any block came."""
        action, before = self._action, self._here
        hashes = self._chain.first(self._there)
        sources, left_s = (self._worker.node_id,), self._job.left_s()
        self._here = (await self._cluster.fetch_blocks(action.hold, hashes, sources, before, left_s)).blocks
        while self._acked and self._acked[0].end_tokens <= self._here * action.plan.block_size:
            self._on_chunk(self._acked.popleft())
        return self._here > before
