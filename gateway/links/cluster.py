"""The gateway's connections: the registry's view, polled, and a link per component in it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
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
# Timeout of a fetch for a KV node that hangs; a node enforces its own, shorter one.
MAX_FETCH_S = 5.0
# Blocks of a prompt on no known node from which on a bucket is asked, and its timeout.
MIN_ASKED_BLOCKS = 8
MAX_FIND_MS = 500
# How long a request without a worker looks for one that is just starting, before it fails or waits longer.
FIRST_LOOK_S = 0.5
# How long a request waits for components that were there a short time ago and are restarted by a supervisor. Two new
# processes, a KV node's and then a worker's, take some 6 s on two idle cores and more than 30 s on busy ones. Then the
# worker loads its model, for the time of its last start (in its record), or longer if the files are no longer in
# memory. So the wait is MIN_RETURN_WAIT_S plus RETURN_WAIT_STARTS times the longest start, at most
# MAX_RETURN_WAIT_S.
MIN_RETURN_WAIT_S, RETURN_WAIT_STARTS, MAX_RETURN_WAIT_S = 45.0, 5, 600.0


Link = NodeLink | PrefillLink | DecodeLink
LINKS: dict[str, type[Link]] = {"kvnode": NodeLink, "prefill": PrefillLink, "decode": DecodeLink}


class ComponentDirectory(Protocol):
    """Records of live components: from the registry or, in a process that has all components itself, from a list.

    Attributes:
        refusal: why the directory takes no heartbeats now, so that its records are old; "" if it takes them.
    """

    refusal: str

    async def components(self) -> list[ComponentRecord]:
        """Return the records of all live components. Raises Unavailable."""

    async def aclose(self) -> None:
        """Close the directory's connections."""


@dataclass(frozen=True, slots=True)
class Served:
    """How live workers serve a model, by the KV that they share.

    Attributes:
        adapter_rank: rank of adapters that they run; 0 if only the model is needed.
        states: slots of the model's states.
    """

    model: str
    fingerprint: str
    namespace: bytes
    block_size: int
    adapter_rank: int = 0
    states: StatePages = NO_STATES

    def includes(self, worker: ComponentRecord) -> bool:
        """Return whether a worker of the model shares this KV, and runs adapters of this rank."""
        rank = self.adapter_rank
        if rank and not (worker.max_loras and worker.max_lora_rank >= rank):
            return False
        return worker.fingerprint in ("", self.fingerprint) and worker.namespace == self.namespace.hex()


def _once_a_look(method: Callable[Concatenate[Cluster, P], T]) -> Callable[Concatenate[Cluster, P], T]:
    """Cache a method's result for one version of the registry's view."""

    @wraps(method)
    def found(cluster: Cluster, /, *arguments: P.args, **named: P.kwargs) -> T:
        if cluster._made_of != cluster.view.version:
            cluster._made, cluster._made_of = {}, cluster.view.version
        key = method.__name__, arguments
        if key not in cluster._made:
            cluster._made[key] = method(cluster, *arguments, **named)
        made: T = cluster._made[key]
        return made

    return found


