"""Decides where a request runs and where its prompt is split, from a snapshot of the cluster. Sans-IO (I9).

    [ cached prefix | whole blocks: a prefill worker, in chunks | prompt tail, >= 1 token: the decode worker ]
    0            cached                                       split                                          N

Cached blocks may be on other nodes, on a disk or in a bucket: they are fetched before the split is final, if that pays
off. A prefill worker of another node is used if the decode worker's node has none.

A request for a vector has no split: one worker computes all of it, preferably a prefill worker, where it delays no
streams.

All other plans differ only in ``split``: ``split = cached`` is co-located serving, a split after the last whole block
full disaggregation. Always cached <= split <= the end of the last whole block that ends at or before N - 1, or before
the first token with a requested log probability, since only the decode worker has logits, and they are not computed
twice. The policy determines the split: as a fixed share, or by predictions (``auto``). Predictions always choose the
workers (:mod:`pillion.gateway.planning.split_decision`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pillion.errors import Unavailable
from pillion.gateway.planning.cluster_snapshot import NO_STATES, ClusterSnapshot, StatePages
from pillion.gateway.planning.split_decision import Fetched, Route, SplitDecision, choose
from pillion.wire.registry import ComponentRecord

MAX_FETCH_SOURCES = 4


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A node that probably has the prompt's first ``blocks`` blocks, in its pool or its lower tiers."""

    node_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """A fetch of the prompt's first ``blocks`` blocks from a node's lower tiers or from ``source_node_ids``, within
    ``limit_s``, or the default limits if None."""

    blocks: int
    source_node_ids: tuple[str, ...]
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """Plan of one attempt.

    Attributes:
        node_id: the node of ``decode``.
        prefill: computes the chunks; may be on another node. None without chunks to compute.
        decode: computes the answer: a decode worker, or a prefill worker that computes a text's vector.
        chunks: tokens per chunk, ``split_tokens - cached_tokens`` in total; empty if no prefill worker takes part.
        limit_blocks, states, known_blocks: those of the ClusterSnapshot.
        asked_blocks: whole blocks of the prompt, without the answer tokens of a replay.
        sources: nodes with a prefix of the prompt, longest first.
    """

    node_id: str
    prefill: ComponentRecord | None
    decode: ComponentRecord
    block_size: int
    chunk_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0
    split_tokens: int = 0
    chunks: tuple[int, ...] = ()
    reason: str = ""
    limit_blocks: int
    asked_blocks: int
    split_decision: SplitDecision
    sources: tuple[PrefixSource, ...] = ()
    states: StatePages = NO_STATES
    known_blocks: int = 0

    @property
    def remote(self) -> bool:
        """True if the prefill worker writes to another pool than the decode worker reads."""
        return self.prefill is not None and self.prefill.node_id != self.node_id

    @property
    def on_prefill_worker(self) -> bool:
        """True if a prefill worker computes the whole request."""
        return self.decode.role == "prefill"

    @property
    def decode_only(self) -> bool:
        """True if nothing is prefilled by a prefill worker or fetched, so that only the decode worker is needed."""
        missing = plan_fetch(self.sources, self.node_id, self.cached_blocks, self.limit_blocks)
        return not self.chunks and self.split_decision.route.fetched is Fetched.NOTHING and missing is None

    def hinted_blocks(self, node_id: str) -> int:
        """Return the leading blocks on a node according to the index."""
        return next((source.blocks for source in self.sources if source.node_id == node_id), 0)

    @property
    def cached_blocks(self) -> int:
        """Blocks before ``cached_tokens``."""
        return self.cached_tokens // self.block_size

    @property
    def split_blocks(self) -> int:
        """Blocks before ``split_tokens``."""
        return self.split_tokens // self.block_size

    @property
    def total_blocks(self) -> int:
        """Slots to reserve at the decode worker's node: for the prompt's blocks, including that of the first generated
        token, and ``states.running`` slots for each worker of the request on that node (the decode worker, and a local
        prefill worker)."""
        sequences = 1 if self.prefill is None or self.remote else 2
        return self.prompt_tokens // self.block_size + 1 + sequences * self.states.running


