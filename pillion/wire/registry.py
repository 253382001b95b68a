"""The record of a component in the registry: its heartbeat writes it as JSON, gateways and KV nodes read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec

from pillion._version import PROTOCOL
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Labels, Metric, Reading
from pillion.types import WORKERS, ComponentStatus

Number = TypeVar("Number", int, float)

# Role of a component that is not running; its supervisor writes the record.
DOWN = "down"
# Role under which a gateway shows components that it does not use because of their protocol.
FOREIGN = "foreign"
# Length of WorkerLoad.step_cost_s.
STEP_COSTS = 5
MAX_COUNT = 2**63 - 1
# Ranges that the typed decoder accepts; if it rejects a record, the fields are checked one by one.
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=float(MAX_COUNT))]
_LASTING = msgspec.Meta(extra={"lasting": True})


def _shown(metric: Metric, *labels: str) -> msgspec.Meta:
    return msgspec.Meta(extra={"cell": (metric, labels)})


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The load of a worker, as its scheduler measures it. Each figure is declared here and nowhere else.

    A new figure takes one line here: it is then part of the worker's registry record, and so of the planner's snapshot,
    of the worker's metrics, as ``pillion.load`` unless the line names a metric, and of the public status. Unless marked
    as lasting, it is only valid at the time of the worker's heartbeat.

    Attributes:
        running_requests, waiting_requests, waiting_tokens: load, for the planner. A request waits while it has no
            running slot.
        queued_tokens: all prompt tokens that a worker has yet to compute, including those of started prompts.
        decoding_requests, context_tokens: streams that generate, and the KV tokens that a step reads for them.
        step_cost_s: cost of a step in seconds on the worker's own cores, fitted to real steps: of a step as such, and
            of each token, sequence, KV token read and query-key pair of it. () while unknown.
        largest_step_tokens: tokens of the largest step to which ``step_cost_s`` was fitted.
        adapters, adapter_waits: digests of the adapters that are ready, and sequences that wait for theirs.
    """

    running_requests: Annotated[Count, _shown(names.SEQUENCES, "running")] = 0
    waiting_requests: Annotated[Count, _shown(names.SEQUENCES, "waiting")] = 0
    waiting_tokens: Count = 0
    queued_tokens: Annotated[Count, _shown(names.QUEUED_TOKENS)] = 0
    decoding_requests: Annotated[Count, _shown(names.SEQUENCES, "decoding")] = 0
    context_tokens: Count = 0
    step_cost_s: Annotated[tuple[Amount, ...], _LASTING] = ()
    largest_step_tokens: Annotated[Count, _LASTING] = 0
    adapters: Annotated[tuple[str, ...], _LASTING, _shown(names.ADAPTERS)] = ()
    adapter_waits: Annotated[Count, _shown(names.ADAPTER_WAITS)] = 0

    def readings(self) -> Iterator[Reading]:
        """Yield the figures as metrics; the figure of a list of names is its length."""
        for name, (metric, labels) in _CELLS.items():
            value = getattr(self, name)
            yield metric, labels, len(value) if isinstance(value, tuple) else value


