"""Where a request runs and where its prompt is split: a pure decision over a snapshot of the cluster (I9).

    [ cached prefix | whole blocks: a prefill worker, in chunks | prompt tail, >= 1 token: the decode worker ]
    0            cached                                       split                                          N

What is cached may lie on other nodes, on a disk or in a bucket: it is fetched before the split is settled, if that is
worth it. A prefill worker of another node is taken where the decode worker's node has none.

``split`` is the one dial: ``split = cached`` is co-located serving, the last whole block is full disaggregation.
Always: cached <= split <= the last whole block that ends at or before N - 1, or before the first token whose log
probability is asked: only the decode worker has logits, and nobody computes them twice. The policy decides where it
falls; with ``auto`` predictions do, which then choose the workers too (:mod:`pillion.gateway.planning.plan_auto`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pillion.errors import Unavailable
from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot, SplitPolicy
from pillion.gateway.planning.plan_auto import Dial, Fetched, choose
from pillion.wire.registry import ComponentRecord

# Fewer blocks than this are not fetched from elsewhere but computed.
MIN_FETCH_BLOCKS = 1
# Most nodes that one fetch may ask.
MAX_FETCH_SOURCES = 4
# What loading an adapter is worth where workers are compared by their tokens or streams alone.
ADAPTER_TOKENS = 512
ADAPTER_STREAMS = 4


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A node that probably has the prompt's first ``blocks`` blocks, in its pool or below it."""

    node_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What a node should fetch: the prompt's first ``blocks`` blocks, from its lower tiers or ``source_node_ids``,
    within ``limit_s``; None: within the fetch's own bounds."""

    blocks: int
    source_node_ids: tuple[str, ...]
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """The plan of one attempt. ``chunks`` add up to ``split_tokens - cached_tokens``; empty means no prefill worker.

    ``prefill`` may be on another node than ``node_id``, which is the decode worker's. ``sources`` are the nodes that
    have something of the prompt, the longest first. ``dial`` settles the split where the policy is ``auto``.
    ``limit_blocks`` may be found or left to a prefill worker: whole blocks that end at or before N - 1, or before the
    first token whose log probability is asked. Of the prompt itself there are ``asked_blocks`` whole ones, with none of
    the answer that a replay goes on with.
    """

    node_id: str
    prefill: ComponentRecord | None
    decode: ComponentRecord
    policy: SplitPolicy
    block_size: int
    chunk_tokens: int
    prompt_tokens: int
    cached_tokens: int
    split_tokens: int
    chunks: tuple[int, ...]
    reason: str
    limit_blocks: int
    asked_blocks: int
    sources: tuple[PrefixSource, ...] = ()
    dial: Dial | None = None

    @property
    def remote(self) -> bool:
        """Whether the prefill worker computes into another pool than the decode worker reads."""
        return self.prefill is not None and self.prefill.node_id != self.node_id

    def hinted_blocks(self, node_id: str) -> int:
        """Leading blocks that the index believes to be on a node."""
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
        """Blocks of the prompt with room for the first generated token."""
        return self.prompt_tokens // self.block_size + 1


def make_plan(snapshot: ClusterSnapshot) -> RequestPlan:
    """Plans one attempt. Raises Unavailable, naming what is missing."""
    if snapshot.policy.share is None:
        return _plan_auto(snapshot)
    decode = _decode_worker(snapshot)
    prefill = _prefill_worker(snapshot, decode.node_id)
    return replan(_draft(snapshot, decode, prefill), snapshot.hits.get(decode.node_id, 0))


def _plan_auto(snapshot: ClusterSnapshot) -> RequestPlan:
    candidates = _with_live_node(snapshot)
    least = min(_avoidance(snapshot, component) for component in candidates)
    nodes = snapshot.live_nodes()
    usable = [component for component in candidates if _avoidance(snapshot, component) == least]
    # A node that failed this request is used for its last decode worker only, and then its prefill workers are, too.
    reached = nodes | ({component.node_id for component in usable} if least[1] else frozenset())
    dial = choose(snapshot, usable, snapshot.prefill_workers(reached), nodes)
    way = dial.way
    prefill = None if way.prefill is None else way.prefill.component
    draft = replace(_draft(snapshot, way.decode.component, prefill), dial=dial)
    if way.fetched is Fetched.NOTHING:
        # What its own disk has comes up in any case.
        own = snapshot.hits.get(draft.node_id, 0)
        draft = replace(draft, sources=(PrefixSource(draft.node_id, own),) if own else ())
    elif way.fetched is Fetched.OF_NODES:
        draft = replace(draft, sources=_sources(replace(snapshot, far_hits={}), draft.node_id))
    return replan(draft, way.cached_blocks)


