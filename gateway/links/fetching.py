"""Letting a KV node bring blocks under a ticket. It never fails: what does not come is computed instead (I1)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from pillion.errors import PillionError
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.request.events import TicketHold
from pillion.kvstore.hashing import HASH_BYTES
from pillion.observability import telemetry
from pillion.wire.kvnode import PrefetchReply

log = logging.getLogger("pillion.gateway")

# Longest wait for one fetch. A node keeps its own bound, --fetch-timeout-ms; this one is for a node that hangs.
MAX_FETCH_S = 5.0


async def fetch_blocks(
    cluster: Cluster, hold: TicketHold, hashes: bytes, sources: Sequence[str], here_blocks: int, left_s: float | None
) -> PrefetchReply:
    """``blocks`` of it: how many of the prompt's first blocks are pinned to the ticket then.

    Args:
        cluster: has the line to the ticket's node.
        hold: the gateway's, on the ticket.
        hashes: the chain from its first block as far as it is wanted, 32 bytes each.
        sources: other nodes that probably have it, best first.
        here_blocks: pinned already; the least that is returned.
        left_s: the request's time left, None for no limit.
    """
    wait_s = MAX_FETCH_S if left_s is None else min(left_s, MAX_FETCH_S)
    with telemetry.tracer().start_as_current_span("kv.fetch") as span:
        span.set_attributes({"pillion.node": hold.node_id, "pillion.sources": tuple(sources)})
        begun_s = time.monotonic()
        try:
            client = cluster.node(hold.node_id).client
            brought = await client.prefetch(hold.epoch, hold.ticket_id, hashes, sources, timeout_s=wait_s)
        except PillionError as error:
            log.debug("KV node %s fetched nothing: %s", hold.node_id, error.message)
            span.set_attribute("error.type", type(error).__name__)
            return PrefetchReply(blocks=here_blocks)
        cluster.pace.observe(brought.fetched_blocks + brought.restored_blocks, time.monotonic() - begun_s)
        span.set_attribute("pillion.fetched_blocks", brought.fetched_blocks)
        span.set_attribute("pillion.restored_blocks", brought.restored_blocks)
    brought.blocks = max(here_blocks, min(brought.blocks, len(hashes) // HASH_BYTES))
    return brought
