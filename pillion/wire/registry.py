"""What a part says of itself in the registry: written as JSON by its heartbeat, read by gateways."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pillion._version import PROTOCOL
from pillion.types import PartStatus


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
        running_requests, waiting_requests, waiting_tokens: load, for the planner.
        kernels: what a worker computes with.
        *_blocks: a node's slots by state.
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
    total_blocks: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    committed_blocks: int = 0
    quarantined_blocks: int = 0
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
            return cls(**known | {"fenced_parts": tuple(map(str, said.get("fenced_parts", ())))})
        except TypeError as error:
            raise ValueError(str(error)) from None

    def status(self) -> PartStatus:
        """The public part of it."""
        return PartStatus(**{name: getattr(self, name) for name in PartStatus.__dataclass_fields__})
