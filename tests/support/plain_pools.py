"""Pools in the plain layout: writing of keys and values, and conversion to and from the CPU kernels' layout."""

from __future__ import annotations

import torch

from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.step import StepBatch


def write_kv(pool: torch.Tensor, layer: int, batch: StepBatch, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write keys and values [T, kv_heads, head_dim] of the batch's T tokens into their rows of ``layer``."""
    block_size = pool.shape[4]
    for sequence, table in enumerate(batch.block_tables):
        for row in range(batch.query_starts[sequence], batch.query_starts[sequence + 1]):
            position = int(batch.positions[row])
            slot, offset = int(table[position // block_size]), position % block_size
            pool[slot, layer, 0, :, offset] = keys[row]
            pool[slot, layer, 1, :, offset] = values[row]


def pack_pool(pool: torch.Tensor) -> torch.Tensor:
    """Convert a pool in the plain layout [..., 2, kv_heads, block_size, head_dim] to the layout of the CPU kernels, of
    the same shape and type."""
    pair, (block_size, head_dim) = _pair(pool), pool.shape[-2:]
    return _transposed(pool, (block_size // LANES, LANES, head_dim // pair, pair), (block_size // pair, pair, head_dim))


def unpack_pool(packed: torch.Tensor) -> torch.Tensor:
    """Convert a pool in the layout of the CPU kernels back to the plain one: the inverse of :func:`pack_pool`."""
    pair, (block_size, head_dim) = _pair(packed), packed.shape[-2:]
    return _transposed(
        packed, (block_size // LANES, head_dim // pair, LANES, pair), (block_size // pair, head_dim, pair)
    )


def _pair(pool: torch.Tensor) -> int:
    """Return the number of neighbouring values in a lane: two bfloat16, or one float32."""
    return 2 if pool.dtype == torch.bfloat16 else 1


def _transposed(pool: torch.Tensor, keys: tuple[int, ...], values: tuple[int, ...]) -> torch.Tensor:
    """View K and V in the shapes ``keys`` and ``values``, and swap the two dimensions before a key's pair, and the last
    two dimensions of V."""
    k, v = pool.unbind(-4)
    lead = k.shape[:-2]
    turned = (k.reshape(*lead, *keys).transpose(-3, -2), v.reshape(*lead, *values).transpose(-2, -1))
    return torch.stack([part.reshape(k.shape) for part in turned], -4)
