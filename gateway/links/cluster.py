"""The gateway's view of the cluster, polled from the registry, and its links: one per component."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pillion.errors import PillionError, Unavailable
from pillion.gateway.admission.answer_times import DecodeFleet
from pillion.gateway.admission.turns import shared_slots
from pillion.gateway.links.decode_link import DecodeLink
from pillion.gateway.links.load_exchange import LoadExchange, OwnLoad
from pillion.gateway.links.node_link import NodeLink
from pillion.gateway.links.outage import ModelKey, OutageWaiters
from pillion.gateway.links.prefill_link import PrefillLink
from pillion.gateway.planning.cluster_snapshot import NO_STATES, StatePages
from pillion.gateway.planning.cluster_view import ClusterView, choose_by_hits, choose_workers
from pillion.gateway.planning.plan_cost import FETCH_CALL_S, median_model
from pillion.gateway.planning.route_planner import RoutePlanner
from pillion.gateway.request.events import TicketHold
from pillion.kvstore.hashing import HASH_BYTES
from pillion.kvstore.index.index import Index, PrefixHits
from pillion.kvstore.index.shared_loads import SharedLoads
from pillion.observability import telemetry
from pillion.tasks import end_tasks
from pillion.types import WORKERS
from pillion.v1.kvnode_pb2 import PrefetchReply
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.gateway")

P = ParamSpec("P")
T = TypeVar("T")

VIEW_POLL_S = 0.25
# Timeout of a fetch if the KV node hangs; the node itself enforces a shorter one.
MAX_FETCH_S = 5.0
# Min number of blocks that no node has for which a bucket is asked, and the call's timeout.
MIN_ASKED_BLOCKS = 8
MAX_FIND_MS = 500
# Wait of a request for a worker that is just starting.
FIRST_LOOK_S = 0.5
# Max wait of a request for lost components that a supervisor restarts: MIN_RETURN_WAIT_S plus RETURN_WAIT_STARTS times
# the workers' longest start, at most MAX_RETURN_WAIT_S. Two new processes, a KV node's and then a worker's, take some
# 6 s on two idle cores and more than 30 s on busy ones. Then the worker loads its model, which takes as long as its
# last start (in its record), or longer if the files are no longer in the page cache.
MIN_RETURN_WAIT_S, RETURN_WAIT_STARTS, MAX_RETURN_WAIT_S = 45.0, 5, 600.0


Link = NodeLink | PrefillLink | DecodeLink
LINKS: dict[str, type[Link]] = {"kvnode": NodeLink, "prefill": PrefillLink, "decode": DecodeLink}


class ComponentDirectory(Protocol):
    """Records of live components: from the registry or, in a process that has all components itself, from a list.

    Attributes:
        refusal: why the registry accepts no heartbeats now, so that its records are old; "" if it accepts them.
    """

    refusal: str

    async def components(self) -> list[ComponentRecord]:
        """Return the records of all live components. Raises Unavailable."""

    async def aclose(self) -> None:
        """Close the directory's connections."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model as served by the workers that share one kind of KV: they can continue each other's work.

    Attributes:
        adapter_rank: max rank of the adapters that the workers must run; 0 if only the model is needed.
        states: slots of the model's states.
    """

    model: str
    fingerprint: str
    namespace: bytes
    block_size: int
    adapter_rank: int = 0
    states: StatePages = NO_STATES

    def includes(self, worker: ComponentRecord) -> bool:
        """Return whether a worker of the model uses this kind of KV, and runs adapters of this rank."""
        rank = self.adapter_rank
        if rank and not (worker.max_loras and worker.max_lora_rank >= rank):
            return False
        return worker.fingerprint in ("", self.fingerprint) and worker.namespace == self.namespace.hex()


def _cached_per_version(method: Callable[Concatenate[Cluster, P], T]) -> Callable[Concatenate[Cluster, P], T]:
    """Decorate a method: cache its result until the cluster's view changes."""

    @wraps(method)
    def cached(cluster: Cluster, /, *arguments: P.args, **named: P.kwargs) -> T:
        if cluster._cache_version != cluster.view.version:
            cluster._cache, cluster._cache_version = {}, cluster.view.version
        key = method.__name__, arguments
        if key not in cluster._cache:
            cluster._cache[key] = method(cluster, *arguments, **named)
        result: T = cluster._cache[key]
        return result

    return cached


