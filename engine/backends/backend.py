"""The interface between scheduling and arithmetic: a backend runs one step's batch over the mapped KV pool.

There are three: torch on the CPU, the CPU kernels and the GPU kernels. No code outside of this package knows which one
runs. The functions here are for backends and import no torch: gateway and supervisor compute sizes with them.

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

# In this layout of KV, the piece of a layer and head has one row of head_dim values per token. The layout is part of
# the namespace of blocks (I2).
LAYOUT_VERSION = "rows-1"
# KV in 8 bits has these types, by the value of --kv-cache-dtype.
FP8_E4M3 = "fp8_e4m3"
EIGHT_BIT_KV = {"fp8": FP8_E4M3, "int8": "int8"}


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Says where a block has a layer's keys and values: pieces of one size, those of all KV heads for each plane.

    Attributes:
        offset: bytes from the block's begin to the layer's first piece.
        piece_bytes: bytes of a piece, which has the keys or the values of one KV head.
    """

    offset: int
    kv_heads: int
    head_dim: int
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a backend lays out a slot of the pool. It is part of the block hash's namespace: two layouts share
    no blocks.

    A slot is [num_layers, planes, num_kv_heads, block_size, head_dim] values of ``dtype``. Two planes are K and V; one
    has rows that are both, latents and a rotated key. ``version``
    names the backend's own layout of a (layer, head) piece. With the types "fp8_e4m3" and "int8" a piece has
    block_size * head_dim bytes and block_size float32 scales, one per token; two, where rows are latents and a key.

    Where ``layers`` is not empty, a slot is [planes, kv_heads, block_size, head_dim] values of one layer after the
    other, each with its own numbers. A layer that is None there has no place in the slot.

    What layers carry from token to token has ``state_bytes``, and lies in ``state_pages`` slots of its own.
    ``state_layout`` are those of its pieces in these slots, for backends that have it in pieces; None where a slot is
    too small. A rank on a GPU has the places of its own pieces alone; with ``state_shards`` above 1 they are in its
    shard of a pool that is divided over so many.
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
        """Return the KV heads that have a place for a layer; None where the layer has no place."""
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
        """Says whether all layers have places of one size, so that a slot is one array."""
        return not self.layers

    @property
    def rows_and_pieces(self) -> tuple[int, int]:
        """Gives how many rows a slot has, and how many pieces of one size a row, by which KV heads can be shared out;
        zeros where layers that have a place differ."""
        found = [self.heads(layer) for layer in range(self.num_layers)]
        kinds = {heads for heads in found if heads is not None}
        if len(kinds) > 1:
            return 0, 0
        return sum(heads is not None for heads in found) * self.planes, self.num_kv_heads

    @property
    def state_pages(self) -> int:
        """Gives the number of slots that a sequence's state takes; 0 in a model without one."""
        # Each step asks for this number, and most models have no state.
        return -(-self.state_bytes // self.block_bytes) if self.state_bytes else 0

    @property
    def working_pages(self) -> int:
        """Gives the number of slots that a running sequence needs beside those of its tokens' blocks: a step reads one
        state and writes another, and one stays after the last whole block."""
        return 3 * self.state_pages

    @property
    def scale_bytes(self) -> int:
        """Gives the number of bytes of the scales of a row in 8 bits."""
        return KV_SCALE_BYTES * (2 if self.planes == 1 else 1)

    @property
    def block_bytes(self) -> int:
        """Gives the number of bytes of one slot. Where layers differ and values are kept in floating point, not as
        8-bit codes, it is rounded up to whole pieces of each size, so that the pieces of one size in all slots are rows
        of a table."""
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
    """Make a model's layout. ``inside`` names the layout of a KV head's keys or values of one layer in a block;
    ``kv_cache_dtype`` is the flag of that name; ``state_chunk`` is that of
    :func:`pillion.engine.models.state_layout.state_layout`.

    The version also names the effect of ``max_model_len`` on the rotary embedding of some models, so that workers which
    serve such a model with two lengths share blocks only if both compute the same KV (I2). Raises ConfigError for a
    block size below 1.
    """
    if block_size < 1:
        raise ConfigError(f"a block of {block_size} tokens holds nothing; --block-size must be above 0")
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
    """Return a pool's bytes and how many are in use. Raises ConfigError if it is too small, read-only or a GPU's."""
    if not isinstance(memory, memoryview):
        raise ConfigError("this worker computes on the CPU, its KV node keeps blocks in a GPU's memory")
    needed = num_slots * layout.block_bytes
    if memory.nbytes < needed or memory.readonly:
        raise ConfigError(f"a pool of {num_slots} blocks needs {needed} writable bytes, not {memory.nbytes}")
    return memory.cast("B"), needed


def warm_up_batches(max_tokens: int, block_size: int, slots: int = 0) -> Iterator[StepBatch]:
    """Yield two steps over a pool's first slots: of ``max_tokens`` tokens and of one token; each samples one row. With
    ``slots`` above 0 only so many are used, again and again: what such a step computes is worth nothing."""
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
    """Return the rows that a step computes to the end, and the place among them of each of ``batch.sample_rows`` whose
    logits are wanted. The last ``batch.pooled`` rows have none.

    Several answers to one prompt sample the same row, computed once. The places are None where no row occurs twice.
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
    """Raise Internal for a slot that a backend of ``max_adapters`` slots does not have."""
    if not 0 <= slot < max_adapters:
        raise Internal(f"adapter slot {slot} is none of {max_adapters}")


# The pool's memory is the host's, or a device's.
PoolPlace: TypeAlias = "memoryview | MappedDevice"


class PackedAdapter(Protocol):
    """An adapter in the form that a backend multiplies by; only the backend that packed it can place it.
    Immutable."""

    @property
    def nbytes(self) -> int:
        """Gives the number of bytes that the adapter occupies, on the host or on the device, while anybody holds it."""


class BackendAdapters(Protocol):
    """The slots for adapters of one backend, 0 .. max_adapters - 1, whose numbers stand in ``StepBatch.adapters``.
    Loading has two phases, so that it never stalls a step:

        Backend.bind_adapters (once) --> take (slow, any thread) --> place (quick) --> steps that name the slot

    So that this work shares not even the interpreter with steps, another process reads an adapter and brings it into
    the backend's ``form``, of which ``take`` makes a packed adapter.

    No lock is needed: packing touches nothing that steps use, and the owner calls ``place`` between steps. An adapter's
    memory is free when its slot has another one and its owner has dropped it.
    """

    @property
    def max_adapters(self) -> int:
        """Gives the number of slots."""

    def form(self) -> object:
        """Return the form into which another process brings adapters for this backend."""

    def take(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        """Make a packed adapter of what the form gave. Any thread may call it, beside steps. Where the form is plain,
        the packing is done here, and takes cores and the interpreter from the steps.

        Raises ConfigError for a rank above ``max_rank`` and for layers or shapes that the model does not have.
        """

    def place(self, slot: int, packed: PackedAdapter) -> None:
        """Put an adapter into a slot. Takes no longer than a small part of a step.

        No launched step whose results have not been fetched may use the slot, and a step may use it from its next
        launch on. Raises Internal for a slot that does not exist.
        """


A = TypeVar("A", bound=BackendAdapters)


def bound_adapters(adapters: A | None) -> A:
    """Return a backend's slots for adapters. Raises Internal where ``bind_adapters`` has made none."""
    if adapters is None:
        raise Internal("adapters before bind_adapters")
    return adapters


def gives_vectors(backend: Backend) -> bool:
    """Return whether a backend's steps can give the vectors of rows (StepBatch.pooled)."""
    return getattr(backend, "gives_vectors", False)


class BackendLost(Exception):  # noqa: N818  (a state, not a mistake)
    """Says that the device has failed for good; ``launch`` and ``wait`` raise it, and the worker is started again."""


class InFlightStep(Protocol):
    """A step that was launched and whose results have not been fetched."""

    def choose(self, rows: SamplingRows) -> None:
        """Begin to choose the tokens of a step that was launched without ``rows``. It is called once, before
        :meth:`wait` and before the next launch. If this method raises, nothing of the step runs any more."""

    def wait(self) -> Sampled:
        """Block until this step's tokens are on the host. It is called once for each step, in launch order.

        Raises the error that the step failed with. After the call, the step reads and writes no slot any more. A step
        whose tokens nobody began to choose has none.
        """


class Backend(Protocol):
    """Runs steps: it owns the weights and scratch memory, and borrows the pool.

        schedule --> launch(step k+1) --> wait(step k) --> commit(step k) --> schedule ...       it runs ahead
        schedule --> launch(step k+1) without rows --> wait, commit(step k) --> choose(step k+1) --> schedule ...
        schedule --> launch(step k) = copy_blocks, forward, sample --> wait --> commit --> ...   it does not

    Each step sees what earlier steps wrote, and the
    host waits only for sampled ids. The second line is for a step whose choices depend on the tokens of the step before
    (grammars, penalties): its forward pass runs while the host takes those tokens, and its sampling is queued behind
    it before it has ended, so the device does not wait. Backends that do not run ahead are ``HostBackend``s.

    Every call of a backend and of its in-flight steps comes from the step loop's thread, but for ``adapters.take``.
    Only the pool's slots that a batch writes change. ``bind_pool`` raises ConfigError for a pool of another shape;
    ``launch`` raises Internal, and only for defects, since the scheduler made the batch.
    """

    @property
    def max_steps_under_way(self) -> int:
        """Gives how many steps may be launched before the results of the first of them are fetched: 1 for a backend
        that does not run ahead, 2 for a device that has one step queued behind the one that it runs, and the stages of
        a pipeline. It never changes."""

    @property
    def layout(self) -> KVLayout:
        """Gives the layout of KV, known before a pool is bound, because the worker names it when it attaches."""

    @property
    def vocab_size(self) -> int:
        """Gives the number of columns of the logits."""

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Use ``memory``, at least num_slots * layout.block_bytes bytes and writable, as the paged KV pool; of a pool
        divided over GPUs, only the shards that have the KV heads of this process."""

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> InFlightStep:
        """Begin a step: copies whole slots, (source, target) pairs, one after another; then writes the batch's KV;
        then chooses a token for each of the first ``sample_rows``, in that order, with the parameters ``rows``, and
        scores the others. ``rows`` may be None for a backend that runs ahead: :meth:`InFlightStep.choose` brings them.

        A token id ``-1 - r`` stands for the token that row r of the previous launch chooses, counted as in its
        Sampled.token_ids. Such ids occur only as the one token of a decode, and only if the previous step's results
        were not known when this one was planned. If this method raises, nothing of the step runs any more.
        """

    @property
    def adapters(self) -> BackendAdapters | None:
        """Gives the slots for adapters; None before ``bind_adapters``."""

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        """Make empty slots for adapters up to ``max_rank``. At most once, before ``bind_pool``; compiles kernels.

        On a GPU slots take memory for that rank; elsewhere an adapter takes what its own rank needs. Raises
        ConfigError where this backend cannot run the model with adapters.
        """

    def close(self) -> None:
        """End threads and releases the pool. Idempotent; no other call comes after it."""

    def warm_up(self, max_tokens: int) -> None:
        """Pay one-time costs (allocation, compilation) before the first request. It touches no committed slot."""
