"""Decides where a request runs and where its prompt is split, from a snapshot of the cluster. Sans-IO (I9).

    [ cached prefix | whole blocks: a prefill worker, in chunks | prompt tail, >= 1 token: the decode worker ]
    0            cached                                       split                                          N

Cached blocks may be on other nodes, on a disk or in a bucket: they are fetched before the split is final, if that pays
off. A prefill worker of another node is used if the decode worker's node has none.

A request that ends with a vector has no split: one worker computes all of it, preferably a prefill worker, where it
delays no streams.

Other plans differ only in ``split``: ``split = cached`` is co-located serving, the last whole block full
disaggregation. Always cached <= split <= the last whole block that ends at or before N - 1, or before the first token
with a requested log probability, since only the decode worker has logits, and they are not computed twice. The policy
decides the split: at a fixed place, or by predictions (``auto``). Predictions choose the workers for it
(:mod:`pillion.gateway.planning.split_decision`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pillion.errors import Unavailable
from pillion.gateway.planning.cluster_view import NO_STATES, ClusterSnapshot, StatePages
from pillion.gateway.planning.split_decision import Fetched, Route, SplitDecision, choose
from pillion.wire.registry import ComponentRecord

MIN_FETCH_BLOCKS = 1
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
    """Plan of one attempt. ``chunks`` sum to ``split_tokens - cached_tokens``; empty means no prefill worker.

    ``decode`` computes the answer: a decode worker, or a prefill worker that computes a text's vector. ``prefill`` may
    be on another node than ``node_id``, the decode worker's. ``sources`` are the nodes with a part of the prompt,
    longest first. ``limit_blocks`` may be cached or left to a prefill worker: whole blocks that end at or before N - 1,
    or before the first token with a requested log probability. ``asked_blocks`` are the whole blocks of the prompt
    without the answer tokens of a replay. ``states`` and ``known_blocks`` are the snapshot's.
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
    def alone(self) -> bool:
        """True if nothing is prefilled or fetched elsewhere."""
        lacking = plan_fetch(self.sources, self.node_id, self.cached_blocks, self.limit_blocks)
        return not self.chunks and self.split_decision.route.fetched is Fetched.NOTHING and lacking is None

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
        """Slots of the ticket at the decode worker's node: the prompt's blocks with room for the first generated
        token, and the states of the sequences under it."""
        sequences = 1 if self.prefill is None or self.remote else 2
        return self.prompt_tokens // self.block_size + 1 + sequences * self.states.running


