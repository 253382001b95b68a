"""``--split-policy auto``: the way with the soonest first token that spares the streams of the decode worker (I9).

    every decode worker, with the better of: its own node's best prefill worker, the best one elsewhere, none
      --> the least of predicted time to first token + time that running streams lose beyond their latency
          + time that those wait longer who come behind
      --> its dial: the split, on a grid between cached and the last whole block; again when the ticket shows what
          is really pinned

A prefix hit is worth the computing that it saves, not more: a node with a long queue loses requests to one that has to
compute the prefix again. Whether prefill workers are used at all changes only for a gain above HYSTERESIS, so that two
equal ways do not take turns with every heartbeat.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot
from pillion.gateway.planning.plan_cost import (
    DEFAULT_BYTES_PER_S,
    FETCH_CALL_S,
    LEAST_FETCH_S,
    Board,
    DecodeSide,
    Models,
    PrefillSide,
    StepModel,
    way_s,
)
from pillion.wire.registry import ComponentRecord

# Share of the prompt's own computing time that another way must gain over the last one's kind, and a smaller span over
# a larger one: what is about equal is left to prefill workers, and decode workers stay free for short prompts.
HYSTERESIS = 0.1
# Places between cached and the last whole block where the split may fall, beside cached itself.
SPLIT_STEPS = 8
# Decode workers whose predictions differ by less than this share are equal: the request's number chooses.
EQUAL_SHARE = 0.01
# Most decode workers that are weighed; of more, those with the fewest tokens before ours, at their own speeds.
MAX_WEIGHED = 4
# Tokens that a stream counts for when decode workers are ranked.
STREAM_TOKENS = 16
# A way's kind, as the next request remembers it.
ON_PREFILL = "prefill"
ON_DECODE = "decode"


class Fetched(enum.Enum):
    """What is brought to a decode worker's node, beside what its own lower tiers have."""

    NOTHING = enum.auto()
    OF_NODES = enum.auto()
    OF_BUCKET = enum.auto()


class Way(NamedTuple):
    """A decode worker with the better of no prefill worker and of one for all chunks: that price is enough to compare
    decode workers. ``fetched``: the sources whose blocks are worth their transfer, which takes ``fetch_s``."""

    price_s: float
    decode: DecodeSide
    prefill: PrefillSide | None
    cached_blocks: int
    fetch_s: float
    fetched: Fetched


