"""Chooses the route with the soonest first token that spares running streams, and its split. Sans-IO (I9).

    every decode worker, with the better of: its own node's best prefill worker, the best one elsewhere, none
      --> minimize predicted time to first token + running streams' excess over their target latency
      --> its decision: a prefill worker computes all uncached whole blocks, or none; again when the ticket shows
          what is really pinned

A fixed policy has one split, and each route is priced for it.

A prefix hit is worth the computation that it saves, not more: a node with a long queue loses requests to one that has
to compute the prefix again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.planning.cluster_view import ClusterSnapshot, SplitPolicy
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

# Limit on the slowdown of a prompt that measures an unmeasured prefill worker: otherwise one that is assumed too slow
# would never be used.
LEARNING_FACTOR = 2.0
# Decode workers that are compared: those with the fewest tokens before the request's, by their speeds. With one, a
# tenth fewer requests of simulated loads are good at 1.2 a second per worker.
MAX_WEIGHED = 4
STREAM_TOKENS = 16


class Fetched(enum.Enum):
    """Source of blocks fetched to a decode worker's node, besides its own lower tiers."""

    NOTHING = enum.auto()
    OF_NODES = enum.auto()
    OF_BUCKET = enum.auto()


class Route(NamedTuple):
    """A decode worker with the better of two choices: no prefill worker, or one for all chunks. The better one's price
    suffices to compare decode workers. ``fetched`` is the source whose blocks are worth their transfer of ``fetch_s``;
    ``holder`` is the other node asked first, or ""."""

    price_s: float
    decode: DecodeSide
    prefill: PrefillSide | None
    cached_blocks: int
    fetch_s: float
    fetched: Fetched
    holder: str = ""


@dataclass(frozen=True, slots=True)
class SplitDecision:
    """Decision on one request's split, with both workers as at the time of planning.

    Attributes:
        words: why this decode worker was chosen, and what was known about the prefix.
        policy: the split's position, unless predictions decide.
        weighed: the compared routes, of which ``route`` is the cheapest.
    """

    route: Route
    block_size: int
    words: str
    policy: SplitPolicy
    weighed: tuple[Route, ...] = ()

    def split(self, cached_blocks: int, limit_blocks: int) -> tuple[int, str]:
        """Return the number of blocks before the split, and why."""
        cached = cached_blocks * self.block_size
        prefix = f"prefix of {cached} tokens" if cached else "no prefix"
        if cached_blocks != self.route.cached_blocks:
            prefix += f" ({self.route.cached_blocks * self.block_size} expected)"
        split_blocks, where = self._place(cached_blocks, limit_blocks)
        return split_blocks, f"{where}; {self.words}; {prefix}"

    def _place(self, cached_blocks: int, limit_blocks: int) -> tuple[int, str]:
        if cached_blocks == limit_blocks:
            return cached_blocks, "nothing to share out"
        if self.route.prefill is None:
            whole = self.route.decode.component.role == "prefill"
            return cached_blocks, "a whole text" if whole else "co-located, no prefill worker"
        if self.policy.share is None:
            return self._predicted(self.route.prefill, cached_blocks, limit_blocks)
        fixed = self.policy.split_blocks(cached_blocks, limit_blocks, self.block_size)
        return fixed, self._where(cached_blocks, fixed)

    def _predicted(self, prefill: PrefillSide, cached_blocks: int, limit_blocks: int) -> tuple[int, str]:
        """Return the cheaper split: all for the prefill worker, or nothing."""
        size = self.block_size
        alone_s, shared_s = (
            self.price_s(cached_blocks * size, blocks * size) for blocks in (cached_blocks, limit_blocks)
        )
        shared = shared_s < alone_s
        learns = not shared and shared_s <= LEARNING_FACTOR * alone_s and self._is_unknown(prefill)
        chosen = limit_blocks if shared or learns else cached_blocks
        compared = f"{alone_s:.3g} s alone, {shared_s:.3g} s with {prefill.component.component_id}"
        compared += ", to learn its pace" if learns else ""
        return chosen, f"{self._where(cached_blocks, chosen)}: {compared}"

    def _is_unknown(self, prefill: PrefillSide) -> bool:
        """Return whether a prefill worker is unmeasured and idle, so that its price is that of other workers."""
        there = prefill.component
        return not (
            there.step_cost_s or there.largest_step_tokens or prefill.queue.prompts or prefill.queue.prompts_s > 0
        )

    def _where(self, cached_blocks: int, split_blocks: int) -> str:
        if split_blocks == cached_blocks or self.route.prefill is None:
            return "co-located"
        name = self.route.prefill.component.component_id
        return f"{name} computes {(split_blocks - cached_blocks) * self.block_size}"

    def fetch_limit_s(self, start_blocks: int, end_blocks: int) -> float | None:
        """Return the time limit for fetching these blocks: the time to compute them there. None for a fixed policy,
        whose fetches have the flags' limits."""
        if self.policy.share is not None:
            return None
        decode = self.route.decode
        computed_s = decode.model.range_s(start_blocks * self.block_size, end_blocks * self.block_size, decode.most)
        return max(MIN_FETCH_S, computed_s)

    def price_s(self, cached: int, split: int) -> float:
        """Return the price in seconds of a split at ``split`` tokens with ``cached`` ones."""
        return route_s(self.route.prefill, self.route.decode, cached, split, self.route.fetch_s)


