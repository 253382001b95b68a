"""What a part says of itself in the registry: written as JSON by its heartbeat, read by gateways."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from pillion._version import PROTOCOL
from pillion.types import ComponentStatus

Number = TypeVar("Number", int, float)

# Numbers of a step's cost.
STEP_COSTS = 5


# No part counts more of anything.
MAX_COUNT = 2**64


def _cost(said: object) -> tuple[float, ...]:
    """Nothing, unless it is all of them and none is absurd."""
    if not isinstance(said, list) or len(said) != STEP_COSTS:
        return ()
    cost = tuple(_number(weight, -1.0) for weight in said)
    return cost if min(cost) >= 0 and any(cost) else ()


def _number(said: object, otherwise: Number) -> Number:
    """Of the type of ``otherwise``, which stands for what is no number, negative, not finite or too large."""
    if isinstance(said, bool) or not isinstance(said, int | float) or not 0 <= said <= MAX_COUNT:
        return otherwise
    return type(otherwise)(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentRecord:
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
        fenced_components: workers that a node has fenced and that have not drained.
        heartbeat_age_ms: filled by the reader.
    """

    component_id: str
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
    fenced_components: tuple[str, ...] = ()
    kernels: str = ""
    heartbeat_age_ms: int = 0

    def to_json(self) -> str:
        """Compact, with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> ComponentRecord:
        """Fields of a newer version are dropped, and so are absurd numbers: what is left must not mislead a planner.
        Raises ValueError on what is no record."""
        said = json.loads(text)
        if not isinstance(said, dict):
            raise ValueError("a part record is a JSON object")
        try:
            known = {name: said[name] for name in cls.__dataclass_fields__ if name in said}
            fenced, cost = tuple(map(str, said.get("fenced_components", ()))), _cost(said.get("step_cost_s", ()))
            for field in fields(cls):
                if field.name in known and isinstance(field.default, int | float):
                    known[field.name] = _number(known[field.name], field.default)
            return cls(**known | {"fenced_components": fenced, "step_cost_s": cost})
        except TypeError as error:
            raise ValueError(str(error)) from None

    def status(self) -> ComponentStatus:
        """The public part of it."""
        return ComponentStatus(**{name: getattr(self, name) for name in ComponentStatus.__dataclass_fields__})
