"""Plans routes with what a gateway remembers of its own earlier requests. Sans-IO (I9).

    what is seen now (ClusterSnapshot) --with what is remembered--> make_plan --what was decided--> memory

A gateway has one planner for all of its requests: in the services, offline, and in the simulated fleet.
"""

from __future__ import annotations

import functools
from collections.abc import Set

from pillion.gateway.planning.cluster_view import ClusterSnapshot
from pillion.gateway.planning.plan_cost import Demand, FetchPace, FetchPaces
from pillion.gateway.planning.planner import RequestPlan, make_plan

# A worker counts for this long as one that loads an adapter: the heartbeat that names the adapter comes within a second
# of its loading.
SENT_COUNTS_S = 5.0
# At most this many adapters are remembered, those that were sent last.
MAX_SENT_ADAPTERS = 1024


class SentAdapters:
    """Remembers the adapters of one gateway's requests. Sans-IO: every call has the time, in seconds (I9)."""

    def __init__(self) -> None:
        # For each adapter's digest this says until when each worker counts as one that loads it. The adapter that was
        # sent last is the last entry.
        self._until_s: dict[str, dict[str, float]] = {}

    def note(self, digest: str, component_ids: Set[str], now: float) -> None:
        """Notes that a request with an adapter goes to these workers."""
        workers = self._until_s.pop(digest, {})
        self._until_s[digest] = workers | dict.fromkeys(component_ids, now + SENT_COUNTS_S)
        if len(self._until_s) > MAX_SENT_ADAPTERS:
            del self._until_s[next(iter(self._until_s))]

    def forget(self, digest: str, component_id: str) -> None:
        """Notes that a request with an adapter failed at a worker, so nothing shows that the worker has the adapter."""
        self._until_s.get(digest, {}).pop(component_id, None)

    def workers(self, digest: str, now: float) -> Set[str]:
        """Returns workers to which a request with the adapter went within SENT_COUNTS_S."""
        workers = self._until_s.get(digest)
        if workers is None:
            return frozenset()
        for component_id in [name for name, until_s in workers.items() if until_s < now]:
            del workers[component_id]
        return workers.keys()


class RoutePlanner:
    """Plans the requests of one gateway, and remembers what later plans need of them.

    Attributes:
        fetch_paces, bucket_pace: how fast blocks of other nodes, and of a bucket, have come.
        demand: how many requests come, and of what size.
        sent_adapters: workers that load an adapter for this gateway's requests.
    """

    def __init__(self) -> None:
        self.fetch_paces, self.bucket_pace = FetchPaces(), FetchPace()
        self.demand = Demand()
        self.sent_adapters = SentAdapters()

    def plan(self, seen: ClusterSnapshot, now: float, *, gateways: int = 1, first: bool = True) -> RequestPlan:
        """Plans one attempt of a request.

        Args:
            seen: the snapshot; the planner fills in what it remembers.
            now: the time in seconds, always of the same clock.
            gateways: number of gateways; each is assumed to get as many requests as this one.
            first: whether it is the request's first attempt; further ones are no new demand.

        Raises:
            Unavailable: there is nothing that could serve the request.
        """
        every, shared = self.demand.per_s(now)
        seen.fetch_costs = functools.partial(self.fetch_paces.cost, now=now)
        seen.fetch_block_s, seen.bucket_block_s = self.fetch_paces.anywhere.block_s(now), self.bucket_pace.block_s(now)
        seen.demand_per_s = gateways * every, gateways * shared
        seen.decode_lengths, seen.prefill_lengths = self.demand.decode_lengths.now(), self.demand.prefill_lengths.now()
        if seen.adapter:
            seen.own_adapters = self.sent_adapters.workers(seen.adapter, now)
        decided = make_plan(seen)
        if seen.adapter:
            workers = {decided.decode.component_id}
            if decided.prefill is not None and decided.chunks:
                workers.add(decided.prefill.component_id)
            self.sent_adapters.note(seen.adapter, workers, now)
        if first:
            whole = decided.on_prefill_worker
            split = decided.prompt_tokens if whole else decided.split_tokens
            self.demand.note(now, split - decided.cached_tokens, decided.prompt_tokens - split)
        return decided
