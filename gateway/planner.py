"""Where a request runs and where its prompt is split: a pure decision over a picture of the cluster (I9).

    [ cached prefix | whole blocks, run by a prefill worker in chunks | remnant, >= 1 token, run by the decode worker ]
    0            cached                                             split                                           N

``split`` is the one dial: ``split = cached`` is co-located serving, the last whole block is full disaggregation.
Always: cached <= split <= the last whole block that ends at or before N - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

from pillion.errors import ConfigError, Unavailable
from pillion.wire.registry import PartRecord


class SplitPolicy(Protocol):
    """Says how far prefill workers go. ``name`` is what the flag says."""

    @property
    def name(self) -> str:
        """As in ``--split-policy``."""

    def split_blocks(self, cached_blocks: int, limit_blocks: int, prefill: PartRecord, decode: PartRecord) -> int:
        """Blocks before the split, in [cached_blocks, limit_blocks]."""


@dataclass(frozen=True, slots=True)
class FractionPolicy:
    """Prefill workers take ``share`` of the whole blocks that are not cached, rounded down."""

    name: str
    share: Fraction

    def split_blocks(self, cached_blocks: int, limit_blocks: int, prefill: PartRecord, decode: PartRecord) -> int:
        """The same share whatever the load."""
        return cached_blocks + int((limit_blocks - cached_blocks) * self.share)


def parse_policy(text: str) -> SplitPolicy:
    """Reads "disaggregated", "colocated" or "fraction:x" with x in [0, 1]. Raises ConfigError."""
    if text == "disaggregated":
        return FractionPolicy(text, Fraction(1))
    if text == "colocated":
        return FractionPolicy(text, Fraction(0))
    kind, _, said = text.partition(":")
    try:
        share = Fraction(said) if kind == "fraction" else Fraction(-1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share <= 1:
        raise ConfigError(f"split policy {text!r}: write disaggregated, colocated or fraction:x with x from 0 to 1")
    return FractionPolicy(text, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What the planner knows when it decides.

    Attributes:
        prompt_tokens: N; on a replay, prompt and answer so far.
        hits: blocks that the index believes to be on each node, by node id.
        parts: usable parts only: nodes, and workers of this request's model and namespace.
        block_size: tokens per block.
        chunk_tokens: most tokens of one chunk.
        own_load: tokens (prefill) and streams (decode) that this gateway has under way, by part id. Heartbeats are
            up to a second old; what we sent meanwhile is not.
        avoid: parts that failed this request before; taken only where there is no other.
        spread: any number that differs from request to request; it settles ties.
    """

    model: str
    prompt_tokens: int
    hits: Mapping[str, int]
    parts: Sequence[PartRecord]
    policy: SplitPolicy
    block_size: int
    chunk_tokens: int
    own_load: Mapping[str, int] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()
    spread: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One attempt's way. ``chunks`` add up to ``split_tokens - cached_tokens``; empty means no prefill worker."""

    node_id: str
    prefill: PartRecord | None
    decode: PartRecord
    policy: SplitPolicy
    block_size: int
    chunk_tokens: int
    prompt_tokens: int
    cached_tokens: int
    split_tokens: int
    chunks: tuple[int, ...]
    reason: str

    @property
    def limit_blocks(self) -> int:
        """Whole blocks that end at or before N - 1."""
        return (self.prompt_tokens - 1) // self.block_size

    @property
    def total_blocks(self) -> int:
        """Blocks of the prompt with room for the first generated token."""
        return self.prompt_tokens // self.block_size + 1


def plan(picture: Picture) -> Plan:
    """The way of one attempt. Raises Unavailable, naming what is missing."""
    decode = _decode_worker(picture)
    prefill = _prefill_worker(picture, decode.node_id)
    draft = Plan(
        node_id=decode.node_id,
        prefill=prefill,
        decode=decode,
        policy=picture.policy,
        block_size=picture.block_size,
        chunk_tokens=picture.chunk_tokens,
        prompt_tokens=picture.prompt_tokens,
        cached_tokens=0,
        split_tokens=0,
        chunks=(),
        reason="",
    )
    return replan(draft, picture.hits.get(decode.node_id, 0))


def replan(old: Plan, cached_blocks: int) -> Plan:
    """The same workers with another number of cached blocks: the ticket's truth instead of the index's hint (I3)."""
    cached = max(0, min(cached_blocks, old.limit_blocks))
    if old.prefill is None:
        split = cached
        reason = f"co-located: no prefill worker on {old.node_id}"
    else:
        wanted = old.policy.split_blocks(cached, old.limit_blocks, old.prefill, old.decode)
        split = max(cached, min(wanted, old.limit_blocks))
        reason = old.policy.name
        if cached == old.limit_blocks:
            reason += ": nothing left before the remnant" if old.limit_blocks == 0 else ": every whole block is cached"
    tokens = (split - cached) * old.block_size
    return replace(
        old,
        cached_tokens=cached * old.block_size,
        split_tokens=split * old.block_size,
        chunks=_chunks(tokens, old.chunk_tokens, old.block_size),
        reason=reason,
    )


def _chunks(tokens: int, chunk_tokens: int, block_size: int) -> tuple[int, ...]:
    """Full chunks and a rest; every one a multiple of the block size."""
    size = max(block_size, chunk_tokens - chunk_tokens % block_size)
    whole, rest = divmod(tokens, size)
    return (size,) * whole + ((rest,) if rest else ())


def _decode_worker(picture: Picture) -> PartRecord:
    """On the node with the longest hit; there, and among equals, the least loaded."""
    nodes = {part.node_id for part in picture.parts if part.role == "kvnode"}
    workers = [part for part in picture.parts if part.role == "decode"]
    if not workers:
        raise Unavailable(f"no decode worker of model {picture.model!r} lives")
    seated = [worker for worker in workers if worker.node_id in nodes]
    if not seated:
        missing = ", ".join(sorted({worker.node_id for worker in workers}))
        raise Unavailable(f"no KV node lives for the decode workers of model {picture.model!r}: {missing} is missing")

    def rank(part: PartRecord) -> tuple[bool, bool, int, int]:
        avoided = part.part_id in picture.avoid
        return avoided, part.node_id in picture.avoid, -picture.hits.get(part.node_id, 0), _load(picture, part)

    best = min(rank(part) for part in seated)
    return _pick([part for part in seated if rank(part) == best], picture.spread)


def _prefill_worker(picture: Picture, node_id: str) -> PartRecord | None:
    """The least loaded one on the node; None where there is none, or where all that live have failed this request."""
    workers = [
        part
        for part in picture.parts
        if part.role == "prefill" and part.node_id == node_id and part.part_id not in picture.avoid
    ]
    if not workers:
        return None
    least = min(_load(picture, part) for part in workers)
    return _pick([part for part in workers if _load(picture, part) == least], picture.spread)


def _load(picture: Picture, part: PartRecord) -> int:
    """Tokens before a prefill worker, streams on a decode worker: the heartbeat's word or ours, the larger."""
    said = part.waiting_tokens if part.role == "prefill" else part.running_requests + part.waiting_requests
    return max(said, picture.own_load.get(part.part_id, 0))


def _pick(equals: Sequence[PartRecord], spread: int) -> PartRecord:
    return sorted(equals, key=lambda part: part.part_id)[spread % len(equals)]
