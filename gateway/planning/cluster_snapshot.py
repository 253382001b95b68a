"""What the planner is given: the split policy, and the cluster as it is when a request is planned (I9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction

from pillion.config import parse_split_policy
from pillion.wire.registry import ComponentRecord

# What loading an adapter costs a request.
ADAPTER_LOAD_S = 0.1


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How far prefill workers go.

    Attributes:
        name: as in ``--split-policy``.
        share: share of the whole uncached blocks that prefill workers compute, rounded down to blocks; None where
            predictions decide (:mod:`pillion.gateway.planning.plan_auto`).
    """

    name: str
    share: Fraction | None

    def split_blocks(self, cached_blocks: int, limit_blocks: int) -> int:
        """Blocks before the split, in [cached_blocks, limit_blocks]; all that are whole where no share is given."""
        return limit_blocks if self.share is None else cached_blocks + int((limit_blocks - cached_blocks) * self.share)


def parse_policy(text: str) -> SplitPolicy:
    """The policy that ``--split-policy`` names. Raises ConfigError."""
    return SplitPolicy(text, parse_split_policy(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """What the planner knows of a request and of the cluster when it decides.

    Attributes:
        prompt_tokens: N; on a replay, prompt and answer so far.
        answered_tokens: how many of them are the answer's.
        hits: blocks that the index believes to be on each node, by node id.
        far_hits: blocks that each node can have with those of a bucket, by node id; none where no bucket has more.
        components: usable ones only: nodes, and workers of this request's model and namespace.
        block_size: tokens per block.
        chunk_tokens: most tokens of one chunk.
        board_mates: further workers that share a board of cores with one of ``components``: no plan uses them, but what
            they compute takes cores.
        sent_load: tokens (prefill) and streams (decode) that gateways have under way, by component id: this one, and
            the others as far as it knows. Heartbeats are up to a second old, and do not know of them.
        sent_tokens: prompt tokens that gateways have sent to each component and that are not computed yet, by component
            id.
        fetch_block_s: seconds that a block takes to come from another node; 0.0 if that was never measured.
        bucket_block_s: seconds that it takes to come from a bucket; 0.0 if that was never measured.
        demand_per_s: about how many requests a second come to all gateways, and how many of them use prefill workers
            (see Demand in plan_cost).
        demand_tokens: prompt tokens of these requests on the average, those cached left out; 0.0: unknown.
        sticky_choice: what the last request of this size did (see StickyChoices in plan_auto).
        index_available: whether the index could be asked for ``hits``.
        avoid: components that failed this request before; used only where there is no other.
        spread: any number that differs from request to request; it settles ties.
        unscored_from: the first position of the prompt whose log probability is asked: the decode worker computes it
            and all behind it, whatever is cached. None: none is.
        adapter: digest of the request's adapter; "" for the model alone.
        own_adapters: workers that this gateway has lately sent requests with this adapter, by component id.
    """

    model: str
    prompt_tokens: int
    hits: Mapping[str, int]
    components: Sequence[ComponentRecord]
    policy: SplitPolicy
    block_size: int
    chunk_tokens: int
    answered_tokens: int = 0
    board_mates: Sequence[ComponentRecord] = ()
    far_hits: Mapping[str, int] = field(default_factory=dict)
    sent_load: Mapping[str, int] = field(default_factory=dict)
    sent_tokens: Mapping[str, int] = field(default_factory=dict)
    fetch_block_s: float = 0.0
    bucket_block_s: float = 0.0
    sticky_choice: str = ""
    demand_per_s: tuple[float, float] = (0.0, 0.0)
    demand_tokens: float = 0.0
    index_available: bool = True
    avoid: frozenset[str] = frozenset()
    spread: int = 0
    unscored_from: int | None = None
    adapter: str = ""
    own_adapters: Set[str] = frozenset()

    @property
    def limit_blocks(self) -> int:
        """Most blocks that may be found, or left to a prefill worker: those whose logits nobody needs."""
        last = self.prompt_tokens - 1 if self.unscored_from is None else self.unscored_from
        return last // self.block_size

    def live_nodes(self) -> frozenset[str]:
        """KV nodes that did not fail this request."""
        return frozenset(one.node_id for one in self.components if one.role == "kvnode") - self.avoid

    def adapter_wait_s(self, component: ComponentRecord) -> float:
        """How long a request waits for its adapter on a worker, roughly: more where sequences wait for theirs."""
        if not self.adapter or self.adapter in component.adapters or component.component_id in self.own_adapters:
            return 0.0
        return ADAPTER_LOAD_S * (1 + component.adapter_waits)

    def prefill_workers(self, node_ids: Set[str]) -> list[ComponentRecord]:
        """Prefill workers on these nodes that did not fail this request."""
        prefills = (one for one in self.components if one.role == "prefill" and one.node_id in node_ids)
        return [one for one in prefills if one.component_id not in self.avoid]
