"""The interface between scheduling and arithmetic: a backend runs one step's batch over the mapped KV pool.

Backends: torch on the CPU, the CPU kernels and the GPU kernels. Code outside of this package does not depend on which
one runs. This module imports no torch, since gateway and supervisor compute sizes with it.

A :class:`pillion.kernels.step.StepBatch` is one step's work as arrays: the scheduler's input for a backend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_states import state_bytes, states_of
from pillion.engine.models.model_config import LayerHeads
from pillion.engine.models.rope_config import served_variant
from pillion.engine.models.state_layout import StateLayout, state_layout
from pillion.errors import ConfigError, Internal
from pillion.kernels.kv_codes import KV_SCALE_BYTES
from pillion.kernels.step import Int32, Sampled, SamplingRows, StepBatch

Bytes = npt.NDArray[np.uint8]


if TYPE_CHECKING:
    from pillion.kvstore.client.attachment import MappedDevice

# Version of the pool layout in which the keys or values of a layer's KV head in a block are rows [tokens, head_dim].
# Part of the blocks' hash namespace (I2).
LAYOUT_VERSION = "rows-1"
# Types of 8-bit KV, by the value of --kv-cache-dtype.
FP8_E4M3 = "fp8_e4m3"
EIGHT_BIT_KV = {"fp8": FP8_E4M3, "int8": "int8"}


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Location of a layer's keys and values in a block: pieces of equal size, one per plane and KV head.

    Attributes:
        offset: bytes from the block's start to the layer's first piece.
        piece_bytes: bytes of a piece: a block's keys, or values, of one KV head.
    """

    offset: int
    kv_heads: int
    head_dim: int
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A backend's layout of a slot of the pool. It is part of the block hash's namespace, so blocks of different
    layouts are never mixed.

    A slot is [num_layers, planes, num_kv_heads, block_size, head_dim] values of ``dtype``; values with the same first
    three indices are a piece. There are two planes, K and V, or one, whose rows are latents and a rotated key (MLA).
    ``version`` names the layout inside a piece. With the dtypes "fp8_e4m3" and "int8" a piece has block_size * head_dim
    bytes and block_size float32 scales, one per token, or two per token in rows of latents and a key.

    ``layers`` is set if layers differ: then a slot is [planes, kv_heads, block_size, head_dim] values of each layer in
    turn, with the layer's own shape, or none if its entry is None.

    The recurrent state of a sequence has ``state_bytes`` bytes, in ``state_pages`` separate slots. ``state_layout``:
    the locations of its pieces in these slots; None for backends that store it whole, or if a slot is too small for a
    piece. It has only a rank's own pieces on a GPU; with ``state_shards`` above 1, these are in the rank's shard of a
    pool divided into ``state_shards`` shards.
    """

    version: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    planes: int = 2
    layers: tuple[LayerHeads | None, ...] = ()
    state_bytes: int = 0
    state_layout: StateLayout | None = None
    state_shards: int = 1

    def heads(self, layer: int) -> LayerHeads | None:
        """Return the KV heads of a layer in a block; None if it has no keys and values in blocks."""
        return self.layers[layer] if self.layers else LayerHeads(self.num_kv_heads, self.head_dim)

    def place(self, layer: int) -> LayerPlace:
        """Return the location of a layer's keys and values in a block. Raises Internal if it has none."""
        heads = self.heads(layer)
        if heads is None:
            raise Internal(f"layer {layer} has no place in a block")
        offset = sum(self._layer_bytes(before) for before in range(layer))
        return LayerPlace(offset, heads.kv_heads, heads.head_dim, self._piece_bytes(heads.head_dim))

    @property
    def even(self) -> bool:
        """True if all layers have the same shape, so that a slot is one array."""
        return not self.layers

    @property
    def rows_and_pieces(self) -> tuple[int, int]:
        """The number of rows (layers times planes) of a slot, and of pieces in each row (KV heads), by which a pool is
        sharded; zeros if layers differ."""
        heads = [kind for kind in map(self.heads, range(self.num_layers)) if kind is not None]
        if len(set(heads)) > 1:
            return 0, 0
        return len(heads) * self.planes, self.num_kv_heads

    @property
    def state_pages(self) -> int:
        """The number of slots of a sequence's recurrent state; 0 for models without states."""
        return -(-self.state_bytes // self.block_bytes) if self.state_bytes else 0

    @property
    def working_pages(self) -> int:
        """The number of slots for the states of a running sequence: a step reads one and writes another, and the one
        after the last whole block is kept for the prefix cache."""
        return 3 * self.state_pages

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a token's 8-bit row of a KV head."""
        return KV_SCALE_BYTES * (2 if self.planes == 1 else 1)

    @property
    def block_bytes(self) -> int:
        """Bytes of a slot. If layers differ and values are not 8-bit, a multiple of each layer's piece size, so that
        the pool can be viewed as an array of pieces of any of these sizes."""
        total = sum(self._layer_bytes(layer) for layer in range(self.num_layers))
        if self.even or self._has_codes:
            return total
        unit = math.lcm(*(self._piece_bytes(heads.head_dim) for heads in self.layers if heads is not None))
        return -(-total // unit) * unit

    @property
    def _has_codes(self) -> bool:
        return self.dtype in EIGHT_BIT_KV.values()

    def _piece_bytes(self, head_dim: int) -> int:
        if self._has_codes:
            return self.block_size * (head_dim + self.scale_bytes)
        return self.block_size * head_dim * {"bfloat16": 2, "float16": 2, "float32": 4}[self.dtype]

    def _layer_bytes(self, layer: int) -> int:
        heads = self.heads(layer)
        return 0 if heads is None else self.planes * heads.kv_heads * self._piece_bytes(heads.head_dim)


def kv_layout(
    prepared: PreparedModel,
    block_size: int,
    inside: str = LAYOUT_VERSION,
    kv_cache_dtype: str = "auto",
    *,
    state_chunk: int = 0,
) -> KVLayout:
    """Build a model's layout.

    The version also names the variant of the rotary embedding, which depends on ``max_model_len`` in some models, so
    that workers with different lengths share blocks only if they compute the same KV (I2).

    Args:
        inside: version of the layout inside a piece.
        kv_cache_dtype: value of the flag.
        state_chunk: argument of :func:`pillion.engine.models.state_layout.state_layout`.

    Raises ConfigError for a block size below 1, and for models without keys and values.
    """
    if block_size < 1:
        raise ConfigError(f"a block of {block_size} tokens is empty; --block-size must be at least 1")
    config = load_config(prepared.folder)
    rope = served_variant(config.ropes, prepared.max_model_len)
    if not config.kv_layers:
        raise ConfigError(f"{config.family}: models without any layer with keys and values are not supported yet")
    layout = KVLayout(
        version=f"{inside}/rope-{rope}" if rope else inside,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=EIGHT_BIT_KV.get(kv_cache_dtype, prepared.dtype),
        planes=config.kv_planes,
        layers=config.kv_places,
    )
    if config.linear is None:
        return layout
    states = states_of(layers_of(config))
    pieces = state_layout(states, layout.block_bytes, state_chunk)
    nbytes = state_bytes(states) if pieces is None else pieces.nbytes
    return replace(layout, state_bytes=nbytes, state_layout=pieces)


def checked_memory(memory: PoolPlace, num_slots: int, layout: KVLayout) -> tuple[memoryview, int]:
    """Return a pool's memory as bytes, and the size of its slots. Raises ConfigError if the memory is too small,
    read-only or a GPU's."""
    if not isinstance(memory, memoryview):
        raise ConfigError("this worker computes on the CPU, but the pool of its KV node is in GPU memory")
    needed = num_slots * layout.block_bytes
    if memory.nbytes < needed or memory.readonly:
        raise ConfigError(f"a pool of {num_slots} blocks needs {needed} writable bytes, not {memory.nbytes}")
    return memory.cast("B"), needed


def warm_up_batches(max_tokens: int, block_size: int, slots: int = 0) -> Iterator[StepBatch]:
    """Yield two steps of one sequence over a pool's first slots, of ``max_tokens`` tokens and of one token; each
    samples one row. With ``slots`` above 0 the sequence's blocks share that many slots, so that results are
    meaningless."""
    tables = np.arange(-(-max_tokens // block_size), dtype=np.int32)[None]
    if slots:
        tables %= slots
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
    """Deduplicate ``batch.sample_rows``, because parallel samples of a prompt share a row. Return the distinct rows,
    and the index among them of each sample row with logits; None if all rows are distinct.

    The last ``batch.pooled`` rows have no logits and stay as they are.
    """
    rows = batch.sample_rows
    with_logits = rows[: len(rows) - batch.pooled]
    if len(set(with_logits.tolist())) == len(with_logits):
        return rows, None
    distinct, indices = np.unique(with_logits, return_inverse=True)
    return np.concatenate([distinct, rows[len(with_logits) :]]), indices


def checked_copies(sources: Sequence[int], targets: Sequence[int], num_slots: int) -> list[tuple[int, int]]:
    """Return (source, target) slots to copy. Raises Internal for lists of different length and for slots out of
    range."""
    copies = [(int(source), int(target)) for source, target in zip(sources, targets, strict=False)]
    slots = range(num_slots)
    if len(sources) != len(targets) or not all(slot in slots for pair in copies for slot in pair):
        raise Internal(f"cannot copy blocks {list(sources)} to {list(targets)} in a pool of {num_slots}")
    return copies


def check_slot(slot: int, max_adapters: int) -> None:
    """Raise Internal unless ``slot`` is an adapter slot, 0 .. max_adapters - 1."""
    if not 0 <= slot < max_adapters:
        raise Internal(f"adapter slot {slot} is out of range: there are {max_adapters}")


PoolPlace: TypeAlias = "memoryview | MappedDevice"


class PackedAdapter(Protocol):
    """An adapter packed for a backend's slots. Immutable; only the same backend can place it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the adapter on the host or on the device."""


class BackendAdapters(Protocol):
    """The adapter slots of a backend, 0 .. max_adapters - 1, which ``StepBatch.adapters`` refers to. Loading has two
    phases, so that it never stalls a step:

        Backend.bind_adapters (once) --> build (slow, any thread) --> place (quick) --> steps that use the slot

    Before ``build``, another process reads the adapter and converts it to the backend's ``form``, so that loading does
    not compete with steps for the GIL.

    No lock is needed: packing touches nothing that steps use, and the owner calls ``place`` between steps. An adapter's
    memory is freed once its slot is overwritten and its owner has dropped it.
    """

    @property
    def max_adapters(self) -> int:
        """The number of slots."""

    def form(self) -> object:
        """Return the form to which another process converts adapters for this backend, picklable."""

    def build(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        """Return the packed adapter ``digest`` from a conversion by ``form``: its description ``about`` and bytes
        ``data``. Thread-safe; may run during steps. Packing happens here if the form is plain, and then competes with
        steps for cores and the GIL.

        Raises ConfigError for a rank above ``max_rank`` and for layers or shapes that the model does not have.
        """

    def place(self, slot: int, packed: PackedAdapter) -> None:
        """Put an adapter into a slot, in a small fraction of a step's time. No step in flight may use the slot; the
        next launch may. Raises Internal for a slot out of range.
        """


A = TypeVar("A", bound=BackendAdapters)


def bound_adapters(adapters: A | None) -> A:
    """Return a backend's adapter slots. Raises Internal for None, i.e. before ``bind_adapters``."""
    if adapters is None:
        raise Internal("adapters before bind_adapters")
    return adapters


def gives_vectors(backend: Backend) -> bool:
    """Return whether a backend's steps can return hidden states of rows (StepBatch.pooled)."""
    return getattr(backend, "gives_vectors", False)


class BackendLost(Exception):  # noqa: N818  (a state, not a mistake)
    """Permanent failure of the device or another process of the worker; the worker is restarted."""


class InFlightStep(Protocol):
    """A launched step whose results have not been read."""

    def choose(self, rows: SamplingRows) -> None:
        """Start to sample the tokens of a step that was launched without ``rows``. Called once, before :meth:`wait` and
        before the next launch. If this method raises, nothing of the step is running any more."""

    def wait(self) -> Sampled:
        """Block until this step's tokens are on the host. Called once per step, in launch order.

        Raises the step's error. After the call, the step accesses no slot. A step launched without rows has no tokens
        unless :meth:`choose` was called.
        """


class Backend(Protocol):
    """The interface of backends. A backend owns the weights and scratch memory, and borrows the pool.

        schedule --> launch(step k+1) --> wait(step k) --> commit(step k) --> schedule ...       running ahead
        schedule --> launch(step k+1) without rows --> wait, commit(step k) --> choose(step k+1) --> schedule ...
        schedule --> launch(step k) = copy_blocks, forward, sample --> wait --> commit --> ...   not running ahead

    Each step sees the writes of earlier steps, and the host waits only for sampled ids. The second line is for a step
    whose sampling depends on the previous step's tokens (grammars, penalties): its forward pass runs while the host
    processes these tokens, and sampling is queued before the pass ends, so the device does not wait. Backends that do
    not run ahead are ``HostBackend``s.

    The step thread makes all calls of a backend and its in-flight steps, except ``adapters.build``. A step changes only
    the slots that its batch writes. ``bind_pool`` raises ConfigError for a pool that does not fit the layout;
    ``launch`` raises Internal only for defects, since the scheduler built the batch.
    """

    @property
    def max_steps_in_flight(self) -> int:
        """Max steps in flight: 1 for a backend that does not run ahead, 2 for a device that queues a step behind the
        running one, or the number of pipeline stages. Constant."""

    @property
    def layout(self) -> KVLayout:
        """The layout of a slot, known before a pool is bound, because the worker attaches with it."""

    @property
    def vocab_size(self) -> int:
        """The number of columns of the logits."""

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Use ``memory``, writable and of at least num_slots * layout.block_bytes bytes, as the paged KV pool. Of a
        pool divided over GPUs, use only the shards with KV heads of this process."""

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> InFlightStep:
        """Start a step: copy whole slots, (source, target), in order; write the batch's KV; sample a token for each of
        the first ``sample_rows``, in their order, with the parameters ``rows``; and score the next ones. With ``rows``
        None, for a backend that runs ahead, :meth:`InFlightStep.choose` samples later.

        A token id ``-1 - r`` stands for Sampled.token_ids[r] of the previous launch. It occurs only as the single token
        of a decode, if that result was unknown when this step was planned. If this method raises, nothing of the step
        is running any more.
        """

    @property
    def adapters(self) -> BackendAdapters | None:
        """The adapter slots; None before ``bind_adapters``."""

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        """Create empty slots for adapters of ranks up to ``max_rank`` for ``targets``, and compile the kernels. Called
        at most once, before ``bind_pool``.

        On a GPU each slot has memory for ``max_rank``; on a CPU an adapter's memory depends on its own rank. Raises
        ConfigError if this backend cannot run the model with adapters.
        """

    def close(self) -> None:
        """End threads and release the pool. Idempotent; the last call."""

    def warm_up(self, max_tokens: int) -> None:
        """Pay one-time costs (allocation, compilation) before the first request. Writes to no committed slot."""
