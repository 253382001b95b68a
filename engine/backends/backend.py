"""The seam between scheduling and arithmetic. A backend runs one step's batch over the mapped pool and gives logits;
torch on the CPU, the CPU kernels and the GPU kernels are backends, and no code above this line knows which one runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pillion.engine.backends.batch import StepBatch
from pillion.errors import ConfigError, Internal

if TYPE_CHECKING:
    # The layout's arithmetic is also for those who have no torch: the gateway and the supervisor.
    import torch

    from pillion.engine.sampling.sampling_rows import SamplingRows
    from pillion.engine.scheduling.step_plan import Sampled


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


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The flight of a step that was run at once."""

    sampled: Sampled

    def wait(self) -> Sampled:
        """Waits for nothing."""
        return self.sampled


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


class HostBackend(Backend, Protocol):
    """A backend whose steps run on the calling thread, so that their parts can be called one by one.

    The logits of a forward stay until the next one, which may use their memory again.
    """

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's KV and return float32 logits [R, vocab_size] of ``sample_rows``, in that order."""

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole slots, each source to the target at its place, before the next forward reads them. Targets are
        leased to this worker."""