class Cluster:
    """A gateway's view of the cluster, and its links. ``start`` begins to poll the registry; ``aclose`` closes all
    connections, including those of registry and index.

    ``index`` is None with a single node, whose own answer is enough (I3). ``shared_loads`` exchanges load between
    gateways; None with a single gateway.
    """

    def __init__(
        self,
        gateway_id: str,
        registry: ComponentDirectory,
        index: Index | None,
        grace_s: float,
        shared_loads: SharedLoads | None = None,
    ) -> None:
        self.index = index
        self.load = OwnLoad()
        self._exchange = LoadExchange(gateway_id, self.load, shared_loads, self._other_gateway_ids)
        self.routes = RoutePlanner()
        self.view = ClusterView(grace_s)
        self.gateway_id = gateway_id
        self.registry = registry
        self._links: dict[str, dict[str, Link]] = {role: {} for role in LINKS}
        # By model and max rank of adapters: when the registry last had such a decode worker and a KV node, and the
        # longest start of these workers in seconds.
        self._starts: dict[tuple[str, int], tuple[float, float]] = {}
        self._waiters = OutageWaiters(self.refresh, self._find_served, self._wait_limit_s)
        self._polling = asyncio.Lock()
        self._poller: asyncio.Task[None] | None = None
        self._closing: dict[asyncio.Task[None], None] = {}
        # The view's ``topology_version`` for which the links are up to date; -1 to check them at the next poll.
        self._synced_topology = -1
        self._cache: dict[tuple[str, tuple[object, ...]], Any] = {}
        self._cache_version = -1

    async def start(self) -> None:
        """Poll the registry once now, and then periodically."""
        await self.refresh()
        self._exchange.start()
        self._poller = asyncio.create_task(self._poll(), name="registry view")

    async def aclose(self) -> None:
        await end_tasks(self._poller)
        await self._waiters.aclose()
        await self._exchange.aclose()
        links = [link for links in self._links.values() for link in links.values()]
        await asyncio.gather(*(link.aclose() for link in links), *self._closing, return_exceptions=True)
        await asyncio.gather(*(one.aclose() for one in (self.registry, self.index) if one), return_exceptions=True)

    async def refresh(self) -> None:
        """Poll the registry now. If it does not answer, or accepts no heartbeats, the records of connected components
        are kept."""
        async with self._polling:
            try:
                records = await self.registry.components()
            except PillionError as error:
                log.debug("the registry does not answer, so the last view is kept: %s", error.message)
                self.view.keep(self._connected(), time.monotonic())
                return
            now = time.monotonic()
            if self.registry.refusal:
                self.view.keep(self._connected(), now)
            self._close_fenced(self.view.update(records, now))
            self._record_starts(now)
            self._sync()

    def served(self, model: str, fingerprint: str, adapter_rank: int = 0) -> Served:
        """Return how ``model``, with adapters of a rank, is served now, by the most common kind of KV that a reachable
        worker uses. Raises Unavailable, which names what is missing."""
        for served in self._kinds_of_kv(model, fingerprint):
            served = replace(served, adapter_rank=adapter_rank) if adapter_rank else served
            if any(served.includes(worker) and self._usable(worker) for worker in self.view.of("decode", model)):
                return served
        wanted = f" that runs adapters of rank {adapter_rank} (--enable-lora, --max-lora-rank)" if adapter_rank else ""
        raise Unavailable(f"no decode worker of model {model!r} lives{wanted}{self.blind_spot()}")

    @_cached_per_version
    def _kinds_of_kv(self, model: str, fingerprint: str) -> list[Served]:
        """Return the model as served by each kind of KV of its workers, the most common first. Workers of two releases
        may have different KV layouts, and a request stays with workers of one kind."""
        workers = [one for one in self.view.of("decode", model) if one.fingerprint in ("", fingerprint)]
        states = [one for one in workers if one.namespace]
        spaces = Counter((one.namespace, one.block_size_tokens, one.state_pages, one.working_pages) for one in states)
        ranked = sorted(spaces, key=lambda space: (spaces[space], space), reverse=True)
        return [
            Served(model, fingerprint, bytes.fromhex(namespace), size, states=StatePages(one, running))
            for namespace, size, one, running in ranked
        ]

    def keeps_states(self, model: str) -> bool:
        """Return whether the model has states (hybrid models), according to its workers' records."""
        return any(worker.state_pages for worker in self.view.of("decode", model))

    def answering(self, role: str) -> frozenset[str]:
        """Return the ids of a role's components that can be called now and have not failed recently."""
        return frozenset(one.component_id for one in self.view if one.role == role and self._usable(one))

    def lacks_node(self, served: Served) -> bool:
        """Return whether no decode worker has a live KV node."""
        return not any(self._fits(worker, served, 0) for worker in self.view.of("decode", served.model))

    def candidates(
        self,
        served: Served,
        tokens: int,
        hits: Mapping[str, int] | None = None,
        spread: int = 0,
        adapter: str = "",
    ) -> tuple[ComponentRecord, ...]:
        """Return the components to plan a request with: usable workers, at most MAX_CANDIDATES per role, and nodes.

        Args:
            tokens: max tokens of prompt and answer; nodes with a smaller pool are left out.
            hits: leading blocks of the prompt on each node, by node id.
            spread: a number that differs between requests.
            adapter: digest of the request's adapter, "" for none; workers that have it are preferred.

        Raises Unavailable if every pool is too small. If all nodes are gone, only workers are returned.
        """
        decodes, prefills, names = choose_by_hits(
            lambda role, nodes: self._choose(role, served, tokens, nodes, spread, adapter), hits or {}, spread
        )
        if not decodes:
            usable = [one for one in self.view.of("decode", served.model) if served.includes(one) and self._usable(one)]
            if any(self._live_node(one.node_id) for one in usable):
                raise Unavailable(f"no KV node lives whose pool holds {tokens} tokens of model {served.model!r}")
            return tuple(usable)
        nodes = [node for node in map(self._live_node, names) if node is not None]
        now = time.monotonic()
        return (*nodes, *(self.view.aged_one(worker, now) for worker in (*decodes, *prefills)))

    def _choose(
        self, role: str, served: Served, tokens: int, nodes: Iterable[str], spread: int, adapter: str
    ) -> list[ComponentRecord]:
        """Return the workers of a role that can serve a request, at most MAX_CANDIDATES, those on ``nodes`` first
        (:func:`choose_workers`)."""

        def workers_near_prefix() -> Iterator[ComponentRecord]:
            records = (one for node_id in nodes for one in self.view.on_node(node_id))
            return (one for one in records if (one.role, one.model) == (role, served.model))

        ready: Callable[[ComponentRecord], bool] | None = None
        if adapter:
            sent = self.routes.sent_adapters.workers(adapter, time.monotonic())
            ready = lambda one: adapter in one.adapters or one.component_id in sent  # noqa: E731
        workers = self.view.of(role, served.model)
        fits = partial(self._fits, served=served, tokens=tokens)
        return choose_workers(workers, workers_near_prefix, spread, fits, ready)

    def _fits(self, worker: ComponentRecord, served: Served, tokens: int) -> bool:
        """Return whether a worker and its node can serve a request of ``tokens`` tokens now."""
        if not served.includes(worker):
            return False
        node = self._live_node(worker.node_id)
        return node is not None and not 0 < node.total_blocks * served.block_size < tokens and self._usable(worker)

    def _live_node(self, node_id: str) -> ComponentRecord | None:
        node = self.view.node(node_id)
        return node if node is not None and self._usable(node) else None

    def _usable(self, component: ComponentRecord) -> bool:
        return self.answers(component) and self.view.trusts(component.component_id, time.monotonic())

    async def served_soon(self, model: str, fingerprint: str, adapter_rank: int = 0) -> Served:
        """Return how ``model``, with adapters of a rank, is served, for a new request. Waits up to FIRST_LOOK_S for
        components that are starting, or up to :meth:`return_wait_s` for components that were lost recently. Raises
        Unavailable."""
        with contextlib.suppress(Unavailable):
            served, complete = self._find_served((model, fingerprint, adapter_rank))
            if complete:
                return served
        return await self._waiters.wait((model, fingerprint, adapter_rank))

    @_cached_per_version
    def request_slots(self, model: str) -> int:
        """Return the max requests of this gateway at the model's workers: its share of the decode workers' slots, plus
        some spare ones. 0 while a worker does not report its slots.

        The share is even, plus the part of the other gateways' shares that was unused at their last heartbeats, since
        clients' connections are not distributed evenly.
        """
        others = [other.running_requests for other in self.other_gateways()]
        return shared_slots(self._records("decode", model), others)

    @_cached_per_version
    def decode_fleet(self, model: str) -> DecodeFleet | None:
        """Return the model's decode workers, to predict answer times; None until one has measured its steps."""
        workers = self._records("decode", model)
        measured = median_model(workers)
        others = sum(other.running_requests for other in self.other_gateways())
        return measured and DecodeFleet(measured, len(workers), others)

    def other_gateways(self) -> list[ComponentRecord]:
        """Return the other live gateways."""
        return [record for record in self.view.of("gateway") if record.component_id != self.gateway_id]

    def _other_gateway_ids(self) -> list[str]:
        return [record.component_id for record in self.other_gateways()]

    async def under_way(self, components: Iterable[ComponentRecord]) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the load of all gateways on these workers, by component id: OwnLoad's ``by_component`` and
        ``tokens``."""
        return await self._exchange.with_others([one.component_id for one in components if one.role in WORKERS])

    @_cached_per_version
    def pools_tokens(self, model: str) -> list[int]:
        """Return the pool size in tokens of each of the model's decode workers; 0 if unknown."""
        blocks = {node.node_id: node.total_blocks for node in self._records("kvnode")}
        return [blocks.get(worker.node_id, 0) * worker.block_size_tokens for worker in self._records("decode", model)]

    def queued_requests(self, model: str) -> int:
        """Estimate how many of this gateway's streams wait in decode workers' queues: its share of each queue."""
        shares = 0.0
        for worker in self._records("decode", model):
            streams = worker.running_requests + worker.waiting_requests
            own = self.load.by_component[worker.component_id]
            shares += worker.waiting_requests * min(1.0, own / streams) if streams else 0.0
        return round(shares)

    def kv_usage(self, model: str) -> float | None:
        """Return the fraction of slots in use, i.e. not available to a new prompt, over the pools of the model's
        workers; None if no pool is known."""
        used = {one.node_id for role in WORKERS for one in self._records(role, model)}
        nodes = [node for node in self._records("kvnode") if node.node_id in used]
        in_use = sum(node.leased_blocks + node.quarantined_blocks + node.pinned_blocks for node in nodes)
        total = sum(node.total_blocks for node in nodes)
        return min(1.0, in_use / total) if total else None

    def blind_spot(self) -> str:
        """Return a suffix for error messages while the registry accepts no heartbeats; "" otherwise."""
        if not self.registry.refusal:
            return ""
        return f"; the registry accepts no heartbeats, so new components are not found: {self.registry.refusal}"

    def _records(self, role: str, model: str = "") -> list[ComponentRecord]:
        """Return the records of a role. While the registry accepts no heartbeats, and so still lists dead components,
        only those of components that can be called."""
        records = self.view.of(role, model)
        return list(filter(self.answers, records)) if self.registry.refusal else records

    def _connected(self) -> list[str]:
        """Return the ids of components that this gateway is connected to, and of all gateways."""
        records = self.view.records()
        return [record.component_id for record in records if record.role == "gateway" or self.answers(record)]

    def _record_starts(self, now: float) -> None:
        """Record that the models on record are served now, and how long their workers took to start."""
        if self.view.of("kvnode"):
            workers = (worker for model in self.view.models() for worker in self.view.of("decode", model))
            starts_s: dict[tuple[str, int], float] = {}
            for worker in workers:
                key = worker.model, worker.max_lora_rank if worker.max_loras else 0
                starts_s[key] = max(starts_s.get(key, 0.0), worker.start_s)
            self._starts.update({key: (now, start_s) for key, start_s in starts_s.items()})

    def _find_served(self, key: ModelKey) -> tuple[Served, bool]:
        """Return how a model is served, and whether a decode worker has a live KV node. Raises Unavailable."""
        served = self.served(*key)
        return served, not self.lacks_node(served)

    def _wait_limit_s(self, key: ModelKey) -> float:
        """Return how long a request waits for a model: longer if the model was served recently."""
        model, _, adapter_rank = key
        wait_s = self.return_wait_s(model, adapter_rank)
        last_s = max((at_s for at_s, _ in self._recorded_starts(model, adapter_rank)), default=-math.inf)
        return wait_s if time.monotonic() - last_s < wait_s else FIRST_LOOK_S

    def return_wait_s(self, model: str, adapter_rank: int = 0) -> float:
        """Return the max wait in seconds for lost components of the model: longer if its workers start slowly."""
        start_s = max((start_s for _, start_s in self._recorded_starts(model, adapter_rank)), default=0.0)
        return min(MAX_RETURN_WAIT_S, MIN_RETURN_WAIT_S + RETURN_WAIT_STARTS * start_s)

    def _recorded_starts(self, model: str, adapter_rank: int) -> list[tuple[float, float]]:
        return [at for (name, rank), at in self._starts.items() if name == model and rank >= adapter_rank]

    def node(self, node_id: str) -> NodeLink:
        """Return the link to a KV node with an open session. Raises Unavailable."""
        link = self._links["kvnode"].get(node_id)
        if not isinstance(link, NodeLink):
            raise Unavailable(f"KV node {node_id} is gone")
        if not link.alive:
            raise Unavailable(f"KV node {node_id} does not answer")
        return link

    def holds(self, hold: TicketHold) -> bool:
        """Return whether the ticket still exists, i.e. its session is open."""
        link = self._links["kvnode"].get(hold.node_id)
        return isinstance(link, NodeLink) and link.alive and link.epoch == hold.epoch

    def node_lives(self, node_id: str) -> bool:
        link = self._links["kvnode"].get(node_id)
        return link is not None and link.alive

    def nodes(self) -> list[NodeLink]:
        return [link for link in self._links["kvnode"].values() if isinstance(link, NodeLink)]

    def prefill(self, component_id: str) -> PrefillLink:
        """Return the link to a prefill worker. Raises Unavailable."""
        link = self._links["prefill"].get(component_id)
        if not isinstance(link, PrefillLink) or component_id in self.view.fenced:
            raise Unavailable(f"prefill worker {component_id} is gone")
        return link

    def decode(self, component_id: str) -> DecodeLink:
        """Return the connection for streams to a worker. Raises Unavailable."""
        link = self._links["decode"].get(component_id)
        if not isinstance(link, DecodeLink) or component_id in self.view.fenced:
            raise Unavailable(f"worker {component_id} is gone")
        return link

    def text_workers(self, components: Iterable[ComponentRecord]) -> frozenset[str]:
        """Return the ids of the prefill workers among ``components`` that can compute vectors of whole texts now."""
        # Check the role: a worker restarted in another role may keep its former connection for a moment.
        prefills = (one.component_id for one in components if one.role == "prefill" and one.gives_vectors)
        return frozenset(one for one in prefills if (link := self._links["decode"].get(one)) is not None and link.alive)

    def text_step_tokens(self, served: Served) -> int:
        """Return the sum of the step sizes, in tokens, of the workers that compute whole texts; 0 if one does not
        report it."""
        workers = [one for role in ("prefill", "decode") for one in self.view.of(role, served.model)]
        usable = [one for one in workers if served.includes(one) and self._usable(one)]
        texts = self.text_workers(usable)
        chosen = [one for one in usable if one.component_id in texts] or [one for one in usable if one.role == "decode"]
        steps = [one.max_step_tokens for one in chosen]
        return sum(steps) if all(steps) else 0

    @property
    def index_available(self) -> bool:
        """True if the index answered the last look-up, or there is no index."""
        return self.index is None or self.index.available

    async def hits(self, served: Served, hashes: bytes) -> PrefixHits:
        """Return the cached prefixes of a chain of block hashes according to the index; for a model with states, those
        that end with a state. Never raises."""
        if self.index is None:
            return PrefixHits([])
        if served.states.one:
            return await self.index.longest_state(hashes)
        return PrefixHits(await self.index.longest_prefix(hashes))

    async def bucket_hits(
        self, hashes: bytes, hits: Mapping[str, int], components: Sequence[ComponentRecord], state_pages: int = 0
    ) -> dict[str, int]:
        """Return the leading blocks that the nodes of the decode workers among ``components`` can have if they fetch
        from their buckets, by node id; for a model with ``state_pages`` pages per state, up to the last state. Only
        nodes that gain blocks over all ``hits`` are included. Asks one node per bucket, with a timeout. Never
        raises."""
        known = max(hits.values(), default=0)
        buckets = any(record.object_url for record in components)
        if not buckets or len(hashes) // HASH_BYTES - known < MIN_ASKED_BLOCKS:
            return {}
        return await self._ask_buckets(hashes, known, components, state_pages)

    async def _ask_buckets(
        self, hashes: bytes, known: int, components: Sequence[ComponentRecord], state_pages: int
    ) -> dict[str, int]:
        readers: dict[str, list[str]] = {}
        # Skip KV nodes of other models.
        used = {record.node_id for record in components if record.role == "decode"}
        for record in components:
            if record.role == "kvnode" and record.object_url and record.node_id in used:
                readers.setdefault(record.object_url, []).append(record.node_id)
        reachable: dict[str, int] = {}

        async def ask(node_ids: list[str]) -> None:
            try:
                # Requests with the same prompt ask the same node, which caches the bucket's answer.
                client = self.node(node_ids[hashes[-1] % len(node_ids)]).client
                timeout_s = MAX_FIND_MS / 1000
                more = await client.find_blocks(hashes, known, timeout_s=timeout_s, state_pages=state_pages)
            except PillionError as error:
                log.debug("a bucket could not be asked: %s", error.message)
                return
            if more:
                reachable.update(dict.fromkeys(node_ids, known + more))

        await asyncio.gather(*map(ask, readers.values()))
        return reachable

    async def fetch_blocks(
        self, hold: TicketHold, hashes: bytes, sources: Sequence[str], pinned_blocks: int, left_s: float | None
    ) -> PrefetchReply:
        """Have a KV node fetch blocks under a ticket; return the node's reply. Never raises: missing blocks are
        computed (I1).

        Args:
            hashes: block hashes from the prompt's first block on, 32 bytes each.
            sources: other nodes that probably have the blocks, best first.
            pinned_blocks: leading blocks already pinned by the ticket; the reply counts at least these.
            left_s: the request's remaining time, None for no limit.
        """
        wait_s = MAX_FETCH_S if left_s is None else min(left_s, MAX_FETCH_S)
        with telemetry.tracer().start_as_current_span("kv.fetch") as span:
            span.set_attributes({"pillion.node": hold.node_id, "pillion.sources": tuple(sources)})
            begun_s = time.monotonic()
            try:
                client = self.node(hold.node_id).client
                brought = await client.prefetch(hold.epoch, hold.ticket_id, hashes, sources, timeout_s=wait_s)
            except PillionError as error:
                log.debug("KV node %s fetched nothing: %s", hold.node_id, error.message)
                span.set_attribute("error.type", type(error).__name__)
                return PrefetchReply(blocks=pinned_blocks)
            now = time.monotonic()
            if sources and brought.fetched_ms:
                # If blocks also came from lower tiers, the call took longer than the fetch from other nodes.
                all_fetched = brought.blocks - pinned_blocks == brought.fetched_blocks
                taken_s = now - begun_s if all_fetched else brought.fetched_ms / 1000 + FETCH_CALL_S
                self.routes.fetch_paces.observe(sources[0], hold.node_id, brought.fetched_blocks, taken_s, now)
            self.routes.bucket_pace.observe(brought.bucket_blocks, brought.bucket_ms / 1000, now)
            span.set_attribute("pillion.fetched_blocks", brought.fetched_blocks)
            span.set_attribute("pillion.restored_blocks", brought.restored_blocks)
            span.set_attribute("pillion.bucket_blocks", brought.bucket_blocks)
        brought.blocks = max(pinned_blocks, min(brought.blocks, len(hashes) // HASH_BYTES))
        return brought

    def answers(self, component: ComponentRecord) -> bool:
        """Return whether a component can be called now: its link is alive, and it is not fenced."""
        if component.component_id in self.view.fenced:
            return False
        link = self._links.get(component.role, {}).get(_link_name(component))
        return link is not None and link.alive

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(VIEW_POLL_S)
            try:
                await self.refresh()
            except Exception:
                log.exception("polling the registry failed")

    def _sync(self) -> None:
        """Open and close links to match the view. A component that moved gets a new link. The link of a component
        without a record stays while it is alive, for the requests on it."""
        if self._synced_topology == self.view.topology_version:
            return
        wanted: dict[str, dict[str, ComponentRecord]] = {role: {} for role in LINKS}
        for record in self.view:
            for role in _link_roles(record):
                wanted[role][_link_name(record)] = record
        self._synced_topology = self.view.topology_version
        for role, links in self._links.items():
            for name in links.keys() - wanted[role].keys():
                if links[name].alive:
                    self._synced_topology = -1
                else:
                    self._close(links.pop(name))
            for name, record in wanted[role].items():
                if name in links and links[name].address != record.address:
                    self._close(links.pop(name))
                if name not in links:
                    links[name] = LINKS[role](record, self.gateway_id)

    def _close_fenced(self, component_ids: frozenset[str]) -> None:
        """Close the links of workers that were fenced, so that requests on them fail and are replayed. New links follow
        at the next sync, since a fenced worker may return."""
        for component_id in component_ids:
            for role in WORKERS:
                if (link := self._links[role].pop(component_id, None)) is not None:
                    self._synced_topology = -1
                    log.warning("%s is fenced by its KV node; its requests are replayed on other workers", component_id)
                    self._close(link)

    def _close(self, link: Link) -> None:
        closing = asyncio.create_task(link.aclose())
        self._closing[closing] = None
        closing.add_done_callback(lambda done: self._closing.pop(done, None))


def _link_roles(record: ComponentRecord) -> tuple[str, ...]:
    """Return the keys of ``LINKS`` for a component. A prefill worker that computes vectors also has a stream
    connection, like a decode worker."""
    if record.role == "prefill" and record.gives_vectors:
        return "prefill", "decode"
    return (record.role,) if record.role in LINKS else ()


def _link_name(record: ComponentRecord) -> str:
    return record.node_id if record.role == "kvnode" else record.component_id
