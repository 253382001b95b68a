"""Tells KV nodes when the next turn of a conversation is expected, as each of its answers ends.

    an answer ends --> what was learned of its tenant and tools, or its kv_hints --> the node of its KV keeps the chain
                                                                                     of prompt and answer, or lets it go

It is a wish in the background: no request waits for it, a node that is silent or full loses nothing but hits, and
nothing here is needed for an answer (I1). Requests in the background say nothing, and neither do those that failed.
"""

from __future__ import annotations

import asyncio
import logging

from pillion.errors import PillionError
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.request.request_runner import RequestRunner
from pillion.gateway.retentions.kv_hints import read_hints
from pillion.gateway.retentions.turn_gaps import KeepUntil, LetGo, TurnGaps, until_used
from pillion.kvstore.hashing import split_hashes
from pillion.tasks import OwnTasks, end_tasks
from pillion.types import GenerateRequest
from pillion.v1.kvnode_pb2 import RetainChainRequest, WorthStep

log = logging.getLogger("pillion.gateway")

# At most this many calls to KV nodes are under way; what ends meanwhile is kept as the pool keeps any KV.
MAX_CALLS = 256
# The hashes of a longer answer would hold up the event loop.
MAX_ANSWER_TOKENS = 2**15


class Retentions:
    """Learns from all requests of a gateway. Attributes are for reading: ``gaps``, and
    ``dropped``, the number of wishes for which there was no call."""

    def __init__(self, cluster: Cluster) -> None:
        self.gaps = TurnGaps()
        self.dropped = 0
        self._cluster = cluster
        self._calls = OwnTasks()

    def ended(self, runner: RequestRunner, request: GenerateRequest, tenant: Tenant) -> None:
        """Learns from a request that has ended, and says what is to become of its KV."""
        if runner.admitted.background or not runner.completed or runner.usage().completion_tokens > MAX_ANSWER_TOKENS:
            return
        prefix, text = runner.placed_prefix(), runner.placed_text()
        if prefix is None or text is None or not text.hashes:
            return
        now = asyncio.get_running_loop().time()
        chain, arrived = split_hashes(prefix.hashes), runner.admitted.arrived
        found = runner.usage().cached_tokens // prefix.block_size
        sees_all = not self._cluster.other_gateways()
        shared = self.gaps.turn(tenant.name, chain, arrived, found, sees_all=sees_all)
        wish = self.gaps.ended(tenant.name, chain, runner.called_tools, now, shared)
        if request.kv_hints and (kept_s := read_hints(request.kv_hints)) is not None:
            wish = until_used(kept_s) if kept_s else LetGo(shared)
        if wish is None:
            return
        if len(self._calls) >= MAX_CALLS:
            self.dropped += 1
            return
        asked = RetainChainRequest(owner=tenant.name, block_hashes=text.hashes)
        if isinstance(wish, KeepUntil):
            asked.worth.extend(WorthStep(from_ms=round(at * 1000), use_ms=1000 / worth) for at, worth in wish.worth)
            asked.until_ms = max(1, round(wish.until_s * 1000))
        else:
            asked.shared_blocks = wish.shared_blocks
        self._calls.begin(self._tell(text.node_id, asked), "retention")

    async def stop(self) -> None:
        """Ends the calls that are under way."""
        await end_tasks(*self._calls)

    async def _tell(self, node_id: str, asked: RetainChainRequest) -> None:
        try:
            link = self._cluster.node(node_id)
            asked.epoch = link.epoch
            await link.client.retain_chain(asked)
        except PillionError as error:
            log.debug("KV node %s keeps nothing for a next turn: %s", node_id, error.message)
