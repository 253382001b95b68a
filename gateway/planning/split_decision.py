"""Chooses a request's route and split: the soonest first token, plus what it costs running streams. Sans-IO (I9).

    for each decode worker: its node's best prefill worker, or the best one of another node, or none
      --> the route with the lowest predicted time to first token + running streams' excess over their target latency
      --> the split: all uncached whole blocks to the prefill worker, or none. It is decided again when the ticket shows
          what is really pinned

With a fixed policy, each route is priced for the policy's split.

A prefix hit is worth the computation that it saves, not more: a node with a long queue loses requests to a node that
must compute the prefix again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot, SplitPolicy
from pillion.gateway.planning.plan_cost import (
    DEFAULT_BYTES_PER_S,
    FETCH_CALL_S,
    MIN_FETCH_S,
    DecodeSide,
    FetchCost,
    Models,
    PrefillSide,
    route_s,
)
from pillion.wire.registry import ComponentRecord

# Max slowdown of a prompt that is sent to an unmeasured prefill worker to measure it: otherwise a worker that is
# assumed too slow would never be used.
EXPLORATION_SLOWDOWN = 2.0
# Max decode workers priced per request: those with the shortest estimated queues. With only one, simulated goodput at
# 1.2 requests/s per worker is 10% lower.
MAX_PRICED_WORKERS = 4
# Queued tokens that a running stream counts as, when queues are estimated.
STREAM_TOKENS = 16


class Fetched(enum.Enum):
    """Source of blocks fetched to a decode worker's node, besides its own lower tiers."""

    NOTHING = enum.auto()
    OF_NODES = enum.auto()
    OF_BUCKET = enum.auto()


class Route(NamedTuple):
    """A decode worker, with a prefill worker or without.

    Attributes:
        price_s: cost in seconds with the cheaper of both splits: all chunks to the prefill worker, or none.
        cached_blocks: leading blocks that the decode worker's node will have, fetched ones included.
        fetch_s: seconds of the fetch.
        fetched: source of the fetched blocks.
        source_node: the node from which blocks are fetched first; "" for none.
    """

    price_s: float
    decode: DecodeSide
    prefill: PrefillSide | None
    cached_blocks: int
    fetch_s: float
    fetched: Fetched
    source_node: str = ""