def make_plan(snapshot: ClusterSnapshot) -> RequestPlan:
    """Plan one attempt. Raises Unavailable, which names what is missing."""
    candidates = _with_live_node(snapshot)
    least = min(_avoidance(snapshot, component) for component in candidates)
    nodes = snapshot.live_nodes()
    usable = [component for component in candidates if _avoidance(snapshot, component) == least]
    # A node that failed this request is used only if every decode worker is on such a node.
    reached = nodes | ({component.node_id for component in usable} if least[1] else frozenset())
    texts = any(component.role == "prefill" for component in usable)
    decision = choose(snapshot, usable, [] if texts else snapshot.prefill_workers(reached), nodes)
    route = decision.route
    node_id = route.decode.component.node_id
    fixed = snapshot.policy.share is not None
    sources = _sources(snapshot, node_id, fixed or route.fetched is Fetched.OF_BUCKET)
    if not fixed:
        sources = _worth_it(sources, node_id, route)
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
    """Return the plan with the same workers and another number of cached blocks: what the ticket pinned, instead of the
    index's hint (I3)."""
    cached = max(0, min(cached_blocks, old.limit_blocks))
    policy = old.split_decision.policy
    if policy.share is not None and (
        old.asked_blocks <= cached < old.limit_blocks <= cached + old.chunk_tokens // old.block_size
    ):
        # A lost decode worker had not committed the answer's last tokens. They are few, and would queue behind other
        # prompts at a prefill worker.
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
    """Return the plan after a prefill range that ended early at ``end_tokens``: the decode worker computes the rest."""
    split = max(old.cached_blocks, min(end_tokens // old.block_size, old.split_blocks))
    short = (old.split_blocks - split) * old.block_size
    return replace(
        old,
        split_tokens=split * old.block_size,
        chunks=chunks_between(old, old.cached_blocks, split),
        reason=f"{old.reason}: the prefill range ended {short} tokens early" if short else old.reason,
    )


def chunks_between(plan: RequestPlan, start_blocks: int, end_blocks: int) -> tuple[int, ...]:
    """Return the sizes of a prefill range's chunks in tokens: full chunks and a rest, all multiples of the block
    size."""
    size = max(plan.block_size, plan.chunk_tokens - plan.chunk_tokens % plan.block_size)
    whole, rest = divmod((end_blocks - start_blocks) * plan.block_size, size)
    return (size,) * whole + ((rest,) if rest else ())


def plan_fetch(
    sources: Sequence[PrefixSource],
    node_id: str,
    here_blocks: int,
    limit_blocks: int,
    decision: SplitDecision | None = None,
) -> FetchPlan | None:
    """Plan the fetch of a prompt's first ``limit_blocks`` blocks to ``node_id``; None if it does not pay off.

    ``here_blocks`` are pinned there already. ``sources`` may include the node itself, whose disk blocks are not pinned.
    ``decision`` limits the time, if given.
    """
    known = min(limit_blocks, max((source.blocks for source in sources), default=0))
    if known - here_blocks < MIN_FETCH_BLOCKS:
        return None
    others = [source.node_id for source in sources if source.node_id != node_id and source.blocks > here_blocks]
    limit_s = None if decision is None else decision.fetch_limit_s(here_blocks, known)
    return FetchPlan(known, tuple(others[:MAX_FETCH_SOURCES]), limit_s)


def _with_live_node(snapshot: ClusterSnapshot) -> list[ComponentRecord]:
    """Return the workers that can serve the request and whose node is alive: decode workers or, for a request that ends
    with a vector, prefill workers that have not failed it. Raises Unavailable."""
    nodes = {component.node_id for component in snapshot.components if component.role == "kvnode"}
    texts = [one for one in snapshot.components if one.component_id in snapshot.text_workers and one.node_id in nodes]
    if texts := [one for one in texts if not any(_avoidance(snapshot, one))]:
        return texts
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


def _worth_it(sources: tuple[PrefixSource, ...], node_id: str, route: Route) -> tuple[PrefixSource, ...]:
    """Return the sources that a route fetches from: the chosen one, then substitutes. They count for at most the
    route's blocks: more would cost more to fetch than to compute. Blocks on the node's own disk are always fetched."""
    if route.fetched is Fetched.OF_NODES:
        sources = tuple(replace(source, blocks=min(source.blocks, route.cached_blocks)) for source in sources)
        return tuple(sorted(sources, key=lambda source: source.node_id != route.holder))
    # A node asks its bucket only for what other nodes lack, so slow ones are left out.
    return tuple(source for source in sources if source.node_id in (node_id, route.holder))


def _sources(snapshot: ClusterSnapshot, node_id: str, of_bucket: bool) -> tuple[PrefixSource, ...]:
    """Return live nodes with a hit, longest first; ties rotate by ``spread`` to share the load. ``node_id`` is always
    among them: its disk's blocks are part of its hit, and with ``of_bucket`` those of a bucket that it reaches."""
    nodes = snapshot.live_nodes() | {node_id}
    own = max(snapshot.hits.get(node_id, 0), snapshot.far_hits.get(node_id, 0) if of_bucket else 0)
    hits = sorted({**snapshot.hits, node_id: own}.items())
    known = [PrefixSource(name, blocks) for name, blocks in hits if blocks > 0 and name in nodes]
    start = snapshot.spread % len(known) if known else 0
    ranked = sorted(known[start:] + known[:start], key=lambda source: -source.blocks)
    others = [source for source in ranked if source.node_id != node_id][:MAX_FETCH_SOURCES]
    return tuple(source for source in ranked if source.node_id == node_id or source in others)