@dataclass(frozen=True, slots=True)
class Dial:
    """Decides one request's split: both workers as they were when it was planned.

    Attributes:
        sticky_choice: ON_PREFILL or ON_DECODE, what the last request of its size did; "" where there was none.
        words: why this decode worker, and what was known of the prefix.
    """

    way: Way
    block_size: int
    sticky_choice: str
    words: str

    def split(self, cached_blocks: int, limit_blocks: int) -> tuple[int, str]:
        """Blocks before the split, and why."""
        cached, prefill = cached_blocks * self.block_size, self.way.prefill
        alone_s = self._price(cached, cached)
        prefix = f"prefix of {cached} tokens" if cached else "no prefix"
        if cached_blocks != self.way.cached_blocks:
            prefix += f" ({self.way.cached_blocks * self.block_size} expected)"
        if cached_blocks == limit_blocks:
            return cached_blocks, f"nothing to share out; {self.words}; {prefix}"
        if prefill is None:
            return cached_blocks, f"co-located, no prefill worker; {self.words}; {prefix}"
        margin_s = self.margin_s(cached)
        places = [cached_blocks + (limit_blocks - cached_blocks) * n // SPLIT_STEPS for n in range(SPLIT_STEPS, 0, -1)]
        prices = {at: self._price(cached, at * self.block_size) for at in places if at > cached_blocks}
        best_s = min(prices.values())
        best = next(at for at, price_s in prices.items() if price_s <= best_s + margin_s)
        shared, kept = self._uses_prefill(margin_s, alone_s, best_s)
        where = (
            f"{prefill.component.component_id} computes {best * self.block_size - cached}" if shared else "co-located"
        )
        compared = f"{alone_s:.3g} s alone, {best_s:.3g} s with {prefill.component.component_id}"
        why = f"{where}: {compared}{', as before' if kept else ''}; {self.words}; {prefix}"
        return best if shared else cached_blocks, why

    def margin_s(self, cached: int) -> float:
        """What another way must gain, in seconds, with ``cached`` tokens. It depends on the prompt alone: one that
        changed with the load would let the load decide."""
        return HYSTERESIS * self.way.decode.own_cores_s(cached, self.way.decode.end)

    def fetch_limit_s(self, start_blocks: int, end_blocks: int) -> float:
        """The longest that fetching these blocks may take: computing them there takes no longer."""
        decode = self.way.decode
        computed_s = decode.model.span_s(start_blocks * self.block_size, end_blocks * self.block_size, decode.most)
        return max(LEAST_FETCH_S, computed_s)

    def _uses_prefill(self, margin_s: float, alone_s: float, shared_s: float) -> tuple[bool, bool]:
        """Whether a prefill worker is used, and whether that is so only because the last request did it."""
        better = shared_s < alone_s
        if not self.sticky_choice:
            return better, False
        if self.sticky_choice == ON_PREFILL:
            kept = shared_s <= alone_s + margin_s
            return kept, kept and not better
        kept = alone_s <= shared_s + margin_s
        return not kept, kept and better

    def _price(self, cached: int, split: int) -> float:
        return way_s(self.way.prefill, self.way.decode, cached, split, self.way.fetch_s)


class StickyChoices:
    """Whether the last request used prefill workers, by model and size of what it had to compute. Bounded: sizes count
    by powers of two, and a gateway serves few models."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], str] = {}

    def of(self, model: str, tokens: int) -> str:
        """ON_PREFILL, ON_DECODE, or "" where there was none."""
        return self._last.get((model, tokens.bit_length()), "")

    def note(self, model: str, tokens: int, shared: bool) -> None:
        """Notes a plan; ``shared``: it uses a prefill worker."""
        self._last[model, tokens.bit_length()] = ON_PREFILL if shared else ON_DECODE


def choose(
    snapshot: ClusterSnapshot, decodes: list[ComponentRecord], prefills: list[ComponentRecord], nodes: frozenset[str]
) -> Dial:
    """Chooses the workers of one attempt; the dial's way names them.

    Args:
        decodes: at least one, all of them usable.
        prefills: may be empty.
        nodes: live ones that did not fail this request.
    """
    models, hits = Models(decodes, prefills), snapshot.hits
    weighed = _least(snapshot, models, decodes)[:MAX_WEIGHED]
    best = _prefill_sides(snapshot, models, prefills, weighed)
    known, holder = max(((hits[name], name) for name in nodes if name in hits), default=(0, ""))
    limit = snapshot.limit_blocks
    behind = snapshot.demand_per_s[0] / len(decodes)
    boards = _boards(snapshot, weighed) if any(component.core_board for component in weighed) else {}
    ways = [
        _way(
            snapshot,
            component,
            models.of(component),
            best,
            min(known, limit),
            limit,
            behind,
            boards.get(component.component_id),
        )
        for component in weighed
    ]
    least_s = min(way.price_s for way in ways) * (1 + EQUAL_SHARE)
    chosen = next(way for way in ways if way.price_s <= least_s)
    words = _why(snapshot, chosen, decodes)
    node_id = chosen.decode.component.node_id
    far = snapshot.far_hits.get(node_id, 0)
    for kind, blocks, name in ((Fetched.OF_NODES, known, holder), (Fetched.OF_BUCKET, far, "a bucket")):
        if chosen.fetched is kind:
            words += f", with blocks of {name}"
        elif min(blocks, limit) > chosen.cached_blocks:
            words += f", blocks of {name} cost more to fetch"
    if not snapshot.index_available:
        words += ", the index is away"
    return Dial(chosen, snapshot.block_size, snapshot.sticky_choice, words)


def _why(snapshot: ClusterSnapshot, chosen: Way, decodes: list[ComponentRecord]) -> str:
    """Why this decode worker was chosen."""
    hits, component = snapshot.hits, chosen.decode.component
    if len(decodes) == 1:
        return f"{component.component_id} is the only one"
    rival = max(decodes, key=lambda other: hits.get(other.node_id, 0))
    busier = hits.get(rival.node_id, 0) > hits.get(component.node_id, 0)
    passed = f", {rival.component_id} has more of the prefix and is busier" if busier else ""
    return f"{component.component_id} is soonest of {len(decodes)}{passed}"


def _least(snapshot: ClusterSnapshot, models: Models, components: list[ComponentRecord]) -> list[ComponentRecord]:
    """Components by the time until ours would be done, roughly, the soonest first; equals are rotated by ``spread``, so
    that they take turns."""
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
    """The best prefill worker of each decode worker's node, and the best one elsewhere; the soonest first."""
    sent, chunk, tokens = snapshot.sent_tokens, snapshot.chunk_tokens, snapshot.prompt_tokens
    near = {component.node_id for component in decodes}
    best: dict[str, ComponentRecord] = {}
    for component in _least(snapshot, models, prefills):
        best.setdefault(component.node_id if component.node_id in near else "", component)
    behind = snapshot.demand_per_s[1] / max(1, len(prefills))
    sides = [PrefillSide.of(p, models.of(p), chunk, sent.get(p.component_id, 0), behind) for p in best.values()]
    if snapshot.adapter:
        sides = [side._replace(wait_s=side.wait_s + snapshot.adapter_wait_s(side.component)) for side in sides]
    return sorted(sides, key=lambda side: side.wait_s + tokens * side.token_s)


def _boards(snapshot: ClusterSnapshot, decodes: list[ComponentRecord]) -> dict[str, Board]:
    """The board of each decode worker that shares its cores, by component id. A board is one node's."""
    mates: dict[tuple[str, str], list[ComponentRecord]] = {}
    for component in (*snapshot.components, *snapshot.board_mates):
        if component.core_board:
            mates.setdefault((component.node_id, component.core_board), []).append(component)
    follower_tokens = snapshot.demand_tokens or snapshot.prompt_tokens
    return {
        decode.component_id: Board.of(
            decode, mates[decode.node_id, decode.core_board], snapshot.sent_tokens, follower_tokens
        )
        for decode in decodes
        if decode.core_board and decode.core_share
    }


def _way(
    snapshot: ClusterSnapshot,
    component: ComponentRecord,
    model: StepModel,
    best: list[PrefillSide],
    known: int,
    limit: int,
    behind: float,
    board: Board | None,
) -> Way:
    """The price of this decode worker, with its node's prefill worker or the best one elsewhere."""
    size, node_id, component_id = snapshot.block_size, component.node_id, component.component_id
    block_s = snapshot.fetch_block_s or component.block_bytes / DEFAULT_BYTES_PER_S
    streams, tokens = snapshot.sent_load.get(component_id, 0), snapshot.sent_tokens.get(component_id, 0)
    decode = DecodeSide.of(component, model, snapshot.prompt_tokens, streams, tokens, behind, board)
    if snapshot.adapter:
        decode = decode._replace(wait_s=decode.wait_s + snapshot.adapter_wait_s(component))
    cached, fetch_s, fetched = _fetched(snapshot, decode, known, limit, block_s)
    chosen: PrefillSide | None = None
    for side in best:
        if side.component.node_id == node_id:
            if chosen is None or side.wait_s <= chosen.wait_s + chosen.extra_s:
                chosen = side
            break
        if chosen is None:
            there = min(snapshot.hits.get(side.component.node_id, 0), cached)
            carried = min(limit - cached, snapshot.chunk_tokens // size) + cached - there
            chosen = side._replace(extra_s=2 * FETCH_CALL_S + carried * block_s)
    price_s = way_s(None, decode, cached * size, cached * size, fetch_s)
    if chosen is not None and limit > cached:
        price_s = min(price_s, way_s(chosen, decode, cached * size, limit * size, fetch_s))
    return Way(price_s, decode, chosen, cached, fetch_s, fetched)


def _fetched(
    snapshot: ClusterSnapshot, decode: DecodeSide, known: int, limit: int, block_s: float
) -> tuple[int, float, Fetched]:
    """Leading blocks that a decode worker's node will have, the seconds that fetching takes, and from where: of its own
    blocks, those with the ``known`` ones of other nodes, and those with a bucket's behind them, what saves most."""
    node_id, size = decode.component.node_id, snapshot.block_size
    own = min(snapshot.hits.get(node_id, 0), limit)
    here, nodes_s = max(own, known), max(0, known - own) * block_s
    far = min(snapshot.far_hits.get(node_id, 0), limit)
    bucket_s = nodes_s + (far - here) * (snapshot.bucket_block_s or decode.component.block_bytes / DEFAULT_BYTES_PER_S)
    best, best_s = (own, 0.0, Fetched.NOTHING), 0.0
    for blocks, taken_s, kind in ((known, nodes_s, Fetched.OF_NODES), (far, bucket_s, Fetched.OF_BUCKET)):
        if blocks <= own or (kind is Fetched.OF_BUCKET and far <= here):
            continue
        saved_s = decode.model.span_s(own * size, blocks * size, decode.most) - taken_s - FETCH_CALL_S
        if saved_s > best_s:
            best, best_s = (blocks, taken_s + FETCH_CALL_S, kind), saved_s
    return best