@dataclass(frozen=True, slots=True)
class SplitDecision:
    """Decision on one request's split, with both workers as at the time of planning.

    Attributes:
        reason: why the route's decode worker was chosen, and where its prefix comes from.
        policy: determines the split, unless predictions do.
        compared: the compared routes, of which ``route`` is the cheapest.
    """

    route: Route
    block_size: int
    reason: str
    policy: SplitPolicy
    compared: tuple[Route, ...] = ()

    def split(self, cached_blocks: int, limit_blocks: int) -> tuple[int, str]:
        """Return the number of blocks before the split, and why."""
        cached = cached_blocks * self.block_size
        prefix = f"prefix of {cached} tokens" if cached else "no prefix"
        if cached_blocks != self.route.cached_blocks:
            prefix += f" ({self.route.cached_blocks * self.block_size} expected)"
        split_blocks, where = self._split(cached_blocks, limit_blocks)
        return split_blocks, f"{where}; {self.reason}; {prefix}"

    def _split(self, cached_blocks: int, limit_blocks: int) -> tuple[int, str]:
        if cached_blocks == limit_blocks:
            return cached_blocks, "nothing to share out"
        if self.route.prefill is None:
            whole = self.route.decode.component.role == "prefill"
            return cached_blocks, "a whole text" if whole else "co-located, no prefill worker"
        if self.policy.share is None:
            return self._predicted_split(self.route.prefill, cached_blocks, limit_blocks)
        fixed = self.policy.split_blocks(cached_blocks, limit_blocks, self.block_size)
        return fixed, self._where(cached_blocks, fixed)

    def _predicted_split(self, prefill: PrefillSide, cached_blocks: int, limit_blocks: int) -> tuple[int, str]:
        """Return the number of blocks before the cheaper split (all to the prefill worker, or none), and why."""
        size = self.block_size
        alone_s, shared_s = (
            self.price_s(cached_blocks * size, blocks * size) for blocks in (cached_blocks, limit_blocks)
        )
        shared = shared_s < alone_s
        explores = not shared and shared_s <= EXPLORATION_SLOWDOWN * alone_s and self._is_unmeasured(prefill)
        chosen = limit_blocks if shared or explores else cached_blocks
        compared = f"{alone_s:.3g} s alone, {shared_s:.3g} s with {prefill.component.component_id}"
        compared += ", to learn its pace" if explores else ""
        return chosen, f"{self._where(cached_blocks, chosen)}: {compared}"

    def _is_unmeasured(self, prefill: PrefillSide) -> bool:
        """Return whether a prefill worker is idle and has computed nothing, so that it is priced with other workers'
        step model."""
        worker, queue = prefill.component, prefill.queue
        return not (worker.step_cost_s or worker.largest_step_tokens or queue.prompts or queue.prompts_s > 0)

    def _where(self, cached_blocks: int, split_blocks: int) -> str:
        if split_blocks == cached_blocks or self.route.prefill is None:
            return "co-located"
        name = self.route.prefill.component.component_id
        return f"{name} computes {(split_blocks - cached_blocks) * self.block_size}"

    def fetch_limit_s(self, start_blocks: int, end_blocks: int) -> float | None:
        """Return the time limit in seconds for fetching blocks start_blocks .. end_blocks - 1: the time in which the
        decode worker computes them. None for a fixed policy, whose fetches have the flags' limits."""
        if self.policy.share is not None:
            return None
        decode = self.route.decode
        computed_s = decode.model.range_s(
            start_blocks * self.block_size, end_blocks * self.block_size, decode.max_step_tokens
        )
        return max(MIN_FETCH_S, computed_s)

    def price_s(self, cached: int, split: int) -> float:
        """Return the price in seconds of a split after ``split`` tokens, of which ``cached`` are cached."""
        return route_s(self.route.prefill, self.route.decode, cached, split, self.route.fetch_s)


def choose(
    snapshot: ClusterSnapshot, decodes: list[ComponentRecord], prefills: list[ComponentRecord], nodes: frozenset[str]
) -> SplitDecision:
    """Choose the route of one attempt.

    Args:
        decodes: usable decode workers, at least one.
        prefills: usable prefill workers, if any.
        nodes: live nodes that did not fail this request.
    """
    models, hits = Models(decodes, prefills), snapshot.hits
    priced = _by_finish_time(snapshot, models, decodes)[:MAX_PRICED_WORKERS]
    best = _prefill_sides(snapshot, models, prefills, priced)
    live_hits = {name: min(blocks, snapshot.limit_blocks) for name, blocks in hits.items() if name in nodes}
    routes = [_route(snapshot, component, models.of(component), best, live_hits) for component in priced]
    chosen = min(routes, key=lambda route: route.price_s)
    reason = _why(snapshot, chosen, decodes)
    node_id = chosen.decode.component.node_id
    bucket_blocks = snapshot.bucket_hits.get(node_id, 0)
    most_blocks, best_node = max(((blocks, name) for name, blocks in live_hits.items()), default=(0, ""))
    for kind, blocks, name in (
        (Fetched.OF_NODES, most_blocks, best_node),
        (Fetched.OF_BUCKET, bucket_blocks, "a bucket"),
    ):
        if chosen.fetched is kind:
            reason += f", with blocks of {chosen.source_node if kind is Fetched.OF_NODES else name}"
        if min(blocks, snapshot.limit_blocks) > chosen.cached_blocks:
            reason += f", blocks of {name} cost more to fetch"
    if not snapshot.index_available:
        reason += ", the index is away"
    return SplitDecision(chosen, snapshot.block_size, reason, snapshot.policy, tuple(routes))