def _draft(snapshot: ClusterSnapshot, decode: ComponentRecord, prefill: ComponentRecord | None) -> RequestPlan:
    return RequestPlan(
        node_id=decode.node_id,
        prefill=prefill,
        decode=decode,
        policy=snapshot.policy,
        block_size=snapshot.block_size,
        chunk_tokens=snapshot.chunk_tokens,
        prompt_tokens=snapshot.prompt_tokens,
        cached_tokens=0,
        split_tokens=0,
        chunks=(),
        reason="",
        limit_blocks=snapshot.limit_blocks,
        asked_blocks=(snapshot.prompt_tokens - snapshot.answered_tokens) // snapshot.block_size,
        sources=_sources(snapshot, decode.node_id),
    )


def replan(old: RequestPlan, cached_blocks: int) -> RequestPlan:
    """The plan with the same workers and another number of cached blocks: the ticket's truth instead of the index's
    hint (I3)."""
    cached = max(0, min(cached_blocks, old.limit_blocks))
    if old.dial is not None:
        wanted, why = old.dial.split(cached, old.limit_blocks)
        split, reason = max(cached, min(wanted, old.limit_blocks)), f"{old.policy.name}: {why}"
    elif old.prefill is None:
        split = cached
        reason = "co-located: no prefill worker"
    elif old.asked_blocks <= cached < old.limit_blocks <= cached + old.chunk_tokens // old.block_size:
        # What a lost decode worker had not committed: a few tokens, which would wait behind other prompts.
        split = cached
        reason = f"{old.policy.name}: only tokens of the answer are left"
    else:
        split = old.policy.split_blocks(cached, old.limit_blocks)
        reason = old.policy.name + (f", prefill on {old.prefill.node_id}" if old.remote else "")
        if cached == old.limit_blocks:
            reason += (
                ": nothing left before the prompt tail" if old.limit_blocks == 0 else ": every whole block is cached"
            )
    return replace(
        old,
        cached_tokens=cached * old.block_size,
        split_tokens=split * old.block_size,
        chunks=chunks_between(old, cached, split),
        reason=reason,
    )


