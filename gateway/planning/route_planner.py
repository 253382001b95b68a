"""Plans routes with what a gateway remembers of its own earlier requests. Sans-IO (I9).

    what is seen now (ClusterSnapshot) --with what is remembered--> make_plan --what was decided--> memory

A gateway has one planner for all of its requests: in the services, offline, and in the simulated fleet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Set

from pillion.gateway.planning.cluster_view import ClusterSnapshot
from pillion.gateway.planning.plan_cost import FetchCost
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


class FetchPace:
    """Measures, with decaying weights, how fast this gateway's fetches bring blocks from one kind of source. Times are
    in seconds of one clock.

    A slow source is not asked, so nothing more is learnt of it. Its speed is therefore assumed to rise while nobody
    asks it, until one request tries it again, at a bounded cost (LEAST_FETCH_S).
    """

    FADING = 0.9
    # For each HALVING_S seconds without a fetch, a block is assumed to take half as long as before, but no more than
    # MAX_HALVINGS times.
    HALVING_S = 60.0
    MAX_HALVINGS = 10
    # Fetches of about one size do not tell the time of a call from that of a block. Least squares therefore also count
    # a line without a call time, with this share of the squared mean size as its weight.
    PROPORTIONAL = 0.01

    def __init__(self) -> None:
        self._count = 0.0
        self._blocks = 0.0
        self._squares = 0.0
        self._seconds = 0.0
        self._products = 0.0
        self._seen_s = 0.0

    def observe(self, blocks: int, seconds: float, now: float) -> None:
        """Notes a fetch that brought ``blocks`` blocks in ``seconds``, and ended ``now``. A fetch that brought no block
        counts too, but not one of 0 seconds, which has asked no source."""
        if seconds <= 0:
            return
        # The time of a fetch that brought nothing makes all other fetches dearer by as much, whatever their sizes.
        size = blocks if blocks > 0 else self._blocks / max(self._count, 1.0)
        self._count = self._count * self.FADING + (blocks > 0)
        self._blocks = self._blocks * self.FADING + blocks
        self._squares = self._squares * self.FADING + blocks * blocks
        self._seconds = self._seconds * self.FADING + seconds
        self._products = self._products * self.FADING + size * seconds
        self._seen_s = now

    def block_s(self, now: float) -> float:
        """Returns the seconds that a block takes, with its share of the calls; 0.0 before any fetch ended. Where
        fetches have brought no block yet, all their time counts as that of one block."""
        return self._seconds / max(self._blocks, 1.0) * self._faded(now)

    def cost(self, now: float) -> FetchCost:
        """Returns the line through the fetches seen, by least squares; neither of its two numbers is negative."""
        if self._blocks < 1.0:
            return FetchCost(0.0, self.block_s(now))
        size, taken_s = self._blocks / self._count, self._seconds / self._count
        pull = self.PROPORTIONAL * size * size
        spread = max(0.0, self._squares / self._count - size * size)
        slope = (self._products / self._count - size * taken_s + pull * taken_s / size) / (spread + pull)
        slope = min(max(0.0, slope), taken_s / size)
        faded = self._faded(now)
        return FetchCost(max(0.0, taken_s - slope * size) * faded, slope * faded)

    def _faded(self, now: float) -> float:
        silent_s = max(0.0, now - self._seen_s)
        return math.exp2(-min(silent_s / self.HALVING_S, self.MAX_HALVINGS))


class FetchPaces:
    """Holds the pace of each pair of nodes between which this gateway's requests fetched blocks: links differ.

    Attributes:
        anywhere: the pace over all pairs, which a pair is assumed to have that was never measured.
    """

    # The pair that was measured longest ago is forgotten for a further one.
    MAX_PAIRS = 4096

    def __init__(self) -> None:
        self.anywhere = FetchPace()
        self._pairs: dict[tuple[str, str], FetchPace] = {}

    def observe(self, source: str, target: str, blocks: int, seconds: float, now: float) -> None:
        """Notes a fetch to the node ``target`` that asked ``source`` first: that is what a plan has to foretell. Its
        ``seconds`` are those of the gateway's call, by which far nodes differ from near ones too."""
        if seconds <= 0:
            return
        self.anywhere.observe(blocks, seconds, now)
        pace = self._pairs.pop((source, target), None) or FetchPace()
        pace.observe(blocks, seconds, now)
        self._pairs[source, target] = pace
        if len(self._pairs) > self.MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]

    def cost(self, source: str, target: str, now: float) -> FetchCost | None:
        """Returns what a fetch from ``source`` to ``target`` costs; None where none was measured."""
        pace = self._pairs.get((source, target))
        return None if pace is None else pace.cost(now)


class RoutePlanner:
    """Plans the requests of one gateway, and remembers what later plans need of them.

    Attributes:
        fetch_paces, bucket_pace: how fast blocks of other nodes, and of a bucket, have come.
        sent_adapters: workers that load an adapter for this gateway's requests.
    """

    def __init__(self) -> None:
        self.fetch_paces, self.bucket_pace = FetchPaces(), FetchPace()
        self.sent_adapters = SentAdapters()

    def plan(self, seen: ClusterSnapshot, now: float) -> RequestPlan:
        """Plans one attempt of a request. ``seen`` is the snapshot, into which the planner fills what it remembers;
        ``now`` is the time in seconds, always of the same clock. Raises Unavailable where there is nothing that could
        serve the request."""
        seen.fetch_costs = functools.partial(self.fetch_paces.cost, now=now)
        seen.fetch_block_s, seen.bucket_block_s = self.fetch_paces.anywhere.block_s(now), self.bucket_pace.block_s(now)
        if seen.adapter:
            seen.own_adapters = self.sent_adapters.workers(seen.adapter, now)
        decided = make_plan(seen)
        if seen.adapter:
            workers = {decided.decode.component_id}
            if decided.prefill is not None and decided.chunks:
                workers.add(decided.prefill.component_id)
            self.sent_adapters.note(seen.adapter, workers, now)
        return decided
