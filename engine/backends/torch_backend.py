"""The backend that runs on any processor: plain torch on the CPU.

Lifecycle: made (weights loaded) -> bind_pool -> forward, forward, ... -> close, which releases the memory. warm_up may
be called at any time and uses memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pillion.engine.backends.backend import (
    DevicePool,
    checked_copies,
    checked_memory,
    kv_layout,
    warm_up_batches,
)
from pillion.engine.backends.batch import StepBatch
from pillion.engine.backends.host_backend import FinishedStep, run_at_once
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.checkpoints.weights import DTYPES, load_weights
from pillion.engine.models.decoder import run_decoder
from pillion.engine.models.model_config import load_config
from pillion.engine.models.rope import make_ropes
from pillion.engine.sampling.sampling_rows import SamplingRows
from pillion.errors import Internal
from pillion.kernels.torch.torch_attention import StepAttention


class TorchBackend:
    """Implements ``pillion.engine.backends.host_backend.HostBackend``; :class:`Backend` has the contract."""

    runs_ahead = False

    def __init__(self, prepared: PreparedModel, block_size: int, threads: int) -> None:
        """Loads the weights. ``threads`` sets torch's threads for the whole process; 0 leaves torch's default.

        Raises ConfigError for weights that do not fit the config.
        """
        if threads:
            torch.set_num_threads(threads)
        self._config = load_config(prepared.folder)
        self.layout = kv_layout(prepared, block_size)
        self.vocab_size = self._config.vocab_size
        self._dtype = DTYPES[prepared.dtype]
        self._ropes = make_ropes(self._config, prepared.max_model_len)
        self._weights = load_weights(prepared.folder, self._config, self._dtype)
        self._pool: torch.Tensor | None = None

    def bind_pool(self, memory: memoryview | DevicePool, num_slots: int) -> None:
        """Uses ``memory`` as the paged KV pool. Raises ConfigError for memory that is too small or read-only."""
        view, needed = checked_memory(memory, num_slots, self.layout)
        flat = torch.frombuffer(view, dtype=torch.uint8, count=needed)
        self._pool = self._shaped(flat.view(self._dtype), num_slots)

    def close(self) -> None:
        """Releases the pool, so that its mapping can be closed. Idempotent."""
        self._pool = None

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Writes the batch's KV and returns float32 logits [R, vocab_size]."""
        if self._pool is None:
            raise Internal("forward before bind_pool")
        return self._run(self._pool, batch)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole slots, sources[i] to targets[i], one after another. The targets are leased to this worker.

        Raises Internal for lists of different length and for slots that the pool does not have.
        """
        if self._pool is None:
            raise Internal("copy_blocks before bind_pool")
        for source, target in checked_copies(sources, targets, len(self._pool)):
            self._pool[target].copy_(self._pool[source])

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows) -> FinishedStep:
        """Runs the whole step before it returns."""
        return run_at_once(self, batch, copies, rows)

    def warm_up(self, max_tokens: int) -> None:
        """Touches all weights and lets the allocator see a full step, over scratch memory."""
        block_size = self.layout.block_size
        blocks = -(-max_tokens // block_size)
        pool = self._shaped(
            torch.zeros(blocks * self.layout.block_bytes // self._dtype.itemsize, dtype=self._dtype), blocks
        )
        for batch in warm_up_batches(max_tokens, block_size):
            self._run(pool, batch)

    def _shaped(self, values: torch.Tensor, num_slots: int) -> torch.Tensor:
        layout = self.layout
        return values.view(num_slots, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        config = self._config
        with torch.inference_mode():
            attention = StepAttention(
                pool,
                batch,
                num_heads=config.num_heads,
                scale=config.attention_scale,
                windows=config.sliding_windows,
                softcap=config.attention_softcap,
            )
            # Several answers to one prompt sample the same row, whose logits are computed once.
            rows, places = np.unique(batch.sample_rows, return_inverse=True)
            logits = run_decoder(
                config,
                self._weights,
                self._ropes,
                attention,
                _indices(batch.token_ids),
                _indices(batch.positions),
                _indices(rows),
            )
            return logits if len(rows) == len(places) else logits[_indices(places)]


def _indices(values: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))