def _why(snapshot: ClusterSnapshot, chosen: Route, decodes: list[ComponentRecord]) -> str:
    """Explain why this decode worker was chosen."""
    hits, component = snapshot.hits, chosen.decode.component
    if len(decodes) == 1:
        return f"{component.component_id} is the only one"
    rival = max(decodes, key=lambda other: hits.get(other.node_id, 0))
    busier = hits.get(rival.node_id, 0) > hits.get(component.node_id, 0)
    passed = f", {rival.component_id} has more of the prefix and is busier" if busier else ""
    return f"{component.component_id} is soonest of {len(decodes)}{passed}"


def _by_finish_time(
    snapshot: ClusterSnapshot, models: Models, components: list[ComponentRecord]
) -> list[ComponentRecord]:
    """Sort workers by the estimated time at which they would have computed the request. Ties rotate by ``spread``."""
    start = snapshot.spread % len(components) if components else 0
    sent, hits, size, streams = snapshot.sent_tokens, snapshot.hits, snapshot.block_size, snapshot.sent_load
    finish_times = []
    for component in components[start:] + components[:start]:
        name = component.component_id
        tokens = max(component.queued_tokens, sent.get(name, 0)) + snapshot.prompt_tokens
        tokens -= hits.get(component.node_id, 0) * size
        if component.role == "decode":
            tokens += STREAM_TOKENS * max(component.running_requests, streams.get(name, 0))
        finish_s = tokens * models.rough_token_s(component) + snapshot.adapter_wait_s(component)
        finish_times.append((finish_s, component))
    return [component for _, component in sorted(finish_times, key=itemgetter(0))]


def _prefill_sides(
    snapshot: ClusterSnapshot, models: Models, prefills: list[ComponentRecord], decodes: list[ComponentRecord]
) -> list[PrefillSide]:
    """Return the prefill worker that finishes first on each node of ``decodes``, and the first of all other nodes; the
    shortest wait first."""
    sent, chunk, tokens = snapshot.sent_tokens, snapshot.chunk_tokens, snapshot.prompt_tokens
    near = {component.node_id for component in decodes}
    best: dict[str, ComponentRecord] = {}
    for component in _by_finish_time(snapshot, models, prefills):
        best.setdefault(component.node_id if component.node_id in near else "", component)
    sides = [
        PrefillSide.of(one, models.of(one), chunk, sent.get(one.component_id, 0), snapshot.adapter_wait_s(one))
        for one in best.values()
    ]
    return sorted(sides, key=lambda side: side.queue.wait_s + tokens * side.queue.token_s)


