"""The planner's input: the split policy, and the cluster at the time of planning. Sans-IO (I9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction

from pillion.config import parse_split_policy
from pillion.gateway.planning.plan_cost import FetchCost, unmeasured
from pillion.wire.registry import ComponentRecord

# Assumed time to load an adapter, for each sequence ahead of the request and for itself.
ADAPTER_LOAD_S = 0.1


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How much of a prompt prefill workers compute.

    Attributes:
        name: the value of ``--split-policy``.
        share: prefill workers' share of the uncached whole blocks, rounded down; None to decide by predictions
            (:mod:`pillion.gateway.planning.split_decision`).
        max_split_tokens: max tokens before the split; None for no limit.
    """

    name: str
    share: Fraction | None
    max_split_tokens: int | None = None

    def split_blocks(self, cached_blocks: int, limit_blocks: int, block_size: int) -> int:
        """Return the number of blocks before the split, in [cached_blocks, limit_blocks]. Without a share it is
        ``limit_blocks``, or the policy's own limit if lower."""
        if self.max_split_tokens is not None:
            limit_blocks = max(cached_blocks, min(limit_blocks, self.max_split_tokens // block_size))
        return limit_blocks if self.share is None else cached_blocks + int((limit_blocks - cached_blocks) * self.share)


def parse_policy(text: str) -> SplitPolicy:
    """Parse a value of ``--split-policy``. Raises ConfigError."""
    return SplitPolicy(text, parse_split_policy(text))


@dataclass(frozen=True, slots=True)
class StatePages:
    """Slots per state of a hybrid model, and slots for the states of a ``running`` sequence; 0 for other models."""

    one: int = 0
    running: int = 0


NO_STATES = StatePages()


# Not frozen: RoutePlanner fills in fields, as a copy would cost a tenth of a plan.
@dataclass(slots=True, kw_only=True)
class ClusterSnapshot:
    """The planner's input: a request, and the cluster at the time of the decision.

    Attributes:
        prompt_tokens: the prompt's tokens, N; on a replay, including the answer so far.
        answered_tokens: tokens of ``prompt_tokens`` that are the answer's.
        hits: leading blocks of the prompt on each node according to the index, by node id.
        bucket_hits: blocks that each node can have including those in a bucket, by node id; empty if no bucket has
            more.
        components: usable components: nodes, and workers of this request's model and namespace.
        block_size: tokens per block.
        chunk_tokens: maximum tokens per chunk.
        sent_load: tokens (prefill) and streams (decode) in progress by component id, sent by this gateway and, as far
            as they report it, by the others. A component's heartbeat, up to a second old, may not include them.
        sent_tokens: prompt tokens sent by gateways and not computed yet, by component id.
        fetch_costs: returns the cost of a fetch from one node to another, by their ids; None if never measured.
        fetch_block_s: seconds per block fetched between nodes without a measurement; 0.0 if no fetch was measured.
        bucket_block_s: seconds per block fetched from a bucket; 0.0 if never measured.
        index_available: whether the index was available for ``hits``.
        avoid: components that failed this request before; used only as a last resort.
        spread: a number that differs between requests; breaks ties.
        unscored_from: first prompt position whose log probability is requested and not computed yet; the decode worker
            computes all tokens from it on, cached or not. None if none is requested.
        adapter: digest of the request's adapter; "" for none.
        own_adapters: workers to which this gateway has lately sent this adapter, by component id.
        states: slots of the model's states.
        known_blocks: most leading blocks of the prompt on any node, with or without a state after them; 0 for a model
            without states.
        text_workers: ids of prefill workers that may compute the whole text of a request for a vector; empty for a
            request that generates.
    """

    model: str
    prompt_tokens: int
    hits: Mapping[str, int]
    components: Sequence[ComponentRecord]
    policy: SplitPolicy
    block_size: int
    chunk_tokens: int
    answered_tokens: int = 0
    bucket_hits: Mapping[str, int] = field(default_factory=dict)
    sent_load: Mapping[str, int] = field(default_factory=dict)
    sent_tokens: Mapping[str, int] = field(default_factory=dict)
    fetch_costs: Callable[[str, str], FetchCost | None] = unmeasured
    fetch_block_s: float = 0.0
    bucket_block_s: float = 0.0
    index_available: bool = True
    avoid: frozenset[str] = frozenset()
    spread: int = 0
    unscored_from: int | None = None
    adapter: str = ""
    own_adapters: Set[str] = frozenset()
    states: StatePages = NO_STATES
    known_blocks: int = 0
    text_workers: Set[str] = frozenset()

    @property
    def limit_blocks(self) -> int:
        """Max leading blocks that may be cached or computed by a prefill worker, since their logits are not needed."""
        last = self.prompt_tokens - 1 if self.unscored_from is None else self.unscored_from
        return last // self.block_size

    def live_nodes(self) -> frozenset[str]:
        """Return the KV nodes that did not fail this request."""
        return frozenset(one.node_id for one in self.components if one.role == "kvnode") - self.avoid

    def adapter_wait_s(self, component: ComponentRecord) -> float:
        """Estimate how long a request waits for its adapter on a worker, behind the sequences that wait for other
        adapters."""
        if not self.adapter or self.adapter in component.adapters or component.component_id in self.own_adapters:
            return 0.0
        return ADAPTER_LOAD_S * (1 + component.adapter_waits)

    def prefill_workers(self, node_ids: Set[str]) -> list[ComponentRecord]:
        """Return the prefill workers on these nodes that did not fail this request."""
        prefills = (one for one in self.components if one.role == "prefill" and one.node_id in node_ids)
        return [one for one in prefills if one.component_id not in self.avoid]
