"""Prefetch of KV from lower tiers into the pool while a request waits in the gateway's queue.

    request waits --> queued here --a prefetch may start--> look-up, hashes --> the node pins what its pool has, and
           |                    |                                              fetches the rest into free slots
           |                    |                                          --> unpinned; the blocks stay cached
           '--its turn comes----'--> planned as usual: fetched blocks are hits, pending ones are waited for

So the next lines of a batch, the next turn of a chat and prompts with a pinned prefix are fetched while they wait; a
request that is scheduled at once fetches for itself. Nothing is reserved: the blocks use at most half of the
free slots, and are evicted like others. If free slots run short, the node spills the least recently used blocks as
usual. No request waits for this. The node is the one with most of the prompt among those with workers of the model;
blocks of other nodes are left to the plan, which chooses the node. No answer depends on it (I1).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from functools import partial

from pillion.errors import PillionError
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.request.admitted_request import AdmittedRequest
from pillion.gateway.request.component_calls import chain_of
from pillion.gateway.request.events import TicketHold
from pillion.kvstore.hashing import HASH_BYTES, state_page
from pillion.tasks import end_tasks

log = logging.getLogger("pillion.gateway")

# Max queued requests; later ones are not prefetched.
MAX_QUEUED = 256
# Timeout of a prefetch at the node.
MAX_READ_AHEAD_S = 10.0


class ReadAhead:
    """Prefetcher for waiting requests, in the order of their arrival, ``max_at_once`` at a time."""

    def __init__(self, cluster: Cluster, max_at_once: int) -> None:
        self._cluster = cluster
        self._max_at_once = max_at_once
        self._queue: dict[int, AdmittedRequest] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    def waits(self, admitted: AdmittedRequest) -> Callable[[], None]:
        """Enqueue a request that waits for its turn. Return a function that removes it."""
        number = next(self._numbers)
        if len(self._queue) < MAX_QUEUED and not admitted.reads_prompt_rows:
            self._queue[number] = admitted
            self._begin()
        return partial(self._remove, number)

    def _remove(self, number: int) -> None:
        self._queue.pop(number, None)

    async def stop(self) -> None:
        """End all prefetches; nodes unpin their blocks."""
        self._queue.clear()
        self._max_at_once = 0
        await end_tasks(*self._tasks)

    def _begin(self) -> None:
        while self._queue and len(self._tasks) < self._max_at_once:
            task = asyncio.create_task(self._read(self._queue.pop(next(iter(self._queue)))), name="read ahead")
            self._tasks.add(task)
            task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a prefetch failed", exc_info=task.exception())
        self._begin()

    async def _read(self, admitted: AdmittedRequest) -> None:
        try:
            await self._prefetch(admitted)
        except PillionError as error:
            log.debug("no prefetch for %s: %s", admitted.request_id, error.message)

    async def _prefetch(self, admitted: AdmittedRequest) -> None:
        """Make the node with most of the prompt fetch what its pool lacks. Raises PillionError."""
        cluster = self._cluster
        served = cluster.served(admitted.model, admitted.fingerprint, admitted.adapter_rank)
        hashes = (await chain_of(admitted, admitted.prompt[:-1], served)).hashes
        hits = {hit.node_id: hit.blocks for hit in (await cluster.hits(served, hashes)).hits} if hashes else {}
        workers = cluster.candidates(served, admitted.text_tokens, hits, admitted.spread, admitted.adapter)
        node_ids = {worker.node_id for worker in workers if worker.role == "decode"}
        # All that the index lists for a node without lower tiers is in its pool; a bucket may have more than is listed.
        nodes = [
            one
            for one in cluster.view.of("kvnode")
            if one.node_id in node_ids and (one.object_url or (one.disk_blocks and hits.get(one.node_id)))
        ]
        if not nodes:
            return
        best = max(nodes, key=lambda one: hits.get(one.node_id, 0))
        blocks = hits.get(best.node_id, 0)
        if best.object_url and served.states.one:
            blocks = (await cluster.bucket_hits(hashes, hits, workers, served.states.one)).get(best.node_id, blocks)
        to_fetch = hashes if best.object_url and not served.states.one else hashes[: blocks * HASH_BYTES]
        if not to_fetch:
            return
        to_fetch += b"".join(state_page(to_fetch[-HASH_BYTES:], page) for page in range(served.states.one))
        link = cluster.node(best.node_id)
        epoch = link.epoch
        ticket = await link.client.open_ticket(epoch, to_fetch, 0)
        try:
            if ticket.pinned_blocks < len(to_fetch) // HASH_BYTES:
                await link.client.prefetch(epoch, ticket.ticket_id, to_fetch, timeout_s=MAX_READ_AHEAD_S, ahead=True)
        finally:
            link.release(TicketHold(best.node_id, epoch, ticket.ticket_id))
