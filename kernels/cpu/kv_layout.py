"""How the CPU kernels keep keys and values inside a (layer, head) piece of the pool.

The pool is [slots, layers, 2, kv_heads, piece], K before V; a piece has block_size * head_dim values. Inside, tokens
stand in groups of 16, one for each lane of a vector (block sizes are multiples of 16):

    bfloat16   K  [block_size / 16][head_dim / 2][16 tokens][2]     a lane's pair: two neighbours of one token's key
               V  [block_size / 2 pairs of tokens][head_dim][2]     a lane's pair: one column of two neighbour tokens
    float32    K  [block_size / 16][head_dim][16 tokens]
               V  [block_size][head_dim]

So scores of 16 tokens are one vector, and the product with V adds up tokens pair by pair: both are dot products of
bfloat16 pairs without any shuffle (:meth:`kernels.cpu.emit.Kernel.dot`), and a group has the same bytes in K and V.
"""

from __future__ import annotations

import torch

from kernels.cpu.isa import LANES

# Part of the block hash's namespace: other layouts share no blocks (I2).
LAYOUT_VERSION = "lanes16-1"


def group_bytes(head_dim: int, bf16: bool) -> int:
    """Of 16 tokens in K, or in V."""
    return LANES * head_dim * (2 if bf16 else 4)


def pack_pool(pool: torch.Tensor) -> torch.Tensor:
    """From the plain layout [..., 2, kv_heads, block_size, head_dim] to this one, of the same shape and type."""
    *front, two, heads, block_size, head_dim = pool.shape
    assert two == 2
    groups = block_size // LANES
    keys, values = pool.unbind(-4)
    lead = (*front, heads)
    dims = len(lead)
    order = list(range(dims))
    if pool.dtype == torch.bfloat16:
        keys = keys.view(*lead, groups, LANES, head_dim // 2, 2).permute(*order, dims, dims + 2, dims + 1, dims + 3)
        values = values.view(*lead, block_size // 2, 2, head_dim).transpose(-1, -2)
    else:
        keys = keys.view(*lead, groups, LANES, head_dim).transpose(-1, -2)
    shape = (*lead, block_size, head_dim)
    return torch.stack((keys.reshape(shape), values.reshape(shape)), -4)


def unpack_pool(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_pool`."""
    *front, two, heads, block_size, head_dim = packed.shape
    assert two == 2
    groups = block_size // LANES
    keys, values = packed.unbind(-4)
    lead = (*front, heads)
    dims = len(lead)
    order = list(range(dims))
    if packed.dtype == torch.bfloat16:
        keys = keys.view(*lead, groups, head_dim // 2, LANES, 2).permute(*order, dims, dims + 2, dims + 1, dims + 3)
        values = values.view(*lead, block_size // 2, head_dim, 2).transpose(-1, -2)
    else:
        keys = keys.view(*lead, groups, head_dim, LANES).transpose(-1, -2)
    shape = (*lead, block_size, head_dim)
    return torch.stack((keys.reshape(shape), values.reshape(shape)), -4)
