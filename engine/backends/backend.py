"""The seam between scheduling and arithmetic. A backend runs one step's batch over the mapped pool and gives logits;
torch on the CPU, the CPU kernels and the GPU kernels are backends, and no code above this line knows which one runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pillion.engine.backends.batch import StepBatch
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.model_config import load_config
from pillion.engine.models.rope_config import served_variant
from pillion.engine.sampling.sampling_rows import SamplingRows
from pillion.engine.scheduling.step_plan import Sampled
from pillion.errors import ConfigError, Internal

# Rows of head_dim values, one per token: the plainest inside of a (layer, head) piece. Part of the namespace (I2).
LAYOUT_VERSION = "rows-1"
# What a layout of 8-bit KV calls its type, and the bytes of a row's scale.
FP8_E4M3 = "fp8_e4m3"
FP8_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a backend cuts a slot of the pool. Part of the block hash's namespace: other layouts share no blocks.

    A slot is [num_layers, 2, num_kv_heads, block_size, head_dim] values of ``dtype``, K before V; what one
    (layer, head) piece looks like inside is the backend's own, named by ``version``. Of type "fp8_e4m3" a piece is
    [block_size, head_dim] bytes and behind them [block_size] float32 scales, one per token.
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
        if self.dtype == FP8_E4M3:
            row = self.head_dim + FP8_SCALE_BYTES
        else:
            row = self.head_dim * {"bfloat16": 2, "float16": 2, "float32": 4}[self.dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * row


def kv_layout(prepared: PreparedModel, block_size: int, inside: str = LAYOUT_VERSION, dtype: str = "") -> KVLayout:
    """How a backend cuts a slot for this model; ``inside`` names its layout of a piece, ``dtype`` the type of KV where
    it is not that of the weights. Imports no torch.

    The version also names what ``max_model_len`` means to the rotary embedding of some models, so that workers which
    serve such a model at two lengths share no block that only one of them could have computed (I2).
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
        dtype=dtype or prepared.dtype,
    )


def checked_memory(memory: memoryview | DevicePool, num_slots: int, layout: KVLayout) -> tuple[memoryview, int]:
    """A pool's memory as bytes, and how many of them are in use. Raises ConfigError for too few, read-only ones, and
    those of a GPU."""
    if not isinstance(memory, memoryview):
        raise ConfigError("this worker computes on the CPU, its KV node keeps blocks in a GPU's memory")
    needed = num_slots * layout.block_bytes
    if memory.nbytes < needed or memory.readonly:
        raise ConfigError(f"a pool of {num_slots} blocks needs {needed} writable bytes, not {memory.nbytes}")
    return memory.cast("B"), needed


def warm_up_batches(max_tokens: int, block_size: int) -> Iterator[StepBatch]:
    """Two steps in a pool's first slots, of ``max_tokens`` tokens of a text and of one; each samples a row."""
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


def checked_copies(sources: Sequence[int], targets: Sequence[int], num_slots: int) -> list[tuple[int, int]]:
    """Pairs of slots to copy. Raises Internal for lists of different length and for slots that the pool lacks."""
    copies = [(int(source), int(target)) for source, target in zip(sources, targets, strict=False)]
    slots = range(num_slots)
    if len(sources) != len(targets) or not all(slot in slots for pair in copies for slot in pair):
        raise Internal(f"cannot copy blocks {list(sources)} to {list(targets)} in a pool of {num_slots}")
    return copies


class DevicePool(Protocol):
    """A pool in a GPU's memory, mapped into this process."""

    @property
    def address(self) -> int:
        """On the device."""

    @property
    def size_bytes(self) -> int:
        """From there on."""


class BackendLost(Exception):  # noqa: N818  (a state, not a mistake)
    """The device has failed for good: every later step would. The worker dies of it, and its supervisor starts another.

    Raised by ``launch`` and ``land``.
    """


class InFlightStep(Protocol):
    """A step from its launch to its landing."""

    def wait(self) -> Sampled:
        """Blocks until this step's tokens are on the host; called once, of flights in the order of their launch.

        Raises what the step failed with. Landed or failed, the step reads and writes no slot any more.
        """


class Backend(Protocol):
    """Owns weights and scratch; borrows the pool.

        schedule --> launch(step k+1) --> land(step k) --> commit(step k) --> schedule ...       it runs ahead
        schedule --> launch(step k) = copy_blocks, forward, sample --> land --> commit --> ...   it does not

    A backend that runs ahead queues steps on its device, at most two: each one sees what those before it wrote, and the
    host waits for nothing but sampled ids. It has ``launch`` alone; ``copy_blocks`` and ``forward`` belong to those
    that do not (:class:`HostBackend`).

    Threads: every call comes from the step loop's thread, one at a time; so do those of a flight. What changes: only
    the pool's slots that a batch writes. What raises: ``bind_pool`` raises ConfigError for a pool of another shape;
    ``launch`` raises Internal for defects alone: the scheduler made its batch.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before the one before it has landed. Never changes."""

    @property
    def layout(self) -> KVLayout:
        """Known before a pool is bound, so that the worker can attach with it."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""

    def bind_pool(self, memory: memoryview | DevicePool, num_slots: int) -> None:
        """Use ``memory``, at least num_slots * layout.block_bytes bytes and writable, as the paged cache."""

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows) -> InFlightStep:
        """Begin a step: copy whole slots, (source, target) pairs, pair after pair; then write the batch's KV; then
        choose a token for each of ``sample_rows`` as ``rows`` say, in that order.

        A token id ``-1 - r`` stands for the token that row r of the step launched before this one chooses, counted as
        in its Sampled.token_ids. It occurs only where that step had not landed when this one was planned, and only as
        the one token of a decode. Where this raises, nothing of the step runs any more.
        """

    def close(self) -> None:
        """End threads and let go of the pool. Idempotent; no other call comes after it."""

    def warm_up(self, max_tokens: int) -> None:
        """Pay one-time costs (allocation, compilation) before the first request. Touches no committed slot."""