def choose(
    snapshot: ClusterSnapshot, decodes: list[ComponentRecord], prefills: list[ComponentRecord], nodes: frozenset[str]
) -> SplitDecision:
    """Choose the workers of one attempt, named by the decision's route.

    Args:
        decodes: usable decode workers, at least one.
        prefills: usable prefill workers, if any.
        nodes: live nodes that did not fail this request.
    """
    models, hits = Models(decodes, prefills), snapshot.hits
    weighed = _by_finish_time(snapshot, models, decodes)[:MAX_WEIGHED]
    best = _prefill_sides(snapshot, models, prefills, weighed)
    held = {name: min(blocks, snapshot.limit_blocks) for name, blocks in hits.items() if name in nodes}
    routes = [_route(snapshot, component, models.of(component), best, held) for component in weighed]
    chosen = min(routes, key=lambda route: route.price_s)
    words = _why(snapshot, chosen, decodes)
    node_id = chosen.decode.component.node_id
    far = snapshot.far_hits.get(node_id, 0)
    known, holder = max(((blocks, name) for name, blocks in held.items()), default=(0, ""))
    for kind, blocks, name in ((Fetched.OF_NODES, known, holder), (Fetched.OF_BUCKET, far, "a bucket")):
        if chosen.fetched is kind:
            words += f", with blocks of {chosen.holder if kind is Fetched.OF_NODES else name}"
        if min(blocks, snapshot.limit_blocks) > chosen.cached_blocks:
            words += f", blocks of {name} cost more to fetch"
    if not snapshot.index_available:
        words += ", the index is away"
    return SplitDecision(chosen, snapshot.block_size, words, snapshot.policy, tuple(routes))


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
    """Sort components by the estimated time until the request would be done there. Ties rotate by ``spread``."""
    turn = snapshot.spread % len(components) if components else 0
    sent, hits, size, streams = snapshot.sent_tokens, snapshot.hits, snapshot.block_size, snapshot.sent_load
    found = []
    for component in components[turn:] + components[:turn]:
        name, reported, mine = component.component_id, component.queued_tokens, sent.get(component.component_id, 0)
        tokens = (
            (reported if reported > mine else mine) + snapshot.prompt_tokens - hits.get(component.node_id, 0) * size
        )
        if component.role == "decode":
            tokens += STREAM_TOKENS * max(component.running_requests, streams.get(name, 0))
        found.append((tokens * models.rough_token_s(component) + snapshot.adapter_wait_s(component), component))
    return [component for _, component in sorted(found, key=itemgetter(0))]