def _route(
    snapshot: ClusterSnapshot,
    component: ComponentRecord,
    model: StepModel,
    best: list[PrefillSide],
    live_hits: Mapping[str, int],
) -> Route:
    """Return and price the route of a decode worker, with its node's prefill worker or the best one of other nodes,
    both from ``best``."""
    size, node_id, component_id = snapshot.block_size, component.node_id, component.component_id
    limit = snapshot.limit_blocks
    # A prefill worker's load is counted in tokens, and it has no streams.
    streams = snapshot.sent_load.get(component_id, 0) if component.role == "decode" else 0
    tokens = snapshot.sent_tokens.get(component_id, 0)
    adapter_wait_s = snapshot.adapter_wait_s(component)
    decode = DecodeSide.of(component, model, snapshot.prompt_tokens, streams, tokens, adapter_wait_s)
    cached, fetch_s, fetched, source_node = _fetch(snapshot, decode, live_hits)
    chosen: PrefillSide | None = None
    for side in best:
        if snapshot.policy.share is None and _share_cores(side.component, component):
            continue
        if side.component.node_id == node_id:
            if chosen is None or side.queue.wait_s <= chosen.queue.wait_s + chosen.extra_s:
                chosen = side
            break
        if chosen is None:
            # Time to fetch the missing part of the prefix to the prefill worker's node, and the last chunk back.
            present = min(snapshot.hits.get(side.component.node_id, 0), cached)
            moved = min(limit - cached, snapshot.chunk_tokens // size) + cached - present
            cost = _fetch_cost(snapshot, side.component.node_id, component)
            chosen = side._replace(extra_s=2 * cost.call_s + moved * cost.block_s)
    splits = {cached}
    if chosen is not None:
        split = snapshot.policy.split_blocks(cached, limit, size)
        splits = {cached, split} if snapshot.policy.share is None else {split}
    price_s = min(route_s(chosen, decode, cached * size, split * size, fetch_s) for split in splits)
    return Route(price_s, decode, chosen, cached, fetch_s, fetched, source_node)


def _share_cores(one: ComponentRecord, other: ComponentRecord) -> bool:
    """Return whether two workers lend each other cores, so that splitting a prompt between them adds no cores."""
    table = one.core_lending_table
    return bool(table) and (one.node_id, table) == (other.node_id, other.core_lending_table)


def _fetch_cost(snapshot: ClusterSnapshot, source: str, component: ComponentRecord) -> FetchCost:
    """Return the measured or assumed cost of a fetch from the node ``source`` to a worker's node."""
    measured = snapshot.fetch_costs(source, component.node_id)
    if measured is not None:
        return measured
    return FetchCost(FETCH_CALL_S, snapshot.fetch_block_s or component.block_bytes / DEFAULT_BYTES_PER_S)


def _fetch(
    snapshot: ClusterSnapshot, decode: DecodeSide, live_hits: Mapping[str, int]
) -> tuple[int, float, Fetched, str]:
    """Choose what to fetch to a decode worker's node: return Route's ``cached_blocks``, ``fetch_s``, ``fetched`` and
    ``source_node``. ``live_hits`` are the leading blocks on live nodes, by node id."""
    node_id, limit = decode.component.node_id, snapshot.limit_blocks
    own, in_bucket = (min(blocks.get(node_id, 0), limit) for blocks in (snapshot.hits, snapshot.bucket_hits))
    others = {name: blocks for name, blocks in live_hits.items() if name != node_id and blocks > own}
    if not others and in_bucket <= own:
        return own, 0.0, Fetched.NOTHING, ""
    return _best_fetch(snapshot, decode, others, own, in_bucket)


def _best_fetch(
    snapshot: ClusterSnapshot, decode: DecodeSide, others: Mapping[str, int], own: int, in_bucket: int
) -> tuple[int, float, Fetched, str]:
    """Return what :func:`_fetch` does, for the fetch with the highest gain: none, from another node, or from a bucket.
    The leading blocks are ``own`` on the worker's node, by node id in ``others`` on nodes with more, and ``in_bucket``
    including those in a bucket."""
    best, best_gain = (own, 0.0, Fetched.NOTHING, ""), 0.0
    # From a bucket, fetch only what the best node lacks.
    from_node, from_node_s, most = own, 0.0, own
    for name, blocks in others.items():
        fetch_s, most = _fetch_cost(snapshot, name, decode.component).seconds(blocks - own), max(most, blocks)
        gain = _gain(snapshot, decode, own, blocks, fetch_s)
        if gain > best_gain:
            best, best_gain = (blocks, fetch_s, Fetched.OF_NODES, name), gain
            from_node, from_node_s = blocks, fetch_s
    if in_bucket > most:
        bucket_block_s = snapshot.bucket_block_s or decode.component.block_bytes / DEFAULT_BYTES_PER_S
        fetch_s = (from_node_s or FETCH_CALL_S) + (in_bucket - from_node) * bucket_block_s
        if _gain(snapshot, decode, own, in_bucket, fetch_s) > best_gain:
            best = in_bucket, fetch_s, Fetched.OF_BUCKET, best[3]
    return best


def _gain(snapshot: ClusterSnapshot, decode: DecodeSide, own: int, blocks: int, fetch_s: float) -> float:
    """Return the seconds that a fetch saves which takes ``fetch_s`` and extends ``own`` leading blocks to ``blocks``. A
    fixed policy maximizes the blocks: return ``blocks``."""
    if snapshot.policy.share is not None:
        return float(blocks)
    size = snapshot.block_size
    return decode.model.range_s(own * size, blocks * size, decode.max_step_tokens) - fetch_s
