"""Pools in the plain layout, for tests: writes keys and values, and turns the layout of the CPU kernels back."""

from __future__ import annotations

import torch

from pillion.kernels.cpu.attention.kv_layout import LANES, _pair, _turned
from pillion.kernels.step import StepBatch


def write_kv(pool: torch.Tensor, layer: int, batch: StepBatch, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Writes keys and values [T, kv_heads, head_dim] of the batch's T tokens into their rows of ``layer``."""
    block_size = pool.shape[4]
    for sequence, table in enumerate(batch.block_tables):
        for row in range(batch.query_starts[sequence], batch.query_starts[sequence + 1]):
            position = int(batch.positions[row])
            slot, offset = int(table[position // block_size]), position % block_size
            pool[slot, layer, 0, :, offset] = keys[row]
            pool[slot, layer, 1, :, offset] = values[row]


def unpack_pool(packed: torch.Tensor) -> torch.Tensor:
    """Converts a pool in this layout back to the plain one, as the inverse of :func:`pack_pool`."""
    pair, (block_size, head_dim) = _pair(packed), packed.shape[-2:]
    return _turned(packed, (block_size // LANES, head_dim // pair, LANES, pair), (block_size // pair, head_dim, pair))