def shorten(old: RequestPlan, end_tokens: int) -> RequestPlan:
    """The plan after a span that ended at ``end_tokens``, before the split: the rest is the decode worker's."""
    split = max(old.cached_blocks, min(end_tokens // old.block_size, old.split_blocks))
    short = (old.split_blocks - split) * old.block_size
    return replace(
        old,
        split_tokens=split * old.block_size,
        chunks=chunks_between(old, old.cached_blocks, split),
        reason=f"{old.reason}: the span ended {short} tokens early" if short else old.reason,
    )


def chunks_between(plan: RequestPlan, start_blocks: int, end_blocks: int) -> tuple[int, ...]:
    """Chunk sizes in tokens: full chunks and a rest, every one a multiple of the block size."""
    size = max(plan.block_size, plan.chunk_tokens - plan.chunk_tokens % plan.block_size)
    whole, rest = divmod((end_blocks - start_blocks) * plan.block_size, size)
    return (size,) * whole + ((rest,) if rest else ())


def plan_fetch(
    sources: Sequence[PrefixSource], node_id: str, here_blocks: int, limit_blocks: int, dial: Dial | None = None
) -> FetchPlan | None:
    """What ``node_id`` should fetch of a prompt's first ``limit_blocks`` blocks; None where that is not worth it.
    ``here_blocks`` are pinned there. ``sources`` may name the node itself: what its disk has is known, not pinned.
    ``dial`` bounds the time, where there is one."""
    known = min(limit_blocks, max((source.blocks for source in sources), default=0))
    if known - here_blocks < MIN_FETCH_BLOCKS:
        return None
    others = [source.node_id for source in sources if source.node_id != node_id and source.blocks > here_blocks]
    limit_s = None if dial is None else dial.fetch_limit_s(here_blocks, known)
    return FetchPlan(known, tuple(others[:MAX_FETCH_SOURCES]), limit_s)


def _with_live_node(snapshot: ClusterSnapshot) -> list[ComponentRecord]:
    """Decode workers whose node lives. Raises Unavailable."""
    nodes = {component.node_id for component in snapshot.components if component.role == "kvnode"}
    workers = [component for component in snapshot.components if component.role == "decode"]
    if not workers:
        raise Unavailable(f"no decode worker of model {snapshot.model!r} lives")
    candidates = [worker for worker in workers if worker.node_id in nodes]
    if not candidates:
        missing = ", ".join(sorted({worker.node_id for worker in workers}))
        raise Unavailable(f"no KV node lives for the decode workers of model {snapshot.model!r}: {missing} is missing")
    return candidates


def _avoidance(snapshot: ClusterSnapshot, component: ComponentRecord) -> tuple[bool, bool]:
    """Whether the component, and whether its node, failed this request before; smaller is better."""
    return component.component_id in snapshot.avoid, component.node_id in snapshot.avoid


def _decode_worker(snapshot: ClusterSnapshot) -> ComponentRecord:
    """The decode worker on the node with the longest hit; among equals the least loaded."""

    def rank(component: ComponentRecord) -> tuple[tuple[bool, bool], int, int]:
        return _avoidance(snapshot, component), -snapshot.hits.get(component.node_id, 0), _load(snapshot, component)

    return _pick(_with_live_node(snapshot), rank, snapshot.spread)


def _prefill_worker(snapshot: ClusterSnapshot, node_id: str) -> ComponentRecord | None:
    """The least loaded prefill worker on the node, or else of all other nodes; None where there is none, or where all
    that live have failed this request."""
    usable = snapshot.prefill_workers(snapshot.live_nodes() | {node_id})
    workers = [component for component in usable if component.node_id == node_id] or usable
    if not workers:
        return None
    return _pick(workers, partial(_load, snapshot), snapshot.spread)


def _sources(snapshot: ClusterSnapshot, node_id: str) -> tuple[PrefixSource, ...]:
    """Live nodes with a hit, the longest first; equals are rotated by ``spread``, so that they share the load. The node
    itself is always among them: what its disk has, and what a bucket has that it reaches, is part of its hit."""
    nodes = snapshot.live_nodes() | {node_id}
    own = max(snapshot.hits.get(node_id, 0), snapshot.far_hits.get(node_id, 0))
    hits = sorted({**snapshot.hits, node_id: own}.items())
    known = [PrefixSource(name, blocks) for name, blocks in hits if blocks > 0 and name in nodes]
    start = snapshot.spread % len(known) if known else 0
    ranked = sorted(known[start:] + known[:start], key=lambda source: -source.blocks)
    others = [source for source in ranked if source.node_id != node_id][:MAX_FETCH_SOURCES]
    return tuple(source for source in ranked if source.node_id == node_id or source in others)


def _load(snapshot: ClusterSnapshot, component: ComponentRecord) -> int:
    """Tokens before a prefill worker, streams on a decode worker: as its heartbeat reports or as gateways count,
    whichever is more; an adapter that the worker would have to load counts like some more of them."""
    reported = (
        component.waiting_tokens
        if component.role == "prefill"
        else component.running_requests + component.waiting_requests
    )
    worth = ADAPTER_TOKENS if component.role == "prefill" else ADAPTER_STREAMS
    loading = worth if snapshot.adapter_wait_s(component) else 0
    return loading + max(reported, snapshot.sent_load.get(component.component_id, 0))


def _pick(workers: Sequence[ComponentRecord], rank: Callable[[ComponentRecord], Any], spread: int) -> ComponentRecord:
    """One of the workers with the least ``rank``."""
    ranks = [rank(worker) for worker in workers]
    least = min(ranks)
    equals = [worker for worker, own in zip(workers, ranks, strict=True) if own == least]
    return sorted(equals, key=lambda component: component.component_id)[spread % len(equals)]
