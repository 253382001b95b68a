"""The record of a component in the registry: its heartbeat writes it as JSON, gateways and KV nodes read it."""

from __future__ import annotations

import json
from typing import Annotated, TypeVar

import msgspec

from pillion._version import PROTOCOL
from pillion.types import ComponentStatus

Number = TypeVar("Number", int, float)

# The role of a component that does not run: its supervisor says so.
DOWN = "down"
# Numbers in ``step_cost_s``.
STEP_COSTS = 5
# No component counts more of anything.
MAX_COUNT = 2**63 - 1
# What the typed decoder takes; where it refuses one, the fields are looked at one by one.
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=float(MAX_COUNT))]
# Fields that hold at a worker's heartbeat only.
LOAD = (
    "running_requests",
    "waiting_requests",
    "waiting_tokens",
    "queued_tokens",
    "decoding_requests",
    "context_tokens",
    "adapter_waits",
)


class ComponentRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One component of the cluster.

    Attributes:
        role: "prefill", "decode", "kvnode" or "gateway"; "down" for one that does not run, because it dies again and
            again and waits for its next start.
        trouble: why it is down, for people.
        address: where its gRPC service is reached.
        model, fingerprint, namespace: what a worker serves; ``namespace`` is the base digest in hexadecimal, over which
            a request's root hash is made (I2).
        node_id: the KV node whose pool it maps (its own for a node).
        boot_epoch: a node's boot number; index entries of another boot are void.
        running_requests, waiting_requests, waiting_tokens: load, for the planner. A request waits as long as
            it has no running slot.
        queued_tokens: all prompt tokens that a worker has yet to compute, those of begun prompts included.
        decoding_requests, context_tokens: streams that generate, and the KV tokens that a step reads for them.
        free_seqs: sequences that a worker could run beside those that it runs.
        max_step_tokens, target_itl_ms: a worker's token budget of a step, and the latency it aims at (0: none).
        target_itl_steps: that latency as a number of plain steps, of the decodes alone (0: none).
        step_cost_s: cost of a step in seconds on the worker's own cores, fitted to real steps: of a step as such, and
            of each token, sequence, KV token read and query-key pair of it. Empty as long as nothing is known.
        largest_step_tokens: tokens of the largest step that ``step_cost_s`` was fitted to.
        core_board: names, on its node, the board on which a worker lends and borrows cores; "" where it has none.
        core_share: the share of that board's cores that the worker owns.
        block_bytes: bytes of a worker's KV block.
        kernels: what a worker computes with.
        start_s: how long a worker took to load its model and to warm up when it started; 0: not known.
        tensor_parallel_size: the processes over which a worker splits its model.
        max_loras, max_lora_rank: adapters that a worker keeps ready at once, and their largest rank; 0: it runs none.
        adapters: digests of those that are ready now. adapter_waits: sequences that wait for theirs.
        steps, steps_ms: a worker's steps since its process started, and the time that they took.
        step_*_tokens: what filled the token budgets of these steps.
        *_blocks: a node's slots by state; ``pinned_blocks`` are committed ones, ``disk_blocks`` are in its disk tier.
        object_url: the bucket that is a node's object tier; empty where it has none, or where that is paused.
        prompt_tokens, cached_tokens, completion_tokens: tokens that a gateway has served since it started.
        arrivals: requests that came to a gateway since it started, by model.
        fenced_components: workers that a node has fenced and that have not drained yet.
        heartbeat_age_ms: time since the last heartbeat; the reader sets it.
    """

    component_id: str
    role: str
    address: str
    # From a factory, so that it is written always: a reader's default is its own.
    protocol: Count = msgspec.field(default_factory=lambda: PROTOCOL)
    model: str = ""
    fingerprint: str = ""
    namespace: str = ""
    block_size_tokens: Count = 0
    max_model_len_tokens: Count = 0
    vocab_size: Count = 0
    node_id: str = ""
    boot_epoch: Count = 0
    running_requests: Count = 0
    waiting_requests: Count = 0
    waiting_tokens: Count = 0
    queued_tokens: Count = 0
    decoding_requests: Count = 0
    context_tokens: Count = 0
    free_seqs: Count = 0
    max_step_tokens: Count = 0
    target_itl_ms: Amount = 0.0
    target_itl_steps: Amount = 0.0
    step_cost_s: tuple[Amount, ...] = ()
    largest_step_tokens: Count = 0
    core_board: str = ""
    core_share: Amount = 0.0
    block_bytes: Count = 0
    total_blocks: Count = 0
    free_blocks: Count = 0
    leased_blocks: Count = 0
    committed_blocks: Count = 0
    quarantined_blocks: Count = 0
    object_url: str = ""
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0
    arrivals: tuple[tuple[str, Count], ...] = ()
    fenced_components: tuple[str, ...] = ()
    kernels: str = ""
    start_s: Amount = 0.0
    tensor_parallel_size: Count = 1
    max_loras: Count = 0
    max_lora_rank: Count = 0
    adapters: tuple[str, ...] = ()
    adapter_waits: Count = 0
    steps: Count = 0
    steps_ms: Amount = 0.0
    step_decode_tokens: Count = 0
    step_tail_tokens: Count = 0
    step_prefill_tokens: Count = 0
    step_speculative_tokens: Count = 0
    step_forced_tokens: Count = 0
    step_idle_tokens: Count = 0
    pinned_blocks: Count = 0
    disk_blocks: Count = 0
    trouble: str = ""
    heartbeat_age_ms: Count = 0

    def to_json(self) -> str:
        """Encodes the record as compact JSON without fields that have their defaults, the others in their order here,
        in which they are read fastest."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> ComponentRecord:
        """Reads a record. Raises ValueError for what is no record.

        Fields of a newer version are dropped. Absurd numbers become the field's default: what is left must not mislead
        a planner.
        """
        try:
            record = _DECODER.decode(text)
        except msgspec.DecodeError:
            # The decoder refuses a whole record for one NaN in it.
            return cls._from_any_json(text)
        cost = record.step_cost_s
        if not cost or (len(cost) == STEP_COSTS and any(cost)):
            return record
        return msgspec.structs.replace(record, step_cost_s=())

    @classmethod
    def _from_any_json(cls, text: str | bytes) -> ComponentRecord:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("a component's record is a JSON object")
        for name, default in _DEFAULT_NUMBERS.items():
            if name in fields:
                fields[name] = _number(fields[name], default)
        fields["step_cost_s"] = _step_cost(fields.get("step_cost_s"))
        return msgspec.convert(fields, cls)

    def outdated(self) -> ComponentRecord:
        """What still holds of a record long after its heartbeat, where the component lives: not its load, and not whom
        it had fenced. A gateway's load stays, as the best guess of its share."""
        if self.role == "gateway":
            return self
        slots = self.running_requests + self.free_seqs
        idle = dict.fromkeys(LOAD, 0)
        return msgspec.structs.replace(self, **idle, free_seqs=slots, fenced_components=())

    def status(self) -> ComponentStatus:
        """Returns the public part of the record."""
        return ComponentStatus(**{name: getattr(self, name) for name in ComponentStatus.__dataclass_fields__})


_DECODER = msgspec.json.Decoder(ComponentRecord)
_DEFAULT_NUMBERS: dict[str, int | float] = {
    field.name: field.default
    for field in msgspec.structs.fields(ComponentRecord)
    if isinstance(field.default, int | float)
}


def _step_cost(raw: object) -> tuple[float, ...]:
    """Returns no costs at all unless ``raw`` has all of them and none is absurd."""
    if not isinstance(raw, list) or len(raw) != STEP_COSTS:
        return ()
    cost = tuple(_number(weight, -1.0) for weight in raw)
    return cost if min(cost) >= 0 and any(cost) else ()


def _number(raw: object, default: Number) -> Number:
    """Converts ``raw`` to the type of ``default``; returns that for no number, or a negative, infinite or huge one."""
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 <= raw <= MAX_COUNT:
        return default
    return type(default)(raw)