def _prefill_sides(
    snapshot: ClusterSnapshot, models: Models, prefills: list[ComponentRecord], decodes: list[ComponentRecord]
) -> list[PrefillSide]:
    """Return the best prefill worker of each decode worker's node, and the best one elsewhere, soonest first."""
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
    held: Mapping[str, int],
) -> Route:
    """Price this decode worker, with its node's prefill worker or the best one elsewhere."""
    size, node_id, component_id = snapshot.block_size, component.node_id, component.component_id
    limit = snapshot.limit_blocks
    # A prefill worker's load is counted in tokens, and it has no streams.
    streams = snapshot.sent_load.get(component_id, 0) if component.role == "decode" else 0
    tokens = snapshot.sent_tokens.get(component_id, 0)
    held_s = snapshot.adapter_wait_s(component)
    decode = DecodeSide.of(component, model, snapshot.prompt_tokens, streams, tokens, held_s)
    cached, fetch_s, fetched, holder = _fetched(snapshot, decode, held)
    chosen: PrefillSide | None = None
    for side in best:
        if snapshot.policy.share is None and _share_cores(side.component, component):
            continue
        if side.component.node_id == node_id:
            if chosen is None or side.queue.wait_s <= chosen.queue.wait_s + chosen.extra_s:
                chosen = side
            break
        if chosen is None:
            there = min(snapshot.hits.get(side.component.node_id, 0), cached)
            carried = min(limit - cached, snapshot.chunk_tokens // size) + cached - there
            cost = _fetch_cost(snapshot, side.component.node_id, component)
            chosen = side._replace(extra_s=2 * cost.call_s + carried * cost.block_s)
    places = {cached}
    if chosen is not None:
        most = snapshot.policy.split_blocks(cached, limit, size)
        places = {cached, most} if snapshot.policy.share is None else {most}
    price_s = min(route_s(chosen, decode, cached * size, place * size, fetch_s) for place in places)
    return Route(price_s, decode, chosen, cached, fetch_s, fetched, holder)


def _share_cores(one: ComponentRecord, other: ComponentRecord) -> bool:
    """Return whether two workers lend each other cores, so that one computes for the other on the same cores."""
    table = one.core_lending_table
    return bool(table) and (one.node_id, table) == (other.node_id, other.core_lending_table)


def _fetch_cost(snapshot: ClusterSnapshot, source: str, component: ComponentRecord) -> FetchCost:
    """Return the known or assumed cost of a fetch from the node ``source`` to a worker's node."""
    measured = snapshot.fetch_costs(source, component.node_id)
    if measured is not None:
        return measured
    return FetchCost(FETCH_CALL_S, snapshot.fetch_block_s or component.block_bytes / DEFAULT_BYTES_PER_S)


def _fetched(snapshot: ClusterSnapshot, decode: DecodeSide, held: Mapping[str, int]) -> tuple[int, float, Fetched, str]:
    """Return the leading blocks that a decode worker's node will have, the seconds to fetch them, their sources, and
    the other node asked first. A fixed policy takes the most blocks. ``held`` are the blocks of live nodes, by node
    id."""
    node_id, limit = decode.component.node_id, snapshot.limit_blocks
    own, far = (min(blocks.get(node_id, 0), limit) for blocks in (snapshot.hits, snapshot.far_hits))
    others = {name: blocks for name, blocks in held.items() if name != node_id and blocks > own}
    if not others and far <= own:
        return own, 0.0, Fetched.NOTHING, ""
    return _best_fetch(snapshot, decode, others, own, far)


def _best_fetch(
    snapshot: ClusterSnapshot, decode: DecodeSide, others: Mapping[str, int], own: int, far: int
) -> tuple[int, float, Fetched, str]:
    """Return the option that saves most: the ``own`` blocks of the worker's node, with the blocks of another node, or
    with a bucket's ``far`` blocks after them. ``others`` are the nodes with more than ``own``."""
    best, best_gain = (own, 0.0, Fetched.NOTHING, ""), 0.0
    # Fetch from the best node first, if that pays off, and only the rest from the bucket.
    here, here_s, most = own, 0.0, own
    for name, blocks in others.items():
        taken_s, most = _fetch_cost(snapshot, name, decode.component).seconds(blocks - own), max(most, blocks)
        gain = _gain(snapshot, decode, own, blocks, taken_s)
        if gain > best_gain:
            best, best_gain = (blocks, taken_s, Fetched.OF_NODES, name), gain
            here, here_s = blocks, taken_s
    if far > most:
        bucket_block_s = snapshot.bucket_block_s or decode.component.block_bytes / DEFAULT_BYTES_PER_S
        taken_s = (here_s or FETCH_CALL_S) + (far - here) * bucket_block_s
        if _gain(snapshot, decode, own, far, taken_s) > best_gain:
            best = far, taken_s, Fetched.OF_BUCKET, best[3]
    return best


def _gain(snapshot: ClusterSnapshot, decode: DecodeSide, own: int, blocks: int, taken_s: float) -> float:
    """Return the seconds saved by ``blocks`` blocks over ``own``; for a fixed policy, ``blocks``."""
    if snapshot.policy.share is not None:
        return float(blocks)
    size = snapshot.block_size
    return decode.model.range_s(own * size, blocks * size, decode.most) - taken_s