class ComponentRecord(WorkerLoad, frozen=True, kw_only=True, omit_defaults=True):
    """One component of the cluster: its load (:class:`WorkerLoad`), and what follows.

    Attributes:
        role: "prefill", "decode", "kvnode" or "gateway"; "down" for a component that keeps failing and waits for its
            next start.
        trouble: why it is down, as a text.
        address: the address of its gRPC service.
        protocol, version: its program's protocol, and its release; 0.2.0 does not send the release.
        model, fingerprint, namespace: what a worker serves; ``namespace`` is the base digest in hexadecimal, from which
            a request's root hash is made (I2).
        node_id: the KV node whose pool it maps (its own for a node).
        boot_epoch: a node's boot number; index entries of another boot are invalid.
        free_seqs: sequences that a worker could run besides the running ones.
        max_step_tokens, target_itl_ms: a worker's token budget of a step, and its latency target (0: none).
        target_itl_steps: that latency as a number of plain steps, of the decodes alone (0: none).
        core_lending_table: the name, on its node, of the table by which a worker lends and borrows cores; "" for none.
        core_share: the worker's share of that table's cores.
        block_bytes: number of bytes of a worker's KV block.
        state_pages, working_pages: number of block slots of a state of the worker's model, and of those of a running
            sequence; 0 if its layers have no states.
        gives_vectors: True if a prefill worker accepts pooling requests, which end with a vector; decode workers of an
            earlier release accept them without this field.
        kernels: what a worker computes with.
        start_s: time that a worker took to load its model and to warm up; 0: unknown.
        tensor_parallel_size: number of processes over which a worker splits its model.
        max_loras, max_lora_rank: max adapters loaded in a worker at once, and their max rank; 0: without adapters.
        steps, steps_ms: a worker's steps since its process started, and their total time.
        step_*_tokens: what filled the token budgets of these steps.
        *_blocks: a node's slots by state; ``pinned_blocks`` are committed, ``disk_blocks`` are in its disk tier.
        object_url: the bucket of a node's object tier; empty if it has none, or while it is paused.
        leaving: whether a node hands over its blocks because it is about to end.
        prompt_tokens, cached_tokens, completion_tokens: tokens that a gateway has served since it started.
        fenced_components: workers that a node has fenced and that have not drained yet.
        heartbeat_age_ms: time since the last heartbeat, set by the reader.
    """

    component_id: str
    role: str
    address: str
    # A factory, so that the value is always written: a reader's default would be the reader's own protocol.
    protocol: Count = msgspec.field(default_factory=lambda: PROTOCOL)
    version: str = ""
    model: str = ""
    fingerprint: str = ""
    namespace: str = ""
    block_size_tokens: Count = 0
    max_model_len_tokens: Count = 0
    vocab_size: Count = 0
    node_id: str = ""
    boot_epoch: Count = 0
    free_seqs: Count = 0
    max_step_tokens: Count = 0
    target_itl_ms: Amount = 0.0
    target_itl_steps: Amount = 0.0
    core_lending_table: str = ""
    core_share: Amount = 0.0
    block_bytes: Count = 0
    state_pages: Count = 0
    working_pages: Count = 0
    total_blocks: Count = 0
    free_blocks: Count = 0
    leased_blocks: Count = 0
    committed_blocks: Count = 0
    quarantined_blocks: Count = 0
    object_url: str = ""
    leaving: bool = False
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0
    fenced_components: tuple[str, ...] = ()
    gives_vectors: bool = False
    kernels: str = ""
    start_s: Amount = 0.0
    tensor_parallel_size: Count = 1
    max_loras: Count = 0
    max_lora_rank: Count = 0
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
        """Encode the record as compact JSON, without default values, in the order of this class, which is the fastest
        to decode."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> ComponentRecord:
        """Read a record. Raises ValueError for a text that is not a record.

        Fields of a newer version are dropped. Implausible numbers become the field's default: the record must not
        mislead a planner.
        """
        try:
            record = _DECODER.decode(text)
        except msgspec.DecodeError:
            return cls._from_any_json(text)
        cost = record.step_cost_s
        if not cost or (len(cost) == STEP_COSTS and any(cost)):
            return record
        return msgspec.structs.replace(record, step_cost_s=())

    @classmethod
    def _from_any_json(cls, text: str | bytes) -> ComponentRecord:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("a component's record must be a JSON object")
        for name, default in _DEFAULT_NUMBERS.items():
            if name in fields:
                fields[name] = _number(fields[name], default)
        fields["step_cost_s"] = _step_cost(fields.get("step_cost_s"))
        return msgspec.convert(fields, cls)

    def outdated(self) -> ComponentRecord:
        """Return a record without the parts that become invalid after its heartbeat: its load, and the workers that it
        had fenced. A gateway's load remains, as the best estimate of its share."""
        if self.role == "gateway":
            return self
        slots = self.running_requests + self.free_seqs
        return msgspec.structs.replace(self, **_IDLE, free_seqs=slots, fenced_components=())

    def status(self) -> ComponentStatus:
        """Return the public part of the record."""
        named = {name: getattr(self, name) for name in ComponentStatus.__dataclass_fields__ if name != "figures"}
        figures = {name: float(getattr(self, name)) for name in _FIGURES} if self.role in WORKERS else {}
        return ComponentStatus(**named, figures=figures)


_MARKS: dict[str, dict[str, Any]] = {
    name: {key: value for mark in get_args(hint) for key, value in (getattr(mark, "extra", None) or {}).items()}
    for name, hint in get_type_hints(WorkerLoad, include_extras=True).items()
}
_NUMBERS = [field.name for field in msgspec.structs.fields(WorkerLoad) if isinstance(field.default, int | float)]
_CELLS: dict[str, tuple[Metric, Labels]] = {name: (names.LOAD, (name,)) for name in _NUMBERS} | {
    name: marks["cell"] for name, marks in _MARKS.items() if "cell" in marks
}
# Values of the figures in a record whose heartbeat is too old to describe the load. Lasting figures, which do not
# depend on the load, keep their values.
_IDLE = {
    field.name: field.default for field in msgspec.structs.fields(WorkerLoad) if not _MARKS[field.name].get("lasting")
}
_FIGURES = [name for name in _NUMBERS if name not in ComponentStatus.__dataclass_fields__]
_DECODER = msgspec.json.Decoder(ComponentRecord)
_DEFAULT_NUMBERS: dict[str, int | float] = {
    field.name: field.default
    for field in msgspec.structs.fields(ComponentRecord)
    if isinstance(field.default, int | float) and not isinstance(field.default, bool)
}


def _step_cost(raw: object) -> tuple[float, ...]:
    """Return the costs of a step; () unless ``raw`` has all of them and all are plausible."""
    if not isinstance(raw, list) or len(raw) != STEP_COSTS:
        return ()
    cost = tuple(_number(weight, -1.0) for weight in raw)
    return cost if min(cost) >= 0 and any(cost) else ()


def _number(raw: object, default: Number) -> Number:
    """Convert ``raw`` to the type of ``default``; return ``default`` if it is not a number, or is negative, infinite or
    huge."""
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 <= raw <= MAX_COUNT:
        return default
    return type(default)(raw)
