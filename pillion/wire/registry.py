"""What a part says of itself in the registry: written as JSON by its heartbeat, read by gateways."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from pillion._version import PROTOCOL
from pillion.types import PartStatus

# Numbers of a step's cost.
STEP_COSTS = 5


def _cost(said: object) -> tuple[float, ...]:
    """Nothing, unless it is all of them and none is absurd."""
    if not isinstance(said, list) or len(said) != STEP_COSTS:
        return ()
    cost = tuple(float(weight) for weight in said)
    return cost if all(math.isfinite(weight) and weight >= 0 for weight in cost) and any(cost) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """One part of the cluster.

    Attributes:
        role: "prefill", "decode", "kvnode" or "gateway".
        address: where its gRPC service is reached.
        model, fingerprint, namespace: what a worker serves; ``namespace`` is the base digest in hexadecimal, over which
            a request's root hash is made (I2).
        node_id: the KV node whose pool it maps (its own for a node).
        boot_epoch: a node's boot number; index entries of another boot are void.
        running_requests, waiting_requests, waiting_tokens: load, for the planner. Only who has no seat yet waits.
        queued_tokens: of a worker, all prompt tokens that it has yet to compute, those of begun prompts included.
        decoding_requests, context_tokens: streams that generate, and the KV tokens that a step reads for them.
        free_seqs: seats that are free.
        max_step_tokens, target_itl_ms: a worker's token budget of a step, and the latency it aims at (0: none).
        step_cost_s: what a step costs, fitted to real ones, in seconds: a step, and each token, sequence, KV token read
            and query-key pair of it. Empty as long as nothing is known.
        largest_step_tokens: tokens of the largest step that this was fitted to.
        block_bytes: bytes of a worker's KV block.
        kernels: what a worker computes with.
        *_blocks: a node's slots by state.
        prompt_tokens, cached_tokens, completion_tokens: of what a gateway has served since it started.
        fenced_parts: workers that a node has fenced and that have not drained.
        heartbeat_age_ms: filled by the reader.
    """

    part_id: str
    role: str
    address: str
    protocol: int = PROTOCOL
    model: str = ""
    fingerprint: str = ""
    namespace: str = ""
    block_size_tokens: int = 0
    max_model_len_tokens: int = 0
    vocab_size: int = 0
    node_id: str = ""
    boot_epoch: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    queued_tokens: int = 0
    decoding_requests: int = 0
    context_tokens: int = 0
    free_seqs: int = 0
    max_step_tokens: int = 0
    target_itl_ms: float = 0.0
    step_cost_s: tuple[float, ...] = ()
    largest_step_tokens: int = 0
    block_bytes: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    committed_blocks: int = 0
    quarantined_blocks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    fenced_parts: tuple[str, ...] = ()
    kernels: str = ""
    heartbeat_age_ms: int = 0

    def to_json(self) -> str:
        """Compact, with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> PartRecord:
        """Fields of a newer version are dropped. Raises ValueError on what is no record."""
        said = json.loads(text)
        if not isinstance(said, dict):
            raise ValueError("a part record is a JSON object")
        try:
            known = {name: said[name] for name in cls.__dataclass_fields__ if name in said}
            fenced, cost = tuple(map(str, said.get("fenced_parts", ()))), _cost(said.get("step_cost_s", ()))
            return cls(**known | {"fenced_parts": fenced, "step_cost_s": cost})
        except TypeError as error:
            raise ValueError(str(error)) from None

    def status(self) -> PartStatus:
        """The public part of it."""
        return PartStatus(**{name: getattr(self, name) for name in PartStatus.__dataclass_fields__})
