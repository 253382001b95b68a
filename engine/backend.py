"""The seam between scheduling and arithmetic. A backend runs one step's batch over the mapped pool and gives logits;
torch on the CPU, the CPU kernels and the GPU kernels are backends, and no code above this line knows which one runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.batch import StepBatch
from pillion.errors import ConfigError, Internal

if TYPE_CHECKING:
    # The layout's arithmetic is also for those who have no torch: the gateway and the supervisor.
    import torch


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


def checked_memory(memory: memoryview, num_slots: int, layout: KVLayout) -> tuple[memoryview, int]:
    """A pool's memory as bytes, and how many of them are in use. Raises ConfigError for too few, or read-only ones."""
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


class Backend(Protocol):
    """Owns weights and scratch; borrows the pool.

    Threads: every call comes from the step loop's thread, one at a time. What changes: only the pool's slots that a
    batch writes, and the logits of the last forward, whose memory the next one may use again. What raises:
    ``bind_pool`` raises ConfigError for a pool of another shape; ``forward`` raises Internal for defects alone: the
    scheduler made its batch.
    """

    @property
    def layout(self) -> KVLayout:
        """Known before a pool is bound, so that the worker can attach with it."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""

    def bind_pool(self, memory: memoryview, num_slots: int) -> None:
        """Use ``memory``, at least num_slots * layout.block_bytes bytes and writable, as the paged cache."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's KV and return float32 logits [R, vocab_size] of ``sample_rows``, in that order."""

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole slots, each source to the target at its place, before the next forward reads them. Targets are
        leased to this worker."""

    def close(self) -> None:
        """End threads and let go of the pool. Idempotent; no other call comes after it."""

    def warm_up(self, max_tokens: int) -> None:
        """Pay one-time costs (allocation, compilation) before the first request. Touches no committed slot."""