def make_plan(snapshot: ClusterSnapshot) -> RequestPlan:
    """Plan one attempt. Raises Unavailable, which names what is missing."""
    candidates = _with_live_node(snapshot)
    avoidance = min(_avoidance(snapshot, component) for component in candidates)
    nodes = snapshot.live_nodes()
    usable = [component for component in candidates if _avoidance(snapshot, component) == avoidance]
    # A node that failed this request is used only if all decode workers are on nodes that did.
    usable_nodes = nodes | ({component.node_id for component in usable} if avoidance[1] else frozenset())
    on_prefill_workers = any(component.role == "prefill" for component in usable)
    decision = choose(snapshot, usable, [] if on_prefill_workers else snapshot.prefill_workers(usable_nodes), nodes)
    route = decision.route
    node_id = route.decode.component.node_id
    fixed = snapshot.policy.share is not None
    sources = _sources(snapshot, node_id, fixed or route.fetched is Fetched.OF_BUCKET)
    if not fixed:
        sources = _route_sources(sources, node_id, route)
    draft = RequestPlan(
        node_id=node_id,
        prefill=None if route.prefill is None else route.prefill.component,
        decode=route.decode.component,
        block_size=snapshot.block_size,
        chunk_tokens=snapshot.chunk_tokens,
        prompt_tokens=snapshot.prompt_tokens,
        limit_blocks=snapshot.limit_blocks,
        asked_blocks=(snapshot.prompt_tokens - snapshot.answered_tokens) // snapshot.block_size,
        sources=sources,
        split_decision=decision,
        states=snapshot.states,
        known_blocks=snapshot.known_blocks,
    )
    return replan(draft, route.cached_blocks)


def replan(old: RequestPlan, cached_blocks: int) -> RequestPlan:
    """Return the plan with the same workers for ``cached_blocks`` cached blocks: those that the ticket pinned, instead
    of the index's hint (I3)."""
    cached = max(0, min(cached_blocks, old.limit_blocks))
    policy = old.split_decision.policy
    if policy.share is not None and (
        old.asked_blocks <= cached < old.limit_blocks <= cached + old.chunk_tokens // old.block_size
    ):
        # Only the last answer tokens, which a lost decode worker had not committed, remain. They are few, and would
        # queue behind other prompts at a prefill worker.
        split, why = cached, "only tokens of the answer are left"
    else:
        split, why = old.split_decision.split(cached, old.limit_blocks)
    return replace(
        old,
        cached_tokens=cached * old.block_size,
        split_tokens=split * old.block_size,
        chunks=chunks_between(old, cached, split),
        reason=f"{policy.name}: {why}",
    )


