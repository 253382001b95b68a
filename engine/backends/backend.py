"""The interface between scheduling and arithmetic: a backend runs one step's batch over the mapped KV pool.

There are three: torch on the CPU, the CPU kernels and the GPU kernels. No code outside of this package knows which one
runs. The functions here are for backends and import no torch: gateway and supervisor compute sizes with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from pillion.engine.adapters.adapter_forms import AdapterForm, Bytes
from pillion.engine.backends.batch import Int32, StepBatch
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.model_config import ModelConfig, load_config
from pillion.engine.models.rope_config import served_variant
from pillion.engine.sampling.sampling_rows import Sampled, SamplingRows
from pillion.errors import ConfigError, Internal
from pillion.kernels.kv_codes import KV_SCALE_BYTES

if TYPE_CHECKING:
    import torch

    from pillion.engine.adapters.adapter_weights import AdapterWeights

# Layout of a (layer, head) piece as one row of head_dim values per token. Part of the namespace (I2).
LAYOUT_VERSION = "rows-1"
# Types of KV in 8 bits, by the value of --kv-cache-dtype.
FP8_E4M3 = "fp8_e4m3"
EIGHT_BIT_KV = {"fp8": FP8_E4M3, "int8": "int8"}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a backend lays out a slot of the pool. Part of the block hash's namespace: two layouts share no blocks.

    A slot is [num_layers, 2, num_kv_heads, block_size, head_dim] values of ``dtype``, K before V. ``version``
    names the backend's own layout of a (layer, head) piece. With the types "fp8_e4m3" and "int8" a piece has
    block_size * head_dim bytes and block_size float32 scales, one per token.
    """

    version: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one slot."""
        if self.dtype in EIGHT_BIT_KV.values():
            row = self.head_dim + KV_SCALE_BYTES
        else:
            row = self.head_dim * {"bfloat16": 2, "float16": 2, "float32": 4}[self.dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * row


def kv_layout(
    prepared: PreparedModel, block_size: int, inside: str = LAYOUT_VERSION, kv_cache_dtype: str = "auto"
) -> KVLayout:
    """Makes a model's layout. ``inside`` names the layout of a piece; ``kv_cache_dtype`` is the flag of that name.

    The version also names the effect of ``max_model_len`` on the rotary embedding of some models, so that workers which
    serve such a model with two lengths share blocks only if both compute the same KV (I2). Raises ConfigError for a
    block size below 1.
    """
    if block_size < 1:
        raise ConfigError(f"a block of {block_size} tokens holds nothing; --block-size must be above 0")
    config = load_config(prepared.folder)
    rope = served_variant(config.ropes, prepared.max_model_len)
    return KVLayout(
        version=f"{inside}/rope-{rope}" if rope else inside,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=EIGHT_BIT_KV.get(kv_cache_dtype, prepared.dtype),
    )


def checked_memory(memory: PoolPlace, num_slots: int, layout: KVLayout) -> tuple[memoryview, int]:
    """Returns a pool's bytes and how many are in use. Raises ConfigError if it is too small, read-only or a GPU's."""
    if not isinstance(memory, memoryview):
        raise ConfigError("this worker computes on the CPU, its KV node keeps blocks in a GPU's memory")
    needed = num_slots * layout.block_bytes
    if memory.nbytes < needed or memory.readonly:
        raise ConfigError(f"a pool of {num_slots} blocks needs {needed} writable bytes, not {memory.nbytes}")
    return memory.cast("B"), needed


def warm_up_batches(max_tokens: int, block_size: int) -> Iterator[StepBatch]:
    """Yields two steps over a pool's first slots: of ``max_tokens`` tokens and of one token; each samples one row."""
    tables = np.arange(-(-max_tokens // block_size), dtype=np.int32)[None]
    for count in (max_tokens, 1):
        positions = np.arange(count, dtype=np.int32)
        yield StepBatch(
            token_ids=np.zeros(count, np.int32),
            positions=positions,
            query_starts=np.array([0, count], np.int32),
            context_lens=np.array([count], np.int32),
            block_tables=tables,
            sample_rows=positions[-1:],
        )


def distinct_rows(batch: StepBatch) -> tuple[Int32, npt.NDArray[np.intp] | None]:
    """Returns the rows whose logits a step computes, and the place among them of each of ``batch.sample_rows``.

    Several answers to one prompt sample the same row, computed once. The places are None where no row occurs twice.
    """
    rows = batch.sample_rows
    if len(set(rows.tolist())) == len(rows):
        return rows, None
    return np.unique(rows, return_inverse=True)


def checked_copies(sources: Sequence[int], targets: Sequence[int], num_slots: int) -> list[tuple[int, int]]:
    """Pairs up slots to copy. Raises Internal for lists of different length and for slots that the pool lacks."""
    copies = [(int(source), int(target)) for source, target in zip(sources, targets, strict=False)]
    slots = range(num_slots)
    if len(sources) != len(targets) or not all(slot in slots for pair in copies for slot in pair):
        raise Internal(f"cannot copy blocks {list(sources)} to {list(targets)} in a pool of {num_slots}")
    return copies


def check_adapter(weights: AdapterWeights, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> None:
    """Raises ConfigError where a model whose fused layers have ``shapes``, (outputs, inputs) by name, cannot take an
    adapter, or its rank is above ``max_rank``."""
    if not 0 < weights.rank <= max_rank:
        raise ConfigError(f"adapter {weights.digest[:12]} has rank {weights.rank}; --max-lora-rank is {max_rank}")
    for name, pairs in weights.layers.items():
        if name not in shapes:
            raise ConfigError(f"adapter {weights.digest[:12]} changes {name}, which this model does not have")
        outputs, inputs = shapes[name]
        behind = 0
        for pair in pairs:
            (rank, pair_inputs), (pair_outputs, same_rank) = pair.a.shape, pair.b.shape
            fits = 0 < rank == same_rank <= weights.rank and pair_inputs == inputs
            if not fits or not behind <= pair.first_output < pair.first_output + pair_outputs <= outputs:
                raise ConfigError(
                    f"adapter {weights.digest[:12]} does not fit {name}, which has {outputs} outputs and {inputs}"
                    f" inputs: A is {list(pair.a.shape)}, B {list(pair.b.shape)} from output {pair.first_output} on"
                )
            behind = pair.first_output + pair_outputs


def adapter_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each fused layer that adapters may change. Experts have no adapters."""
    heads, hidden, inner = config.num_heads * config.head_dim, config.hidden_size, config.intermediate_size
    attention = {"qkv": (heads + 2 * config.num_kv_heads * config.head_dim, hidden), "o": (hidden, heads)}
    mlp = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    return {
        f"layers.{index}.{name}": shape
        for index in range(config.num_layers)
        for name, shape in (attention if config.moe and config.moe.layers[index] else attention | mlp).items()
    }


def check_place(place: int, max_adapters: int) -> None:
    """Raises Internal for a place that a backend of ``max_adapters`` places does not have."""
    if not 0 <= place < max_adapters:
        raise Internal(f"adapter place {place} is none of {max_adapters}")


class DevicePool(Protocol):
    """A pool in a GPU's memory, mapped into this process."""

    @property
    def address(self) -> int:
        """Address on the device."""

    @property
    def size_bytes(self) -> int:
        """Bytes from ``address`` on."""


class DeviceShard(DevicePool, Protocol):
    """A shard of a divided pool, mapped into this process."""

    @property
    def device_index(self) -> int:
        """Number in this process of the GPU that has the memory."""


@runtime_checkable
class DividedPool(Protocol):
    """A pool that is divided over GPUs: each shard has the pieces of some KV heads of every slot.

    Attributes:
        shares: the KV heads of each shard.
    """

    @property
    def shares(self) -> Sequence[range]: ...

    def shard(self, index: int) -> DeviceShard:
        """Maps a shard into this process, once. Raises ConfigError where this process's GPU cannot reach it."""


# The pool's memory: the host's, one GPU's, or divided over several.
PoolPlace: TypeAlias = "memoryview | DevicePool | DividedPool"


class PackedAdapter(Protocol):
    """An adapter in the form that a backend multiplies by; only the backend that packed it can place it. Immutable."""

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies, on the host or on the device, while anybody holds it."""


class BackendLost(Exception):  # noqa: N818  (a state, not a mistake)
    """``launch`` and ``wait`` raise it when the device has failed for good; the worker exits and is started again."""


class InFlightStep(Protocol):
    """A step that was launched and whose results have not been fetched."""

    def choose(self, rows: SamplingRows) -> None:
        """Begins to choose the tokens of a step that was launched without ``rows``: once, before :meth:`wait` and
        before the next launch. If this method raises, nothing of the step runs any more."""

    def wait(self) -> Sampled:
        """Blocks until this step's tokens are on the host. Called once for each step, in the order of the launches.

        Raises the error that the step failed with. After the call, the step reads and writes no slot any more. A step
        whose tokens nobody began to choose has none.
        """


class Backend(Protocol):
    """Owns weights and scratch; borrows the pool.

        schedule --> launch(step k+1) --> wait(step k) --> commit(step k) --> schedule ...       it runs ahead
        schedule --> launch(step k+1) without rows --> wait, commit(step k) --> choose(step k+1) --> schedule ...
        schedule --> launch(step k) = copy_blocks, forward, sample --> wait --> commit --> ...   it does not

    A backend that runs ahead queues at most two steps on its device. Each step sees what earlier steps wrote, and the
    host waits only for sampled ids. The second line is for a step whose choices depend on the tokens of the step before
    (grammars, penalties): its forward pass runs while the host takes those tokens, and its sampling is queued behind
    it before it has ended, so the device does not wait. Backends that do not run ahead are ``HostBackend``s.

    Threads: every call of a backend and of its in-flight steps comes from the step loop's thread, but for
    ``take_adapter``. What changes: only the pool's slots that a batch writes. What raises: ``bind_pool`` raises
    ConfigError for a pool of another shape; ``launch`` raises Internal, and only for defects, since the scheduler made
    the batch.

    Adapters have places, 0 .. max_adapters - 1, whose numbers stand in ``StepBatch.adapters``. Loading has two phases,
    so that it never stalls a step:

        bind_adapters (once) --> take_adapter (slow, any thread) --> place_adapter (quick) --> steps that name the place

    So that what can be done before shares not even the interpreter with steps, another process reads an adapter and
    brings it into the backend's ``adapter_form``, of which ``take_adapter`` makes a packed adapter.

    Nobody locks: a backend's packing touches nothing that steps use, and its owner calls ``place_adapter`` between
    steps. An adapter's memory is free when its place has another one and its owner has dropped it.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before the results of the previous one are fetched. Never changes."""

    @property
    def layout(self) -> KVLayout:
        """The layout of KV, known before a pool is bound, because the worker attaches with it."""

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits."""

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Uses ``memory``, at least num_slots * layout.block_bytes bytes and writable, as the paged KV pool; of a
        divided pool, the shards that have the KV heads of this process."""

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> InFlightStep:
        """Begins a step: copies whole slots, (source, target) pairs, one after another; then writes the batch's KV;
        then chooses a token for each of the first ``sample_rows``, in that order, with the parameters ``rows``, and
        scores the others. ``rows`` may be None for a backend that runs ahead: :meth:`InFlightStep.choose` brings them.

        A token id ``-1 - r`` stands for the token that row r of the previous launch chooses, counted as in its
        Sampled.token_ids. Such ids occur only as the one token of a decode, and only if the previous step's results
        were not known when this one was planned. If this method raises, nothing of the step runs any more.
        """

    @property
    def max_adapters(self) -> int:
        """Number of places for adapters; 0 before ``bind_adapters``."""

    def bind_adapters(self, max_adapters: int, max_rank: int) -> None:
        """Makes empty places for adapters up to ``max_rank``. At most once, before ``bind_pool``; compiles kernels.

        On a GPU places take memory for that rank; elsewhere an adapter takes what its own rank needs. Raises
        ConfigError where this backend cannot run the model with adapters.
        """

    def adapter_form(self) -> AdapterForm:
        """The form into which another process brings adapters for this backend, after ``bind_adapters``."""

    def take_adapter(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        """Makes a packed adapter of what the form gave. Any thread may call it, beside steps. Where the form is plain,
        the packing is done here, and takes cores and the interpreter from these.

        Raises ConfigError for a rank above ``max_rank`` and for layers or shapes that the model does not have.
        """

    def place_adapter(self, place: int, packed: PackedAdapter) -> None:
        """Puts an adapter into a place. Takes no longer than a small part of a step.

        No launched step whose results have not been fetched may use the place, and a step may use it from its next
        launch on. Raises Internal for a place that does not exist.
        """

    def close(self) -> None:
        """Ends threads and releases the pool. Idempotent; no other call comes after it."""

    def warm_up(self, max_tokens: int) -> None:
        """Pays one-time costs (allocation, compilation) before the first request. Touches no committed slot."""


class ShareBackend(Backend, Protocol):
    """A backend that can be one rank of several, and run a forward pass alone."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Writes the batch's KV, which has ended at the return, and returns float32 logits [R, vocab_size] of
        ``sample_rows`` on the host; of no rows at ranks above 0."""
