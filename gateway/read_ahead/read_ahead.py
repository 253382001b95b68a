"""Reads ahead: while a request waits in the gateway's line, its KV is brought from lower tiers into the pool.

    waits for its turn --> in line here --a place is free--> look-up, hashes --> the node pins what its pool has, and
           |                    |                                                brings the rest into free slots
           |                    |                                            --> the pin ends; the blocks stay cached
           '--its turn comes----'--> planned as ever: what has come is a hit, what is still coming is waited for

So a batch's next lines, a chat's next turn and a prompt that begins with a pinned prefix are read while others run, as
far as they wait; a request whose turn comes at once fetches for itself. Nothing is held for it: the blocks come into
slots that are free, at most half of them, and are evicted like others. Where free slots run short by that, the node
copies what was used least recently to its tiers, as ever. No request waits for this. The node is the one with the most
of the prompt among those of workers that serve the model; blocks of other nodes are left to the plan, which chooses the
node. Nothing here is needed for an answer (I1).
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

# At most this many waiting requests are remembered here; later ones are not read ahead.
MAX_IN_LINE = 256
# Timeout of reading ahead for one request; its node's own fetch timeout is shorter.
MAX_READ_AHEAD_S = 10.0


class ReadAhead:
    """Reads ahead for at most ``most`` waiting requests at once, in the order in which they began to
    wait."""

    def __init__(self, cluster: Cluster, most: int) -> None:
        self._cluster = cluster
        self._most = most
        self._line: dict[int, AdmittedRequest] = {}
        self._numbers = itertools.count()
        self._reading: set[asyncio.Task[None]] = set()

    def waits(self, admitted: AdmittedRequest) -> Callable[[], None]:
        """Puts a request in line that has to wait for its turn. Returns what takes it out again."""
        number = next(self._numbers)
        if len(self._line) < MAX_IN_LINE and not admitted.reads_prompt_rows:
            self._line[number] = admitted
            self._begin()
        return partial(self._over, number)

    def _over(self, number: int) -> None:
        self._line.pop(number, None)

    async def stop(self) -> None:
        """Ends all reading ahead; nodes release what was pinned for it."""
        self._line.clear()
        self._most = 0
        await end_tasks(*self._reading)

    def _begin(self) -> None:
        while self._line and len(self._reading) < self._most:
            task = asyncio.create_task(self._read(self._line.pop(next(iter(self._line)))), name="read ahead")
            self._reading.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._reading.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("reading ahead failed", exc_info=task.exception())
        self._begin()

    async def _read(self, admitted: AdmittedRequest) -> None:
        try:
            await self._bring(admitted)
        except PillionError as error:
            log.debug("nothing is read ahead for %s: %s", admitted.request_id, error.message)

    async def _bring(self, admitted: AdmittedRequest) -> None:
        """Makes the node with the most of the prompt bring what its pool lacks of it. Raises PillionError."""
        cluster = self._cluster
        served = cluster.served(admitted.model, admitted.fingerprint, admitted.adapter_rank)
        hashes = (await chain_of(admitted, admitted.prompt[:-1], served)).hashes
        hits = {hit.node_id: hit.blocks for hit in (await cluster.hits(served, hashes)).hits} if hashes else {}
        found = cluster.candidates(served, admitted.text_tokens, hits, admitted.spread, admitted.adapter)
        places = {one.node_id for one in found if one.role == "decode"}
        # A node without a lower tier has all in its pool that the index names, and a bucket may have what it does not.
        tiers = [
            one
            for one in cluster.view.of("kvnode")
            if one.node_id in places and (one.object_url or (one.disk_blocks and hits.get(one.node_id)))
        ]
        if not tiers:
            return
        best = max(tiers, key=lambda one: hits.get(one.node_id, 0))
        blocks = hits.get(best.node_id, 0)
        if best.object_url and served.state_pages:
            blocks = (await cluster.far_hits(hashes, hits, found, served.state_pages)).get(best.node_id, blocks)
        wanted = hashes if best.object_url and not served.state_pages else hashes[: blocks * HASH_BYTES]
        if not wanted:
            return
        wanted += b"".join(state_page(wanted[-HASH_BYTES:], page) for page in range(served.state_pages))
        link = cluster.node(best.node_id)
        epoch = link.epoch
        ticket = await link.client.open_ticket(epoch, wanted, 0)
        try:
            if ticket.pinned_blocks < len(wanted) // HASH_BYTES:
                await link.client.prefetch(epoch, ticket.ticket_id, wanted, timeout_s=MAX_READ_AHEAD_S, ahead=True)
        finally:
            link.release(TicketHold(best.node_id, epoch, ticket.ticket_id))