class Cluster:
    """A gateway's links by component. ``start`` begins to poll the registry, ``aclose`` ends everything, registry and
    index included.

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
        # By model and max rank of adapters: when such a decode worker and a KV node were last on record, and the
        # longest start of such workers then.
        self._recorded: dict[tuple[str, int], tuple[float, float]] = {}
        self._waiters = OutageWaiters(self.refresh, self._look, self._patience_s)
        self._polling = asyncio.Lock()
        self._poller: asyncio.Task[None] | None = None
        self._closing: dict[asyncio.Task[None], None] = {}
        # The view's ``places`` for which all links are right; -1 makes the next poll check them again.
        self._synced_topology = -1
        self._made: dict[tuple[str, tuple[object, ...]], Any] = {}
        self._made_of = -1

    async def start(self) -> None:
        """Ask the registry once, and regularly from then on."""
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
        """Ask the registry now. Without an answer the last view stays. While the registry takes no heartbeats, vanished
        records are kept as long as their components are connected."""
        async with self._polling:
            try:
                records = await self.registry.components()
            except PillionError as error:
                log.debug("the registry does not answer, the last view stands: %s", error.message)
                self.view.keep(self._connected(), time.monotonic())
                return
            now = time.monotonic()
            if self.registry.refusal:
                self.view.keep(self._connected(), now)
            self._cut_off(self.view.update(records, now))
            self._note_models(now)
            self._sync()

    def served(self, model: str, fingerprint: str, adapter_rank: int = 0) -> Served:
        """Return how ``model``, with adapters of a rank, is served now by components that answer. Raises Unavailable,
        which names what is missing."""
        for served in self._spaces(model, fingerprint):
            served = replace(served, adapter_rank=adapter_rank) if adapter_rank else served
            if any(served.includes(worker) and self._usable(worker) for worker in self.view.of("decode", model)):
                return served
        wanted = f" that runs adapters of rank {adapter_rank} (--enable-lora, --max-lora-rank)" if adapter_rank else ""
        raise Unavailable(f"no decode worker of model {model!r} lives{wanted}{self.blind_spot()}")

    @_once_a_look
    def _spaces(self, model: str, fingerprint: str) -> list[Served]:
        """Return the ways in which workers on record serve the model, the most common first. Workers of two releases
        may differ in layout; a request stays with those that can share its KV."""
        workers = [one for one in self.view.of("decode", model) if one.fingerprint in ("", fingerprint)]
        states = [one for one in workers if one.namespace]
        spaces = Counter((one.namespace, one.block_size_tokens, one.state_pages, one.working_pages) for one in states)
        ranked = sorted(spaces, key=lambda space: (spaces[space], space), reverse=True)
        return [
            Served(model, fingerprint, bytes.fromhex(namespace), size, states=StatePages(one, running))
            for namespace, size, one, running in ranked
        ]

    def keeps_states(self, model: str) -> bool:
        """Return whether layers of a model carry states, by its workers' records."""
        return any(worker.state_pages for worker in self.view.of("decode", model))

    def known(self, role: str) -> frozenset[str]:
        """Return the ids of a role's components that answer."""
        return frozenset(one.component_id for one in self.view if one.role == role and self._usable(one))

    def lacks_node(self, served: Served) -> bool:
        """Return whether no decode worker has a live KV node."""
        return not any(self._fit(worker, served, 0) for worker in self.view.of("decode", served.model))

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
            hits: blocks of the prompt on each node, by node id.
            spread: any number that differs from request to request.
            adapter: digest of the request's adapter; of many workers, some that have it are chosen.

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
        """Return the workers of a role that can serve a request; of many only some (choose_workers), those on ``nodes``
        first, in their order."""

        def beside() -> Iterator[ComponentRecord]:
            found = (one for node_id in nodes for one in self.view.on_node(node_id))
            return (one for one in found if (one.role, one.model) == (role, served.model))

        ready: Callable[[ComponentRecord], bool] | None = None
        if adapter:
            sent = self.routes.sent_adapters.workers(adapter, time.monotonic())
            ready = lambda one: adapter in one.adapters or one.component_id in sent  # noqa: E731
        everyone = self.view.of(role, served.model)
        return choose_workers(everyone, beside, spread, lambda worker: self._fit(worker, served, tokens), ready)

    def _fit(self, worker: ComponentRecord, served: Served, tokens: int) -> bool:
        """Return whether a worker and its node can serve a request of ``tokens`` now."""
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
        """Return how ``model``, with adapters of a rank, is served to a new request, as soon as it is. Waits
        FIRST_LOOK_S for components that are just starting, and :meth:`return_wait_s` for those that lived a short time
        ago. Raises Unavailable."""
        with contextlib.suppress(Unavailable):
            served, complete = self._look((model, fingerprint, adapter_rank))
            if complete:
                return served
        return await self._waiters.wait((model, fingerprint, adapter_rank))

    @_once_a_look
    def request_slots(self, model: str) -> int:
        """Return the requests to send to the model's workers at once: this gateway's share of the decode workers'
        slots, and some more. 0 while a worker does not report its slots.

        The share is even, plus what the other gateways left unused at their last heartbeat, since connections are not
        spread evenly.
        """
        others = [other.running_requests for other in self.other_gateways()]
        return shared_slots(self._known("decode", model), others)

    @_once_a_look
    def decode_fleet(self, model: str) -> DecodeFleet | None:
        """Return the model's decode workers, to predict answer times; None until one has measured its steps."""
        workers = self._known("decode", model)
        measured = median_model(workers)
        others = sum(other.running_requests for other in self.other_gateways())
        return measured and DecodeFleet(measured, len(workers), others)

    def other_gateways(self) -> list[ComponentRecord]:
        """Return the other live gateways."""
        return [record for record in self.view.of("gateway") if record.component_id != self.gateway_id]

    def _other_gateway_ids(self) -> list[str]:
        return [record.component_id for record in self.other_gateways()]

    async def under_way(self, components: Iterable[ComponentRecord]) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the load of all gateways on these workers, by component id: amounts and tokens as in OwnLoad."""
        return await self._exchange.with_others([one.component_id for one in components if one.role in WORKERS])

    @_once_a_look
    def pools_tokens(self, model: str) -> list[int]:
        """Return the tokens of the pool of each of the model's decode workers; 0 if unknown."""
        blocks = {node.node_id: node.total_blocks for node in self._known("kvnode")}
        return [blocks.get(worker.node_id, 0) * worker.block_size_tokens for worker in self._known("decode", model)]

    def queued_requests(self, model: str) -> int:
        """Return about how many of this gateway's streams wait in decode workers' queues: its share of each queue."""
        shares = 0.0
        for worker in self._known("decode", model):
            streams = worker.running_requests + worker.waiting_requests
            own = self.load.by_component[worker.component_id]
            shares += worker.waiting_requests * min(1.0, own / streams) if streams else 0.0
        return round(shares)

    def kv_usage(self, model: str) -> float | None:
        """Return the share of the pools of the model's workers that is not free for a new prompt; None if no pool is
        known."""
        used = {one.node_id for role in WORKERS for one in self._known(role, model)}
        nodes = [node for node in self._known("kvnode") if node.node_id in used]
        held = sum(node.leased_blocks + node.quarantined_blocks + node.pinned_blocks for node in nodes)
        total = sum(node.total_blocks for node in nodes)
        return min(1.0, held / total) if total else None

    def blind_spot(self) -> str:
        """Return what an error message adds while the registry takes no heartbeats; "" if it takes them."""
        if not self.registry.refusal:
            return ""
        return f"; the registry takes no heartbeats, so new components are not found: {self.registry.refusal}"

    def _known(self, role: str, model: str = "") -> list[ComponentRecord]:
        """Return all records of a role; while the registry takes no heartbeats, only those of components that answer,
        because it still lists all that lived when it began to refuse."""
        records = self.view.of(role, model)
        return list(filter(self.answers, records)) if self.registry.refusal else records

    def _connected(self) -> list[str]:
        """Return the components that live by this gateway's connections. It has none to other gateways."""
        records = self.view.records()
        return [record.component_id for record in records if record.role == "gateway" or self.answers(record)]

    def _note_models(self, now: float) -> None:
        if self.view.of("kvnode"):
            workers = (worker for model in self.view.models() for worker in self.view.of("decode", model))
            starts_s: dict[tuple[str, int], float] = {}
            for worker in workers:
                key = worker.model, worker.max_lora_rank if worker.max_loras else 0
                starts_s[key] = max(starts_s.get(key, 0.0), worker.start_s)
            self._recorded.update({key: (now, start_s) for key, start_s in starts_s.items()})

    def _look(self, key: ModelKey) -> tuple[Served, bool]:
        """Return how a model is served, and whether a KV node of its decode workers is there. Raises Unavailable."""
        served = self.served(*key)
        return served, not self.lacks_node(served)

    def _patience_s(self, key: ModelKey) -> float:
        """Return how long a request waits for workers of the model, with adapters of a rank: longer if the model was
        served a short time ago."""
        model, _, adapter_rank = key
        wait_s = self.return_wait_s(model, adapter_rank)
        last_s = max((at_s for at_s, _ in self._recorded_of(model, adapter_rank)), default=-math.inf)
        return wait_s if time.monotonic() - last_s < wait_s else FIRST_LOOK_S

    def return_wait_s(self, model: str, adapter_rank: int = 0) -> float:
        """Return how long a request waits for the model's components to come back: longer if its workers start
        slowly."""
        start_s = max((start_s for _, start_s in self._recorded_of(model, adapter_rank)), default=0.0)
        return min(MAX_RETURN_WAIT_S, MIN_RETURN_WAIT_S + RETURN_WAIT_STARTS * start_s)

    def _recorded_of(self, model: str, adapter_rank: int) -> list[tuple[float, float]]:
        return [at for (name, rank), at in self._recorded.items() if name == model and rank >= adapter_rank]

    def node(self, node_id: str) -> NodeLink:
        """Return the link to a KV node with an open session. Raises Unavailable."""
        link = self._links["kvnode"].get(node_id)
        if not isinstance(link, NodeLink):
            raise Unavailable(f"KV node {node_id} is gone")
        if not link.alive:
            raise Unavailable(f"KV node {node_id} does not answer")
        return link

    def holds(self, hold: TicketHold) -> bool:
        """Return whether the session of a ticket is still open."""
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
        """Return the ids of the prefill workers among ``components`` to which whole texts can be submitted now."""
        # A worker restarted in another role may keep its former connection for a moment.
        prefills = (one.component_id for one in components if one.role == "prefill" and one.gives_vectors)
        return frozenset(one for one in prefills if (link := self._links["decode"].get(one)) is not None and link.alive)

    def text_step_tokens(self, served: Served) -> int:
        """Return the tokens that the workers for whole texts compute together in a step of each; 0 if one does not
        report them."""
        workers = [one for role in ("prefill", "decode") for one in self.view.of(role, served.model)]
        usable = [one for one in workers if served.includes(one) and self._usable(one)]
        texts = self.text_workers(usable)
        chosen = [one for one in usable if one.component_id in texts] or [one for one in usable if one.role == "decode"]
        steps = [one.max_step_tokens for one in chosen]
        return sum(steps) if all(steps) else 0

    @property
    def index_available(self) -> bool:
        """True if the index answered the last look-up, or there is none."""
        return self.index is None or self.index.available

    async def hits(self, served: Served, hashes: bytes) -> PrefixHits:
        """Return the prompt's prefixes by the index; those of a model with states end with one. Never raises."""
        if self.index is None:
            return PrefixHits([])
        if served.states.one:
            return await self.index.longest_state(hashes)
        return PrefixHits(await self.index.longest_prefix(hashes))

    async def bucket_hits(
        self, hashes: bytes, hits: Mapping[str, int], components: Sequence[ComponentRecord], state_pages: int = 0
    ) -> dict[str, int]:
        """Return the blocks of a prompt that the nodes of these decode workers can have if they fetch from their
        buckets, by node id; up to the last state for a model with ``state_pages``. Only nodes with more than ``hits``
        are included. One node per bucket is asked, with a timeout. Never raises."""
        known = max(hits.values(), default=0)
        buckets = any(record.object_url for record in components)
        if not buckets or len(hashes) // HASH_BYTES - known < MIN_ASKED_BLOCKS:
            return {}
        return await self._ask_buckets(hashes, known, components, state_pages)

    async def _ask_buckets(
        self, hashes: bytes, known: int, components: Sequence[ComponentRecord], state_pages: int
    ) -> dict[str, int]:
        readers: dict[str, list[str]] = {}
        # A KV node of another model has no block of this prompt.
        used = {record.node_id for record in components if record.role == "decode"}
        for record in components:
            if record.role == "kvnode" and record.object_url and record.node_id in used:
                readers.setdefault(record.object_url, []).append(record.node_id)
        found: dict[str, int] = {}

        async def ask(node_ids: list[str]) -> None:
            try:
                # Requests with the same prompt ask the same node, which caches what the bucket has.
                client = self.node(node_ids[hashes[-1] % len(node_ids)]).client
                timeout_s = MAX_FIND_MS / 1000
                more = await client.find_blocks(hashes, known, timeout_s=timeout_s, state_pages=state_pages)
            except PillionError as error:
                log.debug("a bucket could not be asked: %s", error.message)
                return
            if more:
                found.update(dict.fromkeys(node_ids, known + more))

        await asyncio.gather(*map(ask, readers.values()))
        return found

    async def fetch_blocks(
        self, hold: TicketHold, hashes: bytes, sources: Sequence[str], pinned_blocks: int, left_s: float | None
    ) -> PrefetchReply:
        """Have a KV node fetch blocks under a ticket. Never raises: missing blocks are computed (I1).

        Args:
            hashes: block hashes from the prompt's first block on, 32 bytes each.
            sources: other nodes that probably have the blocks, best first.
            pinned_blocks: leading blocks already pinned by the ticket; the reply counts at least these.
            left_s: the request's time left, None for no limit.
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
                # With blocks from elsewhere, the call's time is not that of the other nodes alone.
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
        """Return whether a component can be called now, by its link."""
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
        """Keep a link per known component. A component that moved gets a new link; one without a record keeps its link
        while it is alive, for what runs on it."""
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

    def _cut_off(self, component_ids: frozenset[str]) -> None:
        """Close the links of fenced workers, so that requests on them fail. The workers get new links, since some come
        back."""
        for component_id in component_ids:
            for role in WORKERS:
                if (link := self._links[role].pop(component_id, None)) is not None:
                    self._synced_topology = -1
                    log.warning("%s is fenced by its KV node, its work moves on", component_id)
                    self._close(link)

    def _close(self, link: Link) -> None:
        closing = asyncio.create_task(link.aclose())
        self._closing[closing] = None
        closing.add_done_callback(lambda done: self._closing.pop(done, None))


def _link_roles(record: ComponentRecord) -> tuple[str, ...]:
    """Return the roles as which this gateway calls a component. A prefill worker that takes texts has a connection for
    their streams as well."""
    if record.role == "prefill" and record.gives_vectors:
        return "prefill", "decode"
    return (record.role,) if record.role in LINKS else ()


def _link_name(record: ComponentRecord) -> str:
    return record.node_id if record.role == "kvnode" else record.component_id