def shorten(old: RequestPlan, end_tokens: int) -> RequestPlan:
    """Return the plan after its prefill range has ended early, at ``end_tokens``: the decode worker computes the
    remaining tokens."""
    split = max(old.cached_blocks, min(end_tokens // old.block_size, old.split_blocks))
    short = (old.split_blocks - split) * old.block_size
    return replace(
        old,
        split_tokens=split * old.block_size,
        chunks=chunks_between(old, old.cached_blocks, split),
        reason=f"{old.reason}: the prefill range ended {short} tokens early" if short else old.reason,
    )


def chunks_between(plan: RequestPlan, start_blocks: int, end_blocks: int) -> tuple[int, ...]:
    """Return the tokens of each chunk of the prefill range start_blocks .. end_blocks - 1: full chunks, then a shorter
    one if needed, all multiples of the block size."""
    size = max(plan.block_size, plan.chunk_tokens - plan.chunk_tokens % plan.block_size)
    whole, rest = divmod((end_blocks - start_blocks) * plan.block_size, size)
    return (size,) * whole + ((rest,) if rest else ())


def plan_fetch(
    sources: Sequence[PrefixSource],
    node_id: str,
    pinned_blocks: int,
    limit_blocks: int,
    decision: SplitDecision | None = None,
) -> FetchPlan | None:
    """Plan the fetch of a prompt's first ``limit_blocks`` blocks to the node ``node_id``; None if no source has more
    than the ``pinned_blocks`` leading blocks that are pinned on the node already.

    ``sources`` may include the node itself, whose disk may have more. ``decision`` sets the time limit, if given.
    """
    known = min(limit_blocks, max((source.blocks for source in sources), default=0))
    if known <= pinned_blocks:
        return None
    others = [source.node_id for source in sources if source.node_id != node_id and source.blocks > pinned_blocks]
    limit_s = None if decision is None else decision.fetch_limit_s(pinned_blocks, known)
    return FetchPlan(known, tuple(others[:MAX_FETCH_SOURCES]), limit_s)


def _with_live_node(snapshot: ClusterSnapshot) -> list[ComponentRecord]:
    """Return the workers that can serve the request and whose node is alive: decode workers or, for a request for a
    vector, prefill workers that have not failed it, if there are any. Raises Unavailable."""
    nodes = {component.node_id for component in snapshot.components if component.role == "kvnode"}
    prefills = [
        one for one in snapshot.components if one.component_id in snapshot.text_workers and one.node_id in nodes
    ]
    if prefills := [one for one in prefills if not any(_avoidance(snapshot, one))]:
        return prefills
    workers = [component for component in snapshot.components if component.role == "decode"]
    if not workers:
        raise Unavailable(f"no decode worker of model {snapshot.model!r} lives")
    candidates = [worker for worker in workers if worker.node_id in nodes]
    if not candidates:
        missing = ", ".join(sorted({worker.node_id for worker in workers}))
        raise Unavailable(f"no KV node lives for the decode workers of model {snapshot.model!r}: {missing} is missing")
    return candidates


def _avoidance(snapshot: ClusterSnapshot, component: ComponentRecord) -> tuple[bool, bool]:
    """Return whether the component, and whether its node, failed this request before, as a sort key."""
    return component.component_id in snapshot.avoid, component.node_id in snapshot.avoid


def _route_sources(sources: tuple[PrefixSource, ...], node_id: str, route: Route) -> tuple[PrefixSource, ...]:
    """Return the sources that a route fetches from: its source node first, then substitutes. Their blocks are limited
    to the route's, since any more would take longer to fetch than to compute. The node itself is always included:
    blocks on its own disk are always fetched."""
    if route.fetched is Fetched.OF_NODES:
        sources = tuple(replace(source, blocks=min(source.blocks, route.cached_blocks)) for source in sources)
        return tuple(sorted(sources, key=lambda source: source.node_id != route.source_node))
    # A node asks its bucket only for blocks that no source has, so slow sources are left out.
    return tuple(source for source in sources if source.node_id in (node_id, route.source_node))


def _sources(snapshot: ClusterSnapshot, node_id: str, of_bucket: bool) -> tuple[PrefixSource, ...]:
    """Return the nodes to fetch the prompt's cached prefix from, longest prefix first: ``node_id``, if it has any of
    it, and up to MAX_FETCH_SOURCES other live nodes. Ties rotate by ``snapshot.spread`` to share the load. Prefixes
    include blocks on a node's disk and, with ``of_bucket``, blocks in the object store bucket of ``node_id``."""
    nodes = snapshot.live_nodes() | {node_id}
    own = max(snapshot.hits.get(node_id, 0), snapshot.bucket_hits.get(node_id, 0) if of_bucket else 0)
    hits = sorted({**snapshot.hits, node_id: own}.items())
    known = [PrefixSource(name, blocks) for name, blocks in hits if blocks > 0 and name in nodes]
    start = snapshot.spread % len(known) if known else 0
    ranked = sorted(known[start:] + known[:start], key=lambda source: -source.blocks)
    others = [source for source in ranked if source.node_id != node_id][:MAX_FETCH_SOURCES]
    return tuple(source for source in ranked if source.node_id == node_id or source in others)
