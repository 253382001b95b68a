"""Planner of a gateway: plans requests, with statistics of earlier ones. Sans-IO (I9).

    ClusterSnapshot --with statistics--> make_plan --decision--> statistics

A gateway has one RoutePlanner for all of its requests, in the services, offline and in the simulated fleet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Set

from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot
from pillion.gateway.planning.plan_cost import FetchCost
from pillion.gateway.planning.planner import RequestPlan, make_plan

SENT_COUNTS_S = 5.0
MAX_SENT_ADAPTERS = 1024


class SentAdapters:
    """Workers to which requests with an adapter were sent recently, and which therefore have or load it. Times are
    seconds of one clock."""

    def __init__(self) -> None:
        # By the adapter's digest and component id: when the entry expires.
        self._until_s: dict[str, dict[str, float]] = {}

    def note(self, digest: str, component_ids: Set[str], now: float) -> None:
        """Record that a request with the adapter of this digest was sent to these workers."""
        workers = self._until_s.pop(digest, {})
        self._until_s[digest] = workers | dict.fromkeys(component_ids, now + SENT_COUNTS_S)
        if len(self._until_s) > MAX_SENT_ADAPTERS:
            del self._until_s[next(iter(self._until_s))]

    def forget(self, digest: str, component_id: str) -> None:
        """Record that a request with the adapter failed at a worker, which may therefore lack the adapter."""
        self._until_s.get(digest, {}).pop(component_id, None)

    def workers(self, digest: str, now: float) -> Set[str]:
        """Return the workers to which a request with the adapter was sent within SENT_COUNTS_S."""
        workers = self._until_s.get(digest)
        if workers is None:
            return frozenset()
        for component_id in [name for name, until_s in workers.items() if until_s < now]:
            del workers[component_id]
        return workers.keys()


class FetchPace:
    """Speed of fetches from one source, with exponential decay. Times are seconds of one clock.

    A slow source is not used, so it is not measured again. Its speed is therefore assumed to rise while unused, until
    a request tries it again, at a bounded cost (MIN_FETCH_S).
    """

    # Weight of a fetch relative to that of the next one.
    DECAY = 0.9
    # The time per block is assumed to halve per HALVING_S without a fetch, at most MAX_HALVINGS times.
    HALVING_S = 60.0
    MAX_HALVINGS = 10
    # Fetches of similar sizes do not separate the time per call from that per block. So the least squares are
    # regularized towards a line through the origin, with this share of the squared mean size as its weight.
    PROPORTIONAL = 0.01

    def __init__(self) -> None:
        self._count = 0.0
        self._blocks = 0.0
        self._squares = 0.0
        self._seconds = 0.0
        self._products = 0.0
        self._last_s = 0.0

    def observe(self, blocks: int, seconds: float, now: float) -> None:
        """Record a fetch of ``blocks`` blocks in ``seconds`` that ended at ``now``. A fetch without blocks counts,
        unless it took 0 seconds, i.e. asked no source."""
        if seconds <= 0:
            return
        # A fetch without blocks counts with the mean size, so that its time raises the cost of fetches of any size.
        size = blocks if blocks > 0 else self._blocks / max(self._count, 1.0)
        self._count = self._count * self.DECAY + (blocks > 0)
        self._blocks = self._blocks * self.DECAY + blocks
        self._squares = self._squares * self.DECAY + blocks * blocks
        self._seconds = self._seconds * self.DECAY + seconds
        self._products = self._products * self.DECAY + size * seconds
        self._last_s = now

    def block_s(self, now: float) -> float:
        """Return the seconds per block, calls included; 0.0 before any fetch. Until a block was fetched, the whole time
        counts as that of one block."""
        return self._seconds / max(self._blocks, 1.0) * self._staleness(now)

    def cost(self, now: float) -> FetchCost:
        """Return the least-squares fit to the fetches, both coefficients at least 0."""
        if self._blocks < 1.0:
            return FetchCost(0.0, self.block_s(now))
        size, taken_s = self._blocks / self._count, self._seconds / self._count
        weight = self.PROPORTIONAL * size * size
        spread = max(0.0, self._squares / self._count - size * size)
        slope = (self._products / self._count - size * taken_s + weight * taken_s / size) / (spread + weight)
        slope = min(max(0.0, slope), taken_s / size)
        staleness = self._staleness(now)
        return FetchCost(max(0.0, taken_s - slope * size) * staleness, slope * staleness)

    def _staleness(self, now: float) -> float:
        """Return the factor, at most 1, on times that were last measured some time ago."""
        silent_s = max(0.0, now - self._last_s)
        return math.exp2(-min(silent_s / self.HALVING_S, self.MAX_HALVINGS))


class FetchPaces:
    """Fetch speed of each pair of nodes, since network links differ.

    Attributes:
        overall: speed over all pairs, assumed for pairs without a measurement.
    """

    MAX_PAIRS = 4096

    def __init__(self) -> None:
        self.overall = FetchPace()
        self._pairs: dict[tuple[str, str], FetchPace] = {}

    def observe(self, source: str, target: str, blocks: int, seconds: float, now: float) -> None:
        """Record a fetch to the node ``target`` that asked the node ``source`` first, as plans predict it. ``seconds``
        is the duration of the gateway's call, so it includes the gateway's round trip."""
        if seconds <= 0:
            return
        self.overall.observe(blocks, seconds, now)
        pace = self._pairs.pop((source, target), None) or FetchPace()
        pace.observe(blocks, seconds, now)
        self._pairs[source, target] = pace
        if len(self._pairs) > self.MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]

    def cost(self, source: str, target: str, now: float) -> FetchCost | None:
        """Return the cost of a fetch from the node ``source`` to the node ``target``; None if never measured."""
        pace = self._pairs.get((source, target))
        return None if pace is None else pace.cost(now)


class RoutePlanner:
    """Planner of one gateway's requests, with statistics for later plans.

    Attributes:
        fetch_paces, bucket_pace: speeds of fetches from other nodes, and from buckets.
        sent_adapters: workers that have or load an adapter for this gateway's requests.
    """

    def __init__(self) -> None:
        self.fetch_paces, self.bucket_pace = FetchPaces(), FetchPace()
        self.sent_adapters = SentAdapters()

    def plan(self, snapshot: ClusterSnapshot, now: float) -> RequestPlan:
        """Plan one attempt of a request. Adds the statistics to ``snapshot``; ``now`` is in seconds of one clock.
        Raises Unavailable if no worker can serve the request."""
        snapshot.fetch_costs = functools.partial(self.fetch_paces.cost, now=now)
        snapshot.fetch_block_s, snapshot.bucket_block_s = (
            self.fetch_paces.overall.block_s(now),
            self.bucket_pace.block_s(now),
        )
        if snapshot.adapter:
            snapshot.own_adapters = self.sent_adapters.workers(snapshot.adapter, now)
        plan = make_plan(snapshot)
        if snapshot.adapter:
            workers = {plan.decode.component_id}
            if plan.prefill is not None and plan.chunks:
                workers.add(plan.prefill.component_id)
            self.sent_adapters.note(snapshot.adapter, workers, now)
        return plan
