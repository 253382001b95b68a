"""The interface between scheduling and arithmetic: a backend runs one step's batch over the mapped KV pool.

Backends: torch on the CPU, the CPU kernels and the GPU kernels. No code outside of this package knows which one runs.
The functions here are for backends and import no torch: gateway and supervisor compute sizes with them.

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

# Pool layout: each (layer, KV head) piece of a block is [tokens, head_dim]. Part of the blocks' hash namespace (I2).
LAYOUT_VERSION = "rows-1"
# Types of 8-bit KV, by the value of --kv-cache-dtype.
FP8_E4M3 = "fp8_e4m3"
EIGHT_BIT_KV = {"fp8": FP8_E4M3, "int8": "int8"}


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The place of a layer's keys and values in a block: pieces of one size, one per plane and KV head.

    Attributes:
        offset: bytes from the block's start to the layer's first piece.
        piece_bytes: bytes of a piece, the keys or the values of one KV head.
    """

    offset: int
    kv_heads: int
    head_dim: int
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A backend's layout of a slot of the pool. Part of the block hash's namespace: different layouts share no blocks.

    A slot is [num_layers, planes, num_kv_heads, block_size, head_dim] values of ``dtype``. Two planes are K and V; rows
    of one plane are both, latents and a rotated key. ``version`` names the backend's layout inside a (layer, head)
    piece. With the types "fp8_e4m3" and "int8" a piece has block_size * head_dim bytes and block_size float32 scales,
    one per token, or two if rows are latents and a key.

    With ``layers``, a slot is [planes, kv_heads, block_size, head_dim] values of one layer after the other, each with
    its own shape. None: a layer without keys and values of its own.

    Recurrent state has ``state_bytes`` per sequence, in ``state_pages`` separate slots. ``state_layout``: the layout of
    its pieces there, for backends that cut it into pieces; None if a slot is too small. A rank on a GPU has only its
    own pieces; with ``state_shards`` above 1 they are in its shard of a pool divided into that many.
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
        """Return the KV heads of a layer's place; None if the layer has no place."""
        return self.layers[layer] if self.layers else LayerHeads(self.num_kv_heads, self.head_dim)

    def place(self, layer: int) -> LayerPlace:
        """Return the place of a layer. Raises Internal for a layer that has none."""
        heads = self.heads(layer)
        if heads is None:
            raise Internal(f"layer {layer} has no place in a block")
        offset = sum(self._layer_bytes(before) for before in range(layer))
        return LayerPlace(offset, heads.kv_heads, heads.head_dim, self._piece_bytes(heads.head_dim))

    @property
    def even(self) -> bool:
        """True if the places of all layers have one size, so that a slot is one array."""
        return not self.layers

    @property
    def rows_and_pieces(self) -> tuple[int, int]:
        """The number of rows of a slot, and of equal pieces of a row, by which KV heads are sharded; zeros if layers
        differ."""
        found = [self.heads(layer) for layer in range(self.num_layers)]
        kinds = {heads for heads in found if heads is not None}
        if len(kinds) > 1:
            return 0, 0
        return sum(heads is not None for heads in found) * self.planes, self.num_kv_heads

    @property
    def state_pages(self) -> int:
        """The number of slots of a sequence's state; 0 in a model without one."""
        return -(-self.state_bytes // self.block_bytes) if self.state_bytes else 0

    @property
    def working_pages(self) -> int:
        """The number of slots that a running sequence needs beside those of its tokens' blocks: a step reads one state
        and writes another, and the state after the last whole block is cached."""
        return 3 * self.state_pages

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of an 8-bit row."""
        return KV_SCALE_BYTES * (2 if self.planes == 1 else 1)

    @property
    def block_bytes(self) -> int:
        """Bytes of one slot. If layers differ and values are floating point, rounded up to whole pieces of each size,
        so that the pieces of one size in all slots are rows of a table."""
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
    """Build a model's layout. ``inside`` names the layout of a KV head's keys or values of one layer in a block;
    ``kv_cache_dtype`` is the flag of that name; ``state_chunk`` is an argument of
    :func:`pillion.engine.models.state_layout.state_layout`.

    The version also names the effect of ``max_model_len`` on the rotary embedding of some models, so that workers with
    two lengths share blocks only if both compute the same KV (I2). Raises ConfigError for a block size below 1.
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
    places = state_layout(states, layout.block_bytes, state_chunk)
    nbytes = state_bytes(states) if places is None else places.nbytes
    return replace(layout, state_bytes=nbytes, state_layout=places)


def checked_memory(memory: PoolPlace, num_slots: int, layout: KVLayout) -> tuple[memoryview, int]:
    """Return a pool's bytes and the number in use. Raises ConfigError if it is too small, read-only or a GPU's."""
    if not isinstance(memory, memoryview):
        raise ConfigError("this worker computes on the CPU, but the pool of its KV node is in GPU memory")
    needed = num_slots * layout.block_bytes
    if memory.nbytes < needed or memory.readonly:
        raise ConfigError(f"a pool of {num_slots} blocks needs {needed} writable bytes, not {memory.nbytes}")
    return memory.cast("B"), needed


def warm_up_batches(max_tokens: int, block_size: int, slots: int = 0) -> Iterator[StepBatch]:
    """Yield two steps over a pool's first slots: of ``max_tokens`` tokens and of one token; each samples one row. With
    ``slots`` above 0 only that many are used, repeatedly; the results are meaningless."""
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
    """Return the distinct rows of a step's samples, and for each of ``batch.sample_rows`` with logits its index among
    them. The last ``batch.pooled`` rows have no logits.

    Parallel samples of one prompt share a row, computed once. The indices are None if no row occurs twice.
    """
    rows = batch.sample_rows
    chosen = rows[: len(rows) - batch.pooled]
    if len(set(chosen.tolist())) == len(chosen):
        return rows, None
    distinct, places = np.unique(chosen, return_inverse=True)
    return np.concatenate([distinct, rows[len(chosen) :]]), places


def checked_copies(sources: Sequence[int], targets: Sequence[int], num_slots: int) -> list[tuple[int, int]]:
    """Pair up slots to copy. Raises Internal for lists of different length and for slots that the pool lacks."""
    copies = [(int(source), int(target)) for source, target in zip(sources, targets, strict=False)]
    slots = range(num_slots)
    if len(sources) != len(targets) or not all(slot in slots for pair in copies for slot in pair):
        raise Internal(f"cannot copy blocks {list(sources)} to {list(targets)} in a pool of {num_slots}")
    return copies


def check_slot(slot: int, max_adapters: int) -> None:
    """Raise Internal unless ``slot`` is one of a backend's ``max_adapters`` slots."""
    if not 0 <= slot < max_adapters:
        raise Internal(f"adapter slot {slot} is out of range: there are {max_adapters}")


PoolPlace: TypeAlias = "memoryview | MappedDevice"


class PackedAdapter(Protocol):
    """An adapter in a backend's weight layout; only the backend that packed it can place it. Immutable."""

    @property
    def nbytes(self) -> int:
        """Bytes of the adapter on the host or on the device."""


class BackendAdapters(Protocol):
    """The adapter slots of one backend, 0 .. max_adapters - 1; ``StepBatch.adapters`` contains their numbers.
    Loading has two phases, so that it never stalls a step:

        Backend.bind_adapters (once) --> take (slow, any thread) --> place (quick) --> steps that name the slot

    Another process reads an adapter and converts it into the backend's ``form``, so that loading does not compete with
    steps for the interpreter; ``take`` makes a packed adapter of the result.

    No lock is needed: packing touches nothing that steps use, and the owner calls ``place`` between steps. An adapter's
    memory is freed once its slot is overwritten and its owner has dropped it.
    """

    @property
    def max_adapters(self) -> int:
        """The number of slots."""

    def form(self) -> object:
        """Return the form into which another process converts adapters for this backend."""

    def build(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        """Pack an adapter from the output of ``form``. Thread-safe, concurrent with steps. If the form is plain, it is
        packed here, which takes cores and the interpreter from the steps.

        Raises ConfigError for a rank above ``max_rank`` and for layers or shapes that the model does not have.
        """

    def place(self, slot: int, packed: PackedAdapter) -> None:
        """Put an adapter into a slot. Takes a small part of a step's time.

        No launched step whose results have not been fetched may use the slot; the next launch may. Raises Internal for
        a slot that does not exist.
        """


A = TypeVar("A", bound=BackendAdapters)


def bound_adapters(adapters: A | None) -> A:
    """Return a backend's adapter slots. Raises Internal before ``bind_adapters``."""
    if adapters is None:
        raise Internal("adapters before bind_adapters")
    return adapters


def gives_vectors(backend: Backend) -> bool:
    """Return whether a backend's steps can return vectors of rows (StepBatch.pooled)."""
    return getattr(backend, "gives_vectors", False)


class BackendLost(Exception):  # noqa: N818  (a state, not a mistake)
    """Permanent failure of the device, raised by ``launch`` and ``wait``; the worker is restarted."""


class InFlightStep(Protocol):
    """A launched step whose results have not been fetched."""

    def choose(self, rows: SamplingRows) -> None:
        """Start to sample the tokens of a step launched without ``rows``. Called once, before :meth:`wait` and before
        the next launch. If this method raises, nothing of the step is still running."""

    def wait(self) -> Sampled:
        """Block until this step's tokens are on the host. Called once per step, in launch order.

        Raises the step's error. After the call, the step reads and writes no slot. A step without rows for which
        :meth:`choose` was not called has no tokens.
        """


class Backend(Protocol):
    """The interface of backends. A backend owns the weights and scratch memory, and borrows the pool.

        schedule --> launch(step k+1) --> wait(step k) --> commit(step k) --> schedule ...       running ahead
        schedule --> launch(step k+1) without rows --> wait, commit(step k) --> choose(step k+1) --> schedule ...
        schedule --> launch(step k) = copy_blocks, forward, sample --> wait --> commit --> ...   not running ahead

    Each step sees the writes of earlier steps, and the host waits only for sampled ids. The second line is for a step
    whose sampling depends on the tokens of the step before (grammars, penalties): its forward pass runs while the host
    processes those tokens, and its sampling is queued before the forward pass ends, so the device does not wait.
    Backends that do not run ahead are ``HostBackend``s.

    All calls of a backend and of its in-flight steps come from the step loop's thread, except ``adapters.take``. Only
    the pool's slots that a batch writes change. ``bind_pool`` raises ConfigError for a pool of another shape;
    ``launch`` raises Internal, only for defects, since the scheduler built the batch.
    """

    @property
    def max_steps_in_flight(self) -> int:
        """The max number of steps that may be launched before the results of the first are fetched: 1 for a backend
        that does not run ahead, 2 for a device with one step queued behind the running one, or the stages of a
        pipeline. Constant."""

    @property
    def layout(self) -> KVLayout:
        """The layout of KV, known before a pool is bound: the worker attaches with its name."""

    @property
    def vocab_size(self) -> int:
        """The number of columns of the logits."""

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Use ``memory``, writable and at least num_slots * layout.block_bytes bytes, as the paged KV pool; of a pool
        divided over GPUs, only the shards with the KV heads of this process."""

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> InFlightStep:
        """Start a step: copy whole slots, (source, target) pairs, in order; then write the batch's KV; then sample a
        token for each of the first ``sample_rows``, in that order, with the parameters ``rows``, and score the others.
        ``rows`` may be None for a backend that runs ahead, until :meth:`InFlightStep.choose`.

        A token id ``-1 - r`` is the token of row r of the previous launch, as numbered in its Sampled.token_ids. Such
        ids occur only as the one token of a decode, and only if the previous step's results were unknown when this one
        was planned. If this method raises, nothing of the step is still running.
        """

    @property
    def adapters(self) -> BackendAdapters | None:
        """The adapter slots; None before ``bind_adapters``."""

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        """Allocate empty slots for adapters up to ``max_rank``. At most once, before ``bind_pool``; compiles kernels.

        On a GPU slots are allocated for that rank; elsewhere an adapter has the size of its own rank. Raises
        ConfigError if this backend cannot run the model with adapters.
        """

    def close(self) -> None:
        """End threads and release the pool. Idempotent; the last call."""

    def warm_up(self, max_tokens: int) -> None:
        """Pay one-time costs (allocation, compilation) before the first request. Touches no committed slot."""
